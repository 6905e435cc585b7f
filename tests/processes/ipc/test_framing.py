"""Messages: framed, bounded, typed; what is none of them is refused and logged, and does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiofeed.core.errors import DecodeError, FeedError, ReadError
from aiofeed.processes.ipc import schema as messages
from aiofeed.processes.ipc.batch_codec import decode_batch
from aiofeed.processes.ipc.error_codec import describe, rebuild
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, Connection, Framer, ProtocolError, frame
from aiofeed.processes.ipc.ring import Ring
from aiofeed.processes.ipc.schema import (
    BatchReady,
    BatchStats,
    Leaf,
    Named,
    NewSegment,
    Plains,
    Raw,
    ReplacementAnswer,
    ReplacementRequest,
    Table,
    WorkerPlanMessage,
)

FILLED = BatchReady(3, Leaf("tensor", 0, 0, [2, 3], "|u1"), BatchStats(), 6, 2, [NewSegment(0, 65536)])


@given(st.lists(st.binary(max_size=200), max_size=6), st.data())
def test_frames_come_out_as_they_went_in(payloads: list[bytes], data: Any) -> None:
    """However the bytes are cut on their way."""
    stream = b"".join(frame(payload, number) for number, payload in enumerate(payloads))
    framer, found = Framer(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += framer.feed(stream[:size])
        stream = stream[size:]
    assert found == [(payload, number) for number, payload in enumerate(payloads)]


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """Nothing else comes of them: no other exception, no memory beyond what was sent."""
    for decode in (messages.decode_to_engine, messages.decode_from_engine):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(st.data())
def test_messages_with_bytes_changed_are_messages_or_refused(data: Any) -> None:
    """A batch's description that was tampered with is refused, or is one that fits the ring."""
    payload = bytearray(messages.encode(FILLED))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = messages.decode_from_engine(bytes(payload))
        if isinstance(message, BatchReady):
            decode_batch(message.batch, Ring().view)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(messages.encode(FILLED)[:-1], id="truncated"),
        pytest.param(messages.encode(FILLED) + b"\x00", id="followed by more"),
        pytest.param(msgspec.msgpack.encode(["Unknown", 1]), id="of no known kind"),
        pytest.param(msgspec.msgpack.encode(["WasRead", "one"]), id="of a wrong type"),
        pytest.param(b"\x98\xa6Filled\x03" + b"\x93\xa5Items\xa4list\x91" * 100_000, id="nested without end"),
        pytest.param(pickle.dumps(os.getpid), id="a pickle"),
    ],
)
def test_what_is_no_message(payload: bytes) -> None:
    """It is refused, and the refusal says what it was."""
    with pytest.raises(ProtocolError, match="no message"):
        messages.decode_from_engine(payload)


def test_frames_beyond_the_bounds() -> None:
    """Refused by their header, before anything is kept."""
    with pytest.raises(ProtocolError, match="at most"):
        list(Framer().feed(struct.pack("<II", MAX_MESSAGE_BYTES + 1, 0)))
    with pytest.raises(ProtocolError, match="descriptors"):
        list(Framer().feed(struct.pack("<II", 1, MAX_DESCRIPTORS + 1)))


@pytest.mark.parametrize(
    "leaf",
    [
        Leaf("tensor", 0, 65530, [7], "|u1"),
        Leaf("tensor", 0, -1, [7], "|u1"),
        Leaf("tensor", 1, 0, [7], "|u1"),
        Leaf("tensor", 0, 0, [-7, -1], "|u1"),
        Leaf("tensor", 0, 0, [1 << 40, 1 << 40], "|u1"),
        Leaf("tensor", -1, 0, [0, 1 << 60, 1 << 60], "<f8"),
        Leaf("tensor", 0, 0, [1] * 100, "|u1"),
        Leaf("tensor", 0, 0, [2], "|O"),
        Leaf("tensor", 0, 0, [2], "i4,i4"),
        Leaf("tensor", 0, 0, [2], "no such thing"),
    ],
    ids=str,
)
def test_arrays_that_do_not_lie_in_the_ring(leaf: Leaf) -> None:
    """Beyond its end, in no segment, of no plain type: refused, never read."""
    from aiofeed.processes.ipc.shared_memory import create

    segment, descriptor = create(0, 65536)
    ring = Ring()
    ring.learn([NewSegment(0, segment.nbytes)], [descriptor])
    with pytest.raises(ProtocolError):
        ring.view(leaf)


