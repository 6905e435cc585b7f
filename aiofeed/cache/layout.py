"""Layouts of cached samples. All samples of a cache share one layout, so that each is a row of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Parts: TypeAlias = "Sequence[NDArray[Any]]"
"""The arrays of one sample, in the order of its layout's ``parts``."""


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a sample that is one array.

    Args:
        shape: Shape of the array.
        dtype: numpy's name of the element type.
        torch_dtype: Name of a torch dtype that numpy lacks; ``dtype`` then has the same size.
        tensor: Whether the sample is a tensor rather than an array.
    """

    shape: tuple[int, ...]
    dtype: str
    torch_dtype: str | None = None
    tensor: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{'tensor' if self.tensor else 'array'} {self.torch_dtype or self.dtype} {list(self.shape)}"

    @property
    def parts(self) -> tuple[Layout, ...]:
        """The layout of each array of a sample."""
        return (self,)

    def view(self, row: NDArray[np.uint8]) -> NDArray[Any]:
        """A row of bytes as an array of this shape and dtype."""
        return row.view(self.dtype).reshape(self.shape)

    def split(self, row: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The arrays of a sample in its row of bytes: views, which may be unaligned."""
        return [self.view(row)]


def layout_from_file(
    shape: Sequence[int], dtype: str, torch_dtype: str | None = None, *, tensor: bool = False
) -> Layout:
    """The layout of an array, given its description in a file.

    Raises:
        TypeError, ValueError: There are no such arrays.
    """
    itemsize = np.dtype(dtype).itemsize
    if torch_dtype is not None:
        import torch

        known = getattr(torch, torch_dtype, None)
        if not isinstance(known, torch.dtype) or known.itemsize != itemsize:
            raise TypeError(f"torch has no dtype {torch_dtype} of {itemsize} bytes")
    return Layout(tuple(shape), dtype, torch_dtype, tensor)


@dataclass(frozen=True)
class ItemLayout(Layout):
    """Layout of a ``Dataset``'s item, whose arrays lie one behind the other: ``shape`` [bytes], ``dtype`` uint8.

    Args:
        form: Structure, shapes and dtypes as text. Two layouts with the same form are equal. In a file it is JSON.
        types: For a file, the classes of the item's namedtuples, "module:name" each, depth first.
        description: The layout as error messages show it.
        parts: The layout of each array.
        template: An item with an ``ItemPart`` in place of each number, array and tensor; ``None`` if only ``form`` is
            known.
    """

    form: str = ""
    types: tuple[str, ...] = field(default=(), compare=False)
    description: str = field(default="", compare=False)
    parts: tuple[Layout, ...] = field(default=(), compare=False)
    template: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.description

    @cached_property
    def _slices(self) -> list[tuple[Layout, slice]]:
        ends = accumulate((part.nbytes for part in self.parts), initial=0)
        return [(part, slice(*ends)) for part, ends in zip(self.parts, pairwise(ends), strict=True)]

    def split(self, row: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The arrays of an item in its row of bytes: views, which may be unaligned."""
        return [part.view(row[at]) for part, at in self._slices]


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """An array as a row of bytes; a view if the array is C-contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack(parts: Parts) -> NDArray[np.uint8]:
    """The arrays of a sample as one row of bytes; a view of a single C-contiguous array."""
    return as_bytes(parts[0]) if len(parts) == 1 else np.concatenate([as_bytes(part) for part in parts])
