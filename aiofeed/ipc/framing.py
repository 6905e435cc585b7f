"""Framed messages over a Unix socket, with file descriptors: ``Link``, ``Connection`` on a loop, ``request`` blocking.

A frame is the length of its payload and its number of descriptors, 4 bytes each, then the payload. Descriptors travel
as SCM_RIGHTS with the first byte of their frame, so they have arrived when the frame is complete.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A plan takes 16 bytes per sample, the description of a batch a few hundred bytes: room for four million samples.
MAX_MESSAGE_BYTES = 64 << 20
# Linux passes 253 in one call. A batch needs one or two for new segments, and none for known ones.
MAX_DESCRIPTORS = 64
_READ_BYTES = 256 * 1024
_HEADER = struct.Struct("<II")
_INT_BYTES = array.array("i").itemsize
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# Without it, writing to a closed connection kills a process that has `signal(SIGPIPE, SIG_DFL)`. macOS has the socket
# option SO_NOSIGPIPE instead.
NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)
_SO_NOSIGPIPE = 0x1022


class ProtocolError(Exception):
    """The peer sent something that is not a valid message."""


class Framer:
    """Splits a stream of bytes into frames of at most ``limit_bytes``. It buffers one frame and one read. No I/O."""

    def __init__(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the frames that ``data`` completes, each as payload and number of descriptors.

        Raises:
            ProtocolError: A frame is too long or has too many descriptors. The frames before it have been yielded.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                nbytes, descriptors = _HEADER.unpack_from(self._buffer, start)
                _check_header(nbytes, descriptors, self._limit_bytes)
                end = start + _HEADER.size + nbytes
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield payload, descriptors
        finally:
            del self._buffer[:start]


def frame(payload: bytes, descriptors: int = 0) -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(len(payload), descriptors) + payload


class Link:
    """One end of a connection: messages with descriptors, without a loop. No method blocks.

    ``send`` may be called in another thread than ``receive``.

    Args:
        sock: A connected Unix stream socket; closed with the link.
        limit_bytes: The longest payload that is accepted.
        limit_descriptors: How many may arrive ahead of their payload.

    Attributes:
        ended: Whether the peer has closed its end, or this end is closed.
    """

    def __init__(
        self, sock: socket.socket, limit_bytes: int = MAX_MESSAGE_BYTES, limit_descriptors: int = 2 * MAX_DESCRIPTORS
    ) -> None:
        self._sock = sock
        self._framer = Framer(limit_bytes)
        self._limit_descriptors = limit_descriptors
        self._arrived: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._sending = threading.Lock()
        self.ended: bool = False
        sock.setblocking(False)
        disable_sigpipe(sock)

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 once closed."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Messages that are not sent, or only in part."""
        return len(self._unsent)

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, as far as the peer has room for it; ``flush`` sends the rest. Closes the descriptors.

        A message is dropped if the peer reads no more, or this end is closed.
        """
        self._unsent.append((memoryview(frame(payload, len(descriptors))), descriptors))
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send the unsent messages, as far as the peer has room for them."""
        with self._sending:
            try:
                while self._unsent:
                    data, descriptors = self._unsent[0]
                    rights = (
                        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                    )
                    try:
                        sent = self._sock.sendmsg([data], rights, NO_SIGPIPE)
                    except BlockingIOError:
                        return
                    except OSError:  # the peer reads no more; its earlier messages are still received
                        sent = len(data)
                    close_all(descriptors)
                    if sent < len(data):
                        self._unsent[0] = data[sent:], ()
                    else:
                        self._unsent.popleft()
            except BaseException:  # Ctrl-C: how much was sent is unknown
                self.close()
                raise

    def receive(self) -> Iterator[tuple[bytes, list[int]]]:
        """Return all messages that have arrived, each with its descriptors, which the caller closes.

        Raises:
            ProtocolError: The peer sent something that is not a valid message.
        """
        while not self.ended:
            try:
                data = receive(self._sock, _READ_BYTES, self._arrived)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.ended = not data
            if len(self._arrived) > self._limit_descriptors:
                raise ProtocolError(f"{len(self._arrived)} descriptors; at most {self._limit_descriptors} are accepted")
            for payload, count in self._framer.feed(data):
                if count > len(self._arrived):
                    raise ProtocolError(f"{count - len(self._arrived)} of a message's {count} descriptors are missing")
                yield payload, [self._arrived.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.ended = True
        try:
            # A fork of this process may still have the socket open.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has closed it
        self._sock.close()
        close_all(self._arrived)
        self._arrived.clear()
        for _, descriptors in self._unsent:
            close_all(descriptors)
        self._unsent.clear()


class Connection(Link):
    """A link on the running event loop, which sends and receives.

    Args:
        sock, limit_bytes, limit_descriptors: See ``Link``.
        received: Called with each payload and its descriptors; may raise ``ProtocolError``. It removes the descriptors
            that it uses from the list; the others are closed.
        lost: Called once, when the peer has closed the connection (``None``) or sent an invalid message (the error).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        received: Callable[[bytes, list[int]], None],
        lost: Callable[[Exception | None], None],
        limit_bytes: int = MAX_MESSAGE_BYTES,
        limit_descriptors: int = 2 * MAX_DESCRIPTORS,
    ) -> None:
        super().__init__(sock, limit_bytes, limit_descriptors)
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message; what the peer has no room for yet is sent later. Closes the descriptors."""
        super().send(payload, descriptors)
        if len(self._unsent) == 1:  # else the loop waits already
            self._loop.add_writer(self.fileno(), self._on_writable)

    def close(self) -> None:
        """Close the connection; ``lost`` is not called. Idempotent."""
        if self.fileno() >= 0:
            self._loop.remove_reader(self.fileno())
            self._loop.remove_writer(self.fileno())
            super().close()

    def _on_writable(self) -> None:
        self.flush()
        if not self._unsent:
            self._loop.remove_writer(self.fileno())

    def _on_readable(self) -> None:
        # It reads on until nothing is left: uvloop calls once more, and then never again, when the peer has closed the
        # connection without reading all its messages.
        error: Exception | None = None
        try:
            for payload, descriptors in self.receive():
                try:
                    self._received(payload, descriptors)
                finally:
                    close_all(descriptors)
                if self.ended:
                    return
        except Exception as refused:  # noqa: BLE001 - memory that cannot be mapped, for example; `lost` must report it
            log.error("refused a message and closed its connection: %s", refused)
            error = refused
        if (error is not None or self.ended) and self.fileno() >= 0:
            self.close()
            self._lost(error)


def request(
    sock: socket.socket,
    payload: bytes,
    *,
    timeout_s: float,
    limit_bytes: int = MAX_MESSAGE_BYTES,
    limit_descriptors: int = MAX_DESCRIPTORS,
) -> tuple[bytes, list[int]]:
    """Send one message on a blocking socket and wait for the answer.

    It reads the answer and not a byte more, so the socket can be given to a ``Connection`` afterwards.

    Returns:
        The payload of the answer, and its descriptors, which the caller closes.

    Raises:
        TimeoutError: No complete answer arrived within ``timeout_s``.
        ConnectionError: The peer closed the connection.
        ProtocolError: The answer is too long, or its descriptors do not match.
    """
    deadline = time.monotonic() + timeout_s
    descriptors: list[int] = []
    try:
        sock.settimeout(timeout_s)
        send_message(sock, payload)
        nbytes, count = _HEADER.unpack(_receive_exactly(sock, _HEADER.size, descriptors, deadline))
        _check_header(nbytes, count, limit_bytes, limit_descriptors)
        answer = _receive_exactly(sock, nbytes, descriptors, deadline)
        if len(descriptors) != count:
            raise ProtocolError(f"a message with {len(descriptors)} descriptors that announces {count}")
    except BaseException:
        close_all(descriptors)
        raise
    return answer, descriptors


def send_message(sock: socket.socket, payload: bytes) -> None:
    """Send one message on a blocking socket."""
    disable_sigpipe(sock)
    sock.sendall(frame(payload), NO_SIGPIPE)


def disable_sigpipe(sock: socket.socket) -> None:
    """Let a write to a closed connection raise BrokenPipeError even if SIGPIPE has its default action (macOS)."""
    if sys.platform == "darwin":
        sock.setsockopt(socket.SOL_SOCKET, _SO_NOSIGPIPE, 1)


def close_all(descriptors: Iterable[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _check_header(nbytes: int, descriptors: int, limit_bytes: int, limit_descriptors: int = MAX_DESCRIPTORS) -> None:
    if nbytes > limit_bytes:
        raise ProtocolError(f"a message of {nbytes} bytes; at most {limit_bytes} are accepted")
    if descriptors > limit_descriptors:
        raise ProtocolError(f"a message with {descriptors} descriptors; at most {limit_descriptors} are accepted")


def _receive_exactly(sock: socket.socket, nbytes: int, descriptors: list[int], deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = receive(sock, nbytes - len(data), descriptors)
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return bytes(data)


def receive(sock: socket.socket, nbytes: int, descriptors: list[int] | deque[int]) -> bytes:
    """Receive up to ``nbytes``; descriptors are appended to the list, also if this raises."""
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(nbytes, space, _CLOSE_ON_EXEC)
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i", rights[: len(rights) - len(rights) % _INT_BYTES])
            descriptors.extend(found)
            for descriptor in found:
                os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:
        raise ProtocolError("more descriptors than a message may have, or than `ulimit -n` lets this process open")
    return data
