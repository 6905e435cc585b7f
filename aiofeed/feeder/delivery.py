"""How finished batches reach the consumer: straight from host memory, or through the copy thread and a device."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.core.types import Transform
from aiofeed.devices.copy_thread import CopyThread
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.queue import BatchQueue, QueueItem, ReadyBatch, release

if TYPE_CHECKING:
    from aiofeed.devices.copier import Copier
    from aiofeed.devices.group_copier import MultiDeviceCopier


def _released(loop_thread: EventLoopThread, item: ReadyBatch) -> None:
    """Tell the engine that a batch has left the host's queue."""
    item.taken_at = time.perf_counter()
    if item.release is not None and (item.on_taken is None or not item.on_taken(item)):
        loop_thread.call(release, item)


class HostDelivery:
    """Batches of tensors in host memory.

    Args:
        loop_thread: the threads behind it.
        queue: where the engine puts finished batches.
        transform: applied to each batch, in the consumer's thread.
    """

    def __init__(
        self,
        loop_thread: EventLoopThread,
        queue: BatchQueue[QueueItem],
        *,
        transform: Transform | None,
    ) -> None:
        self.queue = queue
        self._loop_thread = loop_thread
        self._transform = transform

    def launch(self) -> None:
        """Start the threads that are not the runtime's: none."""

    def begin(self) -> None:
        """A pass begins in the calling thread."""

    def take(self, item: ReadyBatch) -> Any:
        """The batch, transformed where there is a transform."""
        batch = item.batch
        _released(self._loop_thread, item)
        if self._transform is None:
            return batch
        try:
            return self._transform(batch)
        except Exception as error:
            error.add_note(f"in transform= of batch {item.number}")
            raise

    def stop(self) -> None:
        """Stop the threads; never blocks."""
        self._loop_thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end, up to ``timeout_s``; whether they have."""
        return self._loop_thread.join(timeout_s)

    async def stopped(self) -> None:
        """Wait for the threads without blocking the caller's loop."""
        if not self._loop_thread.inherited:
            await asyncio.wait([asyncio.wrap_future(self._loop_thread.finished)])


class DeviceDelivery:
    """Batches on a device: the copy thread issues, the consumer's stream waits.

    Args:
        loop_thread: the threads behind it.
        finished: where the engine puts finished batches.
        copier: issues copies and makes the consumer's stream wait for them.
        room: batches that may be on the device before the consumer asks.
    """

    def __init__(
        self,
        loop_thread: EventLoopThread,
        finished: BatchQueue[QueueItem],
        copier: Copier | MultiDeviceCopier,
        *,
        room: int,
    ) -> None:
        self.queue: BatchQueue[QueueItem] = BatchQueue()
        self._loop_thread = loop_thread
        self._copier = copier

        # Nothing here may refer to this object: the copy thread would then keep it, and itself, alive.
        self._thread = CopyThread(copier, finished, self.queue, room=room, issued=partial(_released, loop_thread))
        loop_thread.at_exit(self._thread.stop)

    def launch(self) -> None:
        """Start the copy thread."""
        self._thread.launch()

    def begin(self) -> None:
        """A pass begins in the calling thread: what it has queued, a transform's constants say, comes first."""
        self._copier.follow()

    def take(self, item: ReadyBatch) -> Any:
        """The batch on the device, the caller's current stream made to wait for its copy."""
        return self._thread.take(item)

    def stop(self) -> None:
        """Stop the threads; never blocks."""
        self._thread.stop()
        self._loop_thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end, up to ``timeout_s``; whether they have."""
        return self._loop_thread.join(timeout_s) and self._thread.join(timeout_s)

    async def stopped(self) -> None:
        """Wait for the threads without blocking the caller's loop."""
        if not self._loop_thread.inherited:
            await asyncio.wait([asyncio.wrap_future(self._loop_thread.finished)])
