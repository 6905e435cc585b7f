"""A connection between a worker process and its parent, for code without an event loop."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence

from aiofeed.processes.ipc.framing import Link, close_all

# The header has room for this much. Strings and small tensors are sent in the message itself.
_LIMIT_BYTES = (1 << 32) - 1


class Channel(Link):
    """A link whose messages wait until they are taken.

    Attributes:
        messages: Received messages that were not taken, each a payload and its descriptors.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _LIMIT_BYTES)
        self.messages: deque[tuple[bytes, list[int]]] = deque()

    def collect(self) -> None:
        """Receive the messages that have arrived."""
        try:
            self.messages.extend(self.receive())
        except BaseException:  # Ctrl-C: a part of the stream may be lost
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. Idempotent."""
        super().close()
        for _, descriptors in self.messages:
            close_all(descriptors)
        self.messages.clear()


def wait(channels: Sequence[Channel], timeout_s: float) -> None:
    """Wait until a channel has received something or has ended; send what is unsent meanwhile.

    A signal handler may raise out of it: while it waits without effect, else the channel is closed.
    """
    poll = select.poll()
    found = {channel.fileno(): channel for channel in channels if not channel.ended}
    for descriptor, channel in found.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
    for descriptor, events in poll.poll(timeout_s * 1000):
        if events & select.POLLOUT:
            found[descriptor].flush()
        if events & ~select.POLLOUT:
            found[descriptor].collect()
