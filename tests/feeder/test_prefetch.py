"""prefetch: the bridge alone, for batches that somebody else makes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from aiofeed import DeviceCopyError, FeedError, IteratorClosedError, prefetch
from aiofeed.feeder.prefetch import LoopPull
from aiofeed.runtime.cancellation import EndedBy
from aiofeed.runtime.queue import BatchQueue, FeedFailure, QueueItem, ReadyBatch
from aiofeed.testing import SimulatedDevice


def loader(n: int = 10, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(n), torch.arange(n) * 0.5), batch_size=4, **options)


def test_a_dataloaders_batches_pass_through() -> None:
    """Same batches, same order, any number of passes, len()."""
    batches = prefetch(loader())
    assert len(batches) == 3
    assert repr(batches) == "Prefetch(DataLoader, device=None)"
    for _ in range(3):
        for got, wanted in zip(batches, loader(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


async def test_async_for_over_a_dataloader() -> None:
    """An ordinary iterable is awaited without blocking the loop."""
    assert [x.tolist() async for x, _ in prefetch(loader())] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_async_iterable_runs_on_a_loop_of_its_own() -> None:
    """Its coroutine is never on the caller's thread."""
    threads: set[threading.Thread] = set()

    async def batches() -> AsyncIterator[int]:
        for number in range(5):
            threads.add(threading.current_thread())
            await asyncio.sleep(0)
            yield number

    assert list(prefetch(batches())) == [0, 1, 2, 3, 4]
    assert threading.current_thread() not in threads


def test_look_ahead_is_bounded() -> None:
    """So many batches wait, one more is not begun before there is room."""
    made: list[int] = []
    made_two = threading.Event()

    def batches() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                made_two.set()
            yield number

    iterator = iter(prefetch(batches(), prefetch_batches=2))
    assert next(iterator) == 0
    assert made_two.wait(10)
    assert len(made) <= 3
    iterator.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_comes_in_its_turn_as_it_is(asynchronous: bool) -> None:
    """Batches before it come first; the exception is the iterable's own."""

    def batches() -> Iterator[int]:
        yield from range(3)
        raise ZeroDivisionError("oops")

    async def async_batches() -> AsyncIterator[int]:
        for number in batches():
            yield number

    seen = []
    with pytest.raises(ZeroDivisionError, match="oops"):
        for number in prefetch(async_batches() if asynchronous else batches()):
            seen.append(number)  # noqa: PERF402 - what came before the error is wanted
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("device", [None, SimulatedDevice()])
@pytest.mark.parametrize("leave", ["break", "close", "drop"])
def test_leaving_early_closes_the_generator_in_its_thread(leave: str, device: Any) -> None:
    """A generator's finally runs, in the thread that ran the generator, and the threads end."""
    closed_in: list[threading.Thread] = []
    closed = threading.Event()

    def batches() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.zeros(3)
        finally:
            closed_in.append(threading.current_thread())
            closed.set()

    if leave == "break":
        for _ in prefetch(batches(), device=device):
            break
    else:
        iterator = iter(prefetch(batches(), device=device))
        next(iterator)
        if leave == "close":
            iterator.close()
            with pytest.raises(IteratorClosedError):
                next(iterator)
        else:
            del iterator
    assert closed.wait(5)
    assert closed_in[0].name == "aiofeed-pull"


async def test_leaving_an_async_iterable_early_closes_it() -> None:
    """An async generator's finally runs on its own loop."""
    closed = threading.Event()

    async def batches() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    iterator = aiter(prefetch(batches()))
    await anext(iterator)
    await iterator.aclose()
    assert closed.is_set()


def test_batches_reach_the_device() -> None:
    """Nested tensors are copied through staging, transformed, and right; other things pass."""
    device = SimulatedDevice()

    def batches() -> Iterator[Any]:
        for number in range(50):
            yield {"x": torch.full((64, 8), number), "n": number, "t": (torch.tensor([number]), "text")}

    for number, batch in enumerate(prefetch(batches(), device=device, transform=lambda b: {**b, "y": b["x"] * 2})):
        assert batch["n"] == number
        assert batch["t"][1] == "text"
        assert (batch["x"] == number).all()
        assert (batch["y"] == 2 * number).all()


def test_a_failing_transform_is_a_device_copy_error() -> None:
    """It is raised at the `for` line, chained."""

    def broken(batch: Any) -> Any:
        raise ZeroDivisionError("oops")

    with pytest.raises(DeviceCopyError, match="oops"):
        list(prefetch(loader(), device=SimulatedDevice(), transform=broken))


def test_what_cannot_be_iterated_is_refused() -> None:
    """The message says what was given."""
    with pytest.raises(TypeError, match="got 3"):
        prefetch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_batches"):
        prefetch([], prefetch_batches=0)
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(prefetch(iter([])))


def test_an_async_iterable_that_cannot_begin_says_so() -> None:
    """What its ``__aiter__`` raises comes at the `for` line."""

    class Broken:
        def __aiter__(self) -> AsyncIterator[int]:
            raise ConnectionError("no such server")

    with pytest.raises(ConnectionError, match="no such server"):
        next(iter(prefetch(Broken())))


@pytest.mark.parametrize("error", [asyncio.CancelledError("gone"), SystemExit(3)])
def test_what_is_no_exception_ends_an_async_iterable_with_one(error: BaseException) -> None:
    """What would end the loop, or pass for a cancelled task, reaches the consumer instead of leaving it waiting."""

    async def batches() -> AsyncIterator[int]:
        yield 1
        raise error

    iterator = iter(prefetch(batches()))
    assert next(iterator) == 1
    with pytest.raises(FeedError) as caught:
        next(iterator)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("swallowed", [True, False])
def test_an_async_iterable_that_leaves_its_task_cancelled_loses_no_batch(swallowed: bool) -> None:
    """As time limits do that never take their cancellation back, whether or not it was met."""

    async def batches() -> AsyncIterator[torch.Tensor]:
        for number in range(4):
            if number == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                if swallowed:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0)
            yield torch.tensor(number)

    assert [int(batch) for batch in prefetch(batches())] == [0, 1, 2, 3]


def test_dropping_an_async_iterable_at_its_wait_ends_the_copy_thread() -> None:
    """The copy thread waits for a batch that never comes, and is told."""

    async def batches() -> AsyncIterator[torch.Tensor]:
        yield torch.zeros(3)
        await asyncio.Event().wait()

    iterator = iter(prefetch(batches(), device=SimulatedDevice()))
    next(iterator)
    threads = [thread for thread in threading.enumerate() if thread.name == "aiofeed-copy"]
    assert threads
    del iterator
    for thread in threads:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("ending", [False, True])
async def test_an_iterable_that_fails_as_it_is_stopped_fails_for_nobody(ending: bool) -> None:
    """Its error is the consumer's, and once the end was asked for it is not left in a task that nobody asks."""

    async def failing() -> AsyncIterator[int]:
        yield 0
        raise KeyError(1)

    queue: BatchQueue[QueueItem] = BatchQueue()
    pull = LoopPull(failing(), queue, room=2, memory=None)
    with EndedBy(lambda: ending and bool(queue.items)):
        await pull.run()
    assert [type(item) for item in queue.items] == ([ReadyBatch] if ending else [ReadyBatch, FeedFailure])
