"""How the batches of a served feeder reach the iterators of one of its consumers, on the host or on a device."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiofeed.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES
from aiofeed.core.types import Transform
from aiofeed.devices.backend import DeviceBackend
from aiofeed.devices.copier import Copier
from aiofeed.devices.copy_thread import CopyThread
from aiofeed.feeder.delivery import HostDelivery
from aiofeed.processes.serving.epoch_feed import EpochFeed
from aiofeed.processes.serving.subscription import Subscription
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.queue import BatchQueue, QueueItem, ReadyBatch
from aiofeed.runtime.threads import JOIN_S


class HostPass(HostDelivery):
    """Batches in memory of this process.

    Args:
        loop_thread: the consumer's.
        attachment: to the server.
        pass_: of this iterator.
        transform: applied to each batch, in the consumer's thread.
    """

    def __init__(
        self, loop_thread: EventLoopThread, attachment: Subscription, pass_: EpochFeed, transform: Transform | None
    ) -> None:
        super().__init__(loop_thread, pass_.queue, transform=transform)
        self.pass_ = pass_
        self._attachment = attachment

    def take(self, item: ReadyBatch) -> Any:
        """The batch, transformed where there is a transform."""
        if not self.pass_.started:
            self._loop_thread.call(self._attachment.mark_started, self.pass_)
        return super().take(item)

    def watch(self, owner: object) -> None:
        """End the pass when ``owner`` is dropped."""
        self._attachment.iterators.watch(owner, self.pass_)

    def stop(self) -> None:
        """The pass wants no more; never blocks."""
        self._loop_thread.call(self._attachment.end, self.pass_)

    def ended(self) -> None:
        """The end was seen: nothing to stop."""

    async def stopped(self) -> None:
        """Nothing to wait for: the threads are the consumer's."""


class DevicePass:
    """Batches on a device: a copy thread of this pass issues, the consumer's stream waits.

    Args:
        loop_thread: the consumer's.
        attachment: to the server.
        pass_: of this iterator.
        copier: of this pass alone.
    """

    def __init__(
        self, loop_thread: EventLoopThread, attachment: Subscription, pass_: EpochFeed, copier: Copier
    ) -> None:
        self.queue: BatchQueue[QueueItem] = BatchQueue()
        self.pass_ = pass_
        self._loop_thread = loop_thread
        self._attachment = attachment
        self._copier = copier
        copier.follow()
        # Nothing here may refer to this object: the copy thread would then keep it, and itself, alive.
        issued = partial(_issued, loop_thread)
        self._thread = CopyThread(copier, pass_.queue, self.queue, room=DEVICE_BATCHES, issued=issued)

    def watch(self, owner: object) -> None:
        """End the pass when ``owner`` is dropped."""
        self._attachment.iterators.watch(owner, self.pass_)
        self._thread.watch(owner)

    def launch(self) -> None:
        """Start the copy thread."""
        self._thread.launch()

    def take(self, item: ReadyBatch) -> Any:
        """The batch on the device, the caller's current stream made to wait for its copy."""
        if not self.pass_.started:
            self._loop_thread.call(self._attachment.mark_started, self.pass_)
        return self._thread.take(item)

    def stop(self) -> None:
        """The pass wants no more; never blocks."""
        self._thread.stop()
        self._loop_thread.call(self._attachment.end, self.pass_)

    def ended(self) -> None:
        """The end was seen: the copy thread ends."""
        self._thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the copy thread to end, up to ``timeout_s``; whether it has."""
        return self._thread.join(timeout_s)

    async def stopped(self) -> None:
        """Wait for the copy thread without blocking the caller's loop."""
        await asyncio.to_thread(self._thread.join, JOIN_S)


def deliver(
    loop_thread: EventLoopThread, attachment: Subscription, backend: DeviceBackend | None, transform: Transform | None
) -> HostPass | DevicePass:
    """The way of one epoch to one iterator."""
    pass_ = EpochFeed(room=PREFETCH_BATCHES)
    if backend is None:
        return HostPass(loop_thread, attachment, pass_, transform)
    return DevicePass(loop_thread, attachment, pass_, attachment.receiver.copier(backend, transform))


def _issued(loop_thread: EventLoopThread, item: ReadyBatch) -> None:
    """A batch has left the host's queue."""
    if item.release is not None:
        loop_thread.call(item.release, item)
