"""From indices to filled rows: read a chunk, decode it. Here errors get their names; they travel on as values."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiofeed.collate import Assembly, RowAssembly, misfit_error
from aiofeed.config import ResolvedLimits
from aiofeed.errors import DecodeError, FeedError, ReadError, SampleError
from aiofeed.order import sample_seed
from aiofeed.sources.dataset import FromDataset
from aiofeed.types import BatchPlan, RowDecoder, Source

# Work per executor job. A chunk costs the loop a task, two hops through executors and three wake-ups, which 25 ms of
# decoding makes small; a batch still splits into a piece for each thread.
CHUNK_S = 0.025
FIRST_CHUNK = 16
# Where a read takes this long, waiting is what costs. What a chunk's reads return is dealt with while those of other
# chunks are on their way: with an eighth of the reads in each, an eighth of them pause for it and not half.
SLOW_READ_S = 0.010
SLOW_READ_CHUNKS = 8
SLOW_READ_LEAST = 8
# Samples that decode faster than this are small: a read takes a few microseconds, most of them under the GIL.
SMALL_DECODE_S = 0.000150

# Below this the GIL is held nearly all the time, reading included, and a second thread only waits for it.
TINY_DECODE_S = 0.000030

_UNREAD: Any = object()


@dataclass(eq=False)
class Outcome:
    """What came of one chunk. Errors are by position in the batch, in order."""

    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    read_s: float = 0.0
    nbytes: int = 0
    decode_s: float = 0.0
    collate_s: float = 0.0


class Fetcher(Protocol):
    """Two steps per chunk: ``read`` on the loop, ``decode`` in a decode thread."""

    @property
    def has_targets(self) -> bool:
        """Whether a sample is ``(decoded, target)``."""
        ...

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """How many samples the next executor job should have."""
        ...

    def lanes(self, threads: int) -> int:
        """How many of ``threads`` decode threads are worth using now."""
        ...

    async def read(self, indices: Sequence[int]) -> tuple[list[Any], int]:
        """Encoded samples, an exception in the place of one that failed, and their bytes.

        Where ``decode`` is going to read them, nothing is in their places yet.
        """
        ...

    def decode(self, plan: BatchPlan, start: int, encoded: list[Any], assembly: Assembly, stop: StopFlag) -> Outcome:
        """Decode samples ``start``, ``start + 1``, ... of a batch into their places."""
        ...

    def key(self, index: int) -> str:
        """The sample's name, whatever the source says."""
        ...


class StopFlag:
    """Set once nobody wants the results any more: a running job then ends after the sample it is at."""

    __slots__ = ("stopped",)

    def __init__(self) -> None:
        self.stopped = False


