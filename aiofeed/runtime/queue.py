"""The queue between the engine's thread and the consumer: a thread, or somebody else's event loop.

It does not bound itself: the engine admits no more batches than may wait here. A thread waits in
``SimpleQueue.get``, which a signal can break; a coroutine waits for a future of its own loop.

An item that is looked at stays. The interpreter runs signal handlers after calls and at jumps, so what a call took
from a queue can be lost on its way to a variable; what ``del handoff.items[0]`` takes cannot, because that is no call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from aiofeed.core.errors import SampleError
from aiofeed.core.statistics import EpochStats
from aiofeed.runtime.buffers import BufferLease
from aiofeed.runtime.threads import LOOK_S

T = TypeVar("T")


class BatchQueue(Generic[T]):
    """Items in the order in which they were put, from any thread to one consumer.

    Attributes:
        items: those that wait; the consumer deletes the first when it has been dealt with.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        # A thread that waits says so first, and then looks once more: whoever puts does it the other way round.
        self._asleep = False
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> None:
        """Add an item and wake the consumer. Never blocks."""
        self.items.append(item)
        if self._asleep:
            self._arrivals.put(None)
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
        try:
            return self.items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout_s: float | None = None) -> T:
        """The next item; blocks the calling thread until there is one. A signal handler can raise out of it.

        Raises:
            queue.Empty: there was none within ``timeout_s``.
        """
        item = self.peek(timeout_s)
        del self.items[0]
        return item

    def peek(self, timeout_s: float | None = None) -> T:
        """The next item, which stays; blocks the calling thread until there is one. See ``get``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.items:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise Empty
            self._wait(left)
        return self.items[0]

    def _wait(self, timeout_s: float) -> None:
        self._asleep = True
        try:
            if not self.items:
                self._arrivals.get(timeout=timeout_s)
        except Empty:
            pass
        finally:
            self._asleep = False

    async def get_async(self) -> T:
        """The next item; suspends the calling task. Cancelling it loses nothing. See ``peek_async``."""
        item = await self.peek_async()
        del self.items[0]
        return item

    async def peek_async(self) -> T:
        """The next item, which stays; suspends the calling task. Cancelling it loses nothing.

        Raises:
            RuntimeError: another task waits.
        """
        loop = asyncio.get_running_loop()
        while not self.items:
            future = loop.create_future()
            with self._lock:
                if self._waiter is not None and not self._waiter[0].is_closed() and not self._waiter[1].done():
                    raise RuntimeError("another task waits at this iterator already: one at a time can")
                self._waiter = (loop, future)
            try:
                # An item that came before the waiter was seen woke nobody.
                if not self.items:
                    await future
            finally:
                with self._lock:
                    if self._waiter is not None and self._waiter[1] is future:
                        self._waiter = None
        return self.items[0]


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(eq=False)
class ReadyBatch:
    """A finished batch.

    Args:
        number: its position among this rank's batches of the epoch.
        samples: how many samples it has, 0 where nobody counted.
        batch: a tree of ``ArrayLeaf``, tensors and whatever else; behind the copier, what the copier made of it.
        lease: the memory to give back once it has been copied from.
        reserved: bytes to release once it has left the queue.
        release: called with the item then, on the engine's loop.
        left_at: when it left the queue (``time.perf_counter`` seconds); the loop may hear of it later.
        note: called with the item then, in the thread that takes it; whether that is word enough, and the loop need not
            be woken for it.
        counters: of its epoch.
        failures: of samples that were skipped or replaced.
        taken: whether the producer was told that the consumer takes it.
        behind: from when to when its copy waited for the device, which had too many batches before it
            (``time.perf_counter`` seconds); ``None``: it did not.
    """

    number: int
    samples: int
    batch: Any
    lease: BufferLease | None = None
    reserved: int = 0
    release: Callable[[ReadyBatch], None] | None = None
    counters: EpochStats = field(default_factory=EpochStats)
    failures: tuple[SampleError, ...] = ()
    taken: bool = False
    left_at: float = 0.0
    note: Callable[[ReadyBatch], bool] | None = None
    behind: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class FeedFailure:
    """An error to raise at the consumer's line; nothing comes after it."""

    error: BaseException
    number: int | None = None
    failures: tuple[SampleError, ...] = ()


@dataclass(frozen=True, eq=False)
class EndOfEpoch:
    """There are no more batches of this epoch."""


@dataclass(frozen=True, eq=False)
class Stopped:
    """The iterator was closed while somebody waited at it."""


QueueItem: TypeAlias = ReadyBatch | FeedFailure | EndOfEpoch | Stopped


def release(item: ReadyBatch) -> None:
    """Say that a batch has left the queue; on the engine's loop, where no signal handler runs."""
    # A take that was interrupted and is repeated says it twice.
    said, item.release = item.release, None
    if said is not None:
        said(item)


def drop_batches(queue: BatchQueue[QueueItem]) -> None:
    """Let go of finished batches that nobody is going to take; what else is there stays."""
    others = []
    try:
        while True:
            item = queue.get_nowait()
            if not isinstance(item, ReadyBatch):
                others.append(item)
    except Empty:
        pass
    for other in others:
        queue.put(other)
