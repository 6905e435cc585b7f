"""A time limit on work in a thread, which nothing can interrupt: the work is abandoned, and its result with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class StopFlag:
    """Set once nobody wants the results any more: a running job then ends after the sample it is at."""

    __slots__ = ("stopped",)

    def __init__(self) -> None:
        self.stopped = False


class AbandonedError(Exception):
    """Raised in the thread of a job whose result nobody wants any more."""


class Guard:
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
class Watch:
    """Who watches a job: ``stop`` ends it after its sample; ``guard``, where there is a time limit, may abandon it."""

    stop: StopFlag
    guard: Guard | None = None
