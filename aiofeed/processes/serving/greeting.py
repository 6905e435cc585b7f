"""The first words of a consumer to a server, before it has a loop: blocking, and bounded."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.address import SERVER, connect
from aiofeed.processes.ipc.framing import WireError, frame
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.serving.protocol import (
    MAX_GREETING_BYTES,
    VERSION,
    FromConsumer,
    FromServer,
    Hello,
    Refused,
    Trial,
    Try,
    Welcome,
    decode_from_server,
)

# A server answers within milliseconds, unless it is stopped.
ANSWER_S = 5.0


def attach(path: Path, wait_s: float) -> tuple[socket.socket, Welcome]:
    """A connection that has been greeted, and what the server said.

    Args:
        path: where the server is.
        wait_s: how long to wait for one to come.

    Raises:
        FeedError: there is none, it refuses, or it does not answer.
    """
    sock = connect(path, SERVER, wait_s)
    try:
        return sock, _greet(sock, path)
    except BaseException:
        sock.close()
        raise


def _greet(sock: socket.socket, path: Path) -> Welcome:
    answer = _ask(sock, path, Hello(VERSION))
    if not isinstance(answer, Welcome) or answer.version != VERSION:
        raise FeedError(f"the server at {path} speaks another version: install the same version of aiofeed for both")
    return answer


def ask_for_trial(sock: socket.socket, path: Path) -> Trial:
    """Device memory of the server's, to try.

    Raises:
        FeedError: it does not answer.
    """
    answer = _ask(sock, path, Try())
    if not isinstance(answer, Trial):
        raise FeedError(f"the server at {path} did not answer as a server does")
    return answer


def tell(sock: socket.socket, message: FromConsumer) -> None:
    """Say something that has no answer."""
    sock.sendall(frame(encode(message)))


def _ask(sock: socket.socket, path: Path, message: FromConsumer) -> FromServer:
    sock.settimeout(ANSWER_S)
    try:
        tell(sock, message)
        nbytes, descriptors = struct.unpack("<II", _exactly(sock, 8))
        if nbytes > MAX_GREETING_BYTES or descriptors:
            raise WireError("no greeting")
        answer = decode_from_server(_exactly(sock, nbytes))
    except TimeoutError:
        raise FeedError(f"the server at {path} did not answer within {ANSWER_S:.0f} s") from None
    except (OSError, WireError) as error:
        raise FeedError(f"what listens at {path} did not greet as a server does: {error}") from error
    if isinstance(answer, Refused):
        raise FeedError(f"the server at {path} refuses this process: {answer.reason}")
    return answer


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
