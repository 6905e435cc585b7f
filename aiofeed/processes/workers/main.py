"""The engine process: reads and decodes what it is told to, into slots of the ring, until it is told to stop.

It ends when it is told to, and at once when its parent is gone: the connection says so, and where somebody else still
holds that (a fork of the parent's), the parent's number and, on Linux, the kernel do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np

from aiofeed.core.errors import CollateError, FeedError
from aiofeed.core.statistics import EpochStats
from aiofeed.processes.ipc.error_codec import describe
from aiofeed.processes.ipc.framing import MAX_MESSAGE_BYTES, Connection, ProtocolError, frame
from aiofeed.processes.ipc.schema import (
    BatchFailed,
    BatchReady,
    FromEngine,
    ReplacementAnswer,
    ReplacementRequest,
    StopWorker,
    WorkerEnded,
    WorkerPlanMessage,
    WorkerReady,
    decode_to_engine,
    encode,
)
from aiofeed.processes.workers.spawn import WorkerConfig, read_config
from aiofeed.processes.workers.worker_engine import RequestedOrder, WorkerEngine, WorkerPlan
from aiofeed.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.sampling.epochs import EpochBegins, Step

# A parent that is gone is noticed within this where the connection does not tell.
HEARTBEAT_S = 0.25


def main(connection: int, start: int, parent: int, number: int) -> None:
    """Run as an engine process.

    Args:
        connection: descriptor of the socket to the parent.
        start: descriptor of the file with what to work with.
        parent: the parent's process id.
        number: which of the parent's engine processes this is.
    """
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)
    sock = socket.socket(fileno=connection)
    status = 1
    try:
        _serve(sock, read_config(start), parent, number)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the user's modules and objects may raise anything when they are loaded
        failed = FeedError(f'the process of engine="process" could not start: {type(error).__name__}: {error}')
        failed.__cause__ = error
        sock.setblocking(True)
        sock.sendall(frame(encode(WorkerEnded(describe(failed)))))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads it any more
                stream.flush()
        # Threads that are inside a decode they cannot leave, and whatever the user's modules left behind, end here.
        os._exit(status)


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG goes off when the thread that started this process ends. That is the parent's engine
        # thread, which waits for this process first.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(sock: socket.socket, worker_config: WorkerConfig, parent: int, number: int) -> None:
    loop_thread = EventLoopThread(
        read_threads=min(worker_config.most_reads(number), MOST_READ_THREADS),
        decode_threads=worker_config.share(worker_config.decode_threads, number),
    )
    worker = _Worker(loop_thread, worker_config, parent, number)
    loop_thread.launch(import_torch=False)
    loop_thread.start(partial(worker.serve, sock))
    loop_thread.finished.result()


class _Worker:
    """What the engine process consists of, on its loop."""

    def __init__(self, loop_thread: EventLoopThread, worker_config: WorkerConfig, parent: int, number: int) -> None:
        self._loop_thread = loop_thread
        self._cargo = worker_config
        self._parent = parent
        self._number = number
        self._plans: asyncio.Queue[WorkerPlan] = asyncio.Queue()
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[ReplacementAnswer]] = {}
        self._wire: Connection | None = None
        self._engine: WorkerEngine | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Open the source and assemble what is asked for, until cancelled."""
        self._wire = Connection(sock, received=self._received, lost=self._lost)
        self._beat()
        source = self._cargo.source
        try:
            if (opener := getattr(source, "open", None)) is not None:
                await opener()
        except BaseException as error:  # the user's coroutine may raise anything; it is raised at the `for` line
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            error.add_note(f"in {type(source).__name__}.open()")
            self.send(WorkerEnded(describe(error)))
            return
        if (closer := getattr(source, "aclose", None)) is not None:
            self._loop_thread.at_stop(closer)
        self._engine = WorkerEngine(
            self._steps(),
            worker_config=self._cargo,
            number=self._number,
            executor=self._loop_thread.decode_pool,
            tell=self.send,
        )
        self.send(WorkerReady(os.getpid()))
        await self._engine.run()

    async def _steps(self) -> AsyncIterator[Step]:
        while True:
            if self._engine is not None and self._plans.empty():
                self._engine.wants_plan()
            plan = await self._plans.get()
            yield EpochBegins(EpochStats())  # of this batch alone
            yield plan

    async def ask(self, serial: int, position: int) -> int:
        """The index at a position of the epoch's order; called on the loop."""
        ticket = next(self._tickets)
        self._asked[ticket] = asyncio.get_running_loop().create_future()
        self.send(ReplacementRequest(ticket, serial, position))
        try:
            answer = await self._asked[ticket]
        finally:
            del self._asked[ticket]
        if answer.index is None:
            raise FeedError(f"nobody knows what is at position {position} of the epoch")
        return answer.index

    def send(self, message: FromEngine, descriptors: Sequence[int] = ()) -> None:
        """Tell the trainer; a batch whose description is too long for a message has failed."""
        assert self._wire is not None
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES and isinstance(message, BatchReady):
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = ()
            error = CollateError(
                f"the numbers and texts of a batch take {len(payload)} bytes beside its arrays; "
                f"at most {MAX_MESSAGE_BYTES} can be handed to another process: put them into arrays"
            )
            payload = encode(BatchFailed(message.serial, describe(error), [], message.spent, message.nbytes))
        self._wire.send(payload, descriptors)

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_to_engine(payload)
        if descriptors:
            raise ProtocolError("descriptors where none belong")
        if isinstance(message, StopWorker):
            self._loop_thread.stop()
        elif isinstance(message, ReplacementAnswer):
            if (waiting := self._asked.get(message.ticket)) is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, WorkerPlanMessage):
            if self._engine is None:
                raise ProtocolError("a plan before the source is open")
            if message.opened:
                self._engine.commissions.may_decode.add(message.serial)
            self._plans.put_nowait(self._commission(message))
        elif self._engine is not None:
            self._engine.told(message)

    def _commission(self, plan: WorkerPlanMessage) -> WorkerPlan:
        if len(plan.indices) % 8 or len(plan.indices) != len(plan.positions) or not plan.indices:
            raise ProtocolError("a plan whose indices and positions do not fit together")
        indices: list[int] = np.frombuffer(plan.indices, np.int64).tolist()
        positions: list[int] = np.frombuffer(plan.positions, np.int64).tolist()
        order = RequestedOrder(plan.order_length, partial(self.ask, plan.serial)) if plan.order_length else None
        return WorkerPlan(plan.number, indices, positions, plan.epoch_seed, order, plan.serial)

    def _lost(self, error: Exception | None) -> None:
        os._exit(1)  # the parent is gone; or what it says makes no sense, and then it hears of this

    def _beat(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
