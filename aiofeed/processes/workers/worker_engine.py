"""The engine in a worker process: it builds batches in slots of the ring and sends them to the trainer.

``WorkerEngine._deliver_batch`` sends a finished batch; ``RemoteAssembly._assemble`` receives it (``protocol.py``).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiofeed.core.errors import SampleError
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan
from aiofeed.engine.admission import MemoryBudget
from aiofeed.engine.batch import Batch, ReorderBuffer
from aiofeed.engine.chunks import ChunkAssembly
from aiofeed.engine.engine import Engine
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetchers import NewBuilder, builder_factory, new_fetcher
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.processes.ipc.batch_codec import encode_batch
from aiofeed.processes.ipc.error_codec import describe
from aiofeed.processes.ipc.ring import Extent, Slot, SlotPool
from aiofeed.processes.workers.protocol import (
    BatchFinished,
    BatchStats,
    FromWorker,
    ReadReport,
    ReleaseSlot,
    StartDecoding,
    WorkerEnded,
)
from aiofeed.processes.workers.spawn import WorkerConfig
from aiofeed.runtime.buffers import BufferLease
from aiofeed.runtime.queue import BatchQueue
from aiofeed.runtime.tensors import unchanged
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.sampling.epochs import Step

_UNBOUNDED = 1 << 30
_ADVICE = 'make collate_fn (or the decoder) return tensors and plain values, or use engine="thread"'

Send = Callable[[FromWorker, Slot | None], None]
"""Sends a message to the trainer, with the slot of its batch."""


@dataclass(frozen=True, eq=False)
class WorkerPlan(BatchPlan):
    """A plan with the serial number that identifies the batch in messages."""

    serial: int = 0


@dataclass(frozen=True, eq=False)
class RemoteOrder:
    """The epoch's order, which is in the trainer's process; ``request`` requests the index at a position."""

    length: int
    request: Callable[[int], Awaitable[int]]

    def index_at(self, position: int) -> Awaitable[int]:
        """The index at a position."""
        return self.request(position)


class PermittedBuffer(ReorderBuffer):
    """Batches in this worker. The trainer permits decoding and puts finished batches in order.

    Args:
        send: Reports batches whose samples have been read; ``None`` if the trainer does not need that.
    """

    permitted: int

    def __init__(self, send: Send | None) -> None:
        super().__init__(in_order=False, prefetch_batches=_UNBOUNDED)
        self._send = send
        # Serial numbers: batches that may be decoded and are not planned yet, and those reported as read.
        self.may_decode: set[int] = set()
        self.reported: set[int] = set()

    def grant_permits(self) -> None:
        """Let permitted batches be decoded, and report batches whose samples have been read."""
        for entry in self.entries:
            batch: Any = entry
            serial = batch.plan.serial
            if serial in self.may_decode:
                self.may_decode.discard(serial)
                batch.decode_permit.set()
                self.permitted += 1
            if self._send is not None and batch.uncounted and not batch.unread and serial not in self.reported:
                self.reported.add(serial)
                self._send(ReadReport(serial), None)


class WorkerEngine(Engine):
    """An engine that sends finished batches to the trainer and decodes those that the trainer has permitted."""

    def __init__(
        self,
        steps: AsyncGenerator[Step, None],
        *,
        worker_config: WorkerConfig,
        number: int,
        executor: ThreadPool,
        send: Send,
        late_s: Callable[[], float],
    ) -> None:
        fetcher = new_fetcher(
            worker_config.source,
            worker_config.decode,
            worker_config.collate_fn,
            length=worker_config.length,
            policy=worker_config.policy,
            cache=worker_config.cache,
            own_process=True,
        )
        executor.host = fetcher.thread
        slots = SlotPool(worker_config.keep, _ADVICE, single_reader=True, dump=_dump)
        self.permits: PermittedBuffer = PermittedBuffer(None if worker_config.in_order else send)
        limits = ResolvedLimits(
            read_concurrency=worker_config.share(worker_config.read_concurrency, number),
            decode_threads=worker_config.share(worker_config.decode_threads, number),
            # The trainer bounds batches and bytes; here only reads and threads are bounded.
            prefetch_batches=_UNBOUNDED,
            memory_bytes=_UNBOUNDED,
            device_batches=_UNBOUNDED,
        )
        tuner = Tuner(
            decode_threads=limits.decode_threads,
            threads_given=worker_config.threads_given,
            read_concurrency=limits.read_concurrency,
            reads_given=worker_config.reads_given,
            reads_most=worker_config.most_reads(number),
        )
        assembly = partial(
            ChunkAssembly,
            fetcher=fetcher,
            new_builder=partial(_new_builder, builder_factory(fetcher, worker_config.collate_fn, staged=False)),
            wrap=unchanged,
            memory=slots,
            executor=executor,
            policy=worker_config.policy,
            # Tunes reads only. Decode threads are tuned while the consumer waits, which is not visible here.
            tuner=tuner,
            late_s=late_s,
        )
        super().__init__(
            steps,
            assembly,
            batch_size=1,
            queue=BatchQueue(),
            limits=limits,
            budget=MemoryBudget(sys.maxsize),
            in_order=False,
            policy=worker_config.policy,
            length=worker_config.length,
            buffer=self.permits,
        )
        self._reads = tuner.reading
        self._send = send
        # Slots that the trainer uses, by serial number.
        self._in_use: dict[int, Slot] = {}

    def received(self, message: StartDecoding | ReleaseSlot) -> None:
        """Process a message of the trainer about a batch."""
        if isinstance(message, StartDecoding):
            self.permits.may_decode.add(message.serial)
            self.permits.grant_permits()
        elif (slot := self._in_use.pop(message.serial, None)) is not None:
            slot.give_back(message.reusable)

    def out_of_plans(self) -> None:
        """There is no batch to read, so reads are not what planning waits for."""
        self.admission.waited_for_reads = False

    def _deliver_batch(self, batch: Batch) -> None:
        """Send a finished batch, or its error, to the trainer."""
        self.budget.release(batch.reserved)
        assert isinstance(batch.plan, WorkerPlan)
        serial = batch.plan.serial
        self.permits.reported.discard(serial)
        counters = batch.counters
        stats = BatchStats(*(getattr(counters, name) for name in BatchStats.__struct_fields__))
        failures = [describe(error) for error in batch.failures]
        slot = batch.lease
        assert slot is None or isinstance(slot, Slot)
        if batch.error is not None:
            if slot is not None:
                slot.give_back()
            self._send(BatchFinished(serial, stats, batch.nbytes, failures, describe(batch.error)), None)
            return
        assert slot is not None
        self._in_use[serial] = slot
        message = BatchFinished(
            serial,
            stats,
            batch.nbytes,
            failures,
            batch=batch.result,
            chunk_size=self.assembly.chunk_size,
            remaining=None if batch.kept is None else list(batch.kept),
            reads=self._reads.concurrency,
            events=list(counters.events),
        )
        self._send(message, slot)

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        """Report an error of the engine itself."""
        if not self.admission.closed:
            self.admission.closed = True
            self._send(WorkerEnded(describe(error)), None)


def _dump(value: Any, slot: Slot) -> tuple[bytes, list[Extent]]:
    # Imports torch, which most workers do not need.
    from aiofeed.processes.pickling import dump_batch

    return dump_batch(value, slot)


def _new_builder(new_builder: NewBuilder, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
    """A builder whose finished batch is encoded in its slot."""
    assert isinstance(lease, Slot)
    builder = new_builder(plan, lease)
    builder.encode = partial(encode_batch, slot=lease)
    return builder
