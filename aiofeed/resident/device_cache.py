"""``cache="device"``: stores for all samples and targets, where batches are used.

On a device, tensors of batches are completed with the samples that are cached there. The contents of a full store are
resident data: tensors from which rows are gathered, and batches formed of these rows.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiofeed.cache.layout import ItemLayout, Layout, NotCacheableError, Parts, as_bytes
from aiofeed.cache.sample_codec import ItemCodec, item_layout, item_parts, new_codec
from aiofeed.cache.store import EMPTY, WRITING, SampleStore
from aiofeed.common.mapped import MappedFiles
from aiofeed.kernel.core.errors import CacheError, DeviceCopyError
from aiofeed.kernel.core.faces import BaseCache, Exclusion, bind_decoder
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.core.types import DeferredTensor, HostTensor, Traits
from aiofeed.kernel.core.validation import local_ranks
from aiofeed.kernel.engine.fetch.collate import DefaultCollateBuilder
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensor, as_tensors
from aiofeed.kernel.sampling.epochs import EpochStream
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.resident.batch_ranges import BatchRanges
from aiofeed.resident.device_windows import filling, free_and_total, integer_dtype, rows_as_words, words_as_rows
from aiofeed.resident.pipeline import InlineData, ResidentPipeline

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.cache.cached_fetcher import CachedFetcher
    from aiofeed.kernel.core.faces import BaseDevice
    from aiofeed.kernel.engine.fetch.choose import InnerFetcher
    from aiofeed.kernel.feeder.arguments import FeederConfig


WAY_OUT = 'cache="host" caches as many as fit into host memory, and DiskCache(path) caches them in a file'


class ResidentStore(SampleStore):
    """Samples and targets of one process. Row ``i`` is sample ``i``, so that whole epochs can be permuted."""

    needs_layout = True

    def __init__(self, samples: int, batch_size: int) -> None:
        self._batch_size = batch_size
        super().__init__(samples)

    def _reset(self) -> None:
        super()._reset()
        self.targets: list[Any] = []
        self._target_layout: ItemLayout | None = None

    def _after_fork(self) -> None:
        # A child cannot use its parent's device memory, and would copy rows in host memory page by page.
        self._reset()

    def __len__(self) -> int:
        return self.samples

    def new_fetcher(self, inner: InnerFetcher, decode: Callable[..., Any] | None) -> CachedFetcher:
        """Return the fetcher that uses this store."""
        from aiofeed.cache.cached_fetcher import CachedFetcher

        return CachedFetcher(inner, new_codec(decode), self)

    @property
    def cached_samples(self) -> int:
        """How many samples are cached."""
        return int(np.count_nonzero(self.slots >= 0))

    def new_memory(self, config: Any) -> InlineCache:
        """Return the samples as data of which batches are made once all are cached."""
        return InlineCache(self)

    def has_all(self, indices: NDArray[np.int64] | None = None) -> bool:
        """Return whether these samples are cached; without ``indices`` whether all are."""
        return self.layout is not None and bool(
            (self.slots if indices is None else self.slots[indices]).min(initial=0) >= 0
        )

    def put_target(self, index: int, target: Any) -> None:
        """Cache a sample's target; called before ``put``.

        Raises:
            CacheError: The target cannot be cached, differs from the others, or such targets do not all fit.
        """
        try:
            if self._target_layout is None:
                with self._lock:
                    if self._target_layout is None:
                        layout = item_layout(target)
                        self._check_target_memory(layout)
                        self.targets = [None] * self.samples
                        self._target_layout = layout
            item_parts(target, self._target_layout)
        except NotCacheableError as error:
            raise CacheError(f'cache="device" caches targets, too, and not this one: {error}; {WAY_OUT}') from None
        self.targets[index] = target

    def _check_target_memory(self, target: ItemLayout) -> None:
        """Raise ``CacheError`` unless targets of this layout all fit beside the samples."""

    def data(self) -> list[torch.Tensor]:
        """Return a tensor for each part of the layout, [samples, ...], on the device if there is one; not a copy."""
        raise NotImplementedError

    def _check_memory(
        self, layout: Layout, free: int | None, where: str, *, what: str = "samples", cached: int = 0
    ) -> None:
        """Raise ``CacheError`` unless all samples, or targets, and two batches fit into the free memory, if known.

        ``cached``: bytes of each sample that are allocated already; a batch has them, too.
        """
        if free is not None and self.samples * layout.nbytes + self._two_batches(layout.nbytes + cached) > free:
            raise self._no_memory(layout, free, where, what=what, cached=cached)

    def _two_batches(self, sample_bytes: int) -> int:
        return 2 * min(self._batch_size, self.samples) * sample_bytes

    def _no_memory(
        self, layout: Layout, free: int | None, where: str, *, what: str = "samples", cached: int = 0
    ) -> CacheError:
        found = "" if free is None else f", which has {format_bytes(free)} free"
        return CacheError(
            f'cache="device" does not fit {where}{found}: {self.samples:,} {what} of {format_bytes(layout.nbytes)} '
            f"each ({layout}) take {format_bytes(self.samples * layout.nbytes)}, and two batches "
            f"{format_bytes(self._two_batches(layout.nbytes + cached))} beside them; {WAY_OUT}"
        )


class HostRows(ResidentStore):
    """Samples in host memory. ``free_memory`` returns the bytes of free memory, of one rank."""

    def __init__(self, samples: int, batch_size: int, free_memory: Callable[[], int]) -> None:
        self._free_memory = free_memory
        super().__init__(samples, batch_size)

    def _reset(self) -> None:
        super()._reset()
        self._columns: list[NDArray[np.uint8]] = []

    def _allocate(self, layout: Layout) -> Layout:
        ranks = local_ranks()
        shared = f" for each of {ranks} ranks" if ranks > 1 else ""
        free, where = self._free_memory(), f"into host memory{shared}"
        self._check_memory(layout, free, where)
        try:
            self._columns = [np.empty((self.samples, part.nbytes), np.uint8) for part in layout.parts]
        except MemoryError as error:
            raise self._no_memory(layout, free, where) from error
        self._arena = self._columns[0]
        return layout

    def put(self, index: int, parts: Parts, layout: Layout) -> None:
        """Cache a copy of a sample, unless it is cached already."""
        with self._lock:
            if self.slots[index] != EMPTY:
                return
            self.slots[index] = WRITING
        for column, part in zip(self._columns, parts, strict=True):
            column[index] = as_bytes(part)
        self.slots[index] = index

    def parts(self, index: int) -> Parts:
        """Return the arrays of a row; read-only views."""
        assert self.layout is not None
        found = [part.view(column[index]) for part, column in zip(self.layout.parts, self._columns, strict=True)]
        for array in found:
            array.flags.writeable = False
        return found

    def data(self) -> list[torch.Tensor]:
        """Return a tensor for each part of the layout; views."""
        assert self.layout is not None
        columns = zip(self.layout.parts, self._columns, strict=True)
        return [
            as_tensor(HostTensor(rows.view(part.dtype).reshape(len(self), *part.shape), torch_dtype=part.torch_dtype))
            for part, rows in columns
        ]


class DeviceStore(ResidentStore):
    """Samples on a device. Each arrives there with its batch and is copied out of the batch on the side stream."""

    on_device = True

    def _reset(self) -> None:
        super()._reset()
        # One element: the rows of each part of the layout, as words. Appending anything frees them, see ``free_with``.
        self._memory: deque[Any] = deque(maxlen=1)
        self._backend: BaseDevice | None = None

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

    def attach(self, backend: BaseDevice | None) -> None:
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
            with filling(backend):
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
        """Return the columns as tensors that exchange samples with this store on the device."""
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
        """Return a tensor for each part of the layout, on the device; use them on the side stream."""
        assert self.layout is not None
        return [
            words_as_rows(rows, part.shape, torch_dtype(part))
            for part, rows in zip(self.layout.parts, self.memory, strict=True)
        ]


class DeviceCache(BaseCache):
    """``cache="device"``: caches decoded samples where batches are used, on the device or in host memory."""

    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (('cache="device"',), ("a random decoder",), ValueError,
         'its augmentation runs on the CPU, sample by sample: use cache="host", or augment batches in transform='),
        (('cache="device"',), ("samples that are dicts",), TypeError,
         'it keeps one array of each sample: use cache="host" or cache=DiskCache(path)'),
        (("collate_fn=",), ('cache="device"',), ValueError,
         'batches are views of permuted rows: pass transform=, which gets each batch, or use cache="host"'),
        (('engine="process"',), ('cache="device"',), ValueError,
         'it is memory of this process: pass engine="thread", or cache=DiskCache(path), which processes share'),
        (("a list of devices",), ('cache="device"',), ValueError,
         "it keeps samples on one device: create one feeder for each device, with shard=(rank, world_size), or use "
         'cache="host"'),
        (("static_batches=True",), ('cache="device"',), ValueError,
         "batches are views, which need no copy: use copy_ to copy them into tensors of your own if addresses must not "
         'change, or use cache="host"'),
    )
    # fmt: on

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether the decoder is random, and whether samples are known to be dicts."""
        source, decode = arguments.adopted, arguments.decode or arguments.adopted.decoder
        random = decode is not None and new_codec(decode).random
        found = {"a random decoder": f"decode={decode!r}"} if random else {}
        dicts = source.traits.decode == "none" and any(isinstance(name, str) for name in source.structure() or ())
        return found | ({"samples that are dicts": repr(source)} if dicts else {})

    def open_store(self, config: FeederConfig) -> ResidentStore:
        """Return an empty store for the samples of a feeder."""
        new_codec(config.decode)
        if config.backend is None:
            return HostRows(config.length, config.batch_size, machine.rank_memory)
        return DeviceStore(config.length, config.batch_size)


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
        """Return the column on the device, in memory of its own. Runs on the side stream."""
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
    """Return the torch dtype of a layout's elements."""
    return as_tensor(HostTensor(np.empty(0, layout.dtype), torch_dtype=layout.torch_dtype)).dtype


# --- a full cache as resident data


class CachedData:
    """Cached samples and their targets, or cached items of a ``Dataset``, in the memory of the cache.

    Args:
        store: The cache. Samples that are not cached are never requested.
        axes: Permutation of a sample's dimensions from memory order to the user's order; ``None`` for none.
        targets: Whether a sample is ``(decoded, target)``.
    """

    traits: Traits = Traits(decode="none", in_memory=True)
    alias = False
    rows = None
    mapped: MappedFiles = MappedFiles(())

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


class InlineCache(InlineData):
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
        row = None if config.decode is None else bind_decoder(config.decode).row
        axes = None if row is None else row.axes
        return CachedData(self._store, axes, targets=config.source.target is not None)


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
