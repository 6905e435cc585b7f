"""Messages between the process that shares tensors and those that attach to them: one ``Attach``, one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from aiofeed.processes.ipc.schema import DeviceMemoryHandle, Struct, decoder

# Of these messages. The sharing process refuses processes of another version.
VERSION = 1

Kind: TypeAlias = Literal["tensor", "list", "tuple", "dict"]


class Attach(Struct, frozen=True):
    """Requests the tensors; with ``host`` all of them in host memory."""

    version: int
    host: bool = False


class InSegment(Struct, frozen=True):
    """A tensor in host memory, in C order.

    Args:
        dtype: torch's name.
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
        dtype: torch's name.
        start: The first element in the storage.
        handle: The storage.
    """

    shape: list[int]
    dtype: str
    start: int
    handle: DeviceMemoryHandle


class Offer(Struct, frozen=True):
    """The tensors. The segments' descriptors are sent with the message, in the same order.

    Args:
        kind: Their container.
        keys: Keys of a dict.
        places: Where each tensor is.
        segments: Size of each segment in bytes.
    """

    kind: Kind
    keys: list[str | int]
    places: list[InSegment | OnDevice]
    segments: list[int]


class AttachRefused(Struct, frozen=True):
    """The tensors cannot be offered."""

    reason: str


Reply: TypeAlias = Offer | AttachRefused

decode_attach: Callable[[bytes], Attach] = decoder(Attach)
decode_reply: Callable[[bytes], Reply] = decoder(Reply)
