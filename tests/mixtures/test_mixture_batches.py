"""Batches of mixtures that each source gathers: rows, places, names and dtypes, beside a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Feeder, Limits, Mixture, Table, Tokens
from aiofeed.errors import CollateError
from aiofeed.kernel.core.types import HostTensor
from tests.support.simulated_device import SimulatedDevice

ROWS = 40


def rows(first: int, **columns: str) -> np.ndarray[Any, Any]:
    """A table whose columns have the number of a row, the second one with the other sign."""
    found = np.zeros(ROWS, list(columns.items()))
    for sign, name in zip((1, -1), columns, strict=False):
        found[name] = sign * np.arange(first, first + ROWS)
    return found


def parquet(folder: Path, first: int, **options: Any) -> Table:
    import pyarrow as pa
    from pyarrow import parquet

    numbers = np.arange(first, first + ROWS)
    path = folder / f"{first}.parquet"
    parquet.write_table(pa.table({"x": numbers, "y": -numbers}), path, row_group_size=8)
    return Table(path, **options)


TABLES: dict[str, Callable[[Path], dict[str, Table]]] = {
    "in memory": lambda _: {"a": Table(rows(0, x="i8", y="i8")), "b": Table(rows(100, x="i8", y="i8"))},
    "columns in another order": lambda _: {"a": Table(rows(0, x="i8", y="i8")), "b": Table(rows(-100, y="i8", x="i8"))},
    "dtypes": lambda _: {"a": Table(rows(0, x="i4", y="f4")), "b": Table(rows(100, x="i8", y="i8"))},
    "parts": lambda _: {"a": Table(rows(0, x="i8", y="i8"))[::-1], "b": Table(rows(100, x="i8", y="i8"))[5:]},
    "Parquet": lambda folder: {"a": parquet(folder, 0), "b": parquet(folder, 100)},
    "one in memory": lambda folder: {"a": Table(rows(0, x="i8", y="i8")), "b": parquet(folder, 100)},
    "on disk": lambda folder: {name: parquet(folder, at, in_memory=False) for name, at in (("a", 0), ("b", 100))},
    "one on disk": lambda folder: {"a": Table(rows(0, x="i8", y="i8")), "b": parquet(folder, 100, in_memory=False)},
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_tables_are_in_their_places(kind: str, names: bool, on_device: bool, tmp_path: Path) -> None:
    """Each row once, with its own columns and name, in the order of a mixture that reads rows one by one."""
    sources = TABLES[kind](tmp_path)
    mixture, plain = Mixture(sources, names=names), Mixture(sources)
    device: Any = SimulatedDevice() if on_device else None
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "shard": None, "seed": 3}
    with Feeder(mixture, device=device, **options) as feeder, Feeder(plain, collate_fn=list, **options) as singly:
        for _ in range(2):
            found = list(feeder)
            expected = [sample for batch in singly for sample in batch]
            for column in ("x", "y"):
                values = torch.cat([batch[column].cpu() for batch in found]).tolist()
                assert values == [float(sample[column]) for sample in expected]
            if names:
                known = ["a" if 0 <= sample["x"] < ROWS else "b" for sample in expected]
                assert [name for batch in found for name in batch["source"]] == known
            else:
                assert "source" not in found[0]
        assert len(expected) == sum(map(len, sources.values()))


def test_tables_with_other_columns_are_refused() -> None:
    """Also if their numbers are equal."""
    mixture = Mixture({"a": Table(rows(0, x="i8", y="i8")), "b": Table(rows(0, x="i8", z="i8"))})
    with pytest.raises(TypeError, match=r"'a' with samples \{'x': .* and 'b' with \{'x'.*'z'"):
        Feeder(mixture, batch_size=4)


def test_targets_of_other_names_are_in_their_places() -> None:
    """The target of a table is a part of its samples, whatever its column is called."""
    sources = {"a": Table(rows(0, x="i8", y="i8"), target="y"), "b": Table(rows(100, x="i8", z="i8"), target="z")}
    with Feeder(Mixture(sources), batch_size=7, shuffle=True) as feeder:
        for batch, target in feeder:
            assert batch["x"].tolist() == (-target).tolist()


def test_tokens_with_names_are_gathered_in_the_consumer_thread(tmp_path: Path) -> None:
    """With targets, many windows of memory at a time; a batch that the user keeps stays as it is."""
    for at, name in enumerate("ab"):
        (np.arange(900) + 1000 * at).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    sources = {name: Tokens(tmp_path / f"{name}.bin", 8, targets=True) for name in "ab"}
    feeder: Feeder[Any] = Feeder(
        Mixture(sources, names=True), batch_size=8, shuffle=True, limits=Limits(memory_bytes=4096)
    )
    kept = list(feeder)
    list(feeder)
    seen = set()
    for x, y, names in kept:
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert ["ab"[first // 1000] for first in x[:, 0].tolist()] == list(names)
        seen |= {*x[:, 0].tolist()}
    assert len(seen) == sum(map(len, sources.values()))
    assert feeder.statistics().decode_s == 0


def test_a_sample_that_does_not_fit_is_named() -> None:
    """Of sources whose structures are not known before: what both are, and a sample of each."""
    sources = {"a": [torch.zeros(3)] * 8, "b": [torch.zeros(2)] * 8}
    mixture = Mixture(sources, decode={"a": lambda item: item})
    with (
        pytest.raises(CollateError, match=r"'a' are float32 \[3\], those of 'b' float32 \[2\] \('a: list\[\d"),
        Feeder(mixture, batch_size=8, shuffle=True) as feeder,
    ):
        list(feeder)


def test_arrays_of_leaves() -> None:
    """Of batches that are permuted in memory, there is none."""
    from aiofeed.mixtures.parts import array_of

    assert array_of(HostTensor(np.ones((2, 3)), axes=(1, 0))) is None
