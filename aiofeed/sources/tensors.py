"""Data that is in memory already: tensors and arrays, a sample per row."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.types import public

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Enough to tell data sets apart, and hashed in a few milliseconds.
FINGERPRINT_ROWS = 1024
FINGERPRINT_BYTES = 1 << 20


@public
class Tensors:
    """Tensors or arrays of one length, sample ``i`` being row ``i`` of each; they are held, not copied.

    A batch is a list with as many tensors, of the dtypes given; ``Tensors(x)`` gives ``[x]``. A feeder uploads the
    whole once, on every rank, and hands out views of a buffer into which it permutes rows; without a device the buffer
    is host memory. Leave the data as they are while they are fed.

    Args:
        tensors: each [N, ...]: host tensors, tensors on a device, or numpy arrays of numbers.
        alias: unshuffled batches are views of the data themselves rather than copies, where one rank has them all:
            who writes into a batch then writes into the data.

    Raises:
        TypeError: no tensors, or something that is no dense tensor or array of numbers, or one that requires grad.
        ValueError: a tensor without dimensions, or lengths that differ; with ``alias=True``, an array that is read-only
            or not contiguous.
    """

    def __init__(self, *tensors: torch.Tensor | NDArray[Any], alias: bool = False) -> None:
        if not tensors:
            raise TypeError("Tensors takes one tensor or array at least: Tensors(x, y)")
        if not isinstance(alias, bool):
            raise TypeError(f"Tensors(alias=...) must be True or False, got {alias!r}")
        for number, tensor in enumerate(tensors):
            _check(tensor, f"argument {number} of Tensors", alias)
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors of Tensors differ in length: {lengths}")
        self.tensors = tensors
        self.alias = alias

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    def __repr__(self) -> str:
        found = ", ".join(f"{_name(tensor)} {list(tensor.shape)}" for tensor in self.tensors)
        return f"Tensors({found}{', alias=True' if self.alias else ''})"

    def key(self, index: int, /) -> str:
        """The index: rows have no names of their own."""
        return f"Tensors[{index}]"

    def fingerprint(self) -> str:
        """Dtypes, shapes, and the contents of up to 1,024 evenly spaced rows, 1 MiB at most."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(f"{_name(tensor)} {list(tensor.shape)};".encode())
            count = min(len(tensor), FINGERPRINT_ROWS, max(FINGERPRINT_BYTES // max(tensor_row_bytes(tensor), 1), 1))
            for number in range(count):
                digest.update(_row(tensor, number * len(tensor) // count))
        return digest.hexdigest()[:32]


def _check(tensor: Any, what: str, alias: bool) -> None:
    if isinstance(tensor, np.ndarray):
        known = tensor.dtype.kind in "biu" or tensor.dtype.name in ("float16", "float32", "float64", "complex64")
        if type(tensor) not in (np.ndarray, np.memmap) or not (known or tensor.dtype == np.complex128):
            raise TypeError(f"{what} is a {type(tensor).__name__} of {tensor.dtype}, which no tensor can hold")
        if not tensor.dtype.isnative:
            raise TypeError(f"{what} has bytes in foreign order ({tensor.dtype.str}): convert it with .astype")
        if alias and not tensor.flags.writeable:
            raise ValueError(f"{what} is read-only, and with alias=True its batches could be written into")
    elif hasattr(tensor, "__torch_function__") and hasattr(tensor, "layout"):
        import torch

        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise TypeError(f"{what} is a tensor of layout {tensor.layout}; only dense ones have rows: .to_dense()")
        if tensor.requires_grad:
            raise TypeError(f"{what} requires grad, but data are fed, not trained: pass .detach()")
    else:
        raise TypeError(
            f"{what} must be a tensor or a numpy array, got {type(tensor).__name__}; torch.tensor makes one"
        )
    if tensor.ndim == 0:
        raise ValueError(f"{what} has no dimensions, so it has no rows")
    if alias and not _is_contiguous(tensor):
        raise ValueError(f"{what} is not contiguous, so that batches would be no views of it: pass .contiguous()")


def _is_contiguous(tensor: Any) -> bool:
    return bool(tensor.flags.c_contiguous if isinstance(tensor, np.ndarray) else tensor.is_contiguous())


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_row_bytes(tensor: Any) -> int:
    """Bytes of one row of a tensor or an array."""
    return int(np.prod(tensor.shape[1:], dtype=np.int64)) * int(tensor.dtype.itemsize)


def _row(tensor: Any, index: int) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor[index : index + 1].tobytes()
    import torch

    row = tensor[index : index + 1].cpu().resolve_conj().resolve_neg()
    # A single number counts as contiguous with any stride, and a view as bytes wants a stride of 1.
    row = row.clone(memory_format=torch.contiguous_format)
    return bytes(row.view(torch.uint8).numpy().tobytes())
