"""What a cache holds, as resident data: tensors to be permuted, and how a batch is put together of their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.device import DeviceStore
from aiofeed.cache.item_codec import ItemCodec
from aiofeed.cache.layout import ItemLayout
from aiofeed.cache.resident import ResidentStore
from aiofeed.core.pytree import leaves, map_leaves
from aiofeed.core.types import HostTensor
from aiofeed.engine.fetch.default_collate import DefaultCollateBuilder
from aiofeed.runtime.buffers import HostBufferPool
from aiofeed.runtime.tensors import as_tensor

if TYPE_CHECKING:
    import torch


class CachedData:
    """Decoded samples and their targets, or a ``Dataset``'s items, where they are kept.

    Args:
        store: what is kept; samples that are not are never asked for.
        axes: permutation of a sample's dimensions, from memory to what the user sees; ``None`` for none.
        targets: whether a sample is ``(decoded, target)``.
    """

    alias = False

    def __init__(self, store: ResidentStore, axes: tuple[int, ...] | None, *, targets: bool) -> None:
        self.samples = store.cached_samples
        self._name = f"{len(store):,} samples, each a {store.layout}"
        self._axes = None if axes is None else (0, *[axis + 1 for axis in axes])
        self.tensors: tuple[torch.Tensor, ...] = tuple(store.data())
        # So many of the tensors, the first ones, are on the device.
        self.there = len(self.tensors) if isinstance(store, DeviceStore) else 0
        self._items = store.layout if isinstance(store.layout, ItemLayout) else None
        self._structure: Any = None
        if targets:
            collated = _collated(store)
            self.tensors += tuple(as_tensor(leaf) if type(leaf) is HostTensor else leaf for leaf in leaves(collated))
            places = iter(range(1, len(self.tensors)))
            self._structure = map_leaves(lambda leaf: next(places), collated)

    def __repr__(self) -> str:
        return self._name

    def batch(self, rows: list[torch.Tensor]) -> Any:
        """A batch as it comes from the source, of the rows of each tensor."""
        if self._items is not None:
            return ItemCodec().batch(rows, self._items)
        first = rows[0] if self._axes is None else _permuted(rows[0], self._axes)
        if self._structure is None:
            return first
        if self._structure == 1:
            return [first, rows[1]]
        return [first, map_leaves(lambda place: rows[place], self._structure)]


def _permuted(rows: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    import torch

    if torch.is_inference_mode_enabled():  # it may be trained on outside
        with torch.inference_mode(False):
            return rows.permute(axes)
    return rows.permute(axes)


def _collated(store: ResidentStore) -> Any:
    """All targets as one batch; in the places of samples that are not kept stand others'."""
    import torch

    at = np.flatnonzero(store.slots >= 0)
    builder = DefaultCollateBuilder(len(store), HostBufferPool(0))
    known = store.targets
    stand_in = known[int(at[0])]
    kept = set(at.tolist())
    for index in range(len(store)):
        builder.put(index, known[index] if index in kept else stand_in)
    with torch.device("cpu"):  # the user may have set another as torch's default in this thread
        return builder.finish([])
