"""Hands shared tensors out: a daemon thread that listens, and answers one question per connection.

Its end: ``stop`` only tells the thread, which then removes the socket and closes what it has; whoever wants that done
joins it, for a bounded time. The interpreter's exit does so for servers that nobody has stopped. A forked child has
neither the thread nor the socket.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

from aiofeed.processes.ipc.address import TENSORS, Listener
from aiofeed.processes.ipc.framing import Connection
from aiofeed.processes.ipc.peers import peer_of
from aiofeed.processes.shared_tensors.protocol import Attach, AttachRefused, decode_attach, encode

log = logging.getLogger("aiofeed.processes")

# Room for what an attacher says, which is a dozen bytes.
_MOST_ASKED_BYTES = 1024
# Whoever has connected asks at once; one that does not, or stops reading, is not waited for.
_PATIENCE_S = 60.0
_MOST_CONNECTIONS = 256
# After an error in accepting (no descriptors left), before the next try.
_PAUSE_S = 0.2
_JOIN_S = 1.0


class Store(Protocol):
    """What is handed out."""

    def answer(self, asked: Attach, /) -> tuple[bytes, list[int]]:
        """The reply, and descriptors that are the caller's to close."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class TensorServer:
    """A listening socket and its thread.

    Args:
        path: of the socket.
        store: what is handed out; used and closed by the thread.

    Raises:
        FeedError: the address is taken, or not to be had.
    """

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self._store = store
        self._pid = os.getpid()
        self._wires: set[Connection] = set()
        self._thread = threading.Thread(target=self._run, name="aiofeed shared tensors", daemon=True)
        self._loop = asyncio.SelectorEventLoop()
        try:
            self._listener = Listener(path, TENSORS)
        except BaseException:
            self._loop.close()
            raise
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:  # no more threads are to be had
            self._end()
            raise

    def stop(self) -> None:
        """Tell the thread to end. Does not wait; idempotent; may be called from anywhere, a finalizer too."""
        if os.getpid() != self._pid:
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
        except RuntimeError:
            pass  # it has ended

    def join(self, timeout_s: float = _JOIN_S) -> None:
        """Wait until the thread has ended, but not for long: it may be copying."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def forked(self) -> None:
        """In a forked child: the socket is the parent's alone, so that it is dead once the parent is."""
        self._listener.sock.close()

    def _run(self) -> None:
        try:
            self._loop.add_reader(self._listener.sock.fileno(), self._accept)
            self._loop.run_forever()
        finally:
            self._end()

    def _end(self) -> None:
        _running.discard(self)
        self._loop.remove_reader(self._listener.sock.fileno())
        self._listener.close()
        for connection in self._wires:
            connection.close()
        self._loop.close()
        self._store.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("whoever wants the tensors shared at %s has to wait: %s", self.path, error)
            self._loop.remove_reader(self._listener.sock.fileno())
            self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listener.sock.fileno(), self._accept)
            return
        try:
            welcome = peer_of(sock).uid == os.getuid() and len(self._wires) < _MOST_CONNECTIONS
        except OSError:
            welcome = False  # it has gone already
        if not welcome:
            sock.close()
            return
        self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        def end(error: Exception | None = None) -> None:
            connection.close()
            patience.cancel()
            self._wires.discard(connection)

        def received(payload: bytes, descriptors: list[int]) -> None:
            connection.send(*self._answer(decode_attach(payload)))

        connection = Connection(sock, received=received, lost=end, limit_bytes=_MOST_ASKED_BYTES)
        patience = self._loop.call_later(_PATIENCE_S, end)
        self._wires.add(connection)

    def _answer(self, asked: Attach) -> tuple[bytes, list[int]]:
        try:
            return self._store.answer(asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the attacher that must hear of it
            return encode(AttachRefused(f"{type(error).__name__}: {error}")), []


_running: weakref.WeakSet[TensorServer] = weakref.WeakSet()


def _stop_all() -> None:
    running = list(_running)
    for server in running:
        server.stop()
    deadline = time.monotonic() + _JOIN_S
    for server in running:
        server.join(max(0.0, deadline - time.monotonic()))


def _forked() -> None:
    for server in list(_running):
        server.forked()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
