"""Is ``aiofeed.DataLoader`` as fast as torch's, with the same dataset, workers and batches?

Shuffled epochs, no step. JPEG files of 500 x 400 with Pillow, a random crop to 224 x 224 and a flip, as torchvision's
transforms do them, batch 64; 20,000 rows of 64 floats with labels in a ``TensorDataset``, batch 16 and 64; dicts of
arrays and strings; detection batches of images and boxes of different sizes, collated to lists. Workers are forked;
"persistent" ones stay for the next epoch. The first batch counts from ``iter()`` in the first epoch; the gap is the
time from the last batch of an epoch to the first of the next.

Targets: at least 0.97 of torch's speed in every row, and no longer waits for the first batch and between epochs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_least, column, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, added_memory, interleave
from benchmarks.process_tree import tree_cpu_s

TITLE = "aiofeed.DataLoader beside torch's"

# For each kind the samples of an epoch, and the cases: batch size and workers; "p" for persistent ones.
KINDS = {
    "JPEGs, random crops": (512, ((64, "0"), (64, "1"), (64, "2"), (64, "2p"))),
    "TensorDataset": (20_000, ((64, "0"), (64, "2p"), (16, "0"), (16, "2p"))),
    "dicts": (10_000, ((32, "0"), (32, "2p"))),
    "detection": (1_600, ((8, "0"), (8, "2"), (8, "2p"))),
}


def run(settings: Settings) -> list[Figure]:
    folder = str(jpeg_folder(settings.data, settings.size(512, 96)))
    figures = []
    for kind, (samples, cases) in KINDS.items():
        for batch_size, workers in cases if not settings.quick else cases[-1:]:
            options = {
                "kind": kind,
                "samples": settings.size(samples, 64),
                "batch_size": batch_size,
                "workers": workers,
            }
            options["folder"] = folder
            ours = Contender("aiofeed", loader, {**options, "ours": True}, ("torch", "aiofeed:DataLoader"))
            theirs = Contender("torch", loader, {**options, "ours": False}, ("torch.utils.data",))
            figures += compared(f"{kind}, batch {batch_size}, workers {workers}", interleave([ours, theirs], settings))
    options = {"kind": "JPEGs, random crops", "samples": settings.size(512, 64), "batch_size": 64, "workers": "2p"}
    for label, ours_too in (("aiofeed", True), ("torch", False)):
        contender = Contender(label, loader, {**options, "folder": folder, "ours": ours_too}, ("torch", "aiofeed"))
        memory = added_memory(contender, settings, (2,))
        figures.append(Figure(f"memory with 2 workers: {label}", tuple(m.total / 1e6 for m in memory), "MB"))
    return figures


def compared(name: str, samples: Mapping[str, Any]) -> list[Figure]:
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
    first, gap = (
        {label: column(rounds, key, 1e3) for label, rounds in samples.items()} for key in ("first_s", "gap_s")
    )
    return [
        Figure(f"{name}: speed / torch", per(rate["aiofeed"], rate["torch"]), target=at_least(0.97)),
        Figure("  CPU / torch", per(cpu["aiofeed"], cpu["torch"])),
        Figure("  first batch: torch / aiofeed", per(first["torch"], first["aiofeed"])),
        Figure("  gap between epochs: torch / aiofeed", per(gap["torch"], gap["aiofeed"])),
        Figure("  samples", rate["aiofeed"], "/s"),
    ]


@contextmanager
def loader(kind: str, samples: int, batch_size: int, workers: str, folder: str, ours: bool) -> Iterator[Measure]:
    import torch

    import aiofeed

    number = int(workers[0])
    data, collate_fn = dataset(kind, samples, folder)

    def new() -> Any:
        return (aiofeed.DataLoader if ours else torch.utils.data.DataLoader)(
            data, batch_size, True, num_workers=number, collate_fn=collate_fn, persistent_workers="p" in workers
        )

    batches = new()
    for _ in batches:
        pass

    def epoch() -> Mapping[str, float]:
        fresh = new()
        started = time.perf_counter()
        iterator = iter(fresh)
        next(iterator)
        first_s = time.perf_counter() - started
        del iterator, fresh
        cpu_s, started = tree_cpu_s(), time.perf_counter()
        for _ in batches:
            pass
        ended, cpu_s = time.perf_counter(), tree_cpu_s() - cpu_s
        for _ in batches:
            break
        gap_s = time.perf_counter() - ended
        return {"items": len(data), "wall_s": ended - started, "cpu_s": cpu_s, "first_s": first_s, "gap_s": gap_s}

    yield epoch


def dataset(kind: str, samples: int, folder: str) -> tuple[Any, Any]:
    if kind == "TensorDataset":
        import torch

        return torch.utils.data.TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10), None
    if kind == "dicts":
        return Dicts(samples), None
    if kind == "detection":
        return Detection(samples), lists
    return Crops(files_below(folder)[:samples]), None


class Crops:
    """Photographs, cropped at random and flipped with the calls of torchvision's transforms."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch
        from PIL import Image

        with Image.open(self.files[index]) as image:
            area = image.width * image.height * float(torch.empty(1).uniform_(0.25, 1.0))
            size = min(int(area**0.5), image.width, image.height)
            left = int(torch.randint(0, image.width - size + 1, (1,)))
            top = int(torch.randint(0, image.height - size + 1, (1,)))
            crop = image.convert("RGB").resize(
                (224, 224), Image.Resampling.BILINEAR, (left, top, left + size, top + size)
            )
        if torch.rand(1) < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous(), index % 10


class Dicts:
    """Dicts of an array, numbers and a string."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full((64, 64), index, np.float32), "index": index, "name": f"sample {index}", "weight": 0.5}


class Detection:
    """Images of different sizes, each with boxes and labels."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        import torch

        boxes = index % 7 + 1
        target = {"boxes": torch.rand(boxes, 4), "labels": torch.ones(boxes, dtype=torch.int64)}
        return torch.full((3, 200 + index % 50, 300), random.random()), target


def lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))
