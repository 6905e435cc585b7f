"""The engine of one iterator: plans batches, reads and decodes their chunks, delivers them.

A batch passes through these steps, all on the engine's event loop except decoding:

1. ``_plan`` takes the next batch plan. It alone waits for limited resources: for room for a batch, then for reads.
   Batches acquire resources in order and release them in order, so there is no circular wait.
2. ``_read_and_decode`` runs as one task per chunk: read, wait for the batch's decode permit, decode in a thread.
3. The decode job of the last chunk puts the batch together. If samples failed, ``_recover`` skips or replaces them, or
   sets the batch's error.
4. ``_deliver`` puts complete batches into the queue, in order unless ``in_order=False``. A batch with an error becomes
   a ``FeedFailure``, after which nothing is delivered. (With ``in_order="samples"`` see ``samples.py``.)
5. ``taken`` ends the batch's memory reservation when the consumer has taken it, and permits the next one.

The end of an epoch is an entry between batches, and becomes an ``EndOfEpoch`` after the epoch's last batch. The next
epoch's batches are planned meanwhile. ``run`` returns when all plans are delivered, after a failure, or when its task
is cancelled, which also ends the chunk tasks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from aiofeed.core.errors import FeedError, SampleError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.failures import FailureCounter
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import BatchPlan
from aiofeed.engine.admission import Admission, MemoryBudget
from aiofeed.engine.batch import Batch, ReorderBuffer
from aiofeed.engine.concurrency import Concurrency
from aiofeed.engine.decode_stage import BuilderFactory, DecodeStage
from aiofeed.engine.fetch.async_reader import ReadResult
from aiofeed.engine.fetch.fetcher import ChunkOutcome, Fetcher
from aiofeed.engine.tuning.gil import GilLimit
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.runtime.buffers import BufferPool
from aiofeed.runtime.cancellation import is_cancelled, task_scope
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.sampling.epochs import EpochEnds, EpochStart, Step

log: logging.Logger = logging.getLogger("aiofeed.engine")


class Engine:
    """Turns batch plans into finished batches, on the running loop.

    Args:
        steps: batch plans in order, between the begins and ends of epochs. Asynchronous ones are an async generator.
        batch_size: samples of a full batch.
        fetcher: reads and decodes chunks.
        new_builder: creates the builder of a batch in its buffer.
        wrap: converts a batch of ``HostTensor`` to the form that is delivered.
        memory: buffers of batches.
        executor: the decode threads.
        queue: receives finished batches.
        limits: limits on what is in flight.
        budget: bytes in flight.
        in_order: deliver batches in order; otherwise each epoch's batches as they finish.
        policy: what happens to samples that fail.
        length: of the source, for a relative ``max_failures``.
        tuner: chooses decode threads and read concurrency; ``None``: ``limits`` fixes both.
        on_gil_limit: called once, on the loop, if the GIL limits decoding.
        buffer: replaces the engine's reorder buffer.
        late_s: returns the seconds in all by which the loop was late; reads do not count them.
    """

    stage: type[DecodeStage] = DecodeStage

    def __init__(
        self,
        steps: Iterable[Step] | AsyncIterable[Step],
        *,
        batch_size: int,
        fetcher: Fetcher,
        new_builder: BuilderFactory,
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
        on_gil_limit: Callable[[GilLimit], None] | None = None,
        buffer: ReorderBuffer | None = None,
        late_s: Callable[[], float] = float,
    ) -> None:
        self._steps = steps
        self._fetcher = fetcher
        self._queue = queue
        self._late_s = late_s
        self._budget = budget
        self._buffer = buffer or ReorderBuffer(in_order=in_order, prefetch_batches=limits.prefetch_batches)
        self._admission = Admission(limits, batch_size=batch_size, budget=budget, buffer=self._buffer)
        self._tuner = tuner
        self._concurrency = Concurrency(
            self._admission, fetcher=fetcher, executor=executor, tuner=tuner, on_gil_limit=on_gil_limit
        )
        self._policy = policy or FailurePolicy()
        self._length = length
        self._failure_counter = FailureCounter(self._policy, length)
        self._counters = EpochStats()
        self._stop = threading.Event()
        self._decode_stage = self.stage(
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
        # Samples whose reads have begun and not ended; `Admission.reading` also counts tasks that do not run yet.
        self._reading = 0
        # When the queue became full, until the next batch is taken.
        self._full_since: float | None = None
        # See ``ReadyBatch``.
        self._note: Callable[[ReadyBatch], bool] | None = None
        self.chunk_size: int = 0

    async def run(self) -> None:
        """Deliver the batch of every plan; ends early after a failure or when the task is cancelled."""
        try:
            if isinstance(self._steps, AsyncIterable):
                await self._run(self._steps)
            else:
                with self._fetcher.following(self._steps) as steps:
                    await self._run(steps)
        except BaseExceptionGroup as errors:
            # A bug in the engine or a fetcher: raise it in the consumer, which would wait forever.
            self._deliver_failure(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - a sampler or source failed: raise its error in the consumer
            self._deliver_failure(error)
        finally:
            self._stop.set()
            self._buffer.entries.clear()  # the feeder may keep this engine; free the buffers of unfinished batches

    async def _run(self, steps: Iterable[Step] | AsyncIterable[Step]) -> None:
        async with asyncio.TaskGroup() as self._group:
            with task_scope():
                await self._plan(steps)

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        if not self._admission.closed:
            self._admission.closed = True
            self._queue.put(FeedFailure(error, number, failures))

    # --- planning

    async def _plan(self, steps: Iterable[Step] | AsyncIterable[Step]) -> None:
        if isinstance(steps, AsyncIterable):
            async with aclosing(aiter(steps)) as given:  # type: ignore[type-var]
                asked = time.perf_counter()
                async for step in given:
                    self._counters.plan_s += time.perf_counter() - asked
                    await self._plan_step(step)
                    if self._admission.closed:
                        return
                    asked = time.perf_counter()
        else:
            for step in steps:
                await self._plan_step(step)
                if self._admission.closed:
                    return

    async def _plan_step(self, step: Step) -> None:
        if isinstance(step, EpochStart):
            self._counters = step.counters
            self._failure_counter = FailureCounter(self._policy, self._length)
        elif isinstance(step, EpochEnds):
            self._buffer.entries.append(step)
            self._deliver()
        else:
            samples = len(step.indices)
            admission = self._admission
            if not admission.has_room(samples):
                admission.waited_for_reads = False
                started, for_memory = time.perf_counter(), admission.batches_have_room
                await admission.until(partial(admission.has_room, samples))
                if for_memory:
                    self._counters.memory_wait_s += time.perf_counter() - started
            if admission.closed:
                return
            batch = self._new_batch(step, self._budget.reserve(samples))
            self._buffer.entries.append(batch)
            self._buffer.assembling += 1
            self._grant_permits()
            await self._start_chunks(batch, samples)

    def _new_batch(self, plan: BatchPlan, reserved: int) -> Batch:
        return Batch(plan, self._counters, self._failure_counter, reserved)

    async def _start_chunks(self, batch: Batch, samples: int) -> None:
        admission = self._admission
        self.chunk_size = min(self._fetcher.chunk_size(samples, admission.limits), admission.limits.read_concurrency)
        size = self._samples_per_read()
        self._concurrency.resize_executor()
        starts = range(0, samples, size)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: planned, %d samples in %d chunks", batch.plan.number, samples, len(starts))
        batch.unread = batch.uncounted = batch.undecoded = len(starts)
        self._fetcher.announce(batch.plan)
        for start in starts:
            stop = min(start + size, samples)
            if not admission.may_read(stop - start):
                admission.waited_for_reads = True
                await admission.until(partial(admission.may_read, stop - start))
            admission.reading += stop - start
            self._group.create_task(self._read_and_decode(batch, start, stop))

    def _samples_per_read(self) -> int:
        """How many samples one task reads."""
        return self.chunk_size

    def _grant_permits(self) -> None:
        """Permit decoding of what may be decoded."""
        self._buffer.grant_permits()

    # --- reading and decoding

    async def _read(self, batch: Batch, start: int, stop: int) -> ReadResult:
        """Read samples of a batch."""
        started, concurrency = time.perf_counter(), self._admission.limits.read_concurrency
        self._reading += stop - start
        apart = 2 * self._reading <= concurrency
        late_s = self._late_s()
        try:
            read = await self._fetcher.read(batch.plan.indices[start:stop])
            if self._tuner is not None and not read.retries:
                seconds = time.perf_counter() - started
                self._concurrency.observe_read(self._tuner, seconds, stop - start, read.nbytes, concurrency)
        finally:
            self._reading -= stop - start
            self._admission.reading -= stop - start
            self._admission.room.set()
        ended = time.perf_counter()
        # If the loop is late, the bytes may have been there before. That other threads hold the GIL is not the time of
        # the storage.
        seconds = max(0.0, ended - started - (self._late_s() - late_s))
        batch.counters.read_s += seconds
        batch.count_read(read)
        batch.counters.events.append(("read", "reads", started, ended, batch.plan.number, stop - start, read.nbytes))
        if read.waited:
            batch.count_reading(seconds, stop - start, apart=apart)
        if log.isEnabledFor(logging.DEBUG):
            ms = (ended - started) * 1e3
            log.debug("batch %d: read samples %d to %d in %.1f ms", batch.plan.number, start, stop - 1, ms)
        return read

    async def _read_and_decode(self, batch: Batch, start: int, stop: int) -> None:
        try:
            read = await self._read(batch, start, stop)
            batch.reserved = self._budget.raise_to(batch.reserved, batch.encoded_bytes)
            batch.unread -= 1
            if not self._buffer.in_order:
                self._grant_permits()
            # Let the planner run, create the next chunk's task, and let that start its reads: three iterations of the
            # loop. A decode thread that has work takes the GIL, and the reads would start half a millisecond later.
            for _ in range(3 if read.waited else 0):
                await asyncio.sleep(0)
            if not batch.decode_permit.is_set():
                await batch.decode_permit.wait()
            decoding = self._decode_stage.decode(batch, start, read.samples)
            del read
            self._count(batch, await decoding)
        except asyncio.CancelledError:
            raise cancellation_error(batch) from None

    def _count(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Count a decoded chunk; after a batch's last chunk, recover from its errors or complete it."""
        batch.count(outcome)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: decoded a chunk in %.1f ms", batch.plan.number, outcome.decode_s * 1e3)
        if outcome.job is not None and self._tuner is not None:
            self._concurrency.observe_job(self._tuner, outcome.job, saturated=not self._buffer.waiting)
            if (limit := self._tuner.decoding.gil) is not None:
                batch.counters.gil_us = limit.held_s * 1e6
        batch.uncounted -= 1
        if batch.uncounted == 0:
            if batch.errors and not self._admission.closed:
                self._group.create_task(self._recover(batch))
            else:
                self._complete(batch)

    async def _recover(self, batch: Batch) -> None:
        try:
            await self._decode_stage.recover(batch)
        except asyncio.CancelledError:
            raise cancellation_error(batch) from None
        self._complete(batch)

    def _complete(self, batch: Batch) -> None:
        batch.reserved = self._budget.correct(batch.reserved, batch.nbytes, len(batch.plan.indices))
        batch.complete = True
        self._deliver()

    # --- delivery

    def _deliver(self) -> None:
        """Deliver the complete batches that are next, and the ends of epochs after their last batch."""
        while not self._admission.closed and (entry := self._buffer.pop()) is not None:
            if isinstance(entry, EpochEnds):
                if entry.error is not None:
                    self._deliver_failure(entry.error)
                    return
                self._queue.put(EndOfEpoch())
                self._grant_permits()
            else:
                self._deliver_batch(entry)
        if self._full_since is None and self._buffer.waiting >= self._buffer.prefetch_batches:
            self._full_since = time.perf_counter()
        self._admission.room.set()

    def _deliver_batch(self, batch: Batch) -> None:
        failures = tuple(batch.failures)
        if failures:
            batch.failure_counter.count(failures)
            batch.error = batch.failure_counter.too_many(failures[-1]) or batch.error
        if batch.error is not None:
            self._deliver_failure(batch.error, batch.plan.number, failures)
            # Break the cycle: the error's traceback may refer to frames that refer to the batch.
            batch.error = None
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
                batch.handed_out,
                on_taken=self._note,
            )
        )

    def taken(self, item: ReadyBatch) -> None:
        """Release a batch that the consumer has taken from the queue; called on the loop."""
        self._buffer.waiting -= 1
        self._budget.release(item.reserved)
        if self._full_since is not None:
            # Idle time is from the full queue, or from the request for the epoch if that was later (a pause between
            # epochs does not count), until the batch left the queue, which the loop learns later.
            if asked_at := item.counters.asked_at:
                item.counters.idle_s += max(item.taken_at - max(self._full_since, asked_at), 0.0)
            self._full_since = None
        self._grant_permits()
        self._admission.room.set()


def cancellation_error(batch: Batch) -> BaseException:
    """``CancelledError`` if the engine ends; otherwise an error, which tells the consumer of a foreign cancellation."""
    if is_cancelled():
        return asyncio.CancelledError()
    return FeedError(f"a task that assembled batch {batch.plan.number} was cancelled, and not by aiofeed")
