"""A blocking connection between a worker process and its parent: framed messages with file descriptors."""

from __future__ import annotations

import array
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

from aiofeed.processes.ipc.framing import NO_SIGPIPE, Framer, close_all, disable_sigpipe, frame, receive

# The header has room for this much. Strings and small tensors are sent in the message itself.
_LIMIT_BYTES = (1 << 32) - 1
_READ_BYTES = 1 << 20


class Channel:
    """One end of a connection. ``send`` may be called in another thread than ``wait``.

    Args:
        sock: A connected Unix stream socket; closed with the channel.

    Attributes:
        messages: Received messages that were not taken, each a payload and its descriptors.
        ended: Whether the peer has closed its end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        disable_sigpipe(sock)
        self._framer = Framer(_LIMIT_BYTES)
        self._descriptors: deque[int] = deque()
        self._sending = threading.Lock()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.messages: deque[tuple[bytes, list[int]]] = deque()
        self.ended: bool = False

    def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, or the part of it that the peer has room for; ``wait`` sends the rest. Closes descriptors."""
        self._unsent.append((memoryview(frame(payload, len(descriptors))), descriptors))
        self._flush()

    @property
    def unsent(self) -> bool:
        """Whether a part of a message is still to be sent."""
        return bool(self._unsent)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.ended = True
        try:
            # Other processes may have copies of the socket.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has ended
        self._sock.close()
        close_all(self._descriptors)
        self._descriptors.clear()
        for _, descriptors in (*self._unsent, *self.messages):
            close_all(descriptors)
        self._unsent.clear()
        self.messages.clear()

    def _flush(self) -> None:
        with self._sending:
            try:
                while self._unsent:
                    data, descriptors = self._unsent[0]
                    rights = array.array("i", descriptors)
                    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
                    try:
                        sent = self._sock.sendmsg([data], control, NO_SIGPIPE)
                    except BlockingIOError:
                        return
                    except OSError:  # the peer reads no more
                        sent = len(data)
                    close_all(descriptors)
                    if sent < len(data):
                        self._unsent[0] = data[sent:], ()
                    else:
                        self._unsent.popleft()
            except BaseException:  # Ctrl-C: how much was sent is unknown
                self.close()
                raise

    def _receive(self) -> None:
        try:
            data = receive(self._sock, _READ_BYTES, self._descriptors)
            if not data:
                self.ended = True
            for payload, count in self._framer.feed(data):
                self.messages.append((payload, [self._descriptors.popleft() for _ in range(count)]))
        except BlockingIOError:
            return
        except ConnectionResetError:
            self.ended = True
        except BaseException:  # Ctrl-C: a part of the stream may be lost
            self.close()
            raise


def wait(channels: Sequence[Channel], timeout_s: float) -> None:
    """Wait until a channel has received something or has ended; send what is unsent meanwhile.

    A signal handler may raise out of it: while it waits without effect, else the channel is closed.
    """
    poll = select.poll()
    found: dict[int, Channel] = {}
    for channel in channels:
        if not channel.ended:
            found[channel._sock.fileno()] = channel
            poll.register(channel._sock, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
    for descriptor, events in poll.poll(timeout_s * 1000):
        channel = found[descriptor]
        if events & select.POLLOUT:
            channel._flush()
        if events & ~select.POLLOUT:
            channel._receive()
