"""``Balanced``, and ``Pack`` with costs: their batches by brute force, and the costs of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import aiofeed
from aiofeed import Balanced, Pack
from aiofeed.errors import StateError
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.plans import balanced
from aiofeed.plans.length_plans import LengthPlan, OnOversize, PlanLister


def attention(lengths: Any) -> Any:
    return lengths + lengths * lengths / 12_288


def falling(lengths: Any) -> Any:
    return 1 / lengths


@st.composite
def plans(draw: st.DrawFn) -> Balanced:
    """Plans of any shape: hardly any sample, samples as long as a batch, costs that fall with the length."""
    most = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    lengths = rng.integers(1, draw(st.integers(1, most)) + 1, draw(st.integers(1, 400)))
    if draw(st.booleans()):
        lengths = np.where(rng.random(len(lengths)) < 0.1, rng.integers(1, most + 1, len(lengths)), lengths)
    plan = Balanced(
        lengths,
        most,
        cost=draw(st.sampled_from([None, attention, falling])),
        groups=draw(st.sampled_from([2, 3, 4, 6, 8])),
        accumulate=draw(st.integers(1, 3)),
        fill=draw(st.sampled_from([0.3, 0.7, 0.9, 1.0])),
    )
    plan.bind(len(lengths))
    return plan


def listed(plan: LengthPlan, epoch: int = 0, *, shuffle: bool = True, drop_last: bool = False) -> BatchLists:
    return PlanLister(plan, 3, shuffle=shuffle, drop_last=drop_last).list_epoch(epoch, resumed=False)


def lists_of(lists: BatchLists) -> list[list[int]]:
    return [lists.samples(batch).tolist() for batch in range(len(lists))]


@settings(max_examples=30)
@given(plans(), st.integers(0, 3), st.booleans())
def test_every_sample_is_in_one_batch(plan: Balanced, epoch: int, shuffle: bool) -> None:
    """Of at most max_tokens; no batch is empty, and positions belong to the samples."""
    lists = listed(plan, epoch, shuffle=shuffle)
    batches = lists_of(lists)
    assert sorted(index for batch in batches for index in batch) == list(range(len(plan.lengths)))
    assert all(0 < plan.lengths[batch].sum() <= plan.max_tokens for batch in batches)
    positions = [lists.positions(batch) for batch in range(len(lists))]
    assert [lists.indices[each].tolist() for each in positions] == batches


@settings(max_examples=30)
@given(plans(), st.integers(0, 3), st.booleans())
def test_the_number_of_batches_is_constant(plan: Balanced, epoch: int, shuffle: bool) -> None:
    """Over epochs: whole steps, or with less samples than batches one sample per batch."""
    lists, step = listed(plan, epoch, shuffle=shuffle), plan.groups * plan.accumulate
    assert len(lists) == len(listed(plan, 0, shuffle=shuffle))
    assert len(lists) % step == 0 or len(lists) == len(plan.lengths)
    dropped = listed(plan, epoch, shuffle=shuffle, drop_last=True)
    assert len(dropped) == len(lists) // step * step
    assert lists_of(dropped) == lists_of(lists)[: len(dropped)]


@settings(max_examples=30)
@given(plans(), st.data())
def test_a_batch_is_planned_by_itself(plan: Balanced, data: st.DataObject) -> None:
    """Each batch is the same, whichever batches were planned before it; so are the samples before each position."""
    batches, lists = lists_of(listed(plan, 1)), listed(plan, 1)
    for batch in data.draw(st.lists(st.integers(0, len(batches) - 1), max_size=8)):
        assert lists.samples(batch).tolist() == batches[batch]
        assert sorted(lists.consumed(batch)) == sorted(index for before in batches[:batch] for index in before)


@settings(max_examples=30)
@given(plans(), st.data())
def test_ranks_and_resumes(plan: Balanced, data: st.DataObject) -> None:
    """Any ranks that divide the groups, and others after a resume at any batch: every sample once, the steps alike."""
    divisors = st.sampled_from([ranks for ranks in range(1, plan.groups + 1) if plan.groups % ranks == 0])
    ranks, later = data.draw(divisors), data.draw(divisors)
    lists = listed(plan, 1)

    def batches(position: Position, world_size: int) -> Iterator[list[int]]:
        schedules = [
            Schedule(length=len(lists), batch_size=1, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for step in zip(*(schedule.plans(position, lists) for schedule in schedules), strict=True):
            yield from (list(batch.indices) for batch in step)

    everything = lists_of(lists)
    steps = data.draw(st.integers(0, (len(lists) - 1) // ranks))
    consumed = Schedule(length=len(lists), batch_size=1, world_size=ranks).consumed_after(0, steps)
    assert list(batches(Position(1), ranks))[:consumed] == everything[:consumed]
    rest = list(batches(Position(1, consumed), later))
    assert rest[: len(lists) - consumed] == everything[consumed:]


@settings(max_examples=30)
@given(st.integers(0, 100))
def test_an_order_with_repetitions(seed: int) -> None:
    """Draws by weight are in batches, each as often as it was drawn."""
    rng = np.random.default_rng(seed)
    plan = Balanced(rng.integers(1, 20, 30), 40, groups=2)
    plan.bind(30)
    order = rng.integers(0, 30, 90)
    lists = plan.batches(order, rng, shuffle=True, drop_last=False)
    assert Counter(index for batch in lists_of(lists) for index in batch) == Counter(order.tolist())


def lengths_of(kind: str, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(0)
    if kind == "images":
        return rng.integers(14, 64, samples) * rng.integers(14, 64, samples)
    usual = rng.lognormal(6.5, 0.9, samples)
    if kind == "mixture":
        usual = np.where(rng.random(samples) < 0.97, rng.lognormal(5.5, 0.7, samples), rng.lognormal(8.3, 0.6, samples))
    return np.clip(usual, 1, 16_384).astype(np.int64)


@pytest.mark.parametrize("kind", ["log-normal", "mixture", "images"])
@pytest.mark.parametrize(
    ("groups", "accumulate", "mean", "worst"), [(64, 1, 1.01, 1.02), (1024, 1, 1.01, 1.02), (64, 4, 1.001, 1.001)]
)
def test_costs_of_ranks_are_equal(kind: str, groups: int, accumulate: int, mean: float, worst: float) -> None:
    """The most expensive group has the mean cost, or that of the largest sample; and batches are as full as asked."""
    samples = 40_000 if groups == 64 else 80_000
    lengths = lengths_of(kind, samples)
    plan = Balanced(lengths, 16_384, cost=attention, groups=groups, accumulate=accumulate)
    plan.bind(samples)
    lists = listed(plan)
    assert len(lists) == groups * accumulate * -(-lengths.sum() // int(0.9 * 16_384 * groups * accumulate))
    excess = []
    for first in range(0, min(len(lists), 12 * groups * accumulate), groups * accumulate):
        batches = [attention(lengths[lists.samples(first + number)]) for number in range(groups * accumulate)]
        costs = np.array([batch.sum() for batch in batches]).reshape(accumulate, groups).sum(0)
        excess.append(costs.max() / max(costs.mean(), max(batch.max() for batch in batches)))
    assert np.mean(excess) <= mean
    assert max(excess) <= worst


def test_steps_are_uncorrelated() -> None:
    """The mean length of a step says nothing about that of the next one; samples come in another order each epoch."""
    lengths = lengths_of("mixture", 100_000)
    plan = Balanced(lengths, 4096, groups=8, on_oversize="truncate")
    plan.bind(len(lengths))
    lists = listed(plan)
    means = [
        np.concatenate([lengths[lists.samples(first + batch)] for batch in range(8)]).mean()
        for first in range(0, len(lists), 8)
    ]
    assert len(means) > 900
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 3 / len(means) ** 0.5
    assert lists.samples(0).tolist() != listed(plan, 1).samples(0).tolist()


def test_a_resume_plans_only_the_steps_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of one step are assigned for the first batch after a position."""
    plan = Balanced(lengths_of("images", 20_000), 16_384, groups=8)
    plan.bind(20_000)
    assigned = []
    whole = balanced.assign

    def counted(costs: Any, *rest: Any) -> Any:
        assigned.append(len(costs))
        return whole(costs, *rest)

    monkeypatch.setattr(balanced, "assign", counted)
    lists = listed(plan)
    schedule = Schedule(length=len(lists), batch_size=1, world_size=2)
    next(iter(schedule.plans(Position(0, len(lists) // 2), lists)))
    assert len(assigned) == 1
    assert assigned[0] < 200


def test_a_sample_that_costs_too_much_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the values of accumulate and groups that mend it."""
    lengths = [10] * 600 + [100] * 3
    plan = Balanced(lengths, 100, cost=lambda n: n * n, groups=4)
    plan.bind(len(lengths))
    with caplog.at_level(logging.WARNING, "aiofeed"):
        listed(plan)
        listed(plan, 1)
    (message,) = caplog.messages
    costs, steps = np.square(lengths), len(listed(plan)) // 4
    share = costs.max() / (costs.sum() / steps / 4)
    assert f"costs {share:.2f} times" in message
    assert f"accumulate={int(np.ceil(share))} " in message
    mended = Balanced(lengths, 100, cost=lambda n: n * n, groups=4, accumulate=int(np.ceil(share)))
    mended.bind(len(lengths))
    caplog.clear()
    listed(mended)
    assert not caplog.messages


def test_a_number_of_ranks_that_does_not_divide_groups() -> None:
    """Is an error before the first batch that names the numbers that do."""
    data = [torch.ones(3)] * 40
    plan = Balanced([3] * 40, 12, groups=6)
    feeder = aiofeed.Feeder(data, batch_size=plan, collate_fn=torch.cat, shuffle=True, shard=(0, 4))
    with feeder, pytest.raises(ValueError, match=r"groups=6.* 1, 2, 3, 6, and there are 4: pass groups=4"):
        iter(feeder)
    with aiofeed.Feeder(data, batch_size=plan, collate_fn=torch.cat, shuffle=True, shard=(0, 1)) as feeder:
        assert len(feeder) == 18
        assert sum(len(batch) for batch in feeder) == 120
        assert len(feeder) == 18


def test_oversize() -> None:
    """A sample longer than a batch is an error, left out, or a batch of its own."""
    lengths = [5, 50, 7, 6]
    with pytest.raises(ValueError, match=r"sample 1 has 50 tokens, more than max_tokens=20.*on_oversize"):
        Balanced(lengths, 20).bind(4)
    actions: list[tuple[OnOversize, list[int]]] = [("skip", [0, 2, 3]), ("truncate", [0, 1, 2, 3])]
    for action, expected in actions:
        plan = Balanced(lengths, 20, groups=2, on_oversize=action)
        plan.bind(4)
        batches = lists_of(listed(plan, shuffle=False))
        assert sorted(index for batch in batches for index in batch) == expected
        assert action == "skip" or [1] in batches


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"groups": 1}, ValueError, r"Balanced\(groups=\) must be at least 2, got 1"),
        ({"groups": 2.5}, TypeError, "groups"),
        ({"accumulate": 0}, ValueError, "accumulate"),
        ({"fill": 0}, ValueError, r"Balanced\(fill=\) must be a number above 0, at most 1, got 0"),
        ({"fill": 1.5}, ValueError, "got 1.5"),
        ({"fill": True}, ValueError, "got True"),
        ({"cost": 3}, TypeError, r"Balanced\(cost=\)"),
        ({"on_oversize": "drop"}, ValueError, "on_oversize"),
        ({"cost": lambda n: n.sum()}, ValueError, r"Balanced\(cost=\) must return one positive number for each of 3"),
        ({"cost": lambda n: n - 1}, ValueError, r"got \[0 1 2\]"),
        ({"cost": lambda n: n / 0.0}, ValueError, "inf"),
        ({"cost": lambda n: ["a"] * len(n)}, ValueError, "one positive number"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The message has the argument and the value."""
    with pytest.raises(error, match=message):
        Balanced([1, 2, 3], **{"max_tokens": 10, **options}).bind(3)


def test_a_state_is_of_one_cost() -> None:
    """States of other costs, groups and lengths are refused; equal costs of another function are not."""

    def lister(cost: Any, **options: Any) -> PlanLister:
        plan = Balanced([1, 2, 3], 10, cost=cost, groups=2, **options)
        plan.bind(3)
        return PlanLister(plan, 0, shuffle=True, drop_last=False)

    state = lister(lambda n: n * n).state(Position())
    lister(lambda n: n**2).load_state(state)
    for other in (lister(None), lister(lambda n: n * n, accumulate=2)):
        with pytest.raises(StateError, match="another plan"):
            other.load_state(state)


@settings(max_examples=30)
@given(st.integers(0, 50), st.booleans(), st.booleans())
def test_rows_of_pack(seed: int, split: bool, drop_last: bool) -> None:
    """Are the rows of a plan without costs, and those of one step, in other batches of as many rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, rng.integers(1, 80))
    found = []
    for cost in (None, attention):
        plan = Pack(lengths, 20, 2, split=split, cost=cost, groups=int(rng.integers(2, 4)))
        plan.bind(len(lengths))
        lists = listed(plan, drop_last=drop_last)
        assert lists.spans is not None
        batches = np.repeat(np.arange(len(lists)), np.diff(lists.offsets))
        rows = [
            sorted(zip(lists.indices[at], *lists.spans[at, 1:3].T, strict=True))
            for batch in range(len(lists))
            for row in range(2)
            for at in [(batches == batch) & (lists.spans[:, 0] // 20 == row)]
        ]
        found.append(sorted(row for row in rows if row))
        assert plan.groups is None or plan.groups in (2, 3)
    assert found[0] == found[1]


@pytest.mark.parametrize("split", [True, False])
def test_costs_of_packed_rows_are_equal(split: bool) -> None:
    """With 8 rows, the most expensive batch of a step costs 1 % more than the mean, and 10 % without balance."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 0.9, 40_000), 1, 8192).astype(np.int64)
    excess = []
    for cost in (attention, None):
        plan = Pack(lengths, 8192, 8, split=split, cost=cost)
        plan.bind(len(lengths))
        lists = listed(plan, drop_last=True)
        assert lists.spans is not None
        pieces = lists.spans[:, 2] - lists.spans[:, 1]
        costs = np.add.reduceat(attention(pieces.astype(float)), lists.offsets[:-1])
        steps = costs[: len(costs) // 64 * 64].reshape(-1, 64)
        excess.append((steps.max(1) / steps.mean(1)).mean())
    assert excess[0] < 1.01 < 1.08 < excess[1]
