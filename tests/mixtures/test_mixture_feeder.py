"""Feeders over a ``Mixture``, with ``weights=`` and with ``shuffle="replacement"``: epochs, ranks, state, options."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from aiofeed import DiskCache, FailurePolicy, Feeder, FromDataset, Mixture, Tensors, TokenBudget, pad_collate
from aiofeed.errors import StateError

pytestmark = pytest.mark.usefixtures("forked_workers")

SIZES = {"web": 37, "books": 11, "code": 23}
SHARES = {"web": 0.5, "books": 0.3, "code": 0.2}


class Numbers:
    """Samples that tell their source: 1000 times its number, plus the index."""

    def __init__(self, source: int, length: int, fails_at: int = -1) -> None:
        self.source, self.length, self.fails_at = source, length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("broken")
        return torch.tensor([self.source * 1000 + index])


def mixture(fails_at: int = -1, **options: Any) -> Mixture:
    sources = {name: Numbers(at, size, fails_at) for at, (name, size) in enumerate(SIZES.items())}
    return Mixture(sources, **{"weights": SHARES, **options})


def changing(samples: int) -> dict[str, float]:
    return {"web": 1.0, "books": samples / 1000, "code": 0.5}


def new_feeder(kind: str, **options: Any) -> Feeder[Any]:
    options = {"batch_size": 4, "shard": None, "seed": 7, **options}
    if kind == "weights":
        return Feeder(Numbers(0, 60), weights=np.arange(60), **options)
    if kind == "replacement":
        return Feeder(Numbers(0, 60), shuffle="replacement", **options)
    special: dict[str, dict[str, Any]] = {
        "even": {},
        "first": {"until": "first"},
        "random": {"random": True, "until": 90},
        "changing": {"weights": changing, "until": 1500},
    }
    return Feeder(mixture(**special[kind]), shuffle=True, **options)


KINDS = pytest.mark.parametrize("kind", ["even", "random", "changing", "weights", "replacement"])


def values(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch.flatten().tolist()]


def test_an_epoch_lasts_until_all_or_the_first_source_has_ended() -> None:
    """The last one needs most samples; the first one to end gives each sample at most once."""
    with Feeder(mixture(), batch_size=4, shuffle=True, shard=None) as feeder:
        drawn = values(feeder)
        assert len(drawn) == 115  # 23 / 0.2
        assert set(drawn) == {1000 * at + index for at, size in enumerate(SIZES.values()) for index in range(size)}
    with Feeder(mixture(until="first"), batch_size=4, shuffle=True, shard=None) as feeder:
        drawn = values(feeder)
        assert len(drawn) == 36  # 11 / 0.3
        assert len(set(drawn)) == 36
    with Feeder(mixture(until=50), batch_size=4, shuffle=True, shard=None) as feeder:
        assert len(feeder) == 13
        assert len(values(feeder)) == 50


def test_sources_go_on_in_the_next_epoch_where_they_were() -> None:
    """Two epochs until the first has ended pass through most of the large source; the third starts it anew."""
    with Feeder(mixture(until="first"), batch_size=4, shuffle=True, shard=None) as feeder:
        first, second = values(feeder), values(feeder)
        web = [value for value in first + second if value < 1000]
        assert len(set(web)) == len(web) == 36
        assert feeder.statistics().by_source == {"web": 36, "books": 22, "code": 14}
        assert "drawn: web 36, books 22, code 14" in str(feeder.statistics())
        assert len(set(values(feeder))) == 36


def test_statistics_count_samples_that_drop_last_leaves_out() -> None:
    """Once the epoch has ended: the next epoch goes on after them."""
    with Feeder(mixture(until=50), batch_size=20, shard=None, drop_last=True) as feeder:
        batches = list(itertools.islice(feeder.steps(3), 1))
        assert feeder.statistics().by_source == {"web": 10, "books": 6, "code": 4}
        assert len(batches + list(feeder.steps(1))) == 2
        assert feeder.statistics().by_source == {"web": 25, "books": 15, "code": 10}


def test_statistics_count_what_was_handed_out_by_all_ranks() -> None:
    """Not what was read ahead."""
    with Feeder(mixture(), batch_size=5, shard=(1, 2)) as feeder:
        iterator = iter(feeder)
        next(iterator)
        assert feeder.statistics().by_source == {"web": 5, "books": 3, "code": 2}


@pytest.mark.parametrize("kind", ["even", "first", "random", "changing", "weights", "replacement"])
def test_a_resumed_epoch_goes_on_exactly_under_another_world_size(kind: str) -> None:
    """Whatever the number of batches returned before, over two epochs."""
    with new_feeder(kind, drop_last=True, batch_size=6) as whole:
        expected = [values(whole), values(whole)]
    length = len(expected[0])
    for handed_out in (0, 1, 5, length // 6 - 1, length // 6, length // 6 + 2):
        with new_feeder(kind, drop_last=True, batch_size=6) as feeder:
            for _ in itertools.islice(feeder.steps(handed_out + 1), handed_out):
                pass
            state = json.loads(json.dumps(feeder.state_dict()))
        ranks = []
        for rank in range(3):
            with new_feeder(kind, drop_last=True, batch_size=2, shard=(rank, 3)) as part:
                part.load_state_dict(state)
                ranks.append(values(part))
        merged = [value for row in zip(*ranks, strict=True) for value in row]
        epoch, consumed = divmod(handed_out * 6, length)
        assert merged == expected[epoch][consumed:][: len(merged)]
        assert length - consumed - len(merged) < 6


@KINDS
@pytest.mark.parametrize("cache", ["host", "device"])
def test_the_same_samples_with_a_cache(kind: str, cache: str) -> None:
    """In three epochs, without a state."""
    with new_feeder(kind) as whole, new_feeder(kind, cache=cache) as other:
        assert [values(other) for _ in range(3)] == [values(whole) for _ in range(3)]


def test_a_sample_that_fails_is_replaced_by_a_later_one() -> None:
    """The batch keeps its size; a mixture without the option names the source."""
    policy = FailurePolicy("replace", max_failures=10)
    with Feeder(mixture(fails_at=3), batch_size=5, shard=None, on_error=policy) as feeder:
        batches = list(feeder)
        assert {len(batch) for batch in batches} == {5}
        assert not {3, 1003, 2003} & set(values(batches))
    with pytest.raises(Exception, match=r"web: Numbers\[3\]"), Feeder(mixture(fails_at=3), batch_size=5) as feeder:
        list(feeder)


def test_caches_keep_the_samples_of_all_sources(tmp_path: Path) -> None:
    """Over a restart, too."""
    calls: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            calls.append(index)
            return super().__getitem__(index)

    found = []
    for _ in range(2):
        sources = {name: FromDataset(Watched(at, 9), fingerprint=name) for at, name in enumerate("abc")}
        cache = DiskCache(tmp_path / "cache", max_bytes=1 << 20)
        with Feeder(Mixture(sources), batch_size=4, shard=None, cache=cache) as feeder:
            found.append(values(feeder))
    assert found[0] == found[1]
    assert sorted(found[0]) == [1000 * source + index for source in range(3) for index in range(9)]
    assert len(calls) <= 27 + 3


def test_an_empty_source_has_no_weights() -> None:
    """And an epoch without batches."""
    with Feeder([], weights=[], batch_size=4, shard=None) as feeder:
        assert (len(feeder), list(feeder)) == (0, [])


def test_weights_with_tensors_in_memory() -> None:
    """The same draws as streamed."""
    rows = torch.arange(60).reshape(60, 1)
    expected = values(new_feeder("weights"))
    for source in (Tensors(rows), TensorDataset(rows)):
        with Feeder(source, weights=np.arange(60), batch_size=4, shard=None, seed=7) as feeder:
            assert [int(value) for [batch] in feeder for value in batch] == expected


def test_static_batches_need_drop_last() -> None:
    """The number of samples of a mixture's epoch is not that of its sources."""
    with pytest.raises(ValueError, match="drop_last=True"):
        Feeder(mixture(), batch_size=1, static_batches=True)
    with Feeder(mixture(), batch_size=4, static_batches=True, drop_last=True, shard=None) as feeder:
        assert len([batch.data_ptr() for batch in feeder]) == 28


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda: Feeder(mixture(), batch_size=2, weights=[1.0] * 71), "a Mixture decides.*leave out weights="),
        (lambda: Feeder(mixture(), batch_size=2, sampler=[1, 2]), "a Mixture decides.*leave out sampler="),
        (lambda: Feeder(mixture(), batch_sampler=[[1]]), "a Mixture decides.*leave out batch_sampler="),
        (lambda: Feeder(mixture(), batch_size=2, shuffle="replacement"), "leave out shuffle="),
        (lambda: Feeder([1, 2], batch_size=2, weights=[1.0, 1], shuffle=True), "leave out shuffle=True"),
        (lambda: Feeder([1, 2], batch_size=2, weights=[1.0, 1], sampler=[0]), "leave out sampler="),
        (lambda: Feeder([1, 2], batch_sampler=[[0]], weights=[1.0, 1]), "leave out batch_sampler="),
        (lambda: Feeder([1, 2], batch_size=2, weights=[1.0]), "2 in all"),
    ],
)
def test_arguments_that_exclude_each_other(new: Callable[[], object], message: str) -> None:
    """The error says which one to leave out."""
    with pytest.raises(ValueError, match=message):
        new()


