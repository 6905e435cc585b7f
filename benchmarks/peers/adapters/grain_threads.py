"""Grain: a ``MapDataset`` whose samples are whole batches, decoded and stacked in two of its threads.

"per item" is its usual chain: a map over single samples, ``batch`` and ``to_iter_dataset`` with its default of 16
threads. The batches are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "Grain"
NEEDS = ("grain",)
IMPORTS = ("grain", "numpy")
WAYS = ("whole batches", "per item")


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import grain
    import numpy as np

    paths, targets, decode, size = work.paths, np.array(work.targets), work.decode, work.batch

    def whole(number: int) -> tuple[Any, Any]:
        these = slice(number * size, (number + 1) * size)
        return np.stack([decode.file(path) for path in paths[these]]), targets[these]

    def one(index: int) -> tuple[Any, Any]:
        return decode.file(paths[index]), targets[index]

    dataset: Any
    if way == "whole batches":
        dataset = grain.MapDataset.range(-(-len(paths) // size)).map(whole)
        options = grain.ReadOptions(num_threads=work.workers, prefetch_buffer_size=work.workers + 1)
        batches = dataset.to_iter_dataset(options)
    else:
        dataset = grain.MapDataset.range(len(paths)).map(one)
        batches = dataset.to_iter_dataset(grain.ReadOptions()).batch(size, drop_remainder=False)
    yield lambda: ((channels_first(images), labels) for images, labels in batches)
