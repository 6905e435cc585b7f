"""Takes batches out of a server's slots, on the consumer's loop: copies them, or queues them for its device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.ipc.batch_codec import array_nodes, batch_in_ring, copied_leaf, decode_and_wrap
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.ring import INLINE_BYTES, Ring, RingLease
from aiofeed.ipc.schema import Node
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.runtime.buffers import BufferLease, BufferPool, DropTracker, release_unused
from aiofeed.kernel.runtime.queue import BatchQueue, QueueItem, ReadyBatch
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.serving.device_memory.device_reader import DeviceBatch, DeviceReader, UncopiedBatch
from aiofeed.serving.messages import BatchAvailable, EpochMessage

if TYPE_CHECKING:
    from aiofeed.kernel.devices.backend import DeviceBackend


class EpochFeed:
    """One epoch on its way to one iterator.

    Args:
        room: Batches that may wait in memory of this process.

    Attributes:
        queue: What the iterator takes, or a copy thread before it.
        counters: Statistics of the epoch.
        epoch: Its number at the server; -1 before it has started.
        superseded: Whether a newer iterator follows.
        started: Whether a batch was returned.
        complete: Whether the end of the epoch is in the queue.
        passed_on: Whether the next feed has got its batches, because this one had not started.
        unread: Serial numbers of its batches that have not been read yet.
        messages: Those that it got before it started.
        unconfirmed: Serial numbers of batches read before it started, for which ``Read`` has not been sent.
    """

    def __init__(self, room: int) -> None:
        self.queue: BatchQueue[QueueItem] = BatchQueue()
        self.counters: EpochStats = EpochStats()
        self.epoch = -1
        self.room = room
        self.superseded = self.started = self.complete = self.passed_on = False
        self.unread: set[int] = set()
        self.messages: list[EpochMessage] = []
        self.unconfirmed: list[int] = []


class BatchReceiver:
    """The memory of one server, as one consumer has it.

    Args:
        backend: The device that copies from the ring; ``None``: batches are copied to memory of this process.
        device_reader: The server's device memory; ``None`` if only host memory is shared.
        memory: Memory for copies on the host.
        wrap: Turns a batch of ``HostTensor`` into the batch that is delivered.
        executor: Copies large batches.

    Attributes:
        busy: Whether a thread copies a batch; ``receive`` must not be called then.
        on_read: Called with a feed and a serial number when a batch has been read, or never will be.
        on_taken: Called with a feed when a batch has left the host's queue.
        on_error: Called with the error of a batch that cannot be received.
        on_idle: Called when ``busy`` ends.
    """

    on_read: Callable[[EpochFeed, int], None]
    on_taken: Callable[[EpochFeed], None]
    on_error: Callable[[BaseException], object]
    on_idle: Callable[[], object]

    def __init__(
        self,
        backend: DeviceBackend | None,
        device_reader: DeviceReader | None,
        memory: BufferPool,
        wrap: Callable[[Any], Any],
        executor: ThreadPool,
    ) -> None:
        self.busy: bool = False
        self._ring = Ring(backend)
        self._has_device = backend is not None
        self._device_reader = device_reader
        self._memory = memory
        self._wrap = wrap
        self._executor = executor
        self._in_blocks: dict[int, DeviceBatch] = {}
        self._leases: DropTracker[tuple[EpochFeed, int]] = DropTracker()

    def enter_thread(self) -> None:
        """Prepare the loop's thread, which opens and closes device memory, for the device."""
        if self._device_reader is not None:
            self._device_reader.backend.enter_thread()

    def copier(self, backend: DeviceBackend, transform: Callable[[Any], Any] | None) -> Copier:
        """Return the copier of batches to the device."""
        return Copier(backend, transform) if self._device_reader is None else self._device_reader.copier(transform)

    def open_memory(self, message: BatchAvailable, memory: list[Any]) -> None:
        """Map or open the memory that a message introduces, and forget the memory that it retires.

        Raises:
            ProtocolError: The memory is not as announced.
            HandleError: Device memory cannot be opened.
        """
        self._ring.map_segments(message.segments, memory, message.retired)
        if self._device_reader is not None:
            self._device_reader.open_blocks(message)
            if message.block >= 0:
                # `save_waiting` may have to copy it before a feed takes it.
                self._in_blocks[message.serial] = self._device_reader.batch(message)
        elif message.block >= 0:
            raise ProtocolError("a batch in device memory, which this process has not opened")

    def forget(self, serial: int) -> None:
        """Forget a batch for which ``Read`` is sent."""
        self._in_blocks.pop(serial, None)

    def save_waiting(self) -> None:
        """Copy the waiting batches out of the server's device memory, because the server closes the connection.

        Raises:
            WorkerDiedError, TimeoutError: They can no longer be copied.
        """
        if self._device_reader is not None:
            self._device_reader.save(list(self._in_blocks.values()))

    def collect(self) -> None:
        """Confirm batches that were dropped before a device copied them."""
        for feed, serial in self._leases.collected():
            self.on_read(feed, serial)
        if self._device_reader is not None:
            self._device_reader.collect()

    def close(self) -> None:
        """Unmap the ring and close device memory."""
        self._ring = Ring()
        self._in_blocks.clear()
        if self._device_reader is not None:
            self._device_reader.close()
        release_unused()

    def receive(self, feed: EpochFeed, message: BatchAvailable) -> None:
        """Put a batch into the feed's queue: copied, or in its slot if a device copies it from there."""
        try:
            if message.block >= 0:
                self._receive_from_device(feed, message)
                return
            ring = self._ring
            if ring.pinned:
                self._put(feed, message, batch_in_ring(ring, message.batch), self._lease(feed, message))
                return
            lease = self._memory.lease()
            copy = partial(
                decode_and_wrap, message.batch, lambda node: copied_leaf(ring.view(node), node, lease), self._wrap
            )
            if message.nbytes > INLINE_BYTES:
                self.busy = True
                job = asyncio.get_running_loop().run_in_executor(self._executor, copy)
                job.add_done_callback(partial(self._copied_in_thread, feed, message, lease))
                return
            batch, seconds = copy()
        except (ProtocolError, MemoryError) as error:
            self.on_error(error)
            return
        self._copied(feed, message, lease, batch, seconds)

    def _receive_from_device(self, feed: EpochFeed, message: BatchAvailable) -> None:
        batch, lease = self._in_blocks[message.serial], self._lease(feed, message)
        ring = self._ring
        tree = batch.tree(message.batch, lambda node: copied_leaf(ring.view(node), node, None))
        self._put(feed, message, UncopiedBatch(batch, tree, lease), lease)

    def _lease(self, feed: EpochFeed, message: BatchAvailable) -> RingLease:
        lease = RingLease(asyncio.get_running_loop(), partial(self.on_read, feed, message.serial))
        # A batch that no device copies is dropped together with its lease.
        self._leases.watch(lease, (feed, message.serial))
        return lease

    def _copied_in_thread(
        self, feed: EpochFeed, message: BatchAvailable, lease: BufferLease, job: asyncio.Future[tuple[Any, float]]
    ) -> None:
        self.busy = False
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            self.on_error(error)
            return
        self._copied(feed, message, lease, *job.result())
        self.on_idle()

    def _copied(self, feed: EpochFeed, message: BatchAvailable, lease: BufferLease, batch: Any, seconds: float) -> None:
        feed.counters.copy_s += seconds
        feed.counters.jobs_s += seconds
        self._put(feed, message, batch, lease if self._has_device else None)
        self.on_read(feed, message.serial)

    def _put(self, feed: EpochFeed, message: BatchAvailable, batch: Any, lease: BufferLease | None) -> None:
        item = ReadyBatch(message.number, _rows(message.batch), batch, lease, counters=feed.counters)
        item.release = lambda _: self.on_taken(feed)
        feed.queue.put(item)


def _rows(batch: Node) -> int:
    """Return the number of samples: rows of the first array that has any; 0 if there is none."""
    for node in array_nodes(batch):
        if node.shape and (rows := node.shape[node.axes[0] if node.axes else 0]):
            return rows
    return 0
