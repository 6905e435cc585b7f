"""``BlockingReader``: decode threads take turns if reads are fast, and read at the same time if they are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.engine.fetch import source as fetch_source
from aiofeed.kernel.engine.fetch.fetcher import ChunkOutcome
from aiofeed.kernel.engine.fetch.source import BlockingReader
from aiofeed.kernel.runtime import machine

if TYPE_CHECKING:
    import pytest


class Storage:
    """Returns the indices. Records the most threads that read at the same time, and blocks at index 0 until opened."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.open = threading.Event()
        self.blocked = threading.Event()
        self._lock = threading.Lock()

    def read_now(self, indices: Sequence[int]) -> list[int]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if 0 in indices:
            self.blocked.set()
            assert self.open.wait(60)
        time.sleep(0.001)
        with self._lock:
            self.now -= 1
        return list(indices)


def read(reader: BlockingReader, indices: Sequence[int]) -> list[int]:
    return reader.read(indices, ChunkOutcome(), threading.Event())


def test_threads_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads at a time, and each gets what it requested."""
    monkeypatch.setattr(machine, "has_gil", lambda: True)
    monkeypatch.setattr(fetch_source, "TURN_S", 60.0)
    storage = Storage()
    reader = BlockingReader(storage.read_now, FailurePolicy())
    got: dict[int, list[int]] = {}

    def work(first: int) -> None:
        got[first] = [data for start in range(first, first + 40, 4) for data in read(reader, range(start, start + 4))]

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.most == 1
    assert got == {first: list(range(first, first + 40)) for first in (100, 200, 300, 400)}


def test_a_read_that_hangs_blocks_no_other_thread() -> None:
    """After ``TURN_S`` the others read without their turn, each time."""
    storage = Storage()
    reader = BlockingReader(storage.read_now, FailurePolicy())
    stuck = threading.Thread(target=read, args=(reader, [0]))
    stuck.start()
    assert storage.blocked.wait(60)
    assert [read(reader, [number]) for number in (1, 2, 3)] == [[1], [2], [3]]
    assert stuck.is_alive()
    storage.open.set()
    stuck.join(60)
    assert not stuck.is_alive()


def test_without_a_gil_threads_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other inside their reads both get what they requested."""
    monkeypatch.setattr(machine, "has_gil", lambda: False)
    monkeypatch.setattr(fetch_source, "TURN_S", 60.0)
    both = threading.Barrier(2)

    def read_now(indices: Sequence[int]) -> list[int]:
        both.wait(30)
        return list(indices)

    reader = BlockingReader(read_now, FailurePolicy())
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda number: read(reader, [number]), (1, 2))) == [[1], [2]]


def test_the_turn_ends_after_an_error() -> None:
    """A read that raises ends its turn."""

    def read_now(indices: Sequence[int]) -> list[int]:
        raise RuntimeError("no")

    reader = BlockingReader(read_now, FailurePolicy())
    assert [type(data) for data in read(reader, [1, 2])] == [RuntimeError, RuntimeError]
    assert not reader._turn.locked()


def test_the_time_of_a_blocking_read_is_processor_time() -> None:
    """Waiting does not count: for files in the page cache, it is for the GIL or the turn of the thread."""
    storage = Storage()

    def read_now(indices: Sequence[int]) -> list[int]:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return storage.read_now(indices)  # sleeps, and waits at index 0

    outcome = ChunkOutcome()
    reader = BlockingReader(read_now, FailurePolicy())
    thread = threading.Thread(target=reader.read, args=([0], outcome, threading.Event()))
    started = time.perf_counter()
    thread.start()
    assert storage.blocked.wait(60)
    while time.perf_counter() < started + 0.2:
        pass
    storage.open.set()
    thread.join()
    assert 0.01 <= outcome.read_s < 0.1
