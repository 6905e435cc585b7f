"""The engine of one iterator: plans batches, reads and decodes their chunks, delivers them.

A batch passes through these steps, all on the engine's event loop except decoding:

1. ``_plan`` takes the next batch plan. It alone waits for limited resources: for room for a batch, then for reads.
   Batches acquire resources in order and release them in order, so there is no circular wait.
2. ``Assembly.begin`` starts the batch (``assembly.py``): ``ChunkAssembly`` reads and decodes its chunks
   (``chunks.py``), ``SampleAssembly`` fills it with the samples that are ready first (``sample_order/``),
   ``RemoteAssembly`` sends its plan to a worker process (``workers/remote_assembly.py``).
3. The assembly passes the batch, or one with an error, to ``finished``.
4. ``_deliver`` puts finished batches into the queue, in order unless ``in_order=False``. A batch with an error becomes
   a ``FeedFailure``, after which nothing is delivered.
5. ``taken`` is called when the consumer or the copy thread takes a batch from the queue; ``release_taken`` ends its
   memory reservation, on the loop, and permits the next one.

The end of an epoch is an entry between batches, and becomes an ``EndOfEpoch`` after the epoch's last batch. The next
epoch's batches are planned meanwhile. ``run`` returns when all plans are delivered, after a failure, or when its task
is cancelled, which also ends the tasks of the assembly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from aiofeed.kernel.core.errors import BatchFailedError, FeedError, SampleError
from aiofeed.kernel.core.failures import FailureCounter, FailurePolicy
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import Admission, MemoryBudget
from aiofeed.kernel.engine.assembly import Assembly
from aiofeed.kernel.engine.batch import Batch, ReorderBuffer
from aiofeed.kernel.runtime.cancellation import is_cancelled, task_scope
from aiofeed.kernel.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch
from aiofeed.kernel.sampling.epochs import EpochEnds, EpochStart, Step

log: logging.Logger = logging.getLogger("aiofeed.engine")


class Engine:
    """Turns batch plans into finished batches, on the running loop.

    Args:
        steps: batch plans in order, between the begins and ends of epochs. Asynchronous ones are an async generator.
        assembly: creates the assembly, which makes the batches of this engine, with its limits.
        batch_size: samples of a full batch.
        queue: receives finished batches.
        limits: limits on what is in flight.
        budget: bytes in flight.
        in_order: deliver batches in order; otherwise each epoch's batches as they finish.
        policy: what happens to samples that fail.
        length: of the source, for a relative ``max_failures``.
        counts_failures: whether failures are counted and the first error ends the engine; otherwise errors are
            delivered as those of a ``ReadyBatch``.
        call: calls a function on the loop, from any thread.
    """

    _tasks: asyncio.TaskGroup

    def __init__(
        self,
        steps: Iterable[Step] | AsyncIterable[Step],
        assembly: Callable[[Admission], Assembly],
        *,
        batch_size: int,
        queue: BatchQueue[QueueItem],
        limits: ResolvedLimits,
        budget: MemoryBudget,
        in_order: bool,
        policy: FailurePolicy | None = None,
        length: int = 0,
        counts_failures: bool = True,
        call: Callable[[Callable[[], object]], object],
    ) -> None:
        self._steps = steps
        self._queue = queue
        self._call = call
        # Batches that were taken from the queue, until the loop releases them.
        self._taken: deque[ReadyBatch] = deque()
        self._running = True
        self.budget = budget
        self.buffer: ReorderBuffer = ReorderBuffer(in_order=in_order, prefetch_batches=limits.prefetch_batches)
        self.admission: Admission = Admission(limits, batch_size=batch_size, budget=budget, buffer=self.buffer)
        self._policy = policy or FailurePolicy()
        self._length = length
        self._counts_failures = counts_failures
        self._failure_counter = FailureCounter(self._policy, length)
        self._epoch = EpochStart(EpochStats())
        # When the queue became full, until the next batch is taken.
        self._full_since: float | None = None
        self.assembly: Assembly = assembly(self.admission)

    async def run(self) -> None:
        """Deliver the batch of every plan; ends early after a failure or when the task is cancelled."""
        self.assembly.engine = self
        try:
            if isinstance(self._steps, AsyncIterable):
                await self._run(self._steps)
            else:
                with self.assembly.reading_ahead(self._steps) as steps:
                    await self._run(steps)
        except BaseExceptionGroup as errors:
            # A bug in the engine or a fetcher: raise it in the consumer, which would wait forever.
            self._deliver_failure(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - a sampler or source failed: raise its error in the consumer
            self._deliver_failure(error)
        finally:
            self._running = False
            # The next engine shares the budget. What is taken from now on wakes the loop.
            self.release_taken()
            self.assembly.stop()
            del self.assembly.engine
            self.buffer.entries.clear()  # the feeder may keep this engine; free the buffers of unfinished batches

    async def _run(self, steps: Iterable[Step] | AsyncIterable[Step]) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            with task_scope():
                await self._plan(steps)

    def start(self, batch: Batch, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run a coroutine function for a batch, in a task that ends with the engine; do nothing if the engine ends."""
        coroutine = self._do(batch, work, *arguments)
        try:
            self._tasks.create_task(coroutine)
        except RuntimeError:  # the group is ending, as its tasks are cancelled
            coroutine.close()

    async def _do(self, batch: Batch, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            error = f"a task that assembled batch {batch.plan.number} was cancelled, and not by aiofeed"
            raise FeedError(error) from None

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        if not self.admission.closed:
            self.admission.closed = True
            self._queue.put(FeedFailure(error, number, failures))

    def waiting_for(self) -> tuple[Any, ...]:
        """Return what the next batch waits for; see ``Producer.waiting_for``. From any thread."""
        batch = next((entry for entry in list(self.buffer.entries) if isinstance(entry, Batch)), None)
        if batch is None:
            return ("for the next batch to be planned, by the sampler, plan or iterable of a Stream",)
        what, *pids = self.assembly.waiting_for(batch)
        return f"for batch {batch.plan.number}: {what}", *pids

    def fail(self, error: BaseException) -> None:
        """Deliver an error, after which nothing is delivered."""
        self._deliver_failure(error)
        self.admission.room.set()

    # --- planning

    async def _plan(self, steps: Iterable[Step] | AsyncIterable[Step]) -> None:
        if isinstance(steps, AsyncIterable):
            async with aclosing(aiter(steps)) as given:  # type: ignore[type-var]
                asked = time.perf_counter()
                async for step in given:
                    self._epoch.counters.plan_s += time.perf_counter() - asked
                    await self._plan_step(step)
                    if self.admission.closed:
                        return
                    asked = time.perf_counter()
        else:
            for step, grouped in self._grouped(steps):
                await self._plan_step(step, grouped)
                if self.admission.closed:
                    return

    def _grouped(self, steps: Iterable[Step]) -> Iterator[tuple[Step, list[BatchPlan]]]:
        """Yield each step, with a plan the plans behind it whose batches are made together with its batch."""
        group: list[BatchPlan] = []
        for step in steps:
            if isinstance(step, BatchPlan):
                group.append(step)
            if group and (len(group) >= self.assembly.together or group[-1] is not step):
                yield group[0], group[1:]
                group = []
            if not isinstance(step, BatchPlan):
                yield step, []

    async def _plan_step(self, step: Step, grouped: Sequence[BatchPlan] = ()) -> None:
        if isinstance(step, EpochStart):
            self._epoch = step
            self._failure_counter = FailureCounter(self._policy, self._length)
        elif isinstance(step, EpochEnds):
            self.buffer.entries.append(step)
            self._deliver()
        else:
            samples = len(step.indices) + sum(len(plan.indices) for plan in grouped)
            admission = self.admission
            if not admission.has_room(samples):
                admission.waited_for_reads = False
                started, for_memory = time.perf_counter(), admission.batches_have_room
                await admission.until(partial(admission.has_room, samples))
                if for_memory:
                    self._epoch.counters.memory_wait_s += time.perf_counter() - started
            if admission.closed:
                return
            reserved = self.budget.reserve(samples)
            batch = Batch(step, self._epoch, self._failure_counter, reserved)
            batch.grouped = [Batch(plan, self._epoch, self._failure_counter, 0) for plan in grouped]
            self.buffer.entries.append(batch)
            self.buffer.assembling += 1
            await self.assembly.begin(batch)

    def split(self, batch: Batch, size: int) -> Batch:
        """Leave ``size`` batches in a group; returns the first of the others, which follow it as a group."""
        first, *others = batch.grouped[size - 1 :]
        del batch.grouped[size - 1 :]
        first.grouped = others
        first.reserved = self.budget.reserve(sum(len(each.plan.indices) for each in (first, *others)))
        moved = min(first.reserved, batch.reserved)
        batch.reserved -= moved
        self.budget.reserved_bytes -= moved
        first.unread = 0
        first.decode_permit.set()
        self.buffer.entries.insert(self.buffer.entries.index(batch) + 1, first)
        self.buffer.assembling += 1
        self.buffer.permitted += 1
        return first

    def finished(self, batch: Batch) -> None:
        """Deliver a finished batch and those grouped with it, or the first error, when it is next."""
        group = (batch, *batch.grouped)
        nbytes, samples = sum(each.nbytes for each in group), sum(len(each.plan.indices) for each in group)
        batch.reserved = self.budget.correct(batch.reserved, nbytes, samples)
        batch.is_finished = True
        self._deliver()

    # --- delivery

    def _deliver(self) -> None:
        """Deliver the finished batches that are next, and the ends of epochs after their last batch."""
        while not self.admission.closed and (entry := self.buffer.pop()) is not None:
            if isinstance(entry, EpochEnds):
                if entry.error is not None:
                    self._deliver_failure(entry.error)
                    return
                self._queue.put(EndOfEpoch(entry.next_batch))
                self.assembly.permit()
            else:
                self.buffer.waiting += 1
                last = entry.grouped[-1] if entry.grouped else entry
                for batch in (entry, *entry.grouped):
                    if not self._deliver_batch(batch, entry.reserved if batch is last else None):
                        return
        if self._full_since is None and self.buffer.waiting >= self.buffer.prefetch_batches:
            self._full_since = time.perf_counter()
        self.admission.room.set()

    def _deliver_batch(self, batch: Batch, reserved: int | None) -> bool:
        """Deliver a batch or its error. ``reserved``: bytes to release when it is taken; ``None``: a later one does."""
        failures = tuple(batch.failures)
        if failures and self._counts_failures:
            batch.failure_counter.count(failures)
            batch.error = batch.failure_counter.too_many(failures[-1]) or batch.error
        # A batch of which nothing is left is a value, too: the consumer leaves it out, or raises its error.
        nothing_left = self._policy.action == "skip" and isinstance(batch.error, BatchFailedError)
        if batch.error is not None and self._counts_failures and not nothing_left:
            self._deliver_failure(batch.error, batch.plan.number, failures)
            # Break the cycle: the error's traceback may refer to frames that refer to the batch.
            batch.error = None
            batch.failures = []
            return False
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: delivered, %d waiting", batch.plan.number, self.buffer.waiting)
        self.assembly.delivered(batch)
        indices = batch.indices if batch.kept is None else [batch.indices[at] for at in batch.kept]
        self._queue.put(
            ReadyBatch(
                batch.plan.number,
                len(indices),
                batch.result,
                batch.lease,
                reserved or 0,
                None if reserved is None else self.taken,
                batch.counters,
                failures,
                batch.returned_samples,
                plan=batch.plan,
                indices=indices,
                error=batch.error,
            )
        )
        return True

    def taken(self, item: ReadyBatch) -> None:
        """Have the loop release a batch that leaves the queue; in the thread that takes it.

        A woken loop takes the GIL from the step that has just begun. So while there is other work, the batch waits for
        what wakes the loop anyway.
        """
        # Before the question: the loop may do the last of its work meanwhile.
        self._taken.append(item)
        if not (self._running and self.assembly.busy):
            self._call(self.release_taken)

    def release_taken(self) -> None:
        """Release the batches that were taken from the queue, and let as many more be made; on the loop."""
        if not self._taken:
            return
        while self._taken:
            item = self._taken.popleft()
            if item.taken:
                continue  # its take was interrupted and repeated
            item.taken = True
            self.buffer.waiting -= 1
            self.budget.release(item.reserved)
            if self._full_since is not None:
                # Idle time is from the full queue, or from the request for the epoch if that was later (a pause between
                # epochs does not count), until the batch was taken, which the loop learns later.
                if asked_at := item.counters.asked_at:
                    item.counters.idle_s += max(item.taken_at - max(self._full_since, asked_at), 0.0)
                self._full_since = None
            self.assembly.taken(item)
        self.assembly.permit()
        self.admission.room.set()
