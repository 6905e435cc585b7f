"""The consumer's end of a feed: an iterator over one epoch, which takes batches from the queue of a ``Delivery``."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import Any, Generic, NoReturn, TypeVar

from aiofeed.kernel.core.errors import IteratorClosedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.feeder.delivery import Delivery
from aiofeed.kernel.runtime import queue as long_waits
from aiofeed.kernel.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# Time limit for the end of an epoch to arrive after its last batch. It arrives as soon as its thread is scheduled.
END_S = 1.0

# The number of this process; to ask the system for it takes half a microsecond.
_pid = os.getpid()

# Stands for a batch that is left out.
_LEFT_OUT: Any = object()

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)


class EpochObserver:
    """Receives the events of an iterator. This base class stops the delivery at the end of the epoch.

    Attributes:
        resumed: Whether batches of the epoch were returned before this iterator.
    """

    resumed: bool = False

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def leaves_out(self, item: ReadyBatch) -> bool:
        """Act before a batch of which nothing is left is left out; False: raise its error in its place."""
        return False

    def returning(self, item: ReadyBatch) -> None:
        """Act before a batch is returned; twice for the same batch if ``next`` is interrupted and repeated."""

    def keys(self, item: ReadyBatch) -> list[Any] | None:
        """Return the keys of the samples of a batch, if the user wants them with it."""
        return None

    def continued(self, number: int) -> Delivery:
        """Return the delivery of the rest of the epoch, from batch ``number`` on, which its pipeline does not make."""
        raise NotImplementedError

    def returned(self, item: ReadyBatch) -> None:
        """Count a batch that is returned. Must not call any function, so that no signal handler runs in it."""

    def failed(self, item: FeedFailure) -> None:
        """Act before an error is raised."""

    def ended(self) -> None:
        """Act at the end of the epoch: stop the threads."""
        self._delivery.stop()


class FeedIterator(Generic[BatchT_co]):
    """An iterator over the batches of one epoch. Use either ``next`` or ``anext``, from one thread at a time.

    It ends with ``StopIteration`` or ``StopAsyncIteration``; after an error it is finished. After ``close``, after a
    newer iterator was started, and in a forked child it raises ``IteratorClosedError``.

    Args:
        asked: ``clocks()`` when ``iter()`` was called; by default now.
    """

    def __init__(
        self,
        delivery: Delivery,
        stats: EpochStats,
        observer: EpochObserver | None = None,
        asked: tuple[float, float] | None = None,
    ) -> None:
        self._delivery = delivery
        self._stats = stats
        self._queue = delivery.queue
        self.observer: EpochObserver = observer or EpochObserver(delivery)
        self._pid = _pid
        self._started, stats.cpu_started_s = asked or clocks()
        stats.asked_at = self._started
        stats.stall_s = time.perf_counter() - self._started
        self._finished = self._running = False
        # When the last batch was returned, its number and its samples.
        self._last_returned: tuple[float, int, int] | None = None
        # Further batches of the last item, see `ReadyBatch`.
        self._following: list[Any] = []

    def __repr__(self) -> str:
        status = "ended" if self._finished else "open" if self.live else "closed"
        return f"FeedIterator({status}, batches returned: {self._stats.batches})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an iterator cannot be pickled or copied, because its threads cannot: save the feeder's state_dict(), and "
            "pass it to load_state_dict() of another feeder, or of a copy, whose next iter() then continues after the "
            "last batch that this iterator has returned"
        )

    def __iter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __aiter__(self) -> FeedIterator[BatchT_co]:
        return self

    def __next__(self) -> BatchT_co:
        """Return the next batch; block until it is ready. Ctrl-C interrupts the wait and loses no batch.

        Raises:
            RuntimeError: Another thread is in this method.
        """
        asked = time.perf_counter()
        if (following := self._following) and self._delivery.closed is None and self._pid == _pid:
            assert self._last_returned is not None
            stats, (began, number, samples) = self._stats, self._last_returned
            stats.events.append(("step", "training", began, asked, number, samples, 0))
            # No call from here to the caller's line, so that neither Ctrl-C nor another thread comes between.
            if following:
                batch: BatchT_co = following[-1]
                del following[-1]
                self._last_returned = asked, number + 1, samples
                stats.batches += 1
                stats.samples += samples
                stats.wall_s = asked - self._started
                return batch
        if self._finished or self._delivery.closed is not None or self._pid != _pid:
            self._raise_if_closed()
            raise StopIteration
        if self._running:
            raise RuntimeError(
                "another thread is in next() of this iterator: use an iterator in one thread at a time, or put a lock "
                "around next()"
            )
        self._running = True
        taken: Any
        try:
            while (taken := self._take(self._peek(), asked, StopIteration)) is _LEFT_OUT:
                pass
            return taken  # type: ignore[no-any-return]
        finally:
            self._running = False

    async def __anext__(self) -> BatchT_co:
        """Return the next batch; suspend the calling task until it is ready. Cancelling the task loses no batch."""
        if self._following:
            return self.__next__()
        if self._finished or self._delivery.closed is not None or self._pid != _pid:
            self._raise_if_closed()
            raise StopAsyncIteration
        if self._running:
            raise RuntimeError("another task is already waiting for this iterator; only one can")
        self._running = True
        try:
            asked = time.perf_counter()
            while True:
                item = await self._queue.peek_async(self._log_wait)
                if (taken := self._take(item, asked, StopAsyncIteration)) is not _LEFT_OUT:
                    return taken  # type: ignore[no-any-return]
        finally:
            self._running = False

    def _peek(self) -> QueueItem:
        try:
            return self._queue.peek(long_waits.LONG_WAIT_S)
        except Empty:
            self._log_wait()
            return self._queue.peek()

    def _take(self, item: QueueItem, asked: float, ended: type[Exception]) -> Any:
        """Remove the next item, and return its batch, or ``_LEFT_OUT``; raise ``ended`` at the end of the epoch."""
        if self._delivery.closed is not None:
            self._raise_if_closed()  # `close` in another thread may have dropped the batches before this item
        woken_at = self._queue.woken_at
        # Other tasks may block the event loop after the item has arrived.
        loop_delay_s = time.perf_counter() - woken_at if woken_at > asked else 0.0
        if type(item) is EndOfEpoch and item.next_batch is not None:
            # If Ctrl-C comes before the last line, the next call finds the same item, and does this again.
            self._delivery = self.observer.continued(item.next_batch)
            self._queue = self._delivery.queue
            return _LEFT_OUT
        if type(item) is not ReadyBatch:
            try:
                self._end(item, asked, loop_delay_s)
            finally:
                del item  # an error's traceback refers to this frame
            raise ended
        if item.error is None:
            batch = self._return(item, asked, loop_delay_s)
        elif self.observer.leaves_out(item):
            batch = _LEFT_OUT
        else:
            self._queue.items.appendleft(FeedFailure(item.error, item.number, item.failures))
            return _LEFT_OUT
        # From here to the caller's line the interpreter runs no signal handler (see kernel/runtime/queue.py).
        self.observer.returned(item)
        self._stats.batches_left_out += batch is _LEFT_OUT
        self._following = item.following
        item.batch = None  # the engine's loop may still refer to the item
        # `close` in another thread may have emptied the queue.
        if (items := self._queue.items) and items[0] is item:
            del items[0]
        return batch

    def _log_wait(self) -> None:
        try:
            what, *pids = self._delivery.waiting_for()
        except Exception as error:  # noqa: BLE001 - other threads change meanwhile what is looked at; the wait goes on
            what, pids = f"for a batch ({error!r})", []
        long_waits.log_long_wait(f"{what} (batches returned: {self._stats.batches})", *pids)

    def _raise_if_closed(self) -> None:
        """Raise ``IteratorClosedError`` if the iterator is closed or belongs to another process."""
        if (reason := self._delivery.closed) is not None and not self._finished:
            raise IteratorClosedError(reason)
        if self._pid != _pid:
            raise IteratorClosedError(
                "this iterator belongs to the parent process, whose threads a fork does not copy; "
                "call iter() on the feeder in the child"
            )

    def _return(self, item: ReadyBatch, asked: float, loop_delay_s: float = 0.0) -> Any:
        arrived = time.perf_counter()
        try:
            batch = self._delivery.take(item)
        except Exception as error:  # noqa: BLE001 - `_fail` raises it
            self.observer.failed(FeedFailure(error, item.number))
            self._fail(error)
        self.observer.returning(item)
        if (keys := self.observer.keys(item)) is not None:
            batch = batch, keys
        now = time.perf_counter()
        waited = now - loop_delay_s
        stall_s = waited - asked - (_overlap_s(*backlog, asked, waited) if (backlog := item.device_backlog) else 0.0)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: returned after a wait of %.1f ms", item.number, stall_s * 1e3)
        stats = self._stats
        stats.events.append(("wait", "training", asked, waited, item.number, item.samples, 0))
        self._add_step(asked)
        self._last_returned = (now, item.number, item.samples)
        stats.stall_s += stall_s
        stats.hand_over_s += now - arrived
        stats.late_s += loop_delay_s
        stats.batches += 1
        stats.samples += item.samples
        stats.wall_s = now - self._started
        if stats.batches == 1:
            stats.first_batch_s, stats.first_stall_s = now - self._started, stats.stall_s
        return batch

    def _add_step(self, ended: float) -> None:
        """Add the consumer's step with the batch that was returned last."""
        if self._last_returned is not None:
            began, number, samples = self._last_returned
            self._stats.events.append(("step", "training", began, ended, number, samples, 0))

    def _end(self, item: QueueItem, asked: float, loop_delay_s: float = 0.0) -> None:
        """Handle an item that is not a batch: return at the end of the epoch, otherwise raise the error."""
        if isinstance(item, EndOfEpoch):
            now = time.perf_counter()
            self._add_step(asked)
            self._stats.stall_s += now - loop_delay_s - asked
            self._stats.wall_s = now - self._started
            self._stats.process_cpu_s = time.process_time() - self._stats.cpu_started_s
            # Both at once, because another thread may begin the next epoch, whose batches come from the same queue.
            self._finished = True
            del self._queue.items[0]
            self.observer.ended()
            return
        if isinstance(item, FeedFailure):
            self.observer.failed(item)
            try:
                self._fail(item.error)
            finally:
                # The traceback refers to this frame. If this frame or the queue referred to the error, a dropped error
                # would not be freed. `del` is not a call, so Ctrl-C cannot replace the error.
                if self._finished and (items := self._queue.items) and items[0] is item:
                    del items[0]
                del item
        assert isinstance(item, Stopped)
        raise IteratorClosedError(self._delivery.closed or "this iterator was closed")

    def _fail(self, error: BaseException) -> NoReturn:
        """Stop the threads, finish and raise an error."""
        self._delivery.stop()
        if isinstance(error, StopIteration | StopAsyncIteration):
            error = _as_runtime_error(error)
        try:
            # From here to the caller's line the interpreter runs no signal handler. If Ctrl-C comes before, the next
            # call raises the error again: it must not end the loop as if the epoch were complete.
            self._finished = True
            raise error
        finally:
            del error  # the traceback refers to this frame

    @property
    def batches(self) -> int:
        """The number of batches returned."""
        return self._stats.batches

    @property
    def left_out(self) -> int:
        """The number of batches left out."""
        return self._stats.batches_left_out

    @property
    def number(self) -> int:
        """The number in the epoch of the batch that was returned last; -1 before the first."""
        return -1 if self._last_returned is None else self._last_returned[1]

    def add_order(self, began: float) -> None:
        """Count the time since ``began`` in which the caller has listed the order for this epoch, before ``iter()``."""
        stats, seconds = self._stats, self._started - began
        self._started = stats.asked_at = began
        stats.stall_s += seconds
        stats.order_s += seconds

    def leave_out(self, seconds: float) -> None:
        """Leave the last seconds, in which the consumer used other batches, out of the statistics."""
        self._started += seconds
        self._stats.asked_at = time.perf_counter()

    @property
    def live(self) -> bool:
        """Whether the iterator is neither closed nor finished."""
        return self._delivery.closed is None and not self._finished

    def finish_if_ended(self) -> bool:
        """Finish if the end of the epoch is the next item, and no thread is in ``next``; return whether it is."""
        if self._running:
            return False
        self._running = True
        try:
            self._finished = self.live and take_end(self._queue)
        finally:
            self._running = False
        return self._finished

    def close(self, reason: str = "this iterator was closed") -> None:
        """Stop the threads that feed it. Never blocks. A thread that waits in ``next`` gets ``IteratorClosedError``."""
        if not self._finished:
            self._delivery.stop(reason)

    async def aclose(self) -> None:
        """Close it and wait for the threads to end, without blocking the caller's event loop."""
        self.close()
        await self._delivery.stopped()


