"""Decoded samples cached on a device, and the tensors of batches that are completed there."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.item_codec import new_codec
from aiofeed.cache.layout import ItemLayout, Layout, Parts
from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import DeferredTensor, HostTensor
from aiofeed.kernel.devices.cuda import allocating
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.tensors import as_tensor, integer_dtype, rows_as_words, words_as_rows
from aiofeed.resident.device_windows import free_and_total
from aiofeed.resident.resident_store import HostRows, ResidentStore

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.kernel.devices.backend import DeviceBackend
    from aiofeed.kernel.feeder.arguments import FeederConfig


class DeviceCache:
    """``cache="device"``: caches decoded samples where batches are used, on the device or in host memory."""

    def facts(self, decode: Callable[..., Any] | None) -> set[str]:
        """Return what holds for this cache and a decoder, by the names of the table of a feeder's rules."""
        random = decode is not None and new_codec(decode).random
        return {'cache="device"', "a random decoder"} if random else {'cache="device"'}

    def open_store(self, config: FeederConfig) -> ResidentStore:
        """Return an empty store for the samples of a feeder."""
        new_codec(config.decode)
        if config.backend is None:
            return HostRows(config.length, config.batch_size, machine.rank_memory)
        return DeviceStore(config.length, config.batch_size)


class DeviceStore(ResidentStore):
    """Samples on a device. Each arrives there with its batch and is copied out of the batch on the side stream."""

    on_device = True

    def _reset(self) -> None:
        super()._reset()
        # One element: the rows of each part of the layout, as words. Appending anything frees them, see ``free_with``.
        self._memory: deque[Any] = deque(maxlen=1)
        self._backend: DeviceBackend | None = None

    def _after_fork(self) -> None:
        backend = self._backend
        super()._after_fork()
        self._backend = backend  # the child attached its own backend before ``open``

    @property
    def memory(self) -> list[torch.Tensor]:
        """The samples' rows of each part of the layout, as words, on the device."""
        tensors: list[torch.Tensor] = self._memory[0]
        return tensors

    def free_with(self, owner: object) -> None:
        """Free the memory when ``owner`` is dropped. The callback is a C function: no Python code runs in it."""
        self._owner = weakref.ref(owner, self._memory.append)

    def attach(self, backend: DeviceBackend | None) -> None:
        """Set the device that samples are cached on."""
        self._backend = backend

    def _allocate(self, layout: Layout) -> Layout:
        """Allocate memory for all samples, so that an allocation can fail only before training starts."""
        import torch

        backend = self._backend
        assert backend is not None
        free, where = self._free_memory()
        self._check_memory(layout, free, where)
        tensors: list[torch.Tensor] = []
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                allocating(backend.device),
                backend.use_stream(backend.side_stream()),
            ):
                for part in layout.parts:
                    seed = torch.from_numpy(np.empty(1, integer_dtype(np.dtype(part.dtype))))
                    one = backend.copy(seed)
                    # The copy reads host memory when it runs.
                    backend.record(backend.side_stream()).synchronize()
                    tensors.append(rows_as_words(one.new_empty((self.samples, *part.shape))))
        except torch.OutOfMemoryError as error:
            tensors.clear()
            # Without the traceback, whose frames refer to device memory.
            raise self._no_memory(layout, free, where) from error.with_traceback(None)
        except Exception as error:
            raise DeviceCopyError(
                f"taking memory for the cache on {backend.name} failed: {type(error).__name__}: {error}"
            ) from error
        self._memory.append(tensors)
        return layout

    def _free_memory(self) -> tuple[int | None, str]:
        """Free bytes on the device, ``None`` if unknown, and the device's name for errors."""
        backend = self._backend
        assert backend is not None
        if (found := free_and_total(backend)) is None:
            return None, f"on {backend.name}"
        return found[0], f"on {backend.name} ({format_bytes(found[1])})"

    def _check_target_memory(self, target: ItemLayout) -> None:
        # Targets are copied to the device once all samples are cached. The check runs with the first target, before
        # any batch is on the device.
        assert self.layout is not None
        self._check_memory(target, *self._free_memory(), what="targets", cached=self.layout.nbytes)

    def put(self, index: int, parts: Parts, layout: Layout) -> None:
        """Do nothing: a sample is cached when its batch is on the device."""

    def copy_rows(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Do nothing: cached samples are added to the batch on the device."""

    def complete(
        self, columns: list[HostTensor], indices: NDArray[np.int64], cached: NDArray[np.bool_], *, pinned: bool
    ) -> list[Any]:
        """The columns as tensors that exchange samples with this store on the device."""
        samples = BatchSamples(indices, cached, self, pinned=pinned)
        return [CachedRows(rows, samples, column) for column, rows in enumerate(columns)]

    def scatter(self, at: torch.Tensor, rows: torch.Tensor, indices: NDArray[np.int64], column: int) -> None:
        """Copy rows of a batch, as words, into a column; on the current stream.

        The columns of a batch arrive in order. With the last one its samples count as cached.
        """
        self.memory[column].index_copy_(0, at, rows)
        if column == len(self.memory) - 1:
            self.slots[indices] = indices

    def data(self) -> list[torch.Tensor]:
        """A tensor for each part of the layout, on the device; use them on the side stream."""
        assert self.layout is not None
        return [
            words_as_rows(rows, part.shape, torch_dtype(part))
            for part, rows in zip(self.layout.parts, self.memory, strict=True)
        ]


class BatchSamples:
    """The samples of one batch, and which of them were cached when they were requested; shared by its columns."""

    def __init__(
        self, indices: NDArray[np.int64], cached: NDArray[np.bool_], store: DeviceStore, *, pinned: bool
    ) -> None:
        self.indices = indices
        self.store = store
        self.cached: NDArray[np.intp] = np.flatnonzero(cached)
        self._pinned = pinned
        self._copies: dict[str, torch.Tensor] = {}

    @cached_property
    def new(self) -> NDArray[np.int64]:
        """Positions of the samples to cache; computed when the first column arrives.

        Each sample is listed once: if two rows are written to one place at the same time, a device may mix them.
        """
        missing = np.flatnonzero(~self.store.has(self.indices))
        _, first = np.unique(self.indices[missing], return_index=True)
        return missing if len(first) == len(missing) else missing[np.sort(first)]

    def on_device(self, name: str, numbers: NDArray[np.int64], copy: Callable[[HostTensor], Any]) -> torch.Tensor:
        """``numbers`` on the device; copied once under this name."""
        if name not in self._copies:
            self._copies[name] = copy(HostTensor(numbers, pinned=self._pinned and numbers is self.indices))
        return self._copies[name]


class CachedRows(DeferredTensor):
    """A column of a batch. On the device it gets the cached samples' rows, and the store gets the new samples' rows.

    Before that, the rows of cached samples are undefined.
    """

    def __init__(self, rows: HostTensor, samples: BatchSamples, column: int) -> None:
        self._rows = rows
        self._samples = samples
        self._column = column

    def arrive(self, copy: Callable[[HostTensor], Any]) -> Any:
        """The column on the device, in memory of its own. Runs on the side stream."""
        import torch

        samples, column = self._samples, self._column
        store = samples.store
        assert store.layout is not None
        with torch.no_grad():
            if len(samples.cached) == len(samples.indices):
                rows = store.memory[column].index_select(0, samples.on_device("indices", samples.indices, copy))
            else:
                memory = self._rows.memory
                rows = rows_as_words(
                    copy(HostTensor(memory.view(integer_dtype(memory.dtype)), pinned=self._rows.pinned))
                )
                self._store_new(rows, copy)
                if len(cached := samples.cached):
                    indices = samples.on_device("cached indices", samples.indices[cached], copy)
                    found = store.memory[column].index_select(0, indices)
                    rows.index_copy_(0, samples.on_device("cached", cached, copy), found)
            part = store.layout.parts[column]
            rows = words_as_rows(rows, part.shape, torch_dtype(part))
        axes = self._rows.axes
        return rows if axes is None else rows.permute(axes)

    def _store_new(self, rows: torch.Tensor, copy: Callable[[HostTensor], Any]) -> None:
        samples, new = self._samples, self._samples.new
        store, column = samples.store, self._column
        if len(new) == len(samples.indices):
            store.scatter(samples.on_device("indices", samples.indices, copy), rows, samples.indices, column)
        elif len(new):
            new_rows = rows.index_select(0, samples.on_device("new", new, copy))
            indices = samples.indices[new]
            store.scatter(samples.on_device("new indices", indices, copy), new_rows, indices, column)


def torch_dtype(layout: Layout) -> torch.dtype:
    """The torch dtype of a layout's elements."""
    return as_tensor(HostTensor(np.empty(0, layout.dtype), torch_dtype=layout.torch_dtype)).dtype
