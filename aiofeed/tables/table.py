"""``Table``: rows of tables, of which a batch is gathered column by column."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from aiofeed import _load_addon
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import Traits, public
from aiofeed.kernel.core.validation import check_bool, counted, explain_arguments
from aiofeed.kernel.runtime import machine
from aiofeed.shards.parquet import as_list
from aiofeed.tables.columns import Columns, NumberColumn, ValueColumn, collate_rows, no_tensors, take_rows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.tables.filled import Categories

# Suffixes of files that are mapped; all other files are read as Parquet.
ARROW_FILES = (".arrow", ".feather", ".ipc")
# Suffixes of files that are parsed, before one of a compression.
TEXT_FILES, PACKED = (".csv", ".tsv", ".jsonl", ".ndjson", ".json"), (".gz", ".bz2", ".zst")
# Columns up to this share (1 / MEMORY_SHARE) of free memory may be in memory, or stay in the page cache, which all
# ranks share.
MEMORY_SHARE = 2


@public
@explain_arguments(
    {
        "rows_per_read": 'rows are read by whole row groups; shuffle="window" makes neighbours of a file come together',
        "sep": "pass Table(pandas.read_csv(path, sep=...))",
        **dict.fromkeys(("usecols", "names", "header"), "columns= names the columns; for others pass a pandas frame"),
        **dict.fromkeys(("nrows", "chunksize"), "table[:1000] is a part; large files are read in blocks"),
        **dict.fromkeys(("y", "label", "labels", "targets"), "target= names the column"),
        "drop": "columns= names those that stay",
        "split": "pass one split of the dataset, as in dataset['train']",
    }
)
class Table(GroupedSource):
    """Rows of a table; without ``decode=`` and ``collate_fn=`` a batch is a dict of tensors, one for each column.

    Example:
        ```python
        import aiofeed

        table = aiofeed.Table("train.parquet")  # or a CSV file, a DataFrame, a Hugging Face dataset
        feeder = aiofeed.Feeder(table, batch_size=16, shuffle=True)
        for batch in feeder:
            print(batch["area"], batch["price"])  # a tensor for each column
        ```

    Columns of numbers, bools, and lists or arrays of them of one length become tensors; a batch is one gather for each
    column. With ``collate_fn=`` or ``decode=`` samples are rows instead: dicts of Python values, in which lists of
    numbers are arrays, and images and audio of Hugging Face are the bytes of their files. Needs
    ``pip install "aiofeed[parquet]"``.

    Args:
        table: A Hugging Face ``Dataset``, whose ``select`` and ``shuffle`` apply; a streaming one, an
            ``IterableDataset``, which is read in its order as a ``Stream`` is; an Arrow table, or any object that
            exports one, as those of polars and DuckDB; a pandas ``DataFrame``; a NumPy structured array; a Lance
            dataset; the path of an ``.arrow`` file, which is mapped, or of a ``.lance`` dataset; CSV or JSON Lines
            files, also compressed ones; or Parquet files, as for ``ParquetRows``: paths, URLs, globs and braces. It is
            referenced, not copied: do not change it.
        columns: The columns. Default: all.
        data: The column whose value is the sample, or ``decode=`` gets, in place of a row.
        target: The column of the target, or several for a dict; a sample is then ``(decoded, target)``, and without
            ``data`` a batch ``(columns, target)``, of tables in memory.
        store: For URLs of files, an obstore store that reads them.
        options: For URLs of files, arguments of ``obstore.store.from_url``; for Lance, of ``lance.dataset``.
        in_memory: Whether Parquet files, or ``.arrow`` files, are read whole by the first epoch and stay in memory, for
            all feeders of this table. Order and states are the same. Default: Parquet, if the columns take less than
            a quarter of ``Limits.memory_bytes`` in memory, an epoch of this rank needs all row groups, and neither
            worker processes nor a cache are used. CSV and JSON Lines are parsed into memory, if they fit; ``False``
            reads them in blocks.
        categories: "codes" makes numbers, int64, of columns of texts; the attribute ``categories`` of another table
            makes the same numbers. Of tables in memory.
        fill: Values in place of nulls and NaN, by column; of a column of categories the number of nulls and of values
            that ``categories`` lacks. Of tables in memory.

    Attributes:
        categories: For each column whose values are numbers, the values in the order of these.

    Raises:
        ImportError: pyarrow or Lance is not installed.
        FileNotFoundError: A file does not exist.
        TypeError: No table, a dataset with a transform, or several splits.
        ValueError: A table without rows, a column that does not exist, a damaged file, or ``in_memory=True`` for
            columns that take more than half of the free memory.
    """

    _prepares = False
    """Whether ``categories``, ``fill``, and ``target`` without ``data`` are possible."""
    _whole = False
    """Whether samples are rows for ``collate_rows``."""
    name: str = "Table"
    """The table in keys and messages."""
    _length: int
    _target_columns: Any = None
    target: Callable[[int], Any]

    def __new__(cls, table: Any = None, *_: Any, **__: Any) -> Self:
        """Make a table of the class for its kind."""
        if cls is not Table:
            return super().__new__(cls)
        kind = _load_addon(_kind_of(table), "Table")
        return kind.__new__(kind, table, *_, **__)  # type: ignore[no-any-return]

    traits: Traits = Traits(decode="optional", rows=True)

    def __init__(
        self,
        table: Any,
        columns: Sequence[str] | None = None,
        *,
        data: str | None = None,
        target: str | Sequence[str] | None = None,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
        in_memory: bool | None = None,
        categories: Literal["codes"] | Categories | None = None,
        fill: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise TypeError(f"Table(columns=) must be a list of names, got {columns!r}")
        if columns is not None and data is not None:
            raise ValueError("Table: data= is one column and columns= are those of a dict: pass one of them")
        if not isinstance(fill, Mapping | None):
            raise TypeError(f"Table(fill=) must be a dict of values by column, got {fill!r}")
        self.categories: dict[str, list[Any]] = {}
        self._coded, self._fill = categories, dict(fill or {})
        if categories not in (None, "codes") and not isinstance(categories, Mapping):
            raise TypeError(f'Table(categories=) must be "codes" or the `categories` of a table, got {categories!r}')
        prepared = (target is not None and data is None) or categories is not None or fill is not None
        if prepared and not self._prepares:
            raise ValueError(
                "Table(categories=, fill=, or target= without data=) takes tables in memory: pass a DataFrame, as "
                "of pandas.read_parquet(path, columns=[...]), or do this in decode=, a function of the row"
            )
        if in_memory is not None:
            check_bool("Table(in_memory=)", in_memory)
        self.data: str | None = data
        self._asked = in_memory
        paths = table if isinstance(table, list | tuple) else ()
        self._open(paths[0] if len(paths) == 1 else table, columns, target, store=store, options=options)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        """Open the table, in a subclass; ``storage`` are ``store`` and ``options``."""
        raise NotImplementedError

    def _check_room(self, nbytes: int) -> None:
        """Raise ``ValueError`` if columns that are to be in memory do not fit."""
        if self._asked and nbytes > (room := machine.rank_memory() // MEMORY_SHARE):
            raise ValueError(
                f"{self.name}: in_memory=True needs {format_bytes(nbytes)}, and half of the free memory of this rank "
                f"is {format_bytes(room)}: choose columns=[...], or leave in_memory= out"
            )

    def _chosen_columns(self) -> Mapping[str, NumberColumn | ValueColumn]:
        """Return each chosen column, or one of its type without rows, in a subclass."""
        raise NotImplementedError

    def _list_lengths(self, name: str) -> NDArray[np.int64] | None:
        """Return ``list_lengths`` of a column, in a subclass."""
        raise NotImplementedError

    def _problems(self) -> Mapping[str, str | None]:
        """Return for each chosen column why it has no tensors, or ``None``."""
        return {name: getattr(column, "problem", None) for name, column in self._chosen_columns().items()}

    def _way_out(self, name: str) -> str:
        """Return what to do about a column without tensors, in a subclass."""
        return ""

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples, in a subclass."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def __repr__(self) -> str:
        return f"Table({counted(len(self), 'row')} of {', '.join(self._problems())})"

    def key(self, index: int, /) -> str:
        """Return the table and the row."""
        return f"{self.name}[{index}]"

    def structure(self) -> Mapping[str, Sequence[int] | None] | None:
        """Return the columns and their shapes, if samples are rows."""
        targets = as_list(self._target_columns)
        chosen = {} if self.data is not None else self._chosen_columns()
        columns = {name: column for name, column in chosen.items() if name not in targets}
        return {name: column.row_shape for name, column in columns.items()} or None

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the length of each list of numbers of a column, without a name of that of ``data=``."""
        names = [name for name, column in self._chosen_columns().items() if column.row_shape != ()]
        name = self.data or unit or next(iter(names), "")
        return None if name not in names or (unit and self.data is not None) else self._list_lengths(name)

    def in_batches(self) -> Self:
        """Return the table with samples for ``collate_rows``; itself if a sample is one column.

        Raises:
            TypeError: A column has no tensors.
        """
        if self.data is not None:
            return self
        for column, problem in self._problems().items():
            if problem is not None:
                raise TypeError(f"{self.name}: {no_tensors(column, problem)}{self._way_out(column)}")
        names = self._target_columns
        collate = collate_rows if names is None else partial(_collate_with_target, names)
        return self._changed(_whole=True, target=None, collate=collate)

    def _changed(self, **attributes: Any) -> Self:
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **attributes)
        return changed

    def _set_targets(self, columns: Columns, names: str | Sequence[str] | None) -> None:
        """Keep columns of targets in memory."""
        self._targets, self._target_columns = columns, names
        if names is not None and not self._whole:
            self.target = self._target

    def _target(self, index: int, /) -> Any:
        [row] = self._row_of(np.array([index]))
        if isinstance(self._target_columns, str):
            return self._targets.columns[self._target_columns].value(row)
        return {name: column.value(row) for name, column in self._targets.columns.items()}

    def _row_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the columns in memory that are samples."""
        return indices

    def _samples_of(self, columns: Columns, rows: Any) -> list[Any]:
        """Return samples of rows of columns in memory."""
        if self._whole:
            return [(columns, row) for row in rows.tolist()]
        if self.data is None:
            return columns.rows(rows, without=as_list(self._target_columns))
        values = columns.columns[self.data].values(rows)
        null = ValueError(f"column {self.data!r} is null")
        return [null if value is None else value for value in values]

    def _samples_read(self, table: Any) -> list[Any]:
        """Return samples of an Arrow table that was read for them."""
        nulls = [column for column in table.column_names if table.column(column).null_count] if self._whole else []
        if not nulls:
            return self._samples_of(Columns.of(table), np.arange(len(table)))
        valid = ~np.logical_or.reduce([table.column(column).is_null().to_numpy() for column in nulls])
        found = iter(self._samples_of(Columns.of(take_rows(table, np.flatnonzero(valid))), np.arange(valid.sum())))
        names = " or ".join(map(repr, nulls))
        null = ValueError(f"{names} is null: leave it out with columns=[...], or take rows as dicts by collate_fn=")
        return [next(found) if each else null for each in valid]


class GatheredTable(Table):
    """A table whose batches may be gathered from columns in memory."""

    _held: Columns
    """The columns."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of the columns of numbers in one row."""
        return sum(column.row_bytes for column in self._held.columns.values() if isinstance(column, NumberColumn))

    def gathered(self, indices: NDArray[np.int64], memory: object) -> list[NDArray[Any]]:
        """Return rows of each column in memory."""
        return list(self._held.take(indices).values())

    def form_batch(self, rows: Sequence[torch.Tensor]) -> Any:
        """Return a batch of rows of each column; with targets ``(batch, targets)``."""
        batch = dict(zip(self._held.columns, rows, strict=True))
        return batch if self._target_columns is None else _without_target(self._target_columns, batch)


