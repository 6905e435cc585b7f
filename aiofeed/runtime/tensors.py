"""Tensors over memory of ours, and memory of tensors: the seam between numpy's hands and torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.pytree import map_leaves
from aiofeed.core.types import HostTensor
from aiofeed.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


# The integer dtype that has the size of a number of so many bytes. Not every dtype has every operation: a copy or a
# gather reads the same bytes as integers.
INTEGER_OF_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def integer_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The integer dtype of the same size; the dtype itself where there is no such integer."""
    name = INTEGER_OF_SIZE.get(dtype.itemsize)
    return dtype if name is None else np.dtype(name)


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers of the same size; the tensor itself where there is no such integer."""
    import torch

    name = INTEGER_OF_SIZE.get(tensor.dtype.itemsize)
    return tensor if name is None else tensor.view(getattr(torch, name))


def memory_order(strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes by falling stride, and the axes that lead back, for dense data in another order (channels_last)."""
    axes = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return axes, tuple(sorted(range(len(axes)), key=axes.__getitem__))


def in_memory_order(memory: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, ...] | None]:
    """A dense array in the order of its memory, and the axes that lead back; an array with gaps stays as it is."""
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
    """The tensor over a leaf's memory, as the user sees it; nothing is copied."""
    import torch

    return restore_layout(torch.from_numpy(leaf.memory), leaf)


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
    """A batch with every leaf of ours turned into a tensor; containers keep their types."""
    return map_leaves(lambda leaf: as_tensor(leaf) if type(leaf) is HostTensor else leaf, batch)


def as_array(value: Any) -> tuple[NDArray[Any] | None, str | None]:
    """Memory of a plain host tensor or array, and the torch dtype where numpy has none; ``None`` for the rest."""
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biufc" and value.dtype.isnative and type(value) is np.ndarray
        return (value, None) if plain else (None, None)
    if not hasattr(value, "__torch_function__"):
        return None, None
    import torch

    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        return None, None
    if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
        return None, None
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy(), "bfloat16"
    try:
        return value.numpy(), None
    except (TypeError, RuntimeError):  # a dtype that numpy lacks: torch collates it
        return None, None


def stage(batch: Any, lease: BufferLease) -> tuple[Any, int]:
    """A batch with its plain host tensors copied into the slot's memory, and the bytes that took.

    Tensors that are pinned already stay where they are: a copy can run from there.
    """
    total = 0

    def move(value: Any) -> Any:
        nonlocal total
        if isinstance(value, np.ndarray):
            return value
        memory, torch_dtype = as_array(value)
        if memory is None or value.is_pinned():
            return value
        # A dense tensor in another order (channels_last) keeps its strides: the flat memory moves, not the view.
        flat, axes = in_memory_order(memory)
        rows = array(lease, flat.shape, flat.dtype)
        np.copyto(rows, flat)
        total += rows.nbytes
        return HostTensor(rows, axes=axes, torch_dtype=torch_dtype, pinned=lease.pinned)

    return map_leaves(move, batch), total
