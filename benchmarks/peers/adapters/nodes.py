"""torchdata.nodes: batches of indices, each decoded and collated by ``ParallelMapper`` in threads.

"per item" is the map over single samples of its examples, which uses a queue for each sample and is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "torchdata.nodes"
NEEDS = ("torchdata",)
IMPORTS = ("torch.utils.data", "torchdata.nodes")
WAYS = ("per item", "by batches")


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    paths, targets, decode = work.paths, work.targets, work.decode

    def one(index: int) -> tuple[Any, int]:
        return decode.file(paths[index]), targets[index]

    def whole(indices: list[int]) -> tuple[Any, Any]:
        images, labels = default_collate([one(index) for index in indices])
        return images, labels

    sampler: Any = SamplerWrapper(SequentialSampler(range(len(paths))))
    node: Any
    if way == "per item":
        node = ParallelMapper(sampler, one, num_workers=work.workers, method="thread")
        node = Prefetcher(ParallelMapper(Batcher(node, work.batch, drop_last=False), default_collate, 1), 2)
    else:
        batched: Any = Batcher(sampler, work.batch, drop_last=False)
        node = Prefetcher(ParallelMapper(batched, whole, num_workers=work.workers, method="thread"), 2)
    # Loader starts a new epoch at each iter().
    batches: Any = Loader(node)
    yield lambda: ((channels_first(images), labels) for images, labels in batches)
