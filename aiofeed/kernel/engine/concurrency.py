"""The tuners of one feeder: measures jobs and reads for them, and applies what they choose to limits and threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.fetch.fetcher import Fetcher
from aiofeed.kernel.engine.tuning.reads import READS_MOST, ReadTuner
from aiofeed.kernel.engine.tuning.threads import GilLimit, JobTiming, ThreadTuner
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.thread_pool import ThreadPool

# The decode threads yield to the training when a finished batch has waited for the consumer at more of the planned
# batches than not: at this many more, and those that a pause of the training leaves ready. A feeder that does not keep
# up goes on at the normal priority, so that other programs cannot starve it.
AHEAD_BATCHES = 8
# A worker process costs some 20 us per sample beside decoding: less than twice that under the GIL gains nothing.
REPORT_HELD_S = 40e-6
# Less decoding than this is not worth starting processes for, and figures of a few hundredths of a second are chance.
REPORT_AFTER_S = 2.0

log: logging.Logger = logging.getLogger("aiofeed.engine")


class Tuner:
    """Chooses threads and reads.

    Args:
        decode_threads, threads_given: as of ``ThreadTuner``.
        read_concurrency, reads_given, reads_most: as of ``ReadTuner``.

    Attributes:
        max_running: threads that decode now; fewer than chosen if samples are tiny.
    """

    def __init__(
        self,
        *,
        decode_threads: int,
        threads_given: bool,
        read_concurrency: int,
        reads_given: bool,
        reads_most: int = READS_MOST,
    ) -> None:
        self.decoding: ThreadTuner = ThreadTuner(decode_threads, given=threads_given)
        self.reading: ReadTuner = ReadTuner(read_concurrency, given=reads_given, most=reads_most)
        self.max_running = decode_threads
        self._reported = False

    def gil_report(self) -> GilLimit | None:
        """Return the GIL limit, once, if processes would gain something."""
        limit = self.decoding.gil
        if self._reported or limit is None or limit.held_s < REPORT_HELD_S or self.decoding.worked_s < REPORT_AFTER_S:
            return None
        self._reported = True
        return limit


@dataclass(eq=False)
class Concurrency:
    """Controls the number of decode threads and the read concurrency of an engine.

    Args:
        admission: has the limits.
        fetcher: limits the number of useful decode threads.
        executor: the decode threads.
        tuner: chooses both numbers; ``None``: they stay as in the limits.
        on_gil_limit: called once, on the loop, if the GIL limits decoding.
    """

    admission: Admission
    fetcher: Fetcher
    executor: ThreadPool
    tuner: Tuner | None
    on_gil_limit: Callable[[GilLimit], None] | None
    # When no finished batch waited, as far as is known.
    _empty_at: float = field(default=0.0, init=False)
    # Batches that were planned while a finished one waited, less others.
    _ahead: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.tuner is not None:
            self.apply(self.tuner)

    def resize_executor(self) -> None:
        """Let as many threads decode as are useful, or as the user specified; called for each batch."""
        buffer = self.admission.buffer
        self._ahead = max(self._ahead + (1 if buffer.waiting else -1), 0)
        self.executor.yields = self.executor.yields or self._ahead >= AHEAD_BATCHES + buffer.prefetch_batches
        max_running = self.admission.limits.decode_threads
        if self.tuner is None or not self.tuner.decoding.given:
            max_running = self.fetcher.max_running(max_running)
        if self.tuner is not None:
            self.tuner.max_running = max_running
        if max_running != self.executor.max_running:
            self.executor.set_max_running(max_running)

    def apply(self, tuner: Tuner) -> None:
        """Apply the tuner's choices, if they changed."""
        limits = self.admission.limits
        threads, reads = tuner.decoding.threads, tuner.reading.concurrency
        if threads != limits.decode_threads or reads != limits.read_concurrency:
            log.debug("tuned: %d decode threads, read concurrency %d", threads, reads)
            self.admission.change(replace(limits, decode_threads=threads, read_concurrency=reads))
            self.resize_executor()

    def observe_job(self, tuner: Tuner, job: JobTiming, *, saturated: bool) -> None:
        """Pass a decode job's timing to the tuner; not ``saturated``: a finished batch waits for the consumer."""
        now = time.perf_counter()
        if saturated:
            self._empty_at = now
        # Many jobs that run side by side end, and finish batches, at about the same time.
        tuner.decoding.observe(job if now - self._empty_at <= job.wall_s / 4 else replace(job, threads=0))
        self.apply(tuner)
        if (limit := tuner.gil_report()) is not None and self.on_gil_limit is not None:
            self.on_gil_limit(limit)

    def observe_read(self, tuner: Tuner, seconds: float, samples: int, nbytes: int, concurrency: int) -> None:
        """Pass the timing of a chunk's read to the tuner."""
        starving = self.admission.lacks_reads and self.executor.running < self.executor.max_running
        now = time.perf_counter()
        tuner.reading.observe(now, seconds, samples, nbytes, concurrency=concurrency, starving=starving)
        self.apply(tuner)


class JobTimer:
    """Times one decode job, from its construction to ``job()``, in the job's thread.

    Costs some ten microseconds, and half of one for each thread of the pool, whose clock is read.

    Args:
        pool: the job's threads.
    """

    __slots__ = ("_cpu", "_pool", "_pool_cpu", "_threads", "_wall")

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._threads = _busy_threads(pool)
        self._pool_cpu = machine.threads_cpu_s(pool.core_waits)
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def job(self, samples: int, nbytes: int = 0) -> JobTiming:
        """Return the timing of a job that decoded ``samples``, and read and wrote ``nbytes``."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        threads = self._threads if self._threads == _busy_threads(self._pool) else 0
        pool_cpu = machine.threads_cpu_s(self._pool.core_waits) - self._pool_cpu
        return JobTiming(samples, wall, cpu, threads, nbytes, max(pool_cpu, 0.0))


def run_timed(pool: ThreadPool, function: Callable[..., Any], *arguments: Any) -> tuple[Any, JobTiming]:
    """Return the result of a job of no batch, the number of samples that it wrote, and its timing."""
    timer = JobTimer(pool)
    samples = function(*arguments)
    return samples, timer.job(samples)


def _busy_threads(pool: ThreadPool) -> int:
    """Return the number of threads that may run jobs, if about all of them do; otherwise 0."""
    max_running = pool.max_running
    # If many threads want the GIL, the loop gets it too rarely to have a job for each of them: half is enough then.
    return max_running if pool.running >= max_running - max_running // 8 * 4 else 0