class _Pace:
    """Seconds of decoding per sample, followed by a moving average; from it the size of a chunk."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, seconds: float, samples: int) -> None:
        per_sample = seconds / max(samples, 1)
        self.seconds += (per_sample - self.seconds) * (0.2 if self.seconds else 1.0)

    def chunk_size(self, samples: int, threads: int) -> int:
        even = -(-samples // threads)
        if self.seconds == 0.0:
            return max(1, min(FIRST_CHUNK, even))
        wanted = max(1, int(CHUNK_S / self.seconds))
        if wanted >= samples:
            return samples
        # As many pieces as threads, or a multiple: an odd piece would leave a thread idle at the end of an epoch.
        pieces = max(threads, -(-samples // wanted) // threads * threads)
        return -(-samples // pieces)


class BytesFetcher:
    """Bytes from a ``Source``, through a ``Decoder``.

    Args:
        source: where the bytes come from.
        decoder: what makes samples of them.
        in_place: whether the decoder writes into the batch's rows (no ``collate_fn`` wants separate samples).
        length: of the source when the feeder was made; ``None``: what it is now.
    """

    def __init__(
        self, source: Source[Any], decoder: Callable[..., Any], *, in_place: bool, length: int | None = None
    ) -> None:
        self._source = source
        self._decoder = decoder
        self._in_place = in_place
        self._length = len(source) if length is None else length
        self._read_many: Callable[[Sequence[int]], Any] | None = _unless_overridden(source, "read_many", ("read",))
        self._read_now: Callable[[Sequence[int]], Sequence[Any]] | None = _unless_overridden(
            source, "read_now", ("read", "read_many")
        )
        self._target: Callable[[int], Any] | None = getattr(source, "target", None)
        self._takes_rng = takes_rng(decoder)
        self._takes_seed = bool(getattr(decoder, "takes_seed", False))
        self._generators = threading.local()
        self._pace = _Pace()
        self._read_s = 0.0

    @property
    def has_targets(self) -> bool:
        """Whether a sample is ``(decoded, target)``."""
        return self._target is not None

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
        except Exception:  # noqa: BLE001 - the user's method; the error that is being reported matters more
            return f"sample {index}"

    def lanes(self, threads: int) -> int:
        """All of them, but one where samples are so small that they are Python's work more than the decoder's."""
        return 1 if 0.0 < self._pace.seconds < TINY_DECODE_S and self._reads_inline() else threads

    async def read(self, indices: Sequence[int]) -> tuple[list[Any], int]:
        """The encoded samples, errors in their places."""
        if self._reads_inline():
            return [_UNREAD] * len(indices), 0
        started = time.perf_counter()
        encoded = await self._read(indices)
        self._read_s += (time.perf_counter() - started - self._read_s) * 0.2
        return encoded, sum(map(_nbytes, encoded))

    def _reads_inline(self) -> bool:
        """Whether reading is better left to the decode job.

        A thread of its own for reading is a gain where decoding leaves the GIL alone for long. Where samples are
        small, reader and decoder hand the GIL to and fro instead, and both get less done.
        """
        return (
            self._read_now is not None
            and 0.0 < self._pace.seconds < SMALL_DECODE_S
            and bool(getattr(self._source, "answers_at_once", False))
        )

    async def _read(self, indices: Sequence[int]) -> list[Any]:
        if self._read_many is not None:
            try:
                encoded = list(await self._read_many(indices))
            except BaseException:  # the user's coroutine; asked one by one below, it names who failed
                if _is_cancelled():
                    raise
            else:
                if len(encoded) == len(indices):
                    return encoded
                wrong = f"read_many returned {len(encoded)} samples for {len(indices)} indices"
                return [ValueError(wrong)] * len(indices)
        if len(indices) == 1:
            return [await self._read_one(indices[0])]
        return await asyncio.gather(*[self._read_one(index) for index in indices])

    async def _read_one(self, index: int) -> Any:
        try:
            return await self._source.read(index)
        except BaseException as error:  # the user's coroutine may raise anything; raised again by name
            if isinstance(error, GeneratorExit) or _is_cancelled():
                raise
            return error

    def decode(self, plan: BatchPlan, start: int, encoded: list[Any], assembly: Assembly, stop: StopFlag) -> Outcome:
        """Decode a chunk; a sample that fails is reported, and the rest of the chunk left."""
        outcome = Outcome()
        if encoded[0] is _UNREAD:
            encoded = self._read_chunk(plan.indices[start : start + len(encoded)], outcome)
        started = time.perf_counter()
        done = 0
        for position, data in enumerate(encoded, start):
            if stop.stopped:
                break
            encoded[position - start] = None
            index = plan.indices[position]
            try:
                if isinstance(data, BaseException):
                    raise data
                self._decode_one(plan, position, index, data, assembly)
            except BaseException as error:  # noqa: BLE001 - the user's decoder may raise anything; it becomes a value with a name
                outcome.errors.append((position, self._named(error, index, reading=error is data)))
                break
            done += 1
        outcome.decode_s = time.perf_counter() - started
        if done:
            self._pace.observe(outcome.decode_s, done)
        return outcome

    def _read_chunk(self, indices: Sequence[int], outcome: Outcome) -> list[Any]:
        assert self._read_now is not None
        started = time.perf_counter()
        try:
            encoded = list(self._read_now(indices))
        except Exception:  # noqa: BLE001 - the user's source may raise anything; asked one by one, it names who failed
            encoded = [self._read_now_one(index) for index in indices]
        outcome.read_s = time.perf_counter() - started
        outcome.nbytes = sum(map(_nbytes, encoded))
        return encoded

    def _read_now_one(self, index: int) -> Any:
        assert self._read_now is not None
        try:
            [data] = self._read_now([index])
        except Exception as error:  # noqa: BLE001 - as above; it is raised again by name
            return error
        return data

    def _decode_one(self, plan: BatchPlan, position: int, index: int, data: Any, assembly: Assembly) -> None:
        if self._in_place:
            assert isinstance(assembly, RowAssembly)
            seed = sample_seed(plan.epoch_seed, plan.positions[position]) if self._takes_seed else None
            decoder: RowDecoder = self._decoder  # type: ignore[assignment]
            decoder.decode_into(data, assembly.rows[position], seed)
            if self._target is not None:
                assembly.put(position, self._target(index))
            return
        if self._takes_rng:
            sample = self._decoder(data, rng=self._generator(sample_seed(plan.epoch_seed, plan.positions[position])))
        else:
            sample = self._decoder(data)
        assembly.put(position, sample if self._target is None else (sample, self._target(index)))

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
        if isinstance(error, SampleError):
            return error
        named: SampleError
        if not reading:
            named = DecodeError(f"cannot decode {key!r}: {_told(error)}", key=key, index=index, stage="decode")
        else:
            hint = ""
            if isinstance(error, IndexError):
                with contextlib.suppress(Exception):  # the user's __len__; this is only a hint
                    hint = f" (the source had {self._length} samples when the feeder was made, now {len(self._source)})"
            named = ReadError(f"cannot read {key!r}: {_told(error)}{hint}", key=key, index=index, stage="read")
        named.__cause__ = without_our_frames(error)
        return named


class DatasetFetcher:
    """Samples from a map-style ``Dataset``: nothing to read on the loop, everything in the executor."""

    def __init__(self, source: FromDataset) -> None:
        self._source = source
        self._pace = _Pace()

    has_targets = False

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """The whole batch where one thread does it all, as ``__getitems__`` expects."""
        threads = limits.decode_threads
        return samples if threads == 1 else self._pace.chunk_size(samples, threads)

    def key(self, index: int) -> str:
        """The dataset's name and the index."""
        return self._source.key(index)

    def lanes(self, threads: int) -> int:
        """All of them: whoever said so many knows the dataset."""
        return threads

    async def read(self, indices: Sequence[int]) -> tuple[list[Any], int]:
        """Nothing: a Dataset's items are made in a decode thread."""
        return [None] * len(indices), 0

    def decode(self, plan: BatchPlan, start: int, encoded: list[Any], assembly: Assembly, stop: StopFlag) -> Outcome:
        """Get the items and store them."""
        outcome = Outcome()
        started = time.perf_counter()
        indices = plan.indices[start : start + len(encoded)]
        position = start
        try:
            if hasattr(self._source.dataset, "__getitems__"):
                for position, item in enumerate(self._source.items(indices), start):
                    assembly.put(position, item)
            else:
                for position, index in enumerate(indices, start):
                    if stop.stopped:
                        break
                    assembly.put(position, self._source.dataset[index])
        except BaseException as error:  # noqa: BLE001 - the user's Dataset may raise anything; it becomes a value with a name
            outcome.errors.append((position, self._named(error, plan.indices[position])))
        outcome.decode_s = time.perf_counter() - started
        self._pace.observe(outcome.decode_s, len(encoded))
        return outcome

    def _named(self, error: BaseException, index: int) -> FeedError:
        key = self.key(index)
        if (misfit := misfit_error(error, key)) is not None:
            return misfit
        named = ReadError(f"cannot read {key!r}: {_told(error)}", key=key, index=index, stage="read")
        named.__cause__ = without_our_frames(error)
        return named


