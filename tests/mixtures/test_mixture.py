"""Orders of mixtures: counts near the ideal at every place, sources passed through one pass after the other, states."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, reject

from aiofeed import Mixture
from aiofeed.errors import StateError
from aiofeed.kernel.sampling.order import ComputedEpoch
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.mixtures import mixture_order
from aiofeed.mixtures.mixture_order import (
    BLOCK,
    KEPT_COUNTS,
    ChangingShares,
    ConstantShares,
    Interleaving,
    MixtureOrder,
    ShareBlocks,
)

WEIGHTS = st.lists(
    st.integers(1, 1000).map(Fraction) | st.floats(1e-3, 1e3).map(lambda weight: Fraction(str(weight))),
    min_size=1,
    max_size=12,
)
LENGTHS = st.integers(1, 5 * BLOCK)


def constant(weights: Sequence[Any], length: int, random_seed: int | None = None) -> Interleaving:
    return Interleaving(ConstantShares([Fraction(weight) for weight in weights]), ShareBlocks(length), random_seed)


def changing(weights: Callable[[int], Sequence[float]], length: int) -> Interleaving:
    blocks = ShareBlocks(length)
    return Interleaving(ChangingShares(weights, blocks), blocks)


def sources_of(interleaving: Interleaving, blocks: int) -> np.ndarray:
    return np.concatenate([interleaving.block(block)[0] for block in range(blocks)])


def worst_distance(sources: np.ndarray, shares: np.ndarray) -> float:
    """The largest distance of a source's count from the sum of its shares, before and after each sample."""
    drawn = sources[:, None] == np.arange(shares.shape[1])
    return float(np.abs(np.cumsum(drawn, 0) - np.cumsum(shares, 0)).max())


