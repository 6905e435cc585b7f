"""Tests of the time that counts as waiting for a batch: all of ``iter()``, and nothing of a blocked event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Tensors
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.feeder.delivery import Delivery
from aiofeed.kernel.feeder.iterator import FeedIterator
from aiofeed.kernel.runtime.queue import BatchQueue, EndOfEpoch, QueueItem, ReadyBatch


class SlowSampler:
    """Lists 40 indices in a while, and measures it."""

    listed_s = 0.0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        began = time.perf_counter()
        threading.Event().wait(0.05)
        self.listed_s = time.perf_counter() - began
        return iter(range(40))


def test_time_to_list_the_order_is_counted() -> None:
    """The time that a sampler takes in ``iter()`` counts in ``stall_s``, ``first_batch_s`` and ``wall_s``."""
    sampler = SlowSampler()
    with Feeder([*range(40)], batch_size=4, sampler=sampler) as feeder:
        for _ in range(2):
            assert len(list(feeder)) == 10
            statistics, stats = feeder.statistics(), feeder._session.stats
            assert sampler.listed_s <= stats.order_s <= stats.first_stall_s <= statistics.stall_s
            assert stats.first_stall_s <= statistics.first_batch_s <= statistics.wall_s


@pytest.mark.parametrize("order_s", [0.0, 88.0])
def test_a_slow_sampler_is_no_reason_for_more_threads(
    order_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hint at threads for a ``Dataset`` does not count the time that listing the order took."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpus", lambda: 6)
    with Feeder([*range(40)], batch_size=4) as feeder:
        feeder._session.stats = EpochStats(wall_s=100.0, stall_s=90.0, order_s=order_s)
        feeder._session._hint_at_threads()
    assert ("the training waited" in caplog.text) == (not order_s)


class Fed:
    """A producer whose queue the test fills."""

    def __init__(self) -> None:
        self.queue: BatchQueue[Any] = BatchQueue()

    def take(self, item: ReadyBatch) -> Any:
        return item.batch

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("item", [ReadyBatch(0, 1, "a batch"), EndOfEpoch()])
async def test_what_is_ready_is_not_waited_for(item: QueueItem) -> None:
    """``stall_s`` ends when the batch, or the end of the epoch, is ready; other tasks may block the loop for longer."""
    producer, stats = Fed(), EpochStats()
    iterator: FeedIterator[Any] = FeedIterator(Delivery(producer), stats)  # type: ignore[arg-type]
    waiting = asyncio.create_task(anext(iterator, None))
    await asyncio.sleep(0)
    producer.queue.put(item)
    ready = time.perf_counter()
    threading.Event().wait(0.05)
    blocked_s = time.perf_counter() - ready
    await waiting
    assert 0 < stats.stall_s <= stats.wall_s - blocked_s


async def test_other_tasks_do_not_wait_for_data_in_memory() -> None:
    """The time that other tasks take before a window of ``Tensors`` is made does not count in ``stall_s``."""
    blocked_s = 0.0

    async def block() -> None:
        nonlocal blocked_s
        while True:
            began = time.perf_counter()
            threading.Event().wait(0.02)
            blocked_s += time.perf_counter() - began
            await asyncio.sleep(0)

    with Feeder(Tensors(torch.arange(40)), batch_size=4) as feeder:
        iterator = aiter(feeder)
        blocker = asyncio.create_task(block())
        await anext(iterator)
        blocker.cancel()
        statistics = feeder.statistics()
        assert 0 < blocked_s <= statistics.wall_s - statistics.stall_s
