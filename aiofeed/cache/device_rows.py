"""Decoded samples on a device, and batches that are completed there from what is on it already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import Layout, told_bytes
from aiofeed.cache.resident import ResidentStore
from aiofeed.types import ArrayLeaf, DeviceLeaf

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.device import DeviceBackend

# What carries a number of so many bytes where only its place changes: not every dtype has every operation.
_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


class DeviceRows(ResidentStore):
    """Rows on a device. They get there with their batch, and are copied from it on the side stream.

    Args:
        samples, batch_size: as of ``ResidentStore``.
    """

    def _blank(self) -> None:
        super()._blank()
        # The rows, once there is room for them: in a list, that whoever ends their life empties it by a C function.
        self.memory: list[torch.Tensor] = []
        self._backend: DeviceBackend | None = None

    def _inherit(self) -> None:
        backend = self._backend
        super()._inherit()
        self._backend = backend  # of this process: it attached it before it asked for rows

    def __getstate__(self) -> dict[str, Any]:
        mine = ("memory", "_backend")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def attach(self, backend: DeviceBackend) -> None:
        """The device; before anything is kept."""
        self._backend = backend

    def _open(self, layout: Layout) -> None:
        """Take the memory, so that what is missing is missed before training starts."""
        import torch

        backend = self._backend
        assert backend is not None
        memory: Callable[[], tuple[int, int] | None] | None = getattr(backend, "memory", None)
        found = None if memory is None else memory()
        free = None if found is None else found[0]
        where = f"on {backend.name}" + ("" if found is None else f" ({told_bytes(found[1])})")
        self._check_room(layout, free, where)
        try:
            with torch.inference_mode(False), torch.no_grad(), backend.on(backend.side_stream()):
                seed = torch.from_numpy(np.empty(1, carrier(np.dtype(layout.dtype))))
                one = backend.copy(seed)
                # The copy reads the host's memory when it runs.
                backend.record(backend.side_stream()).synchronize()
                self.memory.append(one.new_empty((self.samples, *layout.shape)))
        except torch.OutOfMemoryError as error:
            # Without the traceback, whose frames hold device memory.
            raise self._no_room(layout, free, where) from error.with_traceback(None)

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Nothing to do: it is kept when its batch is on the device."""

    def take(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Nothing to do: they come to their batch on the device."""

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows at indices on the device, in memory of their own; on the current stream."""
        return self.memory[0].index_select(0, indices)

    def keep(self, at: torch.Tensor, rows: torch.Tensor, indices: NDArray[np.int64]) -> None:
        """Copy rows to where they stay; on the current stream, which later work on them follows."""
        self.memory[0].index_copy_(0, at, rows)
        self._slots[indices] = indices

    def data(self) -> torch.Tensor:
        """The rows, on the device; work on them belongs on the side stream."""
        assert self.layout is not None
        return self.memory[0].view(torch_dtype(self.layout))


class HeldLeaf(DeviceLeaf):
    """A batch's rows, some of which are on the device already: the others are copied there, and kept.

    Args:
        rows: the batch in host memory; what stands in rows that are there does not matter.
        indices: int64 [N], which samples they are.
        there: bool [N], which are on the device.
        store: where they are.
    """

    def __init__(
        self, rows: ArrayLeaf, indices: NDArray[np.int64], there: NDArray[np.bool_], store: DeviceRows
    ) -> None:
        self._rows = rows
        self._indices = indices
        self._there = there
        self._store = store

    def arrive(self, copy: Callable[[ArrayLeaf], Any]) -> Any:
        """The batch on the device, in memory of its own. On the side stream."""
        import torch

        store, layout = self._store, self._store.layout
        assert layout is not None
        pinned = self._rows.pinned
        with torch.no_grad():
            if self._there.all():
                rows = store.gather(copy(ArrayLeaf(self._indices, pinned=pinned)))
            else:
                memory = self._rows.memory
                rows = copy(ArrayLeaf(memory.view(carrier(memory.dtype)), pinned=pinned))
                if not self._there.any():
                    store.keep(copy(ArrayLeaf(self._indices, pinned=pinned)), rows, self._indices)
                else:
                    self._mix(rows, copy)
            rows = rows.view(torch_dtype(layout))
        axes = self._rows.axes
        return rows if axes is None else rows.permute(axes)

    def _mix(self, rows: Any, copy: Callable[[ArrayLeaf], Any]) -> None:
        old, new = np.flatnonzero(self._there), np.flatnonzero(~self._there)
        held, fresh = (copy(ArrayLeaf(self._indices[at])) for at in (old, new))
        self._store.keep(fresh, rows.index_select(0, copy(ArrayLeaf(new))), self._indices[new])
        rows.index_copy_(0, copy(ArrayLeaf(old)), self._store.gather(held))


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The integers of a dtype's size, where there are such."""
    found = _CARRIERS.get(dtype.itemsize)
    return dtype if found is None else found


def torch_dtype(layout: Layout) -> torch.dtype:
    """What torch calls the elements."""
    import torch

    if layout.torch_dtype is not None:
        found: torch.dtype = getattr(torch, layout.torch_dtype)
        return found
    return torch.from_numpy(np.empty(0, layout.dtype)).dtype
