"""Single frames of MP4 files: an index of all packets from the file's header, and decoding of their bytes.

A file is opened for its index only, and only its header is read for that. Afterwards the bytes of a frame's key-frame
group are read from where they are, a file or an object store, and a decoder that stays open decodes them.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiofeed.media.container import SKIPPING, colours, demuxed, frame_order, import_av, open_media

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A header has 30 bytes for a frame. It is read in blocks of this size.
HEADER_BYTES = 64 << 10
# FFmpeg takes what the header says of the streams, and does not look into packets, whose bytes are missing.
_HEADER_OPTIONS = {"skip_frame": "all", "probesize": "32", "analyzeduration": "0", "fflags": "noparse"}
# What a frame of MPEG-4 begins with. It is nowhere else in a packet.
MPEG4_FRAME = b"\0\0\1\xb6"
# Decoders that each thread keeps open, one for each kind of stream: cameras of one resolution share it.
DECODERS = 8
# What the header says of a stream, and the packets of some codecs do not.
PARAMETERS = (
    *("extradata", "width", "height", "pix_fmt", "bits_per_coded_sample", "reorder_depth", "codec_tag"),
    *("colorspace", "color_range", "color_primaries", "color_trc"),
)

_local = threading.local()  # .decoders


class Span(NamedTuple):
    """Packets that are decoded together, from a key frame on, and their bytes in the file.

    Args:
        key: The number of the packet of the key frame before the frames that are needed.
        first: The number of the first packet, in the order of decoding: that one, or an earlier key frame.
        last: The number of the last one.
        start: Their first byte.
        end: The byte after their last one.
        wanted: The timestamps of the frames that are needed; ``None`` for all.
    """

    key: int
    first: int
    last: int
    start: int
    end: int
    wanted: frozenset[int] | None = None


@dataclass(frozen=True, eq=False)
class FrameIndex:
    """The frames of a video.

    Args:
        kind: The codec, and the parameters of its decoder.
        time_base: Seconds of a unit of timestamps.
        timestamps: The timestamp of each frame, ascending.
        order: The number of each frame's packet, in the order of decoding.
        keys: The number of the packet of the key frame before each frame, ascending.
        packets: The timestamp of each packet.
        flags: Whether each packet is a key frame.
        starts: The first byte of each packet.
        sizes: The bytes of each packet.
    """

    kind: tuple[Any, ...]
    time_base: float
    timestamps: NDArray[Any]
    order: NDArray[Any]
    keys: NDArray[Any]
    packets: NDArray[Any]
    flags: NDArray[Any]
    starts: NDArray[Any]
    sizes: NDArray[Any]

    def nearest(self, seconds: NDArray[np.float64], tolerance_s: float) -> NDArray[np.int64]:
        """Return the frame nearest to each time.

        Raises:
            ValueError: It is ``tolerance_s`` away or more.
        """
        stamps = self.timestamps
        units = np.clip(np.ceil(seconds / self.time_base), stamps[0], stamps[-1])
        right = np.searchsorted(stamps, units.astype(np.int64))  # in one dtype: otherwise it would convert all of them
        left = np.maximum(right - 1, 0)
        before, after = stamps[left] * self.time_base, stamps[right] * self.time_base
        found: NDArray[np.int64] = np.where(np.abs(seconds - before) <= np.abs(after - seconds), left, right)
        times = stamps[found] * self.time_base
        away = np.abs(times - seconds)
        if not (away < tolerance_s).all():
            at = int(np.argmax(away))
            raise ValueError(
                f"no frame at {seconds[at]:.6f} s: the nearest one is at {times[at]:.6f} s, "
                f"{away[at]:.6f} s away, and tolerance_s={tolerance_s:g}"
            )
        return found

    def spans(self, frames: NDArray[np.int64], *, whole: bool, back: int = 0) -> list[Span]:
        """Return what has to be decoded for frames.

        Args:
            frames: The numbers of the frames.
            whole: Whether all frames between two key frames are decoded, so that others have them.
            back: How many key frames earlier decoding begins.
        """
        found, keys = [], self.keys[frames]
        for key in np.unique(keys).tolist():
            chosen = np.arange(*self._group(key)) if whole else frames[keys == key]
            wanted = None if whole else frozenset(self.timestamps[chosen].tolist())
            found.append(self.earlier(Span(key, key, int(self.order[chosen].max()), 0, 0, wanted), back))
        return found

    def _group(self, key: int) -> list[int]:
        """Return the first frame of the group of a key frame, and that of the next one."""
        return np.searchsorted(self.keys, [key, key + 1]).tolist()  # type: ignore[no-any-return]

    def earlier(self, span: Span, back: int) -> Span:
        """Return the span from ``back`` key frames before its own on."""
        first = span.key
        for _ in range(back):
            first = int(self.keys[max(self._group(first)[0] - 1, 0)])
        starts = self.starts[first : span.last + 1]
        end = (starts + self.sizes[first : span.last + 1]).max()
        return span._replace(first=first, start=int(starts.min()), end=int(end))

    def decode(self, span: Span, data: bytes | memoryview) -> dict[int, Any]:
        """Decode the bytes of a span to frames by timestamp.

        Raises:
            ValueError: The bytes are damaged, or decoding has to begin earlier.
        """
        av, context = import_av(), _decoder(self.kind)
        found: dict[int, Any] = {}
        skips = span.wanted is not None and self.kind[0] in SKIPPING
        # Frames that are shown before the key frame need the group before, and are in it.
        numbers = span.first + np.flatnonzero(self.packets[span.first : span.last + 1] >= self.packets[span.first])
        wanted = span.wanted or frozenset(self.timestamps[slice(*self._group(span.key))].tolist())
        view = memoryview(data)
        places = list(zip((self.starts[numbers] - span.start).tolist(), self.sizes[numbers].tolist(), strict=True))
        # The second frame of a packet comes with the timestamp of a packet behind it.
        if self.kind[0] == "mpeg4" and any(bytes(view[at : at + size]).count(MPEG4_FRAME) > 1 for at, size in places):
            raise ValueError("packets of the video have two frames, as DivX packs B-frames: encode it again")
        try:
            for number, (start, size) in zip(numbers.tolist(), places, strict=True):
                packet = av.Packet(size)  # with the zeros behind its bytes that FFmpeg needs
                packet.update(view[start : start + size])
                packet.pts, packet.is_keyframe = int(self.packets[number]), bool(self.flags[number])
                if skips:
                    context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
                for frame in context.decode(packet):
                    found[frame.pts] = frame
            if not wanted <= found.keys():
                for frame in context.decode(None):  # those that wait for frames before them in the order of display
                    found[frame.pts] = frame
        except av.FFmpegError as error:
            _local.decoders.cache_clear()
            raise ValueError(f"the video is damaged: {error.strerror}") from error
        context.flush_buffers()
        if not wanted <= found.keys():
            missing = min(wanted - found.keys()) * self.time_base
            raise ValueError(f"the frame at {missing:.6f} s cannot be decoded: the video is damaged")
        return {timestamp: found[timestamp] for timestamp in wanted}


def _decoder(kind: tuple[Any, ...]) -> Any:
    """Return the open decoder of this thread for a kind of stream. Each decodes in the thread itself."""
    if not hasattr(_local, "decoders"):
        _local.decoders = lru_cache(DECODERS)(_new_decoder)
    return _local.decoders(kind)


def _new_decoder(kind: tuple[Any, ...]) -> Any:
    context = import_av().CodecContext.create(kind[0], "r")
    context.thread_count = 1
    for name, value in kind[1:]:
        if value is not None:
            setattr(context, name, value)
    return context


class _HeaderFile:
    """A file for FFmpeg, which reads the header by ``read``, and then packets of zeros."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._at, self.is_open = size, 0, False
        self._block = cache(lambda at: read(at, min(at + HEADER_BYTES, size)))

    def read(self, count: int) -> bytes:
        start, end = self._at, min(self._at + count, self._size)
        self._at = max(start, end)
        if self.is_open:
            return bytes(max(end - start, 0))
        first = start - start % HEADER_BYTES
        return b"".join(map(self._block, range(first, end, HEADER_BYTES)))[start - first : max(end - first, 0)]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def read_index(size: int, read: Callable[[int, int], bytes]) -> FrameIndex:
    """Return the index of a video, of which the header is read by ``read(start, end)``.

    Raises:
        ValueError: The file is no MP4 file, has no video, is truncated or damaged.
    """
    file = _HeaderFile(size, read)
    with open_media(file, "video", _HEADER_OPTIONS) as (container, stream):
        if "mp4" not in container.format.name:
            raise ValueError(f"the file is no MP4 file, but of the format {container.format.name}")
        file.is_open, packets, context = True, list[Any](), stream.codec_context
        kind = (context.codec.name, *[(name, getattr(context, name)) for name in PARAMETERS])
        for packet in demuxed(container, stream):  # one at a time: each has memory for its bytes
            if packets and packet.has_sidedata("new_extradata"):
                raise ValueError("the parameters of the video change within it: encode it again")
            packets.append((packet.pts, packet.is_keyframe, packet.is_discard, packet.pos, packet.size))
        if any(packet[0] is None for packet in packets) or all(discarded for _, _, discarded, *_ in packets):
            raise ValueError("the video has no frames, or they have no timestamps")
        stamps, flags, discarded, starts, sizes = (np.array(column) for column in zip(*packets, strict=True))
        order, keys = frame_order(stamps, flags, discarded)
        series = stamps[order], order, keys, stamps, flags, starts, sizes
        return FrameIndex(kind, float(stream.time_base), *series)


