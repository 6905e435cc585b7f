"""Columns: rows of many pieces of memory, and values that do not depend on other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.tables.columns import Columns, GatheredRows, NoTensorsError, NumberColumn, ValueColumn, collate_rows

arrow: Any = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64", "complex128"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)])
def test_rows_of_several_pieces(dtype: str, shape: tuple[int, ...]) -> None:
    """Rows are those of the pieces one after another, wherever their memory is; the result is memory of its own."""
    size = int(np.prod(shape))
    counts = (5, 0, 1, 90_000, 7)
    pieces = [(np.arange(n * size) % 100 + n % 9).astype(dtype).reshape(n, *shape) for n in counts]
    whole = np.concatenate(pieces)
    column = NumberColumn(pieces)
    rows = np.array([90_012, 0, 5, 4, 6, 90_005, 90_006, 0])
    taken = column.take(rows)
    np.testing.assert_array_equal(taken, whole[rows])
    assert taken.dtype == whole.dtype
    taken[...] = 0
    np.testing.assert_array_equal(column.take(rows), whole[rows])
    for row in (90_012, 5, 0):
        np.testing.assert_array_equal(column.value(row), whole[row])


def test_pieces_without_a_common_alignment() -> None:
    """Pieces that do not lie at multiples of their item size, or with gaps, are joined."""
    data = np.zeros(65, np.uint8)
    pieces = [data[:32].view(np.int64), data[33:65].view(np.int64)]
    pieces[1][:] = np.arange(4)
    assert NumberColumn(pieces).take(np.array([7, 0])).tolist() == [3, 0]
    gaps = [np.arange(10)[::2], np.arange(10)[1::2]]
    assert NumberColumn(gaps).take(np.array([0, 4, 5])).tolist() == [0, 8, 1]


def test_an_array_with_gaps_is_not_copied() -> None:
    """Rows of a field of a structured array are read one by one."""
    table = np.zeros(10, [("a", "i4"), ("b", "f8", (2,))])
    table["b"] = np.arange(20).reshape(10, 2)
    column = NumberColumn([table["b"]])
    table["b"][3] = 9
    assert column.take(np.array([3, 1])).tolist() == [[9, 9], [2, 3]]


def test_values_do_not_depend_on_other_rows() -> None:
    """A row has the same value beside rows of the same shape, of others and alone."""
    rows = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[1], [2, 3]], [[1, None]], None, [[9, 9]]]
    column = arrow.chunked_array(
        [arrow.array(rows[:2]), arrow.array(rows[2:], arrow.list_(arrow.list_(arrow.int64())))]
    )
    values = Columns({"a": column}).columns["a"].values(np.arange(6))
    uniform = Columns({"a": column.slice(0, 2)}).columns["a"].values(np.arange(2))
    assert isinstance(Columns({"a": column}).columns["a"], ValueColumn)
    for value, same, row in zip(values, uniform, rows, strict=False):
        assert type(value) is type(same) is np.ndarray
        assert value.dtype == same.dtype == np.int64
        assert value.tolist() == same.tolist() == row
    assert values[2:5] == rows[2:5]
    assert values[5].tolist() == [[9, 9]]


@pytest.mark.parametrize("kind", ["bool_", "float16", "float32", "int8", "uint64"])
def test_numbers_beside_nulls(kind: str) -> None:
    """A number has the same type with and without a null in its column."""
    number = np.dtype(kind).type  # before version 21, arrow makes half-precision numbers of numpy's only
    with_null = arrow.chunked_array([arrow.array([number(1), number(0), None], getattr(arrow, kind)())])
    found = Columns({"a": with_null}).rows(np.arange(3))
    same = Columns({"a": with_null.slice(0, 2)}).rows(np.arange(2))
    assert [(type(row["a"]), row["a"]) for row in found[:2]] == [(type(row["a"]), row["a"]) for row in same]
    assert found[2] == {"a": None}


def test_rows_of_several_tables() -> None:
    """A batch of rows of several reads has them in its order; rows that differ in shape name the column."""
    first, second = (Columns({"a": np.arange(4) + start}) for start in (0, 10))
    assert collate_rows([(first, 3), (second, 1), (first, 0)])["a"].tolist() == [3, 11, 0]
    with pytest.raises(NoTensorsError, match=r"column 'a' has arrays of different shapes, \[\] and \[2\]"):
        collate_rows([(first, 0), (Columns({"a": np.zeros((1, 2))}), 0)])


def test_rows_of_other_dtypes() -> None:
    """A column has the dtype of the first row, and is written beside others that have the same one."""
    parts = [Columns({"x": np.arange(3), "y": np.arange(3, dtype=dtype) * 2}) for dtype in (np.int64, np.float32)]
    batch = collate_rows([(parts[0], 1), (parts[1], 2), (parts[0], 0)])
    assert {name: column.tolist() for name, column in batch.items()} == {"x": [1, 2, 0], "y": [2, 4, 0]}


def test_rows_that_are_gathered_can_be_looked_at() -> None:
    """Their batch is made afterwards all the same: a message on what a feeder waits for goes through the samples."""
    memory = HostBufferPool(0)
    rows = GatheredRows(["x"], 2, memory)
    rows.put(np.array([1, 0]), Columns({"x": np.arange(5)}).blocks(np.array([3, 4])))
    assert [columns.rows(np.array([row])) for columns, row in rows] == [[{"x": 4}], [{"x": 3}]]
    batch, _ = rows.batch(memory)
    assert batch["x"].memory.tolist() == [4, 3]
