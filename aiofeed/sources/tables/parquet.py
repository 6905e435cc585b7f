"""Tables of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiofeed.sources.shards.parquet import ParquetRows
from aiofeed.sources.shards.urls import Shard
from aiofeed.sources.tables.columns import problem_of
from aiofeed.sources.tables.table import Table


class ParquetTable(ParquetRows, Table):
    """Rows of Parquet files, read by row groups as ``ParquetRows`` reads them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        Table.__init__(self, *arguments, **options)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        ParquetRows.__init__(self, table, columns, data=self.data, target=target, **storage)
        self.name: str = self._shards[0].url
        if self.data is not None:
            self._data = [self.data]  # a dot in the name of a column parts no fields

    def __repr__(self) -> str:
        return f"Table({len(self)} rows in {len(self._shards)} Parquet files)"

    def _take(self, shard: Shard, table: Any, first: int, rows: Sequence[int]) -> list[Any]:
        return self._samples_read(table.take([row - first for row in rows]))

    def _problems(self) -> Mapping[str, str | None]:
        found, schemas = {}, [shard.extra.metadata.schema.to_arrow_schema() for shard in self._shards]
        for name in self._columns or schemas[0].names:
            kind = schemas[0].field(name).type
            for shard, schema in zip(self._shards, schemas, strict=True):
                if schema.field(name).type != kind:
                    raise ValueError(
                        f"{shard.url}: column {name!r} has the type {schema.field(name).type}, and {kind} in "
                        f"{self._shards[0].url}"
                    )
            found[name] = problem_of(kind)
        return found
