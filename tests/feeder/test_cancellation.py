"""Every stage the engine may be at, left in every way: nothing stays behind, and the feeder works again."""

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

from aiofeed import Feeder, IteratorClosedError, Limits, prefetch
from aiofeed.runtime.buffers import PinnedBufferPool
from aiofeed.runtime.cancellation import TaskScope, clear_cancellation, is_cancelled
from aiofeed.testing import SimulatedDevice

BOUND_S = 20.0
"""Nothing is waited for any longer; all of it takes milliseconds."""

SAMPLES = 24
BATCH = 4
WHOLE = [list(range(start, start + BATCH)) for start in range(0, SAMPLES, BATCH)]
HELD_FROM = BATCH
"""Stages hold the engine from the second batch on, so that a first one can be handed out."""

LIMITS = Limits(prefetch_batches=1, read_concurrency=BATCH, decode_threads=2, device_batches=1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to come so far."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.0005)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Collections look at what the tests made alone: a tenth of the time, and there are many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Hold:
    """A place where the engine stops, in a coroutine or in a thread, until it is let go."""

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
                pass  # closed: whoever waited there was cancelled


class Staged:
    """A source, with everything else that a feeder is made of, that holds the engine at one stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.hold = Hold()
        self.opened = self.closed = self.reads = self.decodes = 0
        self.device = HeldDevice(self) if stage in ("copy", "transform", "device handoff") else None

    def __len__(self) -> int:
        return SAMPLES

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def open(self) -> None:
        if self.stage == "open":
            await self.hold.wait()
        self.opened += 1

    async def aclose(self) -> None:
        if self.stage == "aclose":
            await self.hold.wait()
        self.closed += 1

    async def read(self, index: int) -> bytes:
        if index >= HELD_FROM:
            if self.stage == "read":
                await self.hold.wait()
            elif self.stage == "blocking read":
                await asyncio.to_thread(self.hold.block)
        self.reads += 1
        if (self.stage == "gate" and self.reads == 3 * BATCH) or (self.stage == "room" and self.reads == 4 * BATCH):
            self.hold.reached.set()
        return b"%d" % index

    def decode(self, data: bytes) -> torch.Tensor:
        if self.stage == "decode" and int(data) >= HELD_FROM:
            self.hold.block()
        self.decodes += 1
        if "handoff" in self.stage and self.decodes == 2 * BATCH:
            self.hold.reached.set()
        return torch.tensor(int(data))

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if int(samples[0]) >= HELD_FROM:
            self.hold.block()
        return torch.stack(samples)

    def transform(self, batch: Any) -> Any:
        if self.device is not None and self.device.copies > 1:
            self.hold.block()
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


class HeldDevice(SimulatedDevice):
    """A device whose second copy does not return, where that is the stage."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self.staged = staged

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        if self.staged.stage == "copy" and self.copies == 1:
            self.staged.hold.block()
        return super().copy(tensor)


@pytest.fixture
def staged(stage: str, caplog: pytest.LogCaptureFixture) -> Iterator[Staged]:
    made = Staged(stage)
    yield made
    made.hold.release()
    assert not caplog.records, caplog.text


def released_on_stop(feeder: Feeder[Any], hold: Hold) -> threading.Thread:
    """Let the engine go once it was told to stop, and not before."""
    loop_thread = feeder._session.pipeline.loop_thread  # type: ignore[union-attr]

    def release() -> None:
        until(lambda: loop_thread.stopping)
        hold.release()

    thread = threading.Thread(target=release)
    thread.start()
    return thread


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]


