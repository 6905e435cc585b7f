"""Messages between processes: frames, bounds, types. An invalid message is refused and logged, without side effects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiofeed.ipc.batch_codec import decode_batch
from aiofeed.ipc.framing import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Connection,
    Framer,
    ProtocolError,
    frame,
    request,
)
from aiofeed.ipc.ring import Ring
from aiofeed.ipc.schema import (
    ArrayNode,
    BytesNode,
    ContainerNode,
    NewSegment,
    encode,
)
from aiofeed.kernel.runtime.event_loop import new_event_loop
from aiofeed.workers.protocol import (
    BatchFinished,
    PlanBatch,
    ReplacementAnswer,
    ReplacementRequest,
    decode_from_worker,
    decode_to_worker,
)
from tests.support.paths import environment

FINISHED = BatchFinished(3, [], 6, [], batch=ArrayNode("tensor", 0, 0, [2, 3], "|u1"), segments=[NewSegment(0, 65536)])
DEEPLY_NESTED = b"\x97\xadBatchFinished\x03\x90\x06\x90\xc0" + b"\x93\xadContainerNode\xa4list\x91" * 100_000


@given(st.lists(st.binary(max_size=200), max_size=6), st.data())
def test_frames_are_received_as_they_were_sent(payloads: list[bytes], data: Any) -> None:
    """However the stream is split."""
    stream = b"".join(frame(payload, number) for number, payload in enumerate(payloads))
    framer, found = Framer(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += framer.feed(stream[:size])
        stream = stream[size:]
    assert found == [(payload, number) for number, payload in enumerate(payloads)]


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    """No other exception."""
    for decode in (decode_to_worker, decode_from_worker):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(st.data())
def test_corrupted_messages_are_messages_or_a_protocol_error(data: Any) -> None:
    """A corrupted description of a batch is refused, or lies within the ring."""
    payload = bytearray(encode(FINISHED))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode_from_worker(bytes(payload))
        if isinstance(message, BatchFinished):
            decode_batch(message.batch, Ring().view)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="empty"),
        pytest.param(encode(FINISHED)[:-1], id="truncated"),
        pytest.param(encode(FINISHED) + b"\x00", id="trailing bytes"),
        pytest.param(msgspec.msgpack.encode(["Unknown", 1]), id="unknown type"),
        pytest.param(msgspec.msgpack.encode(["ReadReport", "one"]), id="wrong field type"),
        pytest.param(DEEPLY_NESTED, id="deeply nested"),
        pytest.param(pickle.dumps(os.getpid), id="pickle"),
    ],
)
def test_an_invalid_message_is_refused(payload: bytes) -> None:
    """With a ``ProtocolError`` that gives its size and what is wrong."""
    with pytest.raises(ProtocolError, match="not a valid message"):
        decode_from_worker(payload)


def test_frames_beyond_the_limits_are_refused() -> None:
    """By their header, before the payload is buffered."""
    with pytest.raises(ProtocolError, match="at most"):
        list(Framer().feed(struct.pack("<II", MAX_MESSAGE_BYTES + 1, 0)))
    with pytest.raises(ProtocolError, match="descriptors"):
        list(Framer().feed(struct.pack("<II", 1, MAX_DESCRIPTORS + 1)))


@pytest.mark.parametrize(
    "node",
    [
        ArrayNode("tensor", 0, 65530, [7], "|u1"),
        ArrayNode("tensor", 0, -1, [7], "|u1"),
        ArrayNode("tensor", 1, 0, [7], "|u1"),
        ArrayNode("tensor", 0, 0, [-7, -1], "|u1"),
        ArrayNode("tensor", 0, 0, [1 << 40, 1 << 40], "|u1"),
        ArrayNode("tensor", -1, 0, [0, 1 << 60, 1 << 60], "<f8"),
        ArrayNode("tensor", 0, 0, [1] * 100, "|u1"),
        ArrayNode("tensor", 0, 0, [2], "|O"),
        ArrayNode("tensor", 0, 0, [2], "i4,i4"),
        ArrayNode("tensor", 0, 0, [2], "no such thing"),
    ],
    ids=str,
)
def test_arrays_outside_the_ring_are_refused(node: ArrayNode) -> None:
    """Beyond the end of a segment, in an unknown segment, with a dtype of objects."""
    from aiofeed.ipc.shared_memory import create_segment

    segment, descriptor = create_segment(0, 65536)
    ring = Ring()
    ring.map_segments([NewSegment(0, segment.nbytes)], [descriptor])
    with pytest.raises(ProtocolError):
        ring.view(node)


def test_inconsistent_structures_are_refused() -> None:
    """Keys without values, invalid field names, invalid text, unknown classes."""
    for node in (
        ContainerNode("dict", [], ["a"]),
        ContainerNode("namedtuple", [1, 2], ["a", "class"], "m", "P"),
        ContainerNode("namedtuple", [], ["a"], "m", "P"),
        ContainerNode("dataclass", [1], ["a"], "subprocess", "Popen"),
        BytesNode("text", b"\xff"),
    ):
        with pytest.raises(ProtocolError):
            decode_batch(node, lambda array: array)


async def receive(*raw: bytes, descriptors: tuple[int, ...] = ()) -> tuple[list[Any], Exception | None]:
    """What a connection receives from a peer that sends bytes and closes, and the error that it ends with."""
    ours, theirs = socket.socketpair()
    messages: list[Any] = []
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def received(payload: bytes, found: list[int]) -> None:
        messages.append((payload, len(found)))

    connection = Connection(ours, received=received, lost=ended.set_result, limit_bytes=1000)
    with theirs:
        for data in raw:
            with contextlib.suppress(BrokenPipeError):  # the connection is closed
                socket.send_fds(theirs, [data], descriptors)
            await asyncio.sleep(0)
        theirs.shutdown(socket.SHUT_WR)
        error = await ended
    connection.close()
    return messages, error


async def test_a_connection_closes_at_an_invalid_message(caplog: pytest.LogCaptureFixture) -> None:
    """Earlier messages are received, later ones are not; the error is logged."""
    messages, error = await receive(frame(b"good"), frame(b"x" * 2000), frame(b"late"))
    assert messages == [(b"good", 0)]
    assert isinstance(error, ProtocolError)
    assert "refused a message" in caplog.text


async def test_half_a_message_before_the_end_is_ignored() -> None:
    """The connection ends without an error."""
    assert await receive(frame(b"good"), frame(b"half")[:-2]) == ([(b"good", 0)], None)


async def test_descriptors_that_do_not_match_are_closed() -> None:
    """Missing ones are an error; surplus ones are closed."""
    read, write = os.pipe()
    before = len(os.listdir("/dev/fd"))
    messages, error = await receive(frame(b"one", 1), descriptors=(read,))
    assert (messages, error) == ([(b"one", 1)], None)
    _, error = await receive(frame(b"two", 2), descriptors=(read,))
    assert isinstance(error, ProtocolError)
    _, error = await receive(frame(b"none", 0), descriptors=(read,) * 3)
    assert error is None
    assert len(os.listdir("/dev/fd")) == before
    os.close(read)
    os.close(write)


def test_an_end_behind_more_than_one_read() -> None:
    """It is noticed also if the peer left messages unread: uvloop then reports what has arrived only once."""
    loop = new_event_loop()

    async def main() -> tuple[list[int], Exception | None]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        sizes: list[int] = []
        lost: asyncio.Future[Exception | None] = loop.create_future()
        connection = Connection(
            ours, received=lambda payload, _: sizes.append(len(payload)), lost=lost.set_result, limit_descriptors=0
        )
        connection.send(b"never read")
        for _ in range(10):
            theirs.send(frame(bytes(8000)))
        theirs.close()
        return sizes, await asyncio.wait_for(lost, 10)

    try:
        assert loop.run_until_complete(main()) == ([8000] * 10, None)
    finally:
        loop.close()


async def test_messages_larger_than_a_socket_buffer() -> None:
    """In both directions at once, in order."""
    ours, theirs = socket.socketpair()
    received_by: dict[str, list[bytes]] = {"ours": [], "theirs": []}
    done = asyncio.Event()

    def receiver(name: str) -> Any:
        def received(payload: bytes, _: list[int]) -> None:
            received_by[name].append(payload)
            if len(received_by["ours"]) == len(received_by["theirs"]) == 3:
                done.set()

        return received

    ends = [
        Connection(sock, received=receiver(name), lost=lambda error: None)
        for sock, name in ((ours, "ours"), (theirs, "theirs"))
    ]
    sent = [os.urandom(size) for size in (3_000_000, 0, 1_000_000)]
    for payload in sent:
        for end in ends:
            end.send(payload)
    await done.wait()
    assert received_by == {"ours": sent, "theirs": sent}
    for end in ends:
        end.close()


def test_messages_survive_encoding() -> None:
    """In both directions, with 64-bit seeds."""
    plan = PlanBatch(1, 2, 2**64 - 1, np.arange(3).tobytes(), b"", True)
    assert decode_to_worker(encode(plan)) == plan
    ask, answer = ReplacementRequest(1, 2, 3), ReplacementAnswer(1, 5)
    assert decode_from_worker(encode(ask)) == ask
    assert decode_to_worker(encode(answer)) == answer


def reply(*parts: bytes, descriptors: tuple[int, ...] = ()) -> tuple[tuple[bytes, list[int]], bytes]:
    """What ``request`` returns if the peer sends these bytes and closes, and the bytes that it leaves in the socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [parts[0]], descriptors)
        for part in parts[1:]:
            theirs.sendall(part)
        theirs.shutdown(socket.SHUT_WR)
        found = request(ours, b"question", timeout_s=10.0, limit_bytes=1000, limit_descriptors=2)
        return found, ours.recv(1000)


