"""What a server and its consumers say to each other: plain typed structs, in MessagePack. See ``messages.py``."""

from __future__ import annotations

from typing import TypeAlias, Union

import msgspec

from aiofeed.processes.ipc.framing import MAX_MESSAGE_BYTES
from aiofeed.processes.ipc.schema import DeviceMemoryHandle, ErrorMessage, NewSegment, Node, Struct, decode

VERSION = 2
# What a consumer says is a few numbers; who says more is none.
MAX_WORD_BYTES = 1024
# What is said of a device: its name there, and why its memory cannot be opened here.
MAX_DEVICE_LETTERS = 128
MAX_REASON_LETTERS = 200
# The greeting has the handles of a piece of device memory and of two events.
MAX_GREETING_BYTES = 16 * 1024
# What a server says may describe a batch.
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES


# --- from a consumer to the server ---


class Hello(Struct, frozen=True):
    """The first word.

    Args:
        version: of what is said here.
    """

    version: int


class ProbeRequest(Struct, frozen=True):
    """The consumer is on the server's device and asks for memory to try, once, before its first ``Join``."""


class ProbeResult(Struct, frozen=True):
    """Whether it could be read.

    Args:
        reason: why not; "" where it could.
    """

    reason: str = ""


class Join(Struct, frozen=True):
    """The consumer wants to be fed, from the next epoch (or batch) on; what it is sent bears the ticket."""

    ticket: int


class Leave(Struct, frozen=True):
    """It wants no more under this ticket."""

    ticket: int


class Read(Struct, frozen=True):
    """It has read a batch, and does not need the slot any more."""

    serial: int


# --- from the server to a consumer ---


class DeviceBlockHandle(Struct, frozen=True):
    """Device memory of the server's, for one consumer to open; the server made the events, too.

    Args:
        number: what the server calls it.
        handle: of the memory.
        filled: handle of the event after which its content may be read; the server records it.
        read: handle of the event after which its content has been read; the consumer records it.
    """

    number: int
    handle: DeviceMemoryHandle
    filled: bytes
    read: bytes


class Probe(Struct, frozen=True):
    """Device memory to try.

    Args:
        block: the memory; ``None``: there is none to be had.
        content: what it holds.
        refusal: why there is none.
    """

    block: DeviceBlockHandle | None
    content: bytes = b""
    refusal: str = ""


class Welcome(Struct, frozen=True):
    """The answer to ``Hello``.

    Args:
        version: of what is said here.
        batches: per epoch, of one consumer; of a shard about, until an epoch has begun.
        device: what the device of the server's batches is called in every process; "" for host memory.
    """

    version: int
    batches: int
    device: str = ""


class ConsumerRefused(Struct, frozen=True):
    """The consumer is let go, at its first word or later; why."""

    reason: str


class EpochStarted(Struct, frozen=True):
    """An epoch begins.

    Args:
        ticket: of the consumer's ``Join``.
        epoch: its number.
        batches: of it that this consumer gets, where nobody joins or leaves.
    """

    ticket: int
    epoch: int
    batches: int


class BatchAvailable(Struct, frozen=True):
    """A batch stands in the ring; its slot is not written again until ``Read``.

    Args:
        ticket: of the consumer's ``Join``.
        serial: names the slot's content.
        number: the batch's position in the feeder's epoch.
        batch: the structure.
        nbytes: of its arrays.
        segments: memory that is new to this consumer.
        retired: numbers of segments that will not be used again.
        block: the device memory in which its device leaves lie; -1 for none.
        new_block: that memory, where it is new to this consumer.
        retired_blocks: numbers of device memory that will not be used again.
    """

    ticket: int
    serial: int
    number: int
    batch: Node
    nbytes: int
    segments: list[NewSegment]
    retired: list[int]
    block: int = -1
    new_block: DeviceBlockHandle | None = None
    retired_blocks: tuple[int, ...] = ()


class EpochEnded(Struct, frozen=True):
    """The epoch is over; the next one begins by itself."""

    ticket: int


class EpochFailed(Struct, frozen=True):
    """The epoch has failed, and with it the ``Join``."""

    ticket: int
    error: ErrorMessage


class ServerClosed(Struct, frozen=True):
    """The server was closed, in good order."""

    reason: str


FromConsumer: TypeAlias = Union[Hello, ProbeRequest, ProbeResult, Join, Leave, Read]  # noqa: UP007 - msgspec wants it resolvable
FromServer: TypeAlias = (
    Welcome | Probe | ConsumerRefused | EpochStarted | BatchAvailable | EpochEnded | EpochFailed | ServerClosed
)

_from_consumer: msgspec.msgpack.Decoder[FromConsumer] = msgspec.msgpack.Decoder(FromConsumer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_consumer(payload: bytes) -> FromConsumer:
    """A message from a consumer; ``WireError`` where it is none."""
    return decode(_from_consumer, payload)


def decode_from_server(payload: bytes) -> FromServer:
    """A message from a server; ``WireError`` where it is none."""
    return decode(_from_server, payload)
