"""A ``Table`` of a file and of the same data in memory: every type of Arrow, and columns with odd names."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Feeder, ParquetRows, Table, Tokens

pytestmark = pytest.mark.integration
pa = pytest.importorskip("pyarrow")

N = 7
ORDER = [6, 0, 3, 1, 5, 2, 4]
DAYS = [datetime.datetime(2020, 1, 1 + row) for row in range(N)]
TEXTS = [f"text {row} " * row for row in range(N)]
BYTES = [text.encode() for text in TEXTS]


def stored(kind: Any, storage: Any) -> Any:
    return pa.ExtensionArray.from_storage(kind, storage)


def numbers(kind: str) -> Any:
    return pa.array(np.arange(N).astype(kind))


def tensors(kind: Any, shape: list[int], permutation: list[int] | None = None) -> Any:
    flat = pa.array(np.arange(N * int(np.prod(shape))) % 3).cast(kind)
    storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
    return stored(pa.fixed_shape_tensor(kind, shape, permutation=permutation), storage)


def bools() -> Any:
    return stored(pa.bool8(), pa.array([1, 0, 1, 0, 2, 1, 1], pa.int8()))


def encoded(values: list[Any], kind: Any) -> Any:
    return pa.array(values, kind).dictionary_encode()


PAIRS = [[row, row + 1] for row in range(N)]
STRUCTS = [{"a": row, "b": None if row % 2 else f"x{row}"} for row in range(N)]
COLUMNS: dict[str, Callable[[], Any]] = {
    **{
        kind: lambda kind=kind: numbers(kind)  # type: ignore[misc]
        for kind in ("int8", "uint16", "uint32", "int64", "uint64", "float16", "float32", "float64")
    },
    "bool": lambda: pa.array([True, False] * 3 + [True]),
    "null": lambda: pa.nulls(N),
    "string": lambda: pa.array(TEXTS),
    "large_string": lambda: pa.array(TEXTS, pa.large_string()),
    "string_view": lambda: pa.array(TEXTS, pa.string_view()),
    "binary": lambda: pa.array(BYTES),
    "binary_view": lambda: pa.array([*BYTES[:-1], None], pa.binary_view()),
    "fixed binary": lambda: pa.array([b"abc"] * N, pa.binary(3)),
    "decimal32": lambda: pa.array([decimal.Decimal("1.5")] * N, pa.decimal32(5, 2)),
    "decimal256": lambda: pa.array([decimal.Decimal("1.5")] * N, pa.decimal256(50, 2)),
    "date64": lambda: pa.array(DAYS, pa.date64()),
    "time32": lambda: pa.array([datetime.time(1, 2, row) for row in range(N)], pa.time32("s")),
    "time64": lambda: numbers("int64").cast(pa.time64("us")),
    "timestamp": lambda: pa.array(DAYS, pa.timestamp("s")),
    "zone": lambda: pa.array(DAYS, pa.timestamp("us", tz="Europe/Berlin")),
    "duration": lambda: numbers("int64").cast(pa.duration("ms")),
    "interval": lambda: pa.array([pa.MonthDayNano([1, 2, 3])] * N),
    "list": lambda: pa.array(PAIRS, pa.list_(pa.int32())),
    "lists": lambda: pa.array([[pair] for pair in PAIRS], pa.list_(pa.large_list(pa.float32()))),
    "fixed list": lambda: pa.array([[True, False]] * N, pa.list_(pa.bool_(), 2)),
    "list_view": lambda: pa.array(PAIRS, pa.list_view(pa.int32())),
    "list of texts": lambda: pa.array([["a"] * row for row in range(N)]),
    "list of views": lambda: pa.array([["a"] * row for row in range(N)], pa.list_(pa.string_view())),
    "list of structs": lambda: pa.array([STRUCTS[:row] for row in range(N)]),
    "struct": lambda: pa.array(STRUCTS),
    "struct of views": lambda: pa.array(STRUCTS, pa.struct([("a", pa.int64()), ("b", pa.string_view())])),
    "map": lambda: pa.array([[("a", row)] for row in range(N)], pa.map_(pa.string(), pa.int64())),
    "dictionary of texts": lambda: encoded(["a", "b", "a", None, "c", "c", "a"], pa.string()),
    "dictionary of ints": lambda: encoded([5, 6, 5, 6, 7, 7, 5], pa.int64()),
    "dictionary of floats": lambda: encoded([5, 6, 5, 6, 7, 7, 5], pa.float32()),
    "dictionary of bools": lambda: encoded([True, False] * 3 + [True], pa.bool_()),
    "list of a dictionary": lambda: pa.FixedSizeListArray.from_arrays(encoded([5, 6] * N, pa.int64()), 2),
    "tensor": lambda: tensors(pa.int32(), [2, 3]),
    "tensor of numpy": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((N, 2, 2), np.float32)),
    "permuted tensor": lambda: tensors(pa.float64(), [2, 3, 4], [0, 2, 1]),
    "tensor of turned axes": lambda: tensors(pa.float64(), [2, 3, 4], [2, 0, 1]),
    "tensor of bools": lambda: tensors(pa.bool_(), [2, 3]),
    "list of a tensor": lambda: pa.FixedSizeListArray.from_arrays(tensors(pa.int32(), [2, 3]), 1),
    "bool8": bools,
    "list of bool8": lambda: pa.FixedSizeListArray.from_arrays(bools().take(pa.array(ORDER * 2)), 2),
    "uuid": lambda: stored(pa.uuid(), pa.array([uuid.UUID(int=row).bytes for row in range(N)], pa.binary(16))),
    "json": lambda: stored(pa.json_(), pa.array(['{"a": 1}'] * N)),
    "opaque": lambda: stored(pa.opaque(pa.int64(), "a", "b"), numbers("int64")),
    "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([3, N], pa.int32()), pa.array([1, 2])),
    "file": lambda: pa.array([{"bytes": each, "path": None} for each in BYTES]),
}
NO_PARQUET = ("interval", "runs", "struct of views")
"""Types that Parquet, or pyarrow's writer of row groups, does not have."""


