"""A consumer's connection to a server, on the consumer's loop.

The messages of a subscription arrive in order: an epoch starts, its batches, its end, the next epoch. They wait here,
the batches in their slots, until an iterator's ``EpochFeed`` takes them. A feed takes a few batches ahead and sends
``Read`` at once, but not before its first batch was returned: an iterator that is replaced before that leaves its
epoch to the next one, as a feeder's does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.ipc.batch_codec import array_nodes, batch_in_ring, copied_leaf, decode_and_wrap
from aiofeed.ipc.cuda_ipc import HandleError
from aiofeed.ipc.error_codec import rebuild
from aiofeed.ipc.framing import Connection, ProtocolError
from aiofeed.ipc.ring import INLINE_BYTES, Ring, RingLease
from aiofeed.ipc.schema import Node, encode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.feeder.delivery import LoopProducer
from aiofeed.kernel.runtime.buffers import BufferLease, BufferPool, DropTracker, release_unused
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, ReadyBatch, Stopped, drop_batches
from aiofeed.kernel.runtime.tensors import as_tensors, unchanged
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.serving import messages
from aiofeed.serving.connect import ServerLink, server_died
from aiofeed.serving.device_memory.device_reader import BlockCopier, DeviceBatch, UncopiedBatch
from aiofeed.serving.messages import BatchAvailable

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import BaseDevice

log: logging.Logger = logging.getLogger("aiofeed.processes")

# Interval of the checks for iterators that were dropped and slots that were read.
HEARTBEAT_S = 0.05
# After a server has died, its last messages are still read for this long.
LAST_MESSAGES_S = 0.2
# Between two epochs a consumer may run an evaluation; a longer pause is logged once.
IDLE_S = 10.0


class EpochFeed(LoopProducer):
    """One epoch on its way to one iterator: a producer whose threads are those of the subscription.

    Args:
        room: Batches that may wait in memory of this process.

    Attributes:
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

    def __init__(self, loop_thread: EventLoopThread, subscription: Subscription, room: int) -> None:
        super().__init__(loop_thread, BatchQueue())
        self._subscription = subscription
        self.counters: EpochStats = EpochStats()
        self.epoch: int = -1
        self.room = room
        self.superseded = self.started = self.complete = self.passed_on = False
        self.unread: set[int] = set()
        self.messages: list[messages.EpochMessage] = []
        self.unconfirmed: list[int] = []

    def start(self) -> None:
        """Subscribe to the epoch."""
        self.loop_thread.call(self._subscription.begin, self)

    def mark_started(self) -> None:
        """See ``Subscription.mark_started``. From any thread."""
        self.loop_thread.call(self._subscription.mark_started, self)

    def waiting_for(self) -> tuple[Any, ...]:
        """See ``Producer.waiting_for``."""
        address, pid = self._subscription.server
        began = f"its epoch {self.epoch}" if self.epoch >= 0 else "an epoch to begin, as soon as all join it"
        return f"for the server at {address} (pid {pid}), and {began}", pid

    def watch(self, owner: object) -> None:
        """End the subscription to the epoch when ``owner`` is dropped."""
        self._subscription.iterators.watch(owner, self)

    def stop(self) -> None:
        """End the subscription to the epoch. Never blocks."""
        self.loop_thread.call(self._subscription.end, self)

    def join(self, timeout_s: float) -> bool:
        """Return True: the epoch has no threads of its own."""
        return True

    async def stopped(self) -> None:
        """Return at once: the epoch has no threads of its own."""


