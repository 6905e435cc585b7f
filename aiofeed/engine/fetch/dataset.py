"""A ``Dataset``'s items: nothing to read on the loop, reading and decoding are one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from aiofeed.core.errors import FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan
from aiofeed.engine.fetch.async_reader import ReadResult
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.default_collate import misfit_error
from aiofeed.engine.fetch.fetcher import ChunkOutcome, ChunkSizer
from aiofeed.engine.fetch.user_errors import read_error
from aiofeed.runtime.retry import retry_blocking
from aiofeed.runtime.time_limits import AbandonedError, JobControl, JobDeadline
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.dataset_slots import DatasetSlot

Put: TypeAlias = Callable[[int, Any], None]
"""What stores an item at a position of its batch."""


class DatasetFetcher:
    """Samples from a map-style ``Dataset``: nothing to read on the loop, everything in the executor.

    Args:
        source: the dataset.
        policy: retries, time limits, and whether a chunk goes on after an item that fails.
    """

    has_targets = False

    def __init__(self, source: FromDataset, policy: FailurePolicy | None = None) -> None:
        self._source = source
        self._policy = policy or FailurePolicy()
        self._pace = ChunkSizer()
        limits = (self._policy.read_timeout_s, self._policy.decode_timeout_s)
        self.limit_s: float | None = sum(limit or 0.0 for limit in limits) or None

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """The whole batch where one thread does it all, as ``__getitems__`` expects."""
        threads = limits.decode_threads
        return samples if threads == 1 else self._pace.chunk_size(samples, threads)

    def key(self, index: int) -> str:
        """The dataset's name and the index."""
        return self._source.key(index)

    def max_running(self, threads: int) -> int:
        """All of them: whoever said so many knows the dataset."""
        return threads

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """Nothing: a Dataset's items are made in a decode thread."""
        return ReadResult([None] * len(indices), waited=False)

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
        """Get the items and store them."""
        return self._get_items(plan, range(start, start + len(encoded)), builder.put, watch)

    def _get_items(
        self,
        plan: BatchPlan,
        positions: Sequence[int],
        put: Put,
        watch: JobControl,
        outcome: ChunkOutcome | None = None,
    ) -> ChunkOutcome:
        """Get items and store them; ``outcome`` is what came of those before, and is gone on with."""
        if outcome is None:
            outcome = ChunkOutcome()
            if watch.deadline is not None:
                watch.deadline.outcome = outcome
        retries = outcome.retries
        with DatasetSlot(self._source, plan.indices[positions[0]], watch) as slot:
            started = time.perf_counter()
            self._ask(plan, positions, put, watch, outcome, slot)
        took_s = time.perf_counter() - started
        outcome.decode_s += took_s
        if outcome.retries == retries:
            self._pace.observe(took_s, len(positions))
        return outcome

    def _ask(
        self,
        plan: BatchPlan,
        positions: Sequence[int],
        put: Put,
        watch: JobControl,
        outcome: ChunkOutcome,
        slot: DatasetSlot,
    ) -> None:
        # A limit on the time of one item is kept by asking for one at a time.
        many = hasattr(self._source.dataset, "__getitems__") and watch.deadline is None
        plain = watch.deadline is None and not self._policy.retries
        dataset = self._source.dataset
        if many and self._put_many(plan, positions, put, outcome):
            return
        for position in positions:
            if watch.stop.stopped:
                return
            try:
                if plain:
                    slot.index = index = plan.indices[position]
                    put(position, dataset[index])
                else:
                    self._put_one(plan, position, put, watch, outcome, slot)
            except AbandonedError:
                raise
            except BaseException as error:  # noqa: BLE001 - the user's Dataset may raise anything; it becomes a value with a name
                named = self._named(error, plan.indices[position])
                with contextlib.nullcontext() if watch.deadline is None else watch.deadline.commit():
                    outcome.errors.append((position, named))
                del named
                if self._policy.action == "raise":
                    return

    def _put_many(self, plan: BatchPlan, positions: Sequence[int], put: Put, outcome: ChunkOutcome) -> bool:
        """Get all items in one call; False where that fails, and each has to be asked for to learn which it was."""
        try:
            items = self._source.items([plan.indices[position] for position in positions])
        except BaseException:  # noqa: BLE001 - the user's Dataset may raise anything; asked one by one, it names who failed
            return False
        for position, item in zip(positions, items, strict=True):
            try:
                put(position, item)
            except BaseException as error:  # noqa: BLE001 - the item's own methods may raise anything
                outcome.errors.append((position, self._named(error, plan.indices[position])))
                if self._policy.action == "raise":
                    break
        return True

    def _put_one(
        self, plan: BatchPlan, position: int, put: Put, watch: JobControl, outcome: ChunkOutcome, slot: DatasetSlot
    ) -> None:
        get = partial(self._get, plan.indices[position], position, watch.deadline, slot)
        try:
            item = get()
        except Exception as error:
            if watch.deadline is not None:
                watch.deadline.pause()
            if not self._policy.retries or isinstance(error, AbandonedError):
                raise
            item, retries = retry_blocking(self._policy, error, get, watch.stop)
            outcome.retries += retries
            if isinstance(item, BaseException):
                raise item from None
        if watch.deadline is None:
            put(position, item)
        else:
            with watch.deadline.commit():
                put(position, item)

    def _get(self, index: int, position: int, deadline: JobDeadline | None, slot: DatasetSlot) -> Any:
        slot.index = index
        if deadline is not None:
            deadline.begin(position)
        return self._source.dataset[index]

    def _named(self, error: BaseException, index: int) -> FeedError:
        key = self.key(index)
        return misfit_error(error, key) or read_error(error, key, index, traced=self._policy.action == "raise")

    def overdue(self, index: int) -> FeedError:
        """A ``ReadError``, by name."""
        return read_error(TimeoutError(f"no item within {self.limit_s:g} s"), self.key(index), index)
