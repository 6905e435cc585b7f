"""A consumer's side of the ring, on its loop: batches arrive, are copied out, and wait for an iterator.

What a server says arrives in order: an epoch begins, its batches, its end, the next epoch. It waits here until an
iterator (a ``Pass``) takes it, epoch by epoch; what waits here stays in its slot. A pass takes a few batches ahead. It
gives their slots back at once, but not before the first batch was handed out: an iterator that was given up before
that leaves its epoch to the next one, as a feeder's does.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.counters import Counters
from aiofeed.errors import FeedError, WorkerDiedError
from aiofeed.executor import ThreadPool
from aiofeed.handoff import Handoff
from aiofeed.items import Closed, Ended, Failed, Item, Ready, drop_batches
from aiofeed.sharing.failures import rebuild
from aiofeed.sharing.messages import Items, Leaf, Named, Node, Table, encode
from aiofeed.sharing.packing import copied, in_place, unpack
from aiofeed.sharing.peers import ProcessWatch, peer_of
from aiofeed.sharing.remote import INLINE_BYTES, RingLease
from aiofeed.sharing.slots import Ring, release_unused
from aiofeed.sharing.talk import (
    MAX_BATCH_BYTES,
    Begins,
    Ends,
    Fails,
    Farewell,
    FromConsumer,
    Given,
    Join,
    Leave,
    Read,
    Refused,
    decode_from_server,
)
from aiofeed.sharing.wire import Wire, WireError
from aiofeed.staging import HostMemory, Memory

if TYPE_CHECKING:
    from aiofeed.device import DeviceBackend

# Iterators that were dropped are noticed within this.
HEARTBEAT_S = 0.05
# What a server that has ended said before it did is read within this.
LAST_WORDS_S = 0.2

_Word = Begins | Given | Ends | Fails


class Pass:
    """One epoch on its way to one iterator.

    Args:
        room: batches that may wait in memory of this process.

    Attributes:
        superseded: a newer iterator follows it, and takes over what it has not touched.
        touched: whether a batch was handed out.
        complete: whether the end of the epoch is in the handoff.
        handed_on: its batches are the next pass's.
        unread: slots that it has not read.
        words: what it was told while untouched.
        withheld: slots that it has read while untouched.
    """

    def __init__(self, room: int) -> None:
        self.handoff: Handoff[Item] = Handoff()
        self.counters = Counters()
        self.epoch = -1
        self.room = room
        self.superseded = self.touched = self.complete = self.handed_on = False
        self.words: list[_Word] = []
        self.unread: set[int] = set()
        self.withheld: list[int] = []


class Attachment:
    """One connection to a server, and the ring behind it.

    Args:
        sock: greeted already; closed with the attachment.
        path: where the server is, for errors.
        backend: the device that copies from the ring; ``None``: batches are copied to memory of this process.
        memory: for those copies.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        executor: copies large batches.
        begun: called with (epoch, batches) when a pass begins one.
    """

    def __init__(
        self,
        sock: socket.socket,
        path: Path,
        *,
        backend: DeviceBackend | None,
        memory: Memory,
        wrap: Callable[[Any], Any],
        executor: ThreadPool,
        begun: Callable[[int, int], object],
    ) -> None:
        self._sock: socket.socket | None = sock
        self._path = path
        self._server = peer_of(sock).pid
        self._ring = Ring(backend)
        self._device = backend is not None
        self._memory = memory
        self._wrap = wrap
        self._executor = executor
        self._begun = begun
        self._wire: Wire | None = None
        self._early: list[FromConsumer] = []
        self._tickets = itertools.count()
        self._ticket: int | None = None
        self._words: deque[_Word] = deque()
        self._pass: Pass | None = None
        self._copying = False
        self._error: Callable[[], FeedError] | None = None
        self._dropped: deque[object] = deque()
        self._watched: dict[Any, Pass] = {}
        self._unused: deque[object] = deque()
        self._leases: dict[Any, tuple[Pass, int]] = {}

    async def run(self) -> None:
        """Listen to the server until cancelled."""
        sock, self._sock = self._sock, None
        assert sock is not None
        self._wire = Wire(sock, received=self._received, lost=self._lost, limit_bytes=MAX_BATCH_BYTES)
        for message in self._early:
            self._send(message)
        loop = asyncio.get_running_loop()
        # Its last words may still be on their way.
        watch = ProcessWatch(self._server, lambda: loop.call_later(LAST_WORDS_S, self._lost, None))
        try:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                while self._dropped:
                    gone = self._watched.pop(self._dropped.popleft(), None)
                    if gone is not None:
                        self.end(gone)
                while self._unused:
                    self._read(*self._leases.pop(self._unused.popleft()))
        finally:
            watch.close()
            self._wire.close()
            if self._pass is not None:
                self._pass.handoff.put(Closed())
            self._ring = Ring()
            self._words.clear()
            release_unused()

    def close_unused(self) -> None:
        """Close a connection that ``run`` never took; from any thread."""
        if self._sock is not None:
            self._sock.close()

    def watch(self, pass_: Pass, owner: object) -> None:
        """End a pass when ``owner`` is dropped; from any thread."""
        # No Python code runs in the collector: the reference lands in a deque.
        self._watched[weakref.ref(owner, self._dropped.append)] = pass_

    # --- what passes want; on the loop ---

    def begin(self, pass_: Pass) -> None:
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

    def end(self, pass_: Pass) -> None:
        """A pass wants no more."""
        self._forget(pass_)
        pass_.handoff.put(Closed())  # a copy thread that waits there ends
        if pass_ is not self._pass or pass_.superseded:
            return
        self._pass = None
        self.touch(pass_)
        if not pass_.complete:
            self._leave()

    def touch(self, pass_: Pass) -> None:
        """A batch of a pass was handed out, or never will be: slots go back as soon as they are read."""
        if pass_.touched or pass_.handed_on:
            return
        pass_.touched = True
        pass_.words.clear()
        for serial in pass_.withheld:
            self._send(Read(serial))
        pass_.withheld.clear()

    def took(self, pass_: Pass) -> None:
        """A batch of a pass has left the host's queue: there is room for one more."""
        pass_.room += 1
        if pass_ is self._pass:
            self._pump()

    def _settle(self, old: Pass) -> None:
        """Another pass follows: what the old one has not touched is the new one's."""
        self._forget(old)
        self._pass = None
        if not old.touched and (not old.complete or any(isinstance(word, Given) for word in old.words)):
            old.handed_on = True
            self._words.extendleft(reversed(old.words))
        elif not old.complete:
            self._leave()
        drop_batches(old.handoff)

    def _forget(self, pass_: Pass) -> None:
        for reference in [each for each, watched in list(self._watched.items()) if watched is pass_]:
            del self._watched[reference]

    def _leave(self) -> None:
        if self._ticket is None:
            return
        self._send(Leave(self._ticket))
        self._ticket = None
        for word in self._words:
            if isinstance(word, Given):
                self._send(Read(word.serial))
        self._words.clear()

    def _read(self, pass_: Pass, serial: int) -> None:
        """A pass has copied a batch out of its slot, or never will. Idempotent."""
        if serial not in pass_.unread or pass_.handed_on:
            return
        pass_.unread.discard(serial)
        if pass_.touched:
            self._send(Read(serial))
        else:
            pass_.withheld.append(serial)

    def _send(self, message: FromConsumer) -> None:
        if self._wire is None:
            self._early.append(message)
        else:
            self._wire.send(encode(message))

    # --- what the server says ---

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_from_server(payload)
        self._ring.learn(message.segments if isinstance(message, Given) else [], descriptors)
        if isinstance(message, Given):
            self._ring.forget(message.retired)
        if isinstance(message, Begins | Given | Ends | Fails):
            if message.ticket != self._ticket:
                if isinstance(message, Given):
                    self._send(Read(message.serial))
                return
            self._words.append(message)
            self._pump()
        elif isinstance(message, Farewell):
            self._end(f"the server at {self._path} has ended: {message.reason}")
        elif isinstance(message, Refused):
            self._end(f"the server at {self._path} let this process go: {message.reason}")
        else:
            raise WireError("a second Welcome")

    def _end(self, text: str) -> None:
        """The server has said its last word; what it gave before is still handed out."""
        assert self._wire is not None
        self._wire.close()
        self._broken(lambda: FeedError(text))

    def _lost(self, error: Exception | None) -> None:
        assert self._wire is not None
        self._wire.close()
        if error is None:
            who = f" (pid {self._server})" if self._server else ""
            text = f"the server at {self._path}{who} has died: start it again, and attach again"
            self._broken(lambda: WorkerDiedError(text))
        else:
            self._broken(lambda: FeedError(f"what the server at {self._path} sent was refused: {error}"))

    def _broken(self, make: Callable[[], FeedError]) -> None:
        if self._error is None:
            self._error = make
            self._pump()

    def _put_error(self, pass_: Pass) -> None:
        assert self._error is not None
        pass_.handoff.put(Failed(self._error()))

    # --- from the ring to the iterator ---

    def _pump(self) -> None:
        pass_ = self._pass
        while pass_ is not None and not pass_.complete and not self._copying:
            if not self._words:
                if self._error is not None:
                    self._pass = None
                    self._put_error(pass_)
                return
            word = self._words[0]
            if isinstance(word, Given) and not pass_.room:
                return
            self._words.popleft()
            if not pass_.touched:
                pass_.words.append(word)
            if isinstance(word, Begins):
                pass_.epoch = word.epoch
                self._begun(word.epoch, word.batches)
            elif isinstance(word, Given):
                pass_.room -= 1
                pass_.unread.add(word.serial)
                self._take(pass_, word)
            elif isinstance(word, Ends):
                pass_.complete = True
                pass_.handoff.put(Ended())
            else:
                self._pass, self._ticket = None, None
                self.touch(pass_)
                pass_.handoff.put(Failed(rebuild(word.error)))

    def _take(self, pass_: Pass, given: Given) -> None:
        """A batch out of its slot; on its way to a device it may stay there."""
        try:
            if self._ring.pinned:
                lease: Any = RingLease(asyncio.get_running_loop(), partial(self._read, pass_, given.serial))
                # One that nobody copies from is dropped.
                self._leases[weakref.ref(lease, self._unused.append)] = pass_, given.serial
                self._put(pass_, given, unpack(given.batch, self._in_place), lease)
                return
            lease = self._memory.lease()
            copy = partial(_copy_out, self._ring, given.batch, lease, self._wrap)
            if given.nbytes > INLINE_BYTES:
                self._copying = True
                job = asyncio.get_running_loop().run_in_executor(self._executor, copy)
                job.add_done_callback(partial(self._copied, pass_, given, lease))
                return
            batch, seconds = copy()
        except (WireError, MemoryError) as error:
            self._refuse(error)
            return
        self._done(pass_, given, lease, batch, seconds)

    def _copied(self, pass_: Pass, given: Given, lease: Any, job: asyncio.Future[tuple[Any, float]]) -> None:
        self._copying = False
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            self._refuse(error)
            return
        self._done(pass_, given, lease, *job.result())
        self._pump()

    def _done(self, pass_: Pass, given: Given, lease: Any, batch: Any, seconds: float) -> None:
        pass_.counters.copy_s += seconds
        self._put(pass_, given, batch, lease if self._device else None)
        self._read(pass_, given.serial)

    def _put(self, pass_: Pass, given: Given, batch: Any, lease: Any) -> None:
        item = Ready(given.number, _rows(given.batch), batch, lease, counters=pass_.counters)
        item.release = lambda _: self.took(pass_)
        pass_.handoff.put(item)

    def _in_place(self, leaf: Leaf) -> Any:
        return in_place(self._ring.view(leaf), leaf, pinned=True, lease=_private)

    def _refuse(self, error: BaseException) -> None:
        assert self._wire is not None
        self._wire.close()
        self._words.clear()
        self._broken(lambda: FeedError(f"a batch of the server at {self._path} cannot be taken: {error}"))


# What stays on the host beside a batch on a device. It keeps nothing.
_private = HostMemory(0)


def _copy_out(ring: Ring, node: Node, lease: Any, wrap: Callable[[Any], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    batch = wrap(unpack(node, lambda leaf: copied(ring.view(leaf), leaf, lease)))
    return batch, time.perf_counter() - started


def _rows(node: Node) -> int:
    """Samples of a batch: rows of its first array; 0 where it has none."""
    if isinstance(node, Leaf):
        if not node.shape:
            return 0
        return node.shape[node.axes[0] if node.axes else 0]
    if isinstance(node, Items | Table | Named):
        return next((rows for item in node.items if (rows := _rows(item))), 0)
    return 0
