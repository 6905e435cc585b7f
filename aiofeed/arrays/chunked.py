"""Arrays in chunks, which are read and decoded one by one, and arrays that are joined along an axis."""

from __future__ import annotations

import base64
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.common.mapped import MappedFiles, file_of
from aiofeed.kernel.core.validation import check_expanded
from aiofeed.kernel.runtime.tensors import is_plain
from aiofeed.kernel.sources.file_io import MAX_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

Chunk: TypeAlias = tuple[int, ...]
"""The place of a chunk in the grid of an array."""

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
        dims: The names of its axes, if all have names.
        fill: The value in chunks that are not stored.
        attributes: What is known about it.
        scaling: How values are unpacked.
        limit: The columns of the matrix whose columns of values these are.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...] | None = None
    fill: Any = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    scaling: Scaling | None = None
    limit: int | None = None
    reader: Any = None
    """Reads its files; ``None``: there are none."""

    @property
    def local(self) -> bool:
        """Whether ``read_now`` reads a chunk; otherwise ``read`` does."""
        return self.reader is None or bool(self.reader.is_local)

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        raise NotImplementedError

    @abstractmethod
    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""

    @abstractmethod
    def unpack(self, data: Any, nbytes: int, chunk: Chunk) -> Any:
        """Return the stored values of a chunk; ``nbytes`` are those of a decoded one."""

    def decode(self, data: Any, chunk: Chunk) -> Any:
        """Return the values of a chunk as an array; without axes if all values are one.

        Raises:
            ValueError: The chunk is damaged.
        """
        if data is None:
            values: Any = np.asarray(self.fill, self.dtype)
        else:
            nbytes = check_expanded(self.name, self.chunk_bytes, len(data))
            try:
                values = self.unpack(data, nbytes, chunk)
            except (RuntimeError, EOFError) as error:
                raise ValueError(f"its bytes cannot be decompressed: {error}") from None
        return self._finish(values)

    def _finish(self, values: Any) -> Any:
        if self.limit is not None and values.size and not 0 <= values.min() <= values.max() < self.limit:
            raise ValueError(f"it has columns beyond the {self.limit} of the matrix")
        return values if self.scaling is None else self.scaling.apply(values)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def sample_dtype(self) -> np.dtype[Any]:
        """The dtype of samples."""
        return (self.dtype if self.scaling is None else self.scaling.dtype).newbyteorder("=")


@dataclass(eq=False, kw_only=True)
class OpenedArray(ChunkedArray):
    """An array of any library that is opened or in memory: parts of it are read by slices."""

    array: Any
    mapped: MappedFiles

    def read_now(self, chunk: Chunk) -> Any:
        """Return a chunk."""
        self.mapped.check()
        slices = tuple(slice(at * size, (at + 1) * size) for at, size in zip(chunk, self.chunks, strict=True))
        return np.asarray(self.array[slices])

    def decode(self, data: Any, chunk: Chunk) -> Any:
        """Return the chunk, which is decoded."""
        return self._finish(data)

    def unpack(self, data: Any, nbytes: int, chunk: Chunk) -> Any:
        """Return the chunk, which is decoded."""
        return data


def opened(array: Any, name: str, chunks: Any = None, **known: Any) -> OpenedArray:
    """Return an array that has ``shape``, ``dtype`` and slices; its chunks are those that it names, if any."""
    shape, dims, encoding = tuple(array.shape), getattr(array, "dims", None), getattr(array, "encoding", {})
    chunks = chunks or getattr(array, "chunksize", None) or encoding.get("preferred_chunks")
    if isinstance(chunks, Mapping):
        chunks = [chunks.get(dim, size) for dim, size in zip(dims or (), shape, strict=True)]
    if isinstance(dims, tuple):
        known["dims"] = tuple(map(str, dims))
    dtype = np.dtype(array.dtype)
    return OpenedArray(
        array=array,
        name=name,
        shape=shape,
        chunks=tuple(chunks or rows_of(shape, dtype)),
        dtype=dtype,
        mapped=MappedFiles([(file_of(array), 1)]),
        **known,
    )


