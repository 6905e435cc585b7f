"""Compares the explanations of all ranks: which one is the slowest, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiofeed.reports.bottleneck import KEEPS_UP, STEP
from aiofeed.reports.explanation import Explanation, RankTimes, format_seconds

# Ranks with rates as close as this wait for each other in every step. The first batch does not count, and the others
# wait for it in a step.
SAME_RATE = 0.8
# Their steps take equally long if they are as close as this.
SAME_STEP = 0.95


def explain_ranks(own: Explanation, batch_samples: float) -> Explanation:
    """Add the figures of all ranks to ``own``. All ranks must call it, because it is an all-gather.

    Args:
        own: The explanation of this rank.
        batch_samples: Samples per batch of this rank.

    Raises:
        ValueError: ``torch.distributed`` is not initialized.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            "explain(ranks=True) compares the ranks of torch.distributed, which is not initialized: call "
            "torch.distributed.init_process_group first, or leave ranks out"
        )
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, figures_of(distributed.get_rank(), own, batch_samples))
    return compare(gathered, own)


def figures_of(rank: int, own: Explanation, batch_samples: float) -> RankTimes:
    """Return the figures of a rank."""
    times = {stage.name: stage for stage in own.stages}
    return RankTimes(
        rank,
        own.samples_per_s,
        own.waiting,
        times[STEP].time_s * batch_samples if STEP in times else 0.0,
        own.stage,
        own.resource,
        (times[own.stage].samples_per_s or 0.0) if own.stage in times else 0.0,
    )


def compare(ranks: Sequence[RankTimes], own: Explanation) -> Explanation:
    """Add the figures of all ranks to ``own``; its verdict names the slowest one and its reason."""
    measured = [rank for rank in ranks if rank.stage]
    if len(measured) < len(ranks) or len(ranks) < 2:
        return replace(own, ranks=tuple(ranks))
    slowest = min(ranks, key=lambda rank: rank.samples_per_s)
    if slowest.samples_per_s >= SAME_RATE * max(rank.samples_per_s for rank in ranks):
        # One that waits for batches keeps the others waiting, within their steps.
        slowest = max(ranks, key=lambda rank: rank.waiting)
        steps = [rank.step_s for rank in ranks]
        if slowest.waiting < KEEPS_UP:
            if min(steps) >= SAME_STEP * max(steps):
                verdict = f"{own.verdict} All {len(ranks)} ranks are equally fast."
                return replace(own, verdict=verdict, ranks=tuple(ranks))
            slowest = max(ranks, key=lambda rank: rank.step_s)
    others = [rank for rank in ranks if rank is not slowest]
    if slowest.waiting < KEEPS_UP:
        step_s = sum(rank.step_s for rank in others) / len(others)
        reason = f"its step takes {format_seconds(slowest.step_s)}, that of the others {format_seconds(step_s)}"
    else:
        waiting = sum(rank.waiting for rank in others) / len(others)
        reason = (
            f"it waits {slowest.waiting:.0%} of the time, and its limit is the stage {slowest.stage!r} "
            f"({slowest.resource}); the others wait {waiting:.0%}"
        )
    verdict = f"{own.verdict} Rank {slowest.rank} is the slowest of {len(ranks)}: {reason}."
    return replace(own, verdict=verdict, ranks=tuple(ranks))
