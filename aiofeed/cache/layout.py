"""What a kept sample looks like. All of a cache have one shape and one dtype, so that each is a row of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """The form in which samples are kept.

    Args:
        shape: of one sample.
        dtype: numpy's name of the element type.
        torch_dtype: name of a torch dtype that numpy lacks; ``dtype`` is then of its size.
        tensor: whether the decoder gave a tensor, not an array.
    """

    shape: tuple[int, ...]
    dtype: str
    torch_dtype: str | None = None
    tensor: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{'tensor' if self.tensor else 'array'} {self.torch_dtype or self.dtype} {list(self.shape)}"

    def typed(self, row: NDArray[np.uint8]) -> NDArray[Any]:
        """A row of bytes as what it is."""
        return row.view(self.dtype).reshape(self.shape)


def as_bytes(sample: NDArray[Any]) -> NDArray[np.uint8]:
    """A sample as a row of bytes; a view where its memory lies in order."""
    return np.ascontiguousarray(sample).reshape(-1).view(np.uint8)


def told_bytes(nbytes: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
