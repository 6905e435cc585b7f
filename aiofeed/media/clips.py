"""``Clips``: clips of the videos of a source.

A clip needs few of a video's frames. The index of a video, its packets and key frames, is made once, by reading all
packets without decoding them; if they do not state when their frames are shown, by decoding the video. A clip is then
read from the key frame before it. The packets there must be those of the index. Of the frames that the clip leaves out,
only those are decoded that others refer to.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from aiofeed.kernel.core.faces import BaseSource, passes_on
from aiofeed.kernel.core.types import Row, Source, Traits, public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, explain_arguments
from aiofeed.kernel.feeder.arguments import as_source
from aiofeed.kernel.sampling.order import SplitMix64, seed_from
from aiofeed.kernel.sources.subset import IndexedSource
from aiofeed.media.audio import DecodeAudio
from aiofeed.media.container import (
    KNOWN_OPTIONS,
    SKIPPING,
    Media,
    colours,
    frame_order,
    import_av,
    open_media,
    packets_of,
)
from aiofeed.media.folders import VideoFolder

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# A seek discards the frames in the decoder's queue, usually 2 to 4, which then have to be decoded again.
SEEK_FRAMES = 4
# Frames in the indexes that a decoder keeps: 20 bytes each.
MOST_INDEXED = 4 << 20
# A timestamp that FFmpeg makes up may be wrong. Those that the file does not state are missing.
_STATED = {"fflags": "nofillin"}
# A frame is shown at a time that is this much before it, too: times are rounded.
ROUNDING_S = 1e-6
# The bytes at both ends of a file by which, with its size, an index is found again. The tables of MP4 are at one end.
IDENTITY_BYTES = 1 << 16


@public
@explain_arguments(
    {
        "frame_rate": "it is called fps",
        "clip_duration": "frames= and fps= say how long a clip is",
        **dict.fromkeys(("num_frames", "frames_per_clip", "clip_length"), "it is called frames"),
        "sample_rate": "pass audio=DecodeAudio(rate=...)",
        "mean": "clips are uint8: normalise batches on the device, in transform= of Feeder",
        "std": "clips are uint8: normalise batches on the device, in transform= of Feeder",
        "transform": "pass it to Feeder, which calls it with each batch",
    }
)
@dataclass(frozen=True)
@passes_on
class Clips(IndexedSource):
    """Clips of videos: uint8 [frames, 3, H, W]. A source like the others, without ``decode=``.

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        videos = aiofeed.Files(sorted(Path("videos").glob("*.mp4")))
        clips = aiofeed.Clips(videos, frames=8, stride=2, size=112)
        for batch in aiofeed.Feeder(clips, batch_size=2, shuffle=True):
            print(batch.shape)  # uint8 [N, 8, 3, 112, 112]
        ```

    A sample is a video. Needs ``pip install "aiofeed[media]"``. The pixels of a frame are those of FFmpeg's bilinear
    scaler, which filters over all pixels when it shrinks; the rotation or mirroring that a phone stores is applied.

    Args:
        source: A source of encoded videos, such as ``Files``; or a folder with a sub-folder per class, as for
            ``VideoFolder``. If its ``read`` returns the path of a local file, only the parts of the file that a clip
            needs are read.
        frames: Frames of a clip. If the video ends before, its last frame is repeated.
        stride: Frames of the video from one frame of a clip to the next.
        per_video: "random": one clip, whose start is drawn from the sample's own random numbers. Or n clips of each
            video, in the middle of n equal parts: a sample is then [n, frames, 3, H, W], and needs one open file.
        size: An int resizes the shorter side and crops the centre, size x size; (height, width) does not preserve the
            aspect ratio.
        fps: Frames per second of a clip, in place of ``stride``: frame i is the one that the video shows i / fps
            seconds after the start of the clip, also if its frame rate varies.
        audio: A ``DecodeAudio(rate)`` for the sound of a clip, which takes frames / fps seconds: a sample is then a
            dict of ``"video"`` and ``"audio"``, float32 [channels, samples], with n clips [n, channels, samples]. Where
            the sound is shorter than the video there are zeros. Needs ``fps``.
        silence: Whether a video without an audio stream has zeros as its sound. By default it is an error.

    A video without frames, a truncated one and a file that is no video are a ``DecodeError``, which names
    the file.

    Attributes:
        classes, class_to_idx, targets: Those of a source that has them, such as ``VideoFolder``.

    Raises:
        ImportError: PyAV is not installed.
        FileNotFoundError: ``source`` is a folder without classes or videos.
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    source: Source[Any] | str | os.PathLike[str]
    frames: int
    stride: int = 1
    per_video: Literal["random"] | int = "random"
    size: int | tuple[int, int] = 224
    fps: float | None = field(default=None, kw_only=True)
    audio: DecodeAudio | None = field(default=None, kw_only=True)
    silence: bool = field(default=False, kw_only=True)
    decoder: ClipDecoder = field(init=False, repr=False, compare=False)
    whole: BaseSource = field(init=False, repr=False, compare=False)
    """The source of the videos as a feeder reads it."""
    traits: Traits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = self.source
        if isinstance(given, list | tuple) or (isinstance(given, str | os.PathLike) and os.path.isfile(given)):
            raise TypeError(f"Clips takes a source of encoded videos, aiofeed.Files(paths), or a folder; got {given!r}")
        if isinstance(given, str | os.PathLike):
            given = VideoFolder(given)
        whole = as_source(given)
        if whole.adopted().traits.decode == "none":
            raise TypeError(
                f"Clips takes a source of encoded videos, such as aiofeed.Files(paths), got {given!r}, whose "
                f"items are decoded already"
            )
        check_bool("Clips(silence=...)", self.silence)
        traits = Traits(decode="none", indexed=whole.traits.indexed, ordered=whole.traits.ordered)
        options = self.frames, self.stride, self.per_video, self.size, self.fps, self.audio, self.silence or None
        members = {"source": given, "decoder": ClipDecoder(*options), "whole": whole, "traits": traits}
        for name, value in members.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self.whole)

    @property
    def classes(self) -> list[str]:
        """The class names of the source, if it has them."""
        return self.source.classes  # type: ignore[union-attr,no-any-return]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class of the source, if it has them."""
        return self.source.class_to_idx  # type: ignore[union-attr,no-any-return]

    @property
    def targets(self) -> Any:
        """The targets of the source, if it has a list of them."""
        return self.source.targets  # type: ignore[union-attr]

    def adopted(self) -> Clips:
        """Return the clips of the source that a feeder reads."""
        whole = self.whole.adopted()
        return self if whole is self.whole else replace(self, source=whole)

    def structure(self) -> Mapping[Any, Sequence[int] | None] | None:
        """Return the parts of a sample with sound."""
        return {"video": self.decoder.shape, "audio": None} if self.audio else self.whole.structure()

    def _passed(self, name: str, value: Any) -> Any:
        """Return a member of the source of the videos; clips have no other form."""
        return (lambda: self) if name in ("as_samples", "in_batches", "for_neighbours", "in_pieces") else value


class ClipDecoder:
    """Decodes videos to clips. Keeps the indexes of videos, in each process its own."""

    cache_advice = (
        "A random clip is another one in each epoch: leave out cache=, use EncodedCache(...) for slow storage, or "
        "per_video=n for the same clips each time"
    )

    def __init__(
        self, frames: int, stride: int, per_video: Any, size: Any, fps: Any = None, audio: Any = None, mute: Any = None
    ) -> None:
        import_av()
        self._arguments = frames, stride, per_video, size, fps, audio, mute
        self.takes_seed: bool = per_video == "random"
        if isinstance(per_video, str) and not self.takes_seed:
            raise ValueError(f'Clips(per_video=...) must be "random" or a number of clips, got {per_video!r}')
        self._clips = 1 if self.takes_seed else check_positive_int("Clips(per_video=...)", per_video)
        count, step = check_positive_int("Clips(frames=...)", frames), check_positive_int("Clips(stride=...)", stride)
        self._offsets = np.arange(count) * step
        pair = size if isinstance(size, tuple | list) else (size, size)
        if len(pair) != 2:
            raise ValueError(f"Clips(size=...) must be an int or a pair (height, width), got {size!r}")
        height, width = (check_positive_int("Clips(size=...)", side) for side in pair)
        self._crops = pair is not size
        if fps is not None and not (isinstance(fps, Real) and 0 < float(fps) < math.inf):
            raise ValueError(f"Clips(fps=...) must be a number of frames per second above 0, got {fps!r}")
        if fps is not None and stride != 1:
            raise ValueError(f"Clips(stride={stride}, fps={fps}): both say which frames a clip has: leave one out")
        if audio is not None and (not isinstance(audio, DecodeAudio) or audio.row is not None):
            raise TypeError(f"Clips(audio=...) must be aiofeed.DecodeAudio(rate=...), without seconds=, got {audio!r}")
        if audio is not None and fps is None:
            raise ValueError("Clips(audio=...) needs fps=, in place of stride=, which says how long a clip is")
        clips = () if self.takes_seed else (self._clips,)
        self.shape: tuple[int, ...] = (*clips, count, 3, height, width)
        self.row: Row | None = Row(self.shape, "uint8") if audio is None else None
        self._fps: Any = fps and float(fps)
        self._audio, self._mute = audio, mute
        self._indexes: dict[object, VideoIndex] = {}
        self._known: set[object] = set()  # MP4 files with an index: their headers say all about their streams
        self._room = MOST_INDEXED

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, without indexes."""
        return ClipDecoder, self._arguments

    def __repr__(self) -> str:
        names = ("frames", "stride", "per_video", "size", "fps", "audio", "silence")
        given = [f"{name}={each!r}" for name, each in zip(names, self._arguments, strict=True) if each is not None]
        return f"ClipDecoder({', '.join(given)})"

    def __call__(self, data: Media, /, *, rng: torch.Generator | None = None) -> Any:
        """Decode to a uint8 CPU tensor, with ``audio`` to a dict; ``rng`` chooses a random clip."""
        import torch

        seed = seed_from(rng, self) if self.takes_seed else None
        out = np.empty(self.shape, np.uint8)
        starts = self.decode_into(data, out, seed)
        video = torch.from_numpy(out)
        return video if self._audio is None else {"video": video, "audio": torch.from_numpy(self._sound(data, starts))}

    def decode_into(self, data: Media, out: NDArray[np.uint8], seed: int | None = None) -> NDArray[Any]:
        """Decode the clips of a video into ``out``, uint8 [clips, frames, 3, H, W].

        Returns:
            Where they start, a frame or with ``fps`` a time; empty for a video without sound.
        """
        if isinstance(data, bytes | str | os.PathLike) and _identity(data) in self._known:
            with contextlib.suppress(ValueError):  # frames have timestamps: a wrong one is no clip, but an error
                return self._decode_file(data, out, seed, known=True)
        return self._decode_file(data, out, seed, known=False)

    def _decode_file(self, data: Media, out: NDArray[np.uint8], seed: int | None, *, known: bool) -> NDArray[Any]:
        with open_media(data, "video", KNOWN_OPTIONS if known else _STATED) as (container, stream):
            index = self._index_of(data, container, stream)
            starts, wanted = self._wanted(index, seed)
            self._decode(data, container, stream, index, wanted, out.reshape(-1, *self.shape[-3:]))
            return starts if container.streams.audio or self._audio is None else starts[:0]

    def _wanted(self, index: VideoIndex, seed: int | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the start of each clip, a frame or with ``fps`` a time of the file, and the frames of all clips."""
        last = len(index.order) - 1
        if self._fps is None:
            starts = self._starts(max(last - int(self._offsets[-1]), 0) + 1, seed).astype(np.int64)
            return starts, np.minimum(starts[:, None] + self._offsets, last).reshape(-1)
        times = index.shown[index.order] * index.unit
        starts = times[0] + self._starts(max(index.end - times[0] - len(self._offsets) / self._fps, 0.0), seed)
        wanted = np.searchsorted(times, starts[:, None] + self._offsets / self._fps + ROUNDING_S, side="right") - 1
        return starts, wanted.reshape(-1)

    def _starts(self, room: float, seed: int | None) -> NDArray[Any]:
        """Return where each clip starts within a room: a whole number of frames, or a time in seconds."""
        if self.takes_seed:
            if seed is None:
                raise ValueError(f"{self!r} is random: it needs a seed")
            return np.array([SplitMix64(seed).random() * room])
        starts = (2 * np.arange(self._clips) + 1) * room
        return starts // (2 * self._clips) if isinstance(room, int) else starts / (2 * self._clips)

    def _sound(self, data: Media, starts: NDArray[Any]) -> NDArray[np.float32]:
        """Return the sound of clips by their ``starts``: [channels, samples], or of several [clips, ...]."""
        audio: Any = self._audio
        count = round(len(self._offsets) / self._fps * audio.rate)
        if len(starts):
            found = audio.parts(data, lambda _, zero: np.rint((starts - zero) * audio.rate).astype(int).tolist(), count)
        elif self._mute:
            found = [np.zeros((audio.channels, count), np.float32)] * self._clips
        else:
            raise ValueError("the video has no sound: Clips(silence=True) gives zeros, Feeder(on_error=...) skips it")
        return found[0] if self.takes_seed else np.stack(found)

    def _index_of(self, data: Media, container: Any, stream: Any) -> VideoIndex:
        identity = _identity(data)
        index = self._indexes.get(identity)
        if index is None:
            index = _new_index(data, container, stream)
            # No index is dropped for another one: in shuffled epochs the next use of all of them is equally far.
            if len(index.order) <= self._room:
                self._room -= len(index.order)
                self._indexes[identity] = index
                if "mp4" in container.format.name:
                    self._known.add(identity)
        return index

    def _decode(
        self, data: Media, container: Any, stream: Any, index: VideoIndex, wanted: NDArray[Any], out: NDArray[np.uint8]
    ) -> None:
        """Write the frames of a video with the numbers ``wanted`` into ``out``."""
        places: dict[int, list[int]] = {}
        for place, number in enumerate(index.order[wanted].tolist()):
            places.setdefault(number, []).append(place)
        for key, frames in index.runs(np.unique(wanted)):
            missing = index.order[frames].tolist()
            # A seek may lead elsewhere, and the frame there may need others before it.
            for first, seek in ((key, index.seeks[key]), (key, None), (0, None)):
                found: tuple[Any, Any] = container, stream
                # An error of the last attempt is that of a damaged video.
                with contextlib.ExitStack() as opened, contextlib.suppress(import_av().FFmpegError, ValueError):
                    if seek is None:
                        found = opened.enter_context(open_media(data, "video", _STATED))
                    else:
                        container.seek(seek, stream=stream)
                    for number, frame in _frames(*found, index, first, missing):
                        place, *copies = places[number]
                        self._render(frame, out[place])
                        out[copies] = out[place]
                if not missing:
                    break
            else:
                number = int(np.flatnonzero(index.order == missing[0])[0])
                what = f"frame {number} of {len(index.order)} cannot be decoded"
                raise ValueError(f"{what}: the video is damaged, or its timestamps are wrong: encode it again")

    def _render(self, frame: Any, out: NDArray[np.uint8]) -> None:
        """Write a frame into ``out``, [3, H, W]."""
        _, height, width = out.shape
        swaps, down, across = _orientation(frame)
        shape = [height, width]
        if self._crops:
            sides = (frame.width, frame.height) if swaps else (frame.height, frame.width)
            shape = [height * side // min(sides) for side in sides]  # both sides of `out` are equal
        top, left = (round((shape[0] - height) / 2), round((shape[1] - width) / 2))
        stored = shape[::-1] if swaps else shape
        for channel, pixels in enumerate(colours(frame, stored, interpolation="BILINEAR")):
            shown = (pixels.T if swaps else pixels)[::down, ::across]
            out[channel] = shown[top : top + height, left : left + width]


def _orientation(frame: Any) -> tuple[bool, int, int]:
    """Return how a frame is shown: whether its sides are swapped, and then 1, or -1 for mirrored, down and across."""
    angle = math.radians(frame.rotation)
    a, b, c, d = math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)
    with contextlib.suppress(KeyError, ValueError):  # PyAV refuses side data of kinds that it does not know
        # ISO/IEC 14496-12, 6.2.2: the pixel (x, y) is shown at (a x + c y, b x + d y).
        a, b, _, c, d = struct.unpack_from("5i", frame.side_data["DISPLAYMATRIX"])
    swaps = abs(b) + abs(c) > abs(a) + abs(d)
    return swaps, -1 if (b if swaps else d) < 0 else 1, -1 if (c if swaps else a) < 0 else 1


class VideoIndex(NamedTuple):
    """The frames of a video, and its packets.

    Args:
        order: The number of each frame's packet, in the order of decoding.
        keys: The number of the packet of the key frame before each frame, ascending.
        shown: When the frame of each packet is shown: a timestamp, or a number of its own.
        checksums: The checksum of each packet.
        seeks: The time to seek to for the packet of each key frame; ``None`` if the file states none.
        skips: Whether frames may be left out: each packet is one, and the decoder can.
        unit: The seconds of one step of ``shown``.
        end: The time at which the last frame ends, in seconds.
    """

    order: NDArray[Any]
    keys: NDArray[Any]
    shown: NDArray[Any]
    checksums: NDArray[Any]
    seeks: dict[int, int | None]
    skips: bool
    unit: float = 0.04
    end: float = 0.0

    def runs(self, wanted: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Split ascending frames into runs: the number of the packet of the key frame before each, and its frames."""
        cuts = np.flatnonzero(self.keys[wanted[1:]] - self.order[wanted[:-1]] > SEEK_FRAMES) + 1
        for run in np.split(wanted, cuts):
            yield int(self.keys[run[0]]), run


def _new_index(data: Media, container: Any, stream: Any) -> VideoIndex:
    packets, context = packets_of(container, stream), stream.codec_context
    checksums = np.array([zlib.crc32(packet) for packet in packets], np.uint32)
    shown = [packet.pts if packet.pts is not None or context.has_b_frames else packet.dts for packet in packets]
    # AVI, MPEG and files copied from them state no time at which a frame is shown, or that at which it is decoded. A
    # packet of MPEG-4 may have two frames, and another one none.
    stated = None not in shown and len({*shown}) == len(shown)
    if stated and context.has_b_frames:
        stated = context.codec.name != "mpeg4" and shown != sorted(shown)
    places = np.array(shown, np.int64) if stated else _shown_by_decoding(data, checksums)
    hidden = np.array([packet.is_discard for packet in packets], bool) if stated else places < 0
    if hidden.all():
        raise ValueError("the video has no frames")
    order, keys = frame_order(places, np.array([packet.is_keyframe for packet in packets], bool), hidden)
    # FFmpeg seeks by the time of decoding, in MP4 by that of showing.
    shows = "mp4" in container.format.name
    times = [packet.pts if shows or packet.dts is None else packet.dts for packet in packets]
    seeks = {key: next((time for time in times[key::-1] if time is not None), None) for key in {*keys.tolist()}}
    skips = stated and context.codec.name in SKIPPING
    # Some files state no duration of their last frame, or, as FFmpeg takes for 25 per second, no frame rate.
    rate = float(stream.average_rate or stream.guessed_rate or 25)
    unit = float(stream.time_base) if stated else 1 / rate
    end = float(places[order[-1]] * unit + ((packets[order[-1]].duration or 0) * unit * stated or 1 / rate))
    return VideoIndex(order.astype(np.int32), keys.astype(np.int32), places, checksums, seeks, skips, unit, end)


def _shown_by_decoding(data: Media, checksums: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of the frame of each packet, in the order in which a decoder shows them; -1 for none."""
    shown = np.full(len(checksums), -1, np.int64)
    with open_media(data, "video", _STATED) as (container, stream):
        for number, frame in enumerate(_decoded(container, stream, checksums, 0, None)):
            if frame.pts is None or shown[frame.pts] >= 0:
                raise ValueError("two frames of the video are in one packet: encode it again")
            shown[frame.pts] = number
    return shown


def _decoded(
    container: Any, stream: Any, checksums: NDArray[Any], first: int, wanted: Container[int] | None
) -> Iterator[Any]:
    """Decode from a packet on, as long as the packets are those of the index; ``frame.pts`` is a packet's number.

    Frames that are not ``wanted`` are left out if no other frame needs them; ``None``: all frames are wanted.
    """
    context, number = stream.codec_context, first
    for packet in container.demux(stream):
        if packet.size and number < len(checksums) and zlib.crc32(packet) == checksums[number]:
            packet.pts, packet.dts = number, None
            if wanted is not None:
                context.skip_frame = "DEFAULT" if number in wanted else "NONREF"
            yield from context.decode(packet)
            number += 1
        elif packet.size and number > first:
            return
    if number > first:
        yield from context.decode(None)


def _frames(
    container: Any, stream: Any, index: VideoIndex, first: int, missing: list[int]
) -> Iterator[tuple[int, Any]]:
    """Decode from a packet on the frames of the packets ``missing``, which are removed; end if one does not come."""
    previous = None
    for frame in _decoded(container, stream, index.checksums, first, missing if index.skips else None):
        at = index.shown[frame.pts]
        # From the start on, damage is concealed, as players do.
        if (frame.is_corrupt and first) or (previous is not None and at <= previous) or at > index.shown[missing[0]]:
            return
        previous = at
        if frame.pts == missing[0]:
            yield missing.pop(0), frame
        if not missing:
            return


def _identity(data: Any) -> object:
    """Return a key of a file: its path, size and time, or the length of its bytes and a hash of both ends."""
    if isinstance(data, str | os.PathLike):
        status = os.stat(data)
        return os.fspath(data), status.st_size, status.st_mtime_ns
    view = memoryview(data)
    ends = hashlib.blake2b(view[:IDENTITY_BYTES], digest_size=16)
    ends.update(view[-IDENTITY_BYTES:])
    return len(view), ends.digest()
