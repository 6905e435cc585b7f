"""Shares of tokens, limits on repeats, and samples that are left out of a weighted mixture."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from aiofeed import Feeder, Mixture
from aiofeed.errors import StateError

SOURCES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 300), min_size=1, max_size=40)), min_size=1, max_size=8
)


def mixture_of(sources: list[tuple[int, list[int]]], until: int, **options: Any) -> tuple[Mixture, Any]:
    """A mixture of samples ``(source, index)``, and their lengths."""
    items = {f"s{number}": [(number, at) for at in range(len(each))] for number, (_, each) in enumerate(sources)}
    lengths = {f"s{number}": each for number, (_, each) in enumerate(sources)}
    weights = [weight for weight, _ in sources]
    return Mixture(items, weights, until=until, unit="tokens", lengths=lengths, **options), lengths


def indices_of(mixture: Mixture, epochs: int, *, shuffle: bool) -> np.ndarray:
    order = mixture.order(3, shuffle=shuffle)
    lists: Any = [order.list_epoch(epoch, resumed=False) for epoch in range(epochs)]
    return np.concatenate([each[np.arange(len(mixture))] for each in lists])


@given(SOURCES, st.booleans(), st.integers(1, 900))
def test_tokens_are_within_one_sample_of_their_share(
    sources: list[tuple[int, list[int]]], shuffle: bool, until: int
) -> None:
    """At every place, over the ends of epochs; each source is passed through before it starts again."""
    mixture, _ = mixture_of(sources, until)
    indices = indices_of(mixture, 3, shuffle=shuffle)
    counts = [len(each) for _, each in sources]
    of = np.searchsorted(np.cumsum(counts), indices, side="right")
    tokens = np.concatenate([each for _, each in sources])[indices]
    drawn = np.cumsum((of[:, None] == np.arange(len(sources))) * tokens[:, None], 0)
    shares = np.array([weight for weight, _ in sources]) / sum(weight for weight, _ in sources)
    longest = max(max(each) for _, each in sources)
    assert np.abs(drawn - np.cumsum(tokens)[:, None] * shares).max() <= longest + 1e-6
    for number, count in enumerate(counts):
        own = indices[of == number]
        for first in range(0, len(own) - count + 1, count):
            assert len({*own[first : first + count].tolist()}) == count


def test_documents_of_other_lengths_come_in_shares_of_tokens() -> None:
    """Half of the tokens of each, though one source has documents of 200 tokens and one of 20."""
    mixture, _ = mixture_of([(1, [200] * 50), (1, [20] * 50)], 550)
    drawn = np.bincount(indices_of(mixture, 1, shuffle=True) // 50)
    assert drawn.tolist() == [50, 500]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_resume_is_exact_on_any_ranks(ranks: int) -> None:
    """The rest of the second epoch, from a state that went through JSON."""
    mixture, _ = mixture_of([(2, [3, 50, 7, 9]), (1, [20, 1, 90]), (5, [4] * 11)], 2048)

    def feed(rank: int, world: int) -> Feeder[Any]:
        return Feeder(mixture, batch_size=64 // world, shuffle=True, shard=(rank, world))

    def rows(batches: list[Any]) -> list[list[int]]:
        return [torch.stack(batch, 1).tolist() for batch in batches]

    with feed(0, 1) as feeder:
        whole = [rows(list(feeder)) for _ in range(2)][1]
    with feed(0, 1) as feeder:
        list(feeder)
        batches = iter(feeder)
        for _ in range(20):
            next(batches)
        state = json.loads(json.dumps(feeder.state_dict()))
    found: list[Any] = []
    for rank in range(ranks):
        with feed(rank, ranks) as feeder:
            feeder.load_state_dict(state)
            found.append(rows(list(feeder)))
    for step, expected in enumerate(whole[20:]):
        assert sorted(row for part in found for row in part[step]) == sorted(expected)


def test_weights_stay_with_tokens() -> None:
    """A state of other weights or lengths is refused."""
    state = Feeder(mixture_of([(1, [5, 6]), (1, [7])], 64)[0], batch_size=4).state_dict()
    for other in ([(2, [5, 6]), (1, [7])], [(1, [5, 8]), (1, [7])]):
        with pytest.raises(StateError, match="another order"):
            Feeder(mixture_of(other, 64)[0], batch_size=4).load_state_dict(state)


def test_a_source_is_not_repeated_more_often_than_allowed() -> None:
    """The error comes before the first sample that would be one too many, and names the source."""
    mixture = Mixture({"small": range(10), "large": range(100, 1000)}, [1, 1], until=30, max_repeats={"small": 3})
    with Feeder(mixture, batch_size=10, shuffle=True) as feeder:
        found = [torch.cat(list(feeder)) for _ in range(2)]
        assert sum(int((each < 100).sum()) for each in found) == 30
        with pytest.raises(ValueError, match=r"'small' would be passed through more often than max_repeats=3"):
            list(feeder)


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_are_left_out_of_a_weighted_mixture(shuffle: bool) -> None:
    """Shares stay; the samples that are left are passed through one after the other; a resume is exact."""
    mixture = Mixture({"a": range(20), "b": range(100, 120)}, [1, 3], until=2000)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": shuffle, "exclude": [0, 1, 2, 25]}
    with Feeder(mixture, **options) as feeder:
        batches = [batch.tolist() for batch in feeder]
        assert feeder.statistics().by_source == {"a": 500, "b": 1500}
    assert {sum(value >= 100 for value in batch) for batch in batches} == {6}
    drawn = [value for batch in batches for value in batch]
    for name, count in (("a", 17), ("b", 19)):
        own = [value for value in drawn if (value >= 100) == (name == "b")]
        assert {*own[:count]} == {*own[count : 2 * count]}
        assert len({*own}) == count
    with Feeder(mixture, **options) as feeder:
        taken = iter(feeder)
        for _ in range(130):
            next(taken)
        state = feeder.state_dict()
    with Feeder(mixture, **options) as feeder:
        feeder.load_state_dict(state)
        assert [batch.tolist() for batch in feeder] == batches[130:]
    with pytest.raises(StateError):
        Feeder(mixture, **options | {"exclude": [0]}).load_state_dict(state)
    with pytest.raises(ValueError, match="all samples of the source 'a'"):
        Feeder(mixture, **options | {"exclude": range(20)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "bytes", "until": 5}, '"samples" or "tokens"'),
        ({"unit": "tokens", "until": 5}, r"lengths of the samples of 'a' are not known.*pass Mixture\(lengths="),
        ({"unit": "tokens", "until": 5, "lengths": {"a": [1, 2], "b": [0, 1]}}, "lengths of 'b' must be at least 1"),
        ({"unit": "tokens", "until": 5, "lengths": {"a": [1], "b": [1, 1]}}, "one for each of 2 samples"),
        ({"unit": "tokens", "lengths": {"a": [1, 2], "b": [1, 1]}}, 'unit="tokens" it is not known'),
        ({"unit": "tokens", "until": 5, "random": True}, "no random=True"),
        ({"unit": "tokens", "until": 5, "weights": lambda samples: [1, 1]}, "weights that do not change"),
        ({"max_repeats": 0}, "max_repeats"),
        ({"max_repeats": {"c": 1}}, r"is for \['c'\], but the sources are \['a', 'b'\]"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    """Before anything is read."""
    with pytest.raises(ValueError, match=message):
        Mixture(**{"sources": {"a": [1, 2], "b": [3, 4]}, "weights": [1, 1], **options})
