"""Leaving an iteration in every way while the engine is at every stage: nothing leaks, and the feeder works again."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Limits, prefetch
from aiofeed.errors import IteratorClosedError
from aiofeed.kernel.devices.pinned import PinnedBufferPool, release_unused
from aiofeed.kernel.runtime.cancellation import clear_cancellation, is_cancelled, task_scope
from tests.support.simulated_device import SimulatedDevice

BOUND_S = 20.0
"""Time limit of every wait; each takes milliseconds."""

SAMPLES = 24
BATCH = 4
WHOLE = [list(range(start, start + BATCH)) for start in range(0, SAMPLES, BATCH)]
BLOCKED_FROM = BATCH
"""Stages block the engine from the second batch on, so that a first one can be returned."""

LIMITS = Limits(prefetch_batches=1, read_concurrency=BATCH, decode_threads=2, device_batches=1)


def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition on another thread holds."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.0005)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Exclude existing objects from the many garbage collections, which then take a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Barrier:
    """A place where the engine stops, in a coroutine or in a thread, until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def block(self) -> None:
        self.reached.set()
        assert self.released.wait(BOUND_S)

    async def wait(self) -> None:
        event = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), event))
        self.reached.set()
        if not self.released.is_set():
            await event.wait()

    def release(self) -> None:
        self.released.set()
        for loop, event in self._waiting:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                pass  # the loop is closed; its task was cancelled


class Staged:
    """A source, decoder, collate function and transform that block the engine at one stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.barrier = Barrier()
        self.opened = self.closed = self.reads = self.decodes = 0
        self.device = BlockingDevice(self) if stage in ("copy", "transform", "device queue") else None

    def __len__(self) -> int:
        return SAMPLES

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def open(self) -> None:
        if self.stage == "open":
            await self.barrier.wait()
        self.opened += 1

    async def aclose(self) -> None:
        if self.stage == "aclose":
            await self.barrier.wait()
        self.closed += 1

    async def read(self, index: int) -> bytes:
        if index >= BLOCKED_FROM:
            if self.stage == "read":
                await self.barrier.wait()
            elif self.stage == "blocking read":
                await asyncio.to_thread(self.barrier.block)
        self.reads += 1
        if (self.stage == "gate" and self.reads == 3 * BATCH) or (self.stage == "room" and self.reads == 4 * BATCH):
            self.barrier.reached.set()
        return b"%d" % index

    def decode(self, data: bytes) -> torch.Tensor:
        if self.stage == "decode" and int(data) >= BLOCKED_FROM:
            self.barrier.block()
        self.decodes += 1
        if "queue" in self.stage and self.decodes == 2 * BATCH:
            self.barrier.reached.set()
        return torch.tensor(int(data))

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if int(samples[0]) >= BLOCKED_FROM:
            self.barrier.block()
        return torch.stack(samples)

    def transform(self, batch: Any) -> Any:
        if self.device is not None and self.device.copies > 1:
            self.barrier.block()
        return batch

    def feeder(self) -> Feeder[Any]:
        return Feeder(
            self,
            decode=self.decode,
            batch_size=BATCH,
            limits=LIMITS,
            collate_fn=self.collate if self.stage == "collate" else None,
            device=self.device,
            transform=self.transform if self.stage == "transform" else None,
            shard=None,
        )


class BlockingDevice(SimulatedDevice):
    """A device whose second copy blocks if the stage is "copy"."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self.staged = staged

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        if self.staged.stage == "copy" and self.copies == 1:
            self.staged.barrier.block()
        return super().copy(tensor)


@pytest.fixture
def staged(stage: str, caplog: pytest.LogCaptureFixture) -> Iterator[Staged]:
    made = Staged(stage)
    yield made
    made.barrier.release()
    assert not caplog.records, caplog.text