def plain(value: Any) -> Any:
    """A value with the types and dtypes of its parts."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return type(value).__name__, repr(value)


def epoch(table: Any, feeder: dict[str, Any], **options: Any) -> Any:
    """An epoch in another order, or the error."""
    try:
        source = table if isinstance(table, ParquetRows) else Table(table, **options)
        with Feeder(source, batch_size=4, sampler=ORDER, **feeder) as opened:
            return plain(list(opened))
    except Exception as error:
        # Parquet has fewer types, so that a message may name another one.
        return type(error).__name__, str(error).rpartition(": ")[2]


def files(table: Any, folder: Path, *, parquet: bool = True) -> list[str]:
    """A file of three rows at a time in each format."""
    from pyarrow.parquet import write_table

    found = [str(folder / "x.arrow")]
    with pa.ipc.new_file(folder / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    if parquet:
        write_table(table, folder / "x.parquet", row_group_size=3)
        found.append(str(folder / "x.parquet"))
    return found


ROWS: dict[str, Any] = {"collate_fn": list}
SAMPLES: dict[str, Any] = {"collate_fn": list, "decode": lambda value: value}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_table_of_a_file_is_that_of_the_data_in_memory(kind: str, tmp_path: Path) -> None:
    """Batches, rows, samples and targets of a file are those of the same table in memory, or the same error."""
    try:
        table = pa.table({"c": COLUMNS[kind](), "n": numbers("int64")})
    except (AttributeError, pa.ArrowException) as error:
        pytest.skip(f"this pyarrow has not the type: {error}")
    for path in files(table, tmp_path, parquet=kind not in NO_PARQUET):
        for feeder, options in (
            ({}, {}),
            (ROWS, {}),
            (SAMPLES, {"data": "c"}),
            (SAMPLES, {"data": "n", "target": "c"}),
            (SAMPLES, {"data": "n", "target": ["c", "n"]}),
        ):
            found, expected = epoch(path, feeder, **options), epoch(table, feeder, **options)
            if isinstance(found, tuple):  # an error; of a table in memory it says what else is possible
                expected = expected[0], expected[1][: len(found[1])]
            assert found == expected
        if path.endswith(".parquet"):
            rows = table.take(pa.array(ORDER)).to_pylist() if "view" not in kind else None
            assert rows is None or epoch(ParquetRows(path), SAMPLES) == plain([rows[:4], rows[4:]])


@pytest.mark.parametrize("kind", ["dictionary of ints", "tensor of numpy", "permuted tensor", "bool8", "list of bool8"])
def test_types_of_numbers_become_tensors(kind: str) -> None:
    """Dictionaries of numbers, tensors with a permutation and bools of 8 bits are tensors with their values."""
    column = COLUMNS[kind]()
    wanted = np.array(column.to_pylist())
    if isinstance(column, pa.FixedShapeTensorArray):
        wanted = wanted.reshape(N, *column.type.shape)
        wanted = wanted.transpose(0, 1, 3, 2) if wanted.ndim == 4 else wanted.astype("f4")
    [batch] = Feeder(Table(pa.table({"c": column})), batch_size=N)
    assert str(batch["c"].dtype) == f"torch.{wanted.dtype}"
    assert batch["c"].tolist() == wanted.tolist()


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "texts": lambda: {
        name: pa.array(range(at, at + N))
        for at, name in enumerate(["", ".", "a.", ".a", "ü", "list", "x\ny", "a.b", "a"])
    },
    "a struct with the path of a column": lambda: {
        "a.b.c": pa.array(range(N)),
        "a.x": pa.array([{"y": row} for row in range(N)]),
        "a": pa.array([{"b": row + 20, "l": [row]} for row in range(N)]),
        "a.b": pa.array(range(10, 10 + N)),
        "a.l": pa.array(PAIRS),
    },
    "lists and maps": lambda: {
        "l": pa.array([[{"z": row}] for row in range(N)]),
        "l.list": numbers("int8"),
        "m": pa.array([[("k", row)] for row in range(N)], pa.map_(pa.string(), pa.int64())),
        "m.key_value": numbers("int16"),
    },
}


@pytest.mark.parametrize("kind", NAMES)
def test_columns_of_odd_names(kind: str, tmp_path: Path) -> None:
    """Each column is found by its exact name, as columns=, data= and target=, in the order that was asked for."""
    table = pa.table(NAMES[kind]())
    arrow, parquet = files(table, tmp_path)
    asked: list[Any] = [(ROWS, {})]
    for name, other in zip(table.column_names, [table.column_names[-1], *table.column_names], strict=False):
        asked += [(ROWS, {"columns": [name]}), (ROWS, {"columns": [name, other]})]
        asked += [(SAMPLES, {"data": name, "target": target}) for target in (None, other, [other, name])]
        values = [table[name][row].as_py() for row in ORDER]
        rows = [{name: value} for value in values]
        assert epoch(ParquetRows(parquet, data=name), SAMPLES) == plain([values[:4], values[4:]])
        assert epoch(ParquetRows(parquet, [name]), SAMPLES) == plain([rows[:4], rows[4:]])
    for feeder, options in asked:
        wanted = epoch(table, feeder, **options)
        assert epoch(arrow, feeder, **options) == epoch(parquet, feeder, **options) == wanted, options


def test_fields_with_dots(tmp_path: Path) -> None:
    """``data=`` finds a field of a struct whose own name has dots, also beside a column of its beginning."""
    structs = pa.array([{"p.q": {"r": row}, "p": {"q": -row}} for row in range(N)])
    files(pa.table({"s": structs, "s.p": numbers("int64")}), tmp_path)
    path = tmp_path / "x.parquet"
    for name, wanted in (("s.p.q.r", 1), ("s.p.q", None), ("s.p", 1)):
        found = [row for batch in Feeder(ParquetRows(path, data=name), batch_size=4, **SAMPLES) for row in batch]
        assert found == ([{"r": row} for row in range(N)] if wanted is None else [*range(N)])
    with pytest.raises(ValueError, match=r"there is no column 's\.p\.x'; there are \['s', 's\.p'\]"):
        ParquetRows(path, data="s.p.x")
    with pytest.raises(ValueError, match=r"there is no column 's\.p\.q'"):
        ParquetRows(path, data="s.p", target="s.p.q")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two columns of one name are an error, of rows, too, unless others are chosen."""
    table = pa.Table.from_arrays([numbers("int8"), numbers("int16"), numbers("int32")], ["a", "a", "b"])
    for path in files(table, tmp_path):
        with pytest.raises(ValueError, match="2 columns have the name 'a'"):
            Table(path)
        assert next(iter(Feeder(Table(path, ["b"]), batch_size=2)))["b"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="2 columns have the name 'a'"):
        ParquetRows(tmp_path / "x.parquet")


def test_tokens_beside_a_column_of_its_name(tmp_path: Path) -> None:
    """Tokens of a column are found beside a column whose name begins alike."""
    files(pa.table({"t": pa.array(PAIRS), "t.n": pa.array(PAIRS)}), tmp_path)
    with Feeder(Tokens(tmp_path / "x.parquet", 7, column="t"), batch_size=2) as feeder:
        assert next(iter(feeder)).tolist() == [[0, 1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6, 7]]
