"""The queue between the engine's thread and the consumer, which is a thread or a task of another event loop.

The queue itself is unbounded: the engine admits no more batches than may wait here. A thread waits in
``SimpleQueue.get``, which a signal interrupts; a task waits for a future of its own loop.

``peek`` returns an item without removing it. The interpreter runs signal handlers after calls and at jumps, so an item
that a call removes from a queue can be lost before it is assigned. ``del queue.items[0]`` is not a call and loses
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from aiofeed.kernel.core.errors import FeedError, SampleError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.runtime.threads import POLL_INTERVAL_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiofeed.runtime")

# After this time in `next`, a line in the log says what it waits for.
LONG_WAIT_S = 60.0


def log_long_wait(waiting_for: str, *pids: int) -> None:
    """Log what ``next`` has been waiting for, and how to get the stacks of this process and of others."""
    dumps = " and ".join(f"`py-spy dump --pid {pid}`" for pid in (os.getpid(), *pids))
    log.warning(
        "next() has waited %.0f s %s. For the stacks of all threads, run %s, or start the script with "
        "faulthandler.dump_traceback_later(120)",
        LONG_WAIT_S,
        waiting_for,
        dumps,
    )


class BatchQueue(Generic[T]):
    """A first-in first-out queue from any thread to one consumer.

    Attributes:
        items: The queued items. The consumer deletes the first one when it is done with it.
        woken_at: When an item last arrived for which a task was waiting, in ``time.perf_counter`` seconds.
        runs: Whether items may have ``following`` batches: nothing is done with a single batch when it is returned.
    """

    runs: bool = False

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        # The waiting thread sets this flag and then checks `items`; put() appends an item and then checks the flag.
        self._asleep = False
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.woken_at: float = 0.0

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> None:
        """Add an item and wake the consumer. Never blocks."""
        self.items.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake the consumer if it waits, to look at the queue again. Never blocks."""
        if self._asleep:
            self._arrivals.put(None)
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.woken_at = time.perf_counter()
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                pass  # the consumer's loop is closed, so no task waits

    def get_nowait(self) -> T:
        """Remove and return the next item; raise ``queue.Empty`` if there is none."""
        try:
            return self.items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout_s: float | None = None) -> T:
        """Remove and return the next item; block the calling thread until there is one.

        A signal handler can raise out of this call.

        Raises:
            queue.Empty: No item arrived within ``timeout_s``.
        """
        item = self.peek(timeout_s)
        del self.items[0]
        return item

    def peek(self, timeout_s: float | None = None) -> T:
        """Return the next item without removing it; otherwise like ``get``."""
        deadline = None if timeout_s is None or self.items else time.monotonic() + timeout_s
        while not self.items:
            left = POLL_INTERVAL_S if deadline is None else min(POLL_INTERVAL_S, deadline - time.monotonic())
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

    async def peek_async(self, on_long_wait: Callable[[], object] | None = None) -> T:
        """Return the next item without removing it; suspend the calling task until there is one.

        Cancelling the task loses no item. ``on_long_wait`` is called once after ``LONG_WAIT_S``.

        Raises:
            RuntimeError: Another task is waiting.
        """
        loop = asyncio.get_running_loop()
        while not self.items:
            future = loop.create_future()
            with self._lock:
                if self._waiter is not None and not self._waiter[0].is_closed() and not self._waiter[1].done():
                    raise RuntimeError("another task is already waiting for this iterator; only one can")
                self._waiter = (loop, future)
            # A step that blocks the loop may end after this time, with an item that has arrived meanwhile.
            timer = on_long_wait and loop.call_later(LONG_WAIT_S, lambda: self.items or on_long_wait())
            try:
                # An item put before the waiter was set has woken no task.
                if not self.items:
                    await future
            finally:
                if timer is not None:
                    timer.cancel()
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
        number: Its position among the batches of this rank in the epoch.
        samples: Number of samples, 0 if unknown.
        batch: A pytree of ``HostTensor``, tensors and other leaves; after the copy thread, the copier's result.
        lease: The memory to give back after the copy to the device has completed.
        reserved: Bytes to release from the memory budget after the batch has left the queue.
        on_taken: Called with the item when the batch is taken from the queue, in the thread that takes it; twice if a
            take is interrupted and repeated.
        taken_at: When the batch was taken, in ``time.perf_counter`` seconds. The loop may learn of it later.
        taken: Whether its producer has counted it as taken.
        counters: Statistics of its epoch.
        failures: The samples that were skipped or replaced.
        returned_samples: With ``in_order="samples"`` the samples that are returned with this batch and those before it,
            see ``sample_order/sample_schedule.py``.
        transform_begun, transformed: Whether the consumer's transform was called for ``batch``, and has replaced it.
        device_backlog: Start and end, in ``time.perf_counter`` seconds, of the time in which the copy of this batch
            waited because too many earlier batches were queued on the device, or the consumer's event loop ran other
            tasks. ``None``: it did not wait.
        plan: Its plan, if an engine made it.
        indices: The indices of its samples in the source, if known.
        error: The error to raise in its place: in a worker any, otherwise that of a batch of which nothing is left,
            unless it may be left out.
        following: Batches that are returned after it without an item of their own, the last one first. Each has as
            many samples as this one and the next number.
        followers: Their number at first. The consumer deletes them from the list.
    """

    number: int
    samples: int
    batch: Any
    lease: BufferLease | None = None
    reserved: int = 0
    on_taken: Callable[[ReadyBatch], object] | None = None
    counters: EpochStats = field(default_factory=EpochStats)
    failures: tuple[SampleError, ...] = ()
    returned_samples: tuple[int, int] | None = None
    transform_begun: bool = False
    transformed: bool = False
    taken: bool = False
    taken_at: float = 0.0
    device_backlog: tuple[float, float] | None = None
    plan: BatchPlan | None = None
    indices: Sequence[int] | NDArray[Any] | None = None
    error: FeedError | None = None
    following: list[Any] = field(default_factory=list)
    followers: int = 0


@dataclass(frozen=True, eq=False)
class FeedFailure:
    """An error to raise in the consumer. It is the last item of a queue."""

    error: BaseException
    number: int | None = None
    failures: tuple[SampleError, ...] = ()


@dataclass(frozen=True, eq=False)
class EndOfEpoch:
    """The epoch has no more batches, or this queue has none from ``next_batch`` on."""

    next_batch: int | None = None


@dataclass(frozen=True, eq=False)
class Stopped:
    """The iterator was closed while its consumer was waiting."""


QueueItem: TypeAlias = ReadyBatch | FeedFailure | EndOfEpoch | Stopped


def drop_batches(queue: BatchQueue[QueueItem]) -> None:
    """Remove all finished batches from a queue; other items stay, also if Ctrl-C interrupts this call."""
    for item in tuple(queue.items):
        if isinstance(item, ReadyBatch):
            with suppress(ValueError):  # the consumer has removed it
                queue.items.remove(item)
