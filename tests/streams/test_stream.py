"""``Stream``: its arguments, and the reader that reads an epoch of it in blocks."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from aiofeed import FeedError, Stream
from aiofeed.errors import ReadError
from aiofeed.kernel.runtime.cancellation import ended_by
from aiofeed.streams.stream import StreamReader, snapshot_of
from aiofeed.streams.stream_epochs import ItemBlock, Snapshot


def count(n: int = 10) -> Iterator[int]:
    yield from range(n)


async def async_count(n: int = 10) -> AsyncIterator[int]:
    for number in range(n):
        yield number


async def blocks(make: Any, size: int, first: int = 0, snapshot: Snapshot | None = None) -> list[ItemBlock]:
    """All blocks of epoch 3."""
    async with aclosing(StreamReader(Stream(make), 3, first, snapshot).blocks(size)) as reader:
        return [block async for block in reader]


# --- arguments --------------------------------------------------------------------------------------------------------


class OnlyOnce:
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise StopIteration


async def no_generator() -> list[int]:
    return []


@pytest.mark.parametrize(
    ("make_iterable", "message"),
    [
        (count(), r"is an iterator, a generator, which gives one epoch only: pass the function"),
        (async_count(), r"is an iterator, a async_generator"),
        (OnlyOnce(), r"is an iterator, a OnlyOnce"),
        (3, "must be an iterable, an async iterable, or a function that returns one, got 3"),
        ("train.tar", "must give samples, got 'train.tar'"),
        (os.path.join, r"called as join\(\) or join\(epoch=\.\.\.\).*functools\.partial"),
        (no_generator, r"make_iterable=no_generator is an `async def` without `yield`"),
    ],
)
def test_other_objects(make_iterable: Any, message: str) -> None:
    """The message names the object and what to pass instead."""
    with pytest.raises(TypeError, match=message):
        Stream(make_iterable)


def test_arguments() -> None:
    """The others are checked, too; the decoder is one of Feeder."""
    with pytest.raises(ValueError, match="shuffle_buffer must be at least 0, got -1"):
        Stream(count, shuffle_buffer=-1)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        Stream(count, length=-1)
    with pytest.raises(TypeError, match="sharded must be True or False, got 1"):
        Stream(count, sharded=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no argument 'decode'.*pass decode= to Feeder"):
        Stream(count, decode=bytes)  # type: ignore[call-arg]


def test_names_and_lengths() -> None:
    """A stream is named after its function or type, and has the length of its iterable."""
    assert repr(Stream(functools.partial(count, 3), shuffle_buffer=5)) == "Stream(count, shuffle_buffer=5)"
    assert repr(Stream(range(3), sharded=True)) == "Stream(range, shuffle_buffer=0, sharded=True)"
    assert Stream(count).key(7) == "count[7]"
    assert len(Stream(range(3))) == 3
    assert len(Stream(range(3), length=2)) == 2
    with pytest.raises(TypeError, match=r"Stream\(count, shuffle_buffer=0\) has no len\(\)"):
        len(Stream(count))


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [count, async_count, range(10)])
async def test_blocks(make: Any) -> None:
    """The first has one item more than the others; the last is the end."""
    found = await blocks(make, 4)
    assert [block.items for block in found] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert [block.ended for block in found] == [False, False, True]
    assert [block.error for block in found] == [None] * 3


@pytest.mark.parametrize("make", [count, async_count])
async def test_skipped_items(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are read and dropped; an iterable that ends before is an error with both numbers."""
    found = await blocks(make, 4, first=7)
    assert [block.items for block in found] == [[7, 8, 9]]
    [line] = [record for record in caplog.records if record.name == "aiofeed.sources"]
    assert line.levelno == logging.WARNING
    assert "resumes at item 7: 7 items are skipped, because it has no state_dict" in line.getMessage()
    [block] = await blocks(make, 4, first=11)
    assert "at item 11 of epoch 3" in str(block.error)
    assert "has ended after 10 items" in str(block.error)


class Tracked:
    """An iterable whose iterator has the state."""

    def __init__(self) -> None:
        self.iterators: list[TrackedIterator] = []

    def __iter__(self) -> TrackedIterator:
        self.iterators.append(TrackedIterator())
        return self.iterators[-1]


class TrackedIterator:
    def __init__(self) -> None:
        self.at = self.given = 0

    def __iter__(self) -> TrackedIterator:
        return self

    def __next__(self) -> int:
        if self.at == 10:
            raise StopIteration
        self.at += 1
        self.given += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


async def test_states() -> None:
    """They are captured at multiples of the block, before the last item; the end has none."""
    found = await blocks(Tracked(), 4)
    assert [block.snapshot for block in found] == [
        Snapshot(3, 4, '{"at": 4}'),
        Snapshot(3, 8, '{"at": 8}'),
        None,
    ]
    tracked = Tracked()
    resumed = await blocks(tracked, 4, first=6, snapshot=found[0].snapshot)
    assert [block.items for block in resumed] == [[6, 7, 8, 9]]
    assert tracked.iterators[0].given == 6