def test_a_request_reads_one_message_and_nothing_after_it() -> None:
    """However the stream is split; the socket can be given to a ``Connection`` afterwards."""
    read, write = os.pipe()
    data = frame(b"answer", 1)
    (payload, descriptors), rest = reply(data[:3], data[3:10], data[10:] + b"rest", descriptors=(read,))
    assert (payload, len(descriptors), rest) == (b"answer", 1, b"rest")
    for descriptor in (read, write, *descriptors):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "descriptors", "error"),
    [
        (b"", 0, ConnectionError),
        (frame(b"half")[:-2], 0, ConnectionError),
        (frame(b"x" * 1001), 0, ProtocolError),
        (frame(b"x", 3), 3, ProtocolError),
        (frame(b"x", 1), 0, ProtocolError),
        (frame(b"x", 0), 1, ProtocolError),
    ],
    ids=["end", "half a message", "too long", "too many descriptors", "missing descriptor", "surplus descriptor"],
)
def test_an_invalid_answer_to_a_request(data: bytes, descriptors: int, error: type[Exception]) -> None:
    """It is an error, and its descriptors are closed."""
    read, write = os.pipe()
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(error):
        reply(data, descriptors=(read,) * descriptors)
    assert len(os.listdir("/dev/fd")) == before
    os.close(read)
    os.close(write)


def test_a_request_without_an_answer_times_out() -> None:
    """After the given time."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        request(ours, b"question", timeout_s=0.05)


SIGPIPE = """
import asyncio, os, signal, socket
from aiofeed.ipc.framing import Connection, send_message

def closed():
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours

async def main():
    for descriptors in ([], [os.open(os.devnull, os.O_RDONLY)]):
        Connection(closed(), received=lambda *_: None, lost=lambda _: None).send(b"message", descriptors)
    try:
        send_message(closed(), b"message")
    except BrokenPipeError:
        print("alive")

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
asyncio.run(main())
"""


def test_sigpipe_does_not_kill_a_process_whose_peer_has_closed() -> None:
    """Also after ``signal(SIGPIPE, SIG_DFL)``, which scripts use to end silently in a pipe."""
    command = [sys.executable, "-W", "ignore", "-c", SIGPIPE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
