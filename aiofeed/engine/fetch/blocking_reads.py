"""Reading within a decode job, from a source that answers at once: blocking, with the further attempts it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import Source
from aiofeed.engine.fetch.async_reader import total_bytes, unless_overridden
from aiofeed.engine.fetch.fetcher import Outcome
from aiofeed.runtime.guard import StopFlag
from aiofeed.runtime.retry import retry_blocking

# Seconds that a thread waits for its turn to read. A chunk from the page cache takes a third of a millisecond; storage
# that has turned slow is not read by one thread alone.
TURN_S = 0.005


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

    def read(self, indices: Sequence[int], outcome: Outcome, stop: StopFlag) -> list[Any]:
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
