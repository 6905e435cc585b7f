"""An array in chunks, which are read and decoded one by one, and arrays that are joined along an axis."""

from __future__ import annotations

import base64
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.kernel.core.validation import check_expanded
from aiofeed.kernel.runtime.tensors import is_plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

Chunk: TypeAlias = tuple[int, ...]

# The size of the chunks of an array that has none.
CHUNK_BYTES = 1 << 20


@dataclass(eq=False, kw_only=True)
class ChunkedArray(ABC):
    """An array in chunks.

    Args:
        name: Its path or URL, and its name in the file.
        shape: Its shape.
        chunks: The shape of a chunk; those at the end may reach beyond the array.
        dtype: The dtype of what is stored.
        dims: The names of its axes, if they have names.
        fill: The value in chunks that are not stored.
        attributes: What is known about it, by name.
        version: Changes with its contents, as far as that is known.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...] | None = None
    fill: Any = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    scaling: Scaling | None = None
    local: bool = True
    """Whether ``read_now`` reads a chunk; otherwise ``read`` does."""

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        raise NotImplementedError

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        raise NotImplementedError

    @abstractmethod
    def unpack(self, data: Any, chunk: Chunk) -> NDArray[Any]:
        """Return the stored values of a chunk."""

    def decode(self, data: Any, chunk: Chunk) -> NDArray[Any] | Any:
        """Return the values of a chunk, or the one value of all of it.

        Raises:
            ValueError: The chunk is damaged.
        """
        values = np.asarray(self.fill, self.dtype)
        if data is not None:
            values = self.unpack(data, chunk)
        return values if self.scaling is None else self.scaling.apply(values)

    def where(self, chunk: Chunk) -> str:
        """Return the name of a chunk in messages."""
        return f"{self.name}, chunk {'.'.join(map(str, chunk))}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of samples."""
        return (self.dtype if self.scaling is None else self.scaling.dtype).newbyteorder("=")

    def expected(self, data: Any) -> int:
        """Return the bytes of a decoded chunk, if so much may be made of ``data``."""
        return check_expanded(self.name, self.chunk_bytes, len(data))


@dataclass(eq=False, kw_only=True)
class OpenedArray(ChunkedArray):
    """An array of any library that is opened or in memory: a part of it is read by an index."""

    array: Any

    def read_now(self, chunk: Chunk) -> Any:
        """Return the chunk."""
        slices = tuple(slice(at * size, (at + 1) * size) for at, size in zip(chunk, self.chunks, strict=True))
        return np.asarray(self.array[slices])

    def unpack(self, data: Any, chunk: Chunk) -> NDArray[Any]:
        """Return the chunk."""
        return data  # type: ignore[no-any-return]


def opened(array: Any, name: str, **known: Any) -> OpenedArray:
    """Return an opened array by its attributes ``shape`` and ``dtype``; its chunks are those that it names."""
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    dims = getattr(array, "dims", None)
    sizes = getattr(array, "chunksize", None) or dict(getattr(array, "encoding", {})).get("preferred_chunks")
    if isinstance(sizes, Mapping):
        sizes = [sizes.get(dim, size) for dim, size in zip(dims or (), shape, strict=True)]
    found = sizes or known.pop("chunks", None) or rows_of(shape, dtype)
    known.setdefault("dims", tuple(map(str, dims)) if isinstance(dims, tuple) else None)
    known.setdefault("version", str(getattr(array, "encoding", {}).get("source", "")))
    return OpenedArray(array=array, name=name, shape=shape, chunks=tuple(found), dtype=dtype, **known)