def rows_of(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the shape of parts along the first axis of about a MiB."""
    rows = CHUNK_BYTES // max(math.prod(shape[1:]) * dtype.itemsize, 1)
    return (max(1, min(rows, shape[0])), *shape[1:]) if shape else ()


@dataclass
class Scaling:
    """How the CF conventions unpack values: ``value * factor + offset``, and NaN for those that are missing."""

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    factor: Any = None
    offset: Any = None
    missing: tuple[Any, ...] = ()

    def apply(self, values: Any) -> Any:
        """Return values that are unpacked."""
        found = values.view(self.stored).astype(self.dtype)
        if self.missing:
            found[np.isin(found, self.missing)] = np.nan
        if self.factor is not None:
            found *= self.factor
        if self.offset is not None:
            found += self.offset
        return found


def scaling_of(array: ChunkedArray) -> Scaling | None:
    """Return how an array is packed, by its attributes; ``None`` if it is not. The dtype is that of xarray."""
    attributes, dtype = array.attributes, array.dtype
    if dtype.kind not in "iuf":
        return None
    factor, offset = (_numbers(array, name)[:1] for name in ("scale_factor", "add_offset"))
    stored = dtype
    if dtype.kind in "iu" and (sign := {"true": "u", "false": "i"}.get(str(attributes.get("_Unsigned")).lower())):
        stored = np.dtype(f"{dtype.str[0]}{sign}{dtype.itemsize}")
    missing, has_fill, marks = list[Any](), False, False
    for name in ("_FillValue", "missing_value"):
        given = np.asarray(_numbers(array, name))
        found = given[given == given]  # NaN marks nothing, but the dtype stays
        has_fill |= len(found) > 0 or (len(given) > 0 and dtype.kind == "f")
        marks |= len(found) > 0
        with np.errstate(invalid="ignore", over="ignore"):
            if name == "_FillValue" and stored != dtype:
                found = found.astype(dtype).view(stored)
            missing += found[found.astype(stored) == found].astype(np.float64).tolist()
    chosen: Any = np.float64
    kinds = {np.dtype(type(each)) for each in factor + offset}
    alone = not offset and (not marks or {kind.kind for kind in kinds} == {"f"})
    wide = dtype.itemsize == 4 and dtype.kind in "iu"
    conforming = factor and kinds in ({np.dtype(np.float32)}, {np.dtype(np.float64)}) and not wide
    if not kinds:
        if not marks:
            return None if stored == dtype else Scaling(stored, stored)
        chosen = stored if dtype.kind == "f" else np.float32 if dtype.itemsize <= 2 else np.float64
    elif has_fill and not marks:
        chosen = stored
    elif alone or conforming:
        [chosen] = kinds
    return Scaling(np.dtype(chosen), stored, next(iter(factor), None), next(iter(offset), None), tuple(missing))


def _numbers(array: ChunkedArray, name: str) -> list[Any]:
    """Return the numbers in an attribute."""
    value = array.attributes.get(name)
    try:
        if isinstance(value, str) and name == "_FillValue":  # how xarray writes numbers of Zarr
            value = struct.unpack("<d", base64.standard_b64decode(value))[0]
        found = np.asarray([] if value is None else value).reshape(-1)
        found.astype(np.float64)
    except (TypeError, ValueError, struct.error):
        raise ValueError(f"{array.name}: its attribute {name} is no number: {value!r}") from None
    # A number of JSON does not widen float16.
    return [value] if type(value) in (int, float) else list(found)


class Joined:
    """Arrays that are joined along an axis.

    Args:
        parts: The arrays. They agree in dtype, and but for the axis in shape and chunks.
        axis: The axis.

    Attributes:
        bounds: For each axis, where its chunks begin, and its end.
        grid: Chunks along each axis.

    Raises:
        ValueError: An array differs from the first one, or torch has no such dtype.
    """

    def __init__(self, parts: Sequence[ChunkedArray], axis: int = 0) -> None:
        self.parts = parts
        self.axis = axis
        self.first: ChunkedArray = parts[0]
        self.dtype: np.dtype[Any] = self.first.sample_dtype
        if not is_plain(self.dtype):
            raise ValueError(f"{self.first.name} has the dtype {self.first.dtype}, of which torch has no tensors")
        wanted = _layout(self.first, axis)
        for part in parts:
            if (found := _layout(part, axis)) != wanted:
                raise ValueError(f"{part.name} has {found}, and {self.first.name} {wanted}")
        for part in parts:
            for size, chunk in zip(part.shape, part.chunks, strict=True):
                check_expanded(part.name, 8 * size // max(chunk, 1), 0)  # a damaged file may claim any shape
            if part.chunk_bytes > MAX_BYTES:
                raise ValueError(f"{part.name} has chunks of {part.chunk_bytes} bytes, and {MAX_BYTES} are allowed")
        shape = list(self.first.shape)
        self.bounds: list[NDArray[np.int64]] = list(map(_cuts, shape, self.first.chunks))
        self._counts = np.zeros(1, np.int64)
        if shape:
            ends = np.cumsum([part.shape[axis] for part in parts])
            shape[axis] = int(ends[-1])
            own = [_cuts(part.shape[axis], part.chunks[axis])[:-1] for part in parts]
            self._counts = np.cumsum([0, *map(len, own)])
            self.bounds[axis] = np.append(np.concatenate([own[0], *map(np.add, ends, own[1:])]), ends[-1])
        self.shape: tuple[int, ...] = tuple(shape)
        self.grid: tuple[int, ...] = tuple(len(bounds) - 1 for bounds in self.bounds)

    def find(self, number: int) -> tuple[ChunkedArray, Chunk, list[tuple[int, int]]]:
        """Return the array of a chunk, its place in that, and for each axis where it begins and ends in all."""
        at = [int(each) for each in np.unravel_index(number, self.grid)]
        place = [(int(bounds[k]), int(bounds[k + 1])) for bounds, k in zip(self.bounds, at, strict=True)]
        part = 0
        if at:
            part = int(np.searchsorted(self._counts, at[self.axis], side="right")) - 1
            at[self.axis] -= int(self._counts[part])
        return self.parts[part], tuple(at), place


def _cuts(size: int, chunk: int) -> NDArray[np.int64]:
    return np.append(np.arange(0, size, max(chunk, 1)), size)


def _layout(part: ChunkedArray, axis: int) -> str:
    shape, chunks = ([*sizes[:axis], "any", *sizes[axis + 1 :]] for sizes in (part.shape, part.chunks))
    return f"the dtype {part.sample_dtype}, the shape {shape} and chunks {chunks}".replace("'any'", "any")
