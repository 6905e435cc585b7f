"""Messages between the process that shares tensors and those that attach to them: one ``Attach``, one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from aiofeed.ipc.schema import DeviceMemoryHandle, NewSegment, Node, Struct, decoder

# Of these messages. The sharing process refuses processes of another version.
VERSION = 2


class Attach(Struct, frozen=True):
    """Requests the tensors; with ``host`` all of them in host memory."""

    version: int
    host: bool = False


class Offer(Struct, frozen=True):
    """The tensors, as ``encode_batch`` describes them; the offset of one in device memory is in its storage.

    Args:
        tensors: Their container.
        segments: Their host memory. The descriptors are sent with the message, in the same order.
        handles: The storages of those in device memory, one for each, in the same order.
        devices: For each tensor the identity of the device that it was copied from; "" for none.
    """

    tensors: Node
    segments: list[NewSegment]
    handles: list[DeviceMemoryHandle]
    devices: list[str]


class AttachRefused(Struct, frozen=True):
    """The tensors cannot be offered."""

    reason: str


Reply: TypeAlias = Offer | AttachRefused

decode_attach: Callable[[bytes], Attach] = decoder(Attach)
decode_reply: Callable[[bytes], Reply] = decoder(Reply)
