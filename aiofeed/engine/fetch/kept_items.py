"""The fetcher of a ``Dataset`` with a cache: what is kept is not asked for again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.decoder_codec import NotCacheableError
from aiofeed.cache.device import CachedRows, DeviceStore, Places
from aiofeed.cache.item_codec import batch_of, item_layout, item_of, parts_of
from aiofeed.cache.layout import ItemLayout, Layout
from aiofeed.cache.resident import ResidentStore
from aiofeed.cache.store import SampleStore
from aiofeed.core.errors import CacheError, FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import BatchPlan, HostTensor
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.dataset import DatasetFetcher
from aiofeed.engine.fetch.default_collate import Kept, compact
from aiofeed.engine.fetch.fetcher import ChunkOutcome
from aiofeed.engine.fetch.user_errors import without_our_frames
from aiofeed.runtime.buffers import BufferLease, array
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.runtime.time_limits import JobControl, JobDeadline, JobStuckError, StopFlag, run_with_sample_timeout
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.dataset_slots import DatasetSlot

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("aiofeed.engine")

# So many items are tried, to learn what they look like, before an epoch is fed without that.
PROBES = 8


class HeldItemsAssembly:
    """A batch of items of which some are on the device. What samples they are is noted as they come in.

    Args:
        samples: how many.
        lease: the batch's memory.
        store: where items are, or are going to be.
        layout: of an item.
    """

    def __init__(self, samples: int, lease: BufferLease, store: DeviceStore, layout: ItemLayout) -> None:
        self._rows = [array(lease, (samples, *part.shape), np.dtype(part.dtype)) for part in layout.parts]
        self._indices: NDArray[np.int64] = array(lease, (samples,), np.dtype(np.int64))
        self._there = np.zeros(samples, np.bool_)
        self._pinned = lease.pinned
        self._store = store
        self._layout = layout

    def put(self, position: int, sample: Any) -> None:
        """Copy an item's parts into their rows.

        Raises:
            UnfitError: it is not like the others.
        """
        for rows, part in zip(self._rows, parts_of(sample, self._layout), strict=True):
            rows[position] = part

    def placed(self, position: int, index: int, *, there: bool) -> None:
        """A sample has come in, or another in its place."""
        self._indices[position] = index
        self._there[position] = there

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """The batch, to be completed on the device."""
        indices, there = compact(self._indices, kept), compact(self._there, kept)
        places = Places(indices, there, self._store, pinned=self._pinned)
        leaves = [
            CachedRows(HostTensor(compact(rows, kept), pinned=self._pinned), places, column)
            for column, rows in enumerate(self._rows)
        ]
        return batch_of(leaves, self._layout)

    @property
    def nbytes(self) -> int:
        """Bytes of slot memory."""
        return sum(rows.nbytes for rows in self._rows)


class KeptItemsFetcher(DatasetFetcher):
    """Items of a ``Dataset``, each once.

    Args:
        source, policy: as of ``DatasetFetcher``.
        store: what is kept.

    Raises:
        CacheError: the store cannot be used.
    """

    def __init__(self, source: FromDataset, policy: FailurePolicy | None = None, *, store: SampleStore) -> None:
        super().__init__(source, policy)
        self._store = store
        # What was asked for to learn what items look like, as rows of bytes, until the device has it.
        self._known: dict[int, NDArray[np.uint8]] = {}
        store.begin(None)

    def builder(self, samples: int, lease: BufferLease) -> HeldItemsAssembly | None:
        """Where a batch for a device is put together; ``None`` where nothing is kept on one."""
        layout = self._layout
        if not isinstance(self._store, DeviceStore) or layout is None:
            return None
        return HeldItemsAssembly(samples, lease, self._store, layout)

    async def prepare(self, decode_pool: ThreadPool) -> None:
        """Learn what items look like from one of the first; a store of all of them takes its memory.

        Raises:
            CacheError: it cannot be kept, or there is no room for all.
        """
        store = self._store
        if not isinstance(store, ResidentStore):
            return
        tried = min(PROBES, store.samples)
        for index in range(tried):
            if store.layout is not None:
                return
            stop = StopFlag()
            try:
                found = await self._probe_within(decode_pool, index, stop)
            finally:
                stop.stopped = True
            # One that cannot be had, or not in time, fails again, by name, when it is met.
            if found is not None:
                layout, row = found
                store.settle(layout)
                store.put(index, row)
                if isinstance(store, DeviceStore):
                    self._known[index] = row
        if tried and store.layout is None:
            log.warning("none of the first %d items can be had, so that none are kept on this pass", tried)

    async def _probe_within(
        self, decode_pool: ThreadPool, index: int, stop: StopFlag
    ) -> tuple[ItemLayout, NDArray[np.uint8]] | None:
        """An item and its form within the limit, in which waiting for other passes does not count."""
        if self.limit_s is None:
            return await asyncio.get_running_loop().run_in_executor(decode_pool, self._probe, index, stop, None)
        deadline = JobDeadline(self.limit_s)
        try:
            found, _ = await run_with_sample_timeout(decode_pool, partial(self._probe, index, stop, deadline), deadline)
        except JobStuckError:
            return None
        return found

    def _probe(
        self, index: int, stop: StopFlag, deadline: JobDeadline | None
    ) -> tuple[ItemLayout, NDArray[np.uint8]] | None:
        with DatasetSlot(self._source, index, JobControl(stop, deadline)):
            if deadline is not None:
                deadline.begin(index)
            try:
                [item] = self._source.items([index])
            except BaseException:  # noqa: BLE001 - the user's Dataset: it raises again, by name, when the sample is met
                return None
        try:
            layout = item_layout(item)
            # A copy: a Dataset may give the same memory each time.
            return layout, layout.pack(parts_of(item, layout)).copy()
        except NotCacheableError as error:
            raise self._named(error, index) from None

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
        """Put what is kept into its places, then get the other items."""
        positions = range(start, start + len(encoded))
        has = self._store.has(np.asarray(plan.indices[positions.start : positions.stop], np.int64)).tolist()
        missing, began = [], time.perf_counter()
        for position, there in zip(positions, has, strict=True):
            index = plan.indices[position]
            if there:
                self._put_kept(builder, position, index)
            elif (row := self._known.get(index)) is not None and (layout := self._layout) is not None:
                self._keep(plan, builder, position, item_of(layout.split(row), layout))
            else:
                missing.append(position)
        kept_s = time.perf_counter() - began
        put = partial(self._keep, plan, builder)
        outcome = self._get_items(plan, missing, put, watch) if missing else ChunkOutcome()
        outcome.decode_s += kept_s
        return outcome

    def _put_kept(self, builder: BatchBuilder, position: int, index: int) -> None:
        if isinstance(builder, HeldItemsAssembly):
            builder.placed(position, index, there=True)
        else:
            layout = self._layout
            assert layout is not None
            builder.put(position, item_of(layout.split(self._store.row(index)), layout))

    def _keep(self, plan: BatchPlan, builder: BatchBuilder, position: int, item: Any) -> None:
        """Store an item in its place, and keep it."""
        index, store = plan.indices[position], self._store
        if isinstance(builder, HeldItemsAssembly):
            builder.put(position, item)
            builder.placed(position, index, there=False)
            return
        if isinstance(store, DeviceStore):
            # A batch is for a device that keeps it from its beginning, or not at all.
            builder.put(position, item)
            return
        if self._layout is None:
            store.settle(item_layout(item))
        layout = self._layout
        assert layout is not None
        row = layout.pack(parts_of(item, layout))
        # What is seen of an item is what is kept of it, the first time too.
        builder.put(position, item_of(layout.split(row), layout))
        store.put(index, row)

    def _named(self, error: BaseException, index: int) -> FeedError:
        if isinstance(error, CacheError):
            without_our_frames(error)
            return error
        if isinstance(error, NotCacheableError):
            return CacheError(
                f"sample {self.key(index)!r} (index {index}) cannot be kept: {error}; let the Dataset give the same "
                f"structure, shapes and dtypes at every index, or leave cache= out"
            )
        return super()._named(error, index)

    @property
    def _layout(self) -> ItemLayout | None:
        layout: Layout | None = self._store.layout
        assert layout is None or isinstance(layout, ItemLayout)
        return layout
