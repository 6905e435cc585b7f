"""Fetcher of a ``Dataset``: the decode job requests the items."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiofeed.kernel.core.errors import FeedError, ReadError
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.async_reader import ReadResult
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, DefaultCollateBuilder, misfit_error
from aiofeed.kernel.engine.fetch.fetcher import UNREAD, Chunk, Fetcher, Place, seed_of
from aiofeed.kernel.engine.fetch.generators import DrawDetector, generators_of, seed_generators
from aiofeed.kernel.engine.fetch.user_errors import sample_error, without_our_frames
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.thread_pool import ThreadHost
from aiofeed.kernel.runtime.time_limits import AbandonedError, retry_blocking
from aiofeed.kernel.sources.dataset import FromDataset, has_getitems
from aiofeed.kernel.sources.dataset_slots import DatasetCalls, DatasetSlot

ItemT = TypeVar("ItemT")

log: logging.Logger = logging.getLogger("aiofeed.engine")


class DatasetFetcher(Fetcher):
    """Fetches samples from a map-style ``Dataset``.

    Args:
        source: The dataset and the number of threads that may call it.
        policy: Retries, time limits, and whether the first failure ends a chunk.
        own_process: Whether this process does nothing else, so that each sample may seed the global generators, and
            those of the dataset. A call of ``__getitems__`` gets the seed of its first sample.
    """

    def __init__(self, source: FromDataset, policy: FailurePolicy | None = None, *, own_process: bool = False) -> None:
        super().__init__(policy or FailurePolicy())
        self._source = source
        self.calls: DatasetCalls = DatasetCalls(source)
        self.thread: ThreadHost | None = self.calls.thread
        self.gets_several: bool = has_getitems(source.dataset)
        # Threads that call it at the same time would share the generators.
        self._seeds = own_process and source.threads == 1
        self._owned = generators_of(source.dataset) if self._seeds else []
        self._detector = DrawDetector(source.dataset)
        self._warned = False
        limits = (self.policy.read_timeout_s, self.policy.decode_timeout_s)
        self.limit_s: float | None = sum(limit or 0.0 for limit in limits) or None

    @property
    def reads_in_jobs(self) -> bool:
        """Always: the decode job requests the items."""
        return True

    def new_builder(self, samples: int, lease: BufferLease) -> BatchBuilder:
        """Return a builder that may keep items until the batch is complete, as a ``DataLoader`` does."""
        return DefaultCollateBuilder(samples, lease, may_keep=True)

    def job_sizes(self, limits: ResolvedLimits) -> tuple[int, int]:
        """A whole batch for a single thread, as ``__getitems__`` expects; otherwise by the time that items take."""
        return (sys.maxsize, sys.maxsize) if limits.decode_threads == 1 else super().job_sizes(limits)

    def key(self, index: int) -> str:
        """Return the dataset's name and the index."""
        return self._source.key(index)

    async def read(self, indices: Sequence[int], plan: BatchPlan | None = None, start: int = 0) -> ReadResult:
        """``UNREAD`` for each index: the decode job requests the items."""
        return ReadResult([UNREAD] * len(indices), waited=False)

    def decode_chunk(self, chunk: Chunk) -> None:
        """Request a chunk's items and put them into the batch."""
        self.decode_with(chunk, chunk.put)

    def decode_with(self, chunk: Chunk, place: Place) -> None:
        """Call ``place`` for each position and value of a chunk, after requesting the items that are ``UNREAD``."""
        requested = chunk.unread()
        outcome, retries = chunk.outcome, chunk.outcome.retries
        reached, seconds, cpu_s = 0, 0.0, 0.0

        def work() -> None:
            nonlocal reached, seconds, cpu_s
            started, cpu_started = time.perf_counter(), time.thread_time()
            # One by one for a time limit per item, too.
            if self.gets_several and chunk.control.deadline is None:
                if (error := self._request_all(chunk, requested)) is None:
                    reached = chunk.decode_each(place)
                else:
                    reached = self._find_culprit(chunk, place, slot, requested, error)
            else:
                request_one = self._request_one(chunk, place, slot)
                reached = chunk.decode_each(request_one, 0, 1)
                if reached and not chunk.outcome.errors and place == chunk.builder.put:
                    reached = self._keep_rest(chunk, slot)
                reached = chunk.decode_each(request_one, reached)
            seconds, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started

        with DatasetSlot(self.calls, chunk.plan.indices[requested[0]], chunk.control) as slot:
            slot.call(work)
        outcome.decode_s += seconds
        outcome.decode_cpu_s += cpu_s
        outcome.samples += reached
        if reached and outcome.retries == retries:
            self._sizer.observe(seconds, reached, cpu_s)

    def _request_all(self, chunk: Chunk, positions: Sequence[int]) -> BaseException | None:
        """Request items in one call; returns its error."""
        items = partial(self._source.items, [chunk.plan.indices[position] for position in positions])
        request = partial(self._called, items, chunk.plan, positions[0])
        try:
            found = request()
        except BaseException as error:  # noqa: BLE001 - the user's Dataset may raise anything; it becomes a value
            found, retries = retry_blocking(self.policy, error, request, chunk.control.stop)
            chunk.outcome.retries += retries
            if isinstance(found, BaseException):
                return found
        each = iter(found)
        chunk.values = [next(each) if value is UNREAD else value for value in chunk.values]
        return None

    def _find_culprit(
        self, chunk: Chunk, place: Place, slot: DatasetSlot, positions: Sequence[int], error: BaseException
    ) -> int:
        """Request items one by one after an error of ``__getitems__``, to name the item that has it.

        If none has it, ``__getitems__`` itself is wrong, and its items may be others than those of ``__getitem__``:
        they become no batch, unless failures are skipped or replaced; then one log line says so.
        """
        outcome, before = chunk.outcome, len(chunk.outcome.errors)
        placed = (lambda position, item: None) if self.stop_at_error else place
        reached = chunk.decode_each(self._request_one(chunk, placed, slot))
        alone, text = outcome.errors[before:], format_error(error)
        if any(format_error(each.__cause__ or each) == text for _, each in alone) or chunk.control.stop.is_set():
            return reached
        index, found = chunk.plan.indices[positions[0]], alone[0][1] if alone else "none of these fails"
        several = f"__getitems__ raised {text} for {len(positions)} items; requested one by one: {found}"
        if self.stop_at_error:
            named = ReadError(several, key=self.key(index), index=index, stage="read")
            named.__cause__ = without_our_frames(error)
            outcome.errors[before:] = [(positions[0], named)]
        elif not self._warned:
            self._warned = True
            log.warning("%s", several)
        return reached

    def _keep_rest(self, chunk: Chunk, slot: DatasetSlot) -> int:
        """Request the items after the first, up to one that fails, if the batch keeps them as they are.

        Returns how many samples were reached. Small items take a microsecond each, and so must this loop.
        """
        kept, positions, indices = chunk.builder.kept, chunk.positions, chunk.plan.indices
        plain = chunk.control.deadline is None and not self._seeds and self._detector.done and not self.policy.retries
        if kept is None or not plain:
            return 1
        dataset, stopped, at = self._source.dataset, chunk.control.stop.is_set, 1
        try:
            for at in range(1, len(positions)):
                if stopped():
                    return at
                position = positions[at]
                slot.index = index = indices[position]
                kept[position] = dataset[index]
        except BaseException as error:  # noqa: BLE001 - the user's Dataset may raise anything; ``decode_each`` raises it again
            chunk.values[at] = error
            return at
        return len(positions)

    def _called(self, request: Callable[[], ItemT], plan: BatchPlan, position: int) -> ItemT:
        """Return the result of a request, for which the global generators are seeded or watched."""
        if self._seeds:
            seed_generators(seed_of(plan, position), self._owned)
        return request() if self._seeds or self._detector.done else self._detector.watch(request)

    def _request_one(self, chunk: Chunk, place: Place, slot: DatasetSlot) -> Place:
        """Return a function that requests one item and places it."""
        indices, dataset, policy = chunk.plan.indices, self._source.dataset, self.policy
        deadline, stop = chunk.control.deadline, chunk.control.stop
        seeds, detector = self._seeds, self._detector

        def request_again(position: int) -> Any:
            if deadline is not None:
                deadline.begin(position)
            return self._called(lambda: dataset[indices[position]], chunk.plan, position)

        def request(position: int, value: Any) -> None:
            if value is UNREAD:
                slot.index = index = indices[position]
                try:
                    if deadline is not None:
                        deadline.begin(position)
                    if seeds or not detector.done:
                        value = self._called(lambda: dataset[index], chunk.plan, position)
                    else:
                        value = dataset[index]
                except Exception as error:
                    if deadline is not None:
                        deadline.pause()
                    if not policy.retries or isinstance(error, AbandonedError):
                        raise
                    value, retries = retry_blocking(policy, error, partial(request_again, position), stop)
                    chunk.outcome.retries += retries
                    if isinstance(value, BaseException):
                        raise value from None
            place(position, value)

        return request

    def to_feed_error(self, error: BaseException, index: int, reading: bool) -> FeedError:
        """Return the ``ReadError`` of an item that failed."""
        key = self.key(index)
        return misfit_error(error, key) or sample_error(ReadError, error, key, index, traced=self.stop_at_error)

    def overdue(self, index: int) -> FeedError:
        """Return the ``ReadError`` of an item over its time limit."""
        late = TimeoutError(f"no item within {self.limit_s:g} s")
        return sample_error(ReadError, late, self.key(index), index)
