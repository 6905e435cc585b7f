"""``Tokens`` at URLs: a window is the bytes of a range of its object."""

from __future__ import annotations

import ctypes
import os
import posixpath
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.mapped import MappedFiles
from aiofeed.common.parts import Parts
from aiofeed.kernel.core.types import Gathered
from aiofeed.objects.reader import GAP_BYTES, run_all
from aiofeed.shards.base import RecentParts, Shards
from aiofeed.shards.parquet import ParquetRows, check_readable, leaves
from aiofeed.shards.urls import Shard, ShardFinder
from aiofeed.tables.columns import is_list
from aiofeed.tables.memory import mapped
from aiofeed.tokens.formats import CHECKED_BYTES, DTYPES, TokenLayout, check_vocab, layout_of
from aiofeed.tokens.windows import CHECKED_TOKENS, TokenDecoder, Tokens, checked_places

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The ranges of a file whose windows shuffle="window" mixes, 16 of them by default, and of which the windows in the
# look-ahead are read together.
RANGE_BYTES = 4 << 20
# What begins at an address.
MEMORY = ctypes.c_byte * sys.maxsize


@dataclass(frozen=True, eq=False)
class TokenObject:
    """An object with tokens.

    Args:
        dtype: The dtype of raw tokens.
        stride: Tokens from the start of a window to the next.
        column: The column of lists of tokens.
        layout: Where its tokens are.
        windows: The number of its windows.
        metadata: The description of a Parquet file, or a mapped Arrow file.
        starts: Of a column: the first token of each row group or record batch, and the number of tokens.
    """

    dtype: str
    stride: int
    column: str | None = None
    layout: Any = None
    windows: int = 0
    metadata: Any = None
    starts: Any = None


class GatheredWindows(Gathered):
    """The windows of a batch, in the ranges that were read; the decoder copies them.

    Args:
        tokens: Tokens of a window.
        dtype: Their dtype.
        indices: Which windows they are.
    """

    def __init__(self, tokens: int, dtype: np.dtype[Any], indices: Sequence[int], *_: object) -> None:
        super().__init__(len(indices))
        self.nbytes: int = len(indices) * tokens * dtype.itemsize
        self._tokens = tokens
        self._dtype = dtype
        self._addresses = np.zeros(len(indices), np.int64)
        self._ranges: list[Any] = []  # have the memory

    def __iter__(self) -> Iterator[bytes]:
        return (window.tobytes() for window in self.windows())

    def add(self, places: NDArray[np.int64], addresses: NDArray[np.int64], ranges: Sequence[NDArray[Any]]) -> None:
        """Add windows at their places, by their addresses in the memory of ranges."""
        self._addresses[places] = addresses
        self._ranges.append(ranges)

    def windows(self, chosen: Any = slice(None)) -> NDArray[Any]:
        """Return windows, [n, tokens], by one gather from all ranges; what is between them is not read."""
        addresses = self._addresses[chosen]
        low = int(addresses.min(initial=sys.maxsize))
        places = addresses - low
        # Rows that begin at each byte.
        shape, memory = (int(places.max(initial=0)) + 1, self._tokens), memoryview(MEMORY.from_address(low))
        rows: NDArray[Any] = np.ndarray(shape, self._dtype, memory, strides=(1, self._dtype.itemsize))[places]
        return rows


