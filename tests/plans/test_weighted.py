"""Draws with replacement: proportions, and the same draws whatever the rank, batch size or resume point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiofeed.errors import StateError
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.plans.computed import WeightedOrder


def draws(schedule: Schedule, epoch: int = 0, sampled: Any = None) -> np.ndarray:
    plans = schedule.plans(Position(epoch), sampled)
    return np.array([index for plan in plans for index in plan.indices])


def test_replacement_draws_each_sample_equally_often() -> None:
    """As many draws as samples leave out a share of 1/e, and epochs differ."""
    schedule = Schedule(length=20_000, batch_size=100, shuffle="replacement", seed=1)
    first, second = draws(schedule), draws(schedule, epoch=1)
    assert len(first) == 20_000
    assert first.min() >= 0
    assert first.max() < 20_000
    assert abs(len(set(first.tolist())) / 20_000 - (1 - np.exp(-1))) < 0.01
    assert (first == second).mean() < 0.01


def test_draws_follow_the_weights() -> None:
    """Within five standard deviations; a sample of weight 0 never comes."""
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    order = WeightedOrder(np.tile(weights, 10_000), 60_000, seed=0)
    found = np.bincount(order.list_epoch(0, resumed=False)[np.arange(60_000)] % 6, minlength=6)
    expected = 60_000 * weights / weights.sum()
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected))


def test_the_last_sample_with_weight_bounds_the_draws() -> None:
    """Rounding of the sums never gives a sample of weight 0 at the end."""
    order = WeightedOrder([1e-300, 0.1, 0.2, 0.0, 0.0], 5, seed=0)
    assert set(order.list_epoch(0, resumed=False)[np.arange(10_000)].tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_draw_other_samples_of_one_order(weighted: bool) -> None:
    """The ranks' draws interleaved are those of one process."""
    order = WeightedOrder(np.arange(1, 101), 100, seed=4) if weighted else None
    shuffle: Any = False if weighted else "replacement"
    sampled = None if order is None else order.list_epoch(2, resumed=False)
    whole = draws(Schedule(length=100, batch_size=8, shuffle=shuffle, seed=4), 2, sampled)
    ranks = [
        draws(Schedule(length=100, batch_size=4, shuffle=shuffle, seed=4, rank=rank, world_size=2), 2, sampled)
        for rank in range(2)
    ]
    assert np.array_equal(np.stack(ranks, 1).ravel(), whole)


def test_a_state_of_other_weights_is_refused() -> None:
    """So is one of a sampler."""
    state = WeightedOrder([1, 2], 2, seed=0).state(Position())
    WeightedOrder([1, 2], 2, seed=0).load_state(state)
    with pytest.raises(StateError, match="other weights"):
        WeightedOrder([2, 2], 2, seed=0).load_state(state)
    with pytest.raises(StateError, match="damaged"):
        WeightedOrder([2, 2], 2, seed=0).load_state("[")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"2 in all, got the shape \(1,\)"),
        ([1.0, float("nan")], r"weights\[1\]=nan"),
        ([1.0, float("inf")], r"weights\[1\]=inf"),
        ([-1.0, 1.0], r"weights\[0\]=-1"),
        ([0.0, 0.0], "all weights are 0"),
        (["a", "b"], "one number per sample"),
        ([[1], [2]], r"shape \(2, 1\)"),
    ],
)
def test_wrong_weights_are_named(weights: Any, message: str) -> None:
    """The error names the weight."""
    with pytest.raises((TypeError, ValueError), match=message):
        WeightedOrder(weights, 2, seed=0)
