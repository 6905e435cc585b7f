"""How far a loader's pictures are from those of Pillow at full scale: worst PSNR over the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Measure
from benchmarks.peers.decoders import Decode, psnr, quiet_helpers
from benchmarks.peers.work import Work, adapter


@contextmanager
def quality(adapter_name: str, way: str, work: Mapping[str, Any]) -> Iterator[Measure]:
    yield lambda: {"worst_db": min(distances(adapter_name, way, work))}


def distances(adapter_name: str, way: str, given: Mapping[str, Any]) -> list[float]:
    """PSNR in dB, picture by picture; a loader that mixes up the order is told by it."""
    import numpy as np

    quiet_helpers()
    task = Work(**given)
    whole = Decode("pillow", task.side)
    found = []
    with adapter(adapter_name).loader(task, way) as epoch:
        for images, labels in epoch():
            for image, label in zip(np.asarray(images), np.asarray(labels).tolist(), strict=True):
                found.append((np.array(image.transpose(1, 2, 0)), label))
    by_label: dict[int, list[Any]] = {}
    for path, target in zip(task.paths, task.targets, strict=True):
        by_label.setdefault(target, []).append(whole.file(path))
    # Loaders of shards give another order: each picture is held against the nearest of its class.
    return [max(psnr(image, other) for other in by_label[label]) for image, label in found]
