"""The contents of a cache as resident data: tensors from which rows are gathered, and batches formed of these rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.item_codec import ItemCodec
from aiofeed.cache.layout import ItemLayout
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.core.types import Members, decodes_in_place
from aiofeed.kernel.engine.fetch.collate import DefaultCollateBuilder
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.sampling.epochs import EpochStream
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.resident.batch_ranges import BatchRanges
from aiofeed.resident.device_cache import DeviceStore, ResidentStore
from aiofeed.resident.pipeline import DataMemory, ResidentPipeline

if TYPE_CHECKING:
    import torch


class CachedData:
    """Cached samples and their targets, or cached items of a ``Dataset``, in the memory of the cache.

    Args:
        store: The cache. Samples that are not cached are never requested.
        axes: Permutation of a sample's dimensions from memory order to the user's order; ``None`` for none.
        targets: Whether a sample is ``(decoded, target)``.
    """

    alias = False
    rows = None

    def __init__(self, store: ResidentStore, axes: tuple[int, ...] | None, *, targets: bool) -> None:
        self.samples: int = store.cached_samples
        self._name = f"{len(store):,} samples, each a {store.layout}"
        self._axes = None if axes is None else (0, *[axis + 1 for axis in axes])
        self.tensors: tuple[torch.Tensor, ...] = tuple(store.data())
        # The first `on_device` tensors are on the device.
        self.on_device: int = len(self.tensors) if isinstance(store, DeviceStore) else 0
        self._items = store.layout if isinstance(store.layout, ItemLayout) else None
        self._structure: Any = None
        if targets:
            collated = _collated(store)
            self.tensors += tuple(leaves(as_tensors(collated)))
            positions = iter(range(1, len(self.tensors)))
            # The pytree of the targets, with positions in `tensors` as leaves.
            self._structure = map_leaves(lambda leaf: next(positions), collated)

    def __repr__(self) -> str:
        return self._name

    def form_batch(self, rows: list[torch.Tensor]) -> Any:
        """Return the batch that the source would give, made of the rows of each tensor."""
        if self._items is not None:
            return ItemCodec().batch(rows, self._items)
        first = rows[0] if self._axes is None else _permuted(rows[0], self._axes)
        if self._structure is None:
            return first
        if self._structure == 1:
            return [first, rows[1]]
        return [first, map_leaves(lambda position: rows[position], self._structure)]


class CachedMemory(DataMemory):
    """The samples of a cache. An epoch is streamed while some of its samples are not cached, and none is read ahead."""

    def __init__(self, store: ResidentStore) -> None:
        self._store = store

    def ready(self, stream: EpochStream) -> bool:
        """Return whether the cache has all samples of the first epoch of a stream."""
        if self._store.has_all():
            return True
        first = stream.first
        assert not isinstance(first.sampled, BatchLists)
        wanted = BatchRanges(stream.schedule, first.position, first.sampled).at(0, sys.maxsize)
        return wanted is not None and self._store.has_all(wanted.indices)

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether the next epoch comes from the cache, too; it is faster then."""
        return self._store.has_all() and not streams

    def new_pipeline(self, config: Any, running: Any) -> ResidentPipeline:
        """Return a pipeline of the cache, which shares the data of the running one if no samples came later."""
        stale = isinstance(running, ResidentPipeline) and running.data.source.samples != self._store.cached_samples
        return super().new_pipeline(config, None if stale else running)

    def _data(self, config: Any) -> CachedData:
        axes = config.decode.row.axes if decodes_in_place(config.decode) else None
        return CachedData(self._store, axes, targets=Members.of(config.source).target is not None)


def _permuted(rows: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    import torch

    if torch.is_inference_mode_enabled():  # an inference tensor could not be trained on later
        with torch.inference_mode(False):
            return rows.permute(axes)
    return rows.permute(axes)


def _collated(store: ResidentStore) -> Any:
    """Collate all targets into one batch; a cached sample's target stands in for each sample that is not cached."""
    import torch

    at = np.flatnonzero(store.slots >= 0)
    builder = DefaultCollateBuilder(len(store), HostBufferPool(0))
    targets = store.targets
    stand_in = targets[int(at[0])]
    cached = set(at.tolist())
    for index in range(len(store)):
        builder.put(index, targets[index] if index in cached else stand_in)
    with torch.device("cpu"):  # the user may have set another default device in this thread
        return builder.finish([])
