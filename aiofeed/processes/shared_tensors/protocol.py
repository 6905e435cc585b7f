"""Messages between the process that shares tensors and those that attach to them: one ``Attach``, one reply."""

from __future__ import annotations

from typing import Literal, TypeAlias, Union

import msgspec

from aiofeed.processes.ipc.schema import DeviceMemoryHandle, Struct, decode

# Of these messages. The sharing process refuses processes of another version.
VERSION = 1


class Attach(Struct, frozen=True):
    """Requests the tensors.

    Args:
        version: Version of these messages.
        host: Whether all of them are to be in host memory.
    """

    version: int
    host: bool = False


class InSegment(Struct, frozen=True):
    """A tensor in host memory, in C order.

    Args:
        shape: Shape of the tensor.
        dtype: torch's name for its dtype.
        segment: Position of its segment in the offer; -1 for a tensor of 0 bytes.
        offset: Bytes from the start of the segment.
        device: Identity of the device that it was copied from; "" for none.
    """

    shape: list[int]
    dtype: str
    segment: int
    offset: int
    device: str = ""


class OnDevice(Struct, frozen=True):
    """A tensor in device memory, in C order.

    Args:
        shape: Shape of the tensor.
        dtype: torch's name for its dtype.
        start: Its first element in the storage.
        handle: Handle of the storage.
    """

    shape: list[int]
    dtype: str
    start: int
    handle: DeviceMemoryHandle


class Offer(Struct, frozen=True):
    """The tensors. The segments' descriptors are sent with the message, in the same order.

    Args:
        pid: Process id of the process that shares them.
        kind: Their container.
        keys: Keys of a dict.
        places: Where each tensor is.
        segments: Size of each segment in bytes.
    """

    pid: int
    kind: Literal["tensor", "list", "tuple", "dict"]
    keys: list[str | int]
    places: list[InSegment | OnDevice]
    segments: list[int]


class AttachRefused(Struct, frozen=True):
    """The tensors cannot be offered."""

    reason: str


Reply: TypeAlias = Union[Offer, AttachRefused]  # noqa: UP007 - msgspec cannot resolve `X | Y` here

_attach: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_attach(payload: bytes) -> Attach:
    """Decode a request; ``ProtocolError`` if it is none."""
    return decode(_attach, payload)


def decode_reply(payload: bytes) -> Reply:
    """Decode a reply; ``ProtocolError`` if it is none."""
    return decode(_reply, payload)