def release_on_stop(feeder: Feeder[Any], barrier: Barrier) -> threading.Thread:
    """Release the engine after it was told to stop."""
    loop_thread = feeder._session.pipeline.loop_thread  # type: ignore[union-attr]

    def release() -> None:
        until(lambda: loop_thread.stopping)
        barrier.release()

    thread = threading.Thread(target=release)
    thread.start()
    return thread


# The threads that ran before a test: those of datasets that other tests still refer to.
EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Do not count threads of other tests."""
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def engine_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("aiofeed") and each not in EARLIER]


def check_nothing_left(staged: Staged, feeder: Feeder[Any]) -> None:
    """Check that one more epoch is complete, then that no thread, task, open source or memory is left.

    The feeder still exists: a closed feeder holds none of these.
    """
    left = feeder._session.pipeline
    iterator = iter(feeder)
    if left is not feeder._session.pipeline:
        memory = weakref.ref(left._memory)  # type: ignore[union-attr]
        loop_thread = left.loop_thread  # type: ignore[union-attr]
        del left
        until(loop_thread.loop.is_closed)
        assert not loop_thread._tasks
        assert not asyncio.all_tasks(loop_thread.loop)
        assert loop_thread.join(BOUND_S)
        del loop_thread
        # More than once: a copy thread may still refer to objects until it has ended.
        until(lambda: gc.collect() >= 0 and memory() is None)
    assert [batch.tolist() for batch in iterator] == WHOLE
    del iterator
    feeder.close()
    until(lambda: not engine_threads())
    assert staged.opened == staged.closed
    gc.collect()
    if staged.device is not None:
        assert staged.device.pinned_bytes == 0
        assert staged.device.allocated_bytes == 0


# --- ways to leave a synchronous iteration ----------------------------------------------------------------------------


def by_close(feeder: Feeder[Any], iterator: Any) -> None:
    feeder.close()
    with pytest.raises(IteratorClosedError):
        next(iterator)


def by_close_from_another_thread(feeder: Feeder[Any], iterator: Any) -> None:
    closing = threading.Thread(target=feeder.close)
    closing.start()
    with pytest.raises(IteratorClosedError):
        # Batches that were finished before may still be returned.
        for _ in range(SAMPLES):
            next(iterator)
    closing.join(BOUND_S)
    assert not closing.is_alive()


def by_closing_the_iterator(feeder: Feeder[Any], iterator: Any) -> None:
    iterator.close()
    with pytest.raises(IteratorClosedError):
        next(iterator)


def by_dropping_the_iterator(feeder: Feeder[Any], iterator: Any) -> None:
    del iterator


def by_a_second_iterator(feeder: Feeder[Any], iterator: Any) -> None:
    other = iter(feeder)
    with pytest.raises(IteratorClosedError, match="newer"):
        next(iterator)
    assert next(other).tolist() == WHOLE[0]


WAYS = (
    by_close,
    by_close_from_another_thread,
    by_closing_the_iterator,
    by_dropping_the_iterator,
    by_a_second_iterator,
)
LATER = (
    "room", "read", "blocking read", "gate", "decode", "collate", "transform", "copy", "queue", "device queue",
)  # fmt: skip
STAGES = ("open", *LATER)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_an_iterator_is_left(stage: str, staged: Staged, way: Callable[[Feeder[Any], Any], None]) -> None:
    """At every stage the engine stops, and the next epoch is complete."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    if stage != "open":
        assert next(iterator).tolist() == WHOLE[0]
    assert staged.barrier.reached.wait(BOUND_S)
    releasing = release_on_stop(feeder, staged.barrier)
    handed = [iterator]
    del iterator
    way(feeder, handed.pop())
    releasing.join(BOUND_S)
    assert staged.barrier.released.is_set()
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("raises", [False, True], ids=["by_break", "by_an_exception"])
@pytest.mark.parametrize("stage", LATER)
def test_a_loop_is_left(stage: str, staged: Staged, raises: bool) -> None:
    """After `break`, or an exception in the loop body, the engine stops and the next epoch is complete."""
    feeder = staged.feeder()
    releasing: list[threading.Thread] = []

    def train() -> None:
        for batch in feeder:
            assert batch.tolist() == WHOLE[0]
            assert staged.barrier.reached.wait(BOUND_S)
            releasing.append(release_on_stop(feeder, staged.barrier))
            if raises:
                raise ZeroDivisionError
            break

    if raises:
        with pytest.raises(ZeroDivisionError):
            train()
    else:
        train()
    releasing[0].join(BOUND_S)
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("stage", STAGES)
def test_everything_is_dropped(stage: str, staged: Staged) -> None:
    """When feeder and iterator are dropped, the threads end and the source is closed."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    if stage != "open":
        next(iterator)
    assert staged.barrier.reached.wait(BOUND_S)
    releasing = release_on_stop(feeder, staged.barrier)
    loop_thread = feeder._session.pipeline.loop_thread  # type: ignore[union-attr]
    del feeder, iterator
    gc.collect()
    releasing.join(BOUND_S)
    until(lambda: not engine_threads())
    assert loop_thread.loop.is_closed()
    assert not asyncio.all_tasks(loop_thread.loop)
    assert staged.opened == staged.closed
    gc.collect()
    if staged.device is not None:
        # On a free-threaded build memory may be dropped after the end of its pool, and the next call then frees it.
        until(lambda: (release_unused(), staged.device.pinned_bytes == 0)[-1])  # type: ignore[union-attr]


# --- asynchronous consumers -------------------------------------------------------------------------------------------


async def by_cancelling(iterator: Any) -> list[Any]:
    async def ask() -> Any:
        return await anext(iterator)

    task = asyncio.create_task(ask())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return [] if task.cancelled() else [task.result().tolist()]


async def by_a_timeout(iterator: Any) -> list[Any]:
    try:
        async with asyncio.timeout(0):
            return [(await anext(iterator)).tolist()]
    except TimeoutError:
        return []


@pytest.mark.parametrize("way", [by_cancelling, by_a_timeout], ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", STAGES)
async def test_the_wait_for_a_batch_is_cancelled(stage: str, staged: Staged, way: Callable[[Any], Any]) -> None:
    """Cancelling `anext` loses no batch: the next one returns the next batch, and the epoch is complete."""
    feeder = staged.feeder()
    iterator = aiter(feeder)
    got = [] if stage == "open" else [(await anext(iterator)).tolist()]
    assert await asyncio.to_thread(staged.barrier.reached.wait, BOUND_S)
    for _ in range(3):
        got += await way(iterator)
    staged.barrier.release()
    got += [batch.tolist() async for batch in iterator]
    assert got == WHOLE
    await asyncio.to_thread(check_nothing_left, staged, feeder)


@pytest.mark.parametrize("way", ["feeder", "iterator", "second", "cancelled task", "dropped"])
@pytest.mark.parametrize("stage", STAGES)
async def test_an_asynchronous_iterator_is_left(stage: str, staged: Staged, way: str) -> None:
    """After `aclose`, a second iterator, a cancelled consumer or a dropped iterator, the engine stops."""
    feeder = staged.feeder()
    iterator = aiter(feeder)
    if stage != "open":
        await anext(iterator)
    assert await asyncio.to_thread(staged.barrier.reached.wait, BOUND_S)
    releasing = release_on_stop(feeder, staged.barrier)
    if way == "feeder":
        await feeder.aclose()
    elif way == "iterator":
        await iterator.aclose()
    elif way == "second":
        other = aiter(feeder)
        with pytest.raises(IteratorClosedError, match="newer"):
            await anext(iterator)
        assert (await anext(other)).tolist() == WHOLE[0]
        del other
    elif way == "cancelled task":

        async def consume(mine: list[Any]) -> None:
            [given] = mine
            mine.clear()
            async for _ in given:
                pass

        task = asyncio.create_task(consume([iterator]))
        del iterator
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
    if way not in ("cancelled task",):
        del iterator
    gc.collect()
    await asyncio.to_thread(releasing.join, BOUND_S)
    await asyncio.to_thread(check_nothing_left, staged, feeder)


@pytest.mark.parametrize("stage", ["device queue"])
def test_after_an_epoch_no_buffer_is_in_use(stage: str, staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing read ahead, all buffers are given back when the copies are complete."""
    taken: list[int] = []
    put: list[int] = []
    take_one, put_all = PinnedBufferPool.take, PinnedBufferPool.put
    monkeypatch.setattr(PinnedBufferPool, "take", lambda pool, n: (taken.append(n), take_one(pool, n))[1])
    monkeypatch.setattr(
        PinnedBufferPool, "put", lambda pool, some: (put.extend(map(len, some)), put_all(pool, some))[1]
    )
    feeder = staged.feeder()
    assert [batch.tolist() for batch in feeder] == WHOLE
    until(lambda: len(put) == len(taken) > 0)
    check_nothing_left(staged, feeder)


