"""A worker: it reads and decodes the batches that the trainer plans, on the event loop of its process.

A subclass is the transport: ``main.py`` has that of a worker process on the trainer's machine.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from functools import partial

import numpy as np

from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.framing import MAX_MESSAGE_BYTES, ProtocolError
from aiofeed.ipc.ring import Slot, SlotPool
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.errors import CollateError, FeedError, add_note
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.statistics import EpochStats, new_events
from aiofeed.kernel.engine.admission import MemoryBudget
from aiofeed.kernel.engine.assembly import AssemblyOptions
from aiofeed.kernel.engine.concurrency import Tuner
from aiofeed.kernel.engine.engine import Engine
from aiofeed.kernel.engine.fetch.choose import builder_factory, new_fetcher
from aiofeed.kernel.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.kernel.runtime.tensors import unchanged
from aiofeed.kernel.sampling.epochs import EpochStart, Step
from aiofeed.workers import protocol
from aiofeed.workers.spawn import WorkerConfig
from aiofeed.workers.worker_engine import Outbox, PermittedAssembly, WorkerPlan, dump, encoding_builder

_UNBOUNDED = 1 << 30
_ADVICE = 'make collate_fn (or the decoder) return tensors and plain values, or use engine="thread"'


class Worker:
    """A worker, on its event loop.

    Attributes:
        loop_thread: The event loop and the threads, not started.
    """

    def __init__(self, worker_config: WorkerConfig, number: int) -> None:
        self.loop_thread: EventLoopThread = EventLoopThread(
            read_threads=min(worker_config.most_reads(number), MOST_READ_THREADS),
            decode_threads=worker_config.share(worker_config.decode_threads, number),
        )
        self._config = worker_config
        self._number = number
        self._plans: asyncio.Queue[WorkerPlan] = asyncio.Queue()
        self._tickets = itertools.count()
        self._requests: dict[int, asyncio.Future[protocol.ReplacementAnswer]] = {}
        self._may_decode: set[int] = set()
        self._outbox = Outbox(self.send)
        self._engine: Engine | None = None

    def send(self, message: protocol.FromWorker, slot: Slot | None = None) -> None:
        """Send a message to the trainer, with the slot of its batch."""
        raise NotImplementedError

    async def run(self) -> None:
        """Open the source and assemble batches, until cancelled."""
        source = self._config.source
        try:
            await source.open()
        except BaseException as error:  # the user's coroutine may raise anything; the trainer raises it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            add_note(error, f"in {type(source.given).__name__}.open()")
            self.send(protocol.WorkerEnded(describe(error)))
            return
        self.loop_thread.at_stop(source.aclose)
        self._engine = self._new_engine()
        self.send(protocol.WorkerReady())
        await self._engine.run()

    async def _steps(self) -> AsyncGenerator[Step, None]:
        while True:
            if self._engine is not None and self._plans.empty():
                # There is no batch to read, so reads are not what planning waits for.
                self._engine.admission.waited_for_reads = False
            plan = await self._plans.get()
            yield EpochStart(EpochStats(events=new_events()))  # statistics of this batch alone
            yield plan

    def _new_engine(self) -> Engine:
        """Return the engine, which puts its batches into the outbox; see ``PermittedAssembly``."""
        config, executor = self._config, self.loop_thread.decode_pool
        fetcher = new_fetcher(
            config.source,
            config.decode,
            config.collate_fn,
            length=config.length,
            policy=config.policy,
            cache=config.cache,
            own_process=True,
        )
        executor.host = fetcher.thread
        limits = ResolvedLimits(
            read_concurrency=config.share(config.read_concurrency, self._number),
            decode_threads=config.share(config.decode_threads, self._number),
            # The trainer bounds batches and bytes; here only reads and threads are bounded.
            prefetch_batches=_UNBOUNDED,
            memory_bytes=_UNBOUNDED,
            device_batches=_UNBOUNDED,
        )
        tuner = Tuner(
            decode_threads=limits.decode_threads,
            threads_given=config.threads_given,
            read_concurrency=limits.read_concurrency,
            reads_given=config.reads_given,
            reads_most=config.most_reads(self._number),
        )
        options = AssemblyOptions(
            fetcher=fetcher,
            new_builder=partial(encoding_builder, builder_factory(fetcher, config.collate_fn, staged=False)),
            wrap=unchanged,
            memory=SlotPool(config.keep, _ADVICE, single_reader=True, dump=dump),
            executor=executor,
            policy=config.policy,
            tuner=tuner,
            loop_delay_s=self.loop_thread.loop_delay_s,
        )
        return Engine(
            self._steps(),
            partial(
                PermittedAssembly,
                options=options,
                may_decode=self._may_decode,
                outbox=self._outbox,
                reports=not config.in_order,
            ),
            batch_size=1,
            queue=self._outbox,
            limits=limits,
            budget=MemoryBudget(sys.maxsize),
            in_order=False,
            policy=config.policy,
            length=config.length,
            counts_failures=False,
            call=lambda function: function(),
        )

    async def request_index(self, serial: int, position: int) -> int:
        """Ask the trainer for the index at a position of the epoch's order; ``FeedError`` if there is no order."""
        ticket = next(self._tickets)
        self._requests[ticket] = asyncio.get_running_loop().create_future()
        self.send(protocol.ReplacementRequest(ticket, serial, position))
        try:
            answer = await self._requests[ticket]
        finally:
            del self._requests[ticket]
        if answer.index is None:
            raise FeedError(f"the epoch has no order with a position {position}")
        return answer.index

    def received(self, message: protocol.ToWorker) -> None:
        """Process a message of the trainer."""
        if isinstance(message, protocol.StopWorker):
            self.loop_thread.stop()
        elif isinstance(message, protocol.ReplacementAnswer):
            if (request := self._requests.get(message.ticket)) is not None and not request.done():
                request.set_result(message)
        elif isinstance(message, protocol.PlanBatch):
            if self._engine is None:
                raise ProtocolError("a plan before the source is open")
            if message.may_decode:
                self._may_decode.add(message.serial)
            self._plans.put_nowait(self._plan(message))
        elif isinstance(message, protocol.ReleaseSlot):
            self._outbox.release_slot(message)
        elif self._engine is not None:
            self._may_decode.add(message.serial)
            self._engine.assembly.permit()

    def _plan(self, message: protocol.PlanBatch) -> WorkerPlan:
        if len(message.indices) % 8 or len(message.indices) != len(message.positions) or not message.indices:
            raise ProtocolError("a plan whose indices and positions do not match")
        if len(message.pieces) % (5 * 8):
            raise ProtocolError("a plan with an incomplete piece of a sample")
        indices: list[int] = np.frombuffer(message.indices, np.int64).tolist()
        positions: list[int] = np.frombuffer(message.positions, np.int64).tolist()
        order = RemoteOrder(self, message.serial, message.order_length) if message.order_length else None
        pieces = np.frombuffer(message.pieces, np.int64).reshape(-1, 5) if message.pieces else None
        plan = message.number, indices, positions, message.epoch_seed, order
        return WorkerPlan(*plan, pieces=pieces, serial=message.serial)


@dataclass(frozen=True, eq=False)
class RemoteOrder:
    """The order of a batch's epoch, which is in the trainer's process."""

    worker: Worker
    serial: int
    length: int

    def index_at(self, position: int) -> Awaitable[int]:
        """Return the index at a position; see ``Worker.request_index``."""
        return self.worker.request_index(self.serial, position)


def encode_finished(message: protocol.FromWorker) -> tuple[bytes, bool]:
    """Encode a message, or an error in its place if the description of its batch is too long; whether it fits."""
    payload = encode(message)
    if len(payload) <= MAX_MESSAGE_BYTES or not isinstance(message, protocol.BatchFinished):
        return payload, True
    error = CollateError(
        f"the numbers and strings of a batch take {len(payload)} bytes beside its arrays; at most "
        f"{MAX_MESSAGE_BYTES} can be sent to another process: put them into arrays"
    )
    return encode(protocol.BatchFinished(message.serial, message.stats, message.nbytes, [], describe(error))), False
