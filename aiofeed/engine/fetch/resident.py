"""The fetcher behind ``cache="device"``: what is on the device is neither read, nor decoded, nor copied there again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.decoder_codec import NotCacheableError
from aiofeed.cache.device import CachedRows, DeviceStore, Places
from aiofeed.cache.layout import Layout
from aiofeed.cache.resident import ResidentStore
from aiofeed.core.errors import CacheError
from aiofeed.core.types import BatchPlan, Row
from aiofeed.engine.fetch.cached import KEPT, CachedFetcher
from aiofeed.engine.fetch.collate import BatchBuilder, RowBatchBuilder
from aiofeed.engine.fetch.default_collate import Kept, compact
from aiofeed.runtime.buffers import BufferLease, array
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("aiofeed.engine")

# So many samples are tried, to learn what they look like, before an epoch is fed without that.
PROBES = 8


class HeldAssembly(RowBatchBuilder):
    """A batch of which some rows are on the device. What samples they are is noted as they come in."""

    def __init__(
        self, row: Row, samples: int, lease: BufferLease, *, targets: bool, torch_dtype: str | None, store: DeviceStore
    ) -> None:
        super().__init__(row, samples, lease, targets=targets, torch_dtype=torch_dtype)
        self._indices: NDArray[np.int64] = array(lease, (samples,), np.dtype(np.int64))
        self._there = np.zeros(samples, np.bool_)
        self._store = store

    def placed(self, position: int, index: int, *, there: bool) -> None:
        """A sample has come in, or another in its place."""
        self._indices[position] = index
        self._there[position] = there

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """The rows, to be completed on the device, or the list of rows and targets."""
        batch = super().finish(keys, kept)
        rows = batch if self._targets is None else batch[0]
        indices, there = compact(self._indices, kept), compact(self._there, kept)
        held = CachedRows(rows, Places(indices, there, self._store, pinned=rows.pinned))
        return held if self._targets is None else [held, *batch[1:]]


class ResidentFetcher(CachedFetcher):
    """Bytes from a source through a decoder, once, for a store of all samples. Arguments as of ``CachedFetcher``."""

    _store: ResidentStore

    def builder(self, samples: int, lease: BufferLease) -> HeldAssembly | None:
        """Where a batch for a device is put together; ``None`` where nothing is kept on one."""
        layout = self._store.layout
        if not isinstance(self._store, DeviceStore) or layout is None:
            return None
        axes = self._decoder.row.axes if self._decodes_rows else None  # type: ignore[attr-defined]
        return HeldAssembly(
            Row(layout.shape, layout.dtype, axes),
            samples,
            lease,
            targets=self.has_targets,
            torch_dtype=layout.torch_dtype,
            store=self._store,
        )

    async def prepare(self, decode_pool: ThreadPool) -> None:
        """Learn what samples look like from one of the first that can be decoded; the store takes its memory.

        Raises:
            CacheError: it cannot be kept, or there is no room for all.
        """
        loop, store = asyncio.get_running_loop(), self._store
        tried = min(PROBES, self._length)
        for index in range(tried):
            if store.layout is not None:
                return
            [data] = (await self._reader.read([index])).samples
            if isinstance(data, BaseException):
                continue
            work = loop.run_in_executor(decode_pool, self._layout_of, index, data)
            try:
                layout = await asyncio.wait_for(work, self._policy.decode_timeout_s)
            except TimeoutError:
                continue  # as with one that cannot be decoded: it fails again, by name, when it is met
            if layout is not None:
                store.settle(layout)
        if tried and store.layout is None:
            log.warning("none of the first %d samples can be decoded, so that none are kept on this pass", tried)

    def _layout_of(self, index: int, data: Any) -> Layout | None:
        try:
            return self._form.decode(data)[1]
        except NotCacheableError as error:
            raise self._named(error, index, reading=False) from None
        except BaseException:  # noqa: BLE001 - the user's decoder: it raises again, by name, when the sample is met
            return None

    def _make(
        self, plan: BatchPlan, position: int, data: Any, out: NDArray[Any] | None
    ) -> tuple[NDArray[Any] | None, Any]:
        if data is KEPT and isinstance(self._store, DeviceStore):
            return None, None
        return super()._make(plan, position, data, out)

    def _note(self, index: int, target: Any) -> None:
        try:
            if self._target is not None:
                self._store.note(index, target)
        except CacheError as error:
            raise CacheError(f"sample {self.key(index)!r}: {error}") from None

    def _placed(self, builder: BatchBuilder, position: int, index: int, *, there: bool) -> None:
        if isinstance(builder, HeldAssembly):
            builder.placed(position, index, there=there)

    def _settle(self, layout: Layout, index: int) -> None:
        # A batch is for a device that keeps it from its beginning, or not at all.
        if self._store.layout is not None or not isinstance(self._store, DeviceStore):
            super()._settle(layout, index)