# --- the end of an epoch, and between epochs --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", ["end"])
def test_the_end_is_left(stage: str, staged: Staged, way: Callable[[Feeder[Any], Any], None]) -> None:
    """After the last batch, before the end of the epoch was seen, every way to leave works."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    assert [next(iterator).tolist() for _ in WHOLE] == WHOLE
    if way is by_dropping_the_iterator:
        del iterator
    elif way is by_a_second_iterator:
        other = iter(feeder)
        # The older iterator has returned all its batches and ends normally.
        assert next(iterator, None) is None
        assert next(other).tolist() == WHOLE[0]
        del other, iterator
    else:
        way(feeder, iterator)
        del iterator
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("way", ["close", "drop", "aclose", "another epoch"])
@pytest.mark.parametrize("stage", ["read ahead"])
def test_batches_read_ahead_are_dropped(stage: str, staged: Staged, way: str) -> None:
    """Batches of the next epoch that were read ahead are dropped with the threads."""
    feeder = staged.feeder()
    for _ in range(2):
        assert [batch.tolist() for batch in feeder] == WHOLE
    # After two complete epochs the next one is read ahead.
    until(lambda: staged.decodes >= 2 * SAMPLES + BATCH)
    if way == "close":
        feeder.close()
        assert not engine_threads()
    elif way == "aclose":
        asyncio.run(feeder.aclose())
    elif way == "another epoch":
        feeder.set_epoch(17)
    else:
        del feeder
        gc.collect()
        until(lambda: not engine_threads())
        assert staged.opened == staged.closed == 1
        return
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("way", ["second", "close", "close twice", "drop", "aclose given up"])
@pytest.mark.parametrize("stage", ["aclose"])
def test_a_source_that_is_being_closed(stage: str, staged: Staged, way: str) -> None:
    """A source's `aclose` is awaited once, whatever happens meanwhile, and it is not opened again before that."""
    feeder = staged.feeder()
    for _ in feeder:
        break
    assert staged.barrier.reached.wait(BOUND_S)
    assert staged.closed == 0
    if way == "second":
        other = iter(feeder)
        assert staged.opened == 1
        staged.barrier.release()
        assert next(other).tolist() == WHOLE[0]
        assert (staged.opened, staged.closed) == (2, 1)
        del other
    elif way.startswith("close"):
        closing = [threading.Thread(target=feeder.close) for _ in range(1 + (way == "close twice"))]
        for thread in closing:
            thread.start()
        staged.barrier.release()
        for thread in closing:
            thread.join(BOUND_S)
        assert not engine_threads()
    elif way == "drop":
        del feeder
        gc.collect()
        staged.barrier.release()
        until(lambda: not engine_threads())
        assert (staged.opened, staged.closed) == (1, 1)
        return
    else:

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await feeder.aclose()

        asyncio.run(give_up())
        staged.barrier.release()
    check_nothing_left(staged, feeder)


