"""How much faster is an epoch from cached samples, in memory or in a file?

JPEGs of 500 x 400 to 224 x 224, batch 64, shuffled, in the page cache. "First" is the first epoch of a feeder with that
cache, which fills it, "later" the mean of the three after the second; "reopened" is that of another feeder over the
file, which verifies every checksum. "Copying" copies as many contiguous rows into three batches in rotation. "Ragged"
items have a half to three halves of the bytes of "equal" ones.

Targets: the second epoch 40 times as fast as the first; later ones 0.85 of copying; ragged items at most 1.3 times as
long as equal ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import aiofeed
from benchmarks.contenders import Counted, labelled, single_epochs
from benchmarks.data import jpeg_folder
from benchmarks.figures import Figure, at_least, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Cached samples: 500x400 to 224, batch 64, shuffled"

SIZE = 224
BATCH = 64
LATER = 3


def run(settings: Settings) -> list[Figure]:
    images = settings.size(1024, 96)
    options = {"folder": str(jpeg_folder(settings.data, images))}
    contenders = [
        Contender("host", feeders, {**options, "kind": "host"}),
        Contender("file", feeders, {**options, "kind": "disk"}),
        Contender("copying", copying, {"images": images}),
    ]
    for kind, name in (("host", "host"), ("disk", "file")):
        for spread in (0, 1):
            label = f"{name}, {'ragged' if spread else 'equal'}"
            contenders.append(Contender(label, items, {"count": images, "kind": kind, "spread": spread}))
    race = interleave(contenders, settings)
    figures = []
    copied = race.column("copying", "wall_s", 1e3)
    for label in ("host", "file"):
        epochs = {name: race.column(label, name, 1e3) for name in ("first", "second", "later")}
        figures += [
            Figure(f"{label}: second epoch / first", per(epochs["first"], epochs["second"]), target=at_least(40)),
            Figure(f"{label}: later epochs / copying", per(copied, epochs["later"]), target=at_least(0.85)),
            *[Figure(f"{label}: {name} epoch", values, "ms") for name, values in epochs.items()],
            Figure(
                f"{label}: epoch of ragged items / of equal ones",
                per(race.column(f"{label}, ragged", "wall_s"), race.column(f"{label}, equal", "wall_s")),
                target=at_most(1.3),
            ),
        ]
    figures.append(Figure("file: epoch of a reopened file", race.column("file", "reopened", 1e3), "ms"))
    figures.append(Figure("copying as many bytes", copied, "ms"))
    return figures


@contextmanager
def feeders(folder: str, kind: str) -> Iterator[Measure]:
    """Each measurement uses new feeders and a new file."""
    source = aiofeed.ImageFolder(folder)
    folder_of_caches = tempfile.mkdtemp(prefix="aiofeed-cache-")
    decode = aiofeed.DecodeImage((SIZE, SIZE))
    number = 0

    def feeder(cache: Any) -> aiofeed.Feeder[Any]:
        return aiofeed.Feeder(source, decode=decode, batch_size=BATCH, shuffle=True, cache=cache)

    def measure() -> Mapping[str, float]:
        nonlocal number
        number += 1
        path = f"{folder_of_caches}/{number}"
        cache: Any = "host" if kind == "host" else aiofeed.DiskCache(path)
        with feeder(cache) as first:
            one_epoch = single_epochs(first)
            times = [timed(one_epoch(), len(source)) for _ in range(2 + LATER)]
        sample = {"first": times[0], "second": times[1], "later": sum(times[2:]) / LATER}
        if kind == "disk":
            with feeder(cache) as second:
                sample["reopened"] = timed(second, len(source))
            os.unlink(path)
        return sample

    try:
        with feeder(None) as warm:
            timed(warm, len(source))
        yield measure
    finally:
        shutil.rmtree(folder_of_caches, ignore_errors=True)


class Items(Counted):
    """A Dataset of ``count`` items of a picture's bytes on average, from 1 - ``spread`` / 2 to 1 + ``spread`` / 2."""

    def __init__(self, count: int, spread: int) -> None:
        super().__init__(count)
        self.spread = spread

    def __getitem__(self, index: int) -> dict[str, Any]:
        share = 1 + self.spread * (index / (self.samples - 1) - 0.5)
        return {"image": torch.full((int(SIZE * SIZE * 3 * share),), index % 256, dtype=torch.uint8), "id": index}


@contextmanager
def items(count: int, kind: str, spread: int) -> Iterator[Measure]:
    """Epochs of a finished cache."""
    with tempfile.TemporaryDirectory(prefix="aiofeed-cache-") as folder:
        cache: Any = "host" if kind == "host" else aiofeed.DiskCache(f"{folder}/items")
        options: Any = {"batch_size": BATCH, "shuffle": True, "cache": cache, "collate_fn": list}
        with aiofeed.Feeder(Items(count, spread), **options) as feeder:

            def measure() -> Mapping[str, float]:
                assert sum(map(len, feeder)) == count
                return {"items": count}

            measure()
            yield measure


def timed(batches: Iterable[Any], expected: int) -> float:
    started = time.perf_counter()
    images = sum(map(labelled, batches))
    elapsed = time.perf_counter() - started
    assert images == expected, f"{images} of {expected} images"
    return elapsed


@contextmanager
def copying(images: int) -> Iterator[Measure]:
    data = np.ones((images, SIZE, SIZE, 3), np.uint8)
    batches = [np.ones((BATCH, SIZE, SIZE, 3), np.uint8) for _ in range(3)]

    def measure() -> Mapping[str, float]:
        for number, first in enumerate(range(0, images, BATCH)):
            part = data[first : first + BATCH]
            np.copyto(batches[number % 3][: len(part)], part)
        return {"items": images}

    measure()
    yield measure
