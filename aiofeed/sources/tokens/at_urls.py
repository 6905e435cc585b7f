"""``Tokens`` at URLs: a window is the bytes of a range of its object."""

from __future__ import annotations

import os
import posixpath
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.sources.objects.listing import run_blocking
from aiofeed.sources.objects.reader import GAP_BYTES, run_all
from aiofeed.sources.parts import Parts
from aiofeed.sources.shards.base import Shards
from aiofeed.sources.shards.index import ShardIndex
from aiofeed.sources.shards.urls import Shard, ShardFinder
from aiofeed.sources.tokens.formats import CHECKED_BYTES, TokenLayout, check_vocab, layout_of
from aiofeed.sources.tokens.windows import CHECKED_TOKENS, Tokens, checked_places

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The ranges of a file whose windows shuffle="window" mixes, 16 of them by default, and of which the windows in the
# look-ahead are read together.
RANGE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class TokenObject:
    """An object with tokens: the dtype of raw ones, the stride of its windows, where its tokens are, and its windows."""

    dtype: str
    stride: int
    layout: TokenLayout = TokenLayout("uint8", 0, 0)
    windows: int = 0


class RemoteTokens(Tokens, Shards):
    """Windows of tokens in objects, or in files that are read like objects."""

    answers_at_once, looks_ahead = False, True
    read_now = None

    def _open(self, files: list[tuple[Any, str, int]], vocab: int | None = None) -> None:
        """Find and open the objects, each with the dtype of raw tokens and the stride."""
        self._vocab, self.needed = vocab, self.block + self.targets
        finder: Any = ShardFinder(*self._storage)
        self._shards = run_blocking(lambda: self._open_all(finder, files))
        self._parts = Parts(map(self._samples, self._shards))
        self._starts = np.array(self._parts.starts)
        self.documents = [shard.extra.layout.documents for shard in self._shards]
        dtypes = [np.dtype(shard.extra.layout.dtype) for shard in self._shards]
        self._dtype = dtypes[0] if len(set(dtypes)) == 1 else np.result_type(*dtypes)
        self._window_bytes = self.needed * self._dtype.itemsize
        ranges = [
            np.arange(first, last, max(RANGE_BYTES // (shard.extra.stride * dtype.itemsize), 1))
            for shard, dtype, first, last in zip(self._shards, dtypes, self._starts, self._starts[1:], strict=False)
        ]
        # An array for bisect, which compares numpy's numbers slowly.
        self._ranges = array("q", np.concatenate([*ranges, self._starts[-1:]]).tobytes())
        self.in_memory = False

    async def _list(self, finder: ShardFinder, urls: Any) -> list[Shard]:
        files: list[tuple[Any, str, int]] = urls
        self._files = []
        for path, dtype, stride in files:
            # A text may be a glob; a path is the name of one file.
            found = [path] if isinstance(path, Shard) else None
            found = found or (await finder.find([path]) if isinstance(path, str) else [finder.shard(os.fspath(path))])
            opened = [replace(shard, extra=TokenObject(dtype, stride)) for shard in found]
            self._files += [(shard, dtype, stride) for shard in opened]
        return [shard for shard, _, _ in self._files]

    async def _index(self, shard: Shard) -> None:
        given, index = shard.extra, None
        stem, suffix = posixpath.splitext(shard.key)
        beside = shard.beside(f"{stem}.idx")
        [head] = await shard.read([(0, min(shard.size, CHECKED_BYTES))])
        if suffix == ".bin":
            try:
                index = await beside.reader.read(beside.key)
            except (FileNotFoundError, PermissionError):  # S3 denies access to a key that does not exist
                pass
        layout = layout_of("it", suffix, shard.size, head, given.dtype, index, beside.url)
        layout.checked("it", self.needed, targets=self.targets)
        windows = (layout.count - self.needed) // given.stride + 1
        shard.extra = replace(given, layout=layout, windows=windows)
        if self._vocab is not None:
            itemsize, places = np.dtype(layout.dtype).itemsize, checked_places(layout.count)
            firsts = [layout.offset + place * itemsize for place in places]
            nbytes = min(layout.count, CHECKED_TOKENS) * itemsize
            ends = [min(first + nbytes, layout.offset + layout.count * itemsize) for first in firsts]
            for place, part in zip(places, await shard.read(list(zip(firsts, ends, strict=True))), strict=True):
                check_vocab("it", place, np.frombuffer(part, layout.dtype), self._vocab)

    def _samples(self, shard: Shard) -> int:
        windows: int = shard.extra.windows
        return windows

    def _selection(self) -> Any:
        return self.needed, str(self._dtype), [stride for _, _, stride in self._files]

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> Any:
        raise NotImplementedError  # windows have no index

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
        """The bytes of a window."""
        return self._window_bytes

    async def read(self, index: int, /) -> bytes:
        """The bytes of a window."""
        [window] = await self.read_many([index])
        if isinstance(window, Exception):
            raise window
        return window  # type: ignore[no-any-return]

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """The bytes of windows, in one dtype for all files, or the error of each that cannot be read."""
        rows, found = np.asarray(indices, np.int64), [None] * len(indices)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1

        async def read_file(number: int) -> None:
            places = np.flatnonzero(numbers == number)
            parts = await self._read_windows(self._shards[number], rows[places] - self._starts[number])
            for place, part in zip(places.tolist(), parts, strict=True):
                found[place] = part

        await run_all([read_file(number) for number in np.unique(numbers).tolist()])
        return found

    async def _read_windows(self, shard: Shard, rows: NDArray[np.int64]) -> Sequence[Any]:
        layout, dtype = shard.extra.layout, np.dtype(shard.extra.layout.dtype)
        nbytes, starts = self.needed * dtype.itemsize, layout.offset + rows * shard.extra.stride * dtype.itemsize
        # Joined here, not by the reader, which takes four times as long for windows of some KB.
        ordered = np.sort(starts)
        parted = np.diff(ordered, prepend=ordered[0] - nbytes - GAP_BYTES - 1) > nbytes + GAP_BYTES
        firsts, lasts = ordered[parted], ordered[np.roll(parted, -1)] + nbytes
        try:
            parts = await shard.reader.read_ranges(shard.key, firsts.tolist(), lasts.tolist(), info=shard.info)
        except Exception as error:  # noqa: BLE001 - the error of each of these windows
            return [error.with_traceback(None)] * len(rows)
        numbers = np.searchsorted(firsts, starts, side="right") - 1
        places = zip(numbers.tolist(), (starts - firsts[numbers]).tolist(), strict=True)
        found = [parts[number][at : at + nbytes] for number, at in places]
        if dtype == self._dtype:
            return found
        return [np.frombuffer(window, dtype).astype(self._dtype).tobytes() for window in found]

    def gather(self, indices: Any, *parts: NDArray[Any]) -> None:
        """Write windows, of which there are the bytes, into ``x``, and with targets ``y``: [N, block]."""
        self._write(np.frombuffer(b"".join(indices), self._dtype).reshape(-1, self.needed), parts, slice(None))

    def _read_at_once(self, index: int) -> Any:
        return run_blocking(lambda: self.read(index))
