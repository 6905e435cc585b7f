"""The fetcher with a cache: decode, keep, augment. What is kept is neither read nor decoded again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.decoder_codec import NotCacheableError, SampleCodec, form_of
from aiofeed.cache.layout import Layout, as_bytes
from aiofeed.cache.store import SampleStore
from aiofeed.core.errors import CacheError, FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan, Row, Source
from aiofeed.engine.fetch.async_reader import ReadResult
from aiofeed.engine.fetch.collate import BatchBuilder, RowBatchBuilder
from aiofeed.engine.fetch.fetcher import ChunkOutcome, ChunkSizer, Fetcher
from aiofeed.engine.fetch.source import UNREAD, SourceFetcher, decodes_in_place, takes_rng
from aiofeed.engine.fetch.user_errors import without_our_frames
from aiofeed.runtime.time_limits import JobControl, JobDeadline

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Samples of fewer bytes cost the interpreter more than the memory: a second thread would wait for the first.
SMALL_BYTES = 16 * 1024

KEPT: Any = object()


class CachedFetcher(SourceFetcher):
    """Bytes from a source through a decoder, once.

    Args:
        source, decoder, in_place, length, policy: as of ``SourceFetcher``.
        store: what is kept.

    Raises:
        CacheError: the store cannot be used.
    """

    def __init__(
        self,
        source: Source[Any],
        decoder: Callable[..., Any],
        *,
        store: SampleStore,
        in_place: bool,
        length: int | None = None,
        policy: FailurePolicy | None = None,
    ) -> None:
        super().__init__(source, decoder, in_place=in_place, length=length, policy=policy)
        self._decode_many = None  # each is kept as it is made
        self._form: SampleCodec = cached_form(decoder)
        self._decodes_rows = in_place
        self._store = store
        self._warm = False
        self._warm_pace = ChunkSizer()
        store.begin(self._form.layout)

    @property
    def plain_row(self) -> tuple[Row, str | None] | None:
        """The row of a batch, and torch's dtype where numpy has none, where all samples are known to be alike."""
        layout = self._store.layout
        if layout is None or self._decodes_rows or not self._form.direct:
            return None
        return Row(layout.shape, layout.dtype), layout.torch_dtype

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """Samples that are only copied make a job by themselves."""
        if self._warm:
            return self._warm_pace.chunk_size(samples, limits.decode_threads)
        return super().chunk_size(samples, limits)

    def max_running(self, threads: int) -> int:
        """One where samples are small and only copied."""
        if self._warm and self._store.layout is not None:
            return 1 if self._store.layout.nbytes < SMALL_BYTES else threads
        return super().max_running(threads)

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """Read what is not kept."""
        wanted = np.asarray(indices, np.int64)
        store = self._store
        if len(doubtful := store.doubtful(wanted)):
            await asyncio.get_running_loop().run_in_executor(None, partial(store.check, doubtful))
        has = store.has(wanted)
        self._warm = bool(has.all())
        if self._warm:
            return ReadResult([KEPT] * len(indices), waited=False)
        missing = np.flatnonzero(~has).tolist()
        if len(missing) == len(indices):
            return await super().read(indices)
        read = await super().read([indices[at] for at in missing])
        samples = [KEPT] * len(indices)
        for at, data in zip(missing, read.samples, strict=True):
            samples[at] = data
        read.samples = samples
        return read

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
        """Copy a chunk that is all there in one go; otherwise one sample after the other."""
        if not all(data is KEPT for data in encoded):
            # What was read ahead may have been decoded for another batch since.
            indices = np.asarray(plan.indices[start : start + len(encoded)], np.int64)
            for at in np.flatnonzero(self._store.has(indices)).tolist():
                encoded[at] = KEPT
        copies = watch.deadline is None and self._form.direct
        if copies and isinstance(builder, RowBatchBuilder) and all(data is KEPT for data in encoded):
            return self._copy(plan, start, len(encoded), builder)
        before = ChunkOutcome()
        if unread := [at for at, data in enumerate(encoded) if data is UNREAD]:
            assert self._blocking_reader is not None
            read = self._blocking_reader.read([plan.indices[start + at] for at in unread], before, watch.stop)
            for at, data in zip(unread, read, strict=True):
                encoded[at] = data
        outcome = super().decode(plan, start, encoded, builder, watch)
        outcome.read_s += before.read_s
        outcome.nbytes += before.nbytes
        outcome.retries += before.retries
        return outcome

    def _copy(self, plan: BatchPlan, start: int, count: int, builder: RowBatchBuilder) -> ChunkOutcome:
        outcome = ChunkOutcome()
        began = time.perf_counter()
        indices = plan.indices[start : start + count]
        rows = builder.rows[start : start + count].reshape(count, -1).view(np.uint8)
        self._store.take(np.asarray(indices, np.int64), rows)
        for position, index in enumerate(indices, start):
            self._placed(builder, position, index, there=True)
        if (target := self._target) is not None:
            for position, index in enumerate(indices, start):
                try:
                    builder.put(position, target(index))
                except BaseException as error:  # noqa: BLE001 - the user's source may raise anything; it becomes a value with a name
                    outcome.errors.append((position, self._named(error, index, reading=False)))
                    if self._policy.action == "raise":
                        break
        outcome.decode_s = time.perf_counter() - began
        self._warm_pace.observe(outcome.decode_s, count)
        return outcome

    def _decode_into(self, plan: BatchPlan, builder: BatchBuilder) -> Callable[[int, Any], None]:
        return partial(self._decode_one, plan, builder)

    def _decode_one(self, plan: BatchPlan, builder: BatchBuilder, position: int, data: Any) -> None:
        row = builder.rows[position, ...] if isinstance(builder, RowBatchBuilder) else None
        fresh, sample = self._make(plan, position, data, row)
        index = plan.indices[position]
        target = None if self._target is None else self._target(index)
        self._note(index, target)
        self._placed(builder, position, index, there=data is KEPT)
        if row is not None:
            builder.put(position, target)
        else:
            builder.put(position, sample if self._target is None else (sample, target))
        if fresh is not None:
            self._store.put(index, as_bytes(fresh))

    def _decode_guarded(
        self, plan: BatchPlan, position: int, data: Any, builder: BatchBuilder, guard: JobDeadline
    ) -> None:
        guard.begin(position)
        row = builder.rows[position, ...] if isinstance(builder, RowBatchBuilder) else None
        out = None if row is None else np.empty_like(row)
        fresh, sample = self._make(plan, position, data, out)
        index = plan.indices[position]
        target = None if self._target is None else self._target(index)
        self._note(index, target)
        with guard.commit():
            self._placed(builder, position, index, there=data is KEPT)
            if row is not None:
                row[...] = out
                builder.put(position, target)
            else:
                builder.put(position, sample if self._target is None else (sample, target))
        if fresh is not None:
            self._store.put(index, as_bytes(fresh))

    def _make(
        self, plan: BatchPlan, position: int, data: Any, out: NDArray[Any] | None
    ) -> tuple[NDArray[Any] | None, Any]:
        """The sample, in ``out`` or by itself, and what is to be kept of it where that is new."""
        index, fresh = plan.indices[position], None
        if data is not KEPT:
            if out is not None and self._decodes_rows and self._form.direct:
                self._decoder.decode_into(data, out, None)  # type: ignore[attr-defined]
                return out, None
            fresh, layout = self._form.decode(data)
            self._settle(layout, index)
            kept = fresh.view()
            kept.flags.writeable = False
        else:
            assert self._store.layout is not None
            layout = self._store.layout
            kept = layout.typed(self._store.row(index))
        if out is not None:
            self._form.fill(kept, out, self._seed(plan, position) if self._takes_seed else None)
            return fresh, None
        return fresh, self._form.sample(kept, layout, lambda: self._generator(self._seed(plan, position)))

    def _note(self, index: int, target: Any) -> None:
        """A sample has this target; for a store that keeps those too."""

    def _placed(self, builder: BatchBuilder, position: int, index: int, *, there: bool) -> None:
        """A sample goes to its place in a batch, ``there`` where it was kept before; for who keeps account of them."""

    def _settle(self, layout: Layout, index: int) -> None:
        if not self._store.settle(layout):
            raise NotCacheableError(f"the others are each a {self._store.layout}, this one is a {layout}")

    def _named(self, error: BaseException, index: int, *, reading: bool) -> FeedError:
        if isinstance(error, CacheError):
            without_our_frames(error)
            return error
        if isinstance(error, NotCacheableError):
            return CacheError(
                f"sample {self.key(index)!r} cannot be kept: {error}; let the decoder return one array or tensor, of "
                f"the same shape and dtype for every sample, or leave cache= out"
            )
        return super()._named(error, index, reading=reading)


def cached_assembly(fetcher: Fetcher) -> tuple[Row, str | None] | None:
    """The row of a batch, and torch's dtype where numpy has none, where a cache knows that all samples are alike."""
    return fetcher.plain_row if isinstance(fetcher, CachedFetcher) else None


def cached_form(decoder: Callable[..., Any]) -> SampleCodec:
    """How a decoder is taken apart; ``TypeError`` where it is random as a whole."""
    return form_of(decoder, rows=decodes_in_place(decoder), random=takes_rng(decoder))
