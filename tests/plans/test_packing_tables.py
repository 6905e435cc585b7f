"""``Pack`` over tables of token lists: parts of lists are gathered, no row becomes an object of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder, Pack, Table
from aiofeed.errors import CollateError
from aiofeed.tables.columns import ListColumn

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.usefixtures("arrow_started")

LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 30, 60)]
FIRSTS = np.cumsum([0, *LENGTHS])


def lists(dtype: str, factor: int = 1) -> list[Any]:
    """Documents of other tokens each."""
    tokens = (np.arange(FIRSTS[-1]) * factor % 120).astype(dtype)
    return [tokens[first : first + length] for first, length in zip(FIRSTS, LENGTHS, strict=False)]


COLUMNS = {"x": lists("int32"), "y": lists("int16", 7), "half": lists("float16"), "flag": lists("bool")}


def arrow(columns: Any = tuple(COLUMNS), pieces: int = 1, kind: Any = pa.list_) -> Any:
    """A table of several pieces, the first of which begins within its memory."""
    of = {name: kind(pa.from_numpy_dtype(COLUMNS[name][0].dtype)) for name in columns}
    table = pa.table({name: pa.array([[], *map(list, COLUMNS[name])], of[name]) for name in columns})[1:]
    step = -(-len(table) // pieces)
    parts = [table[at : at + step] for at in range(0, len(table), step)]
    return pa.concat_tables(
        [parts[0], *(pa.table({n: part[n].combine_chunks() for n in columns}) for part in parts[1:])]
    )


def mapped(folder: Path) -> str:
    """An Arrow file of record batches of 7 rows."""
    with pa.ipc.new_file(folder / "x.arrow", arrow().schema) as file:
        file.write_table(arrow(), max_chunksize=7)
    return str(folder / "x.arrow")


def dataset_of_hugging_face(_: Path) -> Any:
    """A shuffled dataset."""
    dataset = pytest.importorskip("datasets").Dataset.from_dict({"x": list(map(list, COLUMNS["x"]))})
    order = np.random.default_rng(1).permutation(60)
    return Table(dataset.select(order)), [{"x": torch.from_numpy(COLUMNS["x"][row].copy())} for row in order]


def documents(columns: Any = tuple(COLUMNS)) -> list[Any]:
    """The model: a Dataset of dicts of tensors."""
    return [{name: torch.from_numpy(COLUMNS[name][row].copy()) for name in columns} for row in range(60)]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "one piece": lambda _: (Table(arrow()), documents()),
    "pieces": lambda _: (Table(arrow(pieces=9)), documents()),
    "large lists": lambda _: (Table(arrow(pieces=2, kind=pa.large_list)), documents()),
    "a file": lambda folder: (Table(mapped(folder)), documents()),
    "a part": lambda _: (Table(arrow(pieces=3))[::-2], documents()[::-2]),
    "a part of a part": lambda _: (Table(arrow())[5:][::3], documents()[5:][::3]),
    "one column": lambda _: (Table(arrow(pieces=3), data="x"), [each["x"] for each in documents()]),
    "datasets": dataset_of_hugging_face,
}


def plain(batch: Any) -> dict[str, Any]:
    return {name: (str(each.dtype), each.tolist()) if hasattr(each, "dtype") else each for name, each in batch.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"separator": 1, "pad": 0},
        {"separator": 1, "context": 1},
        {"split": False, "on_oversize": "truncate", "separator": 0, "pad": 1},
        {"split": False, "on_oversize": "skip"},
    ],
    ids=lambda options: "-".join(map(str, options)) or "split",
)
@pytest.mark.parametrize("name", SOURCES)
def test_the_batches_of_a_table_are_those_of_its_rows(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its pieces, dtypes and columns, in each epoch, and no list is taken on its own."""
    source, rows = SOURCES[name](tmp_path)
    monkeypatch.setattr(ListColumn, "values", None)
    plan: dict[str, Any] = {"context": 24, "rows": 2, **options}
    one = aiofeed.Limits(decode_threads=1)  # several threads share the first batch
    with Feeder(source, batch_size=Pack(**plan), shuffle=True, limits=one) as gathered:
        found = [list(map(plain, gathered)) for _ in range(2)]
    with Feeder(rows, batch_size=Pack("measure", **plan), shuffle=True) as expected:
        assert found == [list(map(plain, expected)) for _ in range(2)]


@pytest.mark.parametrize("options", [{"engine": "process:1"}, {"on_error": aiofeed.FailurePolicy(read_timeout_s=30)}])
def test_the_same_batches_with_other_options(options: dict[str, Any], forked_workers: None) -> None:
    """In worker processes, and where threads do not read."""
    plan: dict[str, Any] = {"batch_size": Pack(context=24, rows=2), "shuffle": True}
    with Feeder(Table(arrow()), **plan, **options) as other, Feeder(Table(arrow()), **plan) as expected:
        assert list(map(plain, other)) == list(map(plain, expected))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"lengths": [*LENGTHS[:-1], 40]}, r"Table\[59\]' has \d+ x, and Pack\(lengths=\) has 40"),
        ({"separator": -1}, r"has bool, which cannot hold Pack\(separator=-1\)"),
        ({"separator": {"x": 1}}, r"has y, for which Pack\(separator=\) has no token"),
    ],
)
def test_what_does_not_fit_is_an_error_of_a_row(plan: dict[str, Any], message: str) -> None:
    """As for rows that are taken one by one."""
    with (
        pytest.raises(CollateError, match=message),
        Feeder(Table(arrow()), batch_size=Pack(context=24, **plan)) as feeder,
    ):
        list(feeder)


def test_rows_are_arrays_of_their_own() -> None:
    """A sample of a table may be changed: it is a copy, of the dtype of its lists."""
    column = Table(arrow(("x",), pieces=3))._held.columns["x"]
    assert isinstance(column, ListColumn)
    rows = column.values(np.array([59, 0, 31]))
    assert [row.tolist() for row in rows] == [COLUMNS["x"][row].tolist() for row in (59, 0, 31)]
    rows[0][:] = -1
    assert column.value(59).tolist() == COLUMNS["x"][59].tolist()
