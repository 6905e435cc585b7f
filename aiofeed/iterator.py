"""The consumer's end: one epoch, as an iterator and as an asynchronous iterator."""

from __future__ import annotations

import os
import time
from queue import Empty
from typing import Any, Generic, Protocol, TypeVar

from aiofeed import trace
from aiofeed.counters import Counters
from aiofeed.errors import IteratorClosedError
from aiofeed.handoff import Handoff
from aiofeed.items import Closed, Ended, Failed, Item, Ready

# The end of an epoch follows its last batch within the time that a thread takes to be scheduled.
END_S = 1.0

BatchT_co = TypeVar("BatchT_co", covariant=True)


class Delivery(Protocol):
    """What stands behind an iterator: finished batches, and ways to answer."""

    handoff: Handoff[Item]

    def take(self, item: Ready) -> Any:
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

    def handed_out(self, item: Ready) -> None:
        """The user is about to get this batch."""
        ...

    def failed(self, item: Failed) -> None:
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
        counters: Counters,
        *,
        observer: Observer,
    ) -> None:
        self._delivery = delivery
        self._counters = counters
        self._handoff = delivery.handoff
        self._observer = observer
        self._pid = os.getpid()
        self._started = counters.asked_at = time.perf_counter()
        self._finished = False
        self._closed: str | None = None

    def __iter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __aiter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __next__(self) -> BatchT_co:
        """The next batch; blocks until it is there. Ctrl-C breaks the wait."""
        if self._over():
            raise StopIteration
        asked = time.perf_counter()
        batch: BatchT_co = self._settle(self._handoff.get(), asked)
        if batch is _END:
            raise StopIteration
        return batch

    async def __anext__(self) -> BatchT_co:
        """The next batch; suspends the calling task until it is there. Cancelling loses no batch."""
        if self._over():
            raise StopAsyncIteration
        asked = time.perf_counter()
        batch: BatchT_co = self._settle(await self._handoff.get_async(), asked)
        if batch is _END:
            raise StopAsyncIteration
        return batch

    def _over(self) -> bool:
        if self._closed is not None:
            raise IteratorClosedError(self._closed)
        if self._pid != os.getpid():
            raise IteratorClosedError(
                "this iterator belongs to the parent process, whose threads a fork does not copy; "
                "call iter() on the feeder in the child"
            )
        return self._finished

    def _settle(self, item: Item, asked: float) -> Any:
        counters = self._counters
        if isinstance(item, Ready):
            try:
                batch = self._delivery.take(item)
            except BaseException as error:
                self._finish()
                self._observer.failed(Failed(error, item.number))
                raise
            now = time.perf_counter()
            counters.stall_s += now - asked
            counters.batches += 1
            counters.samples += item.samples
            counters.wall_s = now - self._started
            if counters.batches == 1:
                counters.first_batch_s = now - self._started
            if trace.listeners:
                trace.emit("stall", asked, now, item.number)
            self._observer.handed_out(item)
            return batch
        if isinstance(item, Ended):
            self._finished = True
            now = time.perf_counter()
            counters.stall_s += now - asked
            counters.wall_s = now - self._started
            self._observer.ended()
            return _END
        if isinstance(item, Failed):
            self._finish()
            self._observer.failed(item)
            failure = item.error
            try:
                raise failure
            finally:
                # The traceback refers to this frame, which must not refer to the error: dropped, it is to be gone.
                del item, failure
        assert isinstance(item, Closed)
        raise IteratorClosedError(self._closed or "this iterator was closed")

    def _finish(self) -> None:
        self._finished = True
        self._delivery.stop()

    @property
    def live(self) -> bool:
        """Whether there may be more to come: neither closed, nor ended, nor failed."""
        return self._closed is None and not self._finished

    def conclude(self) -> bool:
        """See the end without being asked for it; whether it stood right there."""
        self._finished = self.live and see_end(self._handoff)
        return self._finished

    def close(self, reason: str = "this iterator was closed") -> None:
        """Stop the threads behind it; never blocks. A thread that waits at it gets ``IteratorClosedError``."""
        if self.live:
            self._closed = reason
            self._handoff.put(Closed())
            self._delivery.stop()

    async def aclose(self) -> None:
        """``close``, and wait until the threads are gone without blocking the caller's loop."""
        self.close()
        await self._delivery.stopped()


_END: Any = object()


def see_end(handoff: Handoff[Item]) -> bool:
    """Take the end of an epoch whose last batch was handed out; whether it stood right behind that."""
    try:
        return isinstance(handoff.get(END_S), Ended)
    except Empty:
        return False
