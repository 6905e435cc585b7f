"""Several sources as one: samples, targets, names, errors and wrong arguments."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder, Files, FromDataset, Mixture, Source, Stream
from aiofeed.mixtures.mixture import CombinedDatasets


class Letters:
    """A source of bytes without ``read_many``."""

    opened = closed = 0

    def __init__(self, letter: str, length: int) -> None:
        self.letter, self.length = letter, length

    def __len__(self) -> int:
        return self.length

    def key(self, index: int) -> str:
        return f"{self.letter}{index}"

    async def read(self, index: int) -> bytes:
        if self.letter == "x":
            raise OSError("broken")
        return f"{self.letter}{index}".encode()

    async def open(self) -> None:
        self.opened += 1

    async def aclose(self) -> None:
        self.closed += 1


class Grouped(Letters):
    """A source of bytes that reads several samples at once, and has targets."""

    async def read_many(self, indices: Sequence[int]) -> list[bytes]:
        return [f"{self.letter}{index}".encode() for index in indices]

    def target(self, index: int) -> int:
        return -index


def items(name: str, length: int) -> list[str]:
    return [f"{name}{index}" for index in range(length)]


def samples_of(mixture: Mixture, **options: Any) -> list[Any]:
    """The samples of one epoch, not collated."""
    with Feeder(mixture, batch_size=3, collate_fn=list, shard=None, **options) as feeder:
        return [sample for batch in feeder for sample in batch]


def text(data: bytes) -> str:
    return data.decode()


def test_sources_of_bytes_are_one_source() -> None:
    """Every sample comes exactly once with the default weights, with or without ``read_many``."""
    mixture = Mixture({"a": Letters("a", 4), "b": Letters("b", 6)})
    assert isinstance(mixture.whole, Source)
    assert len(mixture) == 10
    assert sorted(samples_of(mixture, decode=text, shuffle=True)) == items("a", 4) + items("b", 6)


def test_sources_that_read_in_different_ways_have_their_targets() -> None:
    """One with ``read_many``, one without."""

    class One(Letters):
        def target(self, index: int) -> int:
            return index

    found = samples_of(Mixture({"a": One("a", 4), "b": Grouped("b", 4)}), decode=text)
    assert sorted(found) == [(f"a{at}", at) for at in range(4)] + [(f"b{at}", -at) for at in range(4)]


def test_files_are_read_by_decode_threads_as_without_a_mixture(tmp_path: Path) -> None:
    """``read_now`` and ``answers_at_once`` are passed on."""
    for name in items("f", 40):
        (tmp_path / name).write_bytes(name.encode())
    files = [Files([tmp_path / name for name in items("f", 40)][half::2]) for half in (0, 1)]
    mixture = Mixture({"even": files[0], "odd": files[1]})
    assert sorted(samples_of(mixture, decode=text)) == sorted(items("f", 40))
    assert mixture.whole.answers_at_once == all(one.answers_at_once for one in files)  # type: ignore[union-attr]
    assert sorted(mixture.whole.read_now([0, 39, 20])) == [b"f0", b"f1", b"f39"]  # type: ignore[union-attr]


def test_every_source_is_opened_and_closed() -> None:
    """Once, with the feeder."""
    parts = {"a": Letters("a", 4), "b": Letters("b", 4)}
    with Feeder(Mixture(parts), decode=text, collate_fn=list, batch_size=2, shard=None) as feeder:
        list(feeder)
        assert [part.opened for part in parts.values()] == [1, 1]
    assert [part.closed for part in parts.values()] == [1, 1]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (lambda at: {"x": at}, lambda at: {"x": at, "source": "a"}),
        (lambda at: (at, -at), lambda at: (at, -at, "a")),
        (lambda at: at, lambda at: (at, "a")),
    ],
    ids=["dict", "tuple", "other"],
)
def test_items_carry_the_name_of_their_dataset(item: Callable[[int], Any], named: Callable[[int], Any]) -> None:
    """In the place that fits the kind of the item."""
    assert samples_of(Mixture({"a": [item(at) for at in range(5)]}, names=True)) == [named(at) for at in range(5)]


@pytest.mark.parametrize("kind", [Letters, Grouped])
def test_samples_of_sources_carry_the_name_as_target(kind: type[Letters]) -> None:
    """Behind the target, if the source has targets."""
    found = samples_of(Mixture({"a": kind("a", 2)}, names=True), decode=text)
    expected = [("a0", "a"), ("a1", "a")] if kind is Letters else [("a0", (0, "a")), ("a1", (-1, "a"))]
    assert found == expected


def test_datasets_are_asked_in_groups_and_by_their_own_threads() -> None:
    """``__getitems__`` is called once per dataset and chunk, ``setup`` once for each."""
    calls: list[list[int]] = []
    ready: list[str] = []

    class Group(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            return index

        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(indices)
            return indices

    mixture = Mixture(
        {
            "group": FromDataset(Group(), threads=4, setup=lambda _: ready.append("group")),
            "list": FromDataset([10, 11, 12], threads=2, setup=lambda _: ready.append("list")),
        }
    )
    assert isinstance(mixture.whole, CombinedDatasets)
    assert mixture.whole.threads == 2
    assert sorted(samples_of(mixture)) == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    assert all(len(indices) > 1 for indices in calls)
    assert set(ready) == {"group", "list"}


def test_an_error_names_the_source_and_the_sample() -> None:
    """Of a source and of a dataset."""
    with pytest.raises(Exception, match="bad: x0"):
        samples_of(Mixture({"good": Letters("a", 1), "bad": Letters("x", 2)}, weights=[1, 1]), decode=text)

    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise ValueError("broken")

    with pytest.raises(Exception, match=r"bad: Broken\[0\]"):
        samples_of(Mixture({"bad": Broken([1])}))


def test_it_is_identified_by_its_sources() -> None:
    """Their names and keys, or the fingerprints that the user gave."""
    prints = [
        Mixture(parts).whole.fingerprint()
        for parts in (
            {"a": Letters("a", 4), "b": Letters("b", 4)},
            {"a": Letters("a", 4), "c": Letters("b", 4)},
            {"a": Letters("a", 4), "b": Letters("c", 4)},
            {"a": FromDataset([1], fingerprint="x"), "b": FromDataset([1], fingerprint="y")},
        )
    ]
    assert len(set(prints)) == 4
    assert Mixture({"a": FromDataset([1], fingerprint="x"), "b": [1]}).whole.fingerprint() is None


def test_it_survives_pickling() -> None:
    """Sources, targets and names."""
    copy = pickle.loads(pickle.dumps(Mixture({"a": Grouped("a", 3), "b": Grouped("b", 3)}, names=True)))
    assert samples_of(copy, decode=text)[:2] == [("a0", (0, "a")), ("b0", (0, "b"))]


def test_a_source_that_fails_as_a_whole_fails_the_group() -> None:
    """An error of ``read_many`` is not lost in the group."""

    class Failing(Grouped):
        async def read_many(self, indices: Sequence[int]) -> list[bytes]:
            raise OSError("no network")

    combined: Any = Mixture({"a": Grouped("a", 3), "b": Failing("b", 3)}).whole
    with pytest.raises(OSError, match="no network"):
        asyncio.run(combined.read_many([0, 4]))


class Unindexed(torch.utils.data.IterableDataset[int]):
    """A dataset with a length and without indices."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([1])


