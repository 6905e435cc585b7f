"""What a kept sample looks like. All of a cache have one shape and one dtype, so that each is a row of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
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

    @property
    def columns(self) -> tuple[Layout, ...]:
        """What is kept in memory of its own, each [samples, ...], where batches are views of what is kept."""
        return (self,)

    def typed(self, row: NDArray[np.uint8]) -> NDArray[Any]:
        """A row of bytes as what it is."""
        return row.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class ItemLayout(Layout):
    """The form of items of several parts, kept one behind the other: ``shape`` [bytes], ``dtype`` uint8.

    Args:
        form: structure, shapes and dtypes in words, which make two alike; for a file, as ``written_forms`` puts it.
        types: for a file, the classes of its namedtuples, "module:name" each, depth first.
        told: the form for people.
        parts: what each is.
        template: an item with what describes a part, by place in ``parts``, where that stands; ``None`` where only the
            form is known.
    """

    form: str = ""
    types: tuple[str, ...] = field(default=(), compare=False)
    told: str = field(default="", compare=False)
    parts: tuple[Layout, ...] = field(default=(), compare=False)
    template: Any = field(default=None, compare=False)

    @property
    def columns(self) -> tuple[Layout, ...]:
        """The parts."""
        return self.parts

    def __str__(self) -> str:
        return self.told

    def pack(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
        """The parts as a row of bytes; a view of the only one where its memory lies in order."""
        return as_bytes(parts[0]) if len(parts) == 1 else np.concatenate([as_bytes(part) for part in parts])

    def split(self, row: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The parts of a row of bytes: views, whose memory may begin anywhere."""
        return [part.typed(piece) for part, piece in zip(self.parts, self.pieces(row), strict=True)]

    def pieces(self, row: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The bytes of each part; views."""
        ends = list(accumulate((part.nbytes for part in self.parts), initial=0))
        return [row[first:last] for first, last in pairwise(ends)]


def as_bytes(sample: NDArray[Any]) -> NDArray[np.uint8]:
    """A sample as a row of bytes; a view where its memory lies in order."""
    return np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
