"""How fast are random clips of H.264 videos?

Generated videos of 250 frames of 320 x 240 with a key frame every 50, in H.264 as x264 writes it by default, in the
page cache. A clip is every second of 32 frames from a random start, with the shorter side resized to 112 pixels and the
centre cropped; batches of 8 shuffled clips, no step. ``Clips`` in two decode threads is compared with ``DataLoader`` in
two workers that stay alive, over a ``Dataset`` that opens each video with torchcodec and resizes its frames with torch;
and over the same with PyAV. "4 per video" has four clips of each video, for which both open it once.

Targets: 1.2 times ``DataLoader`` with torchcodec, which is left out if it does not load (it needs the shared libraries
of FFmpeg, and a build for this torch: `pip install torchcodec==0.13.0` has one for the CPU), and with PyAV.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_least, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import torch

TITLE = "random clips of 16 frames, 320 x 240 to 112 x 112, batch 8"

BATCH, FRAMES, STRIDE, SIZE = 8, 16, 2, 112
WIDTH, HEIGHT, LENGTH, RATE, KEY_EVERY = 320, 240, 250, 25, 50
PER_VIDEO = 4


def run(settings: Settings) -> list[Figure]:
    paths = videos(settings.data / "videos", settings.size(24, 4), settings.size(LENGTH, 60))
    epochs = settings.size(4, 1)
    options = {"paths": paths, "epochs": epochs}
    ours, torchs = ("torch", "av", "aiofeed:Feeder", "aiofeed:Clips"), ("torch.utils.data", "av")
    contenders = [
        Contender("Clips", clips, options, ours),
        Contender("Clips, 4 per video", clips, options | {"per_video": PER_VIDEO}, ours),
        Contender("DataLoader + PyAV", loader, options | {"library": "av"}, torchs),
    ]
    if torchcodec_loads():
        torchs = ("torch.utils.data", "torchcodec.decoders")
        for label, more in {
            "DataLoader + torchcodec": {},
            "DataLoader + torchcodec, approximate": {"seek_mode": "approximate"},
            "DataLoader + torchcodec, 4 per video": {"per_video": PER_VIDEO},
        }.items():
            contenders.append(Contender(label, loader, options | {"library": "torchcodec"} | more, torchs))
    samples = interleave(contenders, settings)
    per_item = {label: 1e3 / (len(paths) * epochs * (PER_VIDEO if "4" in label else 1)) for label in samples}
    wall = {label: column(rounds, "wall_s", per_item[label]) for label, rounds in samples.items()}
    cpu = {label: column(rounds, "cpu_s", per_item[label]) for label, rounds in samples.items()}
    figures = [
        Figure(
            f"speed / {label}",
            per(wall[label], wall["Clips, 4 per video" if "4" in label else "Clips"]),
            target=at_least(1.2) if label in ("DataLoader + torchcodec", "DataLoader + PyAV") else None,
        )
        for label in samples
        if not label.startswith("Clips")
    ]
    figures += [Figure(f"clip: {label}", values, "ms") for label, values in wall.items()]
    return figures + [Figure(f"CPU per clip: {label}", values, "ms") for label, values in cpu.items()]


def videos(folder: Path, count: int, frames: int) -> list[str]:
    """The paths of generated videos: a texture that moves, with noise."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{frames}-{number}.mp4" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            write_video(path.with_suffix(".part"), frames, number)
            path.with_suffix(".part").rename(path)
    return [str(path) for path in paths]


def write_video(path: Path, frames: int, seed: int) -> None:
    import av
    import numpy as np

    numbers = np.random.default_rng(seed)
    # Noise whose amplitude falls with the frequency, as in photographs.
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(512), np.fft.fftfreq(512), indexing="ij"))
    spectrum = np.fft.fft2(numbers.standard_normal((3, 512, 512))) / (frequency + 1 / 512)
    texture = np.fft.ifft2(spectrum).real
    texture = 128 + 50 * texture / texture.std(axis=(1, 2), keepdims=True)
    with av.open(path, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", KEY_EVERY
        for at in range(frames):
            moved = np.roll(texture, (-at, -2 * at), (1, 2))[:, :HEIGHT, :WIDTH]
            picture = (moved + numbers.normal(0, 2, moved.shape)).clip(0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture.transpose(1, 2, 0)), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


@functools.cache
def torchcodec_loads() -> bool:
    try:
        import torchcodec.decoders  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # the last two if libraries are missing
        return False
    return True


@contextmanager
def clips(paths: Sequence[str], epochs: int, per_video: Any = "random") -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Clips(aiofeed.Files(paths), FRAMES, STRIDE, per_video, SIZE)
    limits = aiofeed.Limits(decode_threads=2)
    with aiofeed.Feeder(source, batch_size=BATCH, shuffle=True, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(batch) for _ in range(epochs) for batch in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def loader(
    paths: Sequence[str], epochs: int, library: str, per_video: Any = "random", seek_mode: str = "exact"
) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    dataset = Videos(paths, library, per_video, seek_mode)
    batches: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(batch) for _ in range(epochs) for batch in batches)}

    epoch()
    yield epoch


class Videos:
    """A Dataset of clips, as one writes it for ``DataLoader``."""

    def __init__(self, paths: Sequence[str], library: str, per_video: Any, seek_mode: str) -> None:
        self.paths, self.library, self.per_video, self.seek_mode = paths, library, per_video, seek_mode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        read = self.with_torchcodec if self.library == "torchcodec" else self.with_av
        frames = torch.cat([resized(clip) for clip in read(self.paths[index])])
        return frames if self.per_video == "random" else frames.unflatten(0, (self.per_video, FRAMES))

    def starts(self, length: int) -> list[int]:
        last = length - 1 - (FRAMES - 1) * STRIDE
        if self.per_video == "random":
            return [random.randint(0, last)]
        return [(2 * number + 1) * (last + 1) // (2 * self.per_video) for number in range(self.per_video)]

    def with_torchcodec(self, path: str) -> Iterator[torch.Tensor]:
        from torchcodec.decoders import VideoDecoder

        decoder = VideoDecoder(path, seek_mode=self.seek_mode)
        for start in self.starts(len(decoder)):
            yield decoder.get_frames_in_range(start, start + (FRAMES - 1) * STRIDE + 1, STRIDE).data

    def with_av(self, path: str) -> Iterator[torch.Tensor]:
        import av
        import numpy as np
        import torch

        with av.open(path) as container:
            stream = container.streams.video[0]
            assert stream.time_base is not None
            ticks = round(1 / (RATE * stream.time_base))
            for start in self.starts(stream.frames):
                wanted = {(start + STRIDE * at) * ticks for at in range(FRAMES)}
                container.seek(start * ticks, stream=stream)
                found = []
                for frame in container.decode(stream):
                    if frame.pts in wanted:
                        found.append(frame.to_ndarray(format="rgb24"))
                    if len(found) == FRAMES:
                        break
                yield torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)


def resized(frames: torch.Tensor) -> torch.Tensor:
    """Frames with the shorter side of `SIZE` pixels, cropped to a square."""
    import torch

    height, width = SIZE, SIZE * frames.shape[3] // frames.shape[2]
    small = torch.nn.functional.interpolate(frames, (height, width), mode="bilinear", antialias=True)
    left = (width - SIZE) // 2
    return small[:, :, :, left : left + SIZE].contiguous()
