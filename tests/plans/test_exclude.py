"""Samples that are left out for good."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from aiofeed import Buckets, Feeder, FromDataset, Mixture, Stream, Tensors, TokenBudget
from aiofeed.errors import StateError
from aiofeed.kernel.sampling.order import feistel
from tests.support.simulated_device import SimulatedDevice
from tests.support.states import edited_state

N = 30
ITEMS = list(range(N))
MIXED = Mixture({"a": ITEMS[:20], "b": ITEMS[20:]})


def items(source: Any = ITEMS, **options: Any) -> Feeder[Any]:
    return Feeder(source, **{"batch_size": 2, "shard": None, **options})


def values(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.tolist()]


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 12345])
def test_a_keyed_permutation_has_an_inverse(n: int) -> None:
    """The inverse maps each index to its position."""
    positions = np.arange(n)
    assert (feistel(n, 3, 4, inverse=True)(feistel(n, 3, 4)(positions)) == positions).all()


@pytest.mark.parametrize("shuffle", [False, True, "keyed"])
@pytest.mark.parametrize("source", [ITEMS, MIXED], ids=["list", "Mixture"])
@pytest.mark.parametrize("exclude", [[], [0], [29], [3, 4, 5, 17, 29], ITEMS[:-1], ITEMS])
def test_all_others_come_in_the_same_order(source: Any, shuffle: Any, exclude: list[int]) -> None:
    """In each epoch the order is that of all samples without the excluded ones, in full batches."""
    with items(source, shuffle=shuffle) as whole, items(source, shuffle=shuffle, exclude=exclude) as feeder:
        assert len(feeder) == -(-(N - len(exclude)) // 2)
        for _ in range(2):
            assert values(feeder) == [value for value in values(whole) if value not in exclude]


@pytest.mark.parametrize("shuffle", [False, True, "keyed"])
@pytest.mark.parametrize("source", [ITEMS, MIXED], ids=["list", "Mixture"])
@pytest.mark.parametrize("before", [None, [], [2], [1, 2, 7, 20]])
@pytest.mark.parametrize("after", [None, [], [7], [0, 2, 11, 12, 28]])
def test_a_resume_may_exclude_others(source: Any, shuffle: Any, before: Any, after: Any) -> None:
    """After a resume, on other ranks, the rest of the epoch comes once, without the samples excluded now."""
    feeder, state = items(source, shuffle=shuffle, exclude=before), None
    iterator = iter(feeder)
    seen = values(next(iterator) for _ in range(5))
    state = feeder.state_dict()
    rest = values(iterator)
    feeder.close()
    ranks = [items(source, shuffle=shuffle, exclude=after, shard=(rank, 3), pad=True) for rank in range(3)]
    found: list[int] = []
    for rank in ranks:
        rank.load_state_dict(state)
        found += values(rank)
        rank.close()
    order, after = values(items(source, shuffle=shuffle)), after or []
    left = order[order.index(seen[-1]) + 1 :]
    wanted = set(left) - set(after)
    assert set(found) - set(after) >= wanted
    counts = Counter(found)
    padding = -len(wanted) % 3
    assert sum(counts.values()) == len(wanted) + padding
    assert not set(found) & set(after)
    if (before or []) == after:
        assert set(rest) == wanted


def test_a_mixture_with_other_weights_is_another_order() -> None:
    """A state with samples left out is refused by a mixture with weights, with a plan, too."""
    weighted = Mixture({"a": ITEMS[:20], "b": ITEMS[20:]}, [1, 2])
    for size in (2, TokenBudget([1] * N, 2)):
        with items(MIXED, shuffle=True, exclude=[0, 1, 2, 25], batch_size=size) as feeder:
            assert set(values(feeder.steps(3))) <= set(ITEMS) - {0, 1, 2, 25}
            with pytest.raises(StateError, match=r"of another order: Mixture|exclude= cannot change"):
                items(weighted, shuffle=True, batch_size=size).load_state_dict(feeder.state_dict())


def test_the_receipt_goes_on_with_other_samples_excluded() -> None:
    """A run that excludes others from a checkpoint on has its own receipt, whether it is interrupted or not."""

    def run(*stops: int) -> str:
        feeder = items(shuffle=True)
        values(feeder.steps(4))
        state = feeder.state_dict()
        for stop in stops:
            feeder = items(shuffle=True, exclude=[3, 5])
            feeder.load_state_dict(state)
            values(feeder.steps(stop))
            state = feeder.state_dict()
        return feeder.receipt()

    plain = items(shuffle=True)
    values(plain.steps(9))
    assert run(5) == run(2, 3) != plain.receipt()


def test_keys_are_looked_up() -> None:
    """Keys and indices name samples; unknown ones are an error that lists them."""
    with items(exclude=["list[3]", 5, "list[5]"]) as feeder:
        assert set(values(feeder)) == set(ITEMS) - {3, 5}
    for wrong in (["list[30]"], [30], [-1], [1.5]):
        with pytest.raises(ValueError, match=r"exclude has .*no index or key of the 30 samples"):
            items(exclude=wrong)
    for value in ("list[3]", 3):
        with pytest.raises(TypeError, match="exclude must be a list"):
            items(exclude=value)


DATA = torch.arange(N)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (ITEMS, {"cache": "host"}),
        (ITEMS, {"engine": "process"}),
        (ITEMS, {"in_order": False}),
        (ITEMS, {"in_order": "samples"}),
        (ITEMS, {"device": SimulatedDevice()}),
        (ITEMS, {"static_batches": True, "drop_last": True}),
        (TensorDataset(DATA), {}),
        (Tensors(DATA), {}),
        (Mixture({"a": ITEMS[:20], "b": ITEMS[20:]}), {}),
    ],
    ids=["cache", "process", "unordered", "samples", "device", "static", "TensorDataset", "Tensors", "Mixture"],
)
def test_every_kind_of_feeder_leaves_them_out(source: Any, options: dict[str, Any], forked_workers: None) -> None:
    """Caches, processes, devices, data in memory and batches out of order have no excluded sample."""
    with items(source, exclude=[1, 8], shuffle=True, **options) as feeder:
        for _ in range(2):
            batches = (batch[0] if isinstance(batch, list | tuple) else batch for batch in feeder)
            assert sorted(values(batches)) == sorted(set(ITEMS) - {1, 8})


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (Stream(ITEMS), {}),
        (ITEMS, {"sampler": ITEMS}),
        (ITEMS, {"batch_sampler": [[1]], "batch_size": None}),
        (ITEMS, {"weights": [1.0] * N}),
        (ITEMS, {"shuffle": "replacement"}),
    ],
    ids=["Stream", "sampler", "batch sampler", "weights", "replacement"],
)
def test_other_orders_refuse_it(source: Any, options: dict[str, Any]) -> None:
    """The error says where to leave samples out instead."""
    with pytest.raises(ValueError, match=r"exclude=.* is not possible with .*: it leaves out samples of shuffle=True"):
        items(source, exclude=[1], **options)


def test_batches_handed_out_of_order_fix_it() -> None:
    """A state with batches that were returned before others cannot be resumed with other samples excluded."""
    state = edited_state(items(in_order=False).state_dict(), handed_out=[2])
    items(in_order=False).load_state_dict(state)
    with pytest.raises(StateError, match="exclude= cannot change within an epoch"):
        items(in_order=False, exclude=[1]).load_state_dict(state)


@pytest.mark.parametrize("plan", [Buckets, TokenBudget])
def test_a_plan_leaves_them_out(plan: Any) -> None:
    """The batches of a plan are planned without the excluded samples, on two ranks; others may follow in an epoch."""

    def new(rank: int, exclude: list[int] | None) -> Feeder[Any]:
        lengths = [1 + 5 * index % 7 for index in ITEMS]
        size = Buckets(lengths, [4], [4, 3]) if plan is Buckets else TokenBudget(lengths, 12)
        return items(batch_size=size, shuffle=True, shard=(rank, 2), pad=False, exclude=exclude)

    state: Any = None
    for exclude in ([3, 17], None, [4], []):
        ranks = [new(rank, exclude) for rank in range(2)]
        seen = []
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
            iterator = iter(rank)
            seen += values([next(iterator)])
            middle = rank.state_dict()
            with pytest.raises(StateError, match="exclude= cannot change within an epoch of a plan"):
                new(ranks.index(rank), [5]).load_state_dict(middle)
            resumed = new(ranks.index(rank), exclude)
            resumed.load_state_dict(middle)
            rest = values(iterator)
            assert values(resumed) == rest
            assert resumed.receipt() == rank.receipt()
            seen += rest
        assert sorted(seen) == sorted(set(ITEMS) - set(exclude or []))
        state = ranks[0].state_dict()
        for rank in ranks:
            rank.close()


def test_another_order_is_no_other_exclusion() -> None:
    """A state of a plan over weights= is refused by one with exclude=, and the other way round."""
    weighted = items(batch_size=TokenBudget([1] * N, 4), weights=[1.0] * N)
    excluding = items(batch_size=TokenBudget([1] * N, 4), exclude=[1])
    for one, other in ((weighted, excluding), (excluding, weighted)):
        with pytest.raises(StateError, match="another order of samples"):
            one.load_state_dict(other.state_dict())


class Large:
    """A dataset of a thousand million items."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def test_a_large_source_is_not_listed() -> None:
    """With `shuffle="keyed"` excluding some of 10^9 samples takes a few megabytes."""
    source = FromDataset(Large(), fingerprint="large")
    tracemalloc.start()
    with items(source, shuffle="keyed", exclude=range(0, 10**9, 10**6)) as feeder:
        assert len(values(feeder.steps(3))) == 6
        assert feeder.state_dict()["position"] == 6
        assert len(feeder) == (10**9 - 1000) // 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
