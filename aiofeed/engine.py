"""The engine of one epoch: plan, assemble, deliver. The only place that knows of tasks and of cancellation.

One coroutine plans. It alone waits for limited resources, in order: room for another batch, bytes, reads. Each chunk
of a batch is a task of its own: read, wait until the batch is among those that may be decoded, decode. A batch that
is complete leaves in its turn. Since whoever waits for room waits in order, and room comes back from what stands
before it, nothing can deadlock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from aiofeed import trace
from aiofeed.assembler import Assembler, AssemblyFactory
from aiofeed.batch import Batch
from aiofeed.budget import Budget
from aiofeed.cancellation import TaskScope, is_cancelled
from aiofeed.config import ResolvedLimits
from aiofeed.counters import Counters
from aiofeed.errors import FeedError, SampleError
from aiofeed.executor import ThreadPool
from aiofeed.failures import Tally
from aiofeed.fetch import Fetcher, Outcome
from aiofeed.guard import StopFlag
from aiofeed.handoff import Handoff
from aiofeed.items import Ended, Failed, Item, Ready
from aiofeed.policy import FailurePolicy
from aiofeed.staging import Memory
from aiofeed.stream import EpochBegins, EpochEnds, Step
from aiofeed.thread_tuning import GilLimit, Job
from aiofeed.tuning import Tuner


class Engine:
    """Turns batch plans into finished batches, on the running loop.

    Args:
        steps: what to assemble, in order, and where epochs begin and end.
        batch_size: samples of a full batch.
        fetcher: reads and decodes chunks.
        new_assembly: makes the place where a batch is put together.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        memory: where its memory comes from.
        executor: the decode threads.
        handoff: where finished batches go.
        limits: what may be in flight.
        budget: bytes in flight.
        in_order: hand batches out in order; otherwise whichever of an epoch is finished.
        policy: what becomes of samples that fail.
        length: of the source; what ``max_failures`` is a part of.
        tuner: chooses how many threads decode and how many samples are read at a time; ``None``: ``limits`` says.
        tell: told on the loop, once, where the GIL turns out to be what limits decoding.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        batch_size: int,
        fetcher: Fetcher,
        new_assembly: AssemblyFactory,
        wrap: Callable[[Any], Any],
        memory: Memory,
        executor: ThreadPool,
        handoff: Handoff[Item],
        limits: ResolvedLimits,
        budget: Budget,
        in_order: bool,
        policy: FailurePolicy | None = None,
        length: int = 0,
        tuner: Tuner | None = None,
        tell: Callable[[GilLimit], None] | None = None,
    ) -> None:
        self._steps = steps
        self._fetcher = fetcher
        self._executor = executor
        self._handoff = handoff
        self._limits = limits
        self._batch_size = batch_size
        self._tuner = tuner
        self._tell_limit = tell
        self._most_batches = limits.batches_in_flight(batch_size)
        self._budget = budget
        self._in_order = in_order
        self._policy = policy or FailurePolicy()
        self._length = length
        self._tally = Tally(self._policy, length)
        self._counters = Counters()
        self._stop = StopFlag()
        self._assembler = Assembler(
            fetcher=fetcher,
            new_assembly=new_assembly,
            wrap=wrap,
            memory=memory,
            executor=executor,
            policy=self._policy,
            stop=self._stop,
            read_slot=self._read_slot,
            tuner=None if tuner is None else tuner.decoding,
        )
        self._room = asyncio.Event()
        # Admitted and not yet delivered, in order, with the ends of epochs between them.
        self._line: deque[Batch | EpochEnds] = deque()
        # Of those: how many batches, and how many may be decoded. Then how many were delivered and are not yet taken.
        self._assembling = self._opened = self._waiting = 0
        self._reading = 0
        # Whether the plan last waited for reads to end, rather than for room.
        self._held_by_reads = False
        self._failed = False
        self._full_since: float | None = None
        # See ``Ready``.
        self._note: Callable[[Ready], bool] | None = None
        self.chunk_size = 0
        if tuner is not None:
            self._follow(tuner)

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
            self._line.clear()  # the feeder may keep this engine, and with it the memory of half-made batches

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        if not self._failed:
            self._failed = True
            self._handoff.put(Failed(error, number, failures))

    async def _plan(self) -> None:
        for step in self._steps:
            await self._plan_step(step)
            if self._failed:
                return

    async def _plan_step(self, step: Step) -> None:
        if isinstance(step, EpochBegins):
            self._counters = step.counters
            self._tally = Tally(self._policy, self._length)
        elif isinstance(step, EpochEnds):
            self._line.append(step)
            self._deliver()
        else:
            samples = len(step.indices)
            if not self._has_room(samples):
                self._held_by_reads = False
                await self._until(partial(self._has_room, samples))
            if self._failed:
                return
            batch = Batch(step, self._counters, self._tally, self._budget.reserve(samples))
            self._line.append(batch)
            self._assembling += 1
            self._open_gates()
            await self._start_chunks(batch, samples)

    async def _start_chunks(self, batch: Batch, samples: int) -> None:
        size = min(self._fetcher.chunk_size(samples, self._limits), self._limits.read_concurrency)
        self.chunk_size = size
        self._open_lanes()
        starts = range(0, samples, size)
        batch.unread = batch.unaccounted = batch.undecoded = len(starts)
        for start in starts:
            stop = min(start + size, samples)
            if not self._may_read(stop - start):
                self._held_by_reads = True
                await self._until(partial(self._may_read, stop - start))
            self._reading += stop - start
            self._group.create_task(self._chunk(batch, start, stop))

    def _open_lanes(self) -> None:
        """Let as many threads decode as are worth it, or as the user said."""
        lanes = self._limits.decode_threads
        if self._tuner is None or not self._tuner.decoding.given:
            lanes = self._fetcher.lanes(lanes)
        if self._tuner is not None:
            self._tuner.lanes = lanes
        if lanes != self._executor.lanes:
            self._executor.widen(lanes)

    def _follow(self, tuner: Tuner) -> None:
        """Take over what was chosen."""
        chosen = tuner.decoding.threads, tuner.reading.concurrency
        if chosen != (self._limits.decode_threads, self._limits.read_concurrency):
            self._limits = replace(self._limits, decode_threads=chosen[0], read_concurrency=chosen[1])
            self._most_batches = self._limits.batches_in_flight(self._batch_size)
            self._open_lanes()
            self._room.set()

    def _learn(self, tuner: Tuner, job: Job) -> None:
        """Let a job that was measured count, unless the consumer has enough: then it says nothing."""
        tuner.decoding.observe(replace(job, threads=0) if self._waiting else job)
        self._follow(tuner)
        if (found := tuner.news()) is not None and self._tell_limit is not None:
            self._tell_limit(found)

    def _learn_reads(self, tuner: Tuner, seconds: float, samples: int, concurrency: int) -> None:
        """Let a chunk's reads count."""
        starving = self._held_by_reads and self._executor.running < self._executor.lanes
        tuner.reading.observe(seconds, samples, concurrency=concurrency, starving=starving)
        self._follow(tuner)

    def _has_room(self, samples: int) -> bool:
        if self._failed:
            return True
        if self._assembling + self._waiting >= self._most_batches:
            return False
        # In order, the first batch goes alone until its size is known. Out of order it may be the one that is slow, and
        # must not hold up the others.
        return self._budget.admits(samples) or not (self._in_order or self._budget.known)

    def _may_read(self, samples: int) -> bool:
        return self._failed or self._reading + samples <= self._limits.read_concurrency

    @asynccontextmanager
    async def _read_slot(self) -> AsyncIterator[None]:
        """One read more, within ``read_concurrency``."""
        await self._until(partial(self._may_read, 1))
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1
            self._room.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._room.clear()
            await self._room.wait()

    async def _chunk(self, batch: Batch, start: int, stop: int) -> None:
        try:
            started, concurrency = time.perf_counter(), self._limits.read_concurrency
            try:
                read = await self._fetcher.read(batch.plan.indices[start:stop])
                if self._tuner is not None and not read.retries:
                    self._learn_reads(self._tuner, time.perf_counter() - started, stop - start, concurrency)
            finally:
                self._reading -= stop - start
                self._room.set()
            ended = time.perf_counter()
            batch.counters.read_s += ended - started
            batch.count_read(read)
            batch.reserved = self._budget.at_least(batch.reserved, batch.encoded_bytes)
            batch.unread -= 1
            if not self._in_order:
                self._open_gates()
            if trace.listeners:
                trace.emit("read", started, ended, batch.plan.number)
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

    def _count(self, batch: Batch, outcome: Outcome) -> None:
        batch.count(outcome)
        if outcome.job is not None and self._tuner is not None:
            self._learn(self._tuner, outcome.job)
        batch.unaccounted -= 1
        if batch.unaccounted == 0:
            if batch.errors and not self._failed:
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
        while not self._failed:
            if self._line and isinstance(self._line[0], EpochEnds):
                self._line.popleft()
                self._handoff.put(Ended())
                self._open_gates()
            elif (batch := self._next_complete()) is not None:
                self._line.remove(batch)
                self._assembling -= 1
                self._opened -= 1
                self._hand_over(batch)
            else:
                break
        if self._waiting >= self._limits.prefetch_batches and self._full_since is None:
            self._full_since = time.perf_counter()
        self._room.set()

    def _next_complete(self) -> Batch | None:
        for entry in self._line:
            if isinstance(entry, EpochEnds):
                return None
            if entry.complete:
                return entry
            if self._in_order:
                return None
        return None

    def _hand_over(self, batch: Batch) -> None:
        failures = tuple(batch.failures)
        if failures:
            batch.tally.count(failures)
            batch.error = batch.tally.too_many(failures[-1]) or batch.error
        if batch.error is not None:
            self._deliver_failure(batch.error, batch.plan.number, failures)
            batch.error = None  # its traceback may refer to frames that refer to the batch
            batch.failures = []
            return
        self._waiting += 1
        if self._tuner is not None:
            self._tuner.decoding.warm = True
        self._handoff.put(
            Ready(
                batch.plan.number,
                len(batch.plan.indices) if batch.kept is None else len(batch.kept),
                batch.result,
                batch.lease,
                batch.reserved,
                self.taken,
                batch.counters,
                failures,
                note=self._note,
            )
        )

    def taken(self, item: Ready) -> None:
        """A batch has left the queue; called on the loop."""
        self._waiting -= 1
        self._budget.release(item.reserved)
        if self._full_since is not None:
            # A pause between epochs is nobody's: an epoch is idle no earlier than it was asked for.
            since = max(self._full_since, item.counters.asked_at)
            item.counters.idle_s += max(time.perf_counter() - since, 0.0)
            self._full_since = None
        self._open_gates()
        self._room.set()

    def _open_gates(self) -> None:
        """Let batches be decoded, as many as may be finished and waiting.

        In order: the first of the line. Otherwise those that have been read, of the first epoch alone: one of the
        next cannot be handed out before that has ended, and would keep its place from those that can.
        """
        for entry in self._line:
            if self._opened + self._waiting >= self._limits.prefetch_batches:
                return
            if isinstance(entry, EpochEnds):
                if not self._in_order:
                    return
            elif not entry.gate.is_set() and (self._in_order or entry.unread == 0):
                entry.gate.set()
                self._opened += 1


def _cancelled(batch: Batch) -> BaseException:
    """What a cancelled task of a batch raises; an error, which is heard of, where that was not the engine's end."""
    if is_cancelled():
        return asyncio.CancelledError()
    return FeedError(f"a task that assembled batch {batch.plan.number} was cancelled, and not by aiofeed")