@KINDS
def test_a_state_of_another_order_is_refused(kind: str) -> None:
    """Of a plain feeder, and the other way round."""
    with new_feeder(kind) as feeder, Feeder(Numbers(0, 60), batch_size=4, shard=None, seed=7) as plain:
        with pytest.raises(StateError, match="does not match"):
            plain.load_state_dict(feeder.state_dict())
        with pytest.raises(StateError, match="does not match"):
            feeder.load_state_dict(plain.state_dict())


def test_a_function_that_fails_is_named_at_the_loop() -> None:
    """With its own error; it runs in the engine's thread."""

    def weights(samples: int) -> dict[str, float]:
        if samples >= 1024:
            raise ZeroDivisionError("no plan for this")
        return changing(samples)

    with (
        pytest.raises(ZeroDivisionError, match="no plan for this"),
        Feeder(mixture(weights=weights, until=2048), batch_size=4, shard=None) as feeder,
    ):
        list(feeder)


@pytest.mark.parametrize("options", [{}, {"cache": "host"}, {"in_order": False}], ids=str)
def test_a_function_of_the_planned_training_is_enough(options: dict[str, Any]) -> None:
    """The next epoch is read ahead; the error of a function that does not know it is raised in that epoch only."""
    table = [{"web": 1, "books": step / 5, "code": 1} for step in range(5)]
    weights = mixture(weights=lambda samples: table[samples // 1000 if samples < 4500 else 5], until=1500)
    with Feeder(weights, batch_size=100, shard=None, **options) as feeder:
        assert [len(values(feeder)) for _ in range(3)] == [1500] * 3
        with pytest.raises(IndexError):
            list(feeder)
        feeder.set_epoch(1)
        assert [len(values(feeder)) for _ in range(2)] == [1500] * 2


LENGTHS = np.random.default_rng(0).integers(1, 12, sum(SIZES.values()))


class Texts(Numbers):
    """Samples as often as the text is long."""

    def __getitem__(self, index: int) -> torch.Tensor:
        first = sum(list(SIZES.values())[: self.source])
        return torch.full((int(LENGTHS[first + index]),), self.source * 1000 + index)


def planned(**options: Any) -> Feeder[Any]:
    sources = {name: Texts(at, size) for at, (name, size) in enumerate(SIZES.items())}
    plan = TokenBudget(LENGTHS, 40, window=30)
    options = {"batch_size": plan, "collate_fn": pad_collate(-1), "shuffle": True, "shard": None, **options}
    return Feeder(Mixture(sources, SHARES, until="first"), **options)


def firsts(batches: Any) -> list[list[int]]:
    return [[int(row[0]) for row in batch] for batch, _ in batches]


def test_a_plan_forms_batches_of_the_samples_of_a_mixture() -> None:
    """The same samples as without the plan, and the counts are those of the batches returned."""
    with planned() as feeder, Feeder(mixture(until="first"), batch_size=1, shuffle=True, shard=None) as plain:
        for _ in range(2):
            assert sorted(sum(firsts(feeder), [])) == sorted(values(plain))
        assert feeder.statistics().by_source == {"web": 36, "books": 22, "code": 14}
        iterator = iter(feeder)
        found = firsts([next(iterator), next(iterator)])
        drawn = [sum(value // 1000 == source for batch in found for value in batch) for source in range(3)]
        before = {"web": 36, "books": 22, "code": 14}.values()
        assert list(feeder.statistics().by_source.values()) == [a + b for a, b in zip(before, drawn, strict=True)]


def test_a_plan_with_weights_draws_with_replacement() -> None:
    """Samples of weight 0 never come."""
    weights = np.arange(len(LENGTHS)) % 2
    texts = [torch.full((int(length),), index) for index, length in enumerate(LENGTHS)]
    plan = TokenBudget(LENGTHS, 40)
    with Feeder(texts, batch_size=plan, weights=weights, collate_fn=pad_collate(-1), shard=None) as feeder:
        drawn = sum(firsts(feeder), [])
        assert len(drawn) == len(LENGTHS)
        assert all(index % 2 for index in drawn)
        state = feeder.state_dict()
    with (
        Feeder(texts, batch_size=plan, collate_fn=pad_collate(-1), shard=None) as plain,
        pytest.raises(StateError, match="another order of samples"),
    ):
        plain.load_state_dict(state)
