"""The interface between an engine and its assembly, which makes the engine's batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.batch import Batch
from aiofeed.kernel.engine.concurrency import Concurrency, Tuner, run_timed
from aiofeed.kernel.engine.fetch.collate import BatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import Fetcher
from aiofeed.kernel.engine.tuning.jobs import batches_at_once
from aiofeed.kernel.engine.tuning.threads import GilLimit
from aiofeed.kernel.runtime.buffers import BufferLease, BufferPool
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.kernel.sampling.epochs import Step

BuilderFactory: TypeAlias = Callable[[BatchPlan, BufferLease], BatchBuilder]
"""Creates the builder of a batch, in its buffer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AssemblyOptions:
    """What an assembly uses to make batches.

    Args:
        fetcher: reads and decodes, or gives the names of samples that another process reads.
        new_builder: creates the builder of a batch in its buffer.
        wrap: converts a batch of ``HostTensor`` to the form that is delivered. It runs in the decode thread, which has
            the memory in its cache: in the consumer, just after a step, it takes ten times as long.
        memory: buffers of batches.
        executor: the decode threads.
        policy: what happens to samples that fail.
        tuner: chooses decode threads and read concurrency; ``None``: the limits fix both.
        on_gil_limit: called once, on the loop, if the GIL limits decoding.
        loop_delay_s: returns the seconds in all by which the loop was late; reads do not count them.
    """

    fetcher: Fetcher
    new_builder: BuilderFactory
    wrap: Callable[[Any], Any]
    memory: BufferPool
    executor: ThreadPool
    policy: FailurePolicy
    tuner: Tuner | None = None
    on_gil_limit: Callable[[GilLimit], None] | None = None
    loop_delay_s: Callable[[], float] = float


class BatchSink(Protocol):
    """What an assembly calls of its engine, on the loop."""

    def start(self, batch: Batch, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run a coroutine function for a batch, in a task that ends with the engine."""

    def finished(self, batch: Batch) -> None:
        """Deliver a finished batch and those grouped with it, or the first error, when it is next."""

    def split(self, batch: Batch, size: int) -> Batch:
        """Leave ``size`` batches in a group; returns the first of the others, which follow it as a group."""

    def release_taken(self) -> None:
        """Release the batches that were taken from the queue meanwhile."""

    def fail(self, error: BaseException) -> None:
        """Deliver an error, after which nothing is delivered."""


class Assembly(ABC):
    """Makes the batches of an engine: ``begin`` starts one, and ``BatchSink.finished`` gets it when it is finished.

    Args:
        admission: the limits of the engine, and what is in flight.
        options: what it uses.

    Attributes:
        engine: gets the batches; only while the engine runs.
        together: how many batches, at most, the next job makes.
        chunk_size: samples per decode job, as last chosen.
    """

    engine: BatchSink
    together: int = 1
    chunk_size = 0

    def __init__(self, admission: Admission, options: AssemblyOptions) -> None:
        self._admission = admission
        self._buffer = admission.buffer
        self._budget = admission.budget
        self._fetcher = options.fetcher
        self._executor = options.executor
        self._tuner = options.tuner
        self._concurrency = Concurrency(
            admission, options.fetcher, options.executor, options.tuner, options.on_gil_limit
        )

    def reading_ahead(self, steps: Iterable[Step]) -> AbstractContextManager[Iterable[Step]]:
        """Yield the same steps; samples of later steps may be read until the end of the block."""
        return self._fetcher.reading_ahead(steps, self._run_job, self._executor.max_threads)

    async def _run_job(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a job of no batch; like those of batches, it is timed, and releases batches that were taken meanwhile."""
        tuner = self._tuner
        try:
            if tuner is None or not tuner.decoding.listening:
                return await self._executor.run(function, *arguments)
            result, job = await self._executor.run(run_timed, self._executor, function, *arguments)
            self._concurrency.observe_job(tuner, job, saturated=not self._buffer.waiting)
            return result
        finally:
            self.engine.release_taken()

    @abstractmethod
    async def begin(self, batch: Batch) -> None:
        """Start to make a batch; wait until all of it may be read."""

    def fill_threads(self, job_size: int, samples: int, least: int) -> None:
        """Let as many batches be decoded at the same time as give every thread jobs, ``least`` or more.

        Args:
            job_size: samples of a job.
            samples: samples of a batch.
        """
        limits = self._admission.limits
        if not limits.prefetch_given and self._budget.known:
            room = self._budget.limit_bytes / self._budget.bytes_per_sample
            self._admission.decode_at_once(max(least, batches_at_once(job_size, limits.decode_threads, samples, room)))

    def permit(self) -> None:
        """Permit decoding of what may be decoded; of few batches if they turn out to be large."""
        self._buffer.grant_permits(self._admission.limits.prefetch_batches if self._budget.exceeded else None)

    @abstractmethod
    def waiting_for(self, batch: Batch) -> tuple[Any, ...]:
        """Return what a batch that has begun waits for; see ``Producer.waiting_for``. From any thread."""

    def delivered(self, batch: Batch) -> None:  # noqa: B027 - not all act on it
        """A batch is put into the queue."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether the end of a job, or a message, will wake the loop soon. For any thread."""

    def taken(self, item: ReadyBatch) -> None:  # noqa: B027 - only one acts on it
        """A batch was taken from the queue; on the loop."""

    def stop(self) -> None:  # noqa: B027 - only some have work of their own
        """End running jobs and drop unfinished work: the engine has ended, and the feeder may keep it."""
