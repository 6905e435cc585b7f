"""Tables of Lance datasets."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from aiofeed.sources.tables.columns import Columns, problem_of
from aiofeed.sources.tables.table import Table, as_list, check_columns


class LanceTable(Table):
    """Rows of a Lance dataset; a read is one ``take``."""

    def _open(
        self,
        table: Any,
        columns: list[str] | None,
        target: str | Sequence[str] | None,
        store: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        if store is not None:
            raise ValueError("Table: store= is for URLs of Parquet files; Lance takes options=, its storage_options")
        if isinstance(table, list | tuple):
            if len(table) > 1:
                raise ValueError(f"Table takes one Lance dataset, got {len(table)}: pass a Mixture of several tables")
            table = table[0]
        if isinstance(table, str | os.PathLike):
            table = _opened(os.fspath(table), options)
        self._dataset, self._name = table, table.uri
        names = table.schema.names
        self._columns = columns or ([self._data_column] if self._data_column is not None else names)
        check_columns(self._name, names, [*self._columns, *as_list(target)])
        self._length = int(table.count_rows())
        if not self._length:
            raise ValueError(f"{self._name}: the table has no rows")
        if target is not None:
            self._set_targets(Columns.of(table.to_table(columns=as_list(target))), target)

    def __len__(self) -> int:
        """The number of rows."""
        return self._length

    def __repr__(self) -> str:
        return f"{self._name}({len(self)} rows: {', '.join(self._columns)})"

    def _types(self) -> Mapping[str, str | None]:
        return {name: problem_of(self._dataset.schema.field(name).type) for name in self._columns}

    def key(self, index: int, /) -> str:
        """The dataset and the row."""
        return f"{self._name}[{index}]"

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Read rows."""
        return await asyncio.to_thread(self._take, list(indices))

    def _take(self, indices: list[int]) -> list[Any]:
        return self._samples_read(self._dataset.take(indices, columns=self._columns))

    def fingerprint(self) -> str:
        """Name, version, number of rows and columns of the dataset."""
        return f"{os.path.basename(self._name)} {self._dataset.version} {len(self)} {self._columns}"


def _opened(path: str, options: Mapping[str, Any] | None) -> Any:
    try:
        lance = importlib.import_module("lance")
    except ImportError:
        raise ImportError(f"{path}: Table reads Lance datasets through pylance: pip install pylance") from None
    return lance.dataset(path, storage_options=None if options is None else dict(options))
