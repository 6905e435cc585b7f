"""Clients that are none: a server logs them, lets them go, and feeds the others."""

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
from aiofeed.processes.ipc import address as addresses
from aiofeed.processes.ipc.framing import frame
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.serving import consumers
from aiofeed.processes.serving.protocol import VERSION, Hello, Join, Leave, ProbeRequest, ProbeResult, Read, Welcome
from tests.support import process_parts as parts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server's, which must feed whoever is honest to the end."""
    address = str(tmp_path / "feed.sock")
    with Feeder(parts.Numbers(40), decode=parts.number, batch_size=4) as feeder, aiofeed.serve(feeder, address):
        yield address
        with aiofeed.attach(address) as feed:
            assert [batch.tolist() for batch in feed] == [list(range(4 * at, 4 * at + 4)) for at in range(10)]


def connected(address: str, *words: object) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10.0)
    sock.connect(address)
    for word in words:
        sock.sendall(frame(encode(word)))
    return sock


def rest(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    said = b""
    try:
        while part := sock.recv(1 << 16):
            said += part
    except ConnectionError:
        pass
    return said


HELLO = frame(encode(Hello(VERSION)))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 10, 1 << 20),
        struct.pack("<II", 2000, 0) + b"x" * 2000,
        frame(b""),
        frame(b"\xff" * 100),
        frame(encode(Join(1))),
        frame(encode(Welcome(VERSION, 3))),
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
def test_what_is_no_word_of_a_consumers_closes_its_connection(
    address: str, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(address) as sock, caplog.at_level(logging.ERROR, "aiofeed"):
        sock.sendall(said)
        rest(sock)
    assert "refused a message" in caplog.text


def test_random_bytes_close_a_connection_or_are_waited_for(address: str) -> None:
    noise = random.Random(0)
    for _ in range(50):
        with connected(address) as sock:
            try:
                sock.sendall(HELLO * noise.randrange(2) + noise.randbytes(noise.randrange(1, 3000)))
            except ConnectionError:
                pass  # it had enough


def test_half_a_message_and_then_the_end_is_the_end(address: str) -> None:
    for cut in range(1, len(HELLO)):
        with connected(address) as sock:
            sock.sendall(HELLO[:cut])


def test_descriptors_are_refused_and_closed(address: str) -> None:
    before = len(os.listdir("/dev/fd"))
    for said in (HELLO[:1], struct.pack("<II", len(HELLO) - 8, 5) + HELLO[8:], HELLO):
        with connected(address) as sock:
            socket.send_fds(sock, [said], [0] * 5)
            rest(sock)
    until(lambda: len(os.listdir("/dev/fd")) <= before)


def test_another_version_is_told_which_one_is_spoken(address: str) -> None:
    with connected(address, Hello(VERSION + 1)) as sock:
        assert b"install the same version" in rest(sock)


def test_who_says_nothing_is_let_go(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "HANDSHAKE_S", 0.1)
    with connected(address) as silent:
        assert rest(silent) == b""


def test_too_many_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MAX_CONNECTIONS", 2)
    with connected(address, Hello(VERSION)), connected(address, Hello(VERSION)), connected(address) as third:
        assert rest(third) == b""


def test_who_joins_and_goes_leaves_no_slot_behind(address: str) -> None:
    for _ in range(20):
        with connected(address, Hello(VERSION), Join(0)) as sock:
            sock.recv(100)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(b"no"), frame(encode(Hello(1)))])
def test_a_server_that_is_none_is_an_error_at_attach(said: bytes, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "x"))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(100)
                sock.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FeedError, match="did not answer as a server does"):
            aiofeed.attach(tmp_path / "x")
        thread.join()
