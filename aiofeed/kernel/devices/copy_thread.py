"""The thread that copies batches to the device. It alone decides when the next copy is issued.

It issues a copy as soon as a batch is finished and two limits allow it:

- ``room``: batches on the device that the consumer has not taken yet.
- ``QUEUED_BATCHES``: batches that the consumer has taken and that queued work on the device still uses. A consumer that
  never synchronises may be hundreds of steps ahead of its device. Each take therefore records an event after the
  consumer's work; while too many of these events are incomplete, no batch is copied and the consumer waits in ``next``.

Copies are not issued by the consumer's ``next``: if load and step take equally long, batch n + 1 is finished during
step n, and a copy issued by ``next`` would not overlap with any step. They are not issued by the engine's event loop
either, because a device allocation or a ``transform`` can block.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from aiofeed.kernel.core.errors import DeviceCopyError, FeedError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.devices.backend import is_complete, poll
from aiofeed.kernel.runtime.buffers import BufferLease, keep_pinned_memory
from aiofeed.kernel.runtime.queue import (
    BatchQueue,
    EndOfEpoch,
    FeedFailure,
    QueueItem,
    ReadyBatch,
    Stopped,
    drop_batches,
)
from aiofeed.kernel.runtime.threads import BoundedThread

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import Event
    from aiofeed.kernel.devices.copier import Copier

log: logging.Logger = logging.getLogger("aiofeed.devices")

T = TypeVar("T")

# Copies queued on the side stream before the thread waits for the oldest: one runs, the next follows without a gap.
_OUTSTANDING = 2
# Taken batches with incomplete work on the device at which no further batch is copied. With `room` beside them, this is
# the number of steps for which the host keeps its device busy through a copy, a garbage collection or a log line. Each
# one more costs the device memory of a batch.
QUEUED_BATCHES = 4
# Batches of failed devices.
_kept: list[object] = []
# While no batch is finished, the thread checks this often whether its owner was dropped.
_OWNER_POLL_S = 0.1


class CopyThread(BoundedThread):
    """Moves items from one queue to another and copies batches to the device on the way.

    Args:
        incoming: Finished batches in host memory.
        outgoing: Batches whose copies are queued.
        room: Batches that may be on the device before the consumer takes one.
        issued: Called with each batch that has left ``incoming``. It must not refer to the object that ``watch`` is
            given, because the running thread keeps it alive.
    """

    def __init__(
        self,
        copier: Copier,
        incoming: BatchQueue[QueueItem],
        outgoing: BatchQueue[QueueItem],
        *,
        room: int,
        issued: Callable[[ReadyBatch], object],
    ) -> None:
        super().__init__("aiofeed-copy", room)
        self._copier = copier
        self._incoming = incoming
        self._outgoing = outgoing
        self._issued = issued
        # One event per taken batch, recorded after the work queued before the take; until it is complete. The consumer
        # appends.
        self._queued: deque[Event] = deque()
        self._device_wait: tuple[float, float] | None = None
        self._copying: deque[tuple[Event, BufferLease | None]] = deque()
        # The batch whose copies are being issued.
        self._current: ReadyBatch | None = None
        # What ended the thread; its traceback refers to the tensors of a copy that failed halfway.
        self._error: BaseException | None = None

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch and make the caller's current stream wait for its copy. Never blocks.

        Allows one more batch to be copied, once per batch even if an interrupted take is repeated.
        """
        try:
            last_use = self._copier.last_use_event()
            batch = self._copier.deliver(item.batch)
        except Exception:
            self._keep_memory_of_failed_device()
            raise
        if not item.taken:
            # If a take is interrupted after this line and repeated, the event is there twice: the thread then waits one
            # batch earlier, once.
            self._queued.append(last_use)
            # The interpreter runs signal handlers after a call, so not between these two lines.
            item.taken = True
            self._room.put(True)
        return batch

    def stop(self) -> None:
        """Tell the thread to end. Never blocks."""
        super().stop()
        self._incoming.put(Stopped())
        if not self._thread.is_alive():
            drop_batches(self._outgoing)

    def _main(self) -> None:
        try:
            self._copier.backend.enter_thread()
            while self._wait_for_room() and self._wait_for_device() and self._copy_next():
                pass
        except BaseException as error:  # noqa: BLE001 - the consumer raises it; otherwise it would wait forever
            self._error = error
            self._keep_memory_of_failed_device()  # before the consumer gets the error and stops the other threads
            self._outgoing.put(FeedFailure(_as_copy_error(error)))
        finally:
            self._finish_copies()
            if self._unwanted():
                # A feeder may keep these queues for long after an iteration was left.
                drop_batches(self._incoming)
                drop_batches(self._outgoing)

    def _finish_copies(self) -> None:
        try:
            while self._copying:
                self._give_back_oldest()
            self._copier.release()
        except Exception as error:  # noqa: BLE001 - the next use of the device raises it
            log.debug("%s failed while its last copies were awaited: %s", self._copier.backend.name, error)

    def _keep_memory_of_failed_device(self) -> None:
        """Keep pinned and device memory for good if every call fails, as after an illegal memory access of a kernel.

        torch records an event when it frees memory that several streams have used. On a failed device that call fails
        in a destructor, which ends the process before the user sees the error.
        """
        try:
            for each in self._copier.backend.backends:
                each.record(each.side_stream()).query()
        except Exception:  # noqa: BLE001 - the driver's
            keep_pinned_memory()
            items = [*self._incoming.items, *self._outgoing.items]
            _kept.append((self._error, self._current, list(self._copying), items))

    def _wait_for_room(self) -> bool:
        return self._get(self._room.get_nowait, self._room.get) is True

    def _wait_for_device(self) -> bool:
        """Wait until few enough taken batches are in use on the device; return False if no batch is wanted any more."""
        self._device_wait = poll(self._may_copy)
        return not self._unwanted()

    def _may_copy(self) -> bool:
        # Slots still free in `_room` belong to batches not copied yet; do not count them.
        while len(self._queued) - self._room.qsize() >= QUEUED_BATCHES:
            if self._unwanted() or self._end_is_next():
                return True
            if not is_complete(self._queued[0], self._copier.backend.name):
                if self._copying and self._copying[0][0].query():
                    self._give_back_oldest()
                return False
            self._queued.popleft()
        return True

    def _end_is_next(self) -> bool:
        """Return whether the next item is not a batch and so needs no device memory."""
        try:
            return not isinstance(self._incoming.items[0], ReadyBatch)
        except IndexError:
            return False

    def _copy_next(self) -> bool:
        was_ready = len(self._incoming) > 0
        item = self._get(self._incoming.get_nowait, self._wait_for_item)
        if isinstance(item, EndOfEpoch) or (isinstance(item, ReadyBatch) and item.error is not None):
            # The next epoch may follow; the end of an epoch takes no room, nor a batch of which nothing is left.
            self._room.put(True)
            self._outgoing.put(item)
            return True
        if not isinstance(item, ReadyBatch):
            if not isinstance(item, Stopped):
                self._outgoing.put(item)
            return False
        began = time.perf_counter()
        self._current = item
        pending = self._copier.issue(item.batch)
        self._copying.append((pending.copied, item.lease))
        ended = time.perf_counter()
        item.counters.copy_s += ended - began
        item.counters.events.append(("copy", "copies", began, ended, item.number, item.samples, 0))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: issued its copies in %.1f ms", item.number, (ended - began) * 1e3)
        device_wait = self._device_wait
        if device_wait is not None and was_ready:
            # The batch was finished before the wait ended, so the consumer waited for the device alone.
            device_wait = device_wait[0], ended
        self._outgoing.put(replace(item, batch=pending, lease=None, device_backlog=device_wait))
        self._current = None
        item.batch = item.lease = None  # `issued` may keep the item for longer than the copy takes
        self._issued(item)
        while len(self._copying) > _OUTSTANDING:
            self._give_back_oldest()
        item.counters.copy_wait_s += time.perf_counter() - ended
        return True

    def _wait_for_item(self) -> QueueItem:
        while not self._unwanted():
            try:
                return self._incoming.get(_OWNER_POLL_S)
            except Empty:
                continue
        return Stopped()

    def _get(self, get_nowait: Callable[[], T], get: Callable[[], T]) -> T:
        """Return the next item of a queue; while it is empty, wait for copies and give back their host memory."""
        while self._copying:
            try:
                return get_nowait()
            except Empty:
                self._give_back_oldest()
        return get()

    def _give_back_oldest(self) -> None:
        copied, lease = self._copying[0]
        copied.synchronize()
        self._copying.popleft()
        if lease is not None:
            lease.give_back()


def _as_copy_error(error: BaseException) -> FeedError:
    if isinstance(error, FeedError):
        return error
    wrapped = DeviceCopyError(f"copying to the device failed: {format_error(error)}")
    wrapped.__cause__ = error
    return wrapped
