"""Conversions between tensors and numpy arrays that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.kernel.core.pytree import is_flat_plain, map_leaves
from aiofeed.kernel.core.types import DeferredTensor, HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


# Integer dtypes by size in bytes. Not every dtype supports every operation; copies and gathers can use integers.
INTEGER_OF_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


NUMBER_DTYPES: dict[type, np.dtype[Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
}
"""The dtypes of the tensors that ``default_collate`` makes of Python numbers."""


# Numbers of numpy that torch has, too; it lacks the long double, and a second type of 64 bits without a sign.
_TORCH_CHARS = "?bhilqBHILefdFD" + np.dtype("u8").char


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor reinterpreted as integers of the same size; the tensor itself if there is no such dtype."""
    import torch

    name = INTEGER_OF_SIZE.get(tensor.dtype.itemsize)
    return tensor if name is None else tensor.view(getattr(torch, name))


def memory_order(strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes by descending stride, and the inverse permutation, for dense data such as channels_last."""
    axes = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return axes, tuple(sorted(range(len(axes)), key=axes.__getitem__))


def in_memory_order(memory: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, ...] | None]:
    """A dense array in the order of its memory, and the axes that undo that; an array with gaps, and ``None``."""
    if memory.flags.c_contiguous:
        return memory, None
    axes, back = memory_order(memory.strides)
    flat = memory.transpose(axes)
    return (flat, back) if flat.flags.c_contiguous else (memory, None)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without importing torch for other values."""
    # Cheaper than an import. Arrays and scalars have no such attribute.
    if not hasattr(value, "__torch_function__") or isinstance(value, type):
        return False
    import torch

    return isinstance(value, torch.Tensor)


def as_tensor(leaf: HostTensor) -> torch.Tensor:
    """Return the user's tensor over the memory of a leaf, without a copy."""
    return restore_layout(tensor_of(leaf.memory), leaf)


def tensor_of(memory: NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of an array."""
    import torch

    tensor = torch.from_numpy(memory)
    keep_memory(tensor.untyped_storage(), memory)
    return tensor


def keep_memory(storage: Any, memory: Any) -> None:
    """Let a storage refer to its memory until the storage is destroyed.

    ``share_memory_`` and sending to a process give the storage other memory. Arrays that ``numpy()`` has made before
    still use the first, and refer to the storage only.
    """
    storage.memory = memory


def restore_layout(memory: torch.Tensor, leaf: HostTensor) -> torch.Tensor:
    """Return a view of ``memory``, the leaf's memory or a copy of it on a device, with the leaf's dtype and axes."""
    if leaf.torch_dtype is not None:
        import torch

        memory = memory.view(getattr(torch, leaf.torch_dtype))
    return memory if leaf.axes is None else memory.permute(leaf.axes)


def unchanged(batch: Any) -> Any:
    """Return the batch itself; replaces ``as_tensors`` where a copier reads the host memory."""
    return batch


def as_tensors(batch: Any) -> Any:
    """Return a batch with a tensor in place of each ``HostTensor`` and ``DeferredTensor``; container types stay."""
    return map_leaves(_as_tensor_leaf, batch, is_flat_plain)


def _as_tensor_leaf(leaf: Any) -> Any:
    if type(leaf) is HostTensor:
        return as_tensor(leaf)
    return leaf.arrive(as_tensor) if isinstance(leaf, DeferredTensor) else leaf


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has this dtype."""
    return dtype.char in _TORCH_CHARS and dtype.isnative


def as_array(value: Any) -> tuple[NDArray[Any] | None, str | None]:
    """The memory of a plain host tensor or array, and its torch dtype if numpy lacks it; else ``(None, None)``."""
    if isinstance(value, np.ndarray):
        return (value, None) if is_plain(value.dtype) and type(value) is np.ndarray else (None, None)
    if not hasattr(value, "__torch_function__"):
        return None, None
    import torch

    if type(value) is not torch.Tensor:
        return None, None
    try:
        if value.dtype is torch.bfloat16 and not value.requires_grad:
            return value.view(torch.int16).numpy(), "bfloat16"
        return value.numpy(), None
    except (TypeError, RuntimeError):  # requires a gradient, on a device, sparse, a dtype that numpy lacks, ...
        return None, None


def stage(batch: Any, lease: BufferLease) -> tuple[Any, int]:
    """Return a batch with its plain host tensors copied into the lease's memory, and the number of bytes copied.

    Pinned tensors are not copied, because the device can copy from them.
    """
    total = 0

    def move(value: Any) -> Any:
        nonlocal total
        if isinstance(value, np.ndarray):
            return value
        memory, torch_dtype = as_array(value)
        if memory is None or value.is_pinned():
            return value
        # Copies the memory, not the view, so that a dense tensor such as channels_last keeps its strides.
        flat, axes = in_memory_order(memory)
        rows = array(lease, flat.shape, flat.dtype)
        np.copyto(rows, flat)
        total += rows.nbytes
        return HostTensor(rows, axes=axes, torch_dtype=torch_dtype, pinned=lease.pinned)

    return map_leaves(move, batch), total


def tensor_row_bytes(tensor: Any) -> int:
    """Bytes of one row of a tensor or an array."""
    return int(np.prod(tensor.shape[1:], dtype=np.int64)) * int(tensor.dtype.itemsize)
