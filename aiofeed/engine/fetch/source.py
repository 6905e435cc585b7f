"""A ``Source``'s bytes, through a ``Decoder``, into a batch's places. Here errors get their names."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiofeed.core.errors import FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan, RowDecoder, Source
from aiofeed.engine.fetch.async_reader import AsyncReader, ReadResult, total_bytes, unless_overridden
from aiofeed.engine.fetch.collate import BatchBuilder, RowBatchBuilder
from aiofeed.engine.fetch.default_collate import misfit_error
from aiofeed.engine.fetch.fetcher import ChunkOutcome, ChunkSizer
from aiofeed.engine.fetch.user_errors import decode_error, read_error, untrace
from aiofeed.runtime.retry import retry_blocking
from aiofeed.runtime.time_limits import AbandonedError, JobControl, JobDeadline, StopFlag
from aiofeed.sampling.order import sample_seed

# Where a read takes this long, waiting is what costs. What a chunk's reads return is dealt with while those of other
# chunks are on their way: with an eighth of the reads in each, an eighth of them pause for it and not half.
SLOW_READ_S = 0.010
SLOW_READ_CHUNKS = 8
SLOW_READ_LEAST = 8
# Samples that decode faster than this are small: a read takes a few microseconds, most of them under the GIL. Well
# above what Pillow takes for 64 x 64 pixels (120 us): a pace that falls to either side of it has threads in each
# other's way half of the time.
SMALL_DECODE_S = 0.000400
# Below this nearly all that is left to do is Python's, and a second thread only waits for the GIL: of files of 2 KB one
# thread gives a third more than two, and the tuner keeps two.
TINY_DECODE_S = 0.000030

UNREAD: Any = object()
_UNGUARDED = contextlib.nullcontext()


# Seconds that a thread waits for its turn to read. A chunk from the page cache takes a third of a millisecond; storage
# that has turned slow is not read by one thread alone.
TURN_S = 0.005


class SourceFetcher:
    """Bytes from a ``Source``, through a ``Decoder``.

    Args:
        source: where the bytes come from.
        decoder: what makes samples of them.
        in_place: whether the decoder writes into the batch's rows (no ``collate_fn`` wants separate samples).
        length: of the source when the feeder was made; ``None``: what it is now.
        policy: retries, time limits, and whether a chunk goes on after a sample that fails.
    """

    def __init__(
        self,
        source: Source[Any],
        decoder: Callable[..., Any],
        *,
        in_place: bool,
        length: int | None = None,
        policy: FailurePolicy | None = None,
    ) -> None:
        self._source = source
        self._decoder = decoder
        self._in_place = in_place
        self._length = len(source) if length is None else length
        self._policy = policy or FailurePolicy()
        self._traced = self._policy.action == "raise"
        self._reader = AsyncReader(source, self._policy)
        self._blocking_reader = blocking_reader(source, self._policy)
        self._target: Callable[[int], Any] | None = getattr(source, "target", None)
        self._decode_many: Callable[..., Sequence[Exception | None]] | None = None
        if in_place:
            self._decode_many = unless_overridden(decoder, "decode_many_into", ("decode_into",))
        self._takes_rng = takes_rng(decoder)
        self._takes_seed = bool(getattr(decoder, "takes_seed", False))
        self._generators = threading.local()
        self._pace = ChunkSizer()
        self._read_s = 0.0

    @property
    def has_targets(self) -> bool:
        """Whether a sample is ``(decoded, target)``."""
        return self._target is not None

    @property
    def limit_s(self) -> float | None:
        """Most seconds that ``decode`` may be at one sample."""
        return self._policy.decode_timeout_s

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """As many samples as make a job worth its hops, and no more."""
        size = self._pace.chunk_size(samples, limits.decode_threads)
        if self._read_s > SLOW_READ_S:
            size = min(size, max(SLOW_READ_LEAST, limits.read_concurrency // SLOW_READ_CHUNKS))
        return size

    def key(self, index: int) -> str:
        """The source's name for a sample; a source that fails to say gets one made up."""
        try:
            return str(self._source.key(index))
        except BaseException:  # noqa: BLE001 - the user's method; the error that is being reported matters more
            return f"sample {index}"

    def max_running(self, threads: int) -> int:
        """All of them, but one where samples are so small that they are Python's work more than the decoder's."""
        return 1 if 0.0 < self._pace.seconds < TINY_DECODE_S and self._reads_inline() else threads

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """The encoded samples, errors in their places."""
        if self._reads_inline():
            return ReadResult([UNREAD] * len(indices), waited=False)
        started = time.perf_counter()
        encoded = await self._reader.read(indices)
        self._pace.weigh(encoded.nbytes, len(indices))
        if not encoded.retries:  # pauses between attempts say nothing of the storage
            self._read_s += (time.perf_counter() - started - self._read_s) * 0.2
        return encoded

    def _reads_inline(self) -> bool:
        """Whether reading is better left to the decode job.

        A thread of its own for reading is a gain where decoding leaves the GIL alone for long. Where samples are
        small, reader and decoder hand the GIL to and fro instead, and both get less done.
        """
        return (
            self._blocking_reader is not None
            and 0.0 < self._pace.seconds < SMALL_DECODE_S
            and bool(getattr(self._source, "answers_at_once", False))
        )

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
        """Decode a chunk. After a sample that fails the rest is left where that raises."""
        outcome = ChunkOutcome()
        guard = watch.deadline
        if guard is not None:
            guard.outcome = outcome
        if encoded and encoded[0] is UNREAD:
            assert self._blocking_reader is not None
            indices = plan.indices[start : start + len(encoded)]
            encoded[:] = self._blocking_reader.read(indices, outcome, watch.stop)
        started, cpu = time.perf_counter(), time.thread_time()
        done = 0
        stop, decode_one = watch.stop, self._decode_into(plan, builder)
        # A limit on the time of one sample is kept by decoding one at a time.
        fault: BaseException | None = None
        faults = None if guard is not None else self._decode_at_once(plan, start, encoded, builder, watch)
        for position, data in enumerate(encoded, start):
            if stop.stopped:
                break
            encoded[position - start] = None
            try:
                if isinstance(data, BaseException):
                    raise data
                if faults is not None:
                    if (fault := faults[position - start]) is not None:
                        raise fault
                    self._put_target(plan, position, builder)
                elif guard is None:
                    decode_one(position, data)
                else:
                    self._decode_guarded(plan, position, data, builder, guard)
            except AbandonedError:
                raise
            except BaseException as error:  # noqa: BLE001 - the user's decoder may raise anything; it becomes a value with a name
                named = self._named(error, plan.indices[position], reading=error is data)
                with _UNGUARDED if guard is None else guard.commit():
                    outcome.errors.append((position, named))
                del named
                if self._policy.action == "raise":
                    break
            done += 1
        del fault, faults
        outcome.decode_s = time.perf_counter() - started
        if done:
            self._pace.observe(outcome.decode_s, done, time.thread_time() - cpu)
        return outcome

    def _decode_into(self, plan: BatchPlan, builder: BatchBuilder) -> Callable[[int, Any], None]:
        """What decodes one sample into its place. Made once per chunk: tiny samples feel every question asked twice."""
        target, indices, put = self._target, plan.indices, builder.put
        if self._in_place:
            assert isinstance(builder, RowBatchBuilder)
            row_decoder: RowDecoder = self._decoder  # type: ignore[assignment]
            rows = builder.rows

            def fill(position: int, data: Any) -> None:
                seed = self._seed(plan, position) if self._takes_seed else None
                row_decoder.decode_into(data, rows[position], seed)
                if target is not None:
                    put(position, target(indices[position]))

            return fill
        decoder = partial(self._sample, plan) if self._takes_rng else None
        plain = self._decoder

        def decode(position: int, data: Any) -> None:
            sample = plain(data) if decoder is None else decoder(position, data)
            put(position, sample if target is None else (sample, target(indices[position])))

        return decode

    def _decode_at_once(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> Sequence[Exception | None] | None:
        """Fill a chunk's rows in one call: an error for each that has one; ``None`` where it has to be one by one."""
        if self._decode_many is None or watch.stop.stopped or any(isinstance(data, BaseException) for data in encoded):
            return None
        assert isinstance(builder, RowBatchBuilder)
        end = start + len(encoded)
        seeds = [self._seed(plan, position) for position in range(start, end)] if self._takes_seed else None
        try:
            faults = self._decode_many(list(encoded), builder.rows[start:end], seeds)
            if len(faults) != len(encoded):
                raise ValueError(f"decode_many_into returned {len(faults)} errors for {len(encoded)} samples")
        except BaseException:  # noqa: BLE001 - the user's decoder may raise anything; asked one by one, it names who failed
            return None
        for fault in faults:
            if fault is not None:
                untrace(fault)
        return faults

    def _put_target(self, plan: BatchPlan, position: int, builder: BatchBuilder) -> None:
        if self._target is not None:
            builder.put(position, self._target(plan.indices[position]))

    def _decode_guarded(
        self, plan: BatchPlan, position: int, data: Any, builder: BatchBuilder, guard: JobDeadline
    ) -> None:
        """The same under a time limit: what it comes to waits elsewhere for leave to enter the batch."""
        guard.begin(position)
        row = out = None
        sample: Any = None
        if self._in_place:
            assert isinstance(builder, RowBatchBuilder)
            decoder: RowDecoder = self._decoder  # type: ignore[assignment]
            row = builder.rows[position]
            out = np.empty_like(row)
            decoder.decode_into(data, out, self._seed(plan, position) if self._takes_seed else None)
        else:
            sample = self._sample(plan, position, data)
        target = None if self._target is None else self._target(plan.indices[position])
        with guard.commit():
            if row is not None:
                row[...] = out
                builder.put(position, target)
            else:
                builder.put(position, sample if self._target is None else (sample, target))

    def _sample(self, plan: BatchPlan, position: int, data: Any) -> Any:
        if self._takes_rng:
            return self._decoder(data, rng=self._generator(self._seed(plan, position)))
        return self._decoder(data)

    def _seed(self, plan: BatchPlan, position: int) -> int:
        return sample_seed(plan.epoch_seed, plan.positions[position])

    def _generator(self, seed: int) -> Any:
        generator = getattr(self._generators, "torch", None)
        if generator is None:
            import torch

            generator = self._generators.torch = torch.Generator()
        return generator.manual_seed(seed)

    def _named(self, error: BaseException, index: int, *, reading: bool) -> FeedError:
        key = self.key(index)
        if (misfit := misfit_error(error, key)) is not None:
            return misfit
        if not reading:
            return decode_error(error, key, index, traced=self._traced)
        hint = ""
        if isinstance(error, TypeError) and "'await' expression" in str(error):
            hint = f" ({type(self._source).__name__}.read is no `async def`, which a source's has to be)"
        if isinstance(error, IndexError):
            with contextlib.suppress(Exception):  # the user's __len__; this is only a hint
                hint = f" (the source had {self._length} samples when the feeder was made, now {len(self._source)})"
        return read_error(error, key, index, hint, traced=self._traced)

    def overdue(self, index: int) -> FeedError:
        """A ``DecodeError``, by name."""
        late = TimeoutError(f"not decoded within decode_timeout_s={self._policy.decode_timeout_s:g}")
        return decode_error(late, self.key(index), index)


def takes_rng(decoder: Callable[..., Any]) -> bool:
    """Whether a decoder has a keyword ``rng``; one whose signature cannot be read has none."""
    try:
        parameter = inspect.signature(decoder).parameters.get("rng")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def decodes_in_place(decoder: object) -> bool:
    """Whether a decoder fills rows of the batch's memory itself."""
    return hasattr(decoder, "decode_into") and hasattr(decoder, "row")


class BlockingReader:
    """A source's ``read_now``, called so that whatever it raises becomes a value; used in decode threads.

    Threads read in turn. A file takes the GIL several times, for a microsecond each: threads that are at it together
    hand it to and fro, which costs more than the reads.

    Args:
        read_now: of the source.
        policy: retries.
    """

    def __init__(self, read_now: Callable[[Sequence[int]], Sequence[Any]], policy: FailurePolicy) -> None:
        self._read_now = read_now
        self._policy = policy
        self._turn = threading.Lock()

    def read(self, indices: Sequence[int], outcome: ChunkOutcome, stop: StopFlag) -> list[Any]:
        """The encoded samples, errors in their places; ``outcome`` gets the time, the bytes and the retries."""
        started = time.perf_counter()
        try:
            encoded = self._read_in_turn(indices)
            if len(encoded) != len(indices):
                raise ValueError(f"read_now returned {len(encoded)} samples for {len(indices)} indices")
        except Exception:  # noqa: BLE001 - the user's source may raise anything; asked one by one, it names who failed
            encoded = [self._read_one(index) for index in indices]
        if self._policy.retries:
            for at, data in enumerate(encoded):
                if isinstance(data, BaseException):
                    attempt = partial(self._attempt, indices[at])
                    encoded[at], retries = retry_blocking(self._policy, data, attempt, stop)
                    outcome.retries += retries
        outcome.read_s = time.perf_counter() - started
        outcome.nbytes = total_bytes(encoded)
        return encoded

    def _read_in_turn(self, indices: Sequence[int]) -> list[Any]:
        mine = self._turn.acquire(timeout=TURN_S)
        try:
            return list(self._read_now(indices))
        finally:
            if mine:
                self._turn.release()

    def _read_one(self, index: int) -> Any:
        try:
            return self._attempt(index)
        except Exception as error:  # noqa: BLE001 - as above; it is raised again by name
            return error

    def _attempt(self, index: int) -> Any:
        [data] = self._read_now([index])
        if isinstance(data, BaseException):
            raise data
        return data


def blocking_reader(source: Source[Any], policy: FailurePolicy) -> BlockingReader | None:
    """What reads in a decode thread; ``None`` where the source cannot, or nothing could interrupt it in time."""
    read_now: Callable[[Sequence[int]], Sequence[Any]] | None
    read_now = unless_overridden(source, "read_now", ("read", "read_many"))
    return None if read_now is None or policy.read_timeout_s is not None else BlockingReader(read_now, policy)