async def test_a_state_for_an_iterable_that_has_none_any_more() -> None:
    """All items before the position are skipped."""
    [block] = await blocks(count, 4, first=8, snapshot=Snapshot(3, 8, '{"at": 8}'))
    assert block.items == [8, 9]


@pytest.mark.parametrize(
    ("state", "reason"), [({1: 2}, "JSON changes it"), ((1,), "JSON changes it"), (object(), "not JSON")]
)
def test_states_that_are_not_plain(state: Any, reason: str) -> None:
    """A state that JSON would change or refuses is not saved."""
    snapshot = snapshot_of(state, 0, 1)
    assert snapshot.state is None
    assert reason in snapshot.reason


# --- threads and errors -----------------------------------------------------------------------------------------------


async def test_one_thread_opens_reads_and_closes() -> None:
    """It is not the thread of the loop."""
    threads: list[int] = []

    def items() -> Iterator[int]:
        threads.append(threading.get_ident())
        try:
            for number in range(100):
                threads.append(threading.get_ident())
                yield number
        finally:
            threads.append(threading.get_ident())

    async with aclosing(StreamReader(Stream(items), 0, 0, None).blocks(3)) as reader:
        async for _ in reader:
            break
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_an_async_iterable_runs_on_the_loop() -> None:
    """It is closed there, too, while it waits."""
    threads: list[int] = []

    async def items() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
            await asyncio.Event().wait()
        finally:
            threads.append(threading.get_ident())

    async with aclosing(StreamReader(Stream(items), 0, 0, None).blocks(1)) as reader:
        async for block in reader:
            assert block.items == [0, 1]
            break
    assert threads == [threading.get_ident()]


async def test_an_async_iterable_that_never_waits() -> None:
    """Other tasks of the loop run while it is read."""
    turns: list[int] = []
    seen: list[int] = []

    async def items() -> AsyncIterator[int]:
        for number in range(321):
            seen.append(len(turns))
            yield number

    async def other() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert [len(block.items) for block in await blocks(items, 320)] == [321, 0]
    task.cancel()
    assert seen[-1] - seen[0] >= 9


async def test_reading_is_one_block_ahead() -> None:
    """And no more."""
    given: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            given.append(number)
            yield number

    reader = StreamReader(Stream(items), 0, 0, None)
    async with aclosing(reader.blocks(5)) as found:
        async for _ in found:
            assert reader._pending is not None
            await asyncio.wait([reader._pending])
            assert len(given) == 11
            break


class ExitsError(BaseException):
    """Not an ``Exception``."""


@pytest.mark.parametrize("error", [OSError("lost"), ExitsError("out"), FeedError("own")])
async def test_errors(error: BaseException) -> None:
    """The items before an error are in its block; one of aiofeed is unchanged."""

    def fails() -> Iterator[int]:
        yield from range(6)
        raise error

    found = await blocks(fails, 4)
    assert [block.items for block in found] == [[0, 1, 2, 3, 4], [5]]
    assert not found[1].ended
    if isinstance(error, FeedError):
        assert found[1].error is error
        return
    raised = found[1].error
    assert isinstance(raised, ReadError)
    assert (raised.key, raised.index) == ("fails[6]", 6)
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert frames == ["fails"]


async def test_an_async_iterable_that_cancels_its_task() -> None:
    """The stray cancellation is undone; one that it raises is its error."""

    async def cancels(last: BaseException | None = None) -> AsyncIterator[int]:
        for number in range(4):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if last is not None:
                raise last
            yield number

    with ended_by(lambda: False):
        assert [block.items for block in await blocks(cancels, 9)] == [[0, 1, 2, 3]]
        for last in (asyncio.CancelledError(), ValueError("broken")):
            [block] = await blocks(functools.partial(cancels, last), 9)
            assert block.items == []
            assert type(last).__name__ in str(block.error)


@pytest.mark.parametrize("make", [count, async_count])
async def test_an_error_of_close_is_logged(make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """It replaces no result."""

    def items() -> Iterator[int]:
        try:
            yield from count()
        finally:
            raise ValueError("cannot close")

    async def async_items() -> AsyncIterator[int]:
        try:
            async for item in async_count():
                yield item
        finally:
            raise ValueError("cannot close")

    reader = StreamReader(Stream(items if make is count else async_items), 0, 0, None)
    async with aclosing(reader.blocks(2)) as found:
        async for block in found:
            assert block.items == [0, 1, 2]
            break
    assert any("close() of Stream" in record.getMessage() for record in caplog.records)