def check_nothing_left(staged: Staged, feeder: Feeder[Any]) -> None:
    """One more epoch is whole; then the threads, the tasks, the source and the memory are looked at.

    The feeder lives on: closed, it keeps nothing.
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
        # More than once: what a thread of the copier holds is within reach when that has ended.
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


# --- ways out of an ordinary loop: each has an iterator that gave `before` batches ------------------------------------


def by_close(feeder: Feeder[Any], iterator: Any) -> None:
    feeder.close()
    with pytest.raises(IteratorClosedError):
        next(iterator)


def by_close_from_another_thread(feeder: Feeder[Any], iterator: Any) -> None:
    closing = threading.Thread(target=feeder.close)
    closing.start()
    with pytest.raises(IteratorClosedError):
        # What was finished by then may be handed out still.
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
    "room", "read", "blocking read", "gate", "decode", "collate", "transform", "copy", "handoff", "device handoff",
)  # fmt: skip
STAGES = ("open", *LATER)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_an_iterator_is_left(stage: str, staged: Staged, way: Callable[[Feeder[Any], Any], None]) -> None:
    """Whatever the engine is at, it lets go, and the next epoch is whole."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    if stage != "open":
        assert next(iterator).tolist() == WHOLE[0]
    assert staged.hold.reached.wait(BOUND_S)
    releasing = released_on_stop(feeder, staged.hold)
    handed = [iterator]
    del iterator
    way(feeder, handed.pop())
    releasing.join(BOUND_S)
    assert staged.hold.released.is_set()
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("raises", [False, True], ids=["by_break", "by_an_exception"])
@pytest.mark.parametrize("stage", LATER)
def test_a_loop_is_left(stage: str, staged: Staged, raises: bool) -> None:
    """`break`, or an exception in the body, which passes through."""
    feeder = staged.feeder()
    releasing: list[threading.Thread] = []

    def train() -> None:
        for batch in feeder:
            assert batch.tolist() == WHOLE[0]
            assert staged.hold.reached.wait(BOUND_S)
            releasing.append(released_on_stop(feeder, staged.hold))
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
    """Feeder and iterator are forgotten: the threads end and the source is closed."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    if stage != "open":
        next(iterator)
    assert staged.hold.reached.wait(BOUND_S)
    releasing = released_on_stop(feeder, staged.hold)
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
        until(lambda: staged.device.pinned_bytes == 0)  # type: ignore[union-attr]


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
    """No batch is lost: the next `anext` gives the next batch, and the epoch is whole."""
    feeder = staged.feeder()
    iterator = aiter(feeder)
    got = [] if stage == "open" else [(await anext(iterator)).tolist()]
    assert await asyncio.to_thread(staged.hold.reached.wait, BOUND_S)
    for _ in range(3):
        got += await way(iterator)
    staged.hold.release()
    got += [batch.tolist() async for batch in iterator]
    assert got == WHOLE
    await asyncio.to_thread(check_nothing_left, staged, feeder)


@pytest.mark.parametrize("way", ["feeder", "iterator", "second", "cancelled task", "dropped"])
@pytest.mark.parametrize("stage", STAGES)
async def test_an_asynchronous_iterator_is_left(stage: str, staged: Staged, way: str) -> None:
    """By `aclose` of either, a second iterator, a consumer cancelled for good, or by nobody keeping it."""
    feeder = staged.feeder()
    iterator = aiter(feeder)
    if stage != "open":
        await anext(iterator)
    assert await asyncio.to_thread(staged.hold.reached.wait, BOUND_S)
    releasing = released_on_stop(feeder, staged.hold)
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


@pytest.mark.parametrize("stage", ["device handoff"])
def test_after_an_epoch_every_pinned_block_has_come_back(
    stage: str, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing read ahead, the pool has all of its blocks once the copies are complete."""
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


