"""How many threads decode and how many samples are read at a time: what was found out is put into force."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from aiofeed.engine.admission import Admission
from aiofeed.engine.fetch.fetcher import Fetcher
from aiofeed.engine.tuning.gil import GilLimit
from aiofeed.engine.tuning.threads import JobTiming
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.runtime.thread_pool import ThreadPool

log = logging.getLogger("aiofeed.engine")


class Concurrency:
    """Measures of jobs and reads go to a tuner, and its choices to the threads and to the limits.

    Args:
        admission: has the limits.
        fetcher: says how many threads are worth using.
        executor: the decode threads.
        tuner: chooses; ``None``: the limits stay.
        tell: told on the loop, once, where the GIL turns out to be what limits decoding.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        fetcher: Fetcher,
        executor: ThreadPool,
        tuner: Tuner | None,
        tell: Callable[[GilLimit], None] | None,
    ) -> None:
        self._admission = admission
        self._fetcher = fetcher
        self._executor = executor
        self._tuner = tuner
        self._tell_limit = tell
        if tuner is not None:
            self.follow(tuner)

    def open_lanes(self) -> None:
        """Let as many threads decode as are worth it, or as the user said."""
        max_running = self._admission.limits.decode_threads
        if self._tuner is None or not self._tuner.decoding.given:
            max_running = self._fetcher.max_running(max_running)
        if self._tuner is not None:
            self._tuner.max_running = max_running
        if max_running != self._executor.max_running:
            self._executor.set_max_running(max_running)

    def follow(self, tuner: Tuner) -> None:
        """Take over what was chosen."""
        limits = self._admission.limits
        chosen = tuner.decoding.threads, tuner.reading.concurrency
        if chosen != (limits.decode_threads, limits.read_concurrency):
            log.debug("tuned: %d decode threads, %d reads at a time", *chosen)
            self._admission.change(replace(limits, decode_threads=chosen[0], read_concurrency=chosen[1]))
            self.open_lanes()

    def learn(self, tuner: Tuner, job: JobTiming, *, wanted: bool) -> None:
        """Let a job that was measured count, unless the consumer has enough: then it says nothing."""
        tuner.decoding.observe(job if wanted else replace(job, threads=0))
        self.follow(tuner)
        if (found := tuner.gil_report()) is not None and self._tell_limit is not None:
            self._tell_limit(found)

    def learn_reads(self, tuner: Tuner, seconds: float, samples: int, nbytes: int, concurrency: int) -> None:
        """Let a chunk's reads count."""
        starving = self._admission.held_by_reads and self._executor.running < self._executor.max_running
        now = perf_counter()
        tuner.reading.observe(now, seconds, samples, nbytes, concurrency=concurrency, starving=starving)
        self.follow(tuner)


class JobTimer:
    """Begun and read in the job's own thread. It costs some ten microseconds, most of them for the wait for a core.

    Args:
        pool: the job's.
    """

    __slots__ = ("_cpu", "_pool", "_threads", "_wall")

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._threads = _at_work(pool)
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def job(self, samples: int, nbytes: int = 0) -> JobTiming:
        """What it took until now, for so many samples, of which it read and wrote so many bytes."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        threads = self._threads if self._threads == _at_work(self._pool) else 0
        return JobTiming(samples, wall, cpu, threads, nbytes)


def _at_work(pool: ThreadPool) -> int:
    """How many threads may be at work, if all of them are; else 0."""
    max_running = pool.max_running
    return max_running if pool.running >= max_running else 0
