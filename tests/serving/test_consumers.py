"""Invalid consumers: a server logs them, closes their connections, and continues to serve the others."""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest

import aiofeed
from aiofeed import Feeder, FeedError
from aiofeed.ipc import address as addresses
from aiofeed.ipc.framing import frame
from aiofeed.ipc.schema import encode
from aiofeed.serving import consumers
from aiofeed.serving.messages import VERSION, Hello, Join, Leave, ProbeRequest, ProbeResult, Read, Welcome
from tests.support import process_parts as parts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server, which must still serve an epoch at the end of the test."""
    address = str(tmp_path / "feed.sock")
    with Feeder(parts.Numbers(40), decode=parts.number, batch_size=4) as feeder, aiofeed.serve(feeder, address):
        yield address
        with aiofeed.attach(address) as feed:
            assert [batch.tolist() for batch in feed] == [list(range(4 * at, 4 * at + 4)) for at in range(10)]


def connected(address: str, *messages: object) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10.0)
    sock.connect(address)
    for message in messages:
        sock.sendall(frame(encode(message)))
    return sock


def rest(sock: socket.socket) -> bytes:
    """The bytes that arrive until the server closes the connection."""
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data


HELLO = frame(encode(Hello(VERSION)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 10, 1 << 20),
        struct.pack("<II", 2000, 0) + b"x" * 2000,
        frame(b""),
        frame(b"\xff" * 100),
        frame(encode(Join(1))),
        frame(encode(Welcome(3))),
        HELLO + HELLO,
        HELLO + frame(encode(Read(0))),
        HELLO + frame(encode(Read(-1))),
        HELLO + frame(encode(Join(1))) * 2,
        HELLO + frame(encode(ProbeResult())),
        HELLO + frame(encode(ProbeRequest())) * 2,
        HELLO + frame(encode(ProbeRequest())) + frame(encode(ProbeResult())),
        HELLO + frame(encode(Join(1))) + frame(encode(ProbeRequest())),
        HELLO + frame(encode(ProbeResult("x" * 2000))),
        HELLO + frame(b"\x92\xa4Join\xa1x"),
        HELLO + frame(encode(Leave(7))) + frame(b"\x93\xa4Join\x01\x02"),
    ],
)
def test_an_invalid_message_closes_the_connection(address: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged."""
    with connected(address) as sock, caplog.at_level(logging.ERROR, "aiofeed"):
        sock.sendall(data)
        rest(sock)
    assert "refused a message" in caplog.text


def test_random_bytes_close_the_connection_or_are_incomplete(address: str) -> None:
    """They affect no other consumer."""
    noise = random.Random(0)
    for _ in range(50):
        with connected(address) as sock:
            try:
                sock.sendall(HELLO * noise.randrange(2) + noise.randbytes(noise.randrange(1, 3000)))
            except ConnectionError:
                pass  # the server has closed the connection


def test_half_a_handshake_before_the_end_is_ignored(address: str) -> None:
    """However much of it arrives."""
    for cut in range(1, len(HELLO)):
        with connected(address) as sock:
            sock.sendall(HELLO[:cut])


def test_descriptors_of_a_consumer_are_refused_and_closed(address: str) -> None:
    """None stays open in the server."""
    before = len(os.listdir("/dev/fd"))
    for data in (HELLO[:1], struct.pack("<II", len(HELLO) - 8, 5) + HELLO[8:], HELLO):
        with connected(address) as sock:
            socket.send_fds(sock, [data], [0] * 5)
            rest(sock)
    until(lambda: len(os.listdir("/dev/fd")) <= before)


def test_another_protocol_version_is_refused(address: str) -> None:
    """The reason says to install the same version."""
    with connected(address, Hello(VERSION + 1)) as sock:
        assert b"install the same version" in rest(sock)


def test_a_silent_connection_is_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After HANDSHAKE_S."""
    monkeypatch.setattr(consumers, "HANDSHAKE_S", 0.1)
    with connected(address) as silent:
        assert rest(silent) == b""


def test_too_many_connections_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond MAX_CONNECTIONS."""
    with monkeypatch.context() as patch:  # the fixture attaches again, maybe before these connections are gone
        patch.setattr(addresses, "MAX_CONNECTIONS", 2)
        with connected(address, Hello(VERSION)), connected(address, Hello(VERSION)), connected(address) as third:
            assert rest(third) == b""


def test_a_consumer_that_joins_and_disconnects_occupies_no_slot(address: str) -> None:
    """However often."""
    for _ in range(20):
        with connected(address, Hello(VERSION), Join(0)) as sock:
            sock.recv(100)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(b"no"), frame(encode(Hello(1)))])
def test_attaching_to_something_that_is_no_server_is_an_error(data: bytes, tmp_path: Path) -> None:
    """Whatever it answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "x"))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FeedError, match="did not answer as a server does"):
            aiofeed.attach(tmp_path / "x")
        thread.join()
