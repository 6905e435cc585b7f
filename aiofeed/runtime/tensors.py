"""Tensors over memory of ours, and memory of tensors: the seam between numpy's hands and torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.pytree import map_leaves
from aiofeed.core.types import HostTensor
from aiofeed.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def as_tensor(leaf: HostTensor) -> torch.Tensor:
    """The tensor over a leaf's memory, as the user sees it; nothing is copied."""
    import torch

    tensor = torch.from_numpy(leaf.memory)
    if leaf.torch_dtype is not None:
        tensor = tensor.view(getattr(torch, leaf.torch_dtype))
    return tensor if leaf.axes is None else tensor.permute(leaf.axes)


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
        axes = tuple(int(axis) for axis in np.argsort([-stride for stride in memory.strides], kind="stable"))
        flat = memory.transpose(axes)
        if not flat.flags.c_contiguous:
            axes, flat = tuple(range(memory.ndim)), memory
        rows = array(lease, flat.shape, flat.dtype)
        np.copyto(rows, flat)
        total += rows.nbytes
        back = tuple(int(axis) for axis in np.argsort(axes))
        return HostTensor(
            rows, axes=None if back == tuple(range(len(back))) else back, torch_dtype=torch_dtype, pinned=lease.pinned
        )

    return map_leaves(move, batch), total
