"""Decoded samples that stay where batches are wanted, all of them: in host memory, or on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.host import local_ranks
from aiofeed.cache.layout import Layout, told_bytes
from aiofeed.cache.store import Store
from aiofeed.errors import CacheError
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
_WAY_OUT = 'cache="host" keeps as many as fit into host memory, and DiskCache(path) keeps them in a file'


class ResidentStore(Store):
    """Rows and targets of one process: row ``i`` is sample ``i``, so that epochs can be permuted out of them.

    Args:
        samples: length of the source.
        batch_size: samples per batch.
    """

    def __init__(self, samples: int, batch_size: int) -> None:
        self._batch_size = batch_size
        super().__init__(samples)

    def _blank(self) -> None:
        super()._blank()
        self.targets: list[Any] = []
        self._kind: Any = None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("targets", "_kind")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def _inherit(self) -> None:
        # A child has no use for a device's memory of its parent's, and rows of the host it would copy page by page.
        self._blank()

    def __len__(self) -> int:
        return self.samples

    @property
    def slots(self) -> NDArray[np.int64]:
        """By sample: not below 0 where it is kept."""
        return self._slots

    @property
    def held(self) -> int:
        """How many samples are kept."""
        return int(np.count_nonzero(self._slots >= 0))

    def holds(self, indices: NDArray[np.int64] | None = None) -> bool:
        """Whether all samples are kept, or all of these."""
        return self.layout is not None and bool(
            (self._slots if indices is None else self._slots[indices]).min(initial=0) >= 0
        )

    def note(self, index: int, target: Any) -> None:
        """Keep a sample's target; before its row.

        Raises:
            CacheError: it cannot stand in a tensor with the others.
        """
        kind = kind_of(target)
        if kind is None:
            raise CacheError(
                f'cache="device" keeps targets that are numbers, tensors, arrays, or tuples and dicts of these, and '
                f"this one is a {type(target).__name__}: {str(target)[:80]!r}; {_WAY_OUT}"
            )
        with self._lock:
            if not self.targets:
                self.targets = [None] * self.samples
                self._kind = kind
        if kind != self._kind:
            raise CacheError(
                f'cache="device" keeps targets that are all alike; the first was {self._kind}, this one is {kind}; '
                f"{_WAY_OUT}"
            )
        self.targets[index] = target

    def data(self) -> Any:
        """The rows, [samples, ...]: a tensor, on the device where there is one. As the decoder's memory has them."""
        raise NotImplementedError

    def _check_room(self, layout: Layout, free: int | None, where: str) -> None:
        """``CacheError`` where the whole, and two batches beside it, do not fit into what is free."""
        if free is not None and (self.samples + 2 * self._samples_of_batch()) * layout.nbytes > free:
            raise self._no_room(layout, free, where)

    def _samples_of_batch(self) -> int:
        return min(self._batch_size, self.samples)

    def _no_room(self, layout: Layout, free: int | None, where: str) -> CacheError:
        found = "" if free is None else f", which has {told_bytes(free)} free"
        return CacheError(
            f'cache="device" does not fit {where}{found}: {self.samples:,} samples of {told_bytes(layout.nbytes)} each '
            f"({layout}) take {told_bytes(self.samples * layout.nbytes)}, and two batches "
            f"{told_bytes(2 * self._samples_of_batch() * layout.nbytes)} beside them; {_WAY_OUT}"
        )


class HostRows(ResidentStore):
    """Rows in host memory.

    Args:
        samples, batch_size: as of ``ResidentStore``.
        free_memory: how much there is.
    """

    def __init__(self, samples: int, batch_size: int, free_memory: Callable[[], int]) -> None:
        self._free_memory = free_memory
        super().__init__(samples, batch_size)

    def _open(self, layout: Layout) -> None:
        ranks = local_ranks()
        shared = f" for each of {ranks} ranks" if ranks > 1 else ""
        free, where = self._free_memory() // ranks, f"into host memory{shared}"
        self._check_room(layout, free, where)
        try:
            self._arena = np.empty((self.samples, layout.nbytes), np.uint8)
        except MemoryError as error:
            raise self._no_room(layout, free, where) from error

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Keep a sample. A second time it has the same bytes."""
        if self._slots[index] < 0:
            self._arena[index] = row
            self._slots[index] = index

    def data(self) -> torch.Tensor:
        """The rows; a view."""
        import torch

        assert self.layout is not None
        layout = self.layout
        rows = torch.from_numpy(self._arena.view(layout.dtype).reshape(self.samples, *layout.shape))
        return rows if layout.torch_dtype is None else rows.view(getattr(torch, layout.torch_dtype))


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


def kind_of(target: Any) -> str | None:
    """What two targets must have in common to stand in one tensor, or one structure of tensors; ``None``: nothing."""
    if type(target) in (int, float, bool) or isinstance(target, np.generic):
        kind = type(target).__name__
        return kind if not isinstance(target, np.generic) or target.dtype.kind in "biufc" else None
    if isinstance(target, np.ndarray):
        return f"array {target.dtype} {list(target.shape)}" if target.dtype.kind in "biufc" else None
    if isinstance(target, Mapping):
        kinds = {str(name): kind_of(value) for name, value in target.items()}
        return None if type(target) is not dict or None in kinds.values() else f"dict {kinds}"
    if isinstance(target, tuple | list):
        parts = [kind_of(value) for value in target]
        return None if not parts or None in parts else f"{type(target).__name__} ({', '.join(map(str, parts))})"
    if hasattr(target, "__torch_function__") and hasattr(target, "layout"):
        plain = str(target.layout) == "torch.strided" and str(target.device) == "cpu" and not target.requires_grad
        return f"tensor {target.dtype} {list(target.shape)}" if plain else None
    return None
