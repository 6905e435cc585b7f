"""One consumer of a server: its connection, and what the server knows of it. On the server's loop.

An invalid message closes the connection, with a log line; other consumers are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from aiofeed.ipc.framing import Connection
from aiofeed.ipc.peers import ProcessMonitor
from aiofeed.ipc.schema import encode
from aiofeed.serving import messages

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A process that connects sends Hello within this time.
HANDSHAKE_S = 5.0
# A consumer that does not read its messages is dropped before they fill the server's memory.
_MAX_UNSENT = 4096


class Consumer:
    """One connection. Created on the running loop.

    Args:
        sock: Its connected socket, closed with the consumer.
        pid: Its process; 0 if that cannot be seen from here.
        received: Called with each message; may raise ``ProtocolError``.
        gone: Called when the connection has ended, with whether the process may still read batches.

    Attributes:
        greeted: Whether the handshake is complete.
        ticket: Ticket of its subscription; ``None`` if it is not subscribed.
        fed_ticket: The ticket in the messages of the epoch that it takes part in; -1 before its first epoch.
        known: Numbers of the segments that it has mapped.
        batches: How many were sent to it.
        probe: The device memory that it was given to try.
        on_device: Whether it reads batches in the server's device memory.
    """

    def __init__(
        self,
        sock: socket.socket,
        pid: int,
        *,
        received: Callable[[Consumer, messages.FromConsumer], None],
        gone: Callable[[Consumer, bool], None],
    ) -> None:
        self.pid = pid
        self.greeted: bool = False
        self.on_device: bool = False
        self.ticket: int | None = None
        self.fed_ticket = -1
        self.known: set[int] = set()
        self.batches = 0
        self.probe: messages.Probe | None = None
        self._gone = gone
        self._connection = Connection(
            sock,
            received=lambda payload, _: received(self, messages.decode_from_consumer(payload)),
            lost=self._lost,
            limit_bytes=messages.MAX_CONSUMER_BYTES,
            limit_descriptors=0,
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
        self._gone(self, reading)

    def greet(self, welcome: messages.Welcome) -> None:
        """Complete the handshake."""
        self._handshake_timer.cancel()
        self.greeted = True
        self.send(welcome)

    def _handshake_timed_out(self) -> None:
        log.warning("closing the connection of process %d: it sent nothing for %.0f s", self.pid, HANDSHAKE_S)
        self.close()

    def _lost(self, error: Exception | None) -> None:
        # If its process runs, it may still return batches that it has received.
        self.close(reading=error is not None or self.alive)
