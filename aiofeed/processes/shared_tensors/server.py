"""Hands out shared tensors: a daemon thread with an event loop that accepts connections and answers requests.

``stop`` only signals the thread, which removes the socket and closes the descriptors; ``join`` waits for that, for a
bounded time. Interpreter exit and forks are handled in ``runtime/threads.py``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from aiofeed.processes.ipc.address import TENSORS, Listener
from aiofeed.processes.ipc.framing import Connection
from aiofeed.processes.ipc.peers import Peer
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.shared_tensors.offers import Attach, AttachRefused, decode_attach
from aiofeed.processes.shared_tensors.store import TensorStore
from aiofeed.runtime.event_loop import EventLoopThread

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A request has a dozen bytes.
_MAX_REQUEST_BYTES = 1024
# A connection is closed after this time: processes send their request at once and read the reply.
_TIMEOUT_S = 60.0
_JOIN_S = 1.0


class TensorServer:
    """A listening socket and its thread, which uses and closes the store.

    Raises:
        FeedError: Another process listens there, or there can be no socket.
    """

    def __init__(self, path: Path, store: TensorStore) -> None:
        self.path = path
        self._store = store
        self._connections: set[Connection] = set()
        self._listener = Listener(path, TENSORS)
        self._thread = EventLoopThread(read_threads=1, decode_threads=1)
        self._thread.at_exit(self._close)
        try:
            self._thread.launch()
            self._thread.start(self._serve)
        except BaseException:
            self._thread.stop()
            self._close()  # the thread may not exist
            raise

    def stop(self) -> None:
        """Tell the thread to end. Never blocks; idempotent."""
        self._thread.stop()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is collected."""
        self._thread.watch(owner)

    def join(self) -> None:
        """Wait until the thread has ended, for a bounded time: it may be copying from a device."""
        self._thread.join(_JOIN_S)

    async def _serve(self) -> None:
        """Answer requests until cancelled."""
        self._listener.start_accepting(self._accepted, self._connections)
        try:
            await asyncio.Event().wait()
        finally:
            self._listener.stop_accepting()
            for connection in self._connections:
                connection.close()

    def _close(self) -> None:
        self._listener.close()
        self._store.close()

    def _accepted(self, sock: socket.socket, peer: Peer) -> None:
        def end(error: Exception | None = None) -> None:
            connection.close()
            timeout.cancel()
            self._connections.discard(connection)

        def received(payload: bytes, descriptors: list[int]) -> None:
            connection.send(*self._answer(decode_attach(payload)))

        connection = Connection(sock, received=received, lost=end, limit_bytes=_MAX_REQUEST_BYTES)
        timeout = asyncio.get_running_loop().call_later(_TIMEOUT_S, end)
        self._connections.add(connection)

    def _answer(self, request: Attach) -> tuple[bytes, list[int]]:
        try:
            return self._store.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the process that attaches must get it
            return encode(AttachRefused(f"{type(error).__name__}: {error}")), []
