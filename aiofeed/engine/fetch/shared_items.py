"""The fetcher of a ``Dataset`` whose items are kept in a file: what another process is making is not made here.

Who makes an item claims it first. Where another is at it, the others of the chunk come first, and then it is waited
for: so processes that want the same items at the same time share the work. Whoever waits holds no claim, claims end
with their process, and patience is bounded, so that no process can hold up another for good.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.decoder_codec import NotCacheableError
from aiofeed.cache.disk import DiskStore
from aiofeed.cache.item_codec import item_layout, item_of, parts_of, restored, written
from aiofeed.cache.layout import ItemLayout
from aiofeed.core.errors import CacheError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import BatchPlan
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.fetcher import ChunkOutcome
from aiofeed.engine.fetch.kept_items import KeptItemsFetcher
from aiofeed.runtime.time_limits import AbandonedError, JobControl
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.dataset_slots import DatasetSlot

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("aiofeed.engine")

# An item that another makes is waited for so long, or so many times as long as the slowest took here: then it is made
# here too, for whoever has it may be stopped, or hang.
PATIENCE_S = 60.0
PATIENCE_ITEMS = 4
# How long until it is looked after again, at first and at most.
PAUSES_S = (0.0005, 0.05)


class SharedItemsFetcher(KeptItemsFetcher):
    """Items of a ``Dataset``, each once over all processes. Arguments as of ``KeptItemsFetcher``; a file's store."""

    _store: DiskStore

    def __init__(self, source: FromDataset, policy: FailurePolicy | None = None, *, store: DiskStore) -> None:
        super().__init__(source, policy, store=store)
        self._longest_s = 0.0
        self._restore()

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
        """Put what is kept into its places, get the other items, and wait for those that others get."""
        outcome = ChunkOutcome()
        positions = range(start, start + len(encoded))
        # Of a job that is abandoned, what lies before the item it was at has to be done.
        chunks: Sequence[Sequence[int]] = [positions]
        if watch.deadline is not None:
            watch.deadline.outcome = outcome
            chunks = [[position] for position in positions]
        try:
            if plan.number == 0 and start == 0 and watch.deadline is None:
                self._compare(plan, positions, watch)
            for chunk in chunks:
                self._fill(plan, chunk, builder, watch, outcome)
                if watch.stop.stopped or (outcome.errors and self._policy.action == "raise"):
                    break
        except CacheError as error:
            named = self._named(error, plan.indices[start])
            with contextlib.nullcontext() if watch.deadline is None else watch.deadline.commit():
                outcome.errors.append((start, named))
            del named
        return outcome

    def _fill(
        self,
        plan: BatchPlan,
        positions: Sequence[int],
        builder: BatchBuilder,
        watch: JobControl,
        outcome: ChunkOutcome,
    ) -> None:
        left, pause = list(positions), PAUSES_S[0]
        since = time.monotonic()
        while left and not watch.stop.stopped:
            patience = max(PATIENCE_S, PATIENCE_ITEMS * self._longest_s)
            late = time.monotonic() - since > min(patience, self.limit_s or patience)
            before = len(left)
            left = self._round(plan, left, builder, watch, outcome, late=late)
            if outcome.errors and self._policy.action == "raise":
                # An error is that of the first item that fails, whoever was at those before it.
                first = min(position for position, _ in outcome.errors)
                left = [position for position in left if position < first]
            if len(left) < before:
                since, pause = time.monotonic(), PAUSES_S[0]
            elif left:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES_S[1])

    def _round(
        self,
        plan: BatchPlan,
        positions: Sequence[int],
        builder: BatchBuilder,
        watch: JobControl,
        outcome: ChunkOutcome,
        *,
        late: bool,
    ) -> list[int]:
        """Go through items once; those at which others are."""
        began = time.perf_counter()
        missing = self._put_those_kept(plan, positions, builder)
        outcome.decode_s += time.perf_counter() - began
        many = hasattr(self._source.dataset, "__getitems__") and watch.deadline is None
        groups = [missing] if many and missing else [[position] for position in missing]
        left: list[int] = []
        for group in groups:
            if watch.stop.stopped:
                break
            claimed = [position for position in group if self._store.claim(plan.indices[position])]
            try:
                wanted = group if late else claimed
                left += [position for position in group if position not in wanted]
                if wanted := self._put_those_kept(plan, wanted, builder):
                    self._make(plan, wanted, builder, watch, outcome)
            finally:
                for position in claimed:
                    self._store.release(plan.indices[position])
            if outcome.errors and self._policy.action == "raise":
                break
        return left

    def _make(
        self,
        plan: BatchPlan,
        positions: Sequence[int],
        builder: BatchBuilder,
        watch: JobControl,
        outcome: ChunkOutcome,
    ) -> None:
        fresh: list[tuple[int, NDArray[np.uint8]]] = []
        began = time.perf_counter()
        self._get_items(plan, positions, partial(self._take, plan, builder, fresh), watch, outcome)
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        # A write may take its time, and inside of `put` a guard's lock is held.
        for index, row in fresh:
            self._store.put(index, row)

    def _put_those_kept(self, plan: BatchPlan, positions: Sequence[int], builder: BatchBuilder) -> list[int]:
        """Put what is kept by now into its places; the other positions."""
        store = self._store
        if store.layout is None:
            store.begin(None)
            store.met = False  # of another process, which is filling it now
            self._restore()
        if not positions or self._layout is None:
            return list(positions)
        indices = np.array([plan.indices[position] for position in positions], np.int64)
        if len(doubtful := store.doubtful(indices)):
            store.check(doubtful)
        missing = []
        for position, there in zip(positions, store.has(indices).tolist(), strict=True):
            if there:
                self._put_kept(builder, position, plan.indices[position])
            else:
                missing.append(position)
        return missing

    def _take(
        self,
        plan: BatchPlan,
        builder: BatchBuilder,
        fresh: list[tuple[int, NDArray[np.uint8]]],
        position: int,
        item: Any,
    ) -> None:
        if self._layout is None:
            self._store.settle(written(item_layout(item)))
        layout = self._layout
        assert layout is not None
        row = layout.pack(parts_of(item, layout))
        builder.put(position, item_of(layout.split(row), layout))
        fresh.append((plan.indices[position], row))

    def _compare(self, plan: BatchPlan, positions: Sequence[int], watch: JobControl) -> None:
        """Ask for one item that an earlier run has kept once more, where nothing but that tells what the file is of.

        Raises:
            CacheError: it is of another form.
        """
        store, layout = self._store, self._layout
        if not store.met or layout is None or self._source.fingerprint() is not None:
            return
        store.met = False
        indices = np.array([plan.indices[position] for position in positions], np.int64)
        store.check(store.doubtful(indices))
        kept = indices[store.has(indices)].tolist()
        if not kept:
            return
        try:
            with DatasetSlot(self._source, kept[0], watch):
                [item] = self._source.items(kept[:1])
        except AbandonedError:
            raise
        except BaseException:  # noqa: BLE001 - the user's Dataset; the item is kept, and need not be had any more
            return
        try:
            row = layout.pack(parts_of(item, layout))
        except NotCacheableError as error:
            raise store.other_form(f"and {error}") from None
        if row.tobytes() != store.row(kept[0]).tobytes():
            log.warning(
                "the cache %s has another %s than the Dataset gives now: its data or settings are not those that the "
                "file was filled from, or it draws random numbers, and those of the first time are seen for good. "
                "Delete the file in the first case; FromDataset(dataset, fingerprint=...) tells Datasets apart",
                store.path,
                self.key(kept[0]),
            )

    def _restore(self) -> None:
        layout = self._layout_of_store
        if layout is not None and layout.template is None and (whole := restored(layout)) is not None:
            self._store.settle(whole)

    @property
    def _layout(self) -> ItemLayout | None:
        layout = self._layout_of_store
        # Where only the file has said it, an item has to tell first.
        return None if layout is None or layout.template is None else layout

    @property
    def _layout_of_store(self) -> ItemLayout | None:
        return super()._layout