def without_our_frames(error: BaseException) -> BaseException:
    """The error with a traceback that begins in the user's code.

    Beside being shorter it refers to none of our frames. They refer to what came of the chunk, and so to the error:
    a cycle that would keep alive whatever the traceback comes to refer to, the trainer's own frames in the end.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


def _is_cancelled() -> bool:
    """Whether somebody cancelled the running task; an error of the user's may be a ``CancelledError`` as well."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unless_overridden(source: object, name: str, others: Sequence[str]) -> Any:
    """A method that stands in for ``others``; ``None`` where a subclass has overridden one of those, but not it."""
    rank = {each: _rank(source, each) for each in (name, *others)}
    return getattr(source, name, None) if all(rank[name] <= rank[other] for other in others) else None


def _rank(source: object, name: str) -> int:
    """How far up the classes of ``source`` a method is found; last comes what ``__getattr__`` finds elsewhere."""
    if name in getattr(source, "__dict__", {}):
        return -1
    kinds = type(source).__mro__
    return next((depth for depth, kind in enumerate(kinds) if name in vars(kind)), len(kinds))


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


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _nbytes(encoded: Any) -> int:
    if isinstance(encoded, bytes | bytearray):
        return len(encoded)
    if isinstance(encoded, memoryview):
        return encoded.nbytes
    if isinstance(encoded, tuple | list):
        return sum(map(_nbytes, encoded))
    if isinstance(encoded, dict):
        return sum(map(_nbytes, encoded.values()))
    return 0
