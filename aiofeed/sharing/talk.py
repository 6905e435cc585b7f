"""What a server and its consumers say to each other: plain typed structs, in MessagePack. See ``messages.py``."""

from __future__ import annotations

from typing import TypeAlias, Union

import msgspec

from aiofeed.sharing.messages import Failure, NewSegment, Node, Struct, decode
from aiofeed.sharing.wire import MAX_MESSAGE_BYTES

VERSION = 1
# What a consumer says is a few numbers; who says more is none.
MAX_WORD_BYTES = 1024
# What a server says may describe a batch.
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES


# --- from a consumer to the server ---


class Hello(Struct, frozen=True):
    """The first word.

    Args:
        version: of what is said here.
    """

    version: int


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


class Welcome(Struct, frozen=True):
    """The answer to ``Hello``.

    Args:
        version: of what is said here.
        batches: per epoch, of one consumer; of a shard about, until an epoch has begun.
    """

    version: int
    batches: int


class Refused(Struct, frozen=True):
    """The consumer is let go, at its first word or later; why."""

    reason: str


class Begins(Struct, frozen=True):
    """An epoch begins.

    Args:
        ticket: of the consumer's ``Join``.
        epoch: its number.
        batches: of it that this consumer gets, where nobody joins or leaves.
    """

    ticket: int
    epoch: int
    batches: int


class Given(Struct, frozen=True):
    """A batch stands in the ring; its slot is not written again until ``Read``.

    Args:
        ticket: of the consumer's ``Join``.
        serial: names the slot's content.
        number: the batch's position in the feeder's epoch.
        batch: the structure.
        nbytes: of its arrays.
        segments: memory that is new to this consumer.
        retired: numbers of segments that will not be used again.
    """

    ticket: int
    serial: int
    number: int
    batch: Node
    nbytes: int
    segments: list[NewSegment]
    retired: list[int]


class Ends(Struct, frozen=True):
    """The epoch is over; the next one begins by itself."""

    ticket: int


class Fails(Struct, frozen=True):
    """The epoch has failed, and with it the ``Join``."""

    ticket: int
    error: Failure


class Farewell(Struct, frozen=True):
    """The server was closed, in good order."""

    reason: str


FromConsumer: TypeAlias = Union[Hello, Join, Leave, Read]  # noqa: UP007 - msgspec wants it resolvable
FromServer: TypeAlias = Union[Welcome, Refused, Begins, Given, Ends, Fails, Farewell]  # noqa: UP007 - as above

_from_consumer: msgspec.msgpack.Decoder[FromConsumer] = msgspec.msgpack.Decoder(FromConsumer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_consumer(payload: bytes) -> FromConsumer:
    """A message from a consumer; ``WireError`` where it is none."""
    return decode(_from_consumer, payload)


def decode_from_server(payload: bytes) -> FromServer:
    """A message from a server; ``WireError`` where it is none."""
    return decode(_from_server, payload)