@given(WEIGHTS, LENGTHS)
def test_every_count_is_within_one_of_the_ideal_at_every_place(weights: list[Fraction], length: int) -> None:
    """For any weights, over the ends of blocks and epochs."""
    sources = sources_of(constant(weights, length), 3)
    shares = np.tile(np.array([float(weight / sum(weights)) for weight in weights]), (len(sources), 1))
    assert worst_distance(sources, shares) < 1 + 1e-6


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3).filter(any), min_size=1, max_size=6),
    LENGTHS,
)
def test_changing_weights_are_within_one_of_their_ideal(phases: list[list[float]], length: int) -> None:
    """The ideal follows the weights of each block, also if a source pauses."""
    interleaving = changing(lambda samples: phases[samples // 1500 % len(phases)], length)
    sources = sources_of(interleaving, 6)
    shares = []
    for block in range(6):
        weights = np.array(phases[interleaving.blocks.start(block) // 1500 % len(phases)])
        shares += [weights / weights.sum()] * (interleaving.blocks.start(block + 1) - interleaving.blocks.start(block))
    assert worst_distance(sources, np.array(shares)) < 1 + 1e-3


def test_weights_of_an_epoch_are_not_asked_for_before_it_begins() -> None:
    """Not even for the deadline of a sample that will come in it."""
    asked = []

    def weights(samples: int) -> list[float]:
        asked.append(samples)
        return [1, 0.001]

    interleaving = changing(weights, 1500)
    for epoch in range(3):
        for block in (2 * epoch, 2 * epoch + 1):
            interleaving.block(block)
        assert asked == [0, 1024, 1500, 2524, 3000, 4024][: 2 * epoch + 2]


def test_many_rare_sources_do_not_crowd_out_a_frequent_one() -> None:
    """Fifty sources are due at the same place; they are spread before it."""
    sources = sources_of(constant([50] + [1] * 50, 10_000), 4)
    shares = np.tile(np.array([0.5] + [0.01] * 50), (len(sources), 1))
    assert worst_distance(sources, shares) < 1


@given(WEIGHTS, LENGTHS, st.integers(0, 20), st.booleans())
def test_a_block_is_the_same_from_any_start(weights: list[Fraction], length: int, block: int, random: bool) -> None:
    """Reached step by step, directly, or from the counts of a state."""
    seed = 3 if random else None
    stepwise, direct, resumed = (constant(weights, length, seed) for _ in range(3))
    for number in range(block):
        stepwise.block(number)
    resumed.set_counts(block, stepwise.counts(block))
    for other in (direct, resumed):
        for ours, theirs in zip(stepwise.block(block), other.block(block), strict=True):
            assert np.array_equal(ours, theirs)
    assert stepwise.counts(block, 5) == direct.counts(block, 5)


def test_random_draws_have_their_proportions() -> None:
    """Within five standard deviations, and not evenly."""
    sources = sources_of(constant([1, 3], 10**6, random_seed=0), 60)
    found, expected = int((sources == 1).sum()), len(sources) * 0.75
    assert abs(found - expected) < 5 * (expected * 0.25) ** 0.5
    shares = np.tile([0.25, 0.75], (len(sources), 1))
    assert worst_distance(sources, shares) > 5


@st.composite
def cases(draw: st.DrawFn, until: st.SearchStrategy[Any]) -> tuple[Callable[[], MixtureOrder], dict[str, int], Any]:
    """A factory of orders, the lengths of the sources and their weights."""
    lengths = {name: draw(st.integers(1, 60)) for name in draw(st.sets(st.sampled_from("abcd"), min_size=1))}
    weights = {name: draw(st.integers(1, 9) | st.sampled_from([1.7, 2.25])) for name in lengths}
    seed, shuffle = draw(st.integers(0, 9)), draw(st.booleans())
    try:
        mixture = Mixture({name: range(n) for name, n in lengths.items()}, weights, until=draw(until))
    except ValueError:
        reject()  # the first source ends before another one has come
    return lambda: mixture.order(seed, shuffle=shuffle), lengths, weights


NUMBERS = st.integers(1, 400)
NAMED = st.sampled_from(["all", "first"])


def listed(order: MixtureOrder, epochs: int) -> list[int]:
    positions = np.arange(len(order))
    return [index for epoch in range(epochs) for index in order.list_epoch(epoch, resumed=False)[positions].tolist()]


@given(cases(NUMBERS))
def test_each_source_is_passed_through_completely_before_it_starts_again(
    case: tuple[Callable[[], MixtureOrder], dict[str, int], Any],
) -> None:
    """Over the ends of the feeder's epochs of a number of samples, each pass in an order of its own."""
    new_order, lengths, _ = case
    indices, first = listed(new_order(), 3), 0
    for length in lengths.values():
        own = [index - first for index in indices if first <= index < first + length]
        passes = [own[at : at + length] for at in range(0, len(own), length)]
        for complete in passes[:-1]:
            assert sorted(complete) == list(range(length))
        assert len(set(passes[-1] if passes else [])) == len(passes[-1] if passes else [])
        first += length


@pytest.mark.parametrize("until", ["all", "first"])
@given(data=st.data())
def test_every_epoch_has_all_samples_or_each_at_most_once(until: str, data: st.DataObject) -> None:
    """Until all or the first source has ended; at every place of every epoch each count is within one of its share."""
    new_order, lengths, weights = data.draw(cases(st.just(until)))
    order, total = new_order(), sum(Fraction(str(weight)) for weight in weights.values())
    places = np.arange(len(order))
    first = np.cumsum([0, *lengths.values()])
    for epoch in range(4):
        indices = order.list_epoch(epoch, resumed=False)[places]
        sources = np.searchsorted(first, indices, side="right") - 1
        for source, (name, length) in enumerate(lengths.items()):
            own, share = indices[sources == source], Fraction(str(weights[name])) / total
            counts = np.cumsum(sources == source)
            distances = counts * share.denominator - (places + 1) * share.numerator
            assert abs(distances).max() < share.denominator
            assert len(set(own)) == length if until == "all" else len(set(own)) == len(own) > 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_source_goes_on_in_the_next_epoch_if_it_has_samples_for_it(shuffle: bool) -> None:
    """Until the first has ended: 35 samples last for three epochs of 10; without shuffling they go round."""
    order = Mixture({"small": range(10), "large": range(35)}, [1, 1], until="first").order(3, shuffle=shuffle)
    large = [index - 10 for index in listed(order, 7) if index >= 10]
    if not shuffle:
        assert large == [number % 35 for number in range(70)]
        return
    passes = [large[at : at + 30] for at in (0, 30, 60)]
    assert [len(set(each)) for each in passes] == [30, 30, 10]
    assert passes[0] != passes[1] != sorted(passes[1])


@given(cases(NUMBERS | NAMED), st.data())
def test_any_rank_batch_size_and_resume_point_gives_the_same_samples(
    case: tuple[Callable[[], MixtureOrder], dict[str, int], Any], data: st.DataObject
) -> None:
    """The samples of all ranks after a state are those that were not returned before it; the counts go on."""
    new_order, _, _ = case
    expected = listed(new_order(), 3)
    order = new_order()
    length = len(order)
    epoch, consumed = data.draw(st.integers(0, 2)), data.draw(st.integers(0, length - 1))
    state = order.state(Position(epoch, consumed))
    resumed = new_order()
    resumed.load_state(json.loads(json.dumps(state)))
    before = order.count(np.array(expected[: epoch * length + consumed], np.int64))
    assert json.loads(state)["samples"] == resumed.counts(Position(epoch, consumed)) == before
    world, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    found: dict[int, int] = {}
    for rank in range(world):
        schedule = Schedule(length=length, batch_size=size, rank=rank, world_size=world, pad=False)
        sampled = resumed.list_epoch(epoch, resumed=True)
        for plan in schedule.plans(Position(epoch, consumed), sampled):
            found |= dict(zip(plan.positions, plan.indices, strict=True))
    rest = expected[epoch * length : (epoch + 1) * length][consumed:]
    assert [found[consumed + at] for at in range(len(rest))] == rest


def test_the_state_counts_the_samples_of_each_source() -> None:
    """The counts are those of the samples returned, and padding does not count."""
    order = MixtureOrder({"web": 10, "books": 5}, constant([2, 1], 15), 0, shuffle=True)
    assert order.counts(Position(0, 9)) == {"web": 6, "books": 3}
    assert order.counts(Position(1, 16)) == {"web": 20, "books": 10}
    assert json.loads(order.state(Position(0, 9)))["samples"] == {"web": 6, "books": 3}
    order = Mixture({"web": range(7), "books": range(5)}, [1, 1], until="first").order(0, shuffle=True)
    assert order.counts(Position(2, 3)) == {"web": 12, "books": 11}


@pytest.mark.parametrize(
    "counts",
    [
        *([[0, [3, 0]]], [[1, [7, 7]]], [[0, [0]]], [[-1, [0, 0]]], [[0, [-1, 1]]], [[0, [True, -1]]], [[0, [0.0, 0]]]),
        *([["0", [0, 0]]], [[0, None]], [[0]], [0], 0, None, [[1e400, [0, 0]]], [[0, [1e400, 0]]]),
    ],
)
def test_wrong_counts_are_refused(counts: Any) -> None:
    """Counts that are no counts before their block; none of them changes the order."""
    order, other = (MixtureOrder({"a": 10, "b": 5}, constant([2, 1], 15), 0, shuffle=True) for _ in range(2))
    state = json.loads(order.state(Position()))
    with pytest.raises(StateError, match="damaged"):
        other.load_state(json.dumps(state | {"counts": counts}))
    assert listed(other, 2) == listed(order, 2)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mixture": 1}', '{"counts": [[0, [1]]], "mixture": "x"}'])
def test_a_state_of_something_else_is_refused(text: str) -> None:
    """Damaged or of another mixture."""
    order = MixtureOrder({"web": 10, "books": 5}, constant([2, 1], 15), 0, shuffle=True)
    with pytest.raises(StateError, match=r"damaged|another order"):
        order.load_state(text)


def test_a_state_of_other_weights_is_refused() -> None:
    """If each epoch restarts, the message has both weights."""

    def order(weights: list[int]) -> MixtureOrder:
        return MixtureOrder({"a": 10, "b": 5}, constant(weights, 15), 0, shuffle=True, restarts=True)

    with pytest.raises(StateError, match=r"weights \[2, 1\].*weights \[1, 1\]"):
        order([1, 1]).load_state(order([2, 1]).state(Position()))


def test_an_order_deep_in_a_large_mixture_needs_no_walk_to_it() -> None:
    """Ten million samples are not counted through: a generous limit that a walk of several seconds exceeds."""
    order = MixtureOrder(
        {"a": 10**7, "b": 10**6, "c": 10**8}, constant([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")], 10**8), 0,
        shuffle=True,
    )  # fmt: skip
    started = time.perf_counter()
    epoch: ComputedEpoch = order.list_epoch(3, resumed=True)
    assert len(epoch[np.arange(5 * 10**7, 5 * 10**7 + 64)]) == 64
    assert time.perf_counter() - started < 2


def test_counts_are_forgotten_except_those_of_epochs() -> None:
    """A long training keeps a bounded number of counts, and the start of its epoch."""
    for blocks_per_epoch in (2, 3000):
        interleaving = constant([1, 1], blocks_per_epoch * BLOCK)
        for block in range(5_000):
            interleaving.counts(block)
        assert len(interleaving._counts) <= KEPT_COUNTS + 2
        assert 5_000 // blocks_per_epoch * blocks_per_epoch - blocks_per_epoch in interleaving._counts


def test_sources_are_permuted_once_for_all_batches_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 sources, too; a change of the mixture permutes anew."""
    calls: list[int] = []
    each = mixture_order.feistel_each
    monkeypatch.setattr(
        mixture_order, "feistel_each", lambda *arguments: calls.append(len(arguments[-1])) or each(*arguments)
    )
    order = Mixture({f"{k}": range(100) for k in range(50)}, [1] * 50, until=10 * BLOCK).order(0, shuffle=True)
    epoch = order.list_epoch(0, resumed=False)
    batches = [epoch[np.arange(at, at + 64)] for at in range(0, 2 * BLOCK, 64)]
    assert calls == [BLOCK, BLOCK]
    order.load_state(order.state(Position()))
    again = order.list_epoch(0, resumed=True)
    assert np.array_equal(again[np.arange(64)], batches[0])
    assert calls == [BLOCK, BLOCK, BLOCK]
