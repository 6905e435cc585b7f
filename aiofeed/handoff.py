"""The queue between the engine's thread and the consumer: a thread, or somebody else's event loop.

It does not bound itself: the engine admits no more batches than may wait here. A thread waits in
``SimpleQueue.get``, which a signal can break; a coroutine waits for a future of its own loop.
"""

from __future__ import annotations

import asyncio
import threading
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """Items in the order in which they were put, from any thread to one consumer."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def __len__(self) -> int:
        return self._items.qsize()

    def put(self, item: T) -> None:
        """Add an item and wake the consumer. Never blocks."""
        self._items.put(item)
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                pass  # the consumer's loop has been closed: nobody is left to wake

    def get_nowait(self) -> T:
        """The next item; ``queue.Empty`` where there is none."""
        return self._items.get_nowait()

    def get(self, timeout_s: float | None = None) -> T:
        """The next item; blocks the calling thread until there is one. A signal handler can raise out of it.

        Raises:
            queue.Empty: there was none within ``timeout_s``.
        """
        return self._items.get(timeout=timeout_s)

    async def get_async(self) -> T:
        """The next item; suspends the calling task. Cancelling it loses nothing.

        Raises:
            RuntimeError: another task waits.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                pass
            future = loop.create_future()
            with self._lock:
                if self._waiter is not None and not self._waiter[0].is_closed() and not self._waiter[1].done():
                    raise RuntimeError("another task waits at this iterator already: one at a time can")
                self._waiter = (loop, future)
            try:
                # An item that came before the waiter was seen woke nobody.
                if self._items.empty():
                    await future
            finally:
                with self._lock:
                    if self._waiter is not None and self._waiter[1] is future:
                        self._waiter = None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
