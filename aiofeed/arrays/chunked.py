"""Arrays in chunks, which are read and decoded one by one, and arrays that are joined along an axis."""

from __future__ import annotations

import base64
import contextlib
import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.common.expanded import check_expanded
from aiofeed.common.mapped import MappedFiles, file_of
from aiofeed.kernel.runtime.tensors import is_plain
from aiofeed.kernel.sources.file_io import MAX_BYTES, Content, evenly

if TYPE_CHECKING:
    from numpy.typing import NDArray

Chunk: TypeAlias = tuple[int, ...]
"""The place of a chunk in the grid of an array."""
Needs: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64]]"
"""Numbers of samples, or of boxes, and for each the number of a chunk that it needs."""

# The size of the chunks of an array that has none.
CHUNK_BYTES = 1 << 20
# Positions and numbers of chunks, and sums of some of them, must be int64.
MOST_CHUNKS = 1 << 56
# Units of time of the CF conventions, and what they are in NumPy; the calendars that are NumPy's.
_UNITS = {"day": "D", "d": "D", "hour": "h", "hr": "h", "h": "h", "minute": "m", "min": "m", "second": "s", "sec": "s"}
_UNITS |= {"s": "s", "millisecond": "ms", "msec": "ms", "ms": "ms", "microsecond": "us", "us": "us", "nanosecond": "ns"}
_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
# Steps are equal if they differ by at most this part: clocks are not exact.
_JITTER = 0.01


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
        places: By number of a column or category, its number in the joined ones.
        coordinates: By axis, its coordinate: the path, or its values.
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
    places: NDArray[Any] | None = None
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """Its well and field in a plate."""
    reader: Any = None
    """Reads its files; ``None``: there are none."""
    metadata: Any = None
    """The file that describes it, whose ``check`` raises ``OSError`` if the array was written again."""

    @property
    def local(self) -> bool:
        """Whether ``read_now`` reads a chunk; otherwise ``read`` does."""
        return self.reader is None or bool(self.reader.is_local)

    def mapped_values(self) -> Any:
        """Return all values, in memory or in a file that is mapped; ``None``: there are only chunks.

        Raises:
            OSError: The file has changed.
        """
        return None

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        raise NotImplementedError

    def content_parts(self, most: int) -> list[Content]:
        """Return what identifies the values: up to about ``most`` parts."""
        return []

    def some_chunks(self, most: int, counts: Sequence[int] | int = 1) -> list[Chunk]:
        """Return up to ``most`` chunks, evenly chosen; of shards that have ``counts`` chunks along each axis."""
        chunks = np.multiply(self.chunks, counts).tolist()
        grid = [-(-size // max(chunk, 1)) for size, chunk in zip(self.shape, chunks, strict=True)]
        numbers = np.array(evenly(math.prod(grid), most), np.int64)
        return list(map(tuple, np.transpose(np.unravel_index(numbers, grid)).tolist())) if grid else [()]

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
        values = values if self.places is None else self.places[values]
        return values if self.scaling is None else self.scaling.apply(values)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def sample_dtype(self) -> np.dtype[Any]:
        """The dtype of samples."""
        return (self.places if self.places is not None else self.scaling or self).dtype.newbyteorder("=")


@dataclass(eq=False, kw_only=True)
class OpenedArray(ChunkedArray):
    """An array of any library that is opened or in memory: parts of it are read by slices."""

    array: Any
    mapped: MappedFiles

    def mapped_values(self) -> Any:
        """Return an array of NumPy."""
        self.mapped.check()
        return (
            self.array if isinstance(self.array, np.ndarray) and self.scaling is None and self.places is None else None
        )

    def read_now(self, chunk: Chunk) -> Any:
        """Return a chunk."""
        self.mapped.check()
        slices = tuple(slice(at * size, (at + 1) * size) for at, size in zip(chunk, self.chunks, strict=True))
        return np.asarray(self.array[slices])

    def content_parts(self, most: int) -> list[Content]:
        """Return some values of some rows: of an array in memory of ``most`` rows, otherwise of three."""
        lazy = getattr(self.array, "__dask_graph__", None)
        if self.dtype.hasobject or not self.shape or (lazy and lazy() is not None):
            return []
        in_memory = isinstance(self.array, np.ndarray)
        some = [slice(None, None, max(size // 16, 1)) if in_memory else slice(16) for size in self.shape[1:]]
        rows = evenly(self.shape[0], most if in_memory else 3)
        return [Content(np.asarray(self.array[(row, *some)]).tobytes(), kind="values") for row in rows]

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
    known.update(name=name, shape=shape, chunks=tuple(chunks or rows_of(shape, dtype)), dtype=dtype)
    return OpenedArray(array=array, mapped=MappedFiles([(file_of(array), 1)]), **known)


def text(value: Any) -> Any:
    """Return a text of a file, which may be bytes or an array of one, as ``str``; what is no text as it is."""
    one = value[0] if isinstance(value, list | np.ndarray) and len(value) == 1 else value
    one = one.decode(errors="replace").rstrip("\0 ") if isinstance(one, bytes) else one
    return one if isinstance(one, str) else value


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
        if found.dtype.kind not in "biuf":
            raise TypeError
    except (TypeError, ValueError, struct.error):
        raise ValueError(f"{array.name}: its attribute {name} is no number: {value!r}") from None
    # A number of JSON does not widen float16.
    return [value] if type(value) in (int, float) else list(found)


def times(values: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """Return values in units such as ``hours since 1900-01-01`` as ``datetime64``.

    Others, and those of the calendars of models, stay numbers.
    """
    unit, _, since = str(attributes.get("units", "")).strip().lower().partition(" since ")
    code: Any = _UNITS.get(unit) or _UNITS.get(unit.removesuffix("s"))
    clock = [*map(int, re.findall(r"\d+", since)), 0, 0, 0]
    is_zoned = "+" in since or any(clock[6:])  # of a fraction of a second, too, nothing is known
    if not code or len(clock) < 6 or is_zoned or attributes.get("calendar", "standard").lower() not in _CALENDARS:
        return values
    origin = np.datetime64("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*clock), "s")
    if values.dtype.kind == "f" and (values % 1).any():
        values, code = np.round(values * (np.timedelta64(1, code) / np.timedelta64(1, "us"))), "us"
    return origin + values.astype(f"m8[{code}]")


def places_of(values: Any, size: int, given: Any, what: str) -> Any:
    """Return the place along an axis, or the places, of values of its coordinate; without one, of indices.

    Args:
        values: The coordinate. A slice of it has both ends, whatever its order, as in xarray; a date is its first
            moment, as the end of a slice its last one.
        size: The length of the axis.
        given: A value, a list of values, or a slice.
        what: Names the axis in messages.

    Raises:
        ValueError: There is no such value, or several.
    """
    if isinstance(given, list | tuple | np.ndarray):
        return [places_of(values, size, each, what) for each in given]
    with contextlib.suppress(IndexError, TypeError, ValueError):
        if values is None and (found := range(size)[given]) != range(0):
            return found
        if not isinstance(given, slice):
            return np.flatnonzero(values == _label(values, given)).item()
        low, high = (given.start, given.stop) if values[0] <= values[-1] else (given.stop, given.start)
        inside = np.full(size, True) if low is None else values >= _label(values, low)
        inside &= True if high is None else values <= _label(values, high, last=True)
        at = np.flatnonzero(inside)[:: given.step].tolist()
        return range(at[0], at[-1] + 1) if at[-1] - at[0] == len(at) - 1 else at
    has = "" if values is None else f", {np.array2string(values, threshold=6)}"
    raise ValueError(f"{what} has no {given!r}, or several: its length is {size}{has}")


def _label(values: Any, given: Any, last: bool = False) -> Any:
    """Return a value in the dtype of a coordinate: a float32 lacks most numbers; of a date as text its last moment."""
    if values.dtype.kind != "M":
        return np.asarray(given, values.dtype if values.dtype.kind == "f" else None)
    label = np.datetime64(given)
    return max(label, label + 1 - np.timedelta64(1, "us")) if last and isinstance(given, str) else label


def equal_steps(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each step from one value to the next whether it is as long as most are."""
    steps = np.diff(values.astype(np.int64) if values.dtype.kind == "u" else values)
    typical = np.partition(steps, len(steps) // 2)[len(steps) // 2 :][:1]
    return np.abs(steps - typical) <= np.abs(typical) * _JITTER  # type: ignore[no-any-return]


class Joined:
    """Arrays that are joined along an axis.

    Where chunks are is computed: a file may claim any number of them.

    Args:
        parts: The arrays. They agree in dtype, and but for the axis in shape. Each has chunks of its own.
        axis: The axis.
        free: Other axes along which they may differ in size.
        stacked: Whether the axis is a new one, the first.

    Attributes:
        count: The number of chunks.
        lengths: By array, its size along the axis.

    Raises:
        ValueError: An array differs from the first one, or torch has no such dtype.
    """

    def __init__(
        self, parts: Sequence[ChunkedArray], axis: int = 0, free: Sequence[int] = (), *, stacked: bool = False
    ) -> None:
        self.parts = parts
        self.axis = axis
        self.stacked = stacked
        self.first: ChunkedArray = parts[0]
        self.dtype: np.dtype[Any] = self.first.sample_dtype
        if not is_plain(self.dtype):
            hint = 'of texts, pass categories, adata.obs[name].astype("category")'
            raise ValueError(f"{self.first.name} has the dtype {self.dtype}, of which torch has no tensors; {hint}")
        any_size = {each - self.stacked for each in (axis, *free)}
        wanted = _layout(self.first, any_size)
        for part in parts:
            if (found := _layout(part, any_size)) != wanted:
                hint = ": arrays may differ in size along axes of tile=" if part.dtype == self.first.dtype else ""
                raise ValueError(f"{part.name} has {found}, and {self.first.name} {wanted}{hint}")
            if part.chunk_bytes > MAX_BYTES:
                raise ValueError(f"{part.name} has chunks of {part.chunk_bytes} bytes, and {MAX_BYTES} are allowed")
        new = (1,) * stacked
        grids = [(*new, *grid_of(part.shape, part.chunks)) for part in parts]
        sizes, shape = [(*new, *part.shape) for part in parts], [*new, *self.first.shape]
        self.lengths: tuple[int, ...] = tuple(size[axis] for size in sizes) if shape else ()
        if shape:
            shape[axis] = sum(self.lengths)
        self.shape: tuple[int, ...] = tuple(shape)
        self.count: int = sum(map(math.prod, grids))
        if max(self.count, *shape, 0) > MOST_CHUNKS:
            raise ValueError(f"{self.first.name} claims {self.count} chunks and the shape {shape}: it is damaged")
        # By part and axis; the numbers of its chunks follow those of the part before.
        self._grids, self._sizes = np.array(grids, np.int64), np.array(sizes, np.int64)
        self._chunks = np.array([(*new, *part.chunks) for part in parts], np.int64).clip(1)
        self._starts = np.zeros_like(self._sizes)
        self._ends = np.cumsum(self._sizes[:, axis] if shape else [0])
        self._starts[1:, axis : axis + 1] = self._ends[:-1, None]
        self._numbers = np.cumsum([0, *map(math.prod, grids)])

    def sizes(self, axis: int) -> tuple[int, ...]:
        """Return the size of each array along an axis; along the joined one that of all."""
        return (self.shape[axis],) if axis == self.axis else tuple(self._sizes[:, axis].tolist())

    def within(self, position: int) -> tuple[ChunkedArray, int]:
        """Return the array at a position along the joined axis, and the position in that."""
        part = int(np.searchsorted(self._ends, position, side="right"))
        return self.parts[part], position - int(self._ends[part]) + self.lengths[part]

    def cuts(self, axis: int, most: int, part: int | None = None) -> NDArray[np.int64]:
        """Return where chunks along an axis begin, in an array or all; of more than ``most`` only some; and its end."""
        some = range(len(self.parts))[slice(part or 0, None if part is None and axis == self.axis else (part or 0) + 1)]
        grids = self._grids[some, axis]
        step = -(-int(grids.sum()) // most)
        number, at = expand(-(-grids // step))
        number += some.start
        end = self._starts[some[-1], axis] + self._sizes[some[-1], axis]
        return np.append(self._starts[number, axis] + at * step * self._chunks[number, axis], end)

    @cached_property
    def cut_axes(self) -> list[bool]:
        """By axis, whether an array has several chunks along it, or several arrays are joined there."""
        several: list[bool] = np.any(self._grids > 1, axis=0, keepdims=True)[0].tolist()
        return [each or (axis == self.axis and len(self.parts) > 1) for axis, each in enumerate(several)]

    @cached_property
    def shortest(self) -> NDArray[np.int64]:
        """By axis, how long the shortest chunk is, but for those at the end of the array."""
        last = self._sizes[:-1] - (self._grids[:-1] - 1) * self._chunks[:-1]  # in parts, these are not at the end
        found: NDArray[np.int64] = np.minimum(self._chunks.min(0), last.min(0, initial=MOST_CHUNKS))
        return found

    def needed(self, boxes: int, begins: Sequence[Any], ends: Sequence[Any], axes: Any = None) -> Needs:
        """Return the chunks that boxes need, of which there is for each axis where all begin and end.

        Along other axes than some, each box is in the only chunk; ``None``: in any.
        """
        rows, part = np.arange(boxes), np.zeros(boxes, np.int64)
        if len(self.parts) > 1:
            bounds = (at.clip(0, self.shape[self.axis] - 1) for at in (begins[self.axis], ends[self.axis] - 1))
            first, last = (np.searchsorted(self._ends, at, side="right") for at in bounds)
            rows, within = expand((last - first + 1).clip(0))
            part = first[rows] + within
        numbers = 0 * rows
        for axis in range(len(self.shape)):
            if axes is not None and axis not in axes:
                continue  # one chunk has all
            start, size, chunk = (each[part, axis] for each in (self._starts, self._sizes, self._chunks))
            begin, end = (begins[axis][rows] - start).clip(0), np.minimum(ends[axis][rows] - start, size)
            again, within = expand(np.where(begin < end, -(-end // chunk) - begin // chunk, 0))
            numbers = numbers[again] * self._grids[part, axis][again] + (begin // chunk)[again] + within
            rows, part = rows[again], part[again]
        return rows, numbers + self._numbers[part]

    def find(self, number: int) -> tuple[ChunkedArray, Chunk, list[tuple[int, int]]]:
        """Return the array of a chunk, its place in that, and for each axis where it begins and ends in all."""
        part = int(np.searchsorted(self._numbers[1:], number, side="right"))
        chunk, place, left = list[int](), list[tuple[int, int]](), number - int(self._numbers[part])
        layout = (each[part].tolist() for each in (self._grids, self._chunks, self._starts, self._sizes))
        for count, size, start, length in reversed(list(zip(*layout, strict=True))):
            left, at = divmod(left, count)
            chunk.insert(0, at)
            place.insert(0, (start + at * size, start + min((at + 1) * size, length)))
        return self.parts[part], tuple(chunk[self.stacked :]), place


def grid_of(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks an array has along each axis."""
    return tuple(-(-size // max(chunk, 1)) for size, chunk in zip(shape, chunks, strict=True))


def expand(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each element of runs the number of its run, and its place in that."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _layout(part: ChunkedArray, any_size: Collection[int]) -> str:
    shape = ["any" if axis in any_size else size for axis, size in enumerate(part.shape)]
    return f"the dtype {part.sample_dtype} and the shape {shape}".replace("'any'", "any")
