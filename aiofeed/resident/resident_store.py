"""``cache="device"``: stores for all samples and targets, where batches are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed import _load_addon as load_addon
from aiofeed.cache.item_codec import item_layout, item_parts, new_codec
from aiofeed.cache.layout import ItemLayout, Layout, NotCacheableError, Parts, as_bytes
from aiofeed.cache.store import EMPTY, WRITING, SampleStore
from aiofeed.kernel.core.errors import CacheError
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.core.validation import local_ranks
from aiofeed.kernel.runtime.tensors import as_tensor

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.cache.cached_fetcher import CachedFetcher
    from aiofeed.kernel.engine.fetchers import InnerFetcher

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

    def new_memory(self, config: Any) -> Any:
        """Return the samples as data of which batches are made once all are cached."""
        return load_addon("CachedMemory", 'cache="device"')(self)

    def has_all(self, indices: NDArray[np.int64] | None = None) -> bool:
        """Whether these samples are cached; without ``indices`` whether all are."""
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
        """A tensor for each part of the layout, [samples, ...], on the device if there is one; not a copy."""
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
        """The arrays of a row; read-only views."""
        assert self.layout is not None
        found = [part.view(column[index]) for part, column in zip(self.layout.parts, self._columns, strict=True)]
        for array in found:
            array.flags.writeable = False
        return found

    def data(self) -> list[torch.Tensor]:
        """A tensor for each part of the layout; views."""
        assert self.layout is not None
        columns = zip(self.layout.parts, self._columns, strict=True)
        return [
            as_tensor(HostTensor(rows.view(part.dtype).reshape(len(self), *part.shape), torch_dtype=part.torch_dtype))
            for part, rows in columns
        ]
