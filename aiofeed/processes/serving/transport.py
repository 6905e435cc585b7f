"""How a server and its consumers reach each other: connected Unix sockets, before and after a loop uses them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, Connection, request, send_message
from aiofeed.processes.ipc.peers import Peer, ProcessMonitor


class Link:
    """One end of a connection that no loop uses yet.

    Attributes:
        pid: The process at the other end, for messages; 0 if it cannot be seen from here.
        process: Monitors that process. The user of the link closes it.
    """

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.pid: int = peer.pid
        self.process: ProcessMonitor = ProcessMonitor(peer.pid)
        self._sock = sock

    def ask(self, payload: bytes, timeout_s: float, limit_bytes: int) -> bytes:
        """Send a message and wait for the answer; errors of ``request``. Blocks."""
        return request(self._sock, payload, timeout_s=timeout_s, limit_bytes=limit_bytes, limit_descriptors=0)[0]

    def tell(self, payload: bytes) -> None:
        """Send a message; ``OSError`` if the peer is gone. Blocks."""
        send_message(self._sock, payload)

    def open(
        self,
        received: Callable[[bytes, list[int]], None],
        lost: Callable[[Exception | None], None],
        limit_bytes: int = MAX_MESSAGE_BYTES,
        limit_descriptors: int = 2 * MAX_DESCRIPTORS,
    ) -> Connection:
        """Send and receive on the running loop from now on; the arguments are those of ``Connection``."""
        return Connection(
            self._sock, received=received, lost=lost, limit_bytes=limit_bytes, limit_descriptors=limit_descriptors
        )

    def close(self) -> None:
        """Close a link that was not opened."""
        self._sock.close()
        self.process.close()
