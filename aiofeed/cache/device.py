"""Decoded samples on a device, and batches that are completed there from what is on it already."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import Layout
from aiofeed.cache.resident import WAY_OUT, ResidentStore, kind_of, target_bytes
from aiofeed.core.errors import CacheError, DeviceCopyError
from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import DeferredTensor, HostTensor
from aiofeed.runtime.tensors import integer_dtype

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend


class DeviceStore(ResidentStore):
    """Rows on a device. They get there with their batch, and are copied from it on the side stream.

    Args:
        samples, batch_size: as of ``ResidentStore``.
    """

    def _blank(self) -> None:
        super()._blank()
        # The columns, once there is room for them: in a list, that whoever ends their life empties it by a C function.
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
        free, where = self._free()
        self._check_room(layout, free, where)
        self.memory.clear()  # of an attempt that failed
        try:
            with torch.inference_mode(False), torch.no_grad(), backend.use_stream(backend.side_stream()):
                for column in layout.columns:
                    seed = torch.from_numpy(np.empty(1, integer_dtype(np.dtype(column.dtype))))
                    one = backend.copy(seed)
                    # The copy reads the host's memory when it runs.
                    backend.record(backend.side_stream()).synchronize()
                    self.memory.append(one.new_empty((self.samples, *column.shape)))
        except torch.OutOfMemoryError as error:
            self.memory.clear()
            # Without the traceback, whose frames hold device memory.
            raise self._no_room(layout, free, where) from error.with_traceback(None)
        except Exception as error:
            raise DeviceCopyError(
                f"taking memory for the cache on {backend.name} failed: {type(error).__name__}: {error}"
            ) from error

    def _free(self) -> tuple[int | None, str]:
        """Bytes of the device's memory that are free, ``None`` where that is not known, and what errors call it."""
        backend = self._backend
        assert backend is not None
        memory: Callable[[], tuple[int, int] | None] | None = getattr(backend, "memory", None)
        found = None if memory is None else memory()
        if found is None:
            return None, f"on {backend.name}"
        return found[0], f"on {backend.name} ({format_bytes(found[1])})"

    def _check_targets(self, target: Any) -> None:
        # They go to the device once all samples are there; looked at with the first, which no batch has come before.
        layout, each = self.layout, target_bytes(target)
        assert layout is not None
        free, where = self._free()
        beside = 2 * self._samples_of_batch() * (layout.nbytes + each)
        if free is not None and self.samples * each + beside > free:
            raise CacheError(
                f'cache="device" does not fit {where}, which has {format_bytes(free)} free beside its samples: '
                f"{self.samples:,} targets of {format_bytes(each)} each ({kind_of(target)}) take "
                f"{format_bytes(self.samples * each)}, and two batches {format_bytes(beside)} beside them; {WAY_OUT}"
            )

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Nothing to do: it is kept when its batch is on the device."""

    def take(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Nothing to do: they come to their batch on the device."""

    def gather(self, indices: torch.Tensor, column: int) -> torch.Tensor:
        """Rows of a column at indices on the device, in memory of their own; on the current stream."""
        return self.memory[column].index_select(0, indices)

    def keep(self, at: torch.Tensor, rows: torch.Tensor, indices: NDArray[np.int64], column: int) -> None:
        """Copy rows to where they stay; on the current stream, which later work on them follows.

        The columns of a batch come in their order: with the last of them its samples are there.
        """
        self.memory[column].index_copy_(0, at, rows)
        if column == len(self.memory) - 1:
            self._slots[indices] = indices

    def data(self) -> list[torch.Tensor]:
        """The rows, on the device; work on them belongs on the side stream."""
        assert self.layout is not None
        return [rows.view(torch_dtype(column)) for column, rows in zip(self.layout.columns, self.memory, strict=True)]


class Places:
    """Which samples a batch has, and which of them are on the device; for the leaves of one batch, one after another.

    Args:
        indices: int64 [N], the samples.
        there: bool [N], which are on the device already.
        store: where they are.
        pinned: whether ``indices`` is page-locked.
    """

    def __init__(
        self, indices: NDArray[np.int64], there: NDArray[np.bool_], store: DeviceStore, *, pinned: bool
    ) -> None:
        self.indices = indices
        self.store = store
        self.old = np.flatnonzero(there)
        self._pinned = pinned
        self._copies: dict[str, torch.Tensor] = {}

    @cached_property
    def new(self) -> NDArray[np.int64]:
        """Positions of what is to be kept; asked for when the first leaf arrives.

        Once each: of two that are written to one place at the same time, a device might keep some of either.
        """
        missing = np.flatnonzero(~self.store.has(self.indices))
        _, first = np.unique(self.indices[missing], return_index=True)
        return missing if len(first) == len(missing) else missing[np.sort(first)]

    def copied(self, name: str, numbers: NDArray[np.int64], copy: Callable[[HostTensor], Any]) -> torch.Tensor:
        """``numbers`` on the device, copied there for the first leaf that asks for them."""
        if name not in self._copies:
            self._copies[name] = copy(HostTensor(numbers, pinned=self._pinned and numbers is self.indices))
        return self._copies[name]


class CachedRows(DeferredTensor):
    """A batch's rows, some of which are on the device already: the others are copied there, and kept.

    Args:
        rows: the batch in host memory; what stands in rows that are there does not matter.
        places: which samples they are.
        column: in which of the store's columns they are.
    """

    def __init__(self, rows: HostTensor, places: Places, column: int = 0) -> None:
        self._rows = rows
        self._places = places
        self._column = column

    def arrive(self, copy: Callable[[HostTensor], Any]) -> Any:
        """The batch on the device, in memory of its own. On the side stream."""
        import torch

        places, column = self._places, self._column
        store = places.store
        assert store.layout is not None
        with torch.no_grad():
            if len(places.old) == len(places.indices):
                rows = store.gather(places.copied("all", places.indices, copy), column)
            else:
                memory = self._rows.memory
                rows = copy(HostTensor(memory.view(integer_dtype(memory.dtype)), pinned=self._rows.pinned))
                self._keep(rows, copy)
                if len(old := places.old):
                    held = store.gather(places.copied("held", places.indices[old], copy), column)
                    rows.index_copy_(0, places.copied("old", old, copy), held)
            rows = rows.view(torch_dtype(store.layout.columns[column]))
        axes = self._rows.axes
        return rows if axes is None else rows.permute(axes)

    def _keep(self, rows: torch.Tensor, copy: Callable[[HostTensor], Any]) -> None:
        places, new = self._places, self._places.new
        store, column = places.store, self._column
        if len(new) == len(places.indices):
            store.keep(places.copied("all", places.indices, copy), rows, places.indices, column)
        elif len(new):
            fresh = rows.index_select(0, places.copied("new", new, copy))
            indices = places.indices[new]
            store.keep(places.copied("fresh", indices, copy), fresh, indices, column)


def torch_dtype(layout: Layout) -> torch.dtype:
    """What torch calls the elements."""
    import torch

    if layout.torch_dtype is not None:
        found: torch.dtype = getattr(torch, layout.torch_dtype)
        return found
    return torch.from_numpy(np.empty(0, layout.dtype)).dtype
