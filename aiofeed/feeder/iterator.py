"""The consumer's end: one epoch, as an iterator and as an asynchronous iterator."""

from __future__ import annotations

import logging
import os
import time
from queue import Empty
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from aiofeed.core.errors import IteratorClosedError
from aiofeed.core.statistics import EpochStats
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped

log = logging.getLogger("aiofeed.feeder")

# The end of an epoch follows its last batch within the time that a thread takes to be scheduled.
END_S = 1.0

BatchT_co = TypeVar("BatchT_co", covariant=True)


class Delivery(Protocol):
    """What stands behind an iterator: finished batches, and ways to answer."""

    queue: BatchQueue[QueueItem]

    def take(self, item: ReadyBatch) -> Any:
        """The batch as the user gets it, and word to the producer that there is room; in the consumer's thread.

        The word comes last: it wakes a thread that then wants the GIL.
        """
        ...

    def stop(self) -> None:
        """Nobody wants more; never blocks."""
        ...

    async def stopped(self) -> None:
        """Wait, without blocking the caller's loop, until the threads are gone."""
        ...


class Observer(Protocol):
    """Who keeps account of what an iterator has handed out."""

    def handing_out(self, item: ReadyBatch) -> None:
        """The user is about to get this batch. An interrupted ``next`` is repeated, so that it may be said twice."""
        ...

    def handed_out(self, item: ReadyBatch) -> None:
        """The user gets this batch. It takes note and calls no C function: nothing can interrupt it half-way."""
        ...

    def failed(self, item: FeedFailure) -> None:
        """The user is about to get this error."""
        ...

    def ended(self) -> None:
        """The end was reached."""
        ...


class FeedIterator(Generic[BatchT_co]):
    """One pass over the batches. Either ``next`` or ``anext`` may be used, from one thread at a time.

    It ends with ``StopIteration`` (``StopAsyncIteration``); after an error it is finished. Once it was closed, by
    ``close``, by a newer iterator or in a forked child, it raises ``IteratorClosedError``.
    """

    def __init__(
        self,
        delivery: Delivery,
        counters: EpochStats,
        *,
        observer: Observer,
    ) -> None:
        self._delivery = delivery
        self._counters = counters
        self._queue = delivery.queue
        self._observer = observer
        self._pid = os.getpid()
        self._started = counters.asked_at = time.perf_counter()
        self._finished = False
        self._closed: str | None = None

    def __repr__(self) -> str:
        stands = "ended" if self._finished else "closed" if self._closed is not None else "open"
        return f"FeedIterator({stands}, batches handed out: {self._counters.batches})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator cannot be pickled or copied, since its threads cannot: take the feeder, which goes on where "
            "this iterator stands, or its state_dict()"
        )

    def __iter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __aiter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __next__(self) -> BatchT_co:
        """The next batch; blocks until it is there. Ctrl-C breaks the wait, and loses no batch."""
        if self._finished or self._closed is not None or self._pid != os.getpid():
            self._refuse()
            raise StopIteration
        asked = time.perf_counter()
        item = self._queue.peek()
        if type(item) is not ReadyBatch:
            try:
                self._settle(item, asked)
            finally:
                del item  # an error's traceback refers to this frame
            raise StopIteration
        batch: BatchT_co = self._take(item, asked)
        # From here to the caller's line the interpreter does not look for signals (see handoff.py).
        self._observer.handed_out(item)
        item.batch = None  # word of it may still be on its way
        del self._queue.items[0]
        return batch

    async def __anext__(self) -> BatchT_co:
        """The next batch; suspends the calling task until it is there. Cancelling loses no batch."""
        if self._finished or self._closed is not None or self._pid != os.getpid():
            self._refuse()
            raise StopAsyncIteration
        asked = time.perf_counter()
        item = await self._queue.peek_async()
        if type(item) is not ReadyBatch:
            try:
                self._settle(item, asked)
            finally:
                del item  # an error's traceback refers to this frame
            raise StopAsyncIteration
        batch: BatchT_co = self._take(item, asked)
        self._observer.handed_out(item)
        item.batch = None  # word of it may still be on its way
        del self._queue.items[0]
        return batch

    def _refuse(self) -> None:
        """Raise where it was closed or belongs to another process; otherwise it has come to its end."""
        if self._closed is not None:
            raise IteratorClosedError(self._closed)
        if self._pid != os.getpid():
            raise IteratorClosedError(
                "this iterator belongs to the parent process, whose threads a fork does not copy; "
                "call iter() on the feeder in the child"
            )

    def _take(self, item: ReadyBatch, asked: float) -> Any:
        try:
            batch = self._delivery.take(item)
        except Exception as error:
            self._finish()
            self._observer.failed(FeedFailure(error, item.number))
            raise
        self._observer.handing_out(item)
        now = time.perf_counter()
        stall_s = now - asked - _overlap_s(item.device_backlog, asked, now)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: handed out after a wait of %.1f ms", item.number, stall_s * 1e3)
        counters = self._counters
        counters.stall_s += stall_s
        counters.batches += 1
        counters.samples += item.samples
        counters.wall_s = now - self._started
        if counters.batches == 1:
            counters.first_batch_s = now - self._started
        return batch

    def _settle(self, item: QueueItem, asked: float) -> None:
        """Take note of the end, or raise what came instead of a batch."""
        counters = self._counters
        if isinstance(item, EndOfEpoch):
            now = time.perf_counter()
            counters.stall_s += now - asked
            counters.wall_s = now - self._started
            self._observer.ended()
            self._finished = True
            del self._queue.items[0]
            return
        if isinstance(item, FeedFailure):
            self._observer.failed(item)
            self._finish()
            try:
                raise item.error
            finally:
                # The traceback refers to this frame, which must not refer to the error: dropped, it is to be gone.
                # Nor may the queue, while the iterator is kept.
                self._queue.items.clear()
                del item
        assert isinstance(item, Stopped)
        raise IteratorClosedError(self._closed or "this iterator was closed")

    def _finish(self) -> None:
        # The last of it counts: what was interrupted before is done again.
        self._delivery.stop()
        self._finished = True

    @property
    def live(self) -> bool:
        """Whether there may be more to come: neither closed, nor ended, nor failed."""
        return self._closed is None and not self._finished

    def conclude(self) -> bool:
        """See the end without being asked for it; whether it stood right there."""
        self._finished = self.live and see_end(self._queue)
        return self._finished

    def close(self, reason: str = "this iterator was closed") -> None:
        """Stop the threads behind it; never blocks. A thread that waits at it gets ``IteratorClosedError``."""
        if not self._finished:
            # Also where it was closed before: that may have been interrupted half-way.
            self._closed = self._closed or reason
            self._queue.put(Stopped())
            self._delivery.stop()

    async def aclose(self) -> None:
        """``close``, and wait until the threads are gone without blocking the caller's loop."""
        self.close()
        await self._delivery.stopped()


def _overlap_s(span: tuple[float, float] | None, start: float, end: float) -> float:
    """How much of a span lies between two points in time."""
    return 0.0 if span is None else max(min(span[1], end) - max(span[0], start), 0.0)


def see_end(queue: BatchQueue[QueueItem]) -> bool:
    """Take the end of an epoch whose last batch was handed out; whether it stood right behind that."""
    try:
        return isinstance(queue.get(END_S), EndOfEpoch)
    except Empty:
        return False
