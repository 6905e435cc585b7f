"""The engine in a worker process: it builds batches in slots of the ring, and its queue sends them to the trainer.

``Outbox.put`` sends a finished batch; ``RemoteAssembly._assemble`` receives it (``protocol.py``).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from aiofeed.ipc.batch_codec import encode_batch
from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.ring import Extent, Slot, SlotPool
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import MemoryBudget
from aiofeed.kernel.engine.batch import Batch
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.engine import Engine
from aiofeed.kernel.engine.fetch.collate import BatchBuilder
from aiofeed.kernel.engine.fetchers import NewBuilder, builder_factory, new_fetcher
from aiofeed.kernel.engine.tuning.tuner import Tuner
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.queue import BatchQueue, FeedFailure, QueueItem, ReadyBatch, release
from aiofeed.kernel.runtime.tensors import unchanged
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.kernel.sampling.epochs import Step
from aiofeed.workers import protocol
from aiofeed.workers.spawn import WorkerConfig

_UNBOUNDED = 1 << 30
_ADVICE = 'make collate_fn (or the decoder) return tensors and plain values, or use engine="thread"'

Send = Callable[[protocol.FromWorker, Slot | None], None]
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
        """Return the index at a position."""
        return self.request(position)


class Outbox(BatchQueue[QueueItem]):
    """The queue of the engine in a worker: sends what is put into it to the trainer.

    Attributes:
        chunk_size, reads: See ``BatchFinished``.
    """

    chunk_size = reads = 0

    def __init__(self, send: Send) -> None:
        super().__init__()
        self.send = send
        # Slots that the trainer uses, by serial number.
        self._in_use: dict[int, Slot] = {}

    def put(self, item: QueueItem) -> None:
        """Send a finished batch, or its error, or an error of the engine itself."""
        if isinstance(item, FeedFailure):
            self.send(protocol.WorkerEnded(describe(item.error)), None)
            return
        assert isinstance(item, ReadyBatch)
        assert isinstance(item.plan, WorkerPlan)
        release(item)
        serial, slot, counters = item.plan.serial, item.lease, item.counters
        stats = [getattr(counters, name) for name in protocol.BATCH_STATS]
        failures = [describe(error) for error in item.failures]
        assert slot is None or isinstance(slot, Slot)
        if item.error is not None:
            if slot is not None:
                slot.give_back()
            self.send(protocol.BatchFinished(serial, stats, item.reserved, failures, describe(item.error)), None)
            return
        assert slot is not None
        self._in_use[serial] = slot
        message = protocol.BatchFinished(
            serial,
            stats,
            item.reserved,
            failures,
            batch=item.batch,
            chunk_size=self.chunk_size,
            samples=item.samples,
            reads=self.reads,
            events=list(counters.events),
        )
        self.send(message, slot)

    def release_slot(self, message: protocol.ReleaseSlot) -> None:
        """Free a slot that the trainer no longer uses."""
        if (slot := self._in_use.pop(message.serial, None)) is not None:
            slot.give_back(message.reusable)


class PermittedAssembly(ChunkAssembly):
    """Decodes the batches that the trainer has permitted.

    Args:
        may_decode: Serial numbers of permitted batches, some of which are not planned yet.
        outbox: Reports batches whose samples have been read.
        reports: Whether the trainer needs these reports.
        options: Other arguments of ``ChunkAssembly``.
    """

    def __init__(self, engine: Engine, *, may_decode: set[int], outbox: Outbox, reports: bool, **options: Any) -> None:
        super().__init__(engine, **options)
        self._may_decode = may_decode
        self._outbox = outbox
        self._reports = reports
        self._reported: WeakSet[Batch] = WeakSet()

    def permit(self) -> None:
        """Let permitted batches be decoded, and report batches whose samples have been read."""
        for entry in self._buffer.entries:
            batch: Any = entry
            serial = batch.plan.serial
            if serial in self._may_decode:
                self._may_decode.discard(serial)
                batch.decode_permit.set()
                self._buffer.permitted += 1
            if self._reports and batch.uncounted and not batch.unread and batch not in self._reported:
                self._reported.add(batch)
                self._outbox.send(protocol.ReadReport(serial), None)

    def delivered(self, batch: Batch) -> None:
        """Tune no decode threads: this needs to know when the consumer waits, which is not visible here."""
        self._outbox.chunk_size, self._outbox.reads = self.chunk_size, self._admission.limits.read_concurrency


def worker_engine(
    steps: AsyncGenerator[Step, None],
    outbox: Outbox,
    may_decode: set[int],
    *,
    worker_config: WorkerConfig,
    number: int,
    executor: ThreadPool,
    loop_delay_s: Callable[[], float],
) -> Engine:
    """Return the engine of worker ``number``, which puts its batches into ``outbox``; see ``PermittedAssembly``."""
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
        PermittedAssembly,
        may_decode=may_decode,
        outbox=outbox,
        reports=not worker_config.in_order,
        fetcher=fetcher,
        new_builder=partial(_new_builder, builder_factory(fetcher, worker_config.collate_fn, staged=False)),
        wrap=unchanged,
        memory=SlotPool(worker_config.keep, _ADVICE, single_reader=True, dump=_dump),
        executor=executor,
        policy=worker_config.policy,
        tuner=tuner,
        loop_delay_s=loop_delay_s,
    )
    return Engine(
        steps,
        assembly,
        batch_size=1,
        queue=outbox,
        limits=limits,
        budget=MemoryBudget(sys.maxsize),
        in_order=False,
        policy=worker_config.policy,
        length=worker_config.length,
        counts_failures=False,
    )


def _dump(value: Any, slot: Slot) -> tuple[bytes, list[Extent]]:
    # Imports torch, which most workers do not need.
    from aiofeed.ipc.pickling import dump_batch

    return dump_batch(value, slot)


def _new_builder(new_builder: NewBuilder, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
    """Return a builder whose finished batch is encoded in its slot."""
    assert isinstance(lease, Slot)
    builder = new_builder(plan, lease)
    builder.encode = partial(encode_batch, slot=lease)
    return builder
