"""Tables in memory or in mapped files: of Hugging Face ``datasets``, Arrow, pandas and numpy."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.runtime.machine import free_memory
from aiofeed.sources.tables.columns import Columns, NumberColumn, ValueColumn, arrow
from aiofeed.sources.tables.table import Table, as_list, check_columns

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Columns up to this share (1 / MEMORY_SHARE) of free memory stay in the page cache.
MEMORY_SHARE = 2
# Enough to tell tables apart, and read in a millisecond.
FINGERPRINT_ROWS = 64


class MemoryTable(Table):
    """Rows of a table in memory, or of mapped ``.arrow`` files."""

    answers_at_once = True

    def _open(
        self,
        table: Any,
        columns: list[str] | None,
        target: str | Sequence[str] | None,
        store: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        if store is not None or options is not None:
            raise ValueError("Table: store= and options= are for URLs of Parquet files")
        self._table = [table] if isinstance(table, str | os.PathLike) else table
        self._chosen, self._target_columns = columns, target
        self._load()

    def _load(self) -> None:
        columns, self._rows, self._files = _columns_of(self._table)
        self._name = ", ".join(path for path, _ in self._files) or "Table"
        known, targets = [name for name, _ in columns], as_list(self._target_columns)
        chosen = self._chosen or ([self._data_column] if self._data_column is not None else known)
        check_columns(self._name, known, [*chosen, *targets])
        found = dict(columns)
        self._columns = Columns({name: found[name] for name in chosen})
        self._set_targets(Columns({name: found[name] for name in targets}), self._target_columns)
        self._length = len(found[chosen[0]]) if chosen else 0
        if self._rows is not None:
            self._length = len(self._rows)
        if not self._length:
            raise ValueError(f"{self._name}: the table has no rows")
        self._starts = list(accumulate([rows for _, rows in self._files], initial=0))
        pieces = [len(piece) for piece in getattr(found[chosen[0]], "chunks", ()) if len(piece)]
        if self._rows is None and len(pieces) > 1:
            self.shard_starts = list(accumulate(pieces, initial=0))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out views of the table; files are mapped again."""
        left_out = ("_columns", "_targets", "_rows")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def __len__(self) -> int:
        """The number of rows."""
        return self._length

    def __repr__(self) -> str:
        return f"{self._name if self._files else 'Table'}({len(self)} rows: {', '.join(self._columns.columns)})"

    def _types(self) -> Mapping[str, str | None]:
        return {name: getattr(column, "problem", None) for name, column in self._columns.columns.items()}

    def key(self, index: int, /) -> str:
        """The file, if there is one, and the row."""
        if not self._files:
            return f"Table[{index}]"
        number = bisect.bisect_right(self._starts, index) - 1
        return f"{self._files[number][0]}[{index - self._starts[number]}]"

    def read_now(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples."""
        rows = np.asarray(indices, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._length:
            raise IndexError(f"a row of {list(indices)[:8]} of {self._length}")
        return self._samples_of(self._columns, self._row_of(rows))

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples. Rows may have to be read from disk, which a thread does."""
        return self.read_now(indices) if self._whole else await asyncio.to_thread(self.read_now, indices)

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered of columns that are in memory, or that the operating system can keep there."""
        return self._whole and self.sample_bytes * len(self) * MEMORY_SHARE <= free_memory()

    @property
    def sample_bytes(self) -> int:
        """Bytes of the columns of numbers in one row."""
        columns = self._columns.columns.values()
        return sum(column.row_bytes for column in columns if isinstance(column, NumberColumn))

    def gathered(self, indices: NDArray[np.int64], memory: object) -> list[NDArray[Any]]:
        """Return rows of each column."""
        return list(self._columns.take(self._row_of(indices)).values())

    def form_batch(self, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch of rows of each column."""
        return dict(zip(self._columns.columns, rows, strict=True))

    def _row_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self._rows is None else self._rows[indices]

    def fingerprint(self) -> str:
        """A digest of the names of columns, the number of rows and up to 64 evenly spaced rows."""
        digest = hashlib.sha256(f"{self._data_column} {self._target_columns} {len(self)}".encode())
        for columns in (self._columns, self._targets):
            at = np.linspace(0, len(self) - 1, min(len(self), FINGERPRINT_ROWS)).astype(np.int64)
            for name, column in columns.columns.items():
                digest.update(f"\n{name} {'' if isinstance(column, ValueColumn) else column.dtype.str}".encode())
                for value in column.values(self._row_of(at)):
                    digest.update(value if isinstance(value, bytes) else _bytes_of(value))
        return digest.hexdigest()[:32]


def _bytes_of(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode("utf-8", "surrogatepass")


_Found = tuple[list[tuple[str, Any]], "NDArray[np.int64] | None", list[tuple[str, int]]]


def _columns_of(table: Any) -> _Found:
    """Return the columns of a table by name; the rows that are samples, or ``None``; files with their rows.

    Raises:
        TypeError: It is no table.
        ValueError: A file is no Arrow file, or a column cannot be converted.
    """
    kind = f"{type(table).__module__.partition('.')[0]}.{type(table).__name__}"
    rows, files = None, []
    if isinstance(table, list) and table and isinstance(table[0], str | os.PathLike):
        tables = [_mapped(os.fspath(path)) for path in table]
        files = [(os.fspath(path), len(each)) for path, each in zip(table, tables, strict=True)]
        table = _joined(tables, files)
    elif kind == "datasets.Dataset":
        table, rows = _of_dataset(table)
    elif isinstance(table, np.ndarray) and table.dtype.names:
        if table.ndim != 1:
            raise TypeError(f"Table takes a structured array of one dimension, got the shape {list(table.shape)}")
        return [(name, _converted(name, table[name])) for name in table.dtype.names], None, []
    elif kind == "pandas.DataFrame":
        names, columns = table.columns, [table.iloc[:, at] for at in range(len(table.columns))]
        return [(str(name), _converted(name, column)) for name, column in zip(names, columns, strict=True)], None, []
    elif hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        table = table if isinstance(table, arrow().Table) else arrow().table(table)
    else:
        raise TypeError(f"Table takes paths, a Dataset of Hugging Face, or a table: {_instead(table, kind)}")
    return list(zip(table.column_names, table.columns, strict=True)), rows, files


def _instead(table: Any, kind: str) -> str:
    if kind == "datasets.DatasetDict":
        return f"pass one of the splits {list(table)} of the DatasetDict"
    if kind.startswith("datasets.Iterable"):
        return f"{kind} has no rows by number, pass aiofeed.Stream(dataset)"
    if isinstance(table, list | tuple):
        return f"got {'a list of other things' if table else 'an empty list, which may come from a glob'}"
    if isinstance(table, np.ndarray):
        return "pass aiofeed.Tensors(array) for an array without fields"
    if isinstance(table, Mapping):
        return "pass pyarrow.table(...) of the dict"
    return f"got {kind}"


def _of_dataset(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """Return the Arrow table of a ``Dataset`` of Hugging Face, and its rows after ``select`` and ``shuffle``."""
    given = dataset.format
    if given["type"] == "custom":
        raise TypeError(
            "Table reads the columns of the Dataset and not what its transform makes of them: do that in decode= or "
            "collate_fn= and pass dataset.with_format(None), or feed the Dataset itself, Feeder(dataset)"
        )
    rows = None if dataset._indices is None else dataset._indices.column(0).to_numpy().astype(np.int64)
    return dataset.data.table.select([name for name in dataset.column_names if name in given["columns"]]), rows


def _converted(name: Any, values: Any) -> Any:
    """Return a column of pandas or numpy: an array of numbers as it is, any other as an Arrow column."""
    kind = values.dtype
    if isinstance(kind, np.dtype) and kind.kind in "biufc" and kind.itemsize <= (16 if kind.kind == "c" else 8):
        return np.asarray(values, kind.newbyteorder("="))
    try:
        column = arrow().array(values, from_pandas=True)
    except (arrow().ArrowException, TypeError, ValueError) as error:
        raise ValueError(f"Table: column {str(name)!r} cannot be converted to Arrow: {error}") from error
    return column if isinstance(column, arrow().ChunkedArray) else arrow().chunked_array([column])


def _mapped(path: str) -> Any:
    """Map a file of Arrow's IPC format, of its kind for files or for streams."""
    ipc = arrow().ipc
    with arrow().memory_map(path) as file:
        magic = file.read(6)
        file.seek(0)
        try:
            return (ipc.open_file if magic == b"ARROW1" else ipc.open_stream)(file).read_all()
        except arrow().ArrowException as error:
            raise ValueError(f"{path}: it is no Arrow file, or a truncated one: {error}") from None


def _joined(tables: Sequence[Any], files: Sequence[tuple[str, int]]) -> Any:
    for table, (path, _) in zip(tables, files, strict=True):
        if not table.schema.equals(tables[0].schema):
            raise ValueError(f"{path} has the columns {_schema(table)}, and {files[0][0]} {_schema(tables[0])}")
    return arrow().concat_tables(tables)


def _schema(table: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)
