"""Files of video and audio, opened with PyAV."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from aiofeed.common.expanded import check_expanded

if TYPE_CHECKING:
    from numpy.typing import NDArray

Media: TypeAlias = "bytes | str | os.PathLike[str]"
"""The bytes of a file, or the path of a local one, which is opened in place."""

# A playlist can name other files and URLs. FFmpeg may open none of them.
_OPTIONS = {"protocol_whitelist": "none"}
# Opens without decoding a first frame, which takes 3.4 of 4.1 ms for 320 x 240 of high quality.
KNOWN_OPTIONS: Mapping[str, str] = {"skip_frame": "all", "probesize": "20000"}
# Decoders for which `skip_frame` may change from packet to packet. That of AV1 keeps the first value; that of MPEG-4
# loses the second frame of a packet with two.
SKIPPING: frozenset[str] = frozenset({"h264", "hevc"})
# The last packet may end this much before the end that a header states.
TOLERANCE_S = 1.0
# What a packet takes in memory beside its bytes.
PACKET_BYTES = 200

_local = threading.local()  # .scaler: made once per thread, because that takes a quarter of scaling a small frame


@functools.cache
def import_av() -> Any:
    """PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError("video and audio are decoded by PyAV: pip install 'aiofeed[media]'") from error
    return av


