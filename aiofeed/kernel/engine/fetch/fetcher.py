"""The base of all fetchers, and what they share: a chunk and the loop over its samples, its outcome, its size."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.core.types import BatchPlan, Uncopied
from aiofeed.kernel.engine.fetch.async_reader import ReadResult
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, DefaultCollateBuilder
from aiofeed.kernel.engine.tuning.jobs import JobSizer
from aiofeed.kernel.engine.tuning.threads import JobTiming
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.thread_pool import ThreadHost, ThreadPool
from aiofeed.kernel.runtime.time_limits import AbandonedError, JobControl
from aiofeed.kernel.sampling.epochs import Step
from aiofeed.kernel.sampling.order import sample_seed

_NO_DEADLINE = contextlib.nullcontext()

UNREAD: Any = object()
"""Placeholder for a value that the decode job reads itself."""

RunJob: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a function with arguments in a decode thread, and returns its result."""

Place: TypeAlias = Callable[[int, Any], None]
"""Decodes the value of one sample and puts the sample at its position in the batch."""


@dataclass(eq=False)
class ChunkOutcome:
    """Errors, by position in the batch, and measurements of one chunk."""

    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    # Of reads within the decode job.
    read_s: float = 0.0
    nbytes: int = 0
    retries: int = 0
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    samples: int = 0
    cached: int = 0
    gil_probe_s: float = 0.0
    gil_probes: int = 0
    job: JobTiming | None = None


@dataclass(eq=False, slots=True)
class Chunk:
    """Samples of a batch that one job decodes. ``fetcher`` names errors, and says whether the first ends the chunk."""

    fetcher: Fetcher
    plan: BatchPlan
    positions: Sequence[int]
    # For each position an encoded sample or an item, an exception, or a placeholder; or a Gathered.
    values: Any
    builder: BatchBuilder
    control: JobControl
    outcome: ChunkOutcome = field(default_factory=ChunkOutcome)

    def __post_init__(self) -> None:
        if self.control.deadline is not None:
            self.control.deadline.outcome = self.outcome  # it is all that remains of an abandoned job

    def unread(self) -> list[int]:
        """Return the positions of values that the decode job reads itself."""
        return [position for position, value in zip(self.positions, self.values, strict=True) if value is UNREAD]

    def decode_each(self, place: Place, start: int = 0, end: int | None = None) -> int:
        """Call ``place`` for each position and value, until stopped. Returns how many samples were reached.

        ``start`` and ``end`` limit it to a part of the chunk; samples before ``start`` count as reached.
        A value that is an exception is the sample's error.
        Under a deadline each call is timed as one sample; for a value that is ``UNREAD``, ``place`` starts the clock.
        It must change the batch inside ``commit`` only.

        Raises:
            AbandonedError: The job ran over its time limit.
        """
        values, stop, deadline = self.values, self.control.stop, self.control.deadline
        reached = start
        for position in self.positions[start:end]:
            if stop.is_set():
                break
            value, values[reached] = values[reached], None
            reached += 1
            try:
                if isinstance(value, BaseException):
                    raise value
                if type(value) is Uncopied:
                    value = bytes(value.data)
                if deadline is not None and value is not UNREAD:
                    deadline.begin(position)
                place(position, value)
            except AbandonedError:
                raise
            except BaseException as error:  # noqa: BLE001 - the user's code may raise anything; it becomes a value with a name
                self.add_error(position, error, reading=error is value)
                if self.fetcher.stop_at_error:
                    break
        return reached

    def add_error(self, position: int, error: BaseException, *, reading: bool = False) -> None:
        """Record the error of a sample."""
        named = self.fetcher.to_feed_error(error, self.plan.indices[position], reading)
        with self.commit():
            self.outcome.errors.append((position, named))

    def commit(self) -> AbstractContextManager[None]:
        """Return a ``with`` block that may change the batch.

        Raises:
            AbandonedError: The job ran over its time limit.
        """
        return _NO_DEADLINE if self.control.deadline is None else self.control.deadline.commit()

    @property
    def put(self) -> Place:
        """A function that puts a sample into the batch, inside ``commit``."""
        return self.builder.put if self.control.deadline is None else self._commit_sample

    def _commit_sample(self, position: int, sample: Any) -> None:
        with self.commit():
            self.builder.put(position, sample)

    @property
    def ended(self) -> bool:
        """Whether the job is stopped, or an error has ended the chunk."""
        return self.control.stop.is_set() or (self.fetcher.stop_at_error and bool(self.outcome.errors))


