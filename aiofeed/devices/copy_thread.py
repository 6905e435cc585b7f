"""The thread that issues copies: a batch goes to the device as soon as it is finished and there is room there.

It is a thread, and not the consumer's ``next``: where load and step are balanced, batch n + 1 is finished during
step n, and a copy that waits for ``next`` is a copy that nothing hides. It is not the engine's loop either, because
an allocation on the device or a ``transform`` can block.

A batch that was handed out is on the device until the work on it is done, and a consumer that never waits for its
device may be hundreds of steps ahead of it. So each take leaves an event behind, and a device that has too many batches
before it gets no other one: the consumer then finds none at its ``next``, and waits there.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from aiofeed.core.errors import DeviceCopyError, FeedError
from aiofeed.runtime.buffers import BufferLease
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped, drop_batches
from aiofeed.runtime.threads import DaemonThread

if TYPE_CHECKING:
    from aiofeed.devices.backend import Event
    from aiofeed.devices.copier import Copier
    from aiofeed.devices.group_copier import MultiDeviceCopier

log = logging.getLogger("aiofeed.devices")

T = TypeVar("T")

# Copies that may be queued on the side stream before the oldest is waited for: one runs, one follows without a gap.
_OUTSTANDING = 2
# Batches that were handed out, and whose work the device still has before it, when one more is copied there. So many
# steps ahead, and those of ``room`` beside, a host keeps its device busy through a copy, a collection of garbage or a
# line of a log; each one more is a batch of the device's memory.
QUEUED_BATCHES = 4
# How soon, and then how seldom, a device that is behind is looked at again.
_FIRST_LOOK_S = 20e-6
_LOOK_S = 1e-3


class CopyThread:
    """Moves items from one handoff to another, copying batches to the device on the way.

    Args:
        copier: issues the copies.
        incoming: finished batches in host memory.
        outgoing: batches on the device, or on their way.
        room: how many may be on the device before the consumer takes one.
        issued: called with each batch that has left the host's queue.
    """

    def __init__(
        self,
        copier: Copier | MultiDeviceCopier,
        incoming: BatchQueue[QueueItem],
        outgoing: BatchQueue[QueueItem],
        *,
        room: int,
        issued: Callable[[ReadyBatch], None],
    ) -> None:
        self._copier = copier
        self._incoming = incoming
        self._outgoing = outgoing
        self._issued = issued
        self._stopped = False
        self._watched: weakref.ref[object] | None = None
        # Of each take, until it is complete: what was queued on the device before that. The consumer appends.
        self._queued: deque[Event] = deque()
        self._behind: tuple[float, float] | None = None
        # Anything but True ends the thread; the collector's weak references do, say.
        self._room: SimpleQueue[object] = SimpleQueue()
        for _ in range(room):
            self._room.put(True)
        self._copying: deque[tuple[Event, BufferLease | None]] = deque()
        self._thread = DaemonThread(self._main, "aiofeed-copy")

    def launch(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, item: ReadyBatch) -> Any:
        """The batch on the device, the caller's current stream made to wait for its copy. Never blocks.

        There is room for one more then; an interrupted take that is repeated makes no more.
        """
        used = self._copier.used()
        batch = self._copier.deliver(item.batch)
        if not item.taken:
            # Interrupted right behind this and repeated, it is there twice: the thread waits one batch sooner, once.
            self._queued.append(used)
            # One stretch: the interpreter looks for signals after a call, not between these two.
            item.taken = True
            self._room.put(True)
        return batch

    def watch(self, owner: object) -> None:
        """End, when the room is used up or the device is behind, if ``owner`` is dropped."""
        self._watched = weakref.ref(owner, self._room.put)

    def stop(self) -> None:
        """Signal the thread to end. Never blocks."""
        self._stopped = True
        self._room.put(False)
        self._incoming.put(Stopped())
        if not self._thread.is_alive():
            drop_batches(self._outgoing)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, up to ``timeout_s``; whether it has."""
        return self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            self._copier.backend.enter_thread()
            while self._wait_for_room() and self._wait_for_device() and self._copy_next():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it rather than wait
            self._outgoing.put(FeedFailure(_as_copy_error(error)))
        finally:
            self._settle()
            if self._unwanted:
                # Nobody takes them, and a feeder that was left may keep this handoff for long.
                drop_batches(self._incoming)
                drop_batches(self._outgoing)

    def _settle(self) -> None:
        try:
            while self._copying:
                self._give_back_oldest()
            self._copier.release()
        except Exception:  # noqa: BLE001 - the device is beyond use: nothing reads host memory, and whoever uses it hears
            self._copying.clear()

    def _wait_for_room(self) -> bool:
        return self._get(self._room.get_nowait, self._room.get) is True

    @property
    def _unwanted(self) -> bool:
        """Whether the consumer is gone."""
        return self._stopped or (self._watched is not None and self._watched() is None)

    def _wait_for_device(self) -> bool:
        """Wait while too many batches are before it; whether a batch is still wanted then.

        Events are looked at rather than waited for, which nothing could interrupt: a step may take minutes.
        """
        since, pause_s = 0.0, _FIRST_LOOK_S
        # What there is room for beside this batch is not on the device yet.
        while len(self._queued) - self._room.qsize() >= QUEUED_BATCHES and not self._ends():
            if self._oldest_complete():
                pause_s = _FIRST_LOOK_S
                continue
            if self._unwanted:
                return False
            since = since or time.perf_counter()
            if self._copying and self._copying[0][0].query():
                self._give_back_oldest()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        self._behind = (since, time.perf_counter()) if since else None
        return True

    def _oldest_complete(self) -> bool:
        """Whether the device has come to the oldest take, which is then forgotten."""
        try:
            complete = self._queued[0].query()
        except Exception as error:
            raise DeviceCopyError(
                f"{self._copier.backend.name} failed in work queued before: {type(error).__name__}: {error}"
            ) from error
        if complete:
            self._queued.popleft()
        return complete

    def _ends(self) -> bool:
        """Whether what comes next is no batch, and needs no memory of the device."""
        try:
            return not isinstance(self._incoming.items[0], ReadyBatch)
        except IndexError:
            return False

    def _copy_next(self) -> bool:
        there = len(self._incoming) > 0
        item = self._get(self._incoming.get_nowait, self._incoming.get)
        if isinstance(item, EndOfEpoch):
            # Epochs may follow one another; the end of one takes no room.
            self._room.put(True)
            self._outgoing.put(item)
            return True
        if not isinstance(item, ReadyBatch):
            if not isinstance(item, Stopped):
                self._outgoing.put(item)
            return False
        started = time.perf_counter()
        in_flight = self._copier.issue(item.batch)
        self._copying.append((in_flight.copied, item.lease))
        ended = time.perf_counter()
        item.counters.copy_s += ended - started
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: issued its copies in %.1f ms", item.number, (ended - started) * 1e3)
        behind = self._behind
        if behind is not None and there:
            # It was finished long since: the consumer waited for nothing else.
            behind = behind[0], ended
        self._outgoing.put(replace(item, batch=in_flight, lease=None, device_backlog=behind))
        item.batch = item.lease = None  # word of it may be heard later than the copy is complete
        self._issued(item)
        while len(self._copying) > _OUTSTANDING:
            self._give_back_oldest()
        return True

    def _get(self, get_nowait: Callable[[], T], get: Callable[[], T]) -> T:
        """The next of a queue; while there is none, slots whose copies complete are given back."""
        while self._copying:
            try:
                return get_nowait()
            except Empty:
                self._give_back_oldest()
        return get()

    def _give_back_oldest(self) -> None:
        copied, lease = self._copying.popleft()
        copied.synchronize()
        if lease is not None:
            lease.give_back()


def _as_copy_error(error: BaseException) -> FeedError:
    if isinstance(error, FeedError):
        return error
    wrapped = DeviceCopyError(f"copying to the device failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
