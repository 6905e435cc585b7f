"""Is a torch Dataset as fast in a Feeder, and in ``aiofeed.DataLoader``, as in torch's ``DataLoader``?

A Feeder beside ``DataLoader`` without workers, both in one thread, shuffled, epochs after the second: a
``TensorDataset``; items like those of torchvision's MNIST; and pairs, of which a bare loop over items and
``default_collate`` is the bound. Then ``aiofeed.DataLoader`` beside torch's with the same workers, which are forked and
stay for the next epoch. The gap is the time from the last batch of an epoch to the first of the next. Last, small items
from the second second of a new loader on, in its first epoch, batch 32, and 400 KB in batches of 8: a Feeder and
``aiofeed.DataLoader`` beside torch's, all without workers.

Targets: as fast as ``DataLoader`` for rows, 0.95 of it for images in batches of 16, and 1.05 for pairs; 0.97 of torch's
speed with each ``aiofeed.DataLoader``; from the second second on 0.9 with a Feeder, and 1.0 with
``aiofeed.DataLoader``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

import aiofeed
from benchmarks.contenders import Counted, epochs, fed, labelled, loaded
from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.worker import tree_cpu_s

TITLE = "Datasets in a Feeder and in aiofeed.DataLoader, shuffled"

ROWS, DIGITS, PAIRS = "TensorDataset", "images of 28 x 28", "pairs of 64 floats and a number"
LOADER = "DataLoader, no workers"

FED = {ROWS: (20_000, {64: 1.0, 16: 1.0}), DIGITS: (4_000, {64: 1.0, 16: 0.95}), PAIRS: (16_384, {64: 1.05, 16: 1.05})}
"""Samples of each dataset in a Feeder, and the least speed by batch size."""

LOADED = (
    ("JPEGs, random crops", 512, 64, 2),
    (ROWS, 20_000, 16, 0),
    ("dicts", 10_000, 32, 2),
    ("detection", 1_600, 8, 2),
)
"""For ``aiofeed.DataLoader``: dataset, samples, batch size, workers."""

FIRST = {"tuples of 8": 32, "dicts of 8": 32, "tuples of 3,000": 32, "dicts of 3,000": 32, "tuples of 100,000": 8}
"""Items of so many floats and a number, with the batch size."""
OURS = "aiofeed.DataLoader, no workers"


def run(settings: Settings) -> list[Figure]:
    figures = []
    for kind, (samples, bars) in FED.items():
        for batch_size, bar in bars.items():
            options = {"kind": kind, "samples": settings.size(samples, 320), "batch_size": batch_size}
            contenders = [Contender("Feeder", aiofeed_feeder, options), Contender(LOADER, data_loader, options)]
            if kind == PAIRS:
                contenders.append(Contender("bare loop", bare_loop, options, bound=True))
            race = interleave(contenders, settings)
            name = f"{kind}, batch {batch_size}"
            figures.append(race.speed("Feeder", LOADER, bar, name))
            figures += [race.speed("Feeder", "bare loop", None, name)] if kind == PAIRS else []
            figures += race.rates("samples", name)
    folder = str(jpeg_folder(settings.data, settings.size(512, 96)))
    for kind, samples, batch_size, workers in LOADED:
        options = {"kind": kind, "samples": settings.size(samples, 64), "batch_size": batch_size, "workers": workers}
        contenders = [
            Contender(label, loader, {**options, "folder": folder, "ours": label == "aiofeed"})
            for label in ("aiofeed", "torch")
        ]
        race = interleave(contenders, settings)
        name = f"DataLoader, {kind}, batch {batch_size}, {workers} workers"
        figures += [race.speed("aiofeed", "torch", 0.97, name), race.cpu("aiofeed", "torch", None, name)]
        for key, what in (("first_s", "first batch"), ("gap_s", "gap between epochs")):
            ratio = per(race.column("torch", key), race.column("aiofeed", key))
            figures.append(Figure(f"{name}: {what}, torch / aiofeed", ratio))
    for kind, batch_size in islice(FIRST.items(), settings.size(len(FIRST), 1)):
        options = {"kind": kind, "batch_size": batch_size, "least_s": settings.size(10, 1) / 10}
        contenders = [Contender(each, first_epoch, {**options, "label": each}) for each in (LOADER, "Feeder", OURS)]
        race = interleave(contenders, settings)
        name = f"from the second second on, {kind}, batch {batch_size}"
        figures += [race.speed("Feeder", LOADER, 0.9, name), race.speed(OURS, LOADER, 1, f"{name}, aiofeed.DataLoader")]
        figures += race.rates("samples", name)
    return figures


def dataset(kind: str, samples: int, folder: str = "") -> Any:
    if kind == ROWS:
        return torch.utils.data.TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10)
    if kind == "JPEGs, random crops":
        return Crops(files_below(folder)[:samples])
    return {DIGITS: Digits, PAIRS: Pairs, "dicts": Dicts, "detection": Detection}[kind](samples)


class Digits(Counted):
    """Items like those of torchvision's ``MNIST`` with ``ToTensor`` and ``Normalize``, which do the same calls."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.data = np.random.default_rng(0).integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        self.targets = np.arange(samples) % 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.data[index])
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(28, 28, 1)
        tensor = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        mean, std = torch.as_tensor([0.1307]).view(-1, 1, 1), torch.as_tensor([0.3081]).view(-1, 1, 1)
        return tensor.clone().sub_(mean).div_(std), int(self.targets[index])


