"""What those who share tensors and those who attach say to each other: plain typed structs, in MessagePack."""

from __future__ import annotations

from typing import Literal, TypeAlias, Union

import msgspec

from aiofeed.processes.ipc.schema import DeviceMemoryHandle, Struct, decode

VERSION = 1


class Attach(Struct, frozen=True):
    """Asks for the tensors.

    Args:
        version: of these messages.
        host: only in host memory: device memory is not wanted, or could not be opened.
    """

    version: int
    host: bool = False


class InSegment(Struct, frozen=True):
    """A tensor in host memory, in C order.

    Args:
        shape: of it.
        dtype: torch's name for it.
        segment: which segment of the offer; -1 for a tensor of no bytes.
        offset: where in it, in bytes.
        device: identity of the device from which it was brought; "" for none.
    """

    shape: list[int]
    dtype: str
    segment: int
    offset: int
    device: str = ""


class OnDevice(Struct, frozen=True):
    """A tensor in device memory, in C order.

    Args:
        shape: of it.
        dtype: torch's name for it.
        start: its first element, in the storage.
        handle: of the storage.
    """

    shape: list[int]
    dtype: str
    start: int
    handle: DeviceMemoryHandle


class Offer(Struct, frozen=True):
    """The tensors; the segments' descriptors come with the message, in this order.

    Args:
        pid: of the process that shares them.
        kind: what they are in.
        keys: of a dict.
        places: where each lies.
        segments: size of each, in bytes.
    """

    pid: int
    kind: Literal["tensor", "list", "tuple", "dict"]
    keys: list[str | int]
    places: list[InSegment | OnDevice]
    segments: list[int]


class AttachRefused(Struct, frozen=True):
    """There is nothing to be had."""

    reason: str


Reply: TypeAlias = Union[Offer, AttachRefused]  # noqa: UP007 - msgspec wants it resolvable

encode = msgspec.msgpack.Encoder().encode
_attach: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_attach(payload: bytes) -> Attach:
    """What an attacher says; ``WireError`` where it is nothing of the kind."""
    return decode(_attach, payload)


def decode_reply(payload: bytes) -> Reply:
    """What a sharer says; ``WireError`` where it is nothing of the kind."""
    return decode(_reply, payload)
