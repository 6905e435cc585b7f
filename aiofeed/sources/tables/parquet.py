"""Tables of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiofeed.sources.shards.parquet import ParquetRows
from aiofeed.sources.shards.urls import Shard
from aiofeed.sources.tables.columns import problem_of
from aiofeed.sources.tables.table import Table


class ParquetTable(Table, ParquetRows):
    """Rows of Parquet files, read by row groups as ``ParquetRows`` reads them."""

    def _open(
        self,
        table: Any,
        columns: list[str] | None,
        target: str | Sequence[str] | None,
        store: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        ParquetRows.__init__(self, table, columns, data=self._data_column, target=target, store=store, options=options)
        if self._data_column is not None:
            self._data = [self._data_column]  # a name with a dot is a column, too

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Read rows; row groups are read whole."""
        return await ParquetRows.read_many(self, indices)

    def _target(self, index: int, /) -> Any:
        return ParquetRows._target(self, index)

    def _take(self, shard: Shard, table: Any, first: int, rows: Sequence[int]) -> list[Any]:
        return self._samples_read(table.take([row - first for row in rows]))

    def _types(self) -> Mapping[str, str | None]:
        schemas = [(shard.url, shard.extra.metadata.schema.to_arrow_schema()) for shard in self._shards]
        first, found = schemas[0], {}
        for name in self._columns or first[1].names:
            for url, schema in schemas:
                if schema.field(name).type != first[1].field(name).type:
                    raise ValueError(
                        f"{url}: column {name!r} has the type {schema.field(name).type}, and "
                        f"{first[1].field(name).type} in {first[0]}"
                    )
            found[name] = problem_of(first[1].field(name).type)
        return found
