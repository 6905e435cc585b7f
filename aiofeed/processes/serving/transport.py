"""How a server and its consumers reach each other: interfaces, and Unix sockets. ``actors/serving.py`` has Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import SERVER, Listener, check_free, connect
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, Connection, request, send_message
from aiofeed.processes.ipc.peers import Peer, ProcessMonitor, peer_of
from aiofeed.processes.ipc.ring import SlotPool


class OpenLink(Protocol):
    """One end of an open connection, on the running loop; see ``Connection``."""

    @property
    def unsent(self) -> int:
        """Messages in the send queue."""
        ...

    def send(self, payload: bytes, memory: Sequence[Any] = (), /) -> None:
        """Queue a message, with the memory of its batch as ``Slot.introduce`` returns it."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


class Link(Protocol):
    """One end of a connection that no loop uses yet.

    Attributes:
        pid: The process at the other end, for messages; 0 if it cannot be seen from here.
        process: Monitors that process. The user of the link closes it.
    """

    pid: int
    process: ProcessMonitor

    def ask(self, payload: bytes, timeout_s: float, limit_bytes: int) -> bytes:
        """Send a message and wait for the answer; errors of ``request``. Blocks."""
        ...

    def tell(self, payload: bytes) -> None:
        """Send a message; ``OSError`` if the peer is gone. Blocks."""
        ...

    def open(
        self,
        received: Callable[[bytes, list[Any]], None],
        lost: Callable[[Exception | None], None],
        limit_bytes: int = MAX_MESSAGE_BYTES,
        limit_memory: int = 2 * MAX_DESCRIPTORS,
    ) -> OpenLink:
        """Send and receive on the running loop from now on; the arguments are those of ``Connection``."""
        ...

    def close(self) -> None:
        """Close a link that was not opened."""
        ...


class ServerListener(Protocol):
    """Where consumers connect to a server.

    Attributes:
        failure: Why it accepts no more consumers; it then cancels the task that called ``start_accepting``.
    """

    failure: FeedError | None

    def slots(self, keep: int, advice: str) -> SlotPool:
        """Memory that consumers can read."""
        ...

    def start_accepting(self, accepted: Callable[[Link], object], connections: Sized) -> None:
        """Accept consumers on the running loop; see ``Listener``."""
        ...

    def stop_accepting(self) -> None:
        """Accept no more consumers; on the same loop. Idempotent."""
        ...

    def close(self) -> None:
        """Free the address. Idempotent."""
        ...


class ServerAddress(Protocol):
    """An address of ``serve`` and ``attach``. ``FeedError`` if it is not free, or if no server listens there."""

    def check_free(self) -> None:
        """Check that no server listens there."""
        ...

    def listen(self) -> ServerListener:
        """Listen there."""
        ...

    def connect(self, wait_s: float) -> Link:
        """Connect to its server, which may start within ``wait_s``. Blocks."""
        ...


def socket_address(path: Path) -> ServerAddress:
    """The address of a server that listens at a path."""
    return _SocketAddress(path)


class _SocketAddress:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def check_free(self) -> None:
        check_free(self._path, SERVER)

    def listen(self) -> ServerListener:
        return _SocketListener(self._path)

    def connect(self, wait_s: float) -> Link:
        sock = connect(self._path, SERVER, wait_s)
        return _SocketLink(sock, peer_of(sock))


class _SocketListener:
    failure: FeedError | None = None

    def __init__(self, path: Path) -> None:
        self._listener = Listener(path, SERVER)
        self.close = self._listener.close

    def slots(self, keep: int, advice: str) -> SlotPool:
        return SlotPool(keep, advice, single_reader=False)

    def start_accepting(self, accepted: Callable[[Link], object], connections: Sized) -> None:
        self._listener.start_accepting(lambda sock, peer: accepted(_SocketLink(sock, peer)), connections)

    def stop_accepting(self) -> None:
        self._listener.stop_accepting()
        self._listener.close()


class _SocketLink:
    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.pid = peer.pid
        self.process = ProcessMonitor(peer.pid)
        self._sock = sock

    def ask(self, payload: bytes, timeout_s: float, limit_bytes: int) -> bytes:
        return request(self._sock, payload, timeout_s=timeout_s, limit_bytes=limit_bytes, limit_descriptors=0)[0]

    def tell(self, payload: bytes) -> None:
        send_message(self._sock, payload)

    def open(
        self, received: Any, lost: Any, limit_bytes: int = MAX_MESSAGE_BYTES, limit_memory: int = 2 * MAX_DESCRIPTORS
    ) -> OpenLink:
        return Connection(
            self._sock, received=received, lost=lost, limit_bytes=limit_bytes, limit_descriptors=limit_memory
        )

    def close(self) -> None:
        self._sock.close()
        self.process.close()
