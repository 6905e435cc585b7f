"""How fast are random clips of H.264 videos, and images with masks?

Generated videos of 250 frames of 320 x 240 with a key frame every 50. A clip is every second of 32 frames from a random
start, at 112 pixels; batches of 8. ``Clips`` in two decode threads is compared with ``DataLoader`` in two workers over
a ``Dataset`` with PyAV. Photographs of 500 x 400 and their masks as PNG; a random crop to 224 x 224 and a flip for
both, batch 32: ``DecodePair`` is compared with ``DataLoader`` and Pillow, also with boxes.

Targets: clips 1.2 times as fast as ``DataLoader``, images with masks 1.1 times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiofeed
from aiofeed.kernel.decoders.geometry import random_box
from aiofeed.kernel.sampling.order import SplitMix64
from benchmarks.contenders import fed, loaded
from benchmarks.data import HEIGHT as PHOTO_HEIGHT
from benchmarks.data import WIDTH as PHOTO_WIDTH
from benchmarks.data import files_below, generate, jpeg_folder
from benchmarks.figures import Figure
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "random clips of 16 frames, batch 8; images with masks, random crops to 224, batch 32"

BATCH, FRAMES, STRIDE, SIZE = 8, 16, 2, 112
WIDTH, HEIGHT, LENGTH, RATE, KEY_EVERY = 320, 240, 250, 25, 50
PAIR_BATCH, PAIR_SIZE, BOX = 32, 224, [60, 50, 400, 350]
VIDEO_LOADER = "DataLoader + PyAV"
PAIRS, LOADER = "DecodePair", "DataLoader, Pillow"


def run(settings: Settings) -> list[Figure]:
    paths = videos(settings.data / "videos", settings.size(24, 4), settings.size(LENGTH, 60))
    options = {"paths": paths, "least_s": settings.size(1, 0)}
    contenders = [Contender("Clips", clips, options), Contender(VIDEO_LOADER, loader, options)]
    race = interleave(contenders, settings)
    figures = [race.speed("Clips", VIDEO_LOADER, 1.2, "clips"), *race.rates("clips")]
    count = settings.size(384, 64)
    folder = str(generate(settings.data / f"pairs-{count}", lambda root: write_pairs(settings.data, root, count)))
    for name, boxes in (("pairs", False), ("pairs with boxes", True)):
        options = {"folder": folder, "boxes": boxes}
        contenders = [Contender(PAIRS, decode_pair, options), Contender(LOADER, pairs_loader, options)]
        race = interleave(contenders, settings)
        figures += [
            race.speed(PAIRS, LOADER, 1.1, name),
            race.cpu(PAIRS, LOADER, None, name),
            *race.rates("samples", name),
        ]
    return figures


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


def clips(paths: Sequence[str], least_s: float) -> AbstractContextManager[Measure]:
    source = aiofeed.Clips(aiofeed.Files(paths), FRAMES, STRIDE, "random", SIZE)
    limits = aiofeed.Limits(decode_threads=2)
    return fed(aiofeed.Feeder(source, batch_size=BATCH, shuffle=True, limits=limits), least_s=least_s)


def loader(paths: Sequence[str], least_s: float) -> AbstractContextManager[Measure]:
    return loaded(Videos(paths), BATCH, 2, least_s=least_s, shuffle=True)


class Videos:
    """A Dataset of clips, as one writes it for ``DataLoader``."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Frames with the shorter side of `SIZE` pixels, cropped to a square."""
        frames = self.frames(self.paths[index])
        height, width = SIZE, SIZE * frames.shape[3] // frames.shape[2]
        small = torch.nn.functional.interpolate(frames, (height, width), mode="bilinear", antialias=True)
        left = (width - SIZE) // 2
        return small[:, :, :, left : left + SIZE].contiguous()

    def frames(self, path: str) -> torch.Tensor:
        import av

        with av.open(path) as container:
            stream = container.streams.video[0]
            assert stream.time_base is not None
            stream.thread_count = 1  # the workers are the threads
            ticks = round(1 / (RATE * stream.time_base))
            start = random.randint(0, stream.frames - 1 - (FRAMES - 1) * STRIDE)
            wanted = {(start + STRIDE * at) * ticks for at in range(FRAMES)}
            container.seek(start * ticks, stream=stream)
            found: list[Any] = []
            for frame in container.decode(stream):
                if frame.pts in wanted:
                    found.append(frame.to_ndarray(format="rgb24"))
                if len(found) == FRAMES:
                    break
            return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)