class EpochStartLock:
    """Lets one thread at a time begin an epoch. A ``stop`` by another thread does not wait; it is done at the end.

    Attributes:
        stopped: The reason of a ``stop`` since the last ``run`` began, set by ``stop`` before it looks for an iterator.
    """

    def __init__(self) -> None:
        self.stopped: str | None = None
        # A fork may copy a lock that is acquired, so each process has its own.
        self._locks: dict[int, threading.RLock] = {}

    def lock(self) -> threading.RLock:
        """Return the lock of this process. Reentrant: a signal handler or a sampler may iterate the feeder, too."""
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def run(self, begin: Callable[[], FeedIterator[BatchT]], stop: Callable[[str], object]) -> FeedIterator[BatchT]:
        """Return the iterator of ``begin``, closed if it was stopped meanwhile."""
        with self.lock():
            self.stopped = None
            iterator = begin()
            if (reason := self.stopped) is not None:
                iterator.close(reason)
                stop(reason)
            return iterator


def _as_runtime_error(error: Exception) -> RuntimeError:
    """Return the error to raise in place of one that would end the ``for`` loop silently, as in a generator."""
    raised = RuntimeError(f"{type(error).__name__} was raised by user code that makes batches")
    raised.__cause__ = error
    return raised


def clocks() -> tuple[float, float]:
    """Return the time and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def _overlap_s(began: float, ended: float, start: float, end: float) -> float:
    """Return the seconds from ``began`` to ``ended`` that lie between two points in time."""
    return max(min(ended, end) - max(began, start), 0.0)


def take_end(queue: BatchQueue[QueueItem]) -> bool:
    """Remove the next item; return whether it is the end of the epoch. Call it after the last batch."""
    try:
        return isinstance(queue.get(END_S), EndOfEpoch)
    except Empty:
        return False


def _after_fork_in_child() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