# --- cancellations in the user's code ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["nowhere"])
def test_an_open_that_suppresses_its_cancellation(stage: str, staged: Staged) -> None:
    """A source whose `open` suppresses its cancellation is closed at once."""
    barrier = Barrier()

    async def opener() -> None:
        staged.opened += 1
        try:
            await barrier.wait()
        except asyncio.CancelledError:
            pass

    staged.open = opener  # type: ignore[method-assign]
    feeder = staged.feeder()
    iterator = iter(feeder)
    assert barrier.reached.wait(BOUND_S)
    feeder.close()
    assert not engine_threads()
    assert staged.opened == staged.closed == 1
    assert staged.reads == 0
    del iterator
    barrier.release()
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("way", ["close", "drop"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_stopped_iterable_makes_no_further_batch(device: bool, way: str) -> None:
    """If `prefetch` is stopped while its iterable makes batch 3, no further batch is made."""
    barrier = Barrier()
    asked: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(100):
            asked.append(number)
            if number == 3:
                barrier.block()
            yield number

    feed = prefetch(batches(), SimulatedDevice() if device else None, prefetch_batches=8)  # type: ignore[arg-type]
    iterator = iter(feed)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert barrier.reached.wait(BOUND_S)
    if way == "close":
        iterator.close()
    del iterator
    gc.collect()
    barrier.release()
    until(lambda: not engine_threads())
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["close", "drop", "cancel"])
async def test_an_asynchronous_iterable_is_closed_once(way: str) -> None:
    """`prefetch` cancels an async generator that waits; its finally block runs once, on its own event loop."""
    barrier = Barrier()
    ended: list[asyncio.AbstractEventLoop] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def batches() -> AsyncIterator[int]:
        loops.append(asyncio.get_running_loop())
        try:
            yield 0
            await barrier.wait()
            yield 1
        finally:
            ended.append(asyncio.get_running_loop())

    iterator = aiter(prefetch(batches()))
    assert await anext(iterator) == 0
    assert await asyncio.to_thread(barrier.reached.wait, BOUND_S)
    if way == "cancel":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(iterator)
        barrier.release()
        assert [batch async for batch in iterator] == [1]
    elif way == "close":
        await iterator.aclose()
    del iterator
    gc.collect()
    await asyncio.to_thread(until, lambda: not engine_threads())
    assert ended == loops


@pytest.mark.parametrize("way", ["cancelled", "cancelled later", "error", "error of another", "error of another later"])
async def test_a_task_scope_distinguishes_cancellations(way: str) -> None:
    """A task_scope's tasks end when their group ends; cancellations by the tasks themselves are cleared."""
    log: list[str] = []

    async def stubborn() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        assert not is_cancelled()
        await clear_cancellation()
        assert not task.cancelling()
        try:
            await asyncio.sleep(BOUND_S)
        except asyncio.CancelledError:
            for _ in range(10):
                await asyncio.sleep(0)
        log.append("swallowed")
        assert is_cancelled()
        await clear_cancellation()
        log.append("not cancelled")

    async def fail(after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        raise ZeroDivisionError

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            with task_scope():
                group.create_task(stubborn())
                for _ in range(5):
                    await asyncio.sleep(0)
                if way == "error":
                    raise ZeroDivisionError
                if way.startswith("error"):
                    group.create_task(fail(after=5 if way.endswith("later") else 0))
                if not way.endswith("later"):
                    await asyncio.sleep(BOUND_S)

    running = asyncio.create_task(run())
    for _ in range(20):
        await asyncio.sleep(0)
    if way.startswith("cancelled"):
        running.cancel()
    with pytest.raises((asyncio.CancelledError, BaseExceptionGroup)) as raised:
        await running
    assert isinstance(raised.value, BaseExceptionGroup) == way.startswith("error")
    if isinstance(raised.value, BaseExceptionGroup):
        assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]
    assert log == ["swallowed"]
