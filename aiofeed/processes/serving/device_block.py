"""A block of device memory that a server and its consumers have, as the server keeps it, and what lies in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiofeed.processes.ipc.arrays import extent
from aiofeed.processes.ipc.batch_codec import axes_of
from aiofeed.processes.ipc.framing import WireError
from aiofeed.processes.ipc.schema import Leaf
from aiofeed.processes.serving.protocol import Block

if TYPE_CHECKING:
    import torch

    from aiofeed.processes.ipc.shared_device import SharedEvent

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


class Place:
    """Where a tensor lies in a slot's device memory. No dataclass: that would be taken apart with the batch.

    Args:
        leaf: described so.
        nbytes: of the slot.
    """

    __slots__ = ("_axes", "_dtype", "_leaf", "_nbytes")

    def __init__(self, leaf: Leaf, nbytes: int) -> None:
        import torch

        self._leaf = leaf
        self._axes = axes_of(leaf)
        dtype, self._nbytes = extent(leaf)
        torch_dtype: Any = getattr(torch, leaf.torch_dtype or "", None)
        if not isinstance(torch_dtype, torch.dtype) or torch_dtype.itemsize != dtype.itemsize:
            raise WireError(f"torch_dtype {leaf.torch_dtype!r} for {leaf.dtype}")
        self._dtype = torch_dtype
        if leaf.offset < 0 or leaf.offset % dtype.itemsize or leaf.offset + self._nbytes > nbytes:
            raise WireError(f"{self._nbytes} bytes at {leaf.offset} do not lie in a block of {nbytes}")

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in the slot's memory or in a copy of it."""
        start = self._leaf.offset
        flat = memory[start : start + self._nbytes].view(self._dtype).view(self._leaf.shape)
        return flat if self._axes is None else flat.permute(self._axes)
