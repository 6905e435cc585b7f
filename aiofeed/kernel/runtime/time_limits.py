"""Time limits and retries of samples in decode threads, and the flag that stops running jobs.

A thread cannot be interrupted. A job whose sample exceeds the limit is abandoned: it keeps its thread until the sample
returns, its results are discarded, and another thread continues with the next sample.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiofeed.kernel.core.failures import FailurePolicy, backoff_s
from aiofeed.kernel.runtime.thread_pool import ABANDONED_MOST, ThreadPool

T = TypeVar("T")
# The shortest wait for a deadline: the loop's clock is coarser than that of the limit.
_MIN_WAIT_S = 0.001

_jitter = random.Random()


class AbandonedError(Exception):
    """Raised in the thread of an abandoned job."""


class JobDeadline:
    """The time limit of the current sample of a job; shared by the job and the event loop that watches it.

    The job calls ``begin`` before each sample and stores its result inside ``commit``. ``abandon`` takes the same lock,
    so a result is either stored before the job is abandoned, or never.

    Attributes:
        outcome: The results so far; changed inside ``commit`` only, so it is consistent when the job is abandoned.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.outcome: Any = None
        self._lock = threading.Lock()
        self._position: int | None = None
        self._since = 0.0
        self._finished = self._abandoned = False

    def begin(self, position: int) -> None:
        """Start the clock for the sample at ``position``.

        Raises:
            AbandonedError: The job was abandoned.
        """
        with self._lock:
            self._check()
            self._position, self._since = position, time.perf_counter()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """A ``with`` block to store a sample's result in; stops the clock.

        Raises:
            AbandonedError: The job was abandoned; store nothing.
        """
        with self._lock:
            self._check()
            yield
            self._position = None

    def _check(self) -> None:
        if self._abandoned:
            raise AbandonedError

    def pause(self) -> None:
        """Stop the clock until the next ``begin``."""
        with self._lock:
            if not self._abandoned:
                self._position = None

    def finish(self) -> bool:
        """End the job, so that it cannot be abandoned any more; return False if it was abandoned before."""
        with self._lock:
            self._finished = True
            return not self._abandoned

    def left_s(self) -> float:
        """Seconds left for the current sample; the whole limit while the clock is stopped."""
        with self._lock:
            if self._position is None:
                return self.limit_s
            return self._since + self.limit_s - time.perf_counter()

    def abandon(self) -> int | None:
        """Abandon the job if its sample exceeds the limit; return the position of that sample. Idempotent."""
        with self._lock:
            if not self._abandoned and self._position is not None and not self._finished:
                self._abandoned = self._since + self.limit_s <= time.perf_counter()
            return self._position if self._abandoned else None


@dataclass(frozen=True, eq=False)
class JobControl:
    """How a running job is ended: ``stop`` after its current sample, ``deadline`` (if there is a limit) during it."""

    stop: threading.Event
    deadline: JobDeadline | None = None


class JobStuckError(Exception):
    """Too many abandoned jobs still run."""


async def run_with_sample_timeout(
    executor: ThreadPool, work: Callable[[], T], deadline: JobDeadline
) -> tuple[T | None, int | None]:
    """Run a job; return its result, or the position of the sample that exceeded the limit.

    Args:
        executor: The pool to run it in. Another job may take the place of an abandoned one.
        work: The job; it reports its samples to ``deadline``.
        deadline: The deadline of this job alone. The time that the job waits for a thread does not count.

    Raises:
        JobStuckError: Too many abandoned jobs run, or the system refuses a thread for the next job.
    """
    # An asyncio future would log the exception of an abandoned job, and that job may end after the loop is closed.
    ended = asyncio.Event()
    job = executor.submit(work)
    job.add_done_callback(partial(_set_threadsafe, asyncio.get_running_loop(), ended))
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(deadline.left_s(), _MIN_WAIT_S)):
                    await ended.wait()
            if job.done():
                return job.result(), None
            if (position := deadline.abandon()) is not None:
                break
    except asyncio.CancelledError:
        job.cancel()
        raise
    if not executor.abandon(job):
        raise JobStuckError(
            f"{ABANDONED_MOST} samples exceeded the limit of {deadline.limit_s:g} s and are still being decoded: the "
            f"decoder hangs, or the limit is too low for it"
        )
    return None, position


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event, _: Future[T]) -> None:
    with suppress(RuntimeError):  # the loop is closed, so no task waits
        loop.call_soon_threadsafe(event.set)


def retry_blocking(
    policy: FailurePolicy, failed: BaseException, attempt: Callable[[], Any], stop: threading.Event
) -> tuple[Any, int]:
    """Retry a call that failed; return its result or last error, and the number of further attempts.

    ``failed`` is the error of the first attempt. ``stop`` ends the retries early, with the last error.
    """
    made = 0
    while made < policy.retries and policy.is_transient(failed):
        made += 1
        if stop.wait(backoff_s(made, _jitter)):
            break
        try:
            return attempt(), made
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller raises it with the name of the sample
            failed = error
    return failed, made
