"""``DecodeAudio``: recordings, or crops of them, at one sample rate.

A crop is cut at the samples of the whole recording at the new rate, so that it equals that part of it. Timestamps come
from a pass over all packets, because seeks in MP3 are not exact; only the packets of the crop are decoded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import aiofeed
from aiofeed.kernel.core.faces import BaseSource
from aiofeed.kernel.core.types import Row, public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, explain_arguments
from aiofeed.kernel.sampling.order import SplitMix64, seed_from
from aiofeed.media.container import Media, import_av, open_media, packets_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Decoders of MP3, AAC and Opus need some packets before their samples are those of the whole recording: Opus 80 ms, MP3
# up to 10 packets.
WARM_UP_S = 0.5
# The filter of the resampler reaches 16 samples of the lower rate to each side.
MARGIN_S = 0.01
# The filter takes memory in proportion to the ratio of the rates: some 13 MB for this one.
MOST_RATIO = 100


@public
@explain_arguments(
    {
        "sample_rate": "it is called rate",
        "sampling_rate": "it is called rate",
        "num_channels": "it is called channels",
        "mono": "channels=1, the default, is the mean of all channels",
        "duration": "it is called seconds",
        "transform": "pass it to Feeder, which calls it with each batch",
    }
)
@dataclass(frozen=True)
class DecodeAudio:
    """Decode the bytes of an audio file, or the sound of a video, to float32 [channels, samples].

    Example:
        ```python
        from pathlib import Path

        import aiofeed

        recordings = aiofeed.Files(sorted(Path("recordings").glob("*.wav")))
        decode = aiofeed.DecodeAudio(rate=16000, seconds=0.5)
        for sound in aiofeed.Feeder(recordings, decode=decode, batch_size=2):
            print(sound.shape)  # float32 [N, 1, 8000]
        ```

    Needs ``pip install "aiofeed[media]"``. Full scale is -1 to 1. A recording shorter than ``seconds`` is followed by
    zeros. Also decodes the path of a local file, which is opened in place.

    Whole recordings have lengths of their own: pad them with ``collate_fn=aiofeed.pad_collate()``, which pads their
    last dimension. ``Buckets`` and ``TokenBudget`` without ``lengths`` take those of ``lengths(source)``.

    Args:
        rate: Samples per second. A file with another rate is resampled.
        seconds: Length of a sample; ``None`` for whole recordings.
        crop: "random" draws the place of the crop from the sample's own random numbers; "first" is the beginning. Whole
            recordings have none.
        channels: 1 is the mean of all channels. For another number files have that many channels, or one, which is
            repeated.
        resample: If False, a file with another rate is an error.

    Raises:
        ImportError: PyAV is not installed.
        TypeError: The data is neither bytes nor a path.
        ValueError: The data is no audio file, truncated, damaged, without an audio stream, or has other channels or,
            with ``resample=False``, another rate.
    """

    rate: int
    seconds: float | None = None
    crop: Literal["random", "first"] = field(default="random", kw_only=True)
    channels: int = field(default=1, kw_only=True)
    resample: bool = field(default=True, kw_only=True)

    row: Row | None = field(init=False, repr=False, compare=False)
    takes_seed: bool = field(init=False, repr=False, compare=False)

    cache_advice = (
        "A random crop is another one in each epoch: leave out cache=, use EncodedCache(...) for slow storage, or "
        'crop="first" for the same samples each time'
    )

    def __post_init__(self) -> None:
        import_av()
        check_positive_int("DecodeAudio(rate=...)", self.rate)
        check_positive_int("DecodeAudio(channels=...)", self.channels)
        check_bool("DecodeAudio(resample=...)", self.resample)
        if self.crop not in ("random", "first"):
            raise ValueError(f'DecodeAudio(crop=...) must be "random" or "first", got {self.crop!r}')
        try:
            samples = 1 if self.seconds is None else round(self.rate * self.seconds)
        except (TypeError, ValueError, OverflowError):
            samples = 0
        if samples < 1:
            raise ValueError(
                f"DecodeAudio(seconds=...) must be at least one sample, 1 / rate, or None for whole recordings, got "
                f"{self.seconds!r}"
            )
        row = None if self.seconds is None else Row((self.channels, samples), "float32")
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "takes_seed", row is not None and self.crop == "random")

    @property
    def time_axis(self) -> int:
        """The dimension of its samples that ``pad_collate`` pads: whole recordings differ in the last one."""
        return 0 if self.row is not None else -1

    def __call__(self, data: Media, /, *, rng: torch.Generator | None = None) -> torch.Tensor:
        """Decode to a float32 CPU tensor; ``rng`` chooses a random crop."""
        import torch

        return torch.from_numpy(self._sound(data, seed_from(rng, self) if self.takes_seed else None))

    def decode_into(self, data: Media, out: NDArray[np.float32], seed: int | None = None) -> None:
        """Decode a crop into ``out``, float32 of ``row.shape``."""
        out[:] = self._sound(data, seed)

    def lengths(self, source: Any, /) -> NDArray[np.int64]:
        """Return the length of each sample of a source, in samples at ``rate``, int64: for ``Buckets`` and others.

        Reads what files state of their lengths, without decoding; of local files the head only. The last milliseconds
        may differ from what is decoded, and the length of an MP3 without a table of its frames is an estimate. Shows
        its progress.

        Raises:
            ReadError, DecodeError: A file cannot be read, or is no audio file. The message names it.
        """
        from aiofeed.common.progress_bar import LoadProgress
        from aiofeed.kernel.feeder.arguments import as_source

        source = as_source(source).adopted()
        if self.row is not None:
            return np.full(len(source), self.row.shape[1])
        name, found = f"reading the lengths of {source!r}", list[int]()
        heads: Any = _Paths(source) if source.keys_are_paths else source
        feeder = aiofeed.Feeder(heads, decode=self._stated, batch_size=32, sampler=range(len(source)), collate_fn=list)
        with feeder, LoadProgress(name, "files", len(source), lambda done: f"{name}: {done:,} files") as progress:
            for batch in feeder:
                found += [each[0] if isinstance(each, tuple) else each for each in batch]
                progress.add(len(batch))
        return np.array(found, np.int64)

    def _stated(self, data: Media) -> int:
        """Return the length of a recording as far as its file states it."""
        with open_media(data, "audio") as (container, stream):
            seconds = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1_000_000
        return math.ceil(seconds * self.rate) if seconds > 0 else self.parts(data, lambda *_: [0], None)[0].shape[1]

    def _sound(self, data: Media, seed: int | None) -> NDArray[np.float32]:
        count = None if self.row is None else self.row.shape[1]
        return self.parts(data, lambda length, _: [self._start(length - (count or length), seed)], count)[0]

    def parts(
        self, data: Media, starts: Callable[[int, float], Iterable[int]], count: int | None
    ) -> list[NDArray[np.float32]]:
        """Return parts of a recording, [channels, count] each, with zeros where it has no sound.

        Args:
            data: The recording.
            starts: Returns the first sample of each part, given the length, and the time of the file that sample 0 has.
            count: The samples of each; ``None``: all from the beginning on.
        """
        with contextlib.ExitStack() as opened:
            container, stream = opened.enter_context(open_media(data, "audio"))
            rate = stream.codec_context.sample_rate
            if not 0 < rate <= MOST_RATIO * self.rate:
                raise ValueError(f"the file has {rate} samples per second, not 1 to {MOST_RATIO} * {self.rate}")
            if rate != self.rate and not self.resample:
                raise ValueError(
                    f"the file has {rate} samples per second, not {self.rate}: pass resample=True to DecodeAudio, or "
                    f"convert the file"
                )
            packets = packets_of(container, stream)
            if not packets:
                raise ValueError("the audio has no samples")
            # Decoders drop the silence that encoders of MP3 and AAC put before a recording.
            origin = round((stream.start_time or 0) * stream.time_base * rate)
            last = packets[-1]
            length = _position(last, rate) - origin + round((last.duration or 0) * last.time_base * rate)
            length = length * self.rate // rate
            # Both rates have a sample at the start of each block, so that the resampled parts of a recording fit.
            divisor = math.gcd(rate, self.rate)
            block, new_block = rate // divisor, self.rate // divisor
            found: list[NDArray[np.float32]] = []
            for start in starts(length, origin / rate):
                if found:  # a decoder that has ended differs from a new one
                    stream = opened.enter_context(open_media(data, "audio"))[1]
                at = 0 if count is None else max(min(start, length - count), 0)  # there is sound
                blocks = max(at // new_block - math.ceil(MARGIN_S * rate / block), 0)
                stop = math.inf if count is None else math.ceil((at + count) * rate / self.rate + MARGIN_S * rate)
                part = origin + blocks * block, origin + stop
                sound = self._mixed(_decode(stream.codec_context, packets, rate, *part))
                size = -(-sound.shape[1] * self.rate // rate) if count is None else count
                if rate != self.rate:
                    sound = np.stack([_resample(channel, rate, self.rate) for channel in sound])
                sound = sound[:, at - blocks * new_block :][:, max(start - at, 0) : max(size + start - at, 0)]
                found.append(np.zeros((self.channels, size), np.float32))
                found[-1][:, max(at - start, 0) :][:, : sound.shape[1]] = sound[:, :size]
            return found

    def _start(self, most: int, seed: int | None) -> int:
        """Return the first sample of the crop, at most ``most``."""
        if not self.takes_seed:
            return 0
        if seed is None:
            raise ValueError(f"{self!r} is random: it needs a seed")
        return int(SplitMix64(seed).random() * (max(most, 0) + 1))

    def _mixed(self, sound: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.channels == 1:
            return sound.mean(axis=0, keepdims=True)  # type: ignore[no-any-return]
        if len(sound) not in (1, self.channels):
            raise ValueError(
                f"the file has {len(sound)} channels, not {self.channels}: pass channels=1 to DecodeAudio for the mean"
            )
        return np.broadcast_to(sound, (self.channels, sound.shape[1]))


class _Paths:
    """The samples of local files as paths, so that their heads only are read."""

    def __init__(self, source: BaseSource) -> None:
        self._source, self.key = source, source.key

    def __len__(self) -> int:
        return len(self._source)

    async def read(self, index: int) -> str:
        return self.key(index)


def _position(timed: Any, rate: int) -> int:
    """Return the first sample of a packet or a frame; 0 if it has no timestamp."""
    return 0 if timed.pts is None else round(timed.pts * timed.time_base * rate)


def _decode(context: Any, packets: Sequence[Any], rate: int, start: int, stop: float) -> NDArray[np.float32]:
    """Return the samples from ``start`` to ``stop``, or to the end of the recording: [channels, samples]."""
    av = import_av()
    # Interleaved, because PyAV reads past the planes of 8 channels and more.
    to_float = av.AudioResampler(format="flt")
    parts: list[NDArray[np.float32]] = []
    first = reached = 0
    positions = [_position(packet, rate) for packet in packets]
    warm_up = start - WARM_UP_S * rate
    for at, packet in enumerate([*packets, None]):
        if at + 1 < len(packets) and positions[at + 1] <= warm_up:
            continue
        try:
            frames = context.decode(packet)
        except av.FFmpegError:
            if positions[at] >= start:
                raise
            continue  # the first packets refer to earlier ones
        for frame in frames:
            if frame.sample_rate != rate:
                raise ValueError(f"the sample rate of the audio changes from {rate} to {frame.sample_rate}")
            if not parts:
                first = reached = _position(frame, rate)
            for part in to_float.resample(frame):
                parts.append(part.to_ndarray().reshape(part.samples, -1).T)
                reached += part.samples
        if reached >= stop:
            break
    if not parts:
        raise ValueError("the audio has no samples")
    first = int(min(first, stop))
    sound = np.concatenate(parts, axis=1)[:, max(start - first, 0) : int(min(stop, reached)) - first]
    if not sound.size:
        raise ValueError("the audio ends before the end that is stated, or its timestamps are wrong")
    return np.pad(sound, ((0, 0), (max(first - start, 0), 0)))


def _resample(channel: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    av = import_av()
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channel[None]), format="fltp", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=new_rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray()[0] for part in parts])
