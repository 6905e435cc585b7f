"""The fetcher with a cache: samples in the store are neither read nor decoded again.

If the store is shared by claims, one process makes an item and the others wait for it: each process claims the items it
makes, makes the unclaimed ones of a chunk first, and then waits for the rest. A waiting thread holds no claim, claims
end with their process, and the wait is bounded, so no process can block another for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.cache.layout import RECORDS, ItemLayout, Layout, NotCacheableError, Parts, pack_record
from aiofeed.cache.sample_codec import SampleCodec, build_item
from aiofeed.cache.store import SampleStore
from aiofeed.kernel.core.errors import CacheError, FeedError, SampleError
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.types import BatchPlan, HostTensor
from aiofeed.kernel.engine.fetch.async_reader import ReadResult
from aiofeed.kernel.engine.fetch.collate import (
    BatchBuilder,
    ChunkBuilder,
    DefaultCollateBuilder,
    Positions,
    RowBatchBuilder,
    compact,
)
from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher
from aiofeed.kernel.engine.fetch.fetcher import UNREAD, Chunk, Fetcher, Place, RunJob, seed_of
from aiofeed.kernel.engine.fetch.source import SourceFetcher, generator_of
from aiofeed.kernel.engine.fetch.user_errors import without_our_frames
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool, array
from aiofeed.kernel.runtime.thread_pool import ThreadHost, ThreadPool
from aiofeed.kernel.runtime.time_limits import JobControl, JobDeadline, JobStuckError, run_with_sample_timeout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.sampling.epochs import Step

log: logging.Logger = logging.getLogger("aiofeed.engine")

# Samples of fewer bytes take more time in the interpreter than in memory: a second thread would wait for the first.
SMALL_BYTES = 16 * 1024
# How many samples are tried to learn their layout before an epoch runs without the cache.
PROBES = 8
# How long to wait for an item that another process makes: seconds, or a multiple of the slowest item here. After that
# the item is made here, too; the other process may be stopped, or hang.
PATIENCE_S = 60.0
PATIENCE_ITEMS = 4
# Shortest and longest poll interval for such an item.
PAUSES_S = (0.0005, 0.05)

CACHED: Any = object()
"""Placeholder for the value of a cached sample."""

Encoded: TypeAlias = tuple[Parts, Layout]
Found: TypeAlias = Encoded | NotCacheableError | None


class CachedFetcher(Fetcher):
    """Fetches each sample once from the inner fetcher, and afterwards from a store.

    Raises:
        CacheError: The store cannot be used.
    """

    def __init__(self, inner: SourceFetcher | DatasetFetcher, codec: SampleCodec, store: SampleStore) -> None:
        super().__init__(inner.policy)
        self._inner = inner
        self._codec = codec
        self._store = store
        self.limit_s: float | None = inner.limit_s
        self.thread: ThreadHost | None = inner.thread
        self.target: Callable[[int], Any] | None = inner.target
        # Whether the last chunk was all cached.
        self._warm = False
        self._sample_bytes = 0
        # Items requested to learn the layout, until they are on the device.
        self._probed: dict[int, Any] = {}
        self._slowest_s = 0.0
        store.open(codec.layout)

    def key(self, index: int) -> str:
        """Return the inner fetcher's name for a sample."""
        return self._inner.key(index)

    def overdue(self, index: int) -> FeedError:
        """Return the inner fetcher's error of a sample over its time limit."""
        return self._inner.overdue(index)

    def to_feed_error(self, error: BaseException, index: int, reading: bool) -> FeedError:
        """Return the inner fetcher's error, or a ``CacheError``."""
        if isinstance(error, CacheError):
            without_our_frames(error)
            return error
        if isinstance(error, NotCacheableError):
            advice = f'cache="device" keeps samples of one shape: {self._codec.advice}, use cache="host" or a DiskCache'
            advice = advice if self._store.needs_layout else "convert it"
            return CacheError(
                f"sample {self.key(index)!r} (index {index}) cannot be cached: {error}; {advice}, or leave cache= out"
            )
        return self._inner.to_feed_error(error, index, reading)

    def job_sizes(self, limits: ResolvedLimits) -> tuple[int, int]:
        """Return the inner fetcher's size of jobs, or one for cached samples."""
        return super().job_sizes(limits) if self._warm else self._inner.job_sizes(limits)

    def max_running(self, threads: int) -> int:
        """Return the inner fetcher's number of threads; one for small cached samples."""
        if self._warm:
            return 1 if self._sample_bytes < SMALL_BYTES else threads
        return self._inner.max_running(threads)

    def new_builder(self, samples: int, lease: BufferLease) -> BatchBuilder:
        """Return the inner fetcher's builder, or one that the device completes."""
        layout, targets = self._store.layout, self.target is not None
        if layout is not None and self._store.on_device:
            return DeviceBatchBuilder(samples, lease, self._codec, self._store, layout, targets=targets)
        return self._inner.new_builder(samples, lease)

    @contextlib.contextmanager
    def reading_ahead(self, steps: Iterable[Step], run: RunJob, threads: int) -> Iterator[Iterable[Step]]:
        """Yield the same steps; write pending samples at their end."""
        yield steps
        self._store.choose_layout(last=True)

    async def prepare(self, decode_pool: ThreadPool) -> None:
        """Learn the layout from one of the first samples, if the store needs it before the first batch.

        Raises:
            CacheError: The sample cannot be cached, or not all samples fit.
        """
        store = self._store
        tried = min(PROBES, store.samples) if store.needs_layout else 0
        for index in range(tried):
            if store.layout is not None:
                return
            [value] = (await self._inner.read([index])).samples
            stop = threading.Event()
            deadline = None if self.limit_s is None else JobDeadline(self.limit_s)
            work = partial(self._get_one, index, value, JobControl(stop, deadline), None)
            found: Found = None
            try:
                if deadline is None:
                    found = await asyncio.get_running_loop().run_in_executor(decode_pool, work)
                else:
                    with contextlib.suppress(JobStuckError):
                        found, _ = await run_with_sample_timeout(decode_pool, work, deadline)
            finally:
                stop.set()
            if isinstance(found, NotCacheableError):
                raise self.to_feed_error(found, index, False)
            if found is not None:
                parts, layout = found
                store.set_layout(layout)
                if isinstance(layout, ItemLayout):  # a Dataset is asked once for each item
                    store.put(index, parts, layout)
                    if store.on_device:
                        self._probed[index] = build_item(parts, layout)
        if tried and store.layout is None:
            log.warning("none of the first %d samples could be decoded: this epoch runs without the cache", tried)

    def _get_one(self, index: int, value: Any, control: JobControl, layout: Layout | None) -> Found:
        """Encode one sample outside any batch; ``None`` if it fails: it fails again in its batch, with a name.

        Raises:
            FeedError: Other threads used the dataset for too long.
        """
        found: Found = None

        def encode(position: int, value: Any) -> None:
            nonlocal found
            try:
                decoded = self._codec.decode(value)
                as_record = layout is RECORDS
                parts, known = ([pack_record(decoded)], RECORDS) if as_record else self._codec.encode(decoded, layout)
                found = [part.copy() for part in parts], known  # a Dataset may reuse its memory
            except NotCacheableError as error:
                found = error

        builder = DefaultCollateBuilder(1, HostBufferPool(0))
        chunk = Chunk(self, BatchPlan(0, [index], [0], 0), [0], [value], builder, control)
        self._inner.decode_with(chunk, encode)
        for _, error in chunk.outcome.errors:
            if not isinstance(error, SampleError):  # the Dataset is busy
                raise error
        return found

    async def read(self, indices: Sequence[int], plan: BatchPlan | None = None, start: int = 0) -> ReadResult:
        """Return the inner fetcher's values; ``CACHED`` for cached samples."""
        wanted, store = np.asarray(indices, np.int64), self._store
        if len(unverified := store.unverified(wanted)):
            await asyncio.get_running_loop().run_in_executor(None, store.find, unverified)
        cached = store.has(wanted)
        self._warm = bool(cached.all())
        if self._warm:
            self._sample_bytes = store.nbytes(indices[0])
            return ReadResult([CACHED] * len(indices), waited=False)
        missing = np.flatnonzero(~cached).tolist()
        result = await self._inner.read([indices[at] for at in missing])
        samples = [CACHED] * len(indices)
        for at, value in zip(missing, result.samples, strict=True):
            samples[at] = value
        result.samples = samples
        return result

    def decode_chunk(self, chunk: Chunk) -> None:
        """Put cached samples into the batch, and decode and cache the others."""
        if self._store.on_device and not isinstance(chunk.builder, DeviceBatchBuilder):
            # The batch began before a layout was known: the device does not cache it.
            self._inner.decode_chunk(chunk)
            return
        plan, positions, deadline = chunk.plan, chunk.positions, chunk.control.deadline
        try:
            if plan.number == 0 and positions[0] == 0 and deadline is None:
                self._compare(chunk)
            if all(value is CACHED for value in chunk.values):
                self._put_cached(chunk)
            elif not self._store.claims:
                if self._mark_available(chunk):
                    self._inner.decode_with(chunk, self._place(chunk))
                else:
                    self._put_each(chunk)
            elif deadline is None:
                self._decode_shared(chunk, positions)
            else:
                # When a job is abandoned, all samples before the current one must be done and none after it.
                for position in positions:
                    if not chunk.ended:
                        self._decode_shared(chunk, [position])
            self._store.choose_layout()
        except CacheError as error:
            chunk.add_error(positions[0], error)

    def _mark_available(self, chunk: Chunk) -> list[int]:
        """Replace the values of cached samples by ``CACHED``. Returns the positions of the others."""
        missing = []
        cached = self._store.find(_indices(chunk.plan, chunk.positions)).tolist()
        for at, position in enumerate(chunk.positions):
            if cached[at]:
                chunk.values[at] = CACHED
            elif (item := self._probed.get(chunk.plan.indices[position])) is not None:
                chunk.values[at] = item
            else:
                missing.append(position)
        return missing

    def _put_cached(self, chunk: Chunk) -> None:
        """Put cached samples into the batch; in one call if they are only copied."""
        began = time.perf_counter(), time.thread_time()
        builder, indices, reached, rows = chunk.builder, _indices(chunk.plan, chunk.positions), 0, None
        if not self._codec.random and chunk.control.deadline is None and self._store.are_rows(indices):
            if not isinstance(builder, RowBatchBuilder):
                # It learns from the first sample of a batch what the others are like.
                reached = chunk.decode_each(self._place(chunk), end=1)
            rows = builder.rows_of(self._store.layout, targets=self.target is not None)
        if rows is None or chunk.ended or reached == len(indices):
            reached = reached if chunk.ended else chunk.decode_each(self._place(chunk), reached)
        else:
            reached = self._put_rows(chunk, reached, indices, *rows)
        self._observe(chunk, began, reached)

    def _put_rows(self, chunk: Chunk, start: int, indices: NDArray[np.int64], rows: NDArray[Any], put: Place) -> int:
        count, target = len(indices), self.target
        at = slice(chunk.positions[0] + start, chunk.positions[0] + count)
        if isinstance(chunk.builder, DeviceBatchBuilder):
            chunk.builder.mark(at, indices, cached=True)
        else:
            self._store.copy_rows(indices[start:], rows[at].reshape(count - start, -1).view(np.uint8))
        if target is not None:
            chunk.decode_each(lambda position, _: put(position, target(chunk.plan.indices[position])), start)
        return count

    def _put_each(self, chunk: Chunk) -> None:
        """Put cached and probed samples into the batch one by one."""
        began = time.perf_counter(), time.thread_time()
        self._observe(chunk, began, chunk.decode_each(self._place(chunk)))

    def _observe(self, chunk: Chunk, began: tuple[float, float], samples: int) -> None:
        seconds = time.perf_counter() - began[0]
        chunk.outcome.decode_s += seconds
        chunk.outcome.decode_cpu_s += time.thread_time() - began[1]
        chunk.outcome.samples += samples
        chunk.outcome.cached += samples
        self._sizer.observe(seconds, samples)

    def _decode_shared(self, chunk: Chunk, positions: Sequence[int]) -> None:
        """Put items into the batch, and wait for those that another process is making."""
        left, pause_s, since = list(positions), PAUSES_S[0], time.monotonic()
        while left and not chunk.control.stop.is_set():
            patience_s = max(PATIENCE_S, PATIENCE_ITEMS * self._slowest_s)
            impatient = time.monotonic() - since > min(patience_s, self.limit_s or patience_s)
            before = len(left)
            left = _before_error(chunk, self._decode_unclaimed(chunk, left, ignore_claims=impatient))
            if len(left) < before:
                pause_s, since = PAUSES_S[0], time.monotonic()
            elif left:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSES_S[1])

    def _decode_unclaimed(self, chunk: Chunk, positions: Sequence[int], *, ignore_claims: bool) -> list[int]:
        """Put items into the batch. Returns the positions of those that another process is making."""
        missing = _before_error(chunk, self._put_available(chunk, positions))
        left: list[int] = []
        for group in [missing] if self._inner.gets_several else [[position] for position in missing]:
            claimed = [position for position in group if self._store.claim(chunk.plan.indices[position])]
            try:
                wanted = group if ignore_claims else claimed
                left += [position for position in group if position not in wanted]
                # Another process may have finished an item just before it was claimed here.
                if wanted := self._put_available(chunk, wanted):
                    started = time.perf_counter()
                    part = replace(chunk, positions=wanted, values=[UNREAD] * len(wanted))
                    self._inner.decode_with(part, self._place(part))
                    self._slowest_s = max(self._slowest_s, time.perf_counter() - started)
            finally:
                for position in claimed:
                    self._store.release(chunk.plan.indices[position])
            if chunk.ended:
                break
        return left

    def _put_available(self, chunk: Chunk, positions: Sequence[int]) -> list[int]:
        """Put cached items into the batch. Returns the positions of the others."""
        missing = self._mark_available(replace(chunk, positions=positions, values=[UNREAD] * len(positions)))
        if available := sorted({*positions} - {*missing}):
            self._put_each(replace(chunk, positions=available, values=[CACHED] * len(available)))
        return missing

    def _place(self, chunk: Chunk) -> Place:
        """Return a function that puts one sample into the batch, and decodes and caches it unless it is cached."""
        if isinstance(chunk.builder, RowBatchBuilder):
            return partial(self._place_row, chunk, chunk.builder)
        return partial(self._place_sample, chunk)

    def _place_sample(self, chunk: Chunk, position: int, value: Any) -> None:
        index, cached = chunk.plan.indices[position], value is CACHED
        parts, layout = self._store.get(index) if cached else self._encode(value)
        rng = partial(generator_of, chunk.plan, position)
        if self.target is None:
            sample = self._codec.sample(parts, layout, rng)
        else:
            sample = self._codec.sample_with_target(parts, layout, rng, self._target(index, cached))
        chunk.put(position, sample)
        if not cached:
            self._store.put(index, parts, layout)

    def _place_row(self, chunk: Chunk, builder: RowBatchBuilder, position: int, value: Any) -> None:
        index, cached = chunk.plan.indices[position], value is CACHED
        out = memory = builder.arrays(position)
        if chunk.control.deadline is not None:
            out = [np.empty_like(row) for row in memory]  # an abandoned job must not write into the batch later
        # A row that the device has stays undefined here.
        parts: Parts = out
        encoded = None if cached else self._encode(value, out)
        if encoded is not None:
            parts = encoded[0]
        elif not self._store.on_device:
            parts = self._store.parts(index)
        if parts is not out:
            self._codec.fill(parts, out, seed_of(chunk.plan, position) if self._codec.random else None)
        target = None if self.target is None else self._target(index, cached)
        if chunk.control.deadline is None:
            builder.put(position, target)
        else:
            with chunk.commit():
                for row, made in zip(memory, out, strict=True):
                    row[...] = made
                builder.put(position, target)
        if isinstance(builder, DeviceBatchBuilder):
            builder.mark(position, index, cached=cached)
        if encoded is not None:
            self._store.put(index, *encoded)

    def _target(self, index: int, cached: bool) -> Any:
        assert self.target is not None
        target = self.target(index)
        if not cached:
            try:
                self._store.put_target(index, target)
            except CacheError as error:
                raise CacheError(f"sample {self.key(index)!r}: {error}") from None
        return target

    def _encode(self, value: Any, out: Parts | None = None) -> Encoded:
        """Return the arrays of a sample, or its record if it has another layout than rows."""
        decoded, layout = self._codec.decode(value), self._store.layout
        if layout is not RECORDS:
            try:
                parts, found = self._codec.encode(decoded, layout, out)
                return parts, found if found is layout else self._store.set_layout(found)
            except NotCacheableError:
                if self._store.needs_layout:
                    raise
        return [pack_record(decoded)], RECORDS

    def _compare(self, chunk: Chunk) -> None:
        """Compare one cached item with the Dataset's, if the store asks for it.

        Raises:
            CacheError: The item has another layout.
        """
        index = self._store.sample_to_compare(_indices(chunk.plan, chunk.positions))
        if index is None:
            return
        found = None
        with contextlib.suppress(FeedError):  # the item is cached: it is not needed
            layout = self._store.get(index)[1]
            found = self._get_one(index, UNREAD, JobControl(chunk.control.stop), layout)
        if found is not None:
            self._store.compare(index, self.key(index), found if isinstance(found, NotCacheableError) else found[0])


