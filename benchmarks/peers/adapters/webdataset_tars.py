"""WebDataset: the same files in eight tar shards, ``decode`` by a handler for "jpg", batched inside two workers.

The workers build the batches; the loader is a ``WebLoader`` with ``batch_size=None``, as its documentation recommends.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import generate
from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "WebDataset"
NEEDS = ("webdataset",)
IMPORTS = ("torch.utils.data", "webdataset", "numpy")
WAYS = ("tars",)
ORDERED = False
SHARDS = 8


def prepare(work: Work) -> Path:
    return generate(work.converted / "tars", lambda folder: write(folder, work))


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import numpy as np
    import torch
    import webdataset

    shards = prepare(work)
    decode = work.decode

    def collate(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
        images = np.stack([decode(data) for data, _ in samples])
        return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])

    urls = sorted(map(str, shards.glob("*.tar")))
    dataset: Any = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.single_node_only)
    dataset = dataset.to_tuple("jpg", "cls").batched(work.batch, collation_fn=collate, partial=True)
    batches: Any = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=work.workers, persistent_workers=True, multiprocessing_context="fork"
    )
    yield lambda: ((channels_first(images), labels) for images, labels in batches)


def write(folder: Path, work: Work) -> None:
    """Write the shards, batch by batch in rotation, so that each has as many whole batches as possible."""
    size = min(work.batch, -(-len(work.paths) // SHARDS))
    batches = [range(first, min(first + size, len(work.paths))) for first in range(0, len(work.paths), size)]
    for shard in range(min(SHARDS, len(batches))):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in (number for batch in batches[shard::SHARDS] for number in batch):
                tar.add(work.paths[number], f"{number:08d}.jpg")
                label = str(work.targets[number]).encode()
                member = tarfile.TarInfo(f"{number:08d}.cls")
                member.size = len(label)
                tar.addfile(member, io.BytesIO(label))
