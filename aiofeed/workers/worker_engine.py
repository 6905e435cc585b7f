"""The parts of a worker's engine: it builds batches in slots of the ring, and its queue sends them to the trainer.

``Outbox.put`` sends a finished batch; ``RemoteAssembly._assemble`` receives it (``protocol.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from msgspec import structs

from aiofeed.ipc.batch_codec import encode_batch
from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.ring import Extent, Slot
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.assembly import AssemblyOptions
from aiofeed.kernel.engine.batch import Batch
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.fetch.choose import NewBuilder
from aiofeed.kernel.engine.fetch.collate import BatchBuilder
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.queue import BatchQueue, FeedFailure, QueueItem, ReadyBatch
from aiofeed.workers import protocol

Send = Callable[[protocol.FromWorker, Slot | None], None]
"""Sends a message to the trainer, with the slot of its batch."""


@dataclass(frozen=True, eq=False)
class WorkerPlan(BatchPlan):
    """A plan with the serial number that identifies the batch in messages."""

    serial: int = 0


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
        assert item.on_taken is not None
        item.on_taken(item)
        stats = [getattr(item.counters, name) for name in protocol.BATCH_STATS]
        failures = [describe(error) for error in item.failures]
        message = protocol.BatchFinished(item.plan.serial, stats, item.reserved, failures)
        slot = item.lease
        if item.error is not None:
            if slot is not None:
                slot.give_back()
            self.send(structs.replace(message, error=describe(item.error)), None)
            return
        assert isinstance(slot, Slot)
        self._in_use[item.plan.serial] = slot
        message = structs.replace(
            message,
            batch=item.batch,
            chunk_size=self.chunk_size,
            indices=item.indices if item.failures else None,
            reads=self.reads,
            events=list(item.counters.events),
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
    """

    def __init__(
        self, admission: Admission, options: AssemblyOptions, *, may_decode: set[int], outbox: Outbox, reports: bool
    ) -> None:
        super().__init__(admission, options)
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


def dump(value: Any, slot: Slot) -> tuple[bytes, list[Extent]]:
    """Pickle a value that cannot be described; see ``dump_batch``."""
    # Imports torch, which most workers do not need.
    from aiofeed.ipc.pickling import dump_batch

    return dump_batch(value, slot)


def encoding_builder(new_builder: NewBuilder, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
    """Return a builder whose finished batch is encoded in its slot."""
    assert isinstance(lease, Slot)
    builder = new_builder(plan, lease)
    builder.encode = partial(encode_batch, slot=lease)
    return builder
