"""Plans that form batches by length: their batches by brute force, for any seed, epoch, rank and resume point."""

from __future__ import annotations

import collections
import itertools
import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from aiofeed import Buckets, TokenBudget
from aiofeed.errors import StateError
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.plans.length_plans import LengthPlan, PlanLister

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=120)


@st.composite
def plans(draw: st.DrawFn) -> LengthPlan:
    lengths = draw(LENGTHS)
    if draw(st.booleans()):
        boundaries = sorted(draw(st.sets(st.integers(1, 40), max_size=4)))
        sizes = draw(st.lists(st.integers(1, 9), min_size=len(boundaries) + 1, max_size=len(boundaries) + 1))
        plan: LengthPlan = Buckets(lengths, boundaries, sizes)
    else:
        plan = TokenBudget(
            lengths, draw(st.integers(40, 400)), draw(st.none() | st.integers(1, 9)), window=draw(st.integers(1, 50))
        )
    plan.bind(len(lengths))
    return plan


def listed(plan: LengthPlan, seed: int, epoch: int, *, shuffle: bool, drop_last: bool = False) -> BatchLists:
    """The batches of an epoch of all samples."""
    return PlanLister(plan, seed, shuffle=shuffle, drop_last=drop_last).list_epoch(epoch, resumed=False)


def lists_of(lists: BatchLists) -> list[list[int]]:
    return [lists.samples(batch).tolist() for batch in range(len(lists))]


