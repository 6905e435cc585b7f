"""Messages over a Unix socket: framed, bounded, with descriptors beside them. Nothing here knows what they say.

A frame is its length and its number of descriptors, 4 bytes each, then the payload. Descriptors travel as SCM_RIGHTS
with the first byte of their frame, so they are there when it is complete.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger("aiofeed.processes")

# A plan takes 16 bytes a sample, a batch's description a few hundred: this is room for four million samples.
MAX_MESSAGE_BYTES = 64 << 20
# Linux passes 253 at a time. A batch needs one or two, and those of its memory that are known need none.
MAX_DESCRIPTORS = 64
_READ_BYTES = 256 * 1024
_HEADER = struct.Struct("<II")
_INT = array.array("i").itemsize


class ProtocolError(Exception):
    """What arrived is no message of ours."""


class Framer:
    """Bytes in, frames out; it never holds more than one frame and a read. No I/O.

    Args:
        limit_bytes: longest payload that is accepted.
    """

    def __init__(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """The frames that ``data`` completes: payload and number of descriptors.

        Raises:
            WireError: a frame is longer than allowed or claims too many descriptors; those before it were given.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                nbytes, descriptors = _HEADER.unpack_from(self._buffer, start)
                if nbytes > self._limit_bytes:
                    raise ProtocolError(f"a message of {nbytes} bytes; at most {self._limit_bytes} are accepted")
                if descriptors > MAX_DESCRIPTORS:
                    raise ProtocolError(
                        f"a message with {descriptors} descriptors; at most {MAX_DESCRIPTORS} are accepted"
                    )
                end = start + _HEADER.size + nbytes
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield payload, descriptors
        finally:
            del self._buffer[:start]


def frame(payload: bytes, descriptors: int = 0) -> bytes:
    """The bytes of one frame."""
    return _HEADER.pack(len(payload), descriptors) + payload


class Connection:
    """One end of a connection, on a running loop. Neither ``send`` nor what it calls ever blocks.

    Args:
        sock: a connected Unix stream socket; it is closed with the wire.
        received: called with each payload and its descriptors; it may raise ``ProtocolError``. It takes the descriptors
            that it keeps out of the list; the others are closed.
        lost: called once, when the other end is gone (``None``) or has sent what is no message.
        limit_bytes: longest payload that is accepted.
        limit_descriptors: how many may have arrived before the payload that they belong to.
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
        self._sock = sock
        self._received = received
        self._lost = lost
        self._framer = Framer(limit_bytes)
        self._limit_descriptors = limit_descriptors
        self._arrived: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = self._deaf = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Queue one message. The descriptors are closed once they are on their way; nothing happens once closed."""
        if self._closed or self._deaf:
            _close_all(descriptors)
            return
        self._unsent.append((memoryview(frame(payload, len(descriptors))), list(descriptors)))
        if len(self._unsent) == 1:
            self._on_writable()

    def close(self) -> None:
        """Close the connection; ``lost`` is not called for it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._drop_unsent()
        try:
            # A fork of this process may still hold the connection.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster
        self._sock.close()
        _close_all(self._arrived)
        self._arrived.clear()

    @property
    def unsent(self) -> int:
        """Messages that are not on their way yet."""
        return len(self._unsent)

    def _drop_unsent(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        for _, descriptors in self._unsent:
            _close_all(descriptors)
        self._unsent.clear()

    def _on_writable(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [data], descriptors) if descriptors else self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._on_writable)
                return
            except OSError:
                # Nobody reads it any more; what the other end said before is still to be read, up to its end.
                self._deaf = True
                self._drop_unsent()
                return
            _close_all(descriptors)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(None)
            return
        self._arrived.extend(_descriptors(ancillary))
        if not data:
            self._end(None)
            return
        try:
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(
                    "a message with more descriptors than it may have, or than `ulimit -n` lets this process open"
                )
            if len(self._arrived) > self._limit_descriptors:
                raise ProtocolError(f"{len(self._arrived)} descriptors; at most {self._limit_descriptors} are accepted")
            for payload, count in self._framer.feed(data):
                if count > len(self._arrived):
                    raise ProtocolError(f"a message that lacks {count - len(self._arrived)} of its {count} descriptors")
                descriptors = [self._arrived.popleft() for _ in range(count)]
                try:
                    self._received(payload, descriptors)
                finally:
                    _close_all(descriptors)
                if self._closed:
                    return
        except Exception as error:  # noqa: BLE001 - memory that cannot be mapped, say; whoever waits must hear of it
            log.error("a message was refused and its connection closed: %s", error)
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._lost(error)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _INT])
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found.tolist()


def _close_all(descriptors: Sequence[int] | deque[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