class DeviceBatchBuilder(RowBatchBuilder):
    """Builder of a batch that ``store`` completes on the device with cached samples, which have ``layout``."""

    def __init__(
        self, samples: int, lease: BufferLease, codec: SampleCodec, store: SampleStore, layout: Layout, *, targets: bool
    ) -> None:
        super().__init__(codec.row(layout), samples, lease, targets=targets)
        others = [array(lease, (samples, *part.shape), np.dtype(part.dtype)) for part in layout.parts[1:]]
        self._leaves = [self._leaf, *[HostTensor(rows, pinned=lease.pinned) for rows in others]]
        self._columns = [leaf.memory for leaf in self._leaves]
        self._indices: NDArray[np.int64] = array(lease, (samples,), np.dtype(np.int64))
        self._cached = np.zeros(samples, np.bool_)
        self._codec, self._store, self._layout = codec, store, layout

    def arrays(self, position: int) -> list[NDArray[Any]]:
        """Return the memory of a sample."""
        return [column[position, ...] for column in self._columns]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        return super().nbytes + sum(column.nbytes for column in self._columns[1:])

    def take_over(self, chunk: ChunkBuilder, positions: Sequence[int], first: int, keys: Sequence[str]) -> None:
        """Copy the rows and marks of a chunk, and store its targets."""
        assert isinstance(chunk, DeviceBatchBuilder)
        super().take_over(chunk, positions, first, keys)
        own, places = slice(first, first + len(positions)), list(positions)
        self._indices[own], self._cached[own] = chunk._indices[places], chunk._cached[places]

    def mark(self, at: int | slice, indices: int | NDArray[np.int64], *, cached: bool) -> None:
        """Record which samples are at these positions, and whether the device has them."""
        self._indices[at] = indices
        self._cached[at] = cached

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        for leaf in self._leaves:
            leaf.memory = compact(leaf.memory, positions)
        indices, cached = compact(self._indices, positions), compact(self._cached, positions)
        columns = self._store.complete(self._leaves, indices, cached, pinned=self._leaf.pinned)
        batch = self._codec.batch(columns, self._layout)
        return batch if self._targets is None else [batch, self._targets.finish(keys, positions)]


def _indices(plan: BatchPlan, positions: Sequence[int]) -> NDArray[np.int64]:
    if isinstance(positions, range):
        return np.asarray(plan.indices[positions.start : positions.stop], np.int64)
    return np.array([plan.indices[position] for position in positions], np.int64)


def _before_error(chunk: Chunk, positions: list[int]) -> list[int]:
    """Return the positions left to decode. The first error of a batch is raised, so samples behind an error are not."""
    if not chunk.outcome.errors or not chunk.fetcher.stop_at_error:
        return positions
    first = min(position for position, _ in chunk.outcome.errors)
    return [position for position in positions if position < first]
