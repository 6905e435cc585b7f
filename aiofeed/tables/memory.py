"""Tables in memory, or in a mapped file: of Hugging Face ``datasets``, Arrow, pandas and numpy."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.mapped import MappedFiles, file_of
from aiofeed.kernel.engine.fetch.user_errors import pointer_hint
from aiofeed.kernel.runtime.machine import free_memory
from aiofeed.kernel.sources.file_io import SAMPLED, Content
from aiofeed.shards.arrow import arrow
from aiofeed.shards.parquet import as_list
from aiofeed.shards.urls import ShardFinder
from aiofeed.tables.columns import Columns, GatheredLists, ListColumn, NumberColumn, ValueColumn, take_rows
from aiofeed.tables.filled import coded, filled, is_text, odd_number, values_of
from aiofeed.tables.table import MEMORY_SHARE, GatheredTable, check_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Enough to tell tables apart, and read in a millisecond.
FINGERPRINT_ROWS = 64


class MemoryTable(GatheredTable):
    """Rows of a table in memory, or of a mapped ``.arrow`` file."""

    answers_at_once = True
    _joins = False
    """Whether samples are for plans that join parts of them."""
    _prepares = True

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        if any(value is not None for value in storage.values()):
            raise ValueError("Table: store= and options= are for URLs of Parquet files")
        exports = hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__")
        if exports and _package(table) not in ("datasets", "pandas"):
            table = arrow().table(table)
        self._table, self._chosen, self._target_columns = table, columns, target
        self._load()

    def _load(self) -> None:
        paths = self._table if isinstance(self._table, list | tuple) else [self._table]
        are_paths = bool(paths) and all(isinstance(path, str | os.PathLike) for path in paths)
        self.name: str = os.fspath(paths[0]) if are_paths else "Table"
        if self._asked is False and not are_paths:
            raise ValueError("Table(in_memory=False) is for files, and this table is in memory")
        files, table = self._opened(paths) if are_paths else (None, self._table)
        columns, self._rows = _columns_of(table)
        self._mapped = MappedFiles(_files_of(table) if files is None else files)
        known, targets = [name for name, _ in columns], as_list(self._target_columns)
        features = [name for name in known if name not in targets]
        chosen = self._chosen or (features if self.data is None else [self.data])
        if not chosen:
            raise ValueError(f"{self.name}: no column is left beside target={targets}; it has {known}")
        options = [*self._fill, *([] if self._coded == "codes" else self._coded or ())]
        check_columns(self.name, known, [*chosen, *targets, *options])
        found = self._prepared({name: column for name, column in columns if name in {*chosen, *targets}})
        self._length = len(found[chosen[0]] if self._rows is None else self._rows)
        if not self._length:
            raise ValueError(f"{self.name}: the table has no rows")
        self._held = Columns({name: found[name] for name in [*chosen, *(targets if self.data is None else ())]})
        self._set_targets(Columns({name: found[name] for name in targets}), self._target_columns)
        pieces = [len(piece) for piece in getattr(found[chosen[0]], "chunks", ()) if len(piece)]
        if self._rows is None and len(pieces) > 1:
            self.shard_starts: list[int] = list(accumulate(pieces, initial=0))

    def _opened(self, paths: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the files of paths for ``MappedFiles``, and their rows as an Arrow table."""
        files, table = _mapped_all(paths)
        if not self._asked:
            return files, table
        self._check_room(table.nbytes)
        return [], take_rows(table, np.arange(len(table)))

    def _prepared(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns with ``fill`` and the numbers of categories."""
        found, given = {}, self._coded
        for name, column in columns.items():
            kind, fill = getattr(column, "type", None), self._fill.get(name)
            listed = given == "codes" and kind is not None and is_text(kind)
            values = values_of(column) if listed else given.get(name) if isinstance(given, Mapping) else None
            try:
                if values is not None:
                    self.categories: dict[str, list[Any]] = {**self.categories, name: list(values)}
                    column = coded(name, arrow().chunked_array([column]) if kind is None else column, values, fill)
                elif fill is not None:
                    column = filled(name, column, fill)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}{_with_nulls(columns, self._fill)}") from None
            found[name] = column
        if given == "codes":
            self._coded = self.categories  # a copy in another process has the same numbers
        return found

    def _way_out(self, name: str) -> str:
        column = self._held.columns[name]
        assert isinstance(column, ValueColumn)
        if column.column.null_count:
            row = arrow("pyarrow.compute").index(column.column.is_null(), True).as_py()
            others = _with_nulls({name: getattr(each, "column", None) for name, each in self._held.columns.items()}, ())
            return f". The first null is in row {row} (the first is 0), and fill= replaces nulls{others}"
        if not is_text(column.column.type):
            return ""
        return f'. categories="codes" makes numbers of texts{odd_number(name, column.column)}'

    def __getstate__(self) -> dict[str, Any]:
        """Leave out views of the table; a file is mapped again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_held", "_targets", "_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def _chosen_columns(self) -> Mapping[str, NumberColumn | ValueColumn]:
        return self._held.columns

    def _list_lengths(self, name: str) -> NDArray[np.int64] | None:
        self._mapped.check()
        return self._held.columns[name].lengths(self._row_of(np.arange(len(self))))

    def in_pieces(self) -> Self:
        """Return the table with rows as ``GatheredLists``, if it has lists of numbers only."""
        lists = all(isinstance(column, ListColumn) for column in self._held.columns.values())
        return self._changed(_joins=True) if lists and self._target_columns is None else self

    def read_now(self, indices: Sequence[int], /) -> Any:
        """Return samples."""
        rows = self._row_of(np.asarray(indices, np.int64))
        self._mapped.check(rows)
        if not self._joins:
            return self._samples_of(self._held, rows)
        names = {name if self.data is None else "tokens": column for name, column in self._held.columns.items()}
        return GatheredLists(names, rows, lambda: self._samples_of(self._held, rows))

    async def read_many(self, indices: Sequence[int], /) -> Any:
        """Return samples. Rows may have to be read from disk, which a thread does."""
        return self.read_now(indices) if self._whole else await asyncio.to_thread(self.read_now, indices)

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered of columns that are in memory, or that the operating system can keep there."""
        if self._joins:
            lists = [column.nbytes for column in self._held.columns.values() if isinstance(column, ListColumn)]
            return sum(lists) * MEMORY_SHARE <= free_memory()
        return self._whole and self.sample_bytes * len(self) * MEMORY_SHARE <= free_memory()

    def gathered(self, indices: NDArray[np.int64], memory: object) -> list[NDArray[Any]]:
        """Return rows of each column."""
        rows = self._row_of(indices)
        self._mapped.check(rows)
        return super().gathered(rows, memory)

    def _row_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self._rows is None else self._rows[indices]

    def fingerprint(self) -> str:
        """Return a digest of the columns, the number of rows and up to 64 evenly spaced rows."""
        return self._digest(FINGERPRINT_ROWS)

    def content_parts(self) -> list[Content]:
        """Return a digest of more rows."""
        return [Content(self._digest(SAMPLED).encode(), kind="rows")]

    def _digest(self, most: int) -> str:
        digest = hashlib.sha256(f"{self.data} {self._target_columns} {len(self)}".encode())
        rows = self._row_of(np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64))
        for columns in (self._held, self._targets):
            for name, column in columns.columns.items():
                digest.update(f"\n{name} {getattr(column, 'dtype', '')}".encode())
                for value in column.values(rows):
                    digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode(*_UTF8))
        return digest.hexdigest()[:32]


_UTF8 = "utf-8", "surrogatepass"


def _columns_of(table: Any) -> tuple[list[tuple[str, Any]], NDArray[np.int64] | None]:
    """Return the columns of a table by name, and the rows that are samples, or ``None``.

    Raises:
        TypeError: It is no table.
        ValueError: A column cannot be converted.
    """
    kind, rows = f"{_package(table)}.{type(table).__name__}", None
    if isinstance(table, np.ndarray) and table.dtype.names and table.ndim == 1:
        return [(name, _converted(name, table[name])) for name in table.dtype.names], None
    if kind == "pandas.DataFrame":
        columns = [table.iloc[:, at] for at in range(table.shape[1])]
        return [(str(name), _converted(name, column)) for name, column in zip(table, columns, strict=True)], None
    if kind == "datasets.Dataset":
        table, rows = _of_dataset(table)
    elif kind != "pyarrow.Table":
        raise TypeError(f"Table takes paths, a Dataset of Hugging Face, or a table: {_instead(table, kind)}")
    return list(zip(table.column_names, table.columns, strict=True)), rows


def _with_nulls(columns: Mapping[str, Any], but: Any) -> str:
    names = [name for name, each in columns.items() if getattr(each, "null_count", 0) and name not in but]
    return f"; columns with nulls: {names}" if len(names) > 1 else ""


def _package(table: Any) -> str:
    return type(table).__module__.partition(".")[0]


def _instead(table: Any, kind: str) -> str:
    if isinstance(table, Mapping):
        return f"pass one of the values {list(table)[:8]} of the {kind}, or pyarrow.table(...) of columns"
    if isinstance(table, np.ndarray):
        return f"an array {list(table.shape)} of {table.dtype} has no columns, pass aiofeed.Tensors(array)"
    return "got an empty list, which may come from a glob" if isinstance(table, list) and not table else f"got {kind}"


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
    """Return a column of pandas or numpy: numbers as an array, in the same memory if possible, others for Arrow."""
    kind = values.dtype
    if isinstance(kind, np.dtype) and kind.kind in "biufc" and kind.itemsize <= (16 if kind.kind == "c" else 8):
        return np.asarray(values, kind.newbyteorder("="))
    try:
        column = arrow().array(values, from_pandas=True)
    except (arrow().ArrowException, TypeError, ValueError) as error:
        raise ValueError(f"Table: column {str(name)!r} cannot be converted to Arrow: {error}") from error
    return column if isinstance(column, arrow().ChunkedArray) else arrow().chunked_array([column])


def _files_of(table: Any) -> list[Any]:
    """Return the files that a table of Hugging Face or numpy maps, with their numbers of rows, for ``MappedFiles``."""
    if _package(table) != "datasets":
        return [(file_of(table), len(table))]
    blocks = getattr(table.data, "blocks", [[table.data]])
    files = [([each.path for each in block if hasattr(each, "path")], len(block[0])) for block in blocks]
    return [([(path, os.path.getsize(path)) for path in paths], rows) for paths, rows in files]


def _mapped_all(paths: Sequence[str | os.PathLike[str]]) -> Any:
    """Map files, of which a text may be a glob, as one table; return them for ``MappedFiles``, and the table."""
    if any(isinstance(path, str) and not os.path.exists(path) for path in paths):
        shards = run_blocking(lambda: ShardFinder(None, None).find(paths))
        if remote := [shard.url for shard in shards if not shard.local]:
            raise ValueError(f"{remote[0]}: Arrow files are read from disk only: download it, or write it as Parquet")
        paths = [shard.key for shard in shards]
    tables = [mapped(os.fspath(path)) for path in paths]
    files = [([(path, os.path.getsize(path))], len(table)) for path, table in zip(paths, tables, strict=True)]
    try:
        return files, tables[0] if len(tables) == 1 else arrow().concat_tables(tables)
    except arrow().ArrowException as error:
        raise ValueError(f"{os.fspath(paths[0])} and other files differ in their columns: {error}") from None


def mapped(path: str) -> Any:
    """Map a file of Arrow's IPC format, of its kind for files or for streams."""
    with arrow().memory_map(path) as file:
        magic = file.read(6)
        file.seek(0)
        try:
            found = (arrow().ipc.open_file if magic == b"ARROW1" else arrow().ipc.open_stream)(file).read_all()
            found.validate()
            return found
        except (arrow().ArrowException, OSError, ValueError) as error:
            reason = f"it is no Arrow file, or a truncated one: {error}{pointer_hint(path)}"
            raise ValueError(f"{path}: {reason}") from None
