"""``prefetch``: look-ahead and device copies for batches of any iterable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from aiofeed import FeedError, prefetch
from aiofeed.errors import DeviceCopyError, IteratorClosedError
from aiofeed.kernel.runtime.cancellation import ended_by
from aiofeed.kernel.runtime.queue import BatchQueue, FeedFailure, QueueItem, ReadyBatch
from aiofeed.loader.prefetch import AsyncIterableProducer
from tests.support.simulated_device import SimulatedDevice


def loader(n: int = 10, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(n), torch.arange(n) * 0.5), batch_size=4, **options)


def test_batches_of_a_dataloader() -> None:
    """The batches and len() are those of the DataLoader, in any number of iterations."""
    batches = prefetch(loader())
    assert len(batches) == 3
    assert repr(batches) == "Prefetch(DataLoader, device=None)"
    for _ in range(3):
        for got, wanted in zip(batches, loader(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


async def test_async_for_over_a_dataloader() -> None:
    """`async for` over an ordinary iterable does not block the event loop."""
    assert [x.tolist() async for x, _ in prefetch(loader())] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_async_iterable_runs_on_a_loop_of_its_own() -> None:
    """An async iterable never runs in the caller's thread."""
    threads: set[threading.Thread] = set()

    async def batches() -> AsyncIterator[int]:
        for number in range(5):
            threads.add(threading.current_thread())
            await asyncio.sleep(0)
            yield number

    assert list(prefetch(batches())) == [0, 1, 2, 3, 4]
    assert threading.current_thread() not in threads


def test_look_ahead_is_bounded() -> None:
    """At most ``prefetch_batches`` batches are made ahead."""
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
def test_an_error_is_raised_unchanged_after_earlier_batches(asynchronous: bool) -> None:
    """The batches before the error come first; the exception is that of the iterable."""

    def batches() -> Iterator[int]:
        yield from range(3)
        raise ZeroDivisionError("oops")

    async def async_batches() -> AsyncIterator[int]:
        for number in batches():
            yield number

    seen = []
    with pytest.raises(ZeroDivisionError, match="oops"):
        for number in prefetch(async_batches() if asynchronous else batches()):
            seen.append(number)  # noqa: PERF402 - keep the batches before the error
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("device", [None, SimulatedDevice()])
@pytest.mark.parametrize("leave", ["break", "close", "drop"])
def test_leaving_early_closes_the_generator_in_its_thread(leave: str, device: Any) -> None:
    """The finally block of a generator runs in the thread that ran the generator, and the threads end."""
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
    """The finally block of an async generator runs on its own event loop."""
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
    """Nested tensors are copied to the device and transformed; other leaves are unchanged."""
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
    """An error of transform is raised at the `for` line as DeviceCopyError."""

    def broken(batch: Any) -> Any:
        raise ZeroDivisionError("oops")

    with pytest.raises(DeviceCopyError, match="oops"):
        list(prefetch(loader(), device=SimulatedDevice(), transform=broken))


def test_an_object_that_cannot_be_iterated_is_refused() -> None:
    """The message names the wrong argument."""
    with pytest.raises(TypeError, match="got 3"):
        prefetch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_batches"):
        prefetch([], prefetch_batches=0)
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(prefetch(iter([])))


def test_an_error_of_aiter_is_raised() -> None:
    """An error of ``__aiter__`` is raised at the `for` line."""

    class Broken:
        def __aiter__(self) -> AsyncIterator[int]:
            raise ConnectionError("no such server")

    with pytest.raises(ConnectionError, match="no such server"):
        next(iter(prefetch(Broken())))


@pytest.mark.parametrize("error", [asyncio.CancelledError("gone"), SystemExit(3)])
def test_a_base_exception_of_an_async_iterable_becomes_an_error(error: BaseException) -> None:
    """SystemExit or CancelledError of the iterable is raised in the consumer as the cause of a FeedError."""

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
    """An iterable may cancel its own task, as some time limits do, with or without suppressing it; no batch is lost."""

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


def test_dropping_the_iterator_of_a_waiting_async_iterable_ends_the_copy_thread() -> None:
    """The copy thread ends though it waits for a batch that never comes."""

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
async def test_an_error_of_a_stopped_iterable_is_dropped(ending: bool) -> None:
    """An error is put into the queue unless the iterable was stopped before."""

    async def failing() -> AsyncIterator[int]:
        yield 0
        raise KeyError(1)

    queue: BatchQueue[QueueItem] = BatchQueue()
    pull = AsyncIterableProducer(failing(), queue, room=2, memory=None)
    with ended_by(lambda: ending and bool(queue.items)):
        await pull.run()
    assert [type(item) for item in queue.items] == ([ReadyBatch] if ending else [ReadyBatch, FeedFailure])
