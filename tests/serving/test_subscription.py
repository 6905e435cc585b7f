"""A consumer and the messages of its server: whatever a server sends, the consumer does not wait for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

import aiofeed
from aiofeed import FeedError
from aiofeed.ipc.framing import Framer, send_message
from aiofeed.ipc.schema import ArrayNode, ErrorMessage, encode
from aiofeed.serving.messages import (
    BatchAvailable,
    EpochEnded,
    EpochStarted,
    FromServer,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FakeServer:
    """Answers the handshake, and the first Join with the given messages; then waits for the end of the connection."""

    def __init__(self, path: Path) -> None:
        self.answer: list[FromServer] = []
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        # The consumer closes the connection at an invalid message, without reading the next.
        with sock, contextlib.suppress(ConnectionError):
            framer, received = Framer(), 0
            while data := sock.recv(1000):
                for _ in framer.feed(data):
                    received += 1
                    for message in [Welcome(10)] if received == 1 else self.answer if received == 2 else []:
                        send_message(sock, encode(message))

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """A server under the control of the test."""
    made = FakeServer(tmp_path / "server")
    yield made
    made.close()


def nested(depth: int) -> ErrorMessage:
    error = ErrorMessage("builtins.ValueError", b"last", ["last"])
    for _ in range(depth):
        error = ErrorMessage("builtins.ValueError", b"value", ["value"], cause=error)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ErrorMessage("builtins.ExceptionGroup", b"failed", ["failed", "none"]), FeedError, "ExceptionGroup: failed"),
        (ErrorMessage("builtins.StopIteration", b"failed", ["failed"]), FeedError, "StopIteration: failed"),
        (ErrorMessage("aiofeed.errors.ReadError", b"failed"), FeedError, "ReadError: failed"),
        (nested(400), ValueError, "value"),
    ],
    ids=["constructor raises", "ends a loop", "lacks its arguments", "many causes"],
)
def test_an_epoch_that_failed_is_an_error_whatever_the_exception(
    server: FakeServer, error: ErrorMessage, kind: type[Exception], text: str
) -> None:
    """Also one that cannot be rebuilt."""
    server.answer = [EpochStarted(0, 0, 10), EpochEnded(0, error)]
    with aiofeed.attach(server.path) as feed, pytest.raises(kind, match=text):
        list(feed)


def test_an_invalid_batch_is_an_error(server: FakeServer) -> None:
    """It lies in a segment that the server has not sent."""
    node = ArrayNode("tensor", 7, 0, [4], "|u1")
    server.answer = [EpochStarted(0, 0, 1), BatchAvailable(0, 0, 0, node, 4, [], []), EpochEnded(0)]
    with aiofeed.attach(server.path) as feed, pytest.raises(FeedError, match="cannot be received"):
        list(feed)


def test_batches_before_a_failure_are_handed_out(server: FakeServer) -> None:
    """Then the error is raised."""
    batch = BatchAvailable(0, 0, 0, "batch", 0, [], [])
    error = ErrorMessage("builtins.ValueError", b"failed", ["failed"])
    server.answer = [EpochStarted(0, 0, 2), batch, EpochEnded(0, error)]
    with aiofeed.attach(server.path) as feed:
        iterator = iter(feed)
        assert next(iterator) == "batch"
        with pytest.raises(ValueError, match="failed"):
            next(iterator)