@given(plans(), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_sample_is_in_one_batch(plan: LengthPlan, seed: int, epoch: int, shuffle: bool) -> None:
    """Of each epoch; and the batches are a function of seed and epoch."""
    lists = listed(plan, seed, epoch, shuffle=shuffle)
    assert sorted(lists.indices.tolist()) == list(range(len(plan.lengths)))
    assert all(lists_of(lists))
    again = listed(plan, seed, epoch, shuffle=shuffle)
    assert again.digest() == lists.digest()


@given(plans(), st.data(), st.booleans())
def test_an_order_with_repetitions(plan: LengthPlan, data: st.DataObject, shuffle: bool) -> None:
    """Batches have the indices of the order, each as often as it comes there."""
    order = np.array(data.draw(st.lists(st.integers(0, len(plan.lengths) - 1), max_size=200)), np.int64)
    lists = plan.batches(order, np.random.default_rng(0), shuffle=shuffle, drop_last=False)
    assert sorted(lists.indices.tolist()) == sorted(order.tolist())
    if len(order) and isinstance(plan, Buckets) and not shuffle:
        assert lists.indices[0] == order[0]


@given(plans(), st.integers(0, 3), st.booleans(), st.booleans())
def test_batches_keep_the_limits(plan: LengthPlan, epoch: int, shuffle: bool, drop_last: bool) -> None:
    """Buckets by range and size; budgets by the longest sample. Budgets are as full as the next sample allows."""
    batches = lists_of(listed(plan, 0, epoch, shuffle=shuffle, drop_last=drop_last))
    for batch in batches:
        lengths = plan.lengths[batch]
        if isinstance(plan, Buckets):
            (bucket,) = {sum(length >= bound for bound in plan.boundaries) for length in lengths.tolist()}
            size = plan.batch_sizes[bucket]
            assert len(batch) == size if drop_last else len(batch) <= size
        else:
            assert isinstance(plan, TokenBudget)
            assert len(batch) * lengths.max() <= plan.max_tokens
            assert len(batch) <= (plan.max_samples or len(batch))
    if isinstance(plan, TokenBudget) and not shuffle:
        for batch, following in itertools.pairwise(batches):
            longer = [*batch, following[0]]
            full = len(longer) * plan.lengths[longer].max() > plan.max_tokens
            assert full or len(longer) > (plan.max_samples or len(longer))


@pytest.mark.parametrize(
    ("lengths", "options", "batches"),
    [
        ([5] * 10, {}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([5] * 8, {}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([5] * 3, {}, []),
        ([5] * 4, {"max_samples": 2}, [[0, 1], [2, 3]]),
        ([5] * 3, {"max_samples": 2}, [[0, 1]]),
        ([9, 8, 20], {}, [[1, 0], [2]]),
        ([9, 8, 30], {"on_oversize": "truncate"}, [[1, 0], [2]]),
        ([30], {"on_oversize": "skip"}, []),
    ],
)
def test_a_budget_drops_the_last_batch_if_it_has_room(
    lengths: list[int], options: dict[str, Any], batches: list[list[int]]
) -> None:
    """With drop_last, a last batch to which another sample of its longest length could be added is dropped."""
    plan = TokenBudget(lengths, 20, **options)
    plan.bind(len(lengths))
    assert lists_of(listed(plan, 0, 0, shuffle=False, drop_last=True)) == batches


@given(plans(), st.integers(1, 4), st.integers(1, 4), st.data(), st.booleans())
def test_ranks_and_resumes(plan: LengthPlan, ranks: int, later: int, data: st.DataObject, drop_last: bool) -> None:
    """Every rank has as many batches; after a resume with another world size the rest of the list follows."""
    lister = PlanLister(plan, 0, shuffle=True, drop_last=drop_last)
    lists = lister.list_epoch(1, resumed=False)

    def rest(position: Position, world_size: int) -> list[list[int]]:
        each = []
        for rank in range(world_size):
            schedule = Schedule(length=len(lists), batch_size=1, rank=rank, world_size=world_size, drop_last=drop_last)
            each.append([plan.indices for plan in schedule.plans(position, lists)])
            assert len(each[-1]) == schedule.batches(position.consumed)
        assert len({len(batches) for batches in each}) == 1
        return [list(batch) for step in zip(*each, strict=True) for batch in step]

    everything = lists_of(lists)
    first = rest(Position(1), ranks)
    assert first[: len(everything)] == everything[: len(first)]
    if not drop_last:
        assert first == [everything[at % len(everything)] for at in range(len(first))]
    steps = data.draw(st.integers(0, len(first) // ranks))
    schedule = Schedule(length=len(lists), batch_size=1, world_size=ranks, drop_last=drop_last)
    position = Position(1, schedule.consumed_after(0, steps)) if steps else Position(1)
    remaining = rest(position, later)
    assert remaining[: len(everything) - position.consumed] == everything[position.consumed :][: len(remaining)]


def test_positions_of_samples_are_distinct() -> None:
    """Random numbers of a sample derive from its position; a batch that pads a rank has positions of its own."""
    lists = BatchLists(np.arange(7), np.array([0, 3, 5, 7]))
    ranks = [Schedule(length=3, batch_size=1, rank=rank, world_size=2) for rank in (0, 1)]
    plans = [plan for schedule in ranks for plan in schedule.plans(Position(), lists)]
    positions = collections.Counter(position for plan in plans for position in plan.positions)
    assert max(positions.values()) == 1


def test_costs_of_ranks_are_alike() -> None:
    """On log-normal lengths the costs of one step differ by less than 5 % between ranks on average."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 200_000).astype(int), 1, 4096)
    plan = TokenBudget(lengths, 16_384)
    plan.bind(len(lengths))
    lists = listed(plan, 0, 0, shuffle=True)
    costs = np.maximum.reduceat(lengths[lists.indices], lists.offsets[:-1]) * np.diff(lists.offsets)
    steps = costs[: len(costs) // 8 * 8].reshape(-1, 8)
    assert ((steps.max(1) - steps.min(1)) / steps.max(1)).mean() < 0.05
    assert lengths.sum() / costs.sum() > 0.95


def test_lengths_from_a_function() -> None:
    """It is called once per sample."""
    asked: list[int] = []

    def length(index: int) -> int:
        asked.append(index)
        return index + 1

    plan = TokenBudget(length, 100)
    plan.bind(10)
    plan.bind(10)
    assert asked == list(range(10))
    assert plan.lengths.tolist() == list(range(1, 11))


def test_samples_longer_than_the_budget() -> None:
    """They are an error, left out, or in batches of their own."""
    lengths = [5, 50, 7]
    with pytest.raises(ValueError, match=r"sample 1 has 50 tokens, more than max_tokens=20.*on_oversize"):
        TokenBudget(lengths, 20).bind(3)
    for action, expected in (("skip", [[0, 2]]), ("truncate", [[0, 2], [1]])):
        plan = TokenBudget(lengths, 20, on_oversize=action)  # type: ignore[arg-type]
        plan.bind(3)
        assert lists_of(listed(plan, 0, 0, shuffle=False)) == expected


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TokenBudget([1, 0, 2], 10), ValueError, "lengths must be at least 1, got 0 for sample 1"),
        (lambda: TokenBudget([1, -3], 10), ValueError, "got -3 for sample 1"),
        (lambda: TokenBudget([1.5], 10), TypeError, "lengths must be a list of ints, got float64"),
        (lambda: TokenBudget([[1]], 10), TypeError, "shape"),
        (lambda: TokenBudget([1], 0), ValueError, "max_tokens"),
        (lambda: TokenBudget([1], 5, 0), ValueError, "max_samples"),
        (lambda: TokenBudget([1], 5, window=0), ValueError, "window"),
        (lambda: TokenBudget([1], 5, on_oversize="drop"), ValueError, "on_oversize"),
        (lambda: Buckets([1], [5, 3], [1, 1, 1]), ValueError, "ascending"),
        (lambda: Buckets([1], [5], [1]), ValueError, "1 boundaries and so 2 buckets, got 1 batch_sizes"),
        (lambda: Buckets([1], [5], [1, 0]), ValueError, r"batch_sizes\[1\]"),
        (lambda: Buckets([1, 2], [5], [1, 2]).bind(3), ValueError, "2 lengths for 3 samples"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    """The message has the argument and the value."""
    with pytest.raises(error, match=message):
        make()


def test_a_state_is_of_one_plan() -> None:
    """Another budget, another plan and other lengths are refused; the message says which of these."""
    plan = TokenBudget([1, 2, 3], 10)
    plan.bind(3)
    state = PlanLister(plan, 0, shuffle=True, drop_last=False).state(0)
    PlanLister(plan, 0, shuffle=True, drop_last=False).load_state(state)
    both = r"TokenBudget\(max_tokens=10, .*\) in the state, {} here$"
    for other, message in (
        (TokenBudget([1, 2, 3], 11), both.format(r"TokenBudget\(max_tokens=11, .*\)")),
        (Buckets([1, 2, 3], [2], [1, 1]), both.format(r"Buckets\(.*\)")),
        (TokenBudget([1, 2, 4], 10), r"other lengths= of TokenBudget\(max_tokens=10, .*\)$"),
    ):
        other.bind(3)
        with pytest.raises(StateError, match=f"another plan: {message}"):
            PlanLister(other, 0, shuffle=True, drop_last=False).load_state(state)
    with pytest.raises(StateError):
        PlanLister(plan, 0, shuffle=True, drop_last=False).load_state(json.dumps([1]))
