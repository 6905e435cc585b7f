"""Assembles batches in workers: the trainer's engine plans and delivers.

``begin`` sends the plan of a batch, and ``_assemble`` gets the finished batch, which the worker's ``Outbox`` has sent
(``protocol.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from aiofeed.ipc.batch_codec import array_nodes, batch_in_ring, copied_leaf, decode_and_wrap, leaf_of
from aiofeed.ipc.error_codec import rebuild
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.pickling import unpickle
from aiofeed.ipc.ring import INLINE_BYTES, Borrowed, Ring, RingLease, free_dropped_slots
from aiofeed.ipc.schema import ArrayNode, Node
from aiofeed.kernel.core.errors import FeedError, SampleError
from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.assembly import Assembly, AssemblyOptions
from aiofeed.kernel.engine.batch import Batch
from aiofeed.kernel.engine.chunks import NAMED
from aiofeed.kernel.runtime.buffers import SMALL_BYTES, BufferLease, Bytes, DropTracker, HostBufferPool
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.kernel.sampling.epochs import Step
from aiofeed.workers.handle import AssignedBatch, Handle, WorkerHandle
from aiofeed.workers.pool import WorkerPool
from aiofeed.workers.protocol import BATCH_STATS, BatchFinished

# Smaller parts of a segment are copied, so that a user who keeps the labels of all batches does not keep the images.
_MIN_FRACTION = 0.25


class RemoteAssembly(Assembly):
    """Sends the plans of batches to workers, and takes finished batches out of their memory.

    Args:
        options: The fetcher only gives the names of samples; the memory is for arrays that are copied out of the ring,
            and the executor copies large batches. The tuner holds how many samples the workers read at a time, as their
            messages report.
        pool: The workers.
    """

    def __init__(self, admission: Admission, options: AssemblyOptions, *, pool: WorkerPool[Any]) -> None:
        super().__init__(admission, options)
        self._pool = pool
        self._memory = options.memory
        self._wrap = options.wrap
        # Copies to a device need pinned memory. If the ring cannot be pinned, batches are copied to memory that is.
        self._zero_copy = isinstance(options.memory, HostBufferPool)

    def reading_ahead(self, steps: Iterable[Step]) -> AbstractContextManager[Iterable[Step]]:
        """See ``Assembly.reading_ahead``. A worker that fails ends the engine."""
        self._pool.call_on_error(self.engine.fail)
        return super().reading_ahead(steps)

    @property
    def busy(self) -> bool:
        """Whether all workers have work, so that a message of one wakes the loop soon.

        With one worker that decodes JPEGs all the time, beside a pure Python step of 9 ms on two cores, the step takes
        1.14 times as long as alone, and 1.32 times if the loop is woken for each batch that is taken (25th percentile
        of 200 steps, median of 10 runs each).
        """
        return self._pool.busy

    def taken(self, item: ReadyBatch) -> None:
        """Free slots, and let more batches be in flight if the workers need them."""
        free_dropped_slots(self._pool.borrowed)
        if more := self._pool.taken(item.counters):
            self._admission.decode_at_once(self._buffer.prefetch_batches + more)

    async def begin(self, batch: Batch) -> None:
        """Send the plan of a batch to a worker."""
        if self.chunk_size:
            self.fill_threads(self.chunk_size, len(batch.plan.indices), self._buffer.prefetch_batches)
        self.permit()
        may_decode = batch.decode_permit.is_set()
        assigned = self._pool.assign(batch.plan, may_decode=may_decode, was_read=partial(self._was_read, batch))
        self.engine.start(batch, self._assemble, batch, assigned, may_decode)

    def waiting_for(self, batch: Batch) -> tuple[Any, ...]:
        """Return the workers that have the batch."""
        assigned = self._pool.assigned(batch.plan)
        keys = ", ".join(repr(self._fetcher.key(index)) for index in batch.plan.indices[:NAMED])
        if assigned is None:
            return (f"no worker has it, with the samples {keys}",)
        workers, seconds = [worker for worker, _ in assigned.copies], time.monotonic() - assigned.permitted_at
        names = " and ".join(worker.name for worker in workers)
        pids = (worker.pid for worker in workers if isinstance(worker, WorkerHandle))
        return f"{names} has had it for {seconds:.0f} s, with the samples {keys}", *pids

    def _was_read(self, batch: Batch) -> None:
        batch.unread = 0
        self.permit()

    async def _assemble(self, batch: Batch, assigned: AssignedBatch, may_decode: bool) -> None:
        if not may_decode:
            await batch.decode_permit.wait()
            self._pool.start_decoding(assigned)
        reply = await assigned.reply
        assert assigned.finished_by is not None
        for name, value in zip(BATCH_STATS, reply.stats, strict=True):
            setattr(batch.counters, name, getattr(batch.counters, name) + value)
        worker = assigned.finished_by
        events = [(what, f"{worker.lane}: {lane}", *rest) for what, lane, *rest in reply.events]
        batch.counters.events.extend(events)  # type: ignore[arg-type]
        borrowed: BorrowedSlot | None = None
        if reply.error is not None:
            error = rebuild(reply.error)
            batch.error = error if isinstance(error, FeedError) else FeedError(f"{type(error).__name__}: {error}")
        else:
            if reply.indices is not None:
                batch.indices = reply.indices
            borrowed = await self._receive(batch, worker, assigned, reply)
        failures = map(rebuild, reply.failures)
        batch.failures = [batch.failure_counter.remember(error) for error in failures if isinstance(error, SampleError)]
        batch.encoded_bytes = reply.nbytes
        self.engine.finished(batch)
        if borrowed is not None:
            # Last, because ReleaseSlot wakes the worker, which may take this core from the consumer's thread.
            borrowed.track()
        self.engine.release_taken()

    async def _receive(
        self, batch: Batch, worker: Handle, assigned: AssignedBatch, reply: BatchFinished
    ) -> BorrowedSlot | None:
        """Decode a batch from its slot; returns the slot if it is to be tracked once the batch is delivered."""
        self.chunk_size: int = reply.chunk_size
        if self._tuner is not None and not self._tuner.reading.given:
            # Plan for as many concurrent reads as the workers do.
            self._tuner.reading.concurrency = self._pool.set_reads(worker.number, reply.reads)
            self._concurrency.apply(self._tuner)
        ring = assigned.ring
        assert ring is not None
        # Not a method of `assigned`, which refers to the batch: the slot would keep itself.
        free = partial(worker.release_slot, assigned.serial, ring)
        free_dropped_slots(self._pool.borrowed)
        try:
            if ring.pinned:
                batch.lease = RingLease(asyncio.get_running_loop(), free)
                batch.result = batch_in_ring(ring, reply.batch, unpickle=unpickle)
                return None
            batch.lease = self._memory.lease()
            zero_copy = self._zero_copy and len(self._pool.borrowed) < self._pool.most_borrowed
            borrowed = BorrowedSlot(self._pool.borrowed, ring, free, zero_copy=zero_copy)
            leaf = partial(borrowed.leaf, batch.lease)
            take_out = partial(decode_and_wrap, reply.batch, leaf, self._wrap, unpickle=unpickle)
            if borrowed.copied_bytes(reply.batch) <= INLINE_BYTES:
                batch.result, seconds = take_out()
            else:
                batch.result, seconds = await asyncio.get_running_loop().run_in_executor(self._executor, take_out)
        except ProtocolError as error:
            worker.kill()
            self.engine.fail(FeedError(f"{worker.name} sent an invalid batch: {error}"))
            return None
        batch.counters.copy_s += seconds
        return borrowed


class BorrowedSlot(Borrowed):
    """The slot of one batch on its way to the user, who may get the arrays as they lie in it, without a copy.

    Args:
        tracker: Reports when the user has dropped the batch.
        free: Called once, when nothing refers to the slot, with whether it may be written again.
        zero_copy: Whether arrays may stay in the slot.
    """

    def __init__(
        self, tracker: DropTracker[Borrowed], ring: Ring, free: Callable[[bool], object], *, zero_copy: bool
    ) -> None:
        super().__init__(free)
        self._tracker = tracker
        self._ring = ring
        self._zero_copy = zero_copy
        self._owners: dict[int, Bytes] = {}

    def stays(self, node: ArrayNode) -> bool:
        """Return whether an array stays in the slot, uncopied; ``ProtocolError`` if it is not in its segment."""
        if not self._zero_copy or node.kind == "scalar" or node.segment < 0:
            return False
        nbytes = self._ring.view(node).nbytes
        return nbytes >= max(SMALL_BYTES, _MIN_FRACTION * self._ring.segment(node.segment).nbytes)

    def copied_bytes(self, batch: Node) -> int:
        """Return the bytes of the arrays that are copied."""
        return sum(self._ring.view(node).nbytes for node in array_nodes(batch) if not self.stays(node))

    def leaf(self, lease: BufferLease, node: ArrayNode) -> Any:
        """Make an array or tensor, in the slot or in memory of the lease. For any thread, before ``track``."""
        if not self.stays(node):
            return copied_leaf(self._ring.view(node), node, lease)
        owner = self._owners.get(node.segment)
        if owner is None:
            owner = self._owners[node.segment] = self._ring.segment(node.segment).owner()
        return leaf_of(self._ring.view(node, owner), node)

    def track(self) -> None:
        """Free the slot when nothing refers to the leaves that were made. On the loop."""
        self.watch(self._owners.values(), self._tracker)
        self._owners.clear()