def rows_of(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the shape of parts along the first axis of about a MiB."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return (max(1, min(CHUNK_BYTES // max(row_bytes, 1), shape[0])), *shape[1:]) if shape else ()


@dataclass
class Scaling:
    """What the CF conventions say of packed values: ``value * factor + offset``, and those that are missing.

    dtypes are those of xarray.
    """

    dtype: np.dtype[Any]
    factor: Any = None
    offset: Any = None
    missing: tuple[Any, ...] = ()
    unsigned: np.dtype[Any] | None = None

    def apply(self, values: Any) -> Any:
        """Return values, with NaN where one is missing."""
        if self.unsigned is not None:
            values = values.view(self.unsigned)
        found = values.astype(self.dtype)
        for value in self.missing:
            found = np.where(values == value, np.asarray(np.nan, self.dtype), found)
        if self.factor is not None:
            found *= self.factor
        if self.offset is not None:
            found += self.offset
        return found


def scaling_of(array: ChunkedArray) -> Scaling | None:
    """Return how an array is packed, by its attributes; ``None`` if it is not."""
    found, dtype = array.attributes, array.dtype
    if dtype.kind not in "iuf":
        return None
    factor, offset = (found[name] if name in found else None for name in ("scale_factor", "add_offset"))
    factor, offset = (each if each is None else np.asarray(each).reshape(-1)[0] for each in (factor, offset))
    unsigned = None
    if str(found.get("_Unsigned", "")).lower() in ("true", "false") and dtype.kind in "iu":
        kind = "u" if str(found["_Unsigned"]).lower() == "true" else "i"
        unsigned = np.dtype(f"{dtype.str[0]}{kind}{dtype.itemsize}") if kind != dtype.kind else None
    stored = dtype if unsigned is None else unsigned
    missing: list[Any] = []
    for name in ("_FillValue", "missing_value"):
        for value in np.asarray(_plain(found[name], dtype)).reshape(-1).tolist() if name in found else ():
            value = np.asarray(value).astype(dtype).view(stored)[()]
            if value not in missing:
                missing.append(value)
    if factor is None and offset is None and not missing:
        return None if unsigned is None else Scaling(stored, unsigned=unsigned)
    if factor is None and offset is None:
        wide = dtype.itemsize > (4 if dtype.kind == "f" else 2)
        chosen = np.float64 if wide else np.float32
    elif factor is not None and offset is not None and factor.dtype == offset.dtype and factor.dtype.kind == "f":
        chosen = np.float64 if dtype.itemsize == 4 and dtype.kind in "iu" else factor.dtype
    else:
        chosen = np.float64 if offset is not None else factor.dtype
    return Scaling(np.dtype(chosen), factor, offset, tuple(missing), unsigned)


def _plain(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value of JSON; xarray writes numbers of Zarr in base 64."""
    if isinstance(value, str) and dtype.kind == "f":
        return struct.unpack("<d", base64.standard_b64decode(value))[0]
    return value


class Joined:
    """Arrays that are joined along an axis.

    Args:
        parts: The arrays. They agree in dtype, and in shape and chunks but for the axis.
        axis: The axis.

    Attributes:
        bounds: For each axis, where its chunks begin, and its end.

    Raises:
        ValueError: An array differs from the first one.
    """

    def __init__(self, parts: Sequence[ChunkedArray], axis: int) -> None:
        self.parts = parts
        self.axis = axis
        self.first: ChunkedArray = parts[0]
        self.dims: tuple[str, ...] | None = self.first.dims
        self.dtype: np.dtype[Any] = self.first.result_dtype
        if not is_plain(self.dtype):
            raise ValueError(f"{self.first.name} has the dtype {self.first.dtype}, of which torch has no tensors")
        for part in parts:
            for what, of in (("dtype", _dtype), ("shape", _shape), ("chunks", _chunks)):
                if (found := of(part, axis)) != (wanted := of(self.first, axis)):
                    raise ValueError(f"{part.name} has the {what} {found}, and {self.first.name} {wanted}")
        lengths = [part.shape[axis] if part.shape else 1 for part in parts]
        self.starts: NDArray[np.int64] = np.cumsum([0, *lengths])
        self.shape: tuple[int, ...] = (*self.first.shape[:axis], int(self.starts[-1]), *self.first.shape[axis + 1 :])
        self.bounds: list[NDArray[np.int64]] = [
            np.append(np.arange(0, size, max(chunk, 1)), size)
            for size, chunk in zip(self.shape, self.first.chunks, strict=True)
        ]
        # The chunks of each part along the axis.
        own = [np.arange(0, length, max(part.chunks[axis], 1)) for part, length in zip(parts, lengths, strict=True)]
        self._counts = np.cumsum([0, *map(len, own)])
        along = np.concatenate([start + each for start, each in zip(self.starts, own, strict=False)])
        self.bounds[axis] = np.append(along, self.shape[axis])
        self.grid: tuple[int, ...] = tuple(len(bounds) - 1 for bounds in self.bounds)

    def find(self, number: int) -> tuple[ChunkedArray, Chunk, list[tuple[int, int]]]:
        """Return the array of a chunk, its place in that, and for each axis where it begins and ends."""
        at = [int(each) for each in np.unravel_index(number, self.grid)]
        place = [(int(bounds[k]), int(bounds[k + 1])) for bounds, k in zip(self.bounds, at, strict=True)]
        part = int(np.searchsorted(self._counts, at[self.axis], side="right")) - 1
        at[self.axis] -= int(self._counts[part])
        return self.parts[part], tuple(at), place


def _dtype(part: ChunkedArray, axis: int) -> Any:
    return part.result_dtype


def _shape(part: ChunkedArray, axis: int) -> Any:
    return [*part.shape[:axis], "any", *part.shape[axis + 1 :]]


def _chunks(part: ChunkedArray, axis: int) -> Any:
    return [*part.chunks[:axis], "any", *part.chunks[axis + 1 :]]
