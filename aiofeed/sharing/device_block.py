"""A block of device memory that a server and its consumers have, as the server keeps it, and tensors in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiofeed.sharing.talk import Block

if TYPE_CHECKING:
    import torch

    from aiofeed.sharing.shared_device import SharedEvent

# Wide loads, and the grain of CUDA's allocator.
_ALIGNMENT = 512
# How bytes of each size cross; torch_dtype says what they are.
DTYPES = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


@dataclass(eq=False)
class Share:
    """What one consumer has of a block.

    Args:
        read: the event that it records.
        message: what it is still to be told.
    """

    read: SharedEvent
    message: Block | None


@dataclass(eq=False)
class DeviceBlock:
    """A block, its content's event, and who has it open.

    Args:
        number: what consumers know it by.
        memory: uint8 [nbytes].
        filled: complete once its content may be read.
        shared: what each consumer has of it.
    """

    number: int
    memory: torch.Tensor
    filled: SharedEvent
    shared: dict[Hashable, Share] = field(default_factory=dict)
    readers: set[Hashable] = field(default_factory=set)
    """Those whose copies of the last content are to be complete before the next."""
    spoiled: bool = False
    """Whether one that was let go still copies from it."""


def is_read(block: DeviceBlock) -> bool:
    """Whether its readers' copies are complete."""
    return all(block.shared[consumer].read.query() for consumer in block.readers)


def aligned(nbytes: int) -> int:
    """``nbytes``, and what is left free behind them."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def in_memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int] | None]:
    """The tensor in the order of its memory, where that is dense, and the axes that lead back (channels_last, say)."""
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    flat = tensor.permute(order)
    if not flat.is_contiguous():
        return tensor, None
    return flat, sorted(range(len(order)), key=order.__getitem__)
