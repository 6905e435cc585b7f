"""Decodes the chunks of a batch in threads, puts the batch together, and skips or replaces failed samples.

The way of a sample that fails: ``Fetcher.decode`` returns its error with the chunk's outcome, ``_record`` adds it to
``Batch.errors``, and after the batch's last chunk ``recover`` applies the failure policy. The result is either a batch
of the remaining or replaced samples with ``Batch.failures``, or ``Batch.error``, which the engine delivers instead.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiofeed.kernel.core.errors import BatchFailedError, CollateError, FeedError, SampleError
from aiofeed.kernel.core.failures import FailureCounter, FailurePolicy
from aiofeed.kernel.core.types import BatchPlan, Gathered
from aiofeed.kernel.engine.assembly import AssemblyOptions
from aiofeed.kernel.engine.batch import Batch, BatchKeys
from aiofeed.kernel.engine.concurrency import JobTimer
from aiofeed.kernel.engine.fetch.collate import BatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import UNREAD, ChunkOutcome, Fetcher
from aiofeed.kernel.engine.fetch.user_errors import suggest_policy
from aiofeed.kernel.engine.tuning.threads import ThreadTuner
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.thread_pool import ThreadPool, gil_wait_s
from aiofeed.kernel.runtime.time_limits import (
    AbandonedError,
    JobControl,
    JobDeadline,
    JobStuckError,
    run_with_sample_timeout,
)

# Decode threads measure this often, after a job, how long one waits for the GIL: some microseconds, or the 5 ms of
# Python's switch interval if another thread runs Python code. It takes 0.2 ms.
GIL_PROBE_INTERVAL_S = 0.05
# The search for a replacement yields to the loop after this many samples that are known to fail.
YIELD_STEPS = 256
Attempt = Callable[[BatchPlan, int], Awaitable[FeedError | None]]
"""Reads and decodes the sample at a position of a plan; returns its error."""


@dataclass(eq=False)
class DecodeStage:
    """Decodes chunks of batches in the decode threads.

    Args:
        options: of its assembly. A tuner uses the timing of jobs; without one they are not timed.
        stop: ends running jobs.
        read_slot: limits reads of replacements.
    """

    options: AssemblyOptions
    stop: threading.Event
    read_slot: Callable[[], AbstractAsyncContextManager[None]]

    def __post_init__(self) -> None:
        options = self.options
        self.fetcher: Fetcher = options.fetcher
        self.executor: ThreadPool = options.executor
        self.policy: FailurePolicy = options.policy
        self.tuner: ThreadTuner | None = None if options.tuner is None else options.tuner.decoding
        # Only where waits for a core, and not for the GIL, can be told apart.
        self._probe_at = 0.0 if sys.platform == "linux" and machine.has_gil() else math.inf

    async def decode(self, batch: Batch, start: int, encoded: list[Any]) -> ChunkOutcome:
        """Decode the samples at ``start``, ``start + 1``, ...; the job of a batch's last chunk finishes the batch."""
        if (limit_s := self.fetcher.limit_s) is not None:
            return await self._decode_with_limit(limit_s, batch, start, encoded)
        job = self.executor.run(self._decode, batch, start, encoded)
        del encoded
        return await job

    def decode_together(self, batches: Sequence[Batch], made: list[ChunkOutcome]) -> None:
        """Decode whole batches whose samples the job requests; runs in a decode thread.

        Adds their outcomes to ``made``. Ends early after one with an error, or if the fetcher no longer reads in jobs.
        """
        for batch in batches:
            batch.undecoded, began, samples = 1, time.perf_counter(), len(batch.plan.indices)
            outcome = self._decode(batch, 0, [UNREAD] * samples)
            if outcome.read_s:
                read = began, began + outcome.read_s, batch.plan.number, samples, outcome.nbytes
                batch.counters.events.append(("read", "reads", *read))
            ended = bool(batch.errors) or self.stop.is_set() or not self.fetcher.reads_in_jobs
            made.append(outcome)
            if ended:
                return

    async def _decode_with_limit(self, limit_s: float, batch: Batch, start: int, encoded: list[Any]) -> ChunkOutcome:
        """Like ``decode``; a sample that takes longer than ``limit_s`` fails, and another thread continues after it."""
        while True:
            deadline = JobDeadline(limit_s)
            work = partial(self._decode, batch, start, encoded, deadline)
            try:
                outcome, overdue = await run_with_sample_timeout(self.executor, work, deadline)
            except JobStuckError as error:
                raise FeedError(
                    f"{error} (batch {batch.plan.number}, near {BatchKeys(batch.plan, self.fetcher)[start]!r})"
                ) from None
            if overdue is None:
                assert outcome is not None
                return outcome
            partial_outcome: ChunkOutcome = deadline.outcome
            partial_outcome.errors.append((overdue, self.fetcher.overdue(batch.plan.indices[overdue])))
            encoded, start = encoded[overdue + 1 - start :], overdue + 1
            if not encoded or self.policy.action == "raise":
                self._record(batch, partial_outcome)
                return partial_outcome
            batch.count(partial_outcome)
            with batch.lock:
                batch.errors += partial_outcome.errors

    def _decode(
        self, batch: Batch, start: int, encoded: list[Any], deadline: JobDeadline | None = None
    ) -> ChunkOutcome:
        """Decode a chunk, and finish the batch if it is the last one; runs in a decode thread."""
        # The work for a batch that is gathered was done, and timed, in other jobs.
        tuner, timer = self.tuner, None
        # It compares jobs beside as many threads as it has chosen: of tiny samples, one thread decodes.
        if tuner is not None and tuner.threads == self.executor.max_running and not isinstance(encoded, Gathered):
            timer = JobTimer(self.executor) if tuner.listening else None
        samples, began, alone = len(encoded), time.perf_counter(), self.executor.alone
        core_wait_s = machine.core_wait_s(threading.get_native_id()) if alone else 0.0
        batch.under_way[start] = "decoding", began, start + samples, encoded
        # The first chunk that runs takes the buffer; chunks that wait for a thread need none.
        with batch.lock:
            if batch.builder is None:
                batch.lease = self.options.memory.lease()
                batch.builder = self.options.new_builder(batch.plan, batch.lease)
            builder = batch.builder
        outcome = self.fetcher.decode(batch.plan, start, encoded, builder, JobControl(self.stop, deadline))
        batch.under_way.pop(start, None)
        if deadline is not None and not deadline.finish():
            raise AbandonedError
        if alone:
            core_wait_s = machine.core_wait_s(threading.get_native_id()) - core_wait_s
            waited = min(core_wait_s / (time.perf_counter() - began), 1.0)
            self.executor.count_alone((1.0 - waited) * outcome.decode_s, outcome.samples)
        thread, ended = threading.current_thread().name, time.perf_counter()
        batch.counters.events.append(("decode", thread, began, ended, batch.plan.number, samples, outcome.nbytes))
        if self._record(batch, outcome) and not batch.errors and not self.stop.is_set():
            self.finish(batch, outcome)
        if (now := time.perf_counter()) >= self._probe_at:
            self._probe_at = now + GIL_PROBE_INTERVAL_S
            outcome.gil_probe_s, outcome.gil_probes = gil_wait_s(), 1
        if timer is not None:
            decoded = builder.nbytes * samples // len(batch.plan.indices)
            outcome.job = timer.job(samples, outcome.nbytes + decoded)
        return outcome

    def _record(self, batch: Batch, outcome: ChunkOutcome) -> bool:
        """Move a chunk's errors to its batch; returns whether it was the batch's last chunk."""
        with batch.lock:
            batch.errors += outcome.errors
            # The errors' tracebacks refer to frames that refer to the outcome: do not create a cycle.
            outcome.errors = []
            batch.undecoded -= 1
            return batch.undecoded == 0

    def finish(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Collate the batch; runs in a decode thread."""
        started, cpu_started = time.perf_counter(), time.thread_time()
        assert batch.builder is not None
        try:
            batch.result = self.options.wrap(batch.builder.finish(BatchKeys(batch.plan, self.fetcher), batch.kept))
        except CollateError as error:
            batch.error = error
        ended, plan = time.perf_counter(), batch.plan
        outcome.collate_s += ended - started
        outcome.collate_cpu_s += time.thread_time() - cpu_started
        event = (threading.current_thread().name, started, ended, plan.number, len(plan.indices), batch.builder.nbytes)
        batch.counters.events.append(("collate", *event))

    async def recover(self, batch: Batch) -> None:
        """Apply the failure policy to a batch with errors: skip or replace the failed samples, or set its error."""
        errors = sorted(batch.errors, key=lambda entry: entry[0])
        first = errors[0][1]
        failed = [(position, error) for position, error in errors if isinstance(error, SampleError)]
        if self.policy.action == "raise":
            # The first error in the batch's order, so that the same files give the same error in every run.
            batch.error = suggest_policy(first)
            batch.failures = [first] if isinstance(first, SampleError) else []
            return
        if len(failed) < len(errors):
            # Samples that do not fit together are not the failure of one sample.
            batch.error = next(error for _, error in errors if not isinstance(error, SampleError))
            return
        failed = [(position, batch.failure_counter.remember(error)) for position, error in failed]
        batch.errors.clear()
        if self.policy.action == "skip":
            recovery = skip_failed(batch.plan, failed)
        else:
            recovery = await replace_failed(batch.plan, failed, batch.failure_counter, partial(self._attempt, batch))
        batch.indices = recovery.indices or batch.plan.indices
        batch.kept, batch.failures, batch.error = recovery.kept, recovery.failures, recovery.error
        if batch.error is None:
            outcome = ChunkOutcome()
            await self.executor.run(self.finish, batch, outcome)
            batch.count(outcome)

    async def _attempt(self, batch: Batch, plan: BatchPlan, position: int) -> FeedError | None:
        """Read and decode the sample at ``position`` of ``plan`` into its place in ``batch``; returns its error."""
        async with self.read_slot():
            read = await self.fetcher.read(plan.indices[position : position + 1], plan, position)
        batch.count_read(read)
        assert batch.builder is not None
        limit_s = self.fetcher.limit_s
        deadline = None if limit_s is None else JobDeadline(limit_s)
        work = partial(self._decode_replacement, plan, position, read.samples, batch.builder, deadline)
        if deadline is None:
            outcome = await self.executor.run(work)
        else:
            result, _ = await run_with_sample_timeout(self.executor, work, deadline)
            outcome = result or ChunkOutcome([(position, self.fetcher.overdue(plan.indices[position]))])
        batch.count(outcome)
        return outcome.errors[0][1] if outcome.errors else None

    def _decode_replacement(
        self, plan: BatchPlan, position: int, encoded: list[Any], builder: BatchBuilder, deadline: JobDeadline | None
    ) -> ChunkOutcome:
        outcome = self.fetcher.decode(plan, position, encoded, builder, JobControl(self.stop, deadline))
        if deadline is not None and not deadline.finish():
            raise AbandonedError
        return outcome


@dataclass(eq=False)
class Recovery:
    """The result of skipping or replacing a batch's failed samples.

    Args:
        kept: positions of the remaining samples; ``None``: all, replacements included.
        failures: errors of the failed samples, and of replacements that failed, in a fixed order.
        error: raised to the consumer if there is no batch to deliver.
        indices: those of the plan with those of replacements; empty without replacements.
    """

    kept: Sequence[int] | None = None
    failures: list[SampleError] = field(default_factory=list)
    error: FeedError | None = None
    indices: list[int] = field(default_factory=list)


def skip_failed(plan: BatchPlan, failed: Sequence[tuple[int, SampleError]]) -> Recovery:
    """Leave out the failed samples; the others keep their order."""
    positions = {position for position, _ in failed}
    kept = [position for position in range(len(plan.indices)) if position not in positions]
    recovery = Recovery(kept, [error for _, error in failed])
    if not kept:
        recovery.error = nothing_left(plan, recovery.failures[-1])
    return recovery


def nothing_left(plan: BatchPlan, last: SampleError) -> BatchFailedError:
    """Return the error of a batch all of whose samples failed, ``last`` as the last one."""
    every = "the only sample" if len(plan.indices) == 1 else f"all {len(plan.indices)} samples"
    error = BatchFailedError(
        f"{every} of batch {plan.number} failed, so there is no batch to deliver; the last: {last}; feeder.failures "
        f"lists them. It is not left out, as other ranks take a step with it, or nothing else is left of the epoch: "
        f'on_error="replace" fills it with other samples; pass pad=False if ranks may have different numbers of batches'
    )
    error.__cause__ = last
    return error


async def replace_failed(
    plan: BatchPlan, failed: Sequence[tuple[int, SampleError]], failure_counter: FailureCounter, attempt: Attempt
) -> Recovery:
    """Replace each failed sample by the next good one after it in the epoch's order.

    One after the other: adjacent failed samples would otherwise attempt the same replacements at the same time.
    """
    recovery = Recovery(indices=list(plan.indices))
    # One after the other: adjacent samples would attempt the same replacements at the same time.
    for position, error in failed:
        further, recovery.error = await _replace_one(plan, position, recovery.indices, failure_counter, attempt)
        recovery.failures += [error, *further]
        if recovery.error is not None:
            break
    return recovery


async def _replace_one(
    plan: BatchPlan, position: int, indices: list[int], failure_counter: FailureCounter, attempt: Attempt
) -> tuple[list[SampleError], FeedError | None]:
    """Fill one place of ``indices``; returns the errors of candidates that failed, and an error if all of them did."""
    replacements = plan.replacements
    assert replacements is not None
    failed: dict[int, SampleError] = {}
    for step in range(1, replacements.length):
        candidate = replacements.index_at(plan.positions[position] + step)
        index = candidate if isinstance(candidate, int) else await candidate
        if (known := failure_counter.known.get(index)) is not None:
            failed[index] = known
            if step % YIELD_STEPS == 0:
                await asyncio.sleep(0)
        else:
            indices[position] = index
            error = await attempt(replace(plan, indices=[*indices]), position)
            if not isinstance(error, SampleError):
                return list(failed.values()), error
            failed[index] = failure_counter.remember(error)
        if len(failed) > failure_counter.allowed:
            break  # more than max_failures have failed, whatever the next candidate does
    return list(failed.values()), BatchFailedError(
        f"no sample was found to replace one of batch {plan.number}: the next {len(failed)} in the epoch's order "
        f"failed too; feeder.failures lists them"
    )
