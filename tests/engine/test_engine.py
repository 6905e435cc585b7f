"""However slow the consumer is, what is in flight stays bounded; and what may overlap does."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Limits
from aiofeed.core.statistics import EpochStats
from aiofeed.testing import SimulatedDevice


class Gauge:
    """A source that counts what is being read, and how far reading and decoding have come."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reading = self.most_reading = self.read_ever = self.decoded = 0
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        self.reading += 1
        self.read_ever += 1
        self.most_reading = max(self.most_reading, self.reading)
        await asyncio.sleep(0)
        self.reading -= 1
        return b"%d" % index

    def decode(self, data: bytes) -> torch.Tensor:
        with self.changed:
            self.decoded += 1
            self.changed.notify_all()
        return torch.tensor(int(data))

    def wait_for_decoded(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.decoded >= count, 10)


def settled(feeder: Feeder[Any], source: Gauge) -> None:
    """Let the engine do all that it may: its loop has gone round with nothing left to start."""
    pipeline = feeder._session.pipeline
    assert pipeline is not None
    last = None
    for _ in range(200):
        done = threading.Event()
        pipeline.loop_thread.call(done.set)
        assert done.wait(10)
        state = (source.read_ever, source.decoded, source.reading)
        pipeline.loop_thread.decode_pool.submit(int).result(10)
        if state == last:
            return
        last = state


@pytest.mark.parametrize(
    ("batch_size", "limits"),
    [
        (4, Limits(prefetch_batches=1, read_concurrency=4)),
        (4, Limits(prefetch_batches=3, read_concurrency=9)),
        (10, Limits(prefetch_batches=2, read_concurrency=3)),
        (1, Limits(prefetch_batches=2, read_concurrency=8)),
    ],
)
def test_a_consumer_that_stops_bounds_everything(batch_size: int, limits: Limits) -> None:
    """With the consumer at its first batch: at most prefetch_batches are decoded ahead, and reads are bounded too."""
    source = Gauge(600)
    feeder = Feeder(source, decode=source.decode, batch_size=batch_size, limits=limits)
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        assert limits.prefetch_batches is not None
        assert limits.read_concurrency is not None
        source.wait_for_decoded((taken + limits.prefetch_batches) * batch_size)
        settled(feeder, source)
        assert source.decoded == (taken + limits.prefetch_batches) * batch_size
        most = limits.prefetch_batches + math.ceil(limits.read_concurrency / batch_size) + 1
        assert source.read_ever <= (taken + most) * batch_size
        assert feeder.statistics().queue_depth <= limits.prefetch_batches
    assert source.most_reading <= limits.read_concurrency
    feeder.close()


def test_memory_bytes_bounds_what_is_in_flight() -> None:
    """Batches of known size: no more are in flight than memory_bytes holds, and one always is."""
    source = Gauge(100)

    def decode(data: bytes) -> torch.Tensor:
        source.decode(data)
        return torch.zeros(1000, dtype=torch.uint8)

    limits = Limits(memory_bytes=9_000, prefetch_batches=8, read_concurrency=64)
    feeder = Feeder(source, decode=decode, batch_size=4, limits=limits)
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        source.wait_for_decoded((taken + 2) * 4)
        settled(feeder, source)
        assert source.decoded == (taken + 2) * 4
    feeder.close()
    tiny = Feeder(source, decode=decode, batch_size=4, limits=Limits(memory_bytes=1))
    assert sum(1 for _ in tiny) == 25
    tiny.close()


def test_device_batches_bounds_what_is_on_the_device() -> None:
    """With the consumer stopped, so many batches are on the device or on their way, and no more."""
    source = Gauge(200)
    device = SimulatedDevice()
    limits = Limits(device_batches=2, prefetch_batches=3)
    feeder = Feeder(source, decode=source.decode, batch_size=4, device=device, limits=limits)
    iterator = iter(feeder)
    next(iterator)
    source.wait_for_decoded((1 + 2 + 3) * 4)
    settled(feeder, source)
    assert source.decoded == (1 + 2 + 3) * 4
    assert feeder.statistics().queue_depth <= 2
    feeder.close()


def test_reading_goes_on_while_the_consumer_works() -> None:
    """The next batch is decoded during a step: waiting for it inside the step ends."""
    source = Gauge(40)
    feeder = Feeder(source, decode=source.decode, batch_size=4)
    for number, _ in enumerate(feeder):
        if number < 9:
            source.wait_for_decoded((number + 2) * 4)
    feeder.close()


def test_a_slow_read_does_not_stop_other_reads() -> None:
    """While a sample's read is stuck, others of the same and later batches are read."""
    others = asyncio.Event()

    class OneIsSlow(Gauge):
        async def read(self, index: int) -> bytes:
            if index == 8:
                await others.wait()
                return b"8"
            if self.read_ever >= 16:
                others.set()
            return await super().read(index)

    source = OneIsSlow(40)
    feeder = Feeder(source, decode=source.decode, batch_size=4, limits=Limits(read_concurrency=16))
    assert [x for batch in feeder for x in batch.tolist()] == list(range(40))
    assert others.is_set()
    feeder.close()


def test_counters_add() -> None:
    """Totals are sums; the time to the first batch is the first epoch's."""
    one, other = EpochStats(samples=2, first_batch_s=0.5), EpochStats(samples=3, first_batch_s=0.1)
    one.add(other)
    assert (one.samples, one.first_batch_s) == (5, 0.5)