# --- the end of an epoch, and what lies between two -------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("stage", ["end"])
def test_the_end_is_left(stage: str, staged: Staged, way: Callable[[Feeder[Any], Any], None]) -> None:
    """All batches were handed out, and nobody asked whether there are more."""
    feeder = staged.feeder()
    iterator = iter(feeder)
    assert [next(iterator).tolist() for _ in WHOLE] == WHOLE
    if way is by_dropping_the_iterator:
        del iterator
    elif way is by_a_second_iterator:
        other = iter(feeder)
        # Complete, it is no longer an iterator that was broken off.
        assert next(iterator, None) is None
        assert next(other).tolist() == WHOLE[0]
        del other, iterator
    else:
        way(feeder, iterator)
        del iterator
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("way", ["close", "drop", "aclose", "another epoch"])
@pytest.mark.parametrize("stage", ["read ahead"])
def test_what_was_read_ahead_is_left(stage: str, staged: Staged, way: str) -> None:
    """Between epochs, with the first batches of the next finished: they are given up with the threads."""
    feeder = staged.feeder()
    for _ in range(2):
        assert [batch.tolist() for batch in feeder] == WHOLE
    # After two whole epochs the next is begun before it is asked for.
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
    """Its `aclose` is awaited once, whatever happens meanwhile, and it is not opened again before that."""
    feeder = staged.feeder()
    for _ in feeder:
        break
    assert staged.hold.reached.wait(BOUND_S)
    assert staged.closed == 0
    if way == "second":
        other = iter(feeder)
        assert staged.opened == 1
        staged.hold.release()
        assert next(other).tolist() == WHOLE[0]
        assert (staged.opened, staged.closed) == (2, 1)
        del other
    elif way.startswith("close"):
        closing = [threading.Thread(target=feeder.close) for _ in range(1 + (way == "close twice"))]
        for thread in closing:
            thread.start()
        staged.hold.release()
        for thread in closing:
            thread.join(BOUND_S)
        assert not engine_threads()
    elif way == "drop":
        del feeder
        gc.collect()
        staged.hold.release()
        until(lambda: not engine_threads())
        assert (staged.opened, staged.closed) == (1, 1)
        return
    else:

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await feeder.aclose()

        asyncio.run(give_up())
        staged.hold.release()
    check_nothing_left(staged, feeder)


# --- what a user's code may do with a cancellation --------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["nowhere"])
def test_an_open_that_swallows_its_cancellation_holds_up_nobody(stage: str, staged: Staged) -> None:
    """A source that was opened although nobody wants it any more is closed at once."""
    hold = Hold()

    async def opener() -> None:
        staged.opened += 1
        try:
            await hold.wait()
        except asyncio.CancelledError:
            pass

    staged.open = opener  # type: ignore[method-assign]
    feeder = staged.feeder()
    iterator = iter(feeder)
    assert hold.reached.wait(BOUND_S)
    feeder.close()
    assert not engine_threads()
    assert staged.opened == staged.closed == 1
    assert staged.reads == 0
    del iterator
    hold.release()
    check_nothing_left(staged, feeder)


@pytest.mark.parametrize("way", ["close", "drop"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_an_iterable_is_asked_for_no_more_than_the_batch_it_is_at(device: bool, way: str) -> None:
    """`prefetch` that is left while batch 3 is being made leaves it at that, whatever room there is."""
    hold = Hold()
    asked: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(100):
            asked.append(number)
            if number == 3:
                hold.block()
            yield number

    feed = prefetch(batches(), SimulatedDevice() if device else None, prefetch_batches=8)  # type: ignore[arg-type]
    iterator = iter(feed)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert hold.reached.wait(BOUND_S)
    if way == "close":
        iterator.close()
    del iterator
    gc.collect()
    hold.release()
    until(lambda: not engine_threads())
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["close", "drop", "cancel"])
async def test_an_asynchronous_iterable_is_closed_once(way: str) -> None:
    """`prefetch` of an async generator that waits: it is cancelled there, and its clean-up runs on its own loop."""
    hold = Hold()
    ended: list[asyncio.AbstractEventLoop] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def batches() -> AsyncIterator[int]:
        loops.append(asyncio.get_running_loop())
        try:
            yield 0
            await hold.wait()
            yield 1
        finally:
            ended.append(asyncio.get_running_loop())

    iterator = aiter(prefetch(batches()))
    assert await anext(iterator) == 0
    assert await asyncio.to_thread(hold.reached.wait, BOUND_S)
    if way == "cancel":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(iterator)
        hold.release()
        assert [batch async for batch in iterator] == [1]
    elif way == "close":
        await iterator.aclose()
    del iterator
    gc.collect()
    await asyncio.to_thread(until, lambda: not engine_threads())
    assert ended == loops


@pytest.mark.parametrize("way", ["cancelled", "cancelled later", "error", "error of another", "error of another later"])
async def test_a_task_scope_knows_whose_cancellation_it_is(way: str) -> None:
    """Its tasks are to end once their group does, however that comes; what they did to themselves is taken back."""
    gone_on: list[str] = []

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
        gone_on.append("swallowed")
        assert is_cancelled()
        await clear_cancellation()
        gone_on.append("not cancelled")

    async def fail(after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        raise ZeroDivisionError

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            with TaskScope():
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
    assert gone_on == ["swallowed"]
