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
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiofeed.ipc.cuda_ipc import HandleError
from aiofeed.ipc.error_codec import rebuild
from aiofeed.ipc.framing import Connection, ProtocolError
from aiofeed.ipc.peers import ProcessMonitor
from aiofeed.ipc.schema import encode
from aiofeed.kernel.core.errors import FeedError, WorkerDiedError
from aiofeed.kernel.runtime.buffers import DropTracker
from aiofeed.kernel.runtime.queue import EndOfEpoch, FeedFailure, Stopped, drop_batches
from aiofeed.serving import messages
from aiofeed.serving.receiver import BatchReceiver, EpochFeed

log: logging.Logger = logging.getLogger("aiofeed.processes")

# Interval of the checks for iterators that were dropped and slots that were read.
HEARTBEAT_S = 0.05
# After a server has died, its last messages are still read for this long.
LAST_MESSAGES_S = 0.2
# Between two epochs a consumer may run an evaluation; a longer pause is logged once.
IDLE_S = 10.0


def server_died(address: object, pid: int) -> WorkerDiedError:
    """Return the error for a server that ended without ``Disconnected``."""
    who = f" (pid {pid})" if pid else ""
    return WorkerDiedError(f"the server at {address}{who} has died: start it again, and attach again")


class Subscription:
    """A connection to a server.

    Args:
        sock: Connected, with the handshake complete; closed with the subscription, like the process and the receiver.
        process: That of the server.
        address: The server's address, for messages.
        receiver: Takes batches out of their slots.
        on_epoch: Called with (epoch, batches) when a feed starts an epoch.

    Attributes:
        iterators: The feeds' iterators; a feed ends when its iterator is dropped.
        host_only: Whether this server's device memory could not be opened; a new connection is to do without it.
    """

    def __init__(
        self,
        sock: socket.socket,
        process: ProcessMonitor,
        address: Path,
        *,
        receiver: BatchReceiver,
        on_epoch: Callable[[int, int | None], object],
    ) -> None:
        self._sock, self._process = sock, process
        self._address = address
        self.receiver = receiver
        receiver.on_read, receiver.on_taken = self._confirm, self.taken
        receiver.on_error, receiver.on_idle = self._fail, self._pump
        self._on_epoch = on_epoch
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

    @property
    def server(self) -> tuple[Path, int]:
        """The server's address and process."""
        return self._address, self._process.pid

    async def run(self) -> None:
        """Process the server's messages until cancelled."""
        self._connection = Connection(self._sock, received=self._received, lost=self._lost)
        loop = asyncio.get_running_loop()
        for message in self._early:
            self._send(message)
        # Messages that it sent before it died may still be on their way.
        self._process.call_at_end(lambda: loop.call_later(LAST_MESSAGES_S, self._lost, None))
        try:
            self.receiver.enter_thread()
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                for feed in self.iterators.collected():
                    self.end(feed)
                self.receiver.collect()
                self._warn_if_idle()
        finally:
            self._connection.close()
            if self._feed is not None:
                self._feed.queue.put(Stopped())
            self._messages.clear()
            self.receiver.close()
            self._process.close()

    def close_unused(self) -> None:
        """Close a subscription that has never run; from any thread."""
        if self._connection is None:
            self._sock.close()
            self._process.close()
            self.receiver.close()

    def _warn_if_idle(self) -> None:
        """Log once if batches wait for an epoch that no iterator has begun, and other consumers wait for this one."""
        between_epochs = self._ticket is not None and (self._feed is None or self._feed.complete)
        waiting = (
            sum(isinstance(message, messages.BatchAvailable) for message in self._messages) if between_epochs else 0
        )
        now = time.monotonic()
        if not waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > IDLE_S:
            self._idle_since = math.inf
            log.warning(
                "this process has ended an epoch of the server at %s and has not begun another for %.0f s: %d batches "
                "wait for it, and so do other consumers. Iterate the result of attach(), or close() it",
                self._address,
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

    def taken(self, feed: EpochFeed) -> None:
        """Make room for one more batch of a feed: one has left the host's queue."""
        feed.room += 1
        if feed is self._feed:
            self._pump()

    def _replace(self, old: EpochFeed) -> None:
        """End a feed that a new one follows. If it has not started, its messages are put back for the new one."""
        self.iterators.forget(old)
        self._feed = None
        has_batches = any(isinstance(message, messages.BatchAvailable) for message in old.messages)
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
            if isinstance(message, messages.BatchAvailable):
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
            self.receiver.forget(message.serial)
        if self._connection is None:
            self._early.append(message)
        else:
            self._connection.send(encode(message))

    # --- messages of the server ---

    def _received(self, payload: bytes, memory: list[Any]) -> None:
        message = messages.decode_from_server(payload)
        if isinstance(message, messages.BatchAvailable):
            try:
                self.receiver.open_memory(message, memory)
            except HandleError as error:
                self.host_only = True
                raise ProtocolError(
                    f"its device memory cannot be opened ({error}): after close(), iterate again without it"
                ) from None
        elif memory:
            raise ProtocolError(f"{type(message).__name__} with memory")
        if isinstance(message, messages.EpochMessage):
            if message.ticket != self._ticket:
                if isinstance(message, messages.BatchAvailable):
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
            self.receiver.save_waiting()
        except (FeedError, TimeoutError, RuntimeError) as error:  # RuntimeError: no device memory left, for example
            # An iterator whose batch was lost gets an error when it copies that.
            log.warning("the last batches of the server at %s may be lost: %s", self._address, error)
        self._disconnect(lambda: FeedError(f"the server at {self._address} has closed the connection: {reason}"))

    def _lost(self, error: Exception | None) -> None:
        if error is None:
            self._disconnect(lambda: server_died(self._address, self._process.pid))
        elif isinstance(error, ConnectionError):
            self._disconnect(lambda: FeedError(f"lost the connection to the server at {self._address}: {error}"))
        else:
            # This process has closed the connection, so the server may reuse the slots of the waiting batches.
            self._messages.clear()
            self._disconnect(lambda: FeedError(f"refused a message of the server at {self._address}: {error}"))

    def _fail(self, error: BaseException) -> None:
        self._messages.clear()
        self._disconnect(lambda: FeedError(f"a batch of the server at {self._address} cannot be received: {error}"))

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
        while feed is not None and not feed.complete and not self.receiver.busy:
            if not self._messages:
                if self._error is not None:
                    self._feed = None
                    feed.queue.put(FeedFailure(self._error()))
                return
            message = self._messages[0]
            if isinstance(message, messages.BatchAvailable) and not feed.room:
                return
            self._messages.popleft()
            if not feed.started:
                feed.messages.append(message)
            if isinstance(message, messages.EpochStarted):
                feed.epoch = message.epoch
                self._on_epoch(message.epoch, message.batches)
            elif isinstance(message, messages.BatchAvailable):
                feed.room -= 1
                feed.unread.add(message.serial)
                self.receiver.receive(feed, message)
            elif message.error is None:
                feed.complete = True
                feed.queue.put(EndOfEpoch())
            else:
                feed.queue.put(FeedFailure(rebuild(message.error)))
                self._feed, self._ticket = None, None
                self.mark_started(feed)
                return
