""""""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiofeed.runtime.thread_pool import ABANDONED_MOST, ThreadPool

T = TypeVar("T")
# A limit that has just passed is looked at again no sooner: the clock of the loop is coarser than the limit's.
_LEAST_S = 0.001


class StopFlag:
    """Set once nobody wants the results any more: a running job then ends after the sample it is at."""

    __slots__ = ("stopped",)

    def __init__(self) -> None:
        self.stopped = False


class AbandonedError(Exception):
    """Raised in the thread of a job whose result nobody wants any more."""


class JobDeadline:
    """Between a job in a decode thread and the loop that watches it.

    The job says which sample it is at and when it began; what a sample came to is stored inside ``commit``. Abandoning
    takes the same lock, so that a late result is either stored before, or never.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: int | None = None
        self._since = 0.0
        self._over = False
        # What has come of the job so far: changed inside ``commit`` alone, so that it is whole when abandoned.
        self.outcome: Any = None

    def begin(self, position: int) -> None:
        """The sample at ``position`` is decoded from now on.

        Raises:
            AbandonedError: the job was.
        """
        with self._lock:
            if self._over:
                raise AbandonedError
            self._at, self._since = position, time.perf_counter()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Store what the sample came to, inside.

        Raises:
            AbandonedError: the job was; nothing may be stored.
        """
        with self._lock:
            if self._over:
                raise AbandonedError
            yield
            # What follows is bookkeeping, or a wait of our own between two attempts.
            self._at = None

    def pause(self) -> None:
        """The time that passes until ``begin`` is nobody's."""
        with self._lock:
            self._at = None

    def finish(self) -> bool:
        """The job is over: from now on it cannot be abandoned. False where it was before."""
        with self._lock:
            abandoned, self._over = self._over, True
        return not abandoned

    def left_s(self, limit_s: float) -> float:
        """Seconds until the sample that is being decoded runs over; the whole limit where none is."""
        with self._lock:
            if self._at is None:
                return limit_s
            return self._since + limit_s - time.perf_counter()

    def abandon(self, limit_s: float) -> int | None:
        """Abandon the job if its sample runs over; the sample's position."""
        with self._lock:
            if self._over or self._at is None or self._since + limit_s > time.perf_counter():
                return None
            self._over = True
            return self._at


@dataclass(frozen=True, eq=False)
class JobControl:
    """Who watches a job: ``stop`` ends it after its sample; ``guard``, where there is a time limit, may abandon it."""

    stop: StopFlag
    guard: JobDeadline | None = None


class JobStuckError(Exception):
    """Too many jobs were abandoned and still run."""


async def run_with_sample_timeout(
    limit_s: float, executor: ThreadPool, work: Callable[[], T], guard: JobDeadline
) -> tuple[T | None, int | None]:
    """What ``work`` returned; or, where a sample ran over, the position of that sample.

    Args:
        limit_s: most seconds for one sample; waiting for a thread is not counted.
        executor: where it runs; the lane of an abandoned job goes to another.
        work: reports to ``guard``.
        guard: of this job alone.

    Raises:
        StuckError: there are too many such jobs, or no thread is to be had for what waits.
    """
    # No asyncio future around the job: an abandoned one may end when the loop is closed, and nobody asks what it
    # raised.
    over = asyncio.Event()
    job = executor.submit(work)
    job.add_done_callback(partial(_tell, asyncio.get_running_loop(), over))
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(guard.left_s(limit_s), _LEAST_S)):
                    await over.wait()
            if job.done():
                return job.result(), None
            if (at := guard.abandon(limit_s)) is not None:
                break
    except asyncio.CancelledError:
        job.cancel()
        raise
    if not executor.abandon(job):
        raise JobStuckError(
            f"{ABANDONED_MOST} samples took longer than {limit_s:g} s to decode and still run: the decoder hangs, "
            f"or the limit is too low for it"
        )
    return None, at


def _tell(loop: asyncio.AbstractEventLoop, over: asyncio.Event, job: Future[T]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(over.set)