class FramePool:
    """Keeps the frames that were decoded last, as the decoder gives them. Several threads that need some decode once.

    Args:
        limit_bytes: The most bytes of frames that are kept, except those that are in use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._pid, self._lock, self._nbytes = os.getpid(), threading.Lock(), 0
        self._groups: OrderedDict[Any, Future[Mapping[int, Any]]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle no frames."""
        return FramePool, (self.limit_bytes,)

    def get(self, key: Any, decode: Callable[[], Mapping[int, Any]]) -> Mapping[int, Any]:
        """Return frames by timestamp, which ``decode`` decodes if they are not kept."""
        if self._pid != os.getpid():
            self.__dict__.update(FramePool(self.limit_bytes).__dict__)  # in a fork a lock may be held for ever
        with self._lock:
            group = self._groups.setdefault(key, Future())
            is_new = not (group.running() or group.done()) and group.set_running_or_notify_cancel()
            self._groups.move_to_end(key)
        if is_new:
            try:
                group.set_result(decode())
            except BaseException as error:  # noqa: BLE001 - raised below, and in threads that wait for these frames
                group.set_exception(error)
            with self._lock:
                self._nbytes += _nbytes(group)
                while (
                    self._nbytes > self.limit_bytes
                    and len(self._groups) > 1
                    and next(iter(self._groups.values())).done()
                ):
                    self._nbytes -= _nbytes(self._groups.popitem(last=False)[1])
                if group.exception():
                    self._groups.pop(key, None)
        return group.result()


def _nbytes(group: Future[Mapping[int, Any]]) -> int:
    frames = {} if group.exception() else group.result()
    return sum(plane.buffer_size for frame in frames.values() for plane in frame.planes)


def render(frame: Any, out: NDArray[np.uint8]) -> None:
    """Write the pixels of a frame into ``out``, uint8 [3, H, W]: those of FFmpeg's conversion to RGB."""
    _, height, width = out.shape
    if (frame.height, frame.width) != (height, width):
        raise ValueError(f"a frame has {frame.width} x {frame.height} pixels, and the camera {width} x {height}")
    for channel, pixels in enumerate(colours(frame, (height, width))):
        out[channel] = pixels
