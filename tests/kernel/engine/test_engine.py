"""Tests of the engine's limits: work in flight is bounded for any consumer, and independent work overlaps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from aiofeed import FailurePolicy, Feeder, Limits
from aiofeed.kernel.core.failures import FailureCounter
from aiofeed.kernel.core.limits import resolve_limits
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import MemoryBudget
from aiofeed.kernel.engine.assembly import AssemblyOptions
from aiofeed.kernel.engine.batch import Batch
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.engine import Engine
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.queue import BatchQueue, ReadyBatch
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.kernel.sampling.epochs import EpochStart
from aiofeed.sample_order.sample_assembly import SampleAssembly
from tests.support.simulated_device import SimulatedDevice


class Gauge:
    """A source that counts its reads and decodes."""

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


def wait_until_settled(feeder: Feeder[Any], source: Gauge) -> None:
    """Wait until an iteration of the engine's loop and a job of its decode pool change nothing."""
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
def test_a_stopped_consumer_bounds_reads_and_decodes(batch_size: int, limits: Limits) -> None:
    """While the consumer keeps a batch, at most prefetch_batches more are decoded, and reads are bounded too."""
    source = Gauge(600)
    feeder = Feeder(source, decode=source.decode, batch_size=batch_size, limits=limits)
    iterator = iter(feeder)
    for taken in (1, 2, 3):
        next(iterator)
        assert limits.prefetch_batches is not None
        assert limits.read_concurrency is not None
        source.wait_for_decoded((taken + limits.prefetch_batches) * batch_size)
        wait_until_settled(feeder, source)
        assert source.decoded == (taken + limits.prefetch_batches) * batch_size
        most = limits.prefetch_batches + math.ceil(limits.read_concurrency / batch_size) + 1
        assert source.read_ever <= (taken + most) * batch_size
        assert feeder.statistics().queue_depth <= limits.prefetch_batches
    assert source.most_reading <= limits.read_concurrency
    feeder.close()


def test_memory_bytes_bounds_what_is_in_flight() -> None:
    """Of batches of known size as many are in flight as memory_bytes allows, but at least one."""
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
        wait_until_settled(feeder, source)
        assert source.decoded == (taken + 2) * 4
    feeder.close()
    tiny = Feeder(source, decode=decode, batch_size=4, limits=Limits(memory_bytes=1))
    assert sum(1 for _ in tiny) == 25
    tiny.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("in_order", [True, False, "samples"])
def test_a_replacement_is_read_while_more_than_memory_bytes_is_in_use(in_order: Any) -> None:
    """The batch in which it is could not be delivered otherwise, and those behind it would keep the memory."""

    class Growing(Gauge):
        async def read(self, index: int) -> bytes:
            return b"%d" % index + b" " * (1_000 if index < 20 else 100_000)

    def decode(data: bytes) -> torch.Tensor:
        if (value := int(data)) >= 20 and value % 4 == 1:
            raise ValueError("broken")
        return torch.tensor(value)

    limits = Limits(memory_bytes=50_000, decode_threads=4)
    policy = FailurePolicy("replace", max_failures=1000)
    with Feeder(Growing(80), decode=decode, batch_size=4, limits=limits, on_error=policy, in_order=in_order) as feeder:
        assert [len(batch) for batch in feeder] == [4] * 20


def test_device_batches_bounds_what_is_on_the_device() -> None:
    """With the consumer stopped, device_batches batches are on the device or being copied."""
    source = Gauge(200)
    device = SimulatedDevice()
    limits = Limits(device_batches=2, prefetch_batches=3)
    feeder = Feeder(source, decode=source.decode, batch_size=4, device=device, limits=limits)
    iterator = iter(feeder)
    next(iterator)
    source.wait_for_decoded((1 + 2 + 3) * 4)
    wait_until_settled(feeder, source)
    assert source.decoded == (1 + 2 + 3) * 4
    assert feeder.statistics().queue_depth <= 2
    feeder.close()


def test_decoding_continues_during_a_step() -> None:
    """The next batch is decoded while the consumer works on the current one."""
    source = Gauge(40)
    feeder = Feeder(source, decode=source.decode, batch_size=4)
    for number, _ in enumerate(feeder):
        if number < 9:
            source.wait_for_decoded((number + 2) * 4)
    feeder.close()


def test_a_slow_read_does_not_stop_other_reads() -> None:
    """While one read is stuck, other samples of the same and of later batches are read."""
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


