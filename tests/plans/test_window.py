"""`shuffle="window"`: shards in random order, samples mixed over a few of them."""

from itertools import accumulate, pairwise
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiofeed
from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.sampling.schedule import Position, is_shuffle, window_shards
from aiofeed.plans.computed import WindowOrder


def starts_of(sizes: list[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def epoch_of(order: WindowOrder, epoch: int) -> list[int]:
    found: list[int] = order.list_epoch(epoch, resumed=False)[np.arange(len(order))].tolist()
    return found


@hypothesis.settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    width=st.integers(1, 25),
    epoch=st.integers(0, 5),
    dealt=st.booleans(),
)
def test_every_sample_comes_once_and_few_shards_are_open(sizes: list[int], width: int, epoch: int, dealt: bool) -> None:
    """The samples of a shard come within those of `width` shards; any part of the order can be computed alone."""
    hypothesis.assume(sum(sizes))
    order = WindowOrder(starts_of(sizes), width, seed=3, dealt=dealt)
    indices = epoch_of(order, epoch)
    assert sorted(indices) == list(range(sum(sizes)))
    permutation = order.permutation(epoch)
    assert [int(permutation(np.array([at]))[0]) for at in range(len(indices))] == indices
    spans = [
        [indices.index(sample) for sample in range(start, end)]
        for start, end in pairwise(starts_of(sizes))
        if start < end
    ]
    for positions in spans:
        beside = [each for each in spans if min(each) <= max(positions) and max(each) >= min(positions)]
        assert len(beside) <= width


def test_epochs_and_seeds_differ_and_samples_are_mixed() -> None:
    """Neighbours in the order are of different shards, and no two epochs are alike."""
    order = WindowOrder(starts_of([100] * 40), 8, seed=0)
    orders = [epoch_of(order, epoch) for epoch in range(3)] + [epoch_of(WindowOrder(starts_of([100] * 40), 8, 1), 0)]
    assert len(set(map(tuple, orders))) == 4
    for indices in orders:
        shards = np.array(indices) // 100
        assert 0.8 < (shards[1:] != shards[:-1]).mean() < 0.95  # 7 of 8 at random


def test_shards_that_are_dealt_take_turns() -> None:
    """Each of four ranks has samples of one shard of a group, mixed."""
    order = WindowOrder(starts_of([100] * 16), 4, seed=0, dealt=True)
    for epoch in range(2):
        indices = np.array(epoch_of(order, epoch)).reshape(4, 100, 4)
        assert all(len(set((indices[group, :, rank] // 100).tolist())) == 1 for group in range(4) for rank in range(4))
        assert (np.diff(indices, axis=1) != 1).mean() > 0.9
    assert epoch_of(order, 0) != epoch_of(order, 1)
    with pytest.raises(StateError, match="other shards"):
        WindowOrder(starts_of([100] * 16), 4, seed=0).load_state(order.state(Position()))


@pytest.mark.parametrize(
    ("value", "shards"), [("window", 16), ("window:3", 3), ("window:0", None), ("window:", None), ("windows", None)]
)
def test_the_number_of_shards_is_part_of_the_name(value: str, shards: int | None) -> None:
    """Other texts are refused."""
    assert window_shards(value) == shards
    assert is_shuffle(value) is (shards is not None)


class Sharded:
    """Samples 0 to 99 in ten shards."""

    shard_starts = range(0, 101, 10)

    def __len__(self) -> int:
        return 100

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> int:
        return index


def new_feeder(**arguments: Any) -> aiofeed.Feeder[Any]:
    chosen = {"decode": lambda data: data, "shuffle": "window:3", "seed": 5, "batch_size": 6, **arguments}
    return aiofeed.Feeder(Sharded(), **chosen)


def numbers(feeder: aiofeed.Feeder[Any]) -> list[int]:
    return [number for batch in feeder for number in batch.tolist()]


@pytest.mark.parametrize("batches", [0, 1, 5, 8])
def test_resume_is_exact_and_elastic(batches: int) -> None:
    """Two ranks take over from one, with another batch size."""
    with new_feeder() as feeder:
        whole = numbers(feeder)
    with new_feeder(shard=(0, 1)) as feeder:
        iterator = iter(feeder)
        done = [number for _ in range(batches) for number in next(iterator).tolist()]
        state = feeder.state_dict()
    ranks = []
    for rank in range(2):
        with new_feeder(shard=(rank, 2), batch_size=4) as feeder:
            feeder.load_state_dict(state)
            ranks.append(numbers(feeder))
    rest = [number for pair in zip(*ranks, strict=True) for number in pair]
    assert [*done, *rest] == whole


def test_a_state_of_another_order_is_refused() -> None:
    """So are other shards, and another number of them."""
    state = WindowOrder([0, 3, 6], 2, seed=0).state(Position())
    WindowOrder([0, 3, 6], 2, seed=0).load_state(state)
    for starts, width in (([0, 3, 6], 1), ([0, 2, 6], 2)):
        with pytest.raises(StateError, match="other shards"):
            WindowOrder(starts, width, seed=0).load_state(state)
    with new_feeder() as feeder:
        saved = feeder.state_dict()
    with new_feeder(shuffle="window:4") as feeder, pytest.raises(StateError, match="'window:3' in the state"):
        feeder.load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1.0] * 100}, "leave out shuffle='window:3'"),
        ({"sampler": range(100)}, "leave out shuffle="),
        ({"batch_sampler": [[0, 1]], "batch_size": None}, "leave out shuffle="),
        ({"batch_size": aiofeed.Buckets([1] * 100, [2], [4, 4])}, "shuffle='window:3' .*pass shuffle=True"),
        ({"shuffle": "window:0"}, "\"window:N\" for a window of N shards, at least 1, got 'window:0'"),
    ],
)
def test_what_excludes_it(arguments: dict[str, Any], message: str) -> None:
    """The error names the way out."""
    with pytest.raises((TypeError, ValueError), match=message):
        new_feeder(**arguments)


def test_sources_without_shards_are_refused() -> None:
    """So is a mixture."""
    with pytest.raises(ValueError, match=r"is not possible with .*: it mixes the samples of shards: pass shuffle=True"):
        aiofeed.Feeder(list(range(5)), batch_size=2, shuffle="window")
    mixture = aiofeed.Mixture({"a": Sharded()}, {"a": 1.0})
    with pytest.raises(ValueError, match="leave out shuffle='window'"):
        aiofeed.Feeder(mixture, decode=lambda data: data, batch_size=2, shuffle="window")