class RemoteTokens(Tokens, ParquetRows):
    """Windows of tokens in objects, in columns of lists, or in files that are read like objects."""

    answers_at_once: bool = False
    looks_ahead: bool = True
    read_now: None = None  # type: ignore[assignment]
    read: Any = Shards.read
    content_parts: Any = Shards.content_parts

    def _open(self, files: list[tuple[Any, str, int]], vocab: int | None = None) -> None:
        """Find and open the objects, each with the dtype of raw tokens and the stride."""
        self._vocab, self._needed, self._tables = vocab, self.block + self.targets, RecentParts()
        finder, urls = ShardFinder(*self._storage), cast("Any", files)
        self._shards = run_blocking(lambda: self._open_all(finder, urls))
        self._parts = Parts(map(self._samples, self._shards))
        self._starts = np.array(self._parts.starts)
        self._layouts = [shard.extra.layout for shard in self._shards]
        dtypes = [np.dtype(shard.extra.layout.dtype) for shard in self._shards]
        self._dtype = dtypes[0] if len(set(dtypes)) == 1 else np.result_type(*dtypes)
        self.gathered_bytes: int = self._needed * self._dtype.itemsize
        self.new_gathered: Any = partial(GatheredWindows, self._needed, self._dtype)
        ranges = [first + _ranges(shard.extra) for shard, first in zip(self._shards, self._starts, strict=False)]
        # An array for bisect, which compares numpy's numbers slowly.
        self._ranges = array("q", np.concatenate([*ranges, self._starts[-1:]]).tobytes())
        self.in_memory = False
        self.reads_whole_shards: bool = self._column is not None

    async def _list(self, finder: ShardFinder, urls: Any) -> list[Shard]:
        files: list[tuple[Any, str, int]] = urls
        self._files = []
        for path, dtype, stride in files:
            # A text may be a glob; a path is the name of one file.
            found = [path] if isinstance(path, Shard) else None
            found = found or (await finder.find([path]) if isinstance(path, str) else [finder.shard(os.fspath(path))])
            column = path.extra.column if isinstance(path, Shard) else self._column
            opened = [replace(shard, extra=TokenObject(dtype, stride, column)) for shard in found]
            self._files += [(shard, dtype, stride) for shard in opened]
        return [shard for shard, _, _ in self._files]

    async def _index(self, shard: Shard) -> None:
        given: TokenObject = shard.extra
        [head] = await shard.read([(0, min(shard.size, CHECKED_BYTES))])
        if given.column is None:
            opened = await self._open_file(shard, given, head)
        else:
            opened = await self._open_lists(shard, given, given.column, head)
        layout = opened.layout.checked("it", self._needed, targets=self.targets)
        shard.extra = replace(opened, windows=(layout.count - self._needed) // given.stride + 1)
        if self._vocab is not None:
            firsts = np.array(checked_places(layout.count))
            parts = await self._read_tokens(shard, firsts, np.minimum(firsts + CHECKED_TOKENS, layout.count))
            for first, part in zip(firsts.tolist(), parts, strict=True):
                check_vocab("it", first, np.frombuffer(part, layout.dtype), self._vocab)

    async def _open_file(self, shard: Shard, given: TokenObject, head: bytes) -> TokenObject:
        stem, suffix = posixpath.splitext(shard.key)
        beside, index = shard.beside(f"{stem}.idx"), None
        if suffix == ".bin" and (shard.indexes is None or beside.key in shard.indexes):
            try:
                index = await beside.reader.read(beside.key)
            except (FileNotFoundError, PermissionError):  # S3 denies access to a key that does not exist
                pass
        layout = layout_of("it", suffix, shard.size, head, given.dtype, index, beside.url)
        return replace(given, layout=layout)

    async def _open_lists(self, shard: Shard, given: TokenObject, column: str, head: bytes) -> TokenObject:
        lists: Any
        if head.startswith(b"PAR1"):
            (lists, signed), counts = await self._footer(shard), []
            dtype = dtype_of(lists.schema.to_arrow_schema(), column)
            shard.extra = replace(given, metadata=lists)
            [leaf] = leaves(lists, [column])
            if signed:
                check_readable(shard, lists, [leaf])
            for number in range(lists.num_row_groups):
                chunk = lists.row_group(number).column(leaf)
                found = chunk.statistics
                # The values of a column include a null for each list that is null or empty.
                known = found is not None and found.has_null_count
                counts.append(chunk.num_values - found.null_count if known else len(await self._batch(shard, number)))
        elif shard.local:
            lists = MappedLists(shard.key, column)
            dtype, counts = lists.dtype, list(map(len, lists.batches))
        else:
            raise ValueError("this is not a Parquet file; Arrow files are read from disk only: download it")
        starts = np.cumsum([0, *counts])
        return replace(given, layout=TokenLayout(dtype, 0, int(starts[-1])), metadata=lists, starts=starts)

    def _samples(self, shard: Shard) -> int:
        return int(shard.extra.windows)

    def _selection(self) -> Any:
        return self._needed, str(self._dtype), self._column, [stride for _, _, stride in self._files]

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was found out about the objects: a copy sends no requests."""
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def shard_starts(self) -> Sequence[int]:
        """The first window of each range of 4 MiB, and the number of windows."""
        return self._ranges

    def nbytes(self, index: int, /) -> int:
        """Return the bytes of a window."""
        return self.gathered_bytes

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return the bytes of windows, in one dtype for all files, or the error of each that cannot be read."""
        rows, errors = np.asarray(indices, np.int64), dict[int, Exception]()
        gathered = self.new_gathered(indices)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1

        async def read_file(number: int) -> None:
            places = np.flatnonzero(numbers == number)
            try:
                await self.gather_ahead(rows[places], [(gathered, places)])
            except Exception as error:  # noqa: BLE001 - the error of each of these windows
                errors.update(dict.fromkeys(places.tolist(), error.with_traceback(None)))

        await run_all([read_file(number) for number in np.unique(numbers).tolist()])
        if not errors:
            return list(gathered)
        found = iter(gathered.windows(~np.isin(np.arange(len(rows)), list(errors))))
        return [errors[place] if place in errors else next(found).tobytes() for place in range(len(rows))]

    async def gather_ahead(self, indices: Any, targets: Sequence[tuple[GatheredWindows, Any]], *_: Any) -> None:
        """Read windows of one file for their batches."""
        number = int(np.searchsorted(self._starts, indices[0], side="right")) - 1
        shard, dtype, at = self._shards[number], self._dtype, 0
        starts = (indices - self._starts[number]) * shard.extra.stride
        # Joined here, not by the reader, which takes four times as long for windows of some KB.
        gap = GAP_BYTES // np.dtype(shard.extra.layout.dtype).itemsize
        ordered = np.sort(starts)
        parted = np.diff(ordered, prepend=ordered[0] - self._needed - gap - 1) > self._needed + gap
        firsts, lasts = ordered[parted], ordered[np.roll(parted, -1)] + self._needed
        read = await self._read_tokens(shard, firsts, lasts)
        parts = [np.frombuffer(part, shard.extra.layout.dtype).astype(dtype, copy=False) for part in read]
        numbers = np.searchsorted(firsts, starts, side="right") - 1
        addresses = np.array([part.ctypes.data for part in parts])[numbers]
        addresses += (starts - firsts[numbers]) * dtype.itemsize
        for gathered, places in targets:
            gathered.add(places, addresses[at : at + len(places)], parts)
            at += len(places)

    async def _read_tokens(self, shard: Shard, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of ranges of tokens."""
        layout = shard.extra.layout
        if shard.extra.column is not None:
            return await run_all([self._join_batches(shard, *each) for each in zip(firsts, lasts, strict=True)])
        bounds = [(layout.offset + each * np.dtype(layout.dtype).itemsize).tolist() for each in (firsts, lasts)]
        return await shard.reader.read_views(shard.key, *bounds, info=shard.info)

    async def _join_batches(self, shard: Shard, first: int, last: int) -> bytes:
        starts, parts = shard.extra.starts, []
        for number in range(np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, last)):
            tokens, at = await self._batch(shard, number), starts[number]
            if len(tokens) != starts[number + 1] - at:
                raise ValueError(f"{shard.url}: row group {number} has {len(tokens)} tokens, not as its statistics say")
            parts.append(tokens[max(first - at, 0) : last - at].tobytes())
        return b"".join(parts)

    async def _batch(self, shard: Shard, number: int) -> NDArray[Any]:
        """Return the tokens of a row group, or of a record batch."""
        lists, column = shard.extra.metadata, shard.extra.column

        async def read() -> NDArray[Any]:
            rows = await self._read_rows(shard, number, leaves(lists, [column]))
            return tokens_of(rows.column(0).combine_chunks())

        if isinstance(lists, MappedLists):
            lists.mapped.check()
            return lists.batches[number]
        return await self._tables.get((shard, number), read)  # type: ignore[no-any-return]

    def gather(self, indices: Any, *parts: NDArray[Any]) -> None:
        """Write windows, of which there are the bytes, into ``x``, and with targets ``y``: [N, block]."""
        if isinstance(indices, GatheredWindows):
            windows = indices.windows()
        else:
            windows = np.frombuffer(b"".join(indices), self._dtype).reshape(-1, self._needed)
        self._write(windows, parts, slice(None))

    def _read_at_once(self, index: int) -> Any:
        return TokenDecoder(self)(run_blocking(lambda: self.read(index)))


def _ranges(file: TokenObject) -> NDArray[np.int64]:
    """Return the first window of each range of a file: of 4 MiB, or the windows that begin in one part of a column."""
    if file.starts is None:
        window_bytes = file.stride * np.dtype(file.layout.dtype).itemsize
        return np.arange(0, file.windows, max(RANGE_BYTES // window_bytes, 1))
    firsts = np.unique(-(-file.starts // file.stride))
    return firsts[firsts < file.windows]


class MappedLists:
    """The tokens of each record batch of a local Arrow file, in its mapped memory."""

    def __init__(self, path: str, column: str) -> None:
        self._arguments = path, column
        table = mapped(path)
        self.mapped: MappedFiles = MappedFiles([([(path, os.path.getsize(path))], len(table))])
        self.dtype: str = dtype_of(table.schema, column)
        self.batches: list[NDArray[Any]] = [tokens_of(chunk) for chunk in table.column(column).chunks]

    def __reduce__(self) -> tuple[Any, ...]:
        """Map the file again."""
        return type(self), self._arguments


def dtype_of(schema: Any, column: str) -> str:
    """Return the dtype of the tokens in a column.

    Raises:
        ValueError: There is no such column, or it has other values.
    """
    if column not in schema.names:
        raise ValueError(f"there is no column {column!r}; there are {schema.names}")
    kind = schema.field(column).type
    if not is_list(kind) or str(kind.value_type) not in DTYPES:
        raise ValueError(f"column {column!r} has the type {kind}: tokens are lists of {', '.join(DTYPES)}")
    return str(kind.value_type)


def tokens_of(lists: Any) -> NDArray[Any]:
    """Return the tokens of an Arrow array of lists, of which null ones and empty ones have none.

    Raises:
        ValueError: A token is null.
    """
    tokens = lists.flatten()
    if tokens.null_count:
        raise ValueError("the column has null tokens")
    return tokens.to_numpy()  # type: ignore[no-any-return]
