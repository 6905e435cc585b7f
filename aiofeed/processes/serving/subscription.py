"""A consumer's side of the ring, on its loop: batches arrive, are copied out, and wait for an iterator.

What a server says arrives in order: an epoch begins, its batches, its end, the next epoch. It waits here until an
iterator (an ``EpochFeed``) takes it, epoch by epoch; what waits here stays in its slot. It takes a few ahead. It
gives their slots back at once, but not before the first batch was handed out: an iterator that was given up before
that leaves its epoch to the next one, as a feeder's does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.cuda_ipc import HandleError
from aiofeed.processes.ipc.error_codec import rebuild
from aiofeed.processes.ipc.framing import Connection, ProtocolError
from aiofeed.processes.ipc.peers import ProcessLiveness, ProcessWatch, died, peer_of
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.serving.epoch_feed import EpochFeed, Idleness, IteratorTracker, Word
from aiofeed.processes.serving.protocol import (
    MAX_BATCH_BYTES,
    BatchAvailable,
    ConsumerRefused,
    EpochEnded,
    EpochFailed,
    EpochStarted,
    FromConsumer,
    Join,
    Leave,
    Read,
    ServerClosed,
    decode_from_server,
)
from aiofeed.processes.serving.receiver import BatchReceiver
from aiofeed.runtime.queue import EndOfEpoch, FeedFailure, Stopped, drop_batches

log = logging.getLogger("aiofeed.processes")

# Iterators that were dropped are noticed within this.
HEARTBEAT_S = 0.05
# What a server that has ended said before it did is read within this.
LAST_WORDS_S = 0.2


class Subscription:
    """One connection to a server, and the ring behind it.

    Args:
        sock: greeted already; closed with the attachment.
        path: where the server is, for errors.
        taker: takes batches out of their slots; closed with the attachment.
        liveness: of the server; closed with the attachment.
        begun: called with (epoch, batches) when a pass begins one.

    Attributes:
        taker: as given.
        owners: the iterators that passes are for.
        host_only: device memory of this server could not be opened: attach without it.
    """

    def __init__(
        self,
        sock: socket.socket,
        path: Path,
        *,
        taker: BatchReceiver,
        liveness: ProcessLiveness,
        begun: Callable[[int, int], object],
    ) -> None:
        self._sock: socket.socket | None = sock
        self._path = path
        self._server = peer_of(sock).pid
        self.taker = taker
        self._liveness = liveness
        taker.read, taker.took, taker.refuse, taker.resume = self._read, self.took, self._refuse, self._pump
        self._begun = begun
        self.host_only = False
        self._wire: Connection | None = None
        self._early: list[FromConsumer] = []
        self._tickets = itertools.count()
        self._ticket: int | None = None
        self._words: deque[Word] = deque()
        self._pass: EpochFeed | None = None
        self._error: Callable[[], FeedError] | None = None
        self.owners = IteratorTracker()
        self._idleness = Idleness(path)

    async def run(self) -> None:
        """Listen to the server until cancelled."""
        sock, self._sock = self._sock, None
        assert sock is not None
        self._wire = Connection(sock, received=self._received, lost=self._lost, limit_bytes=MAX_BATCH_BYTES)
        loop = asyncio.get_running_loop()
        for message in self._early:
            self._send(message)
        # Its last words may still be on their way.
        watch = ProcessWatch(self._server, lambda: loop.call_later(LAST_WORDS_S, self._lost, None))
        try:
            self.taker.enter_thread()
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                for dropped in self.owners.dropped():
                    self.end(dropped)
                self.taker.collect()
                idle = self._ticket is not None and (self._pass is None or self._pass.complete)
                self._idleness.look(sum(isinstance(word, BatchAvailable) for word in self._words) if idle else 0)
        finally:
            watch.close()
            self._wire.close()
            if self._pass is not None:
                self._pass.queue.put(Stopped())
            self._words.clear()
            self.taker.close()
            self._liveness.close()

    def close_unused(self) -> None:
        """Close a connection that ``run`` never took; from any thread."""
        if self._sock is not None:
            self._sock.close()
            self.taker.close()
            self._liveness.close()

    # --- what passes want; on the loop ---

    def begin(self, pass_: EpochFeed) -> None:
        """Feed a pass from now on; the one before is over."""
        if (old := self._pass) is not None:
            self._settle(old)
        if self._error is not None:
            self._put_error(pass_)
            return
        self._pass = pass_
        if self._ticket is None:
            self._ticket = next(self._tickets)
            self._send(Join(self._ticket))
        self._pump()

    def end(self, pass_: EpochFeed) -> None:
        """A pass wants no more."""
        self.owners.forget(pass_)
        pass_.queue.put(Stopped())  # a copy thread that waits there ends
        if pass_ is not self._pass or pass_.superseded:
            return
        self._pass = None
        self.touch(pass_)
        if not pass_.complete:
            self._leave()

    def touch(self, pass_: EpochFeed) -> None:
        """A batch of a pass was handed out, or never will be: slots go back as soon as they are read."""
        if pass_.touched or pass_.handed_on:
            return
        pass_.touched = True
        pass_.words.clear()
        for serial in pass_.withheld:
            self._send(Read(serial))
        pass_.withheld.clear()

    def took(self, pass_: EpochFeed) -> None:
        """A batch of a pass has left the host's queue: there is room for one more."""
        pass_.room += 1
        if pass_ is self._pass:
            self._pump()

    def _settle(self, old: EpochFeed) -> None:
        """Another pass follows: what the old one has not touched is the new one's."""
        self.owners.forget(old)
        self._pass = None
        if not old.touched and (not old.complete or any(isinstance(word, BatchAvailable) for word in old.words)):
            old.handed_on = True
            self._words.extendleft(reversed(old.words))
        elif not old.complete:
            self._leave()
        drop_batches(old.queue)

    def _leave(self) -> None:
        if self._ticket is None:
            return
        self._send(Leave(self._ticket))
        self._ticket = None
        for word in self._words:
            if isinstance(word, BatchAvailable):
                self._send(Read(word.serial))
        self._words.clear()

    def _read(self, pass_: EpochFeed, serial: int) -> None:
        """A pass has copied a batch out of its slot, or never will. Idempotent."""
        if serial not in pass_.unread or pass_.handed_on:
            return
        pass_.unread.discard(serial)
        if pass_.touched:
            self._send(Read(serial))
        else:
            pass_.withheld.append(serial)

    def _send(self, message: FromConsumer) -> None:
        if isinstance(message, Read):
            self.taker.forget(message.serial)
        if self._wire is None:
            self._early.append(message)
        else:
            self._wire.send(encode(message))

    # --- what the server says ---

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_from_server(payload)
        try:
            self.taker.learn(message if isinstance(message, BatchAvailable) else None, descriptors)
        except HandleError as error:
            self.host_only = True
            raise ProtocolError(
                f"its device memory cannot be opened ({error}): iterate again after close(), without it"
            ) from None
        if isinstance(message, EpochStarted | BatchAvailable | EpochEnded | EpochFailed):
            if message.ticket != self._ticket:
                if isinstance(message, BatchAvailable):
                    self._send(Read(message.serial))
                return
            self.taker.expect(message)
            self._words.append(message)
            self._pump()
        elif isinstance(message, ServerClosed):
            self._end(f"the server at {self._path} has ended: {message.reason}")
        elif isinstance(message, ConsumerRefused):
            self._end(f"the server at {self._path} let this process go: {message.reason}")
        else:
            raise ProtocolError("a second Welcome")

    def _end(self, text: str) -> None:
        """The server has said its last word; what it gave before is still handed out."""
        try:
            self.taker.settle()
        except (FeedError, TimeoutError, RuntimeError) as error:  # the last: a device that is out of memory, say
            # Whoever's turn it is hears of it then, or has it nevertheless.
            log.warning("the last batches of the server at %s may be lost: %s", self._path, error)
        self._break_off(lambda: FeedError(text))

    def _lost(self, error: Exception | None) -> None:
        if error is None:
            self._break_off(lambda: died(self._path, self._server))
        else:
            # This end has closed the connection, and the slots that waited here are the server's again.
            self._words.clear()
            self._break_off(lambda: FeedError(f"what the server at {self._path} sent was refused: {error}"))

    def _break_off(self, make: Callable[[], FeedError]) -> None:
        """Close the connection; a pass is told of the first reason for it, behind what is still here."""
        assert self._wire is not None
        self._wire.close()
        if self._error is None:
            self._error = make
            self._pump()

    def _put_error(self, pass_: EpochFeed) -> None:
        assert self._error is not None
        pass_.queue.put(FeedFailure(self._error()))

    # --- from the ring to the iterator ---

    def _pump(self) -> None:
        pass_ = self._pass
        while pass_ is not None and not pass_.complete and not self.taker.busy:
            if not self._words:
                if self._error is not None:
                    self._pass = None
                    self._put_error(pass_)
                return
            word = self._words[0]
            if isinstance(word, BatchAvailable) and not pass_.room:
                return
            self._words.popleft()
            if not pass_.touched:
                pass_.words.append(word)
            if isinstance(word, EpochStarted):
                pass_.epoch = word.epoch
                self._begun(word.epoch, word.batches)
            elif isinstance(word, BatchAvailable):
                pass_.room -= 1
                pass_.unread.add(word.serial)
                self.taker.take(pass_, word)
            elif isinstance(word, EpochEnded):
                pass_.complete = True
                pass_.queue.put(EndOfEpoch())
            else:
                self._pass, self._ticket = None, None
                self.touch(pass_)
                pass_.queue.put(FeedFailure(rebuild(word.error)))

    def _refuse(self, error: BaseException) -> None:
        self._words.clear()
        self._break_off(lambda: FeedError(f"a batch of the server at {self._path} cannot be taken: {error}"))
