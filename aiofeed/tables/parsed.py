"""Tables of CSV and JSON Lines files: they are parsed into memory, or read in blocks at their offsets."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Self

from aiofeed.common.blocking import run_blocking
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.runtime import machine
from aiofeed.objects.reader import run_all
from aiofeed.shards.arrow import arrow
from aiofeed.shards.index import ShardIndex, ranges_of, with_labels
from aiofeed.shards.indexing import IndexRules, Scan
from aiofeed.shards.parquet import leaf_count
from aiofeed.shards.urls import Shard, ShardFinder, Urls
from aiofeed.tables.filled import is_text, odd_number
from aiofeed.tables.manifest import LINE_BYTES, TableFile
from aiofeed.tables.memory import MemoryTable
from aiofeed.tables.stored import ParquetTable
from aiofeed.tables.table import MEMORY_SHARE, PACKED, check_columns

log: logging.Logger = logging.getLogger("aiofeed.sources")

# The bytes of a file that is parsed, and its columns: in all twice those of the file.
PARSED_SHARE = 2
# A block is parsed in some 50 ms, and takes as much memory as a usual row group.
BLOCK_BYTES = LINE_BYTES


class ParsedTable(MemoryTable):
    """Rows of CSV and JSON Lines files."""

    def __new__(cls, table: Any = None, *_: Any, in_memory: Any = None, **storage: Any) -> Any:
        """Make a table in memory, or one of blocks if the files do not fit."""
        if table is not None:  # of a copy in another process
            finder = ShardFinder(storage.get("store"), storage.get("options"))
            files = list(map(finder.shard, run_blocking(partial(named_files, finder, table))))
            with suppress(OSError):  # to read it says why, or a server does not tell sizes
                run_blocking(lambda: run_all([file.open() for file in files]))
            nbytes, room = PARSED_SHARE * sum(file.size for file in files), machine.rank_memory() // MEMORY_SHARE
            packed = any(PurePath(file.key).suffix.lower() in PACKED for file in files)
            in_blocks = in_memory is False or nbytes > room
            if in_blocks and (in_memory or packed):
                raise ValueError(
                    f"{files[0].url}: to parse it needs {format_bytes(nbytes)}, half of this rank's free memory is "
                    f"{format_bytes(room)}, and in_memory={in_memory}. {_CONVERT if packed else 'Leave in_memory= out'}"
                )
            if in_blocks:
                return object.__new__(BlockTable)
        return object.__new__(cls)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        self._storage = storage
        super()._open(table, columns, target)

    def _opened(self, paths: Sequence[Any]) -> tuple[list[Any], Any]:
        store, options = self._storage["store"], self._storage["options"]
        names = run_blocking(partial(named_files, ShardFinder(store, options), paths))
        files = [TableFile(name, None, store, options) for name in names]
        tables = [file.read(None, {}) for file in files]
        if files[0].has_empty_cells and all(re.fullmatch(r"-?[\d.]+", name) for name in tables[0].column_names):
            log.warning("%s: the first line has numbers and no names; %s", names[0], _NO_NAMES)
        try:
            return [], tables[0] if len(tables) == 1 else arrow().concat_tables(tables, promote_options="permissive")
        except (arrow().ArrowException, KeyError) as error:
            raise ValueError(f"{names[0]} and other files differ in their columns: {error}") from None


_NO_NAMES = "if it is a row, pass Table(pandas.read_csv(path, header=None))"
_CONVERT = (
    "Compressed files are not read in blocks: decompress it, or write Parquet by `import pyarrow.dataset as ds` and "
    '`ds.write_dataset(ds.dataset("train.csv.gz", format="csv"), "folder", format="parquet")`, format="json" for JSON '
    'Lines; then Table("folder/*.parquet")'
)


class BlockFile:
    """The blocks of a file, with those members of pyarrow's ``FileMetaData`` and its schema that are used.

    Args:
        file: Parses parts of it.
        index: The ranges of the blocks; their labels are the numbers of rows, and the types where these change.
    """

    def __init__(self, file: TableFile, index: ShardIndex) -> None:
        labels = list(index.labels or ())
        self.rows: list[int] = [int.from_bytes(label[:8], "little") for label in labels]
        firsts = zip(accumulate(self.rows, initial=0), labels, strict=False)
        types = [(f"the rows from {first} on", arrow().py_buffer(label[8:])) for first, label in firsts if label[8:]]
        schemas = [(place, arrow().ipc.read_schema(schema)) for place, schema in types]
        self.types: Any = _common_types(schemas, file.has_empty_cells)
        self.file: TableFile = file
        self.index: ShardIndex = index
        self.schema: BlockFile = self
        self.num_row_groups: int = len(labels)
        ends = list(accumulate(map(leaf_count, self.types.types), initial=0))
        self.leaves: list[int] = ends[:-1]
        self.num_columns: int = ends[-1]

    def to_arrow_schema(self) -> Any:
        """Return the types of the columns."""
        return self.types

    def row_group(self, block: int) -> Any:
        """Return the number of rows of a block."""
        return SimpleNamespace(num_rows=self.rows[block])

    def column(self, _: int) -> Any:
        """Return the path of a column chunk: fields of structs have no names of their own here."""
        return SimpleNamespace(path="")

    def parsed(self, block: int, data: Any, chosen: Sequence[int]) -> Any:
        """Return the table of columns of a block, by the numbers of their column chunks."""
        wanted = set(chosen)
        fields = [field for field, leaf in zip(self.types, self.leaves, strict=True) if leaf in wanted]
        types = {field.name: field.type for field in fields}
        part = self.file.part(data, self.types.names if block and self.file.has_empty_cells else None)
        return part.read(list(types), types).cast(arrow().schema(fields))


class BlockTable(ParquetTable):
    """Rows of CSV and JSON Lines files, of which one pass has found blocks of rows, which are read as row groups."""

    async def _list(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        return list(map(finder.shard, await named_files(finder, urls)))

    async def _open_all(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        shards = await super()._open_all(finder, urls)
        types = _common_types([(shard.url, shard.extra.metadata.types) for shard in shards], text=False)
        for found in (shard.extra for shard in shards):
            fields = [types.field(own.name).with_metadata(own.metadata) for own in found.metadata.types]
            found.metadata.types = arrow().schema(fields)
            for name, column in found.targets.items():
                column = arrow().chunked_array(getattr(column, "chunks", [column]))
                found.targets[name] = column.cast(types.field(name).type)
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
        return sum(shard.size for shard in self._shards) / len(self)

    def _way_out(self, name: str) -> str:
        fields = [shard.extra.metadata.types.field(name) for shard in self._shards]
        if notes := [field.metadata for field in fields if field.metadata]:
            return f". It has {notes[0][b'kinds'].decode()}"
        first, file = self._shards[0], self._shards[0].extra.metadata
        if not first.local or not is_text(fields[0].type):
            return ""
        leaf = file.leaves[file.types.names.index(name)]
        return odd_number(name, self._decode_rows(first, 0, [leaf], None)[name])

    async def _parts_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> Any:
        return (await shard.read(self._chunks_of(shard, group, chosen)))[0]

    def _chunks_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
        index = shard.extra.metadata.index
        return [(int(index.starts[group]), int(index.ends[group]))]

    def _decode_rows(self, shard: Shard, group: int, chosen: Sequence[int], file: Any) -> Any:
        data = shard.read_now(self._chunks_of(shard, group, chosen))[0] if file is None else file
        return shard.extra.metadata.parsed(group, data, chosen)


async def named_files(finder: ShardFinder, paths: Any) -> list[str]:
    """Return paths and URLs, and those of the files that are found by globs and braces."""
    found: list[str] = []
    for path in map(os.fspath, [paths] if isinstance(paths, str | os.PathLike) else paths):
        shards = await finder.find(path) if _is_pattern(path) else []
        found += [shard.key if shard.local else shard.url for shard in shards] or [path]
    return found


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[{") and not os.path.exists(path)


def _scan(file: TableFile, size: int, _: Any) -> Scan:
    """Find the blocks of a file, their rows and their types."""
    at, rows, lines, header, table, types = 0, 0, 0, None, None, b""
    bounds, labels = [0], list[bytes | None]()
    while at < size:
        data = yield at, min(at + BLOCK_BYTES, size)
        end = len(data) if at + len(data) == size else file.row_end(data)
        if not end:
            raise ValueError(f"row {rows} (the first is 0) exceeds 16 MiB: is a quotation mark or a line not closed?")
        part = file.part(data[:end], header, rows, lines)
        table = part.read(None, {}) if table is None or data[:end].strip() else table[:0]
        if not labels:
            check_columns("its first line", table.column_names, table.column_names)
            header = table.column_names if file.has_empty_cells else None
        before, types = types, table.schema.serialize().to_pybytes()
        labels.append(len(table).to_bytes(8, "little") + types * (types != before))
        at, rows, lines = at + end, rows + len(table), lines + data.count(b"\n", 0, end)
        bounds.append(at)
    return with_labels(ranges_of(bounds[:-1], bounds[1:]), labels)


def _common_types(schemas: Sequence[tuple[str, Any]], text: bool) -> Any:
    """Return types that hold the columns of all places; if none does, texts if ``text``.

    Raises:
        ValueError: There is no common type.
    """
    columns, fields = dict[str, dict[Any, str]](), []
    for place, schema in schemas:
        for field in schema:
            columns.setdefault(field.name, {}).setdefault(field.type, place)
    for name, kinds in columns.items():
        if arrow().uint64() in kinds:
            kinds.pop(arrow().int64(), None)  # pyarrow would take int64 for both
        try:
            each = [arrow().schema([(name, kind)]) for kind in kinds]
            fields += arrow().unify_schemas(each, promote_options="permissive")
        except arrow().ArrowException:
            found = " and ".join(f"{kind} in {place}" for kind, place in kinds.items())
            if not text:
                raise ValueError(f"column {name!r} has {found}: write its values as one type") from None
            fields.append(arrow().field(name, arrow().string(), metadata={"kinds": found}))
    return arrow().schema(fields)
