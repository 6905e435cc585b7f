"""The memory of arrays that another process describes; nothing that it says of them is taken on trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.processes.ipc.framing import WireError
from aiofeed.processes.ipc.schema import Leaf

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPE_KINDS = "biufcSUMm"
_MOST_DIMENSIONS = 32


def extent(leaf: Leaf) -> tuple[np.dtype[Any], int]:
    """The dtype of an array's memory, and its size in bytes.

    Raises:
        WireError: it is no plain array.
    """
    dtype = plain_dtype(leaf.dtype)
    if len(leaf.shape) > _MOST_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in leaf.shape):
        raise WireError(f"an array of shape {leaf.shape}")
    count = 1
    for size in leaf.shape:
        count *= size
    return dtype, count * dtype.itemsize


def empty_array(shape: list[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of no bytes.

    Raises:
        WireError: there is none of this shape.
    """
    try:
        return np.empty(shape, dtype)
    except ValueError as error:  # though it has no bytes, its other dimensions may be too many
        raise WireError(f"an array of shape {shape}: {error}") from None


def plain_dtype(text: str) -> np.dtype[Any]:
    """A dtype of plain bytes; ``WireError`` for any other."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise WireError(f"{text!r} is no dtype: {error}") from None
    if dtype.kind not in _DTYPE_KINDS or dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise WireError(f"{text!r} is no dtype of plain bytes")
    return dtype