def test_structures_that_do_not_fit() -> None:
    """Keys without values, namedtuples with wrong names, texts that are none, classes that are unknown."""
    for node in (
        Table("dict", ["a"], []),
        Named("namedtuple", "m", "P", ["a", "class"], [Plains("list", []), Plains("list", [])]),
        Named("namedtuple", "m", "P", ["a"], []),
        Named("dataclass", "subprocess", "Popen", ["a"], [Plains("list", [])]),
        Raw("text", b"\xff"),
    ):
        with pytest.raises(ProtocolError):
            decode_batch(node, lambda leaf: leaf)


async def conversation(*raw: bytes, descriptors: tuple[int, ...] = ()) -> tuple[list[Any], list[Exception | None]]:
    """What a wire makes of bytes that the other end sends before it closes."""
    ours, theirs = socket.socketpair()
    heard: list[Any] = []
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def received(payload: bytes, found: list[int]) -> None:
        heard.append((payload, len(found)))

    wire = Connection(ours, received=received, lost=ended.set_result, limit_bytes=1000)
    with theirs:
        for data in raw:
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more
                socket.send_fds(theirs, [data], descriptors)
            await asyncio.sleep(0)
        theirs.shutdown(socket.SHUT_WR)
        error = await ended
    wire.close()
    return heard, [error]


async def test_a_wire_that_is_sent_nonsense_closes(caplog: pytest.LogCaptureFixture) -> None:
    """What came before it counts; it is logged, and nothing after it is read."""
    heard, [error] = await conversation(frame(b"good"), frame(b"x" * 2000), frame(b"late"))
    assert heard == [(b"good", 0)]
    assert isinstance(error, ProtocolError)
    assert "a message was refused" in caplog.text


async def test_a_wire_that_is_cut_off_in_a_message() -> None:
    """Half a message is none; the end is only an end."""
    assert await conversation(frame(b"good"), frame(b"half")[:-2]) == ([(b"good", 0)], [None])


async def test_descriptors_that_nobody_announced_are_closed() -> None:
    """Whether they are too many or too few, none stays open."""
    read, write = os.pipe()
    heard, [error] = await conversation(frame(b"one", 1), descriptors=(read,))
    assert (heard, error) == ([(b"one", 1)], None)
    _, [error] = await conversation(frame(b"two", 2), descriptors=(read,))
    assert isinstance(error, ProtocolError)
    _, [error] = await conversation(frame(b"none", 0), descriptors=(read,) * 3)
    assert error is None
    os.close(read)
    os.close(write)


async def test_large_messages_pass_in_pieces() -> None:
    """More than a socket holds, both ways at once, in order."""
    ours, theirs = socket.socketpair()
    heard: dict[str, list[bytes]] = {"ours": [], "theirs": []}
    done = asyncio.Event()

    def receiver(name: str) -> Any:
        def received(payload: bytes, _: list[int]) -> None:
            heard[name].append(payload)
            if len(heard["ours"]) == len(heard["theirs"]) == 3:
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
    assert heard == {"ours": sent, "theirs": sent}
    for end in ends:
        end.close()


def test_messages_survive() -> None:
    """Both directions, with 64-bit seeds."""
    plan = WorkerPlanMessage(1, 2, 2**64 - 1, np.arange(3).tobytes(), b"", True)
    assert messages.decode_to_engine(messages.encode(plan)) == plan
    ask, answer = ReplacementRequest(1, 2, 3), ReplacementAnswer(1, 5)
    assert messages.decode_from_engine(messages.encode(ask)) == ask
    assert messages.decode_to_engine(messages.encode(answer)) == answer


def test_errors_cross_with_their_causes() -> None:
    """Ours and Python's own by their types; keys that UTF-8 cannot hold; notes; what has no such type by its name."""
    missing = FileNotFoundError(2, "No such file", "/a/b")
    missing.add_note("looked twice")
    error = ReadError("cannot read", key="a\udcff", index=3, stage="read")
    error.__cause__ = missing
    payload = messages.encode(messages.BatchFailed(1, describe(error), [], BatchStats(), 0))
    message = messages.decode_from_engine(payload)
    assert isinstance(message, messages.BatchFailed)
    again = rebuild(message.error)
    assert type(again) is ReadError
    assert (again.key, again.index, again.stage) == ("a\udcff", 3, "read")
    cause = again.__cause__
    assert type(cause) is FileNotFoundError
    assert (cause.errno, cause.filename, cause.__notes__) == (2, "/a/b", ["looked twice"])
    assert type(rebuild(describe(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")))) is FeedError
    assert type(rebuild(describe(KeyError("x")))) is KeyError
    assert type(rebuild(describe(SystemExit(1)))) is FeedError
    strange = describe(DecodeError("x" * 100_000, key="k", index=0, stage="decode"))
    assert len(messages.encode(strange)) < 20_000
