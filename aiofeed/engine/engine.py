"""The engine of one epoch: plan, assemble, deliver. The only place that knows of tasks and of cancellation.

One coroutine plans. It alone waits for limited resources, in order: room for another batch, bytes, reads. Each chunk
of a batch is a task of its own: read, wait until the batch is among those that may be decoded, decode. A batch that
is complete leaves in its turn. Since whoever waits for room waits in order, and room comes back from what stands
before it, nothing can deadlock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiofeed.core.errors import FeedError, SampleError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.failures import FailureCounter
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.statistics import EpochStats
from aiofeed.engine.admission import Admission, MemoryBudget
from aiofeed.engine.assembler import AssemblyFactory, DecodeStage
from aiofeed.engine.batch import Batch, ReorderBuffer
from aiofeed.engine.concurrency import Concurrency
from aiofeed.engine.fetch.fetcher import ChunkOutcome, Fetcher
from aiofeed.engine.tuning.gil import GilLimit
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.runtime.buffers import BufferPool
from aiofeed.runtime.cancellation import TaskScope, is_cancelled
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.runtime.time_limits import StopFlag
from aiofeed.sampling.epochs import EpochBegins, EpochEnds, Step

log = logging.getLogger("aiofeed.engine")


class Engine:
    """Turns batch plans into finished batches, on the running loop.

    Args:
        steps: what to assemble, in order, and where epochs begin and end.
        batch_size: samples of a full batch.
        fetcher: reads and decodes chunks.
        new_builder: makes the place where a batch is put together.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        memory: where its memory comes from.
        executor: the decode threads.
        queue: where finished batches go.
        limits: what may be in flight.
        budget: bytes in flight.
        in_order: hand batches out in order; otherwise whichever of an epoch is finished.
        policy: what becomes of samples that fail.
        length: of the source; what ``max_failures`` is a part of.
        tuner: chooses how many threads decode and how many samples are read at a time; ``None``: ``limits`` says.
        tell: told on the loop, once, where the GIL turns out to be what limits decoding.
        buffer: whose turn it is, where others decide that.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        batch_size: int,
        fetcher: Fetcher,
        new_builder: AssemblyFactory,
        wrap: Callable[[Any], Any],
        memory: BufferPool,
        executor: ThreadPool,
        queue: BatchQueue[QueueItem],
        limits: ResolvedLimits,
        budget: MemoryBudget,
        in_order: bool,
        policy: FailurePolicy | None = None,
        length: int = 0,
        tuner: Tuner | None = None,
        tell: Callable[[GilLimit], None] | None = None,
        buffer: ReorderBuffer | None = None,
    ) -> None:
        self._steps = steps
        self._fetcher = fetcher
        self._queue = queue
        self._budget = budget
        self._buffer = buffer or ReorderBuffer(in_order=in_order, prefetch_batches=limits.prefetch_batches)
        self._admission = Admission(limits, batch_size=batch_size, budget=budget, buffer=self._buffer)
        self._tuner = tuner
        self._concurrency = Concurrency(self._admission, fetcher=fetcher, executor=executor, tuner=tuner, tell=tell)
        self._policy = policy or FailurePolicy()
        self._length = length
        self._failure_counter = FailureCounter(self._policy, length)
        self._counters = EpochStats()
        self._stop = StopFlag()
        self._assembler = DecodeStage(
            fetcher=fetcher,
            new_builder=new_builder,
            wrap=wrap,
            memory=memory,
            executor=executor,
            policy=self._policy,
            stop=self._stop,
            read_slot=self._admission.read_slot,
            tuner=None if tuner is None else tuner.decoding,
        )
        self._full_since: float | None = None
        # See ``ReadyBatch``.
        self._note: Callable[[ReadyBatch], bool] | None = None
        self.chunk_size = 0

    async def run(self) -> None:
        """Assemble every plan; ends when all are delivered, one has failed, or the task is cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                with TaskScope():
                    await self._plan()
        except BaseExceptionGroup as errors:
            # A bug, of ours or in a fetcher: the consumer must hear of it rather than wait.
            self._deliver_failure(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - a source whose plans or keys fail, say; the consumer must hear of it
            self._deliver_failure(error)
        finally:
            self._stop.stopped = True
            self._buffer.line.clear()  # the feeder may keep this engine, and with it the memory of half-made batches

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        if not self._admission.closed:
            self._admission.closed = True
            self._queue.put(FeedFailure(error, number, failures))

    async def _plan(self) -> None:
        for step in self._steps:
            await self._plan_step(step)
            if self._admission.closed:
                return

    async def _plan_step(self, step: Step) -> None:
        if isinstance(step, EpochBegins):
            self._counters = step.counters
            self._failure_counter = FailureCounter(self._policy, self._length)
        elif isinstance(step, EpochEnds):
            self._buffer.line.append(step)
            self._deliver()
        else:
            samples = len(step.indices)
            admission = self._admission
            if not admission.has_room(samples):
                admission.held_by_reads = False
                await admission.until(partial(admission.has_room, samples))
            if admission.closed:
                return
            batch = Batch(step, self._counters, self._failure_counter, self._budget.reserve(samples))
            self._buffer.line.append(batch)
            self._buffer.assembling += 1
            self._buffer.open_gates()
            await self._start_chunks(batch, samples)

    async def _start_chunks(self, batch: Batch, samples: int) -> None:
        admission = self._admission
        size = min(self._fetcher.chunk_size(samples, admission.limits), admission.limits.read_concurrency)
        self.chunk_size = size
        self._concurrency.open_lanes()
        starts = range(0, samples, size)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: planned, %d samples in %d chunks", batch.plan.number, samples, len(starts))
        batch.unread = batch.unaccounted = batch.undecoded = len(starts)
        for start in starts:
            stop = min(start + size, samples)
            if not admission.may_read(stop - start):
                admission.held_by_reads = True
                await admission.until(partial(admission.may_read, stop - start))
            admission.reading += stop - start
            self._group.create_task(self._chunk(batch, start, stop))

    async def _chunk(self, batch: Batch, start: int, stop: int) -> None:
        try:
            started, concurrency = time.perf_counter(), self._admission.limits.read_concurrency
            try:
                read = await self._fetcher.read(batch.plan.indices[start:stop])
                if self._tuner is not None and not read.retries:
                    seconds = time.perf_counter() - started
                    self._concurrency.learn_reads(self._tuner, seconds, stop - start, read.nbytes, concurrency)
            finally:
                self._admission.reading -= stop - start
                self._admission.room.set()
            ended = time.perf_counter()
            batch.counters.read_s += ended - started
            batch.count_read(read)
            batch.reserved = self._budget.at_least(batch.reserved, batch.encoded_bytes)
            batch.unread -= 1
            if not self._buffer.in_order:
                self._buffer.open_gates()
            if log.isEnabledFor(logging.DEBUG):
                ms = (ended - started) * 1e3
                log.debug("batch %d: read samples %d to %d in %.1f ms", batch.plan.number, start, stop - 1, ms)
            # First let the plan hear of the room, start its next chunk, and that begin its reads: three turns of the
            # loop. Once the decode thread has work, it wants the GIL, and they would wait for it half a millisecond.
            for _ in range(3 if read.waited else 0):
                await asyncio.sleep(0)
            if not batch.gate.is_set():
                await batch.gate.wait()
            decoding = self._assembler.decode(batch, start, read.samples)
            del read
            self._count(batch, await decoding)
        except asyncio.CancelledError:
            raise _cancelled(batch) from None

    def _count(self, batch: Batch, outcome: ChunkOutcome) -> None:
        batch.count(outcome)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: decoded a chunk in %.1f ms", batch.plan.number, outcome.decode_s * 1e3)
        if outcome.job is not None and self._tuner is not None:
            self._concurrency.learn(self._tuner, outcome.job, wanted=not self._buffer.waiting)
        batch.unaccounted -= 1
        if batch.unaccounted == 0:
            if batch.errors and not self._admission.closed:
                self._group.create_task(self._mend(batch))
            else:
                self._complete(batch)

    async def _mend(self, batch: Batch) -> None:
        try:
            await self._assembler.mend(batch)
        except asyncio.CancelledError:
            raise _cancelled(batch) from None
        self._complete(batch)

    def _complete(self, batch: Batch) -> None:
        batch.reserved = self._budget.correct(batch.reserved, batch.nbytes, len(batch.plan.indices))
        batch.complete = True
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what may leave: the batches whose turn it is, and the ends of epochs behind their last batch."""
        while not self._admission.closed and (entry := self._buffer.pop()) is not None:
            if isinstance(entry, EpochEnds):
                self._queue.put(EndOfEpoch())
                self._buffer.open_gates()
            else:
                self._hand_over(entry)
        if self._full_since is None and self._buffer.waiting >= self._buffer.prefetch_batches:
            self._full_since = time.perf_counter()
        self._admission.room.set()

    def _hand_over(self, batch: Batch) -> None:
        failures = tuple(batch.failures)
        if failures:
            batch.failure_counter.count(failures)
            batch.error = batch.failure_counter.too_many(failures[-1]) or batch.error
        if batch.error is not None:
            self._deliver_failure(batch.error, batch.plan.number, failures)
            batch.error = None  # its traceback may refer to frames that refer to the batch
            batch.failures = []
            return
        self._buffer.waiting += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: delivered, %d waiting", batch.plan.number, self._buffer.waiting)
        if self._tuner is not None:
            self._tuner.decoding.warm = True
        self._queue.put(
            ReadyBatch(
                batch.plan.number,
                len(batch.plan.indices) if batch.kept is None else len(batch.kept),
                batch.result,
                batch.lease,
                batch.reserved,
                self.taken,
                batch.counters,
                failures,
                on_taken=self._note,
            )
        )

    def taken(self, item: ReadyBatch) -> None:
        """A batch has left the queue; called on the loop."""
        self._buffer.waiting -= 1
        self._budget.release(item.reserved)
        if self._full_since is not None:
            # A pause between epochs is nobody's: an epoch is idle no earlier than it was asked for, and no longer than
            # until the batch left, whenever that is heard of.
            if asked_at := item.counters.asked_at:
                item.counters.idle_s += max(item.taken_at - max(self._full_since, asked_at), 0.0)
            self._full_since = None
        self._buffer.open_gates()
        self._admission.room.set()


def _cancelled(batch: Batch) -> BaseException:
    """What a cancelled task of a batch raises; an error, which is heard of, where that was not the engine's end."""
    if is_cancelled():
        return asyncio.CancelledError()
    return FeedError(f"a task that assembled batch {batch.plan.number} was cancelled, and not by aiofeed")
