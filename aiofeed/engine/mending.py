"""A batch some samples of which failed: made shorter, or whole again with others of the epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from aiofeed.core.errors import BatchFailedError, FeedError, SampleError
from aiofeed.core.failures import Tally
from aiofeed.core.types import BatchPlan

# Looking for a good sample among many that are known to be bad must not hold up the loop.
YIELD_STEPS = 256

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
    """Replace what failed, each by the next good sample behind it in the epoch's order.

    One after the other: neighbours that failed would otherwise all try the same samples at the same time.
    """
    mended = Mended()
    for position, error in errors:
        met, other = await _replace_one(plan, position, tally, attempt)
        mended.failures += [error, *met]
        mended.error = mended.error or other
        if mended.error is not None:
            break
    return mended


async def _replace_one(
    plan: BatchPlan, position: int, tally: Tally, attempt: Try
) -> tuple[list[SampleError], FeedError | None]:
    """Fill one place; what failed on the way, and the error where nothing was found."""
    order = plan.order
    assert order is not None
    met: dict[int, SampleError] = {}
    for step in range(1, order.length):
        found = order.index_at(plan.positions[position] + step)
        index = found if isinstance(found, int) else await found
        if (known := tally.known.get(index)) is not None:
            met[index] = known
            if step % YIELD_STEPS == 0:
                await asyncio.sleep(0)
        else:
            indices = list(plan.indices)
            indices[position] = index
            error = await attempt(replace(plan, indices=indices), position)
            if not isinstance(error, SampleError):
                return list(met.values()), error
            met[index] = tally.know(error)
        if len(met) > tally.allowed:
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
