"""The engine on the trainer's side of the ring: it plans and delivers as ever; processes read and decode."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiofeed.core.errors import FeedError, SampleError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.limits import ResolvedLimits
from aiofeed.engine.admission import MemoryBudget
from aiofeed.engine.batch import Batch
from aiofeed.engine.engine import Engine
from aiofeed.engine.fetch.fetcher import Fetcher
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.processes.ipc.batch_codec import decode_batch, in_place
from aiofeed.processes.ipc.error_codec import rebuild
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.ring import INLINE_BYTES, Ring, RingLease
from aiofeed.processes.ipc.schema import BatchFailed, BatchReady
from aiofeed.processes.workers.handle import Work
from aiofeed.processes.workers.pool import WorkerPool
from aiofeed.processes.workers.zero_copy import BorrowedSlot
from aiofeed.runtime.buffers import BufferLease, BufferPool, HostBufferPool
from aiofeed.runtime.queue import BatchQueue, QueueItem, ReadyBatch, release
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.sampling.epochs import Step


class MultiprocessEngine(Engine):
    """Turns batch plans into finished batches, by processes.

    Args:
        steps, limits, budget, queue, in_order, policy, length: as for any engine.
        processes: who reads and decodes.
        fetcher: knows the samples' names; it reads nothing here.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        memory: where the arrays of a batch are copied to that do not stay in the ring.
        executor: copies many of them.
        tuner: says how many samples the processes read at a time; it hears of that from them.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        processes: WorkerPool,
        fetcher: Fetcher,
        batch_size: int,
        wrap: Callable[[Any], Any],
        memory: BufferPool,
        executor: ThreadPool,
        queue: BatchQueue[QueueItem],
        limits: ResolvedLimits,
        budget: MemoryBudget,
        in_order: bool,
        policy: FailurePolicy,
        length: int,
        tuner: Tuner | None = None,
    ) -> None:
        super().__init__(
            steps,
            batch_size=batch_size,
            fetcher=fetcher,
            new_builder=_nowhere,
            wrap=wrap,
            memory=memory,
            executor=executor,
            queue=queue,
            limits=limits,
            budget=budget,
            in_order=in_order,
            policy=policy,
            length=length,
            tuner=tuner,
        )
        self._processes = processes
        self._executor = executor
        self._memory = memory
        self._wrap = wrap
        # A copy to a device wants its memory pinned, unless the ring is.
        self._lends = isinstance(memory, HostBufferPool)
        # Batches that were taken, of which the loop has not heard.
        self._noted: deque[ReadyBatch] = deque()
        self._note = self._noted_until_heard

    async def run(self) -> None:
        """As of any engine; it ends early where a process does."""
        self._processes.when_broken(self._broke)
        try:
            await super().run()
        finally:
            self._noted.clear()  # the feeder may keep this engine

    def _noted_until_heard(self, item: ReadyBatch) -> bool:
        """Let word of a batch wait for the next that a process finishes; in the consumer's thread.

        To be woken, the loop takes the GIL from the step that has just begun: a millisecond or two of it. So it is not
        where all processes have work, and one of them more than the batch that it is at.
        """
        if not self._processes.busy:
            return False
        self._noted.append(item)
        # Asked again: the loop may have heard of their last ones in between, and then it has to be woken.
        return self._processes.busy

    def _hear(self) -> None:
        while self._noted:
            release(self._noted.popleft())

    def _broke(self, error: FeedError) -> None:
        self._deliver_failure(error)
        self._admission.room.set()

    async def _start_chunks(self, batch: Batch, samples: int) -> None:
        was_read = partial(self._was_read, batch)
        work = self._processes.assign(batch.plan, opened=batch.decode_permit.is_set(), was_read=was_read)
        self._group.create_task(self._assemble(batch, work, batch.decode_permit.is_set()))

    def _was_read(self, batch: Batch) -> None:
        batch.unread = 0
        self._buffer.grant_permits()

    async def _assemble(self, batch: Batch, work: Work, opened: bool) -> None:
        if not opened:
            await batch.decode_permit.wait()
            work.open()
        work.process.decoding += 1
        try:
            reply, loan = await work.reply, None
        finally:
            work.process.decoding -= 1
        spent, counters = reply.spent, batch.counters
        for name in reply.spent.__struct_fields__:
            setattr(counters, name, getattr(counters, name) + getattr(spent, name))
        if isinstance(reply, BatchFailed):
            batch.error = _feed_error(rebuild(reply.error))
        else:
            batch.kept = reply.kept
            loan = await self._take(batch, work, reply)
        failures = map(rebuild, reply.failures)
        batch.failures = [batch.failure_counter.know(error) for error in failures if isinstance(error, SampleError)]
        batch.encoded_bytes = reply.nbytes
        self._complete(batch)
        if loan is not None:
            # Last: the word wakes another process, which may take this one's core from the consumer's thread.
            loan.settle()
        self._hear()

    async def _take(self, batch: Batch, work: Work, filled: BatchReady) -> BorrowedSlot | None:
        """The batch out of its slot, or as it lies there; and what is to be settled once it is handed over."""
        self.chunk_size = filled.chunk_size
        self._heed_reads(work, filled.reads)
        ring = work.process.ring
        # Not the work's own: it knows the batch, which would keep itself.
        free = partial(work.process.free, work.serial)
        self._processes.lending.collect()
        try:
            if ring.pinned:
                batch.lease = RingLease(asyncio.get_running_loop(), free)
                batch.result = decode_batch(filled.batch, partial(_in_place, ring))
                return None
            batch.lease = self._memory.lease()
            loan = BorrowedSlot(self._processes.lending, ring, free, lends=self._lends)
            take = partial(self._take_out, loan, filled, batch.lease)
            if loan.copied_bytes(filled.batch) <= INLINE_BYTES:
                batch.result, seconds = take()
            else:
                batch.result, seconds = await asyncio.get_running_loop().run_in_executor(self._executor, take)
        except ProtocolError as error:
            work.process.kill()
            self._broke(FeedError(f"an engine process described a batch that cannot be: {error}"))
            return None
        batch.counters.copy_s += seconds
        return loan

    def _heed_reads(self, work: Work, reads: int) -> None:
        """A process reads so many samples at a time: that many are to be planned."""
        if self._tuner is not None and not self._tuner.reading.given:
            self._tuner.reading.concurrency = self._processes.count_reads(work.process.number, reads)
            self._concurrency.apply(self._tuner)

    def _take_out(self, loan: BorrowedSlot, filled: BatchReady, lease: BufferLease) -> tuple[Any, float]:
        started = time.perf_counter()
        batch = self._wrap(decode_batch(filled.batch, partial(loan.take, lease)))
        return batch, time.perf_counter() - started

    def taken(self, item: ReadyBatch) -> None:
        """A batch has left the queue, and an earlier one may be used no more; called on the loop."""
        self._hear()
        self._processes.lending.collect()
        super().taken(item)


def _in_place(ring: Ring, leaf: Any) -> Any:
    return in_place(ring.view(leaf), leaf, pinned=ring.pinned, lease=_private)


# What stays on the host beside a batch on a device: arrays of a collate_fn. It keeps nothing.
_private = HostBufferPool(0)


def _feed_error(error: Exception) -> FeedError:
    return error if isinstance(error, FeedError) else FeedError(f"{type(error).__name__}: {error}")


def _nowhere(samples: int, lease: BufferLease) -> Any:
    raise NotImplementedError("batches are put together in the engine's process")
