"""A batch some samples of which failed: made shorter, or whole again with others of the epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from aiofeed.errors import BatchFailedError, FeedError, SampleError
from aiofeed.failures import Tally
from aiofeed.types import BatchPlan

Try = Callable[[BatchPlan, int], Awaitable[FeedError | None]]
"""Read and decode the sample at a position of a batch, by a plan; the error it came to."""


@dataclass(eq=False)
class Mended:
    """What became of a batch's failures.

    Args:
        kept: positions of the samples that make it; ``None``: all of them, those replaced included.
        failures: the samples that failed, candidates to replace others included, in a fixed order.
        error: raised in the batch's turn, where there is nothing to hand out.
    """

    kept: Sequence[int] | None = None
    failures: list[SampleError] = field(default_factory=list)
    error: FeedError | None = None


def shorten(plan: BatchPlan, errors: Sequence[tuple[int, SampleError]]) -> Mended:
    """Leave out what failed; the others keep their places in the order."""
    failed = {position for position, _ in errors}
    kept = [position for position in range(len(plan.indices)) if position not in failed]
    failures = [error for _, error in errors]
    return Mended(kept, failures) if kept else Mended([], failures, _nothing_left(plan, failures[-1]))


async def replenish(plan: BatchPlan, errors: Sequence[tuple[int, SampleError]], tally: Tally, attempt: Try) -> Mended:
    """Replace what failed, each by the next good sample behind it in the epoch's order."""
    mended = Mended()
    found = await asyncio.gather(*[_replace_one(plan, position, tally, attempt) for position, _ in errors])
    for (_, error), (met, other) in zip(errors, found, strict=True):
        mended.failures += [error, *met]
        mended.error = mended.error or other
    return mended


async def _replace_one(
    plan: BatchPlan, position: int, tally: Tally, attempt: Try
) -> tuple[list[SampleError], FeedError | None]:
    """Fill one place; what failed on the way, and the error where nothing was found."""
    order = plan.order
    assert order is not None
    met: list[SampleError] = []
    for step in range(1, order.length):
        index = order.index_at(plan.positions[position] + step)
        error: FeedError | None = tally.known.get(index)
        if error is None:
            indices = list(plan.indices)
            indices[position] = index
            error = await attempt(replace(plan, indices=indices), position)
            if error is None:
                return met, None
            if not isinstance(error, SampleError):
                return met, error
            tally.known[index] = error
        assert isinstance(error, SampleError)
        met.append(error)
        if len({error.index for error in met}) > tally.allowed:
            break  # too many have failed, whatever the next one comes to
    tried = len(met)
    return met, BatchFailedError(
        f"no sample could be found to replace one of batch {plan.number}: the {tried} behind it in the epoch's order "
        f"failed too; feeder.failures lists them"
    )


def _nothing_left(plan: BatchPlan, last: SampleError) -> BatchFailedError:
    error = BatchFailedError(
        f"all {len(plan.indices)} samples of batch {plan.number} failed, so that there is nothing to hand out; the "
        f"last: {last}; feeder.failures lists them"
    )
    error.__cause__ = last
    return error
