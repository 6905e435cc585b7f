"""`BatchQueue`: from the engine's thread to a consumer that is a thread or a task."""

from __future__ import annotations

import asyncio
import signal
from typing import TypeVar

import pytest

from aiofeed.kernel.runtime.queue import BatchQueue

T = TypeVar("T")


async def take(queue: BatchQueue[T]) -> T:
    """The next item, taken the way `FeedIterator.__anext__` takes it."""
    item = await queue.peek_async()
    del queue.items[0]
    return item


async def test_cancelling_a_waiting_coroutine_loses_nothing() -> None:
    """An item that arrives after a cancelled wait stays for the next one."""
    queue: BatchQueue[str] = BatchQueue()
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    queue.put("kept")
    assert await take(queue) == "kept"


async def test_an_item_put_while_the_wait_is_cancelled_is_kept() -> None:
    """After a put and a cancellation in the same iteration of the loop, the item stays in the queue."""
    queue: BatchQueue[str] = BatchQueue()
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(0)
    queue.put("kept")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue.get_nowait() == "kept"


def test_put_survives_a_consumer_whose_loop_is_closed() -> None:
    """put() does not fail when the loop of the waiting task is closed."""
    queue: BatchQueue[int] = BatchQueue()

    async def abandoned() -> None:
        task = asyncio.ensure_future(take(queue))
        await asyncio.sleep(0)
        queue._waiter_kept = queue._waiter  # type: ignore[attr-defined]
        task.cancel()

    asyncio.run(abandoned())
    queue._waiter = queue._waiter_kept  # type: ignore[attr-defined]
    queue.put(1)
    assert queue.get() == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_a_signal_interrupts_a_blocked_get() -> None:
    """A signal handler that raises interrupts get() in the main thread."""

    class Rung(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rung):
            BatchQueue[int]().get()
    finally:
        signal.signal(signal.SIGALRM, before)


async def test_a_second_task_that_waits_is_refused() -> None:
    """One task at a time may wait; the refusal does not disturb it."""
    queue: BatchQueue[str] = BatchQueue()
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task is already waiting"):
        await take(queue)
    queue.put("item")
    assert await waiting == "item"
    queue.put("next")
    assert await take(queue) == "next"