SOURCES = {"a": [1, 2, 3], "b": [4, 5]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": {}}, "takes a dict of sources"),
        ({"sources": [[1]]}, "takes a dict of sources"),
        ({"sources": {1: [1]}}, "names of sources"),
        ({"sources": {"a": [1], "b": []}}, "'b' is empty"),
        ({"sources": {"a": 5}}, "'a' must be a source"),
        ({"sources": {"a": [1], "b": Letters("b", 1)}}, r"\['b'\] are sources of encoded samples beside others"),
        ({"sources": {"a": [1], "b": Letters("b", 1)}, "decode": {"a": str}}, r"pass Mixture\(decode=\{'b': "),
        ({"decode": {"c": str}}, r"dict of functions by source, of \['a', 'b'\]"),
        ({"decode": str}, "dict of functions by source"),
        ({"decode": {"a": 5}}, "decode"),
        ({"sources": {"a": Mixture({"b": Letters("b", 1)}, decode={"b": str})}, "decode": {"a": str}}, "of its own"),
        ({"sources": {"a": Letters("a", 1), "b": Grouped("b", 1)}}, r"\['a'\] have no targets"),
        ({"sources": {"a": Stream([b"1"])}}, "streams have no length .* pass weights="),
        ({"sources": {"a": Unindexed()}}, "streams have no length .* pass weights="),
        ({"weights": {"a": 1}}, r"is for \['a'\], but the sources are \['a', 'b'\]"),
        ({"weights": [1]}, "1 weight for 2 sources"),
        ({"weights": "ab"}, "a dict, a list or a function"),
        ({"weights": [1, 0]}, "weight of 'b' must be above 0, got 0"),
        ({"weights": [1, -1]}, "weight of 'b' must be above 0, got -1"),
        ({"weights": [1, float("nan")]}, "weight of 'b' must be above 0, got nan"),
        ({"weights": [1, float("inf")]}, "weight of 'b' must be above 0, got inf"),
        ({"weights": [1, "2"]}, "weight of 'b' must be a number"),
        ({"weights": [1, True]}, "weight of 'b' must be a number"),
        ({"weights": lambda samples: [1, 1]}, "until='all'.*pass a number"),
        ({"weights": lambda samples: [0, 0], "until": 5}, r"returned \[0.0, 0.0\] for 0 samples"),
        ({"weights": lambda samples: [1, -1], "until": 5}, "finite numbers from 0"),
        ({"weights": lambda samples: [1], "until": 5}, "1 weight for 2 sources"),
        ({"weights": [1, 0.1], "until": "first"}, r"3 samples is too short for a sample of \['b'\]"),
        ({"random": True}, "random=True it is not known"),
        ({"random": 1}, "random"),
        ({"until": 0}, "until"),
        ({"until": "last"}, "until"),
        ({"until": True}, "until"),
        ({"names": "yes"}, "names"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """Before anything is read."""
    with pytest.raises((TypeError, ValueError), match=message):
        Mixture(**{"sources": SOURCES, **arguments})


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("dtypes", [("i4", "i8"), ("i8", "i4"), ("i4", "f4")])
def test_rows_of_other_dtypes_get_the_dtype_that_torch_chooses(shape: tuple[int, ...], dtypes: tuple[str, str]) -> None:
    """As ``torch.stack`` does for samples of two dtypes."""
    tables = [np.ones(6, [("x", dtype, shape)]) for dtype in dtypes]
    mixture = Mixture({name: aiofeed.Table(table) for name, table in zip("ab", tables, strict=True)})
    with Feeder(mixture, batch_size=6) as feeder:
        found = [batch["x"] for batch in feeder]
    expected = torch.promote_types(*[torch.from_numpy(np.ones(1, dtype)).dtype for dtype in dtypes])
    assert {batch.dtype for batch in found} == {expected}
    assert all((batch == 1).all() for batch in found)
