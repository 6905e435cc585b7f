"""One table of 100 rows in every kind that ``Table`` takes, and its columns as arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROWS = 100
NUMBERS: dict[str, Any] = {
    "x": np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4),
    "y": np.arange(ROWS) * 7,
    "flag": np.arange(ROWS) % 3 == 0,
    "small": np.arange(ROWS, dtype=np.int8),
}
TEXTS = [f"row {row}" * (row % 4) for row in range(ROWS)]
TOKENS = [list(range(row % 5 + 1)) for row in range(ROWS)]


def arrow_table(rows: Any = slice(None), *, fixed: bool = True, others: bool = False) -> Any:
    """An Arrow table; ``fixed``: of lists of a fixed length; ``others``: with columns that have no tensors."""
    arrow = pytest.importorskip("pyarrow")
    flat = arrow.array(NUMBERS["x"][rows].reshape(-1))
    lists = [4 * at for at in range(len(flat) // 4 + 1)]
    columns = {
        "x": arrow.FixedSizeListArray.from_arrays(flat, 4) if fixed else arrow.ListArray.from_arrays(lists, flat)
    }
    columns |= {name: arrow.array(NUMBERS[name][rows]) for name in ("y", "flag", "small")}
    if others:
        columns |= {
            "text": arrow.array(TEXTS[rows], arrow.string()),
            "tokens": arrow.array(TOKENS[rows], arrow.list_(arrow.int64())),
        }
    return arrow.table(columns)


def in_chunks(**options: Any) -> Any:
    """The Arrow table in 25 pieces, some of them empty."""
    arrow = pytest.importorskip("pyarrow")
    empty = arrow_table(slice(0, 0), **options)
    return arrow.concat_tables(
        [piece for at in range(0, ROWS, 4) for piece in (arrow_table(slice(at, at + 4), **options), empty)]
    )


def arrow_file(folder: Path, kind: str = "file") -> Any:
    """A file of Arrow's IPC format, of its kind for files or for streams."""
    arrow = pytest.importorskip("pyarrow")
    path, table = folder / "table.arrow", arrow_table()
    with getattr(arrow.ipc, f"new_{kind}")(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)
    return path


def dataset(folder: Path, **options: Any) -> Any:
    """A ``Dataset`` of Hugging Face that is mapped from its files."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = folder / f"dataset-{len(list(folder.iterdir()))}"
    datasets.Dataset(datasets.table.InMemoryTable(in_chunks(**options))).save_to_disk(path)
    return datasets.load_from_disk(path)


def chosen(folder: Path) -> Any:
    """A ``Dataset`` of the rows, after ``select`` of a shuffled one with more rows."""
    datasets = pytest.importorskip("datasets")
    twice = datasets.concatenate_datasets([dataset(folder), dataset(folder)])
    return twice.select(list(range(150, 200)) + list(range(50))).select([*range(50, 100), *range(50)])


def structured(_: Path) -> Any:
    """A NumPy structured array."""
    kinds = [(name, column.dtype, column.shape[1:]) for name, column in NUMBERS.items()]
    table = np.zeros(ROWS, kinds)
    for name, column in NUMBERS.items():
        table[name] = column
    return table


def parquet(folder: Path, **options: Any) -> Any:
    """A glob of two Parquet files, in row groups of 17 rows."""
    writer = pytest.importorskip("pyarrow.parquet")
    for number, rows in enumerate((slice(0, 60), slice(60, ROWS))):
        writer.write_table(arrow_table(rows, **options), folder / f"{number}.parquet", row_group_size=17)
    return folder / "*.parquet"


def lance(folder: Path) -> Any:
    """A Lance dataset."""
    return pytest.importorskip("lance").write_dataset(arrow_table(), folder / "table.lance")


TABLES: dict[str, Callable[[Path], Any]] = {
    "Arrow": lambda folder: arrow_table(),
    "Arrow, pieces": lambda folder: in_chunks(),
    "Arrow, lists": lambda folder: in_chunks(fixed=False),
    "Arrow, slice": lambda folder: sliced(),
    "Arrow, file": arrow_file,
    "Arrow, stream": lambda folder: [arrow_file(folder, "stream")],
    "datasets": dataset,
    "datasets, chosen": chosen,
    "datasets, torch": lambda folder: dataset(folder).with_format("torch"),
    "NumPy": structured,
    "polars": lambda folder: pytest.importorskip("polars").from_arrow(arrow_table()),
    "Parquet": parquet,
    "Lance": lance,
}
"""Makes the table, given an empty folder."""


def sliced() -> Any:
    """A slice of a table with more rows."""
    arrow = pytest.importorskip("pyarrow")
    return arrow.concat_tables([arrow_table(slice(90, 100)), arrow_table()]).combine_chunks().slice(10)
