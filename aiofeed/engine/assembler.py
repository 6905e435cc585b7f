"""Samples of a batch, decoded and put together in decode threads, and what is done where some of them fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiofeed.core.errors import BatchFailedError, CollateError, FeedError, SampleError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.failures import FailureCounter
from aiofeed.core.types import BatchPlan
from aiofeed.engine.batch import Batch, BatchKeys
from aiofeed.engine.concurrency import JobTimer
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.fetcher import ChunkOutcome, Fetcher
from aiofeed.engine.tuning.threads import ThreadTuner
from aiofeed.runtime.buffers import BufferLease, BufferPool
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.runtime.time_limits import (
    AbandonedError,
    JobControl,
    JobDeadline,
    JobStuckError,
    StopFlag,
    run_with_sample_timeout,
)

AssemblyFactory = Callable[[int, BufferLease], BatchBuilder]


# Looking for a good sample among many that are known to be bad must not hold up the loop.
YIELD_STEPS = 256
Try = Callable[[BatchPlan, int], Awaitable[FeedError | None]]
"""Read and decode the sample at a position of a batch, by a plan; the error it came to."""


class DecodeStage:
    """Decodes chunks of batches.

    Args:
        fetcher: reads and decodes.
        new_builder: makes the place where a batch is put together.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over. It runs in the decode thread, where what it
            touches is in the cache: in the consumer, just back from its step, the same takes ten times as long.
        memory: where the memory of batches comes from.
        executor: the decode threads.
        policy: what becomes of samples that fail.
        stop: ends running jobs.
        read_slot: held while another sample is read to replace one that failed.
        tuner: what wants to know what jobs take; ``None``: nothing does.
    """

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        new_builder: AssemblyFactory,
        wrap: Callable[[Any], Any],
        memory: BufferPool,
        executor: ThreadPool,
        policy: FailurePolicy,
        stop: StopFlag,
        read_slot: Callable[[], AbstractAsyncContextManager[None]],
        tuner: ThreadTuner | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._new_builder = new_builder
        self._wrap = wrap
        self._memory = memory
        self._executor = executor
        self._policy = policy
        self._stop = stop
        self._read_slot = read_slot
        self._tuner = tuner

    async def decode(self, batch: Batch, start: int, encoded: list[Any]) -> ChunkOutcome:
        """Decode samples ``start``, ``start + 1``, ...; with the last chunk of a batch it is put together."""
        if (limit_s := self._fetcher.limit_s) is not None:
            return await self._decode_within(limit_s, batch, start, encoded)
        # As run_in_executor does, without asking each time whether the function is a coroutine's.
        job = self._executor.submit(self._decode, batch, start, encoded)
        del encoded
        return await asyncio.wrap_future(job)

    async def _decode_within(self, limit_s: float, batch: Batch, start: int, encoded: list[Any]) -> ChunkOutcome:
        """A sample that takes longer than ``limit_s`` has failed, and another thread goes on behind it."""
        while True:
            deadline = JobDeadline(limit_s)
            work = partial(self._decode, batch, start, encoded, deadline)
            try:
                outcome, at = await run_with_sample_timeout(self._executor, work, deadline)
            except JobStuckError as error:
                raise FeedError(
                    f"{error} (batch {batch.plan.number}, near {BatchKeys(batch.plan, self._fetcher)[start]!r})"
                ) from None
            if at is None:
                break
            late: ChunkOutcome = deadline.outcome
            late.errors.append((at, self._fetcher.overdue(batch.plan.indices[at])))
            encoded, start = encoded[at + 1 - start :], at + 1
            if not encoded or self._policy.action == "raise":
                self._settle(batch, late)
                outcome = late
                break
            batch.count(late)
            with batch.lock:
                batch.errors += late.errors
        assert outcome is not None
        return outcome

    def _decode(
        self, batch: Batch, start: int, encoded: list[Any], deadline: JobDeadline | None = None
    ) -> ChunkOutcome:
        """Decode a chunk, and put the batch together where it was the last; runs in a decode thread."""
        meter = JobTimer(self._executor) if self._tuner is not None and self._tuner.listening else None
        samples = len(encoded)
        # Memory is taken by the first chunk that is really decoded, not by those that wait for a thread.
        with batch.lock:
            if batch.builder is None:
                batch.lease = self._memory.lease()
                batch.builder = self._new_builder(len(batch.plan.indices), batch.lease)
            builder = batch.builder
        outcome = self._fetcher.decode(batch.plan, start, encoded, builder, JobControl(self._stop, deadline))
        if deadline is not None and not deadline.finish():
            raise AbandonedError
        if self._settle(batch, outcome) and not batch.errors and not self._stop.stopped:
            self._finish(batch, outcome)
        if meter is not None:
            decoded = builder.nbytes * samples // len(batch.plan.indices)
            outcome.job = meter.job(samples, outcome.nbytes + decoded)
        return outcome

    def _settle(self, batch: Batch, outcome: ChunkOutcome) -> bool:
        """Note what came of a chunk; whether it was the batch's last."""
        with batch.lock:
            batch.errors += outcome.errors
            # Tracebacks refer to the frames that refer to the outcome: what has been handed on is not kept there, too.
            outcome.errors = []
            batch.undecoded -= 1
            return batch.undecoded == 0

    def _finish(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Put the batch together; runs in a decode thread."""
        started = time.perf_counter()
        assert batch.builder is not None
        try:
            batch.result = self._wrap(batch.builder.finish(BatchKeys(batch.plan, self._fetcher), batch.kept))
        except CollateError as error:
            batch.error = error
        outcome.collate_s += time.perf_counter() - started

    async def mend(self, batch: Batch) -> None:
        """Do about a batch's failures what the policy says."""
        errors = sorted(batch.errors, key=lambda entry: entry[0])
        first = errors[0][1]
        failed = [(position, error) for position, error in errors if isinstance(error, SampleError)]
        if self._policy.action == "raise" or len(failed) < len(errors):
            # The earliest in the batch, so that the same files fail the same way every time. Samples that do not fit
            # together are nobody's failure in particular.
            others = [error for _, error in errors if not isinstance(error, SampleError)]
            batch.error = first if self._policy.action == "raise" else others[0]
            batch.failures = [first] if batch.error is first and isinstance(first, SampleError) else []
        else:
            failed = [(position, batch.failure_counter.know(error)) for position, error in failed]
            batch.errors.clear()
            if self._policy.action == "skip":
                mended = skip_failed(batch.plan, failed)
            else:
                mended = await replace_failed(batch.plan, failed, batch.failure_counter, partial(self._try, batch))
            batch.kept, batch.failures, batch.error = mended.kept, mended.failures, mended.error
            if batch.error is None:
                outcome = ChunkOutcome()
                await asyncio.get_running_loop().run_in_executor(self._executor, partial(self._finish, batch, outcome))
                batch.count(outcome)

    async def _try(self, batch: Batch, plan: BatchPlan, position: int) -> FeedError | None:
        """Put the sample that ``plan`` has at a position into its place; the error it came to."""
        async with self._read_slot():
            read = await self._fetcher.read(plan.indices[position : position + 1])
        batch.count_read(read)
        assert batch.builder is not None
        limit_s = self._fetcher.limit_s
        deadline = None if limit_s is None else JobDeadline(limit_s)
        decode = partial(self._decode_alone, plan, position, read.samples, batch.builder, deadline)
        if deadline is None:
            outcome = await asyncio.get_running_loop().run_in_executor(self._executor, decode)
        else:
            found, _ = await run_with_sample_timeout(self._executor, decode, deadline)
            outcome = found or ChunkOutcome([(position, self._fetcher.overdue(plan.indices[position]))])
        batch.count(outcome)
        return outcome.errors[0][1] if outcome.errors else None

    def _decode_alone(
        self, plan: BatchPlan, position: int, encoded: list[Any], builder: BatchBuilder, deadline: JobDeadline | None
    ) -> ChunkOutcome:
        outcome = self._fetcher.decode(plan, position, encoded, builder, JobControl(self._stop, deadline))
        if deadline is not None and not deadline.finish():
            raise AbandonedError
        return outcome


@dataclass(eq=False)
class Recovery:
    """What became of a batch's failures.

    Args:
        kept: positions of the samples that make it; ``None``: all of them, those replaced included.
        failures: the samples that failed, candidates to replace others included, in a fixed order.
        error: raised in the batch's turn, where there is nothing to hand out.
    """

    kept: Sequence[int] | None = None
    failures: list[SampleError] = field(default_factory=list)
    error: FeedError | None = None


def skip_failed(plan: BatchPlan, errors: Sequence[tuple[int, SampleError]]) -> Recovery:
    """Leave out what failed; the others keep their places in the order."""
    failed = {position for position, _ in errors}
    kept = [position for position in range(len(plan.indices)) if position not in failed]
    failures = [error for _, error in errors]
    return Recovery(kept, failures) if kept else Recovery([], failures, _nothing_left(plan, failures[-1]))


async def replace_failed(
    plan: BatchPlan, errors: Sequence[tuple[int, SampleError]], failure_counter: FailureCounter, attempt: Try
) -> Recovery:
    """Replace what failed, each by the next good sample behind it in the epoch's order.

    One after the other: neighbours that failed would otherwise all try the same samples at the same time.
    """
    mended = Recovery()
    for position, error in errors:
        met, other = await _replace_one(plan, position, failure_counter, attempt)
        mended.failures += [error, *met]
        mended.error = mended.error or other
        if mended.error is not None:
            break
    return mended


async def _replace_one(
    plan: BatchPlan, position: int, failure_counter: FailureCounter, attempt: Try
) -> tuple[list[SampleError], FeedError | None]:
    """Fill one place; what failed on the way, and the error where nothing was found."""
    order = plan.order
    assert order is not None
    met: dict[int, SampleError] = {}
    for step in range(1, order.length):
        found = order.index_at(plan.positions[position] + step)
        index = found if isinstance(found, int) else await found
        if (known := failure_counter.known.get(index)) is not None:
            met[index] = known
            if step % YIELD_STEPS == 0:
                await asyncio.sleep(0)
        else:
            indices = list(plan.indices)
            indices[position] = index
            error = await attempt(replace(plan, indices=indices), position)
            if not isinstance(error, SampleError):
                return list(met.values()), error
            met[index] = failure_counter.know(error)
        if len(met) > failure_counter.allowed:
            break  # too many have failed, whatever the next one comes to
    return list(met.values()), BatchFailedError(
        f"no sample could be found to replace one of batch {plan.number}: the {len(met)} behind it in the epoch's "
        f"order failed too; feeder.failures lists them"
    )


def _nothing_left(plan: BatchPlan, last: SampleError) -> BatchFailedError:
    error = BatchFailedError(
        f"all {len(plan.indices)} samples of batch {plan.number} failed, so that there is nothing to hand out; the "
        f"last: {last}; feeder.failures lists them"
    )
    error.__cause__ = last
    return error
