"""Queues, buffers, pools and caches under many threads, which run in parallel on a free-threaded Python."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import DiskCache, EncodedCache, Feeder, Limits
from aiofeed.kernel.runtime.buffers import DropTracker, HostBufferPool
from aiofeed.kernel.runtime.queue import BatchQueue
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from tests.support.process_parts import Numbers

THREADS = 8
BLOCK = 128 * 1024


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """With a GIL, threads change after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], object], threads: int = THREADS) -> list[Any]:
    """Call ``work(number)`` in threads that start together; return the results."""
    barrier = threading.Barrier(threads)

    def start(number: int) -> object:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(start, range(threads)))


def test_a_queue_gives_each_item_once_and_in_the_order_of_its_producer() -> None:
    """One producer and a waiting consumer, in threads and in a task: all items, in order, and no missed wake-up."""
    for _ in range(20):
        queue: BatchQueue[int] = BatchQueue()

        def put_or_get(number: int, queue: BatchQueue[int] = queue) -> list[int]:
            if number:
                return [queue.get(30) for _ in range(500)]
            for item in range(500):
                queue.put(item)
            return []

        assert in_threads(put_or_get, 2)[1] == list(range(500))

        async def get(queue: BatchQueue[int] = queue) -> list[int]:
            return [await asyncio.wait_for(take(queue), 30) for _ in range(500)]

        async def take(queue: BatchQueue[int]) -> int:
            await queue.peek_async()
            return queue.get_nowait()

        assert in_threads(lambda number: asyncio.run(get()) if number else put_or_get(0), 2)[1] == list(range(500))


def test_no_block_of_memory_is_lent_twice() -> None:
    """Each thread fills the blocks that it takes from one pool with its number, and finds nothing else in them."""
    pool = HostBufferPool(THREADS)

    def use(number: int) -> None:
        for _ in range(200):
            block = pool.take(BLOCK)
            block[:] = number
            view = torch.from_numpy(block[: BLOCK // 2])
            del block
            assert bool((view == number).all())

    in_threads(use)
    pool.close()


def test_each_dropped_object_is_reported_once() -> None:
    """Objects that are made, dropped and collected in several threads are reported once each."""
    tracker: DropTracker[int] = DropTracker()

    def make_and_collect(number: int) -> list[int]:
        found: list[int] = []
        for serial in range(500):
            tracker.watch(np.empty(1), number * 500 + serial)
            found += tracker.collected()
        return found

    found = [value for values in in_threads(make_and_collect) for value in values]
    found += tracker.collected()
    assert sorted(found) == list(range(THREADS * 500))


def test_a_pool_runs_each_job_once_while_its_size_changes() -> None:
    """Jobs submitted by several threads return their results; the running ones never exceed the threads."""
    pool = ThreadPool("parallel", 4)

    def submit(number: int) -> list[int]:
        jobs = []
        for serial in range(200):
            pool.set_max_running(1 + serial % 4)
            jobs.append(pool.submit(lambda value: value, number * 200 + serial))
        assert pool.running <= 4
        return [job.result(30) for job in jobs]

    results = [value for values in in_threads(submit) for value in values]
    assert results == list(range(THREADS * 200))
    pool.stop()
    assert pool.join(10)


def decode(data: bytes) -> torch.Tensor:
    """int32 [64]: the number, 64 times."""
    return torch.full((64,), int(data), dtype=torch.int32)


def epochs(feeder: Feeder[torch.Tensor]) -> None:
    with feeder:
        for _ in feeder.epochs(3):
            rows = torch.cat(list(feeder))
            assert bool((rows == rows[:, :1]).all())
            assert sorted(rows[:, 0].tolist()) == list(range(500))


@pytest.mark.parametrize("kind", ["none", "host", "disk", "encoded"])
def test_feeders_in_parallel(tmp_path: Path, kind: str) -> None:
    """Feeders in several threads deliver each sample once, undamaged; those with files share them."""

    def iterate(number: int) -> None:
        limits = Limits(decode_threads=4, read_concurrency=16)
        caches: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "host": lambda: "host",
            "disk": lambda: DiskCache(tmp_path / "cache"),
            "encoded": lambda: EncodedCache(tmp_path / "cache", 1 << 20),
        }
        options: dict[str, Any] = {"cache": caches[kind](), "limits": limits, "shard": None}
        epochs(Feeder(Numbers(500), decode=decode, batch_size=16, shuffle=True, seed=number, **options))

    in_threads(iterate, 4)
