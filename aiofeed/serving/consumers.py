"""One consumer of a server: its connection, its handshake and its messages. On the server's loop.

An invalid message closes the connection, with a log line; other consumers are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from aiofeed.ipc.framing import Connection, ProtocolError
from aiofeed.ipc.peers import ProcessMonitor
from aiofeed.ipc.schema import encode
from aiofeed.serving import messages

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A process that connects sends Hello within this time.
HANDSHAKE_S = 5.0
# A consumer that does not read its messages is dropped before they fill the server's memory.
_MAX_UNSENT = 4096


class ConsumerOwner(Protocol):
    """The server of a consumer."""

    changed: asyncio.Event
    """Set when a consumer's state has changed."""

    def welcome(self) -> messages.Welcome:
        """Return the answer to a consumer's greeting."""

    def probe(self, consumer: Consumer) -> messages.Probe:
        """Return a test of whether a consumer can read the server's device memory."""

    def left(self, consumer: Consumer) -> None:
        """Note that a consumer has ended its subscription."""

    def read(self, consumer: Consumer, serial: int) -> None:
        """Note that a consumer has read a batch."""

    def gone(self, consumer: Consumer, *, reading: bool) -> None:
        """Forget a consumer whose connection has ended; ``reading``: its process may still read batches."""


class Consumer:
    """One connection. Created on the running loop.

    Args:
        sock: Its connected socket, closed with the consumer.
        pid: Its process; 0 if that cannot be seen from here.
        hub: The server.

    Attributes:
        greeted: Whether the handshake is complete.
        ticket: Ticket of its subscription; ``None`` if it is not subscribed.
        fed_ticket: The ticket in the messages of the epoch that it takes part in; -1 before its first epoch.
        known: Numbers of the segments that it has mapped.
        batches: How many were sent to it.
        on_device: Whether it reads batches in the server's device memory.
    """

    def __init__(self, sock: socket.socket, pid: int, hub: ConsumerOwner) -> None:
        self.pid = pid
        self.greeted: bool = False
        self.on_device: bool = False
        self.ticket: int | None = None
        self.fed_ticket = -1
        self.known: set[int] = set()
        self.batches = 0
        self._hub = hub
        self._probe: messages.Probe | None = None
        self._connection = Connection(
            sock, received=self._received, lost=self._lost, limit_bytes=messages.MAX_CONSUMER_BYTES, limit_descriptors=0
        )
        self._process = ProcessMonitor(pid)
        self._process.call_at_end(self.close)
        self._handshake_timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._handshake_timed_out)

    @property
    def fed(self) -> bool:
        """Whether it takes part in the current epoch."""
        return self.ticket is not None and self.fed_ticket == self.ticket

    @property
    def alive(self) -> bool:
        """Whether its process runs; a killed one that has not ended yet does not."""
        return self._process.alive()

    def send(self, message: messages.FromServer, memory: Sequence[Any] = ()) -> None:
        """Send a message; does nothing once the consumer is gone."""
        self._connection.send(encode(message), memory)
        if self._connection.unsent > _MAX_UNSENT:
            log.warning("dropping consumer %d: it does not read its messages", self.pid)
            self.close(reading=True)

    def dismiss(self, reason: str) -> None:
        """Close the connection, with a reason for the consumer."""
        self.send(messages.Disconnected(reason))
        self.close(reading=True)

    def close(self, *, reading: bool = False) -> None:
        """Close the connection. Idempotent.

        Args:
            reading: Whether the consumer may still read its slots, which are then not written again.
        """
        self._handshake_timer.cancel()
        self._process.close()
        self._connection.close()
        self.ticket = None
        self._hub.gone(self, reading=reading)

    def _handshake_timed_out(self) -> None:
        log.warning("closing the connection of process %d: it sent nothing for %.0f s", self.pid, HANDSHAKE_S)
        self.close()

    def _lost(self, error: Exception | None) -> None:
        # If its process runs, it may still return batches that it has received.
        self.close(reading=error is not None or self.alive)

    def _received(self, payload: bytes, memory: list[Any]) -> None:
        message = messages.decode_from_consumer(payload)
        if not self.greeted:
            self._greet(message)
        elif isinstance(message, messages.Join):
            if self.ticket is not None:
                raise ProtocolError("a second Join without a Leave")
            self.ticket = message.ticket
            self._hub.changed.set()
        elif isinstance(message, messages.Leave):
            # A subscription that failed in the meantime has ended already.
            if self.ticket == message.ticket:
                self.ticket = None
                self._hub.left(self)
        elif isinstance(message, messages.Read):
            self._hub.read(self, message.serial)
        elif isinstance(message, messages.ProbeRequest):
            self._send_probe()
        elif isinstance(message, messages.ProbeResult):
            self._receive_probe_result(message.reason)
        else:
            raise ProtocolError("a second Hello")

    def _greet(self, message: object) -> None:
        if not isinstance(message, messages.Hello):
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if message.version != messages.VERSION:
            log.warning(
                "process %d uses protocol version %d, this server %d", self.pid, message.version, messages.VERSION
            )
            self.dismiss(
                f"it uses protocol version {messages.VERSION}, and this process version {message.version}: "
                f"install the same version of aiofeed for both"
            )
            return
        self._handshake_timer.cancel()
        self.greeted = True
        self.send(self._hub.welcome())

    def _send_probe(self) -> None:
        if self._probe is not None or self.fed_ticket >= 0 or self.ticket is not None:
            raise ProtocolError("a second ProbeRequest, or one after Join")
        self._probe = probe = self._hub.probe(self)
        self.send(probe)

    def _receive_probe_result(self, reason: str) -> None:
        if self._probe is None or self._probe.block is None or self.on_device:
            raise ProtocolError("a ProbeResult without a Probe")
        self._probe = messages.Probe(None)
        self.on_device = not reason
        if reason:
            log.warning(
                "consumer %d gets batches through host memory: it cannot open the server's device memory (%s)",
                self.pid,
                reason[: messages.MAX_REASON_LETTERS],
            )