def _without_target(names: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    targets = {name: batch.pop(name) for name in as_list(names)}
    return batch, targets[names] if isinstance(names, str) else targets


def _collate_with_target(names: Any, samples: Sequence[tuple[Columns, int]]) -> Any:
    return _without_target(names, collate_rows(samples))


def check_columns(name: str, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` if columns do not exist, or names are not unique."""
    for column in wanted:
        if column not in known:
            raise ValueError(f"{name}: there is no column {column!r}; there are {list(known)}")
        if list(known).count(column) > 1:
            raise ValueError(f"{name}: {list(known).count(column)} columns have the name {column!r}")


def _kind_of(table: Any) -> str:
    """Return the name of the class for a kind of table."""
    path = table[0] if isinstance(table, list | tuple) and table else table
    if isinstance(path, str | os.PathLike):
        suffix = PurePath(path).suffix.lower()
        if (PurePath(PurePath(path).stem).suffix.lower() if suffix in PACKED else suffix) in TEXT_FILES:
            return "ParsedTable"
        return "LanceTable" if suffix == ".lance" else "MemoryTable" if suffix in ARROW_FILES else "ParquetTable"
    package, is_stream = type(table).__module__.partition(".")[0], type(table).__name__ == "IterableDataset"
    if package == "datasets" and is_stream:
        return "StreamTable"
    return "LanceTable" if package == "lance" else "MemoryTable"
