"""The way of a batch from its producer to the iterator.

A ``Producer`` puts finished batches into a queue. A ``Delivery`` hands them to the consumer, on a device by way of a
``CopyThread`` and a second queue. ``FeedIterator.__next__`` takes them from the last queue.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiofeed.kernel.core.errors import FeedError, add_note
from aiofeed.kernel.core.limits import DEVICE_BATCHES
from aiofeed.kernel.core.types import Transform
from aiofeed.kernel.core.validation import check_returned
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.queue import BatchQueue, QueueItem, ReadyBatch, Stopped

if TYPE_CHECKING:
    from aiofeed.kernel.devices.copier import Copier
    from aiofeed.kernel.devices.copy_thread import CopyThread


class Producer(Protocol):
    """Puts finished batches into a queue, in threads of its own or when the queue is read."""

    @property
    def queue(self) -> BatchQueue[QueueItem]:
        """The finished batches and the ends of epochs."""

    def start(self) -> None:
        """Start the threads that do not run yet. Called in the consumer's thread before each iteration."""

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch of an item that leaves the queue, and allow one more to be produced.

        An interrupted call may be repeated with the same item. A copy thread calls it, too, and so keeps the producer
        alive while it runs.
        """

    def waiting_for(self) -> tuple[Any, ...]:
        """Return (text, *pids): what is awaited, as the end of a log line, and the processes that work on it."""

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped. Replaces the previously watched owner."""

    def stop(self) -> None:
        """Tell the threads to end. Never blocks."""

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the threads to end; return whether they have ended."""

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's event loop."""


@dataclass(eq=False)
class LoopProducer:
    """A producer whose batches come from an event loop thread."""

    loop_thread: EventLoopThread
    queue: BatchQueue[QueueItem]

    def start(self) -> None:
        """Start the thread if it does not run yet."""
        self.loop_thread.launch()

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch of an item, and call its ``on_taken``."""
        batch = item.batch
        item.taken_at = time.perf_counter()
        if item.on_taken is not None:
            item.on_taken(item)
        return batch

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped. Replaces the previously watched owner."""
        self.loop_thread.watch(owner)

    def stop(self) -> None:
        """Tell the threads to end. Never blocks."""
        self.loop_thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the threads to end; return whether they have ended."""
        return self.loop_thread.join(timeout_s)

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's event loop."""
        if not self.loop_thread.inherited:
            await asyncio.wait([asyncio.wrap_future(self.loop_thread.finished)])


@dataclass(eq=False)
class Delivery:
    """Hands a producer's batches to the consumer: from host memory, or through a copy thread and a device.

    Args:
        producer: Puts finished batches into its queue.
        copier: Copies batches to the device, in a thread of its own; ``None``: they stay where the producer puts them.
        transform: Called with each batch in the consumer's thread. A copier has its own transform.
        device_batches: Batches that may be on the device before the consumer takes one.

    Attributes:
        closed: Why its open iterator was closed, and each iterator that may follow.
    """

    producer: Producer
    copier: Copier | None = None
    transform: Transform | None = None
    device_batches: int = DEVICE_BATCHES
    closed: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        producer = self.producer
        self.queue: BatchQueue[QueueItem] = producer.queue
        self._copy_thread: CopyThread | None = None
        if self.copier is not None:
            from aiofeed.kernel.devices.copy_thread import CopyThread

            self.queue, room = BatchQueue(), self.device_batches
            self._copy_thread = CopyThread(self.copier, producer.queue, self.queue, room=room, issued=producer.take)

    def start(self) -> None:
        """Start the threads that do not run yet. Call it in the consumer's thread before each iteration.

        Later copies wait for the work that the calling thread has queued on the device, e.g. constants of a transform.
        """
        if self.copier is not None:
            self.copier.wait_for_caller()
        if self._copy_thread is not None:
            self._copy_thread.start()
        self.producer.start()

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch of an item as the user gets it. The caller's current stream waits for its copy."""
        if self._copy_thread is not None:
            return self._copy_thread.take(item)
        if item.transformed:
            return item.batch
        batch = self.producer.take(item)
        if self.transform is None:
            return batch
        if item.transform_begun:
            raise FeedError(_INTERRUPTED.format(item.number))
        item.transform_begun = True
        try:
            item.batch = self.transform(batch)
            # Nothing is called before this line: after Ctrl-C the next call returns the batch.
            item.transformed = item.batch is not None
            return check_returned("transform=", item.batch, item.number)
        except Exception as error:
            add_note(error, f"in transform= of batch {item.number}: it gets whole batches, decode= gets samples")
            raise

    def waiting_for(self) -> tuple[Any, ...]:
        """See ``Producer.waiting_for``."""
        if self._copy_thread is not None and self.producer.queue.items:
            return ("for the copy of a batch to the device",)
        return self.producer.waiting_for()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped. Replaces the previously watched owner."""
        self.producer.watch(owner)
        if self._copy_thread is not None:
            self._copy_thread.watch(owner)

    def stop(self, reason: str | None = None) -> None:
        """Tell the threads to end. Never blocks. With a reason, the open iterator raises ``IteratorClosedError``."""
        if reason is not None:
            if self.closed is None:
                # Before the threads drop batches: the iterator must not return a batch behind a dropped one.
                self.closed = reason
                self.queue.items.append(Stopped())
            self.queue.wake()  # again if this call is repeated, because Ctrl-C may have interrupted the first
        if self._copy_thread is not None:
            self._copy_thread.stop()
        self.producer.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the threads to end and unlock their memory; return whether they have ended."""
        deadline = time.monotonic() + timeout_s
        ended = self.producer.join(timeout_s)
        if self._copy_thread is not None:
            ended = self._copy_thread.join(max(0.0, deadline - time.monotonic())) and ended
        return ended

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's event loop."""
        await self.producer.stopped()
        if self._copy_thread is not None:
            await self._copy_thread.stopped()


_INTERRUPTED = (
    "transform= was interrupted at batch {}, which it may have changed in part. To go on with that batch, call "
    "feeder.load_state_dict(feeder.state_dict()) and iterate over the feeder again"
)
