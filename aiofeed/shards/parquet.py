"""``ParquetRows``: rows of Parquet files, through pyarrow."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from aiofeed.common.expanded import check_expanded
from aiofeed.common.parts import in_order
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_callable, explain_arguments
from aiofeed.objects.reader import run_all
from aiofeed.shards.arrow import arrow, is_text
from aiofeed.shards.base import RecentParts, Shards
from aiofeed.shards.urls import Shard, Urls

log: logging.Logger = logging.getLogger("aiofeed.shards")

_HIVE = "Table(pyarrow.dataset.dataset(folder, partitioning='hive').to_table()) has the values of folders as columns"
# What the footer of a file with encrypted columns ends with, and pyarrow does not count: a nonce and a tag.
_SIGNATURE_BYTES = 28
# parquet-mr before 1.2.9.
_OLD_WRITER = re.compile(r"parquet-mr(?! version (1\.2\.9|1\.2\.\d\d|1\.[3-9]|1\.\d\d|[2-9]))")
# Most footers are shorter, so that one request reads them.
_TAIL_BYTES = 64 << 10

# From this on, numbers are faster by ``take`` than each by itself: 256 rows of 18 in a quarter of the time, two rows in
# twice the time. ``take`` copies bytes, which then are copied again.
_MANY_ROWS = 16
# Columns that are decoded together: pyarrow has all encoded bytes of a call in memory until its end.
TOGETHER = 12
_WIDTHS = {"INT64": 8, "DOUBLE": 8, "INT32": 4, "FLOAT": 4}


@dataclass(eq=False)
class RowGroups:
    """The row groups of a file.

    Args:
        metadata: pyarrow's description of the file.
        first: The first row of each group, and the number of rows.
        leaves: The column chunks that are read of a group.
        data: The column of ``data=``, and the fields within it.
        targets: The columns of targets, by name.
    """

    metadata: Any
    first: Any
    leaves: Sequence[int] = ()
    data: Sequence[str] = ()
    targets: Mapping[str, Any] = field(default_factory=dict)


@public
@explain_arguments()
class ParquetRows(Shards):
    """Rows of Parquet files; a sample is a dict of the row's values.

    Example:
        ```python
        import aiofeed

        rows = aiofeed.ParquetRows("train.parquet", columns=["area", "rooms"], target="price")
        feeder = aiofeed.Feeder(rows, decode=lambda row: row["area"] / row["rooms"], batch_size=16)
        for area_per_room, price in feeder:
            print(area_per_room, price)
        ```

    Row groups are the shards of ``shuffle="window"``. Each is read whole, for all samples in the feeder's look-ahead
    together. Needs ``pip install "aiofeed[parquet]"``.

    Args:
        urls: URLs or paths: a list, or one with braces such as ``s3://bucket/train-{000..099}.parquet`` or a glob.
        columns: The columns of the dict. Default: all, which must be the same in all files.
        data: The column whose value ``decode=`` gets in place of a dict; that of a struct with its field, as in
            ``"image.bytes"``.
        target: The column of the target, or several for a dict of their values; a sample is then ``(decoded, target)``.
            These columns are read once, when the source is made, and stay in memory.
        to_target: Makes a target of the value of its column, or of the dict.
        store: An obstore store that reads the URLs. Default: made of the URLs.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: A file does not exist.
        ValueError: A file is truncated, damaged or no Parquet file, a column does not exist, or a URL cannot be read.
        OSError: A file cannot be read.
    """

    _blocking = False
    looks_ahead: bool = True
    reads_whole_shards = True
    shard_starts: Any = None
    """The index of the first row of each row group, and the number of rows."""
    target: Callable[[int], Any]

    def __init__(
        self,
        urls: Urls,
        columns: Sequence[str] | None = None,
        *,
        data: str | None = None,
        target: str | Sequence[str] | None = None,
        to_target: Callable[[Any], Any] | None = None,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"ParquetRows(columns=) must be a list of names, got {columns!r}")
        if columns is not None and data is not None:
            raise ValueError("ParquetRows: data= is one column and columns= are those of a dict: pass one of them")
        for argument, value in (("data", data), *[("target", each) for each in as_list(target)]):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"ParquetRows({argument}=) must be the name of a column, got {value!r}")
        self._columns = None if columns is None else list(columns)
        self._data = data
        self._target_columns = target
        self._to_target = check_callable("ParquetRows(to_target=)", to_target)
        self._tables = RecentParts()
        arrow("pyarrow.parquet")
        super().__init__(urls, store=store, options=options)
        starts = [
            first + shard.extra.first[:-1] for first, shard in zip(self._parts.starts, self._shards, strict=False)
        ]
        self.shard_starts = np.unique(np.concatenate([*starts, [len(self)]]))
        if self._columns is None and self._data is None:
            self._check_alike()
            named = {part.partition("=")[0] for part in self._shards[0].url.split("/")[:-1] if "=" in part}
            if folders := sorted(named.difference(_names(self._shards[0]))):
                log.warning("%s: no column for %s, which its folders name: %s", self._shards[0].url, folders, _HIVE)
        if target is not None:
            self.target = self._target

    def _check_alike(self) -> None:
        """Raise ``ValueError`` unless all files have the same columns."""
        first, *others = self._shards
        for shard in others:
            if different := sorted(set(_names(first)) ^ set(_names(shard))):
                raise ValueError(
                    f"{shard.url} and {first.url}: only one of them has the columns {different}; choose columns=[...] "
                    f"that all files have"
                )

    def _selection(self) -> Any:
        return self._columns, self._data, self._target_columns

    def _samples(self, shard: Shard) -> int:
        return int(shard.extra.first[-1])

    def nbytes(self, index: int, /) -> int:
        """Return the compressed bytes of a row, on the average of its file."""
        shard, _ = self._find(index)
        return max(shard.size // self._samples(shard), 1)

    async def _footer(self, shard: Shard) -> tuple[Any, bool]:
        """pyarrow's description of a file, and whether some of its columns may be encrypted."""
        shard.views = True
        tail = await self._tail(shard, _TAIL_BYTES)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if not tail.endswith(b"PAR1") or length > shard.size:
            # The first character may be cut.
            if is_text(tail.lstrip(bytes(range(0x80, 0xC0))), least=1):
                raise ValueError(
                    "this is text, and not a Parquet file: for a list of paths pass aiofeed.Manifest(path); for rows, "
                    "name it .csv, .tsv or .jsonl for aiofeed.Table, or pass Table(pandas.read_csv(path, sep=...))"
                )
            raise ValueError("this is not a Parquet file, or it is truncated or encrypted")
        check_expanded("the footer", length, 0)
        if length > len(tail):
            tail = await self._tail(shard, length)
        try:
            metadata = arrow("pyarrow.parquet").read_metadata(io.BytesIO(tail))
        except Exception as error:  # noqa: BLE001 - pyarrow's errors
            raise ValueError(f"its footer is damaged: {error}") from None
        # A file with encrypted columns whose footer is plain signs it, behind what pyarrow reads of it.
        return metadata, length - 8 - metadata.serialized_size >= _SIGNATURE_BYTES

    async def _index(self, shard: Shard) -> None:
        metadata, signed = await self._footer(shard)
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        shard.extra = found = RowGroups(metadata, np.cumsum([0, *rows]))
        fields, wanted = metadata.schema.to_arrow_schema(), self._columns
        names, counts = fields.names, Counter(fields.names)
        targets = as_list(self._target_columns)
        if self._data is not None:
            found.data = self._path(fields, self._data) or ()
            wanted = [self._data]
        for name in [*(names if wanted is None else wanted), *targets]:
            known = (
                found.data if name == self._data and name not in targets else name in counts or leaves(metadata, [name])
            )
            if not known or (name in targets and name not in names):
                hint = f"; {_HIVE}" if f"/{name}=" in shard.url else ""
                raise ValueError(f"there is no column {name!r}; there are {names}{hint}")
            if counts[name] > 1:
                raise ValueError(f"{counts[name]} columns have the name {name!r}")
        found.leaves = leaves(metadata, wanted)
        if signed:
            check_readable(shard, metadata, [*found.leaves, *leaves(metadata, targets)])
        if targets:
            async with self._scanning:
                groups, chosen = range(metadata.num_row_groups), leaves(metadata, targets)
                tables = [await self._read_rows(shard, group, chosen) for group in groups]
            shard.extra.targets = {name: _column(tables, name) for name in targets}

    def _path(self, fields: Any, name: str) -> list[str] | None:
        """Return the column of a name and the fields within it, which may have dots in names of their own."""
        if any(each.name == name for each in fields):
            return [name]
        structs = [each for each in fields if name.startswith(f"{each.name}.") and arrow().types.is_struct(each.type)]
        paths = [(each.name, self._path(list(each.type), name[len(each.name) + 1 :])) for each in structs]
        return next(([head, *path] for head, path in paths if path), None)

    async def _tail(self, shard: Shard, nbytes: int) -> bytes:
        [tail] = await shard.read([(max(shard.size - nbytes, 0), shard.size)])
        return bytes(tail)

    def _target(self, index: int) -> Any:
        shard, row = self._find(index)
        values = {name: self._value(column, row) for name, column in shard.extra.targets.items()}
        value = values[self._target_columns] if isinstance(self._target_columns, str) else values
        return value if self._to_target is None else self._to_target(value)

    def _value(self, column: Any, row: int) -> Any:
        value = column[row]
        return value.as_py() if hasattr(value, "as_py") else value.item()

    async def _read_group(self, shard: Shard, samples: Sequence[int]) -> list[Any]:
        """Rows of one file; each row group is read once."""
        groups: dict[int, list[int]] = {}
        for place, group in enumerate((np.searchsorted(shard.extra.first, samples, side="right") - 1).tolist()):
            groups.setdefault(group, []).append(place)
        kept = {group: table for group in groups if (table := self._tables.kept((shard, group))) is not None}

        def take(tables: dict[int, Any]) -> list[tuple[list[int], list[Any]]]:
            found = []
            for group, table in tables.items():
                places = groups[group]
                try:
                    if isinstance(table, Exception):
                        raise table
                    rows = [samples[place] for place in places]
                    values = self._take(shard, table, int(shard.extra.first[group]), rows)
                except Exception as error:  # noqa: BLE001 - the error of each of these samples
                    values = [error.with_traceback(None)] * len(places)
                found.append((places, values))
            return found

        async def load(group: int) -> list[tuple[list[int], list[Any]]]:
            try:
                read = partial(self._read_rows, shard, group, shard.extra.leaves)
                table = await self._tables.get((shard, group), read)
            except Exception as error:  # noqa: BLE001 - `take` makes it the error of each of its samples
                table = error
            return await asyncio.to_thread(take, {group: table})

        # One call of a thread for the row groups that are kept: under shuffle a batch has few rows of each. The others
        # are dropped one by one, so that their memory is bounded.
        reads = [load(group) for group in groups if group not in kept]
        found = await run_all([asyncio.to_thread(take, kept), *reads] if kept else reads)
        return in_order(len(samples), chain.from_iterable(found))

    def _take(self, shard: Shard, table: Any, first: int, rows: Sequence[int]) -> list[Any]:
        """Samples of a row group, of which row ``first`` of the file is the first one."""
        at = [row - first for row in rows]
        values: list[Any]
        if len(at) >= _MANY_ROWS and all(map(arrow().types.is_primitive, table.schema.types)):
            values = table.take(at).to_pylist()
        else:
            columns = list(zip(table.column_names, table.columns, strict=True))
            values = [{name: column[row].as_py() for name, column in columns} for row in at]
        if self._data is None:
            return values
        return [self._chosen(value, row, shard) for value, row in zip(values, rows, strict=True)]

    def _chosen(self, value: Any, row: int, shard: Shard) -> Any:
        """Return the value of the column for the decoder; a ``ValueError`` if it is null."""
        for name in shard.extra.data:
            value = None if value is None else value[name]
        return ValueError(f"{shard.url}: row {row} has no {self._data!r}") if value is None else value

    async def _read_rows(self, shard: Shard, group: int, chosen: Sequence[int]) -> Any:
        """Column chunks of a row group, by their numbers."""
        file = await self._parts_of(shard, group, chosen)
        return await asyncio.to_thread(self._decode_rows, shard, group, chosen, file)

    async def _parts_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> _PartsOfFile:
        ranges = self._chunks_of(shard, group, chosen)
        parts = await shard.read(ranges)
        return _PartsOfFile(shard.size, {start: part for (start, _), part in zip(ranges, parts, strict=True)})

    def _chunks_of(self, shard: Shard, group: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Return the ranges of column chunks."""
        described = shard.extra.metadata.row_group(group)
        chunks = [described.column(number) for number in chosen]
        # The sizes of these writers leave out the header of a dictionary, for which pyarrow reads on (PARQUET-816).
        more = 100 if _OLD_WRITER.match(shard.extra.metadata.created_by or "") else 0
        ranges, nbytes = [], 0
        for chunk in chunks:
            nbytes += memory_of(chunk)
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:  # 0 if there is none
                start = min(start, chunk.dictionary_page_offset or start)
            ranges.append((start, min(start + chunk.total_compressed_size + more, shard.size)))
        check_expanded(f"{shard.url}: row group {group}", nbytes, sum(end - start for start, end in ranges))
        return ranges

    def _decode_rows(self, shard: Shard, group: int, chosen: Sequence[int], file: Any) -> Any:
        """Return the table of column chunks in a file; ``None``: in that of the shard, on disk."""
        metadata = shard.extra.metadata
        try:
            if file is None:
                shard.read_now([])  # raises if the file has changed; pyarrow reads it without the GIL
                file = arrow().OSFile(shard.key)
            table = _read_row_group(file, metadata, group, chosen)
        except Exception as error:  # noqa: BLE001 - pyarrow's errors
            raise ValueError(f"{shard.url}: row group {group}: {error}") from None
        if table.num_rows != (rows := metadata.row_group(group).num_rows):
            raise ValueError(f"{shard.url}: row group {group} has {table.num_rows} rows of {rows}")
        return table


def check_readable(shard: Shard, metadata: Any, chosen: Sequence[int]) -> None:
    """Raise ``ValueError`` for an encrypted column: to ask pyarrow for its description would end the process."""
    try:
        if not os.path.isfile(shard.key):
            raise OSError("files with encrypted columns are read from disk only")
        for group in range(min(metadata.num_row_groups, 1)):
            _read_row_group(arrow().OSFile(shard.key), metadata, group, chosen)
    except (arrow().ArrowException, OSError) as error:
        raise ValueError(f"a column is encrypted; choose others with columns= ({error})") from None


def memory_of(chunk: Any) -> int:
    """Return the bytes of a column chunk in memory, as far as its description says."""
    # A column of equal values needs few bytes in a file, and those of its type in memory.
    width = _WIDTHS.get(chunk.physical_type, 1)
    return max(int(chunk.total_uncompressed_size), int(chunk.num_values) * width)


def _names(shard: Shard) -> list[str]:
    return list(shard.extra.metadata.schema.to_arrow_schema().names)


def _read_row_group(file: Any, metadata: Any, group: int, chosen: Sequence[int]) -> Any:
    # Its reader takes numbers. The names of `read_row_group` are ambiguous: "a" is a part of "a.b", too.
    # INT96 has years that nanoseconds have not, in which they would wrap around.
    options = {"pre_buffer": False, "coerce_int96_timestamp_unit": "us"}
    opened = arrow("pyarrow.parquet").ParquetFile(file, metadata=metadata, **options)
    # A column that is nested has several chunks, which are read together.
    step = len(chosen) if any("." in metadata.schema.column(number).path for number in chosen) else TOGETHER
    tables = [
        opened.reader.read_row_group(group, column_indices=chosen[at : at + step], use_threads=False)
        for at in range(0, max(len(chosen), 1), max(step, 1))
    ]
    if len(tables) == 1:
        return tables[0]
    names = [name for table in tables for name in table.column_names]
    return arrow().Table.from_arrays([column for table in tables for column in table.columns], names)


def leaves(metadata: Any, columns: Sequence[str] | None) -> list[int]:
    """Return the numbers of the column chunks of columns, or of fields of structs by their path; ``None``: of all."""
    numbers = range(metadata.num_columns)
    if columns is None:
        return list(numbers)
    own: dict[str, range] = {}
    end = 0
    for column in metadata.schema.to_arrow_schema():
        own[column.name] = range(end, end := end + leaf_count(column.type))
    paths = () if own.keys() >= set(columns) else [f"{metadata.schema.column(number).path}." for number in numbers]
    found = [own.get(name) or [at for at, path in enumerate(paths) if path.startswith(f"{name}.")] for name in columns]
    return list(dict.fromkeys(chain.from_iterable(found)))


def as_list(names: Any) -> list[Any]:
    """Return no name, a name or several as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def leaf_count(kind: Any) -> int:
    """Return the number of column chunks of a column of an Arrow type."""
    kind = getattr(kind, "storage_type", kind)
    inner = [kind.key_type, kind.item_type] if hasattr(kind, "item_type") else map(kind.field, range(kind.num_fields))
    return sum(leaf_count(getattr(each, "type", each)) for each in inner) or 1


def _column(tables: Sequence[Any], name: str) -> Any:
    """Return a column of several tables, as a numpy array if it has numbers only."""
    column = arrow().chunked_array([chunk for table in tables for chunk in table.column(name).chunks] or [[]])
    numeric = arrow().types.is_integer(column.type) or arrow().types.is_floating(column.type)
    return column.to_numpy() if numeric and not column.null_count else column


class _PartsOfFile(io.RawIOBase):
    """A file of which only some parts are in memory."""

    def __init__(self, size: int, parts: Mapping[int, bytes]) -> None:
        super().__init__()
        self._size = size
        self._parts = parts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int) -> memoryview:
        """Return bytes without a copy, as pyarrow asks for them."""
        for start, part in self._parts.items():
            if start <= self._at and self._at + size <= start + len(part):
                data = memoryview(part)[self._at - start : self._at - start + size]
                self._at += size
                return data
        raise ValueError(f"bytes {self._at} to {self._at + size} belong to no column that is read")