def test_epoch_statistics_add_up() -> None:
    """``EpochStats.add`` sums totals; the time to the first batch is the first epoch's."""
    one, other = EpochStats(samples=2, first_batch_s=0.5), EpochStats(samples=3, first_batch_s=0.1)
    one.add(other)
    assert (one.samples, one.first_batch_s) == (5, 0.5)


HOLD_S = 1.0


class Timed:
    """A source of one sample, whose read takes 20 ms."""

    def __init__(self) -> None:
        self.reading = threading.Event()

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> str:
        return "sample"

    async def read(self, index: int) -> bytes:
        self.reading.set()
        await asyncio.sleep(0.02)
        return b"1"


def hold_the_gil_after(event: threading.Event) -> None:
    """Run Python code for a second, which no other thread interrupts for half of it."""
    assert event.wait(60)
    until = time.perf_counter() + HOLD_S
    while time.perf_counter() < until:
        pass


def test_the_time_of_reads_does_not_count_waiting_for_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_s` of a short read is short, although another thread held the GIL when the read ended."""
    interval_s = sys.getswitchinterval()
    source = Timed()
    holder = threading.Thread(target=hold_the_gil_after, args=(source.reading,))
    feeder: Feeder[Any] = Feeder(source, decode=len, batch_size=1)
    try:
        sys.setswitchinterval(HOLD_S / 2)
        holder.start()
        list(feeder)
        holder.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert feeder.statistics().read_s < HOLD_S / 3
    monkeypatch.setattr(EventLoopThread, "loop_delay_s", lambda _: 0.0)  # the machine may be busy
    feeder.close()
    list(feeder)
    assert feeder.statistics().read_s >= 0.019
    feeder.close()


def new_engine(assembly: Any = ChunkAssembly, **options: Any) -> Engine:
    """An engine without batches, whose assembly has an executor only."""
    parts: Any = dict.fromkeys(("fetcher", "policy", "new_builder", "wrap", "memory"))
    return Engine(
        [],
        partial(assembly, options=AssemblyOptions(executor=ThreadPool("test", 1), **parts), **options),
        batch_size=4,
        queue=BatchQueue(),
        limits=resolve_limits(Limits(), batch_size=4, cpus=1, free_memory=1 << 30),
        budget=MemoryBudget(1),
        in_order=True,
        call=lambda function: function(),
    )


@pytest.mark.parametrize("options", [{}, {"schedule": None, "batch_size": 4}])
def test_an_engine_is_freed_without_a_garbage_collection(options: dict[str, Any]) -> None:
    """It is in no cycle with its assembly, also after it has run, so the user's source is freed with the feeder."""
    for runs in (False, True):
        engine = new_engine(SampleAssembly if options else ChunkAssembly, **options)
        engine.assembly.reading_ahead = contextlib.nullcontext  # type: ignore[assignment]
        if runs:
            asyncio.run(engine.run())
        there = weakref.ref(engine)
        gc.disable()
        try:
            del engine
            assert there() is None
        finally:
            gc.enable()


def test_batches_that_are_taken_when_the_engine_ends_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has not learnt of one yet, and another is taken while the next engine, with the same budget, is busy."""
    monkeypatch.setattr(ChunkAssembly, "busy", True)
    engine = new_engine()
    engine.assembly.reading_ahead = contextlib.nullcontext  # type: ignore[assignment]
    for number in range(2):
        engine.buffer.waiting += 1
        item = ReadyBatch(number, 4, None, reserved=engine.budget.reserve(4))
        if number:
            asyncio.run(engine.run())
            assert engine.budget._batches == 1
        engine.taken(item)
    assert engine.budget._batches == engine.buffer.waiting == 0


def test_work_that_comes_when_the_engine_ends_is_dropped() -> None:
    """No task begins, nothing is raised, and no coroutine is left that was never awaited."""
    engine, begun = new_engine(), []
    batch = Batch(BatchPlan(0, [0], [0], 0), EpochStart(EpochStats()), FailureCounter(FailurePolicy(), 1), 0)

    async def work(name: str) -> None:
        begun.append(name)

    async def last() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            engine.start(batch, work, "while it is cancelled")

    async def run() -> None:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as engine._tasks:
                engine.start(batch, work, "in time")
                engine.start(batch, last)
                await asyncio.sleep(0)
                raise KeyError
        engine.start(batch, work, "after its end")
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert begun == ["in time"]
