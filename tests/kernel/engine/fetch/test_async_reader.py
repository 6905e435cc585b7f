"""Reads of samples one by one: at most so many at a time, in slots that take them from a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiofeed.kernel.core.faces import AdaptedSource
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.engine.fetch.async_reader import AsyncReader


class Numbers:
    """Reads wait for the gate of their index, if it has one; ``under_way`` are those that have not ended."""

    def __init__(self, *gated: int) -> None:
        self.gates = {index: asyncio.Event() for index in gated}
        self.under_way: set[int] = set()
        self.most = 0

    def __len__(self) -> int:
        return 1000

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> Any:
        self.under_way.add(index)
        self.most = max(self.most, len(self.under_way))
        try:
            await asyncio.sleep(0)
            if index in self.gates:
                await self.gates[index].wait()
            return index
        finally:
            self.under_way.discard(index)


def new_reader(source: Any, concurrency: int, **policy: Any) -> AsyncReader:
    reader = AsyncReader(AdaptedSource(source), FailurePolicy(**policy))
    reader.concurrency = concurrency
    return reader


async def iterations(condition: Callable[[], object]) -> None:
    """Let the loop run until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition does not hold")


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_so_many_reads_are_in_flight(concurrency: int) -> None:
    """Reads of all chunks together are at most as many as allowed, and the samples come in order."""
    source = Numbers()
    reader = new_reader(source, concurrency)
    chunks = await asyncio.gather(*[reader.read(range(start, start + 8)) for start in range(0, 40, 8)])
    assert [sample for chunk in chunks for sample in chunk.samples] == list(range(40))
    assert source.most == min(concurrency, 40)


async def test_fewer_reads_after_the_limit_is_lowered() -> None:
    """Slots beyond a lower limit end with their reads, and the rest of the queue is read."""
    source = Numbers(0, 1, 2, 3)
    reader = new_reader(source, 4)
    reading = asyncio.create_task(reader.read(range(20)))
    await iterations(lambda: source.under_way == {0, 1, 2, 3})
    reader.concurrency, source.most = 1, 0
    for gate in source.gates.values():
        gate.set()
    assert (await reading).samples == list(range(20))
    assert source.most <= 3


async def test_a_slow_read_delays_no_other_chunk() -> None:
    """The reads of the next chunks take the other slots meanwhile."""
    source = Numbers(3)
    reader = new_reader(source, 4)
    slow = asyncio.create_task(reader.read(range(4)))
    others = await asyncio.gather(*[reader.read(range(start, start + 4)) for start in range(4, 40, 4)])
    assert [sample for chunk in others for sample in chunk.samples] == list(range(4, 40))
    assert source.under_way == {3}
    source.gates[3].set()
    assert (await slow).samples == [0, 1, 2, 3]


async def test_cancelled_reads_have_ended() -> None:
    """When the coroutine of a chunk ends, its reads have; those of another chunk go on."""
    source = Numbers(0, 1, 4)
    reader = new_reader(source, 3)
    first, second = (asyncio.create_task(reader.read(range(start, start + 4))) for start in (0, 4))
    await iterations(lambda: source.under_way == {0, 1, 4})
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert source.under_way.isdisjoint({0, 1, 2, 3})
    source.gates[4].set()
    assert (await second).samples == [4, 5, 6, 7]
    assert (await reader.read([8, 9])).samples == [8, 9]


async def test_no_task_is_left() -> None:
    """Slots end with the last chunk, or when all are cancelled."""
    source = Numbers(0)
    reader = new_reader(source, 4)
    await asyncio.gather(*[reader.read(range(1, 9)) for _ in range(4)])
    await iterations(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    reading = [asyncio.create_task(reader.read([0] * 8)) for _ in range(4)]
    await iterations(lambda: source.under_way)
    for each in reading:
        each.cancel()
    await asyncio.wait(reading)
    assert not source.under_way
    await iterations(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_source_that_cancels_tasks() -> None:
    """A source that cancels the task of its read, or all other slots, loses no other sample."""

    class Cancels(Numbers):
        async def read(self, index: int) -> Any:
            task: Any = asyncio.current_task()
            if index == 5:
                task.cancel()
            if index == 20:
                others = asyncio.all_tasks() - {task, *ours}
                for other in others:
                    other.cancel()
            return await super().read(index)

    ours = {asyncio.current_task()}
    reader = new_reader(Cancels(), 4)
    reading = asyncio.create_task(reader.read(range(40)))
    ours.add(reading)
    samples = (await reading).samples
    assert isinstance(samples[5], asyncio.CancelledError)
    failed = [at for at, sample in enumerate(samples) if isinstance(sample, BaseException)]
    assert [at for at in range(40) if at not in failed] == [sample for sample in samples if isinstance(sample, int)]
    assert len(failed) <= 4


def test_another_loop() -> None:
    """A reader can be used on one loop after the other."""
    reader = new_reader(Numbers(), 2)
    for _ in range(2):
        assert asyncio.run(reader.read(range(5))).samples == list(range(5))
