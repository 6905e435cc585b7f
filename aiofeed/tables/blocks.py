"""Tables of CSV and JSON Lines files that do not fit into memory: they are read in blocks, at their offsets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.shards.arrow import arrow
from aiofeed.shards.index import ShardIndex, ranges_of, with_labels
from aiofeed.shards.indexing import IndexRules, Scan
from aiofeed.shards.parquet import leaf_count, leaves
from aiofeed.shards.urls import Shard, ShardFinder, Urls
from aiofeed.tables.manifest import TableFile
from aiofeed.tables.stored import ParquetTable
from aiofeed.tables.table import check_columns

# A block is parsed in some 20 ms, and takes as much memory as a small row group.
BLOCK_BYTES = 8 << 20
# Blocks become larger if they have no end of a row, up to this.
MAX_BLOCK = 16 << 20


class BlockFile:
    """The blocks of a file, with those members of pyarrow's ``FileMetaData`` and its schema that are used.

    Args:
        file: Parses parts of it.
        index: The ranges of the blocks; their labels are the numbers of rows and the types.
    """

    def __init__(self, file: TableFile, index: ShardIndex) -> None:
        found = [json.loads(label) for label in index.labels or ()]
        self.file, self.index = file, index
        self.rows: list[int] = [each["rows"] for each in found]
        schemas = [arrow().ipc.read_schema(arrow().py_buffer(bytes.fromhex(each["types"]))) for each in found]
        ends = np.cumsum(self.rows).tolist()
        places = [f"rows {end - rows} to {end - 1}" for end, rows in zip(ends, self.rows, strict=True)]
        self.types: Any = _common_types(dict(zip(places, schemas, strict=True)), file.has_empty_cells)

    @property
    def schema(self) -> Self:
        """Return itself, which has the schema."""
        return self

    def to_arrow_schema(self) -> Any:
        """Return the types of the columns."""
        return self.types

    @property
    def num_columns(self) -> int:
        """Return the number of column chunks of a block."""
        return sum(map(leaf_count, self.types.types))

    @property
    def num_row_groups(self) -> int:
        """Return the number of blocks."""
        return len(self.rows)

    def row_group(self, block: int) -> Any:
        """Return the number of rows of a block."""
        return SimpleNamespace(num_rows=self.rows[block])

    def parsed(self, block: int, data: Any, chosen: Sequence[int]) -> Any:
        """Return the table of columns of a block, by the numbers of their column chunks."""
        names = [name for name in self.types.names if set(leaves(self, [name])).intersection(chosen)]
        types = arrow().schema([self.types.field(name) for name in names])
        header = self.types.names if block and self.file.has_empty_cells else None
        table = self.file.part(data, header).read(names, dict(zip(names, types.types, strict=True)))
        return table.cast(types)


class BlockTable(ParquetTable):
    """Rows of CSV and JSON Lines files, of which one pass has found blocks of rows, as of row groups."""

    async def _list(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        return list(map(finder.shard, await named_files(finder, urls)))

    async def _open_all(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        shards = await super()._open_all(finder, urls)
        types = _common_types({shard.url: shard.extra.metadata.types for shard in shards}, text=False)
        for shard in shards:
            file = shard.extra.metadata
            file.types = arrow().schema([types.field(name) for name in file.types.names])
            for name, column in shard.extra.targets.items():
                kind = types.field(name).type
                is_array = isinstance(column, np.ndarray)
                shard.extra.targets[name] = column.astype(kind.to_pandas_dtype()) if is_array else column.cast(kind)
        return shards

    async def _footer(self, shard: Shard) -> tuple[Any, bool]:
        file = TableFile(shard.key, None, None, None, whole=False)
        rules = IndexRules(f"rows in blocks of {BLOCK_BYTES}", partial(_scan, file), streams=False)
        return BlockFile(file, await self._obtain(shard, rules=rules)), False

    def for_memory(self, nbytes: int, /) -> Self:
        """Return the table: it stays in blocks."""
        return self

    @cached_property
    def gathered_bytes(self) -> float:
        """Bytes of a row in its file."""
        return max(sum(shard.size for shard in self._shards) / len(self), 1.0)

    async def _parts_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> Any:
        [data] = await shard.read(self._chunks_of(shard, group, chosen))
        return data

    def _chunks_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
        index = shard.extra.metadata.index
        return [(int(index.starts[group]), int(index.ends[group]))]

    def _decode_rows(self, shard: Shard, group: int, chosen: Sequence[int], file: Any) -> Any:
        if file is None:
            [file] = shard.read_now(self._chunks_of(shard, group, chosen))
        try:
            return shard.extra.metadata.parsed(group, file, chosen)
        except (arrow().ArrowException, ValueError) as error:
            raise ValueError(f"{shard.url}: block {group}: {error}") from None

    def __repr__(self) -> str:
        return f"Table({len(self)} row{'s' * (len(self) != 1)} in {len(self.shard_starts) - 1} blocks)"


async def named_files(finder: ShardFinder, paths: Any) -> list[str]:
    """Return paths and URLs, and those of the files that are found by globs and braces."""
    found: list[str] = []
    for path in map(os.fspath, [paths] if isinstance(paths, str | os.PathLike) else paths):
        is_pattern = any(mark in path for mark in "*?[{") and not os.path.exists(path)
        shards = await finder.find(path) if is_pattern else ()
        found += [shard.key if shard.local else shard.url for shard in shards] if is_pattern else [path]
    return found


def _scan(file: TableFile, size: int, _: Any) -> Scan:
    """Find the blocks of a file, their rows and their types."""
    at, nbytes, rows, lines, header = 0, BLOCK_BYTES, 0, 0, None
    starts, ends, labels = list[int](), list[int](), list[bytes | None]()
    while at < size:
        data = yield at, min(at + nbytes, size)
        if not (end := len(data) if at + len(data) == size else file.row_end(data)):
            if (nbytes := 2 * nbytes) > MAX_BLOCK:
                raise ValueError(
                    f"row {rows} (the first is 0) does not end within {format_bytes(len(data))}: it may begin with a "
                    f"quotation mark that is not closed, or rows do not end with a newline"
                )
            continue
        nbytes, part = BLOCK_BYTES, data[:end]
        if part.strip():
            table = file.part(part, header, rows, lines).read(None, {})
            check_columns(str(at), table.column_names, table.column_names)
            starts.append(at)
            ends.append(at + end)
            labels.append(json.dumps({"rows": len(table), "types": table.schema.serialize().to_pybytes().hex()}).encode())
            header = table.column_names if file.has_empty_cells else None
            rows += len(table)
        at, lines = at + end, lines + part.count(b"\n")
    if not rows:
        raise ValueError("the table has no rows")
    return with_labels(ranges_of(starts, ends), labels)


def _common_types(schemas: Mapping[str, Any], text: bool) -> Any:
    """Return types that hold the columns of all places; if none does, texts if ``text``.

    Raises:
        ValueError: There is no common type.
    """
    found: dict[str, dict[Any, str]] = {}
    for place, schema in schemas.items():
        for each in schema:
            found.setdefault(each.name, {}).setdefault(each.type, place)
    fields = []
    for name, places in found.items():
        kinds = [kind for kind in places if not arrow().types.is_null(kind)] or list(places)
        options = [arrow().schema([(name, kind)]) for kind in kinds]
        try:
            [field] = arrow().unify_schemas(options, promote_options="permissive")
        except arrow().ArrowException:
            if not text:
                each = ", and ".join(f"{kind} in {places[kind]}" for kind in kinds[:2])
                raise ValueError(f"column {name!r} has {each}: write the values of a column as one type") from None
            field = arrow().field(name, arrow().binary() if arrow().binary() in kinds else arrow().string())
        is_unsigned = arrow().uint64() in kinds and arrow().types.is_integer(field.type)
        fields.append(field.with_type(arrow().uint64()) if is_unsigned else field)
    return arrow().schema(fields)
