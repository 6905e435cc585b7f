"""The videos of cameras: their indexes, the bytes of their key-frame groups, and the frames of moments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.media.frames import FrameIndex, FramePool, Span, read_index, render
from aiofeed.objects.reader import ObjectReader, read_ranges, run_all
from aiofeed.objects.requests import ObjectInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Seconds that a block of a header may take; requests are sent again for up to 60.
HEADER_S = 120.0
# Key frames to go back if a group cannot be decoded: a recovery point, also called a key frame, needs frames before it.
BACK = (1, 4, 16)


class Video:
    """A video file. Its index is read once in each process, and no file stays open.

    Args:
        reader: Reads it.
        key: Its key.
    """

    def __init__(self, reader: ObjectReader, key: str) -> None:
        self._arguments = reader, key
        self.url: str = reader.url(key)
        self.index: FrameIndex | None = None
        self.back = 0
        """How many key frames earlier than stated decoding begins."""
        self._info: ObjectInfo | None = None
        self._lock = threading.Lock()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle no index."""
        return Video, self._arguments

    def open_now(self) -> FrameIndex:
        """Return the index of a local file, read in this thread if it is the first time."""
        with self._lock:
            self.index = self.index or read_index(os.stat(self.url).st_size, self.read_now)
            return self.index

    def read_now(self, start: int, end: int) -> bytes:
        """Return a range of a file, read while this thread waits."""
        if self._arguments[0].is_local:
            return read_ranges(self.url, [(start, end)])[0]
        return run_blocking(lambda: self._read(start, end))

    async def open(self) -> FrameIndex:
        """Return the index of a file at a URL, read by two or three requests if it is the first time."""
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self.index is None:
                reader, key = self._arguments
                self._info = await reader.head(key)

                def read(start: int, end: int) -> bytes:
                    # With a time limit: a loop that has stopped answers no more.
                    return asyncio.run_coroutine_threadsafe(self._read(start, end), loop).result(HEADER_S)

                self.index = await asyncio.to_thread(read_index, self._info.size, read)
            return self.index

    async def _read(self, start: int, end: int) -> bytes:
        reader, key = self._arguments
        return (await reader.read_ranges(key, [start], [end], info=self._info))[0]

    async def read(self, spans: Iterable[Span]) -> dict[Span, bytes]:
        """Return the bytes of spans. Those side by side are one request; nothing between others is read."""
        joined: list[tuple[int, int]] = []
        ordered = sorted(spans, key=lambda span: span.start)
        for span in ordered:
            first, end = joined.pop() if joined and span.start <= joined[-1][1] else (span.start, 0)
            joined.append((first, max(end, span.end)))
        parts = await run_all([self._read(*each) for each in joined])
        firsts = [first for first, _ in joined]
        found = {}
        for span in ordered:
            at = bisect_right(firsts, span.start) - 1
            found[span] = parts[at][span.start - firsts[at] : span.end - firsts[at]]
        return found


class Frames:
    """The frames of one camera for a moment.

    Args:
        video: The video; ``None`` if the episode has none.
        seconds: The times of the frames in it.
        size: Height and width.
        tolerance_s: A frame that far from its time is missing.
    """

    def __init__(
        self, video: Video | None, seconds: NDArray[np.float64], size: tuple[int, int], tolerance_s: float
    ) -> None:
        self._video, self._seconds, self._size, self._tolerance_s = video, seconds, size, tolerance_s
        self.data: dict[Span, bytes] | None = None
        """The bytes that were read; ``None``: decoding reads the file."""

    def __str__(self) -> str:
        times = ", ".join(f"{second:.3f}" for second in self._seconds)
        return f"{times} s of {'no video' if self._video is None else self._video.url}"

    @property
    def video(self) -> Video:
        """The video.

        Raises:
            ValueError: There is none.
        """
        if self._video is None:
            raise ValueError("there is no video of this episode")
        return self._video

    def find(self, index: FrameIndex, *, whole: bool) -> tuple[list[int], list[Span]]:
        """Return the timestamps of the frames, and what to decode for them.

        Raises:
            ValueError: A frame is missing.
        """
        frames = index.nearest(self._seconds, self._tolerance_s)
        return index.timestamps[frames].tolist(), index.spans(frames, whole=whole, back=self.video.back)

    def decode(self, pool: FramePool | None) -> NDArray[np.uint8]:
        """Return the frames, uint8 [n, 3, H, W], or [3, H, W] of one; ``pool`` keeps frames for other moments.

        Raises:
            OSError: The file cannot be read.
            ValueError: A frame is missing, or the file is damaged.
        """
        video = self.video
        index = video.index or video.open_now()
        timestamps, spans = self.find(index, whole=pool is not None)
        found: dict[int, Any] = {}
        for span in self.data or spans:
            decode = partial(self._decode, video, index, span)
            found.update(decode() if pool is None else pool.get((video, span.key), decode))
        out = np.empty((len(timestamps), 3, *self._size), np.uint8)
        for place, timestamp in enumerate(timestamps):
            if (first := timestamps.index(timestamp)) < place:
                out[place] = out[first]
            else:
                render(found[timestamp], out[place])
        return out if len(out) > 1 else out[0]

    def _decode(self, video: Video, index: FrameIndex, span: Span) -> dict[int, Any]:
        try:
            return index.decode(span, self.data[span] if self.data else video.read_now(span.start, span.end))
        except ValueError:
            for back in BACK:
                earlier = index.earlier(span, back)
                if back > video.back and earlier.first < span.first:
                    with contextlib.suppress(ValueError):
                        found = index.decode(earlier, video.read_now(earlier.start, earlier.end))
                        video.back = back
                        return found
            raise


async def read_frames(moments: list[Any], *, whole: bool) -> None:
    """Read the bytes of all frames of moments together; put an error in the place of a moment that cannot be read."""

    async def spans_of(frames: Frames) -> list[Span]:
        return frames.find(await frames.video.open(), whole=whole)[1]

    each = [(at, name, frames) for at, moment in enumerate(moments) for name, frames in moment.frames.items()]
    needed = await asyncio.gather(*[spans_of(frames) for _, _, frames in each], return_exceptions=True)
    wanted: dict[Video, list[Span]] = {}
    for (_, _, frames), spans in zip(each, needed, strict=True):
        if not isinstance(spans, BaseException):
            wanted.setdefault(frames.video, []).extend(spans)
    reads = await asyncio.gather(*[video.read(spans) for video, spans in wanted.items()], return_exceptions=True)
    read = dict(zip(wanted, reads, strict=True))
    for (at, name, frames), spans in zip(each, needed, strict=True):
        found = spans if isinstance(spans, BaseException) else read[frames.video]
        if not isinstance(found, dict):
            moments[at] = (
                ValueError(f"camera {name!r} at {frames}: {found}") if isinstance(found, ValueError) else found
            )
        elif not isinstance(spans, BaseException):
            frames.data = {span: found[span] for span in spans}