class Pairs(Counted):
    """Items that take a microsecond: a row of 64 floats and a number."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.rows = torch.randn(samples, 64)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 10


class Crops(Counted):
    """Photographs, cropped at random and flipped with the calls of torchvision's transforms."""

    def __init__(self, files: list[str]) -> None:
        super().__init__(len(files))
        self.files = files

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self.files[index]) as image:
            area = image.width * image.height * float(torch.empty(1).uniform_(0.25, 1.0))
            size = min(int(area**0.5), image.width, image.height)
            left = int(torch.randint(0, image.width - size + 1, (1,)))
            top = int(torch.randint(0, image.height - size + 1, (1,)))
            box = (left, top, left + size, top + size)
            crop = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, box)
        if torch.rand(1) < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous(), index % 10


class Dicts(Counted):
    """Dicts of an array, numbers and a string."""

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full((64, 64), index, np.float32), "index": index, "name": f"sample {index}", "weight": 0.5}


class Detection(Dicts):
    """Images of different sizes, each with boxes and labels."""

    def __getitem__(self, index: int) -> Any:
        boxes = index % 7 + 1
        target = {"boxes": torch.rand(boxes, 4), "labels": torch.ones(boxes, dtype=torch.int64)}
        return torch.full((3, 200 + index % 50, 300), random.random()), target


class Floats(Counted):
    """A million items, copies of rows of floats, with a number."""

    def __init__(self, kind: str) -> None:
        super().__init__(1_000_000)
        form, _, floats = kind.partition(" of ")
        self.rows = torch.randn(16, int(floats.replace(",", "")))
        self.as_dict = form == "dicts"

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index % 16].clone()
        return {"x": row, "y": index} if self.as_dict else (row, index)


@contextmanager
def first_epoch(kind: str, batch_size: int, label: str, least_s: float) -> Iterator[Measure]:
    """Measures the second second of a new loader."""
    of: Any = {OURS: aiofeed.DataLoader, LOADER: torch.utils.data.DataLoader}.get(label, aiofeed.Feeder)

    def measure() -> Mapping[str, float]:
        batches = iter(of(Floats(kind), batch_size=batch_size, shuffle=True))
        run_for(batches, least_s)
        started = time.perf_counter()
        items = batch_size * run_for(batches, least_s)
        return {"items": items, "wall_s": time.perf_counter() - started}

    yield measure


def run_for(batches: Iterator[Any], seconds: float) -> int:
    """Take batches for so long; returns their number."""
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        next(batches)
        count += 1
    return count


def lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def aiofeed_feeder(kind: str, samples: int, batch_size: int) -> AbstractContextManager[Measure]:
    # From the third epoch on the consumer's thread may make the batches.
    return fed(aiofeed.Feeder(dataset(kind, samples), batch_size=batch_size, shuffle=True), labelled, warm=2)


def data_loader(kind: str, samples: int, batch_size: int) -> AbstractContextManager[Measure]:
    return loaded(dataset(kind, samples), batch_size, samples_in=labelled, shuffle=True)


def bare_loop(kind: str, samples: int, batch_size: int) -> AbstractContextManager[Measure]:
    """The least that one thread can do: items and ``default_collate``."""
    items = dataset(kind, samples)

    def batches() -> Iterable[Any]:
        order = torch.randperm(samples).tolist()
        for start in range(0, samples, batch_size):
            yield default_collate([items[index] for index in order[start : start + batch_size]])

    return epochs(batches, labelled)


@contextmanager
def loader(kind: str, samples: int, batch_size: int, workers: int, folder: str, ours: bool) -> Iterator[Measure]:
    data, collate_fn = dataset(kind, samples, folder), lists if kind == "detection" else None
    of: Any = aiofeed.DataLoader if ours else torch.utils.data.DataLoader

    def new() -> Any:
        return of(data, batch_size, True, num_workers=workers, collate_fn=collate_fn, persistent_workers=workers > 0)

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
