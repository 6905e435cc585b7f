"""A server, on its event loop: it takes a feeder's batches and gives them to its consumers.

One task feeds: it waits for room in the ring, takes a batch, puts it into a slot and sends it to its readers. All else
are callbacks of the same loop: consumers connect, join, read, leave and end. So there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiofeed.ipc.address import Listener
from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.peers import Peer
from aiofeed.kernel.core.errors import as_exception
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.feeder.feeder import Feeder
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.serving import messages
from aiofeed.serving.consumers import Consumer
from aiofeed.serving.device_memory.device_ring import DeviceRing
from aiofeed.serving.published import BatchPublisher

log: logging.Logger = logging.getLogger("aiofeed.processes")

Mode = Literal["broadcast", "shard"]
Slow = Literal["wait", "drop"]
When = Literal["epoch", "batch"]

# How long a closed server waits for its consumers to disconnect.
CLOSE_S = 2.0
# A consumer that reads nothing for this long while others wait is named in the log.
STALLED_S = 10.0


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``aiofeed.serve``."""

    mode: Mode = "broadcast"
    lag: int = 4
    slow: Slow = "wait"
    join: When = "epoch"
    min_consumers: int = 1


class Hub:
    """Serves one feeder.

    Args:
        feeder: Iterated by the hub alone; ``iter`` runs in a thread of the executor.
        listener: Where consumers connect; closed with the hub.
        options: Options of ``aiofeed.serve``.
        executor: Copies large batches, and starts epochs.
        ring: Blocks on the device of the feeder's batches; ``None`` for batches in host memory.

    Attributes:
        publisher: The batches that consumers read.
        changed: Set when a consumer has joined, left or read a batch.
    """

    def __init__(
        self,
        feeder: Feeder[Any],
        listener: Listener,
        options: ServeOptions,
        executor: ThreadPool,
        ring: DeviceRing | None,
    ) -> None:
        self._feeder = feeder
        self._listener = listener
        self._options = options
        self._executor = executor
        self.publisher: BatchPublisher = BatchPublisher(options.lag + 1, ring, executor)
        self.changed: asyncio.Event = asyncio.Event()
        self._connections: list[Consumer] = []
        # Those that take part in the current epoch, in the order of their turns; and those named in the log.
        self._members: list[Consumer] = []
        self._warned: set[Consumer] = set()
        self._turn = 0
        self._epoch = -1

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers whose handshake is complete; a snapshot, for any thread."""
        return [consumer for consumer in list(self._connections) if consumer.greeted]

    # --- epochs ---

    async def run(self, epochs: int, *, go_on: bool) -> None:
        """Serve epochs, then close the connections.

        Args:
            epochs: Up to which epoch, as in ``Feeder.epochs``.
            go_on: Whether to continue with the next epoch after a failure, which every consumer gets.

        Raises:
            Exception: The error of the feeder.
        """
        with self.publisher.entered():
            reason = "the server was closed"
            try:
                self._listener.start_accepting(self._connected, self._connections)
                await self._wait_until(lambda: self._subscribed() >= self._options.min_consumers)
                for epoch in self._feeder.epochs(epochs):
                    await self._wait_until(lambda: self._subscribed() > 0)
                    try:
                        await self._feed(epoch)
                    except Exception as error:
                        self._fail(error)
                        if not go_on:
                            reason = f"its feeder failed: {format_error(error)}"
                            raise
                        log.error("epoch %d failed for all its consumers: %s", epoch, format_error(error))
                reason = "it has served all its epochs"
            finally:
                await self._close(reason)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def _subscribed(self) -> int:
        return sum(consumer.ticket is not None for consumer in self.consumers)

    async def _feed(self, epoch: int) -> None:
        """Serve one epoch to the subscribed consumers; leave it when all of them are gone."""
        self._epoch = epoch
        self._members = []
        self._turn = 0
        self._admit(0)
        iterator = await asyncio.get_running_loop().run_in_executor(self._executor, iter, self._feeder)
        try:
            number = 0
            while await self._wait_for_room():
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    for consumer in self._members:
                        consumer.send(messages.EpochEnded(consumer.fed_ticket))
                    return
                await self._publish(number, batch)
                del batch
                number += 1
                if self._options.join == "batch":
                    self._admit(number)
        finally:
            iterator.close()

    def _admit(self, number: int) -> None:
        """Let the waiting consumers take part from batch ``number`` of the epoch on."""
        new = [each for each in self.consumers if each.ticket is not None and each not in self._members]
        self._members.extend(new)
        for consumer in new if number else self._members:
            assert consumer.ticket is not None
            consumer.fed_ticket = consumer.ticket
            position = (self._members.index(consumer) - self._turn) % len(self._members)
            batches = self._batches_left(number, len(self._members), position)
            consumer.send(messages.EpochStarted(consumer.fed_ticket, self._epoch, batches))

    def _batches_left(self, number: int, members: int, position: int = 0) -> int | None:
        """Return how many batches a consumer gets, from batch ``number`` on; ``None`` if the feeder has no length."""
        try:
            left = len(self._feeder) - number
        except TypeError:
            return None
        if self._options.mode == "broadcast":
            return left
        return max(0, -(-(left - position) // members))

    def _fail(self, error: BaseException) -> None:
        message = describe(as_exception(error))
        members, self._members = self._members, []
        for consumer in members:
            consumer.ticket = None
            consumer.send(messages.EpochEnded(consumer.fed_ticket, message))

    async def _close(self, reason: str) -> None:
        self._listener.stop_accepting()
        self._listener.close()
        for consumer in list(self._connections):
            if consumer.greeted:
                consumer.send(messages.Disconnected(reason))
            else:
                consumer.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            while self._connections and loop.time() < deadline:
                self.changed.clear()
                await asyncio.wait_for(self.changed.wait(), deadline - loop.time())
        for consumer in list(self._connections):
            consumer.close(reading=consumer.alive)
        self.publisher.close()

    # --- batches ---

    async def _wait_for_room(self) -> bool:
        """Wait for a free slot; whether the epoch still has consumers."""
        while self._members and self.publisher.in_use >= self._options.lag:
            if self._options.slow == "drop":
                self._drop_slow()
                if self.publisher.in_use < self._options.lag:
                    break
            await self._wait_for_readers()
        return bool(self._members)

    async def _wait_for_readers(self) -> None:
        self.changed.clear()
        try:
            async with asyncio.timeout(STALLED_S):
                await self.changed.wait()
        except TimeoutError:
            for consumer, slots in self._slow().items():
                if consumer not in self._warned:
                    self._warned.add(consumer)
                    log.warning(
                        "consumer %d holds up the others: it has read none of its %d batches for %.0f s. Close a "
                        'consumer that is no longer iterated, or use slow="drop" to disconnect slow consumers',
                        consumer.pid,
                        slots,
                        STALLED_S,
                    )

    def _drop_slow(self) -> None:
        for consumer, slots in self._slow().items():
            log.warning("dropping consumer %d: it is %d batches behind", consumer.pid, slots)
            consumer.dismiss(
                f"this process was dropped: it fell {slots} batches behind another consumer, and the server has "
                f'slow="drop" and lag={self._options.lag}'
            )

    def _slow(self) -> dict[Consumer, int]:
        """Return who has read no batch in the ring, and their batches, if another one has read all of its own."""
        unread = {consumer: self.publisher.unread_by(consumer) for consumer in self._members}
        if 0 not in unread.values():
            return {}
        return {consumer: slots for consumer, slots in unread.items() if slots >= self._options.lag}

    async def _publish(self, number: int, value: Any) -> None:
        batch = await self.publisher.write(value, self._next_readers)
        readers = self._next_readers()
        if self._options.mode == "shard" and readers:
            self._turn = self._turn % len(self._members) + 1
        self.publisher.publish(batch, readers)
        for consumer in readers:
            try:
                message, memory = self.publisher.message(batch, consumer, number)
            except OSError as error:
                consumer.dismiss(f"the server can send no more memory: {error.strerror} (raise `ulimit -n` there)")
                continue
            consumer.send(message, memory)
            consumer.batches += 1

    def _next_readers(self) -> list[Consumer]:
        if self._options.mode == "broadcast" or not self._members:
            return list(self._members)
        return [self._members[self._turn % len(self._members)]]

    # --- messages of consumers ---

    def _connected(self, sock: socket.socket, peer: Peer) -> None:
        self._connections.append(Consumer(sock, peer.pid, received=self._received, gone=self._gone))

    def _received(self, consumer: Consumer, message: messages.FromConsumer) -> None:
        """Process a message; ``ProtocolError`` if it is out of turn."""
        if not consumer.greeted:
            self._greet(consumer, message)
        elif isinstance(message, messages.Join):
            if consumer.ticket is not None:
                raise ProtocolError("a second Join without a Leave")
            consumer.ticket = message.ticket
            self.changed.set()
        elif isinstance(message, messages.Leave):
            # A subscription that failed in the meantime has ended already.
            if consumer.ticket == message.ticket:
                consumer.ticket = None
                self._leave(consumer)
        elif isinstance(message, messages.Read):
            self.publisher.read(consumer, message.serial)
            self._warned.discard(consumer)
            self.changed.set()
        elif isinstance(message, messages.ProbeRequest):
            if consumer.probe is not None or consumer.fed_ticket >= 0 or consumer.ticket is not None:
                raise ProtocolError("a second ProbeRequest, or one after Join")
            consumer.probe = self.publisher.probe(consumer)
            consumer.send(consumer.probe)
        elif isinstance(message, messages.ProbeResult):
            self._receive_probe_result(consumer, message.reason)
        else:
            raise ProtocolError("a second Hello")

    def _greet(self, consumer: Consumer, message: messages.FromConsumer) -> None:
        ours = messages.VERSION
        if not isinstance(message, messages.Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if message.version == ours:
            batches = self._batches_left(0, self._options.min_consumers)
            consumer.greet(messages.Welcome(batches, self.publisher.device))
            return
        log.warning("process %d uses protocol version %d, this server %d", consumer.pid, message.version, ours)
        consumer.dismiss(
            f"it uses protocol version {ours}, and this process version {message.version}: "
            f"install the same version of aiofeed for both"
        )

    def _receive_probe_result(self, consumer: Consumer, reason: str) -> None:
        if consumer.probe is None or consumer.probe.block is None or consumer.on_device:
            raise ProtocolError("a ProbeResult without a Probe")
        consumer.probe = messages.Probe(None)
        consumer.on_device = not reason
        if reason:
            log.warning(
                "consumer %d gets batches through host memory: it cannot open the server's device memory (%s)",
                consumer.pid,
                reason[: messages.MAX_REASON_LETTERS],
            )

    def _leave(self, consumer: Consumer) -> None:
        """Take a consumer out of the epoch."""
        if consumer in self._members:
            at = self._members.index(consumer)
            del self._members[at]
            # The turn stays with the consumer that has it.
            self._turn -= at < self._turn
        self.changed.set()

    def _gone(self, consumer: Consumer, reading: bool) -> None:
        """Forget a consumer that has disconnected; see ``Consumer.close``."""
        if consumer in self._connections:
            self._connections.remove(consumer)
        self._warned.discard(consumer)
        self.publisher.gone(consumer, reading=reading)
        self._leave(consumer)