class Fetcher(ABC):
    """Turns indices into samples of a batch, a chunk at a time: ``read`` on the loop, ``decode`` in a decode thread.

    Args:
        policy: Retries, time limits, and whether the first failure ends a chunk.
    """

    limit_s: float | None = None
    """Most seconds that ``decode`` may spend on one sample."""
    thread: ThreadHost | None = None
    """The thread to decode in, if samples have one."""
    target: Callable[[int], Any] | None = None
    """Returns a sample's target, if samples have targets."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.stop_at_error: bool = policy.action == "raise"
        self._sizer = JobSizer()

    @property
    def reads_in_jobs(self) -> bool:
        """Whether decode jobs read all samples now, so that one job may make several batches."""
        return False

    async def prepare(self, decode_pool: ThreadPool) -> None:
        """Do what the first batch depends on; called before each run.

        Raises:
            CacheError: Samples cannot be cached.
        """
        return None

    def reading_ahead(self, steps: Iterable[Step], run: RunJob, threads: int) -> AbstractContextManager[Iterable[Step]]:
        """Yield the same steps; a subclass may read samples of later steps until the end of the block.

        ``run`` calls a function in one of so many decode threads.
        """
        return contextlib.nullcontext(steps)

    def new_builder(self, samples: int, lease: BufferLease) -> BatchBuilder:
        """Return a builder for a batch of so many samples, in memory of the lease."""
        return DefaultCollateBuilder(samples, lease)

    def job_sizes(self, limits: ResolvedLimits) -> tuple[int, int]:
        """Return how many samples the next decode jobs should have at least and at most; see ``JobSizer``."""
        least, most = self._sizer.job_sizes(limits.decode_threads)
        return least, min(most, limits.read_concurrency)

    def limit_reads(self, concurrency: int) -> bool:
        """Let at most so many reads be in flight; return whether others wait in a queue of this fetcher."""
        return False

    def max_running(self, threads: int) -> int:
        """Return how many of ``threads`` decode threads are worth using now."""
        return threads

    @abstractmethod
    async def read(self, indices: Sequence[int], plan: BatchPlan | None = None, start: int = 0) -> ReadResult:
        """Return encoded samples; an exception for each that failed, ``UNREAD`` for what the decode job reads.

        ``plan``: the batch that has ``indices`` from its position ``start`` on; ``None``: none has.
        """

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, control: JobControl
    ) -> ChunkOutcome:
        """Decode samples ``start``, ``start + 1``, ... of a batch and put them into it.

        Raises:
            AbandonedError: The job ran over its time limit.
        """
        chunk = Chunk(self, plan, range(start, start + len(encoded)), encoded, builder, control)
        self.decode_chunk(chunk)
        return chunk.outcome

    @abstractmethod
    def decode_chunk(self, chunk: Chunk) -> None:
        """Decode a chunk and put its samples into the batch; if failures are raised, up to the first."""

    @abstractmethod
    def to_feed_error(self, error: BaseException, index: int, reading: bool) -> FeedError:
        """Return the error that the user gets for a sample's error; ``reading``: whether reading raised it."""

    @abstractmethod
    def overdue(self, index: int) -> FeedError:
        """Return the error of a sample on which ``decode`` spent more than ``limit_s``."""

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the sample's name for errors; never raises."""


def seed_of(plan: BatchPlan, position: int) -> int:
    """Return the 64-bit seed of the sample at a position of a batch."""
    return sample_seed(plan.epoch_seed, plan.positions[position])