@contextlib.contextmanager
def open_media(
    data: Any, kind: Literal["video", "audio"], options: Mapping[str, str] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Open a file; gives its container and its best stream of a kind, which decodes in the calling thread.

    ``data`` is ``Media``, or has ``read``, ``seek`` and ``tell``. ``options`` are those of FFmpeg. With
    ``KNOWN_OPTIONS``, FFmpeg does not examine the streams. A video can then fail, or lack frames, that has both
    otherwise.

    Raises:
        TypeError: The data is neither bytes nor a path.
        ValueError: The file is of no known format, has no such stream, or is damaged where it is used.
    """
    av = import_av()
    given = {**_OPTIONS, **(options or {})}
    try:
        with _as_file(data) as file, av.open(file, options=given, metadata_errors="replace") as container:
            stream = container.streams.best(kind)
            if stream is None:
                others = ", ".join(sorted({f"{other.type}" for other in container.streams})) or "no streams at all"
                raise ValueError(f"the file has no {kind} stream; it has {others}")
            if stream.codec_context is None:
                raise ValueError(f"FFmpeg has no decoder for the {kind} stream of the file")
            stream.codec_context.thread_count = 1
            yield container, stream
    except av.FFmpegError as error:
        raise ValueError(f"the file has no {kind}, or it is truncated or damaged: {error.strerror}") from error


def _as_file(data: Any) -> Any:
    if isinstance(data, str | os.PathLike):
        return open(data, "rb")
    if hasattr(data, "read"):
        return contextlib.nullcontext(data)
    try:
        return io.BytesIO(data)
    except TypeError:
        raise TypeError(f"a video or audio file is bytes or a path, got {type(data).__name__}") from None


def demuxed(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream that have bytes, in the order in which they are decoded.

    The header of MP3, Ogg, MPEG-TS and fragmented MP4 lists none: such a file is as long as what is left of it.

    Raises:
        ValueError: The header of an MP4 file lists more, without those that an edit removes; or more than fit in it.
    """
    sizes, count = [entry.size for entry in stream.index_entries], 0
    check_expanded("the header of the file", sum(sizes) + PACKET_BYTES * len(sizes), container.size)
    for packet in container.demux(stream):
        if packet.size:
            count += 1
            yield packet
    if "mp4" in container.format.name and stream.frames and count < (listed := sum(size > 0 for size in sizes)):
        raise ValueError(f"the file is truncated: its header counts {listed} packets, and it has {count}")


def packets_of(container: Any, stream: Any) -> list[Any]:
    """Return all packets of a stream, in the order in which they are decoded.

    Raises:
        ValueError: The header of the file states more.
    """
    packets = list(demuxed(container, stream))
    stated = _stated_seconds(container, stream)
    ends = [(packet.pts + (packet.duration or 0)) * packet.time_base for packet in packets if packet.pts is not None]
    found = float(max(ends, default=0))
    is_short = found < stated - TOLERANCE_S or bool(packets and packets[-1].is_corrupt)
    if (sound := _stated_bytes(container)) is not None:
        # FFmpeg takes what is left of such a file for the whole, or the last packet of a pipe for a damaged one.
        is_short, stated = sound[0] > sound[1], max(stated, found * sound[0] / max(sound[1], 1))
        packets = packets if sound[0] else []
    if is_short:
        of_stated = f": its header states {stated:.9g} seconds, and it has {found:.9g}" if stated else ""
        raise ValueError(f"the file is truncated{of_stated}")
    return packets


def frame_order(
    stamps: NDArray[Any], flags: NDArray[Any], discarded: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the number of each frame's packet, and that of the packet of the key frame before it, ascending.

    Args:
        stamps: When the frame of each packet is shown.
        flags: Whether each packet is a key frame.
        discarded: Whether the frame of each packet is not shown.
    """
    order = np.argsort(stamps, kind="stable")
    order = order[~discarded[order]]
    # The key frame before a frame may be discarded: a video that was cut is decoded from before its beginning.
    numbers = np.union1d(0, np.flatnonzero(flags))
    before = np.searchsorted(numbers, order, side="right") - 1
    # Frames that are shown before the key frame are of the group before it.
    before = np.maximum(before - (stamps[numbers[before]] > stamps[order]), 0)
    return order, np.minimum.accumulate(numbers[before][::-1])[::-1]


def _stated_seconds(container: Any, stream: Any) -> float:
    """The end of a stream by the header of the file; 0 if it is not stated, or estimated from the size of the file."""
    if container.format.name in ("wav", "flac"):
        return float((stream.duration or 0) * stream.time_base)
    if container.format.name == "matroska,webm":
        parts = stream.metadata.get("DURATION", "").split(":")
        with contextlib.suppress(ValueError):
            return float(sum(float(part) * 60**at for at, part in enumerate(reversed(parts))))
    return 0.0


def _stated_bytes(container: Any) -> tuple[int, int] | None:
    """Return the bytes of sound that the header of a WAV, AIFF, AU or CAF states, and those that the file has.

    Programs that write into a pipe state 0, or a size near 2 or 4 GiB: then the sound goes on until the end of the
    file, and both numbers are equal. ``None`` for other files. Sources: EBU Tech 3306 for RF64; the manuals of the
    formats.
    """
    if container.format.name not in ("wav", "aiff", "au", "caf"):
        return None
    file, total, large = container.file.file, container.size, 0
    file.seek(0)
    kind = file.read(12)
    if kind.startswith(b".snd"):
        at, size = struct.unpack_from(">LL", kind, 4)
    else:
        form, at = (">4sq", 8) if kind.startswith(b"caff") else (">4sL" if kind.startswith(b"FORM") else "<4sL", 12)
        name, size = b"", 0
        while name not in (b"data", b"SSND"):
            at += size + (0 if form == ">4sq" else size % 2)
            file.seek(at)
            if len(head := file.read(struct.calcsize(form))) < struct.calcsize(form):
                return None
            name, size = struct.unpack(form, head)
            at += len(head)
            if name == b"ds64":
                large = int.from_bytes(file.read(16)[8:], "little")
    whole = kind[4:8] == (total - 8).to_bytes(8, "little")[:4]  # a WAV that is all there, if with a size of 0
    size = large or size
    return (total - at if size < 0 or (-size % (1 << 31) <= 1 << 16 and not whole) else size), total - at


def colours(frame: Any, size: Sequence[int], **options: Any) -> list[NDArray[np.uint8]]:
    """Red, green and blue of a frame, [H, W] in FFmpeg's memory. It is scaled to ``size`` (H, W) with ``options``."""
    if (scaler := getattr(_local, "scaler", None)) is None:
        scaler = _local.scaler = import_av().video.reformatter.VideoReformatter()
    # Planes of colours take a third of the time of pixels. But without scaling FFmpeg leaves the last columns of many
    # widths undefined, and the planes of some formats differ from the pixels.
    known = frame.format.name == "yuv420p" and size[1] % 16 == 0 and platform.machine() in ("x86_64", "AMD64")
    planar = known or (frame.height, frame.width) != tuple(size)
    found = scaler.reformat(frame, size[1], size[0], "gbrp" if planar else "rgb24", threads=1, **options)
    places = ((2, 0), (0, 0), (1, 0)) if planar else ((0, 0), (0, 1), (0, 2))
    step, planes = 1 if planar else 3, found.planes
    return [np.ndarray(size, np.uint8, planes[at], first, (planes[at].line_size, step)) for at, first in places]