def write_pairs(data: Path, root: Path, count: int) -> None:
    """Photographs, and masks of their bright parts in 8 classes."""
    from PIL import Image

    for folder in ("images", "masks"):
        (root / folder).mkdir()
    for number, path in enumerate(files_below(jpeg_folder(data, count))):
        (root / "images" / f"{number:05}.jpg").write_bytes(Path(path).read_bytes())
        grey = Image.open(path).convert("L").resize((PHOTO_WIDTH // 8, PHOTO_HEIGHT // 8))
        mask = Image.fromarray(np.asarray(grey.resize((PHOTO_WIDTH, PHOTO_HEIGHT))) // 32)
        mask.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
        mask.save(root / "masks" / f"{number:05}.png")


def samples_of_pairs(batch: Any) -> int:
    return PAIR_BATCH


def decode_pair(folder: str, boxes: bool) -> AbstractContextManager[Measure]:
    target = {path.name: [BOX] for path in Path(folder, "images").iterdir()} if boxes else None
    source = aiofeed.FolderPairs(f"{folder}/images", f"{folder}/masks", target)
    decode = aiofeed.DecodePair(aiofeed.DecodeImage(PAIR_SIZE, crop="random", scale=(0.2, 1.0), flip=True))
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "batch_size": PAIR_BATCH}
    collate_fn = aiofeed.pad_collate() if boxes else None
    return fed(aiofeed.Feeder(source, decode=decode, collate_fn=collate_fn, **options), samples_of_pairs)


def pairs_loader(folder: str, boxes: bool) -> AbstractContextManager[Measure]:
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "collate_fn": list if boxes else None}
    return loaded(PillowPairs(folder, boxes), PAIR_BATCH, 2, samples_of_pairs, **options)


class PillowPairs:
    """Images and masks with Pillow: one random crop, as ``RandomResizedCrop`` chooses it, and one flip for both."""

    def __init__(self, folder: str, boxes: bool) -> None:
        self.images = sorted(map(str, Path(folder, "images").iterdir()))
        self.masks = sorted(map(str, Path(folder, "masks").iterdir()))
        self.boxes = boxes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        from PIL import Image

        size = PAIR_SIZE
        with Image.open(self.images[index]) as file:
            image = file.convert("RGB")
        mask = Image.open(self.masks[index])
        box = random_box(*image.size, (0.2, 1.0), (3 / 4, 4 / 3), SplitMix64(random.getrandbits(64)))
        image = image.resize((size, size), Image.Resampling.BILINEAR, box)
        mask = mask.resize((size, size), Image.Resampling.NEAREST, box)
        if flip := random.random() < 0.5:
            image, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        sample = torch.from_numpy(np.array(image)).permute(2, 0, 1), torch.from_numpy(np.array(mask))
        if not self.boxes:
            return sample
        left, upper, right, lower = box
        boxes = torch.tensor([BOX], dtype=torch.float32) - torch.tensor([left, upper, left, upper])
        boxes *= torch.tensor([size / (right - left), size / (lower - upper)]).repeat(2)
        if flip:
            boxes = torch.stack([size - boxes[:, 2], boxes[:, 1], size - boxes[:, 0], boxes[:, 3]], 1)
        boxes = boxes.clip(0, size)
        return *sample, boxes[((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1)]