class Subscription:
    """A connection to a server.

    Args:
        link: Closed with the subscription.
        backend: The device that copies from the ring; ``None``: batches are copied to memory of this process.
        memory: Memory for copies on the host.
        executor: Copies large batches.

    Attributes:
        epoch, batches: The server's number of the epoch that a feed has started last, -1 before the first, and the
            number of its batches, if that is known.
        iterators: The feeds' iterators; a feed ends when its iterator is dropped.
        host_only: Whether this server's device memory could not be opened; a new connection is to do without it.
    """

    def __init__(self, link: ServerLink, backend: BaseDevice | None, memory: BufferPool, executor: ThreadPool) -> None:
        self._link = link
        self._device_reader = link.device_reader
        self._memory = memory
        self._wrap = as_tensors if backend is None else unchanged
        self._executor = executor
        self.epoch: int = -1
        self.batches: int | None = link.batches
        self.host_only: bool = False
        self._connection: Connection | None = None
        self._early: list[messages.FromConsumer] = []
        self._tickets = itertools.count()
        self._ticket: int | None = None
        self._messages: deque[messages.EpochMessage] = deque()
        self._feed: EpochFeed | None = None
        self._error: Callable[[], FeedError] | None = None
        self.iterators: DropTracker[EpochFeed] = DropTracker()
        self._idle_since: float | None = None
        self._ring = Ring(backend)
        self._has_device = backend is not None
        # Whether a thread copies a batch; the next one waits for it.
        self._busy = False
        self._in_blocks: dict[int, DeviceBatch] = {}
        self._leases: DropTracker[tuple[EpochFeed, int]] = DropTracker()

    @property
    def server(self) -> tuple[Path, int]:
        """The server's address and process."""
        return self._link.address, self._link.process.pid

    def copier(self, backend: BaseDevice, transform: Callable[[Any], Any] | None) -> Copier:
        """Return the copier of batches to the device."""
        if self._device_reader is None:
            return Copier(backend, transform)
        return BlockCopier(self._device_reader, transform)

    async def run(self) -> None:
        """Process the server's messages until cancelled."""
        self._connection = Connection(self._link.sock, received=self._received, lost=self._lost)
        loop = asyncio.get_running_loop()
        for message in self._early:
            self._send(message)
        # Messages that it sent before it died may still be on their way.
        self._link.process.call_at_end(lambda: loop.call_later(LAST_MESSAGES_S, self._lost, None))
        try:
            if self._device_reader is not None:
                # This thread opens and closes device memory.
                self._device_reader.backend.enter_thread()
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                for feed in self.iterators.collected():
                    self.end(feed)
                # Those that were dropped before a device copied them.
                for feed, serial in self._leases.collected():
                    self._confirm(feed, serial)
                if self._device_reader is not None:
                    self._device_reader.collect()
                self._warn_if_idle()
        finally:
            self._connection.close()
            if self._feed is not None:
                self._feed.queue.put(Stopped())
            self._messages.clear()
            self._close()

    def close_unused(self) -> None:
        """Close a subscription that has never run; from any thread."""
        if self._connection is None:
            self._close()

    def _close(self) -> None:
        self._ring = Ring()
        self._in_blocks.clear()
        if self._device_reader is not None:
            self._device_reader.close()
        release_unused()
        self._link.close()

    def _warn_if_idle(self) -> None:
        """Log once if batches wait for an epoch that no iterator has begun, and other consumers wait for this one."""
        now, waiting = time.monotonic(), 0
        if self._ticket is not None and (self._feed is None or self._feed.complete):
            waiting = sum(isinstance(message, BatchAvailable) for message in self._messages)
        if not waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > IDLE_S:
            self._idle_since = math.inf
            log.warning(
                "this process has ended an epoch of the server at %s and has not begun another for %.0f s: %d batches "
                "wait for it, and so do other consumers. Iterate the result of attach(), or close() it",
                self._link.address,
                IDLE_S,
                waiting,
            )

    # --- called by the feeds' iterators and copy threads, on the loop ---

    def begin(self, feed: EpochFeed) -> None:
        """Give messages to this feed from now on; it replaces the one before."""
        if (old := self._feed) is not None:
            self._replace(old)
        if self._error is not None:
            feed.queue.put(FeedFailure(self._error()))
            return
        self._feed = feed
        if self._ticket is None:
            self._ticket = next(self._tickets)
            self._send(messages.Join(self._ticket))
        self._pump()

    def end(self, feed: EpochFeed) -> None:
        """End a feed; in the middle of its epoch this process leaves the epoch."""
        self.iterators.forget(feed)
        feed.queue.put(Stopped())  # ends a copy thread that waits for the queue
        if feed is not self._feed or feed.superseded:
            return
        self._feed = None
        self.mark_started(feed)
        if not feed.complete:
            self._leave()

    def mark_started(self, feed: EpochFeed) -> None:
        """Note that a batch of a feed was returned, or none ever will be: ``Read`` is sent for each from now on."""
        if feed.started or feed.passed_on:
            return
        feed.started = True
        feed.messages.clear()
        for serial in feed.unconfirmed:
            self._send(messages.Read(serial))
        feed.unconfirmed.clear()

    def _count_taken(self, feed: EpochFeed, item: ReadyBatch) -> None:
        """Make room for one more batch of a feed, once per item."""
        if item.taken:
            return
        item.taken = True
        feed.room += 1
        if feed is self._feed:
            self._pump()

    def _replace(self, old: EpochFeed) -> None:
        """End a feed that a new one follows. If it has not started, its messages are put back for the new one."""
        self.iterators.forget(old)
        self._feed = None
        has_batches = any(isinstance(message, BatchAvailable) for message in old.messages)
        if not old.started and (not old.complete or has_batches):
            old.passed_on = True
            self._messages.extendleft(reversed(old.messages))
        elif not old.complete:
            self._leave()
        drop_batches(old.queue)

    def _leave(self) -> None:
        if self._ticket is None:
            return
        self._send(messages.Leave(self._ticket))
        self._ticket = None
        for message in self._messages:
            if isinstance(message, BatchAvailable):
                self._send(messages.Read(message.serial))
        self._messages.clear()

    def _confirm(self, feed: EpochFeed, serial: int) -> None:
        """Note that a feed has read a batch, or never will. Idempotent."""
        if serial not in feed.unread or feed.passed_on:
            return
        feed.unread.discard(serial)
        if feed.started:
            self._send(messages.Read(serial))
        else:
            feed.unconfirmed.append(serial)

    def _send(self, message: messages.FromConsumer) -> None:
        if isinstance(message, messages.Read):
            self._in_blocks.pop(message.serial, None)
        if self._connection is None:
            self._early.append(message)
        else:
            self._connection.send(encode(message))

    # --- messages of the server ---

    def _received(self, payload: bytes, memory: list[Any]) -> None:
        message = messages.decode_from_server(payload)
        if isinstance(message, BatchAvailable):
            try:
                self._open_memory(message, memory)
            except HandleError as error:
                self.host_only = True
                raise ProtocolError(
                    f"its device memory cannot be opened ({error}): after close(), iterate again without it"
                ) from None
        elif memory:
            raise ProtocolError(f"{type(message).__name__} with memory")
        if isinstance(message, messages.EpochMessage):
            if message.ticket != self._ticket:
                if isinstance(message, BatchAvailable):
                    self._send(messages.Read(message.serial))
                return
            self._messages.append(message)
            self._pump()
        elif isinstance(message, messages.Disconnected):
            self._end(message.reason)
        else:
            raise ProtocolError("a second Welcome")

    def _end(self, reason: str) -> None:
        """End with a reason, because the server closes the connection. Batches that it has sent are still returned."""
        try:
            if self._device_reader is not None:
                self._device_reader.save(list(self._in_blocks.values()))
        except (FeedError, TimeoutError, RuntimeError) as error:  # RuntimeError: no device memory left, for example
            # An iterator whose batch was lost gets an error when it copies that.
            log.warning("the last batches of the server at %s may be lost: %s", self._link.address, error)
        self._disconnect(lambda: FeedError(f"the server at {self._link.address} has closed the connection: {reason}"))

    def _lost(self, error: Exception | None) -> None:
        if error is None:
            self._disconnect(lambda: server_died(*self.server))
        elif isinstance(error, ConnectionError):
            self._disconnect(lambda: FeedError(f"lost the connection to the server at {self._link.address}: {error}"))
        else:
            # This process has closed the connection, so the server may reuse the slots of the waiting batches.
            self._messages.clear()
            self._disconnect(lambda: FeedError(f"refused a message of the server at {self._link.address}: {error}"))

    def _fail(self, error: BaseException) -> None:
        self._messages.clear()
        self._disconnect(
            lambda: FeedError(f"a batch of the server at {self._link.address} cannot be received: {error}")
        )

    def _disconnect(self, make_error: Callable[[], FeedError]) -> None:
        """Close the connection. The feed gets the first error given here, after the messages that wait."""
        assert self._connection is not None
        self._connection.close()
        if self._error is None:
            self._error = make_error
            self._pump()

    # --- from the server's messages to the feed ---

    def _pump(self) -> None:
        """Give the feed the messages that it has room for."""
        feed = self._feed
        while feed is not None and not feed.complete and not self._busy:
            if not self._messages:
                if self._error is not None:
                    self._feed = None
                    feed.queue.put(FeedFailure(self._error()))
                return
            message = self._messages[0]
            if isinstance(message, BatchAvailable) and not feed.room:
                return
            self._messages.popleft()
            if not feed.started:
                feed.messages.append(message)
            if isinstance(message, messages.EpochStarted):
                feed.epoch = self.epoch = message.epoch
                self.batches = message.batches
            elif isinstance(message, BatchAvailable):
                feed.room -= 1
                feed.unread.add(message.serial)
                self._receive(feed, message)
            elif message.error is None:
                feed.complete = True
                feed.queue.put(EndOfEpoch())
            else:
                feed.queue.put(FeedFailure(rebuild(message.error)))
                self._feed, self._ticket = None, None
                self.mark_started(feed)
                return

    # --- batches out of their slots ---

    def _open_memory(self, message: BatchAvailable, memory: list[Any]) -> None:
        """Map or open the memory that a message introduces, and forget the memory that it retires.

        Raises:
            ProtocolError: The memory is not as announced.
            HandleError: Device memory cannot be opened.
        """
        self._ring.map_segments(message.segments, memory, message.retired)
        if self._device_reader is not None:
            self._device_reader.open_blocks(message)
            if message.block >= 0:
                # `_end` may have to copy it before a feed takes it.
                self._in_blocks[message.serial] = self._device_reader.batch(message)
        elif message.block >= 0:
            raise ProtocolError("a batch in device memory, which this process has not opened")

    def _receive(self, feed: EpochFeed, message: BatchAvailable) -> None:
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
                self._busy = True
                job = asyncio.get_running_loop().run_in_executor(self._executor, copy)
                job.add_done_callback(partial(self._copied_in_thread, feed, message, lease))
                return
            batch, seconds = copy()
        except (ProtocolError, MemoryError) as error:
            self._fail(error)
            return
        self._copied(feed, message, lease, batch, seconds)

    def _receive_from_device(self, feed: EpochFeed, message: BatchAvailable) -> None:
        batch, lease = self._in_blocks[message.serial], self._lease(feed, message)
        ring = self._ring
        tree = batch.tree(message.batch, lambda node: copied_leaf(ring.view(node), node, None))
        self._put(feed, message, UncopiedBatch(batch, tree, lease), lease)

    def _lease(self, feed: EpochFeed, message: BatchAvailable) -> RingLease:
        lease = RingLease(asyncio.get_running_loop(), partial(self._confirm, feed, message.serial))
        # A batch that no device copies is dropped together with its lease.
        self._leases.watch(lease, (feed, message.serial))
        return lease

    def _copied_in_thread(
        self, feed: EpochFeed, message: BatchAvailable, lease: BufferLease, job: asyncio.Future[tuple[Any, float]]
    ) -> None:
        self._busy = False
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            self._fail(error)
            return
        self._copied(feed, message, lease, *job.result())
        self._pump()

    def _copied(self, feed: EpochFeed, message: BatchAvailable, lease: BufferLease, batch: Any, seconds: float) -> None:
        feed.counters.copy_s += seconds
        feed.counters.jobs_s += seconds
        self._put(feed, message, batch, lease if self._has_device else None)
        self._confirm(feed, message.serial)

    def _put(self, feed: EpochFeed, message: BatchAvailable, batch: Any, lease: BufferLease | None) -> None:
        item = ReadyBatch(message.number, _rows(message.batch), batch, lease, counters=feed.counters)
        item.on_taken = partial(feed.loop_thread.call, self._count_taken, feed)
        feed.queue.put(item)


def _rows(batch: Node) -> int:
    """Return the number of samples: rows of the first array that has any; 0 if there is none."""
    for node in array_nodes(batch):
        if node.shape and (rows := node.shape[node.axes[0] if node.axes else 0]):
            return rows
    return 0
