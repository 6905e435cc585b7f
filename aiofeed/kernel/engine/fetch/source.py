"""Fetcher of a ``Source``: reads bytes, on the loop or in the decode job, and decodes them into batches."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aiofeed import _load_addon
from aiofeed.kernel.core.errors import DecodeError, FeedError, ReadError
from aiofeed.kernel.core.faces import BaseSource, bind_decoder
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.types import BatchPlan, Gathered, Uncopied
from aiofeed.kernel.engine.fetch.async_reader import AsyncReader, ReadResult, total_bytes
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, DefaultCollateBuilder, RowBatchBuilder, misfit_error
from aiofeed.kernel.engine.fetch.fetcher import UNREAD, Chunk, ChunkOutcome, Fetcher, Place, RunJob, seed_of
from aiofeed.kernel.engine.fetch.user_errors import bytes_hint, pointer_hint, sample_error, untrace
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.tensors import unchanged
from aiofeed.kernel.runtime.time_limits import retry_blocking
from aiofeed.kernel.sampling.epochs import Step

# Reads that take this long are dominated by waiting. Chunks then have an eighth of the reads in flight, so that an
# eighth of them, and not half, pause while the results of a chunk are processed.
SLOW_READ_S = 0.010
SLOW_READ_CHUNKS = 8
SLOW_READ_LEAST = 8
# If reads wait in a queue, none pauses: a chunk costs as much as two reads.
QUEUED_CHUNKS = 4
# Samples that decode faster than this are small: a read takes a few microseconds, most of them under the GIL. Well
# above what Pillow takes for 64 x 64 pixels (120 us): with a threshold near the average, threads would change between
# both ways of reading, and interfere half of the time.
SMALL_DECODE_S = 0.000400
# Below this nearly all remaining work is Python's, and a second thread only waits for the GIL: for files of 2 KB one
# thread decodes a third more than two, and the tuner stays at two.
TINY_DECODE_S = 0.000030
# Seconds that a thread waits for its turn to read. A chunk from the page cache takes a third of a millisecond; slow
# storage is read by several threads.
TURN_S = 0.005

_generators = threading.local()


class SourceFetcher(Fetcher):
    """Fetches samples from a ``Source`` through a ``Decoder``.

    Args:
        source: Source of the bytes.
        decoder: Decoder of a sample; ``None``: the source, a stream, gives samples.
        in_place: Whether the decoder writes into the batch's rows (no ``collate_fn`` needs separate samples).
        length: Length of the source when the feeder was made; ``None``: its length now.
        policy: Retries, time limits, and whether the first failure ends a chunk.
        lookahead_bytes: See ``Limits``.
    """

    # Whether one call reads or makes several samples.
    gets_several = True

    def __init__(
        self,
        source: BaseSource,
        decoder: Callable[..., Any] | None,
        *,
        in_place: bool,
        length: int | None = None,
        policy: FailurePolicy | None = None,
        lookahead_bytes: int = 0,
    ) -> None:
        super().__init__(policy or FailurePolicy())
        self._source = source
        self._may_keep = decoder is None  # a stream's items stay in memory with the plan of their batch
        self._decoder: Callable[..., Any] = unchanged if decoder is None else decoder
        bound = bind_decoder(self._decoder)
        self._row, self._decode_into, self._takes_target = bound.row, bound.decode_into, bound.takes_target
        self._in_place = in_place
        self._length = len(source) if length is None else length
        self.limit_s: float | None = self.policy.decode_timeout_s
        self.target: Callable[[int], Any] | None = source.target
        # Reads the samples of later steps; to the reader it is the source.
        self._look_ahead: Any = None
        self._read_planned = source.read_planned
        if lookahead_bytes and source.looks_ahead:
            self._look_ahead = _load_addon("LookAhead", "looks_ahead = True")(source, lookahead_bytes)
        self._gathers: bool = self._look_ahead is not None and self._look_ahead.gathers
        self._reader = AsyncReader(source, self.policy)
        # Reads in decode threads, if the source can do it, and without a time limit.
        self._blocking_reader: BlockingReader | None = None
        if source.read_now is not None and self.policy.read_timeout_s is None:
            self._blocking_reader = BlockingReader(source.read_now, self.policy)
        self._decode_many = bound.decode_many_into if in_place else None
        # What is gathered is the batch, unless a decoder makes its samples.
        self._gets_batches = decoder is None
        self._takes_rng, self._takes_seed = bound.takes_rng, bound.takes_seed
        self._read_s = 0.0

    def reading_ahead(self, steps: Iterable[Step], run: RunJob, threads: int) -> AbstractContextManager[Iterable[Step]]:
        """Yield the same steps; samples of later steps are read meanwhile, if the source has shards."""
        ahead: Fetcher | Any = super() if self._look_ahead is None else self._look_ahead
        return ahead.reading_ahead(steps, run, threads)

    def new_builder(self, samples: int, lease: BufferLease) -> BatchBuilder:
        """Return a builder with the decoder's rows, or one that collates samples."""
        if not self._in_place:
            return DefaultCollateBuilder(samples, lease, may_keep=self._may_keep, target=self.target and 1)
        assert self._row is not None
        return RowBatchBuilder(self._row, samples, lease, targets=self.target is not None)

    def job_sizes(self, limits: ResolvedLimits) -> tuple[int, int]:
        """By the time that samples take; fewer if reads are slow. A batch that is gathered is not cut."""
        if self._gathers:
            return sys.maxsize, sys.maxsize
        least, most = super().job_sizes(limits)
        if self._read_s > SLOW_READ_S:
            chunks = QUEUED_CHUNKS if self._reader.queues else SLOW_READ_CHUNKS
            most = min(most, max(SLOW_READ_LEAST, limits.read_concurrency // chunks))
        return least, most

    def limit_reads(self, concurrency: int) -> bool:
        """Queue reads if the source reads samples one by one."""
        self._reader.concurrency = concurrency
        return self._reader.queues

    def key(self, index: int) -> str:
        """Return the source's name for a sample; "sample 3" if the source raises."""
        try:
            return str(self._source.key(index))
        except BaseException:  # noqa: BLE001 - the user's method; the error that is being reported matters more
            return f"sample {index}"

    def max_running(self, threads: int) -> int:
        """Return all threads, or one if samples are so small that Python takes longer than the decoder."""
        return 1 if 0.0 < self._sizer.seconds < TINY_DECODE_S and self._reads_inline() else threads

    async def read(self, indices: Sequence[int], plan: BatchPlan | None = None, start: int = 0) -> ReadResult:
        """Return the encoded samples; exceptions for those that failed, ``UNREAD`` if the decode job reads them."""
        if self._reads_inline():
            return ReadResult([UNREAD] * len(indices), waited=False)
        started = time.perf_counter()
        read_many = read_at = None
        if plan is not None and self._read_planned is not None:
            read_many = partial(self._read_planned, plan=plan, places=range(start, start + len(indices)))
            read_at = partial(self._read_at, plan, start)
        if plan is not None and self._look_ahead is not None:
            read_many = partial(self._look_ahead.read, plan=plan, start=start)
        result = await self._reader.read(indices, read_many, read_at)
        self._sizer.observe_bytes(result.nbytes, len(indices))
        result.waited = self._source.traits.indexed  # the items of a stream are in memory
        if not result.retries:  # pauses between attempts are not the storage's time
            self._read_s += (time.perf_counter() - started - self._read_s) * 0.2
        return result

    async def _read_at(self, plan: BatchPlan, start: int, at: int) -> Any:
        assert self._read_planned is not None
        [sample] = await self._read_planned([plan.indices[start + at]], plan, [start + at])
        if isinstance(sample, BaseException):
            raise sample
        return sample

    @property
    def reads_in_jobs(self) -> bool:
        """Whether decode jobs read all samples now, so that one job may make several batches."""
        # Rows of a table, and windows of tokens, cost less than a change of threads.
        rows = self._blocking_reader is not None and self._source.traits.rows and self._source.answers_at_once
        return rows or self._reads_inline()

    def _reads_inline(self) -> bool:
        """Return whether the decode job should read.

        A separate reading thread is a gain if decoding releases the GIL for long. With small samples, reader and
        decoder pass the GIL back and forth instead, and both get less done.
        """
        return (
            self._blocking_reader is not None
            and 0.0 < self._sizer.seconds < SMALL_DECODE_S
            and self._source.answers_at_once
        )

    def decode_chunk(self, chunk: Chunk) -> None:
        """Decode a chunk into the batch."""
        self.decode_with(chunk, None)

    def decode_with(self, chunk: Chunk, place: Place | None) -> None:
        """Call ``place`` for each position and value of a chunk, after reading those that are ``UNREAD``.

        ``None``: decode them into the batch.
        """
        if not isinstance(chunk.values, Gathered):
            self._read_now(chunk)
        gathered = chunk.values if isinstance(chunk.values, Gathered) else None
        if gathered is not None:
            self._gathers = True
            chunk.outcome.decode_s += gathered.seconds
            chunk.outcome.decode_cpu_s += gathered.cpu_seconds
        started, cpu_started = time.perf_counter(), time.thread_time()
        if place is None and (errors := self._decode_all(chunk)) is not None:
            reached = self._put_all(chunk, errors)
        elif gathered is not None and place is None and self._gets_batches and chunk.builder.put_gathered(gathered):
            reached = len(gathered)
        else:
            if gathered is not None:
                chunk.values = list(gathered)
            reached = self._place_all(chunk, place or self._decode_one(chunk), keep=place is None)
        seconds, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started
        chunk.outcome.decode_s += seconds
        chunk.outcome.decode_cpu_s += cpu_s
        chunk.outcome.samples += reached
        if reached:
            self._sizer.observe(seconds, reached, cpu_s)

    def _read_now(self, chunk: Chunk) -> None:
        """Read the samples of a chunk that are ``UNREAD``, in this thread."""
        positions = chunk.unread()
        if not positions:
            return
        assert self._blocking_reader is not None
        indices, first = [chunk.plan.indices[position] for position in positions], chunk.positions[0]
        encoded = self._blocking_reader.read(indices, chunk.outcome, chunk.control.stop)
        if len(positions) < len(chunk.values):
            for position, value in zip(positions, encoded, strict=True):
                chunk.values[position - first] = value
        elif isinstance(encoded, Gathered):
            chunk.values = encoded
        else:
            chunk.values[:] = encoded

    def _decode_all(self, chunk: Chunk) -> Sequence[Exception | None] | None:
        """Decode a chunk into its rows in one call; returns the error of each sample, ``None`` where there is none.

        Returns ``None`` if samples have to be decoded one by one: the decoder cannot do it, there is a time limit, or a
        sample could not be read.
        """
        control, builder = chunk.control, chunk.builder
        if self._decode_many is None or control.deadline is not None or control.stop.is_set():
            return None
        values: Any = chunk.values
        if not isinstance(values, Gathered):
            kinds = set(map(type, values))
            if any(issubclass(kind, BaseException) for kind in kinds):
                return None
            values = [*values]
            if Uncopied in kinds:
                values = [bytes(each.data) if type(each) is Uncopied else each for each in values]
        assert isinstance(builder, RowBatchBuilder)
        plan, first, count = chunk.plan, chunk.positions[0], len(chunk.positions)
        seeds = [seed_of(plan, position) for position in chunk.positions] if self._takes_seed else None
        try:
            errors = self._decode_many(values, builder.rows[first : first + count], seeds)
            if len(errors) != count:
                raise ValueError(f"decode_many_into returned {len(errors)} errors for {count} samples")
        except BaseException:  # noqa: BLE001 - the user's decoder may raise anything; one by one, the error gets a name
            return None
        return errors

    def _put_all(self, chunk: Chunk, errors: Sequence[Exception | None]) -> int:
        """Handle the errors and targets of samples that ``_decode_all`` has decoded; returns how many there are."""
        if self.target is None and errors.count(None) == len(errors):
            chunk.values = []
            return len(errors)
        builder, indices, first = chunk.builder, chunk.plan.indices, chunk.positions[0]
        for error in errors:
            if error is not None:
                untrace(error)

        def place(position: int, value: Any) -> None:
            if (error := errors[position - first]) is not None:
                raise error
            if self.target is not None:
                builder.put(position, self.target(indices[position]))

        return chunk.decode_each(place)

    def _place_all(self, chunk: Chunk, place: Place, *, keep: bool) -> int:
        """Place samples one by one; the items of a stream together, if the batch keeps them as they are."""
        together = keep and self._may_keep and self.target is None and chunk.control.deadline is None
        if not together or any(issubclass(kind, BaseException | Uncopied) for kind in set(map(type, chunk.values))):
            return chunk.decode_each(place)
        reached, first, count = chunk.decode_each(place, 0, 1), chunk.positions[0], len(chunk.positions)
        if chunk.ended or chunk.builder.kept is None:
            return reached if chunk.ended else chunk.decode_each(place, reached)
        chunk.builder.kept[first + 1 : first + count] = chunk.values[1:]
        return count

    def _decode_one(self, chunk: Chunk) -> Place:
        """A function that decodes one sample into the batch: tiny samples gain from tests made once per chunk."""
        plan, builder, target, decoder = chunk.plan, chunk.builder, self.target, self._decoder
        indices, timed = plan.indices, chunk.control.deadline is not None
        if self._in_place:
            assert isinstance(builder, RowBatchBuilder)
            assert self._decode_into is not None
            rows, decode_into = builder.rows, self._decode_into

            def decode_into_row(position: int, value: Any) -> None:
                row = rows[position]
                # An abandoned job must not write into the batch later.
                out = np.empty_like(row) if timed else row
                decode_into(value, out, seed_of(plan, position) if self._takes_seed else None)
                label = None if target is None else target(indices[position])
                if timed:
                    with chunk.commit():
                        row[...] = out
                        builder.put(position, label)
                elif target is not None:
                    builder.put(position, label)

            return decode_into_row
        put = chunk.put
        takes_rng = self._takes_rng

        if target is not None and self._takes_target:

            def decode_with_target(position: int, value: Any) -> None:
                options = {"rng": generator_of(plan, position)} if takes_rng else {}
                put(position, decoder(value, target=target(indices[position]), **options))

            return decode_with_target

        def decode(position: int, value: Any) -> None:
            sample = decoder(value, rng=generator_of(plan, position)) if takes_rng else decoder(value)
            put(position, sample if target is None else (sample, target(indices[position])))

        return decode

    def to_feed_error(self, error: BaseException, index: int, reading: bool) -> FeedError:
        """A ``ReadError``, a ``DecodeError``, or a ``CollateError`` if the sample does not fit into its batch."""
        key = self.key(index)
        if (misfit := misfit_error(error, key)) is not None:
            return misfit
        if not reading:
            hint = bytes_hint(error) or pointer_hint(key)
            return sample_error(DecodeError, error, key, index, hint, traced=self.stop_at_error)
        hint = ""
        if isinstance(error, TypeError) and "await" in format_error(error):
            hint = f" ({type(self._source.given).__name__}.read is not an `async def`; a source needs one)"
        if isinstance(error, IsADirectoryError):
            hint = f" (it is a folder: aiofeed.ImageFolder({error.filename or key!r}) reads images of its sub-folders)"
        if isinstance(error, IndexError):
            with contextlib.suppress(BaseException):  # the user's __len__; this is only a hint
                hint = f" (the source had {self._length} samples when the feeder was made, now {len(self._source)})"
        return sample_error(ReadError, error, key, index, hint, traced=self.stop_at_error)

    def overdue(self, index: int) -> FeedError:
        """Return the ``DecodeError`` of a sample over its time limit."""
        late = TimeoutError(f"not decoded within decode_timeout_s={self.policy.decode_timeout_s:g}")
        return sample_error(DecodeError, late, self.key(index), index)


def generator_of(plan: BatchPlan, position: int) -> Any:
    """The ``torch.Generator`` of the sample at a position of a batch, until this thread calls the function again."""
    generator = getattr(_generators, "torch", None)
    if generator is None:
        import torch

        generator = _generators.torch = torch.Generator()
    return generator.manual_seed(seed_of(plan, position))


@dataclass(eq=False)
class BlockingReader:
    """Calls a source's ``read_now`` in decode threads, and returns what it raises as values.

    Threads take turns if there is a GIL. Reading a file takes it several times, for a microsecond each: threads that
    read at the same time pass it back and forth, which costs more than the reads. Without a GIL two threads read files
    of 2 KB 1.36 times as fast as in turns.
    """

    read_now: Callable[[Sequence[int]], Sequence[Any]]
    policy: FailurePolicy
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def read(self, indices: Sequence[int], outcome: ChunkOutcome, stop: threading.Event) -> Any:
        """The encoded samples, exceptions for those that failed; time, bytes and retries are added to ``outcome``."""
        started = time.thread_time()
        try:
            encoded: Any = self._read_in_turn(indices)
            if len(encoded) != len(indices):
                raise ValueError(f"read_now returned {len(encoded)} samples for {len(indices)} indices")
        except BaseException:  # noqa: BLE001 - the user's source may raise anything; one by one, the error gets a name
            encoded = [self._read_one(index) for index in indices]
        if self.policy.retries and not isinstance(encoded, Gathered):
            for at, data in enumerate(encoded):
                if isinstance(data, BaseException):
                    attempt = partial(self._attempt, indices[at])
                    encoded[at], retries = retry_blocking(self.policy, data, attempt, stop)
                    outcome.retries += retries
        # The processor's time: the files are in the page cache, so that all else is waiting for the GIL or the turn.
        outcome.read_s += time.thread_time() - started
        outcome.nbytes += total_bytes(encoded)
        return encoded

    def _read_in_turn(self, indices: Sequence[int]) -> Sequence[Any]:
        # Threads that read files at the same time pass the GIL back and forth, which costs more than the reads.
        acquired = machine.has_gil() and self._turn.acquire(timeout=TURN_S)
        try:
            found = self.read_now(indices)
            return found if isinstance(found, Gathered) else list(found)
        finally:
            if acquired:
                self._turn.release()

    def _read_one(self, index: int) -> Any:
        try:
            return self._attempt(index)
        except BaseException as error:  # noqa: BLE001 - the user's source may raise anything; it is raised again with a name
            return error

    def _attempt(self, index: int) -> Any:
        [data] = self.read_now([index])
        if isinstance(data, BaseException):
            raise data
        return data
