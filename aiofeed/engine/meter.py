"""What a decode job takes: wall-clock time, its thread's, and how many threads were at work meanwhile."""

from __future__ import annotations

import time

from aiofeed.engine.tuning.threads import Job
from aiofeed.runtime import machine
from aiofeed.runtime.thread_pool import ThreadPool


class JobMeter:
    """Begun and read in the job's own thread. It costs some ten microseconds, most of them for the wait for a core.

    Args:
        pool: the job's.
    """

    __slots__ = ("_cpu", "_pool", "_queued", "_threads", "_wall")

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._threads = _at_work(pool)
        self._queued = machine.queued_s()
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def job(self, samples: int, nbytes: int = 0) -> Job:
        """What it took until now, for so many samples, of which it read and wrote so many bytes."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        queued = machine.queued_s() - self._queued
        threads = self._threads if self._threads == _at_work(self._pool) else 0
        return Job(samples, wall, cpu, queued, threads, nbytes)


def _at_work(pool: ThreadPool) -> int:
    """How many threads may be at work, if all of them are; else 0."""
    lanes = pool.lanes
    return lanes if pool.running >= lanes else 0
