"""The fields of samples: which chunks a sample needs, and how a chunk is written into the samples of a batch."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.arrays.chunked import Joined
from aiofeed.arrays.opening import SparseMatrix
from aiofeed.kernel.core.types import DeferredTensor, HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    from numpy.typing import NDArray

Starts: TypeAlias = "Mapping[Any, NDArray[np.int64]]"
"""For each axis where the samples of a batch begin."""
Needs: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64]]"
"""Places of samples, and the number of a chunk that each of them needs."""


@dataclass(frozen=True)
class Selection:
    """What a sample has of an axis of a field.

    Args:
        axis: The axis whose positions are samples or tiles; ``None``: all samples have the same part.
        offsets: The places from the sample's position on.
        kept: Whether the sample has the axis.
    """

    axis: Any
    offsets: NDArray[np.int64]
    kept: bool = True

    @property
    def run(self) -> bool:
        """Whether the offsets ascend by one."""
        return bool((np.diff(self.offsets) == 1).all())


class Field(ABC):
    """A field of samples.

    Attributes:
        sources: The joined arrays that it is made of.
        shape: The shape of a sample.
        dtype: Its dtype.
    """

    sources: list[Joined]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def needs(self, starts: Starts, count: int) -> list[Needs]:
        """Return the chunks that the samples of a batch need, of each joined array."""

    @abstractmethod
    def cuts(self, axis: Any) -> NDArray[np.int64] | None:
        """Return where the chunks along an axis begin, and its end; ``None`` if the field lacks the axis."""

    @abstractmethod
    def new(self, starts: Starts, count: int, memory: BufferLease) -> Values:
        """Return memory for the samples of a batch."""


class Values(ABC):
    """The values of a field in a batch."""

    @abstractmethod
    def put(self, source: int, places: NDArray[np.int64], place: Sequence[tuple[int, int]], values: Any) -> None:
        """Write a chunk, of which ``place`` says where it is, into samples."""

    @abstractmethod
    def sample(self, at: int) -> Any:
        """Return one sample."""

    @abstractmethod
    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the tensor of the batch, and its bytes."""


class DenseField(Field):
    """Windows of an array.

    Args:
        joined: The array.
        selections: What a sample has of each axis.
        pad: The value beyond the array.
    """

    def __init__(self, joined: Joined, selections: Sequence[Selection], pad: float | None) -> None:
        self.sources: list[Joined] = [joined]
        self.selections = selections
        self.pad = pad
        self.dtype: np.dtype[Any] = joined.dtype
        self.full: tuple[int, ...] = tuple(len(each.offsets) for each in selections)
        self.shape: tuple[int, ...] = tuple(len(each.offsets) for each in selections if each.kept)

    def cuts(self, axis: Any) -> NDArray[np.int64] | None:
        """Return where the chunks along an axis begin, and its end."""
        found = zip(self.selections, self.sources[0].bounds, strict=True)
        return next((bounds for each, bounds in found if each.axis == axis and axis is not None), None)

    def needs(self, starts: Starts, count: int) -> list[Needs]:
        """Return the chunks that samples need."""
        joined, firsts, lasts = self.sources[0], [], []
        inside = np.ones(count, bool)
        for each, bounds, size in zip(self.selections, joined.bounds, joined.shape, strict=True):
            begin = _begin(starts, each.axis, count)
            low, high = begin + each.offsets.min(), begin + each.offsets.max()
            inside &= (high >= 0) & (low < size)
            firsts.append(np.searchsorted(bounds, low.clip(0, size - 1), side="right") - 1)
            lasts.append(np.searchsorted(bounds, high.clip(0, size - 1), side="right") - 1)
        places, numbers = [], []
        spans = [range(int((last - first).max(initial=0)) + 1) for first, last in zip(firsts, lasts, strict=True)]
        for steps in itertools.product(*spans):
            chunks = [first + step for first, step in zip(firsts, steps, strict=True)]
            chosen = inside.copy()
            for each, chunk, last, bounds in zip(self.selections, chunks, lasts, joined.bounds, strict=True):
                chosen &= chunk <= last
                if not each.run:
                    rows = _begin(starts, each.axis, count)[:, None] + each.offsets
                    found = np.minimum(chunk, len(bounds) - 2)
                    chosen &= ((rows >= bounds[found][:, None]) & (rows < bounds[found + 1][:, None])).any(axis=1)
            places.append(np.flatnonzero(chosen))
            at = tuple(chunk[chosen] for chunk in chunks)
            numbers.append(np.ravel_multi_index(at, joined.grid) if at else np.zeros(chosen.sum(), np.int64))
        return [(np.concatenate(places), np.concatenate(numbers))]

    def new(self, starts: Starts, count: int, memory: BufferLease) -> DenseValues:
        """Return memory for the samples of a batch."""
        return DenseValues(self, starts, array(memory, (count, *self.full), self.dtype))


class DenseValues(Values):
    """Windows of an array in a batch."""

    def __init__(self, field: DenseField, starts: Starts, out: NDArray[Any]) -> None:
        self._field = field
        self._out = out
        self._begins = [_begin(starts, each.axis, len(out)) for each in field.selections]
        self._runs = all(each.run for each in field.selections)
        if field.pad is not None:
            out[...] = field.pad

    def put(self, source: int, places: NDArray[np.int64], place: Sequence[tuple[int, int]], values: Any) -> None:
        """Write a chunk into samples."""
        columns = zip(self._field.selections, self._begins, place, strict=True)
        if self._runs:
            slices = []
            for each, begins, (low, high) in columns:
                begin = begins[places] + each.offsets[0]
                first, last = np.maximum(begin, low), np.minimum(begin + len(each.offsets), high)
                pairs = zip(first - begin, last - begin, first - low, last - low, strict=True)
                slices.append([(slice(a, b), slice(c, d)) for a, b, c, d in pairs])
            parts = zip(*slices, strict=True) if slices else itertools.repeat((), len(places))
            for at, part in zip(places.tolist(), parts, strict=True):
                inner = tuple(each for each, _ in part)
                self._out[(at, *inner)] = values[tuple(each for _, each in part)] if values.ndim else values
            return
        chosen = []
        for each, begins, (low, high) in columns:
            rows = begins[places][:, None] + each.offsets
            chosen.append([(np.flatnonzero((row >= low) & (row < high)), row, low) for row in rows])
        for at, part in zip(places.tolist(), zip(*chosen, strict=True), strict=True):
            target = np.ix_(*[found for found, _, _ in part])
            source_rows = np.ix_(*[row[found] - low for found, row, low in part])
            self._out[at][target] = values[source_rows] if values.ndim else values

    def _rows(self) -> NDArray[Any]:
        return self._out.reshape(len(self._out), *self._field.shape)

    def sample(self, at: int) -> Any:
        """Return one sample."""
        return self._rows()[at]

    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the tensor of the batch, and its bytes."""
        out = self._rows()
        if lease.pinned:
            pinned = array(lease, out.shape, out.dtype)
            pinned[...] = out
            out = pinned
        return HostTensor(out, pinned=lease.pinned), out.nbytes


class SparseField(Field):
    """Rows of CSR matrices.

    Args:
        parts: The matrices, one below the other.
        selection: What a sample has of the rows.
        dense: Whether samples are rows with all columns.
        width: Columns.
    """

    def __init__(self, parts: Sequence[SparseMatrix], selection: Selection, *, dense: bool) -> None:
        for part in parts:
            if part.shape[1] != parts[0].shape[1]:
                raise ValueError(f"{part.name} has {part.shape[1]} columns, and {parts[0].name} {parts[0].shape[1]}")
        self.sources: list[Joined] = [
            Joined([part.values for part in parts], 0),
            Joined([part.columns for part in parts], 0),
        ]
        self.selection = selection
        self.dense = dense
        self.width: int = parts[0].shape[1]
        starts = [part.starts[:-1] + first for part, first in zip(parts, self.sources[0].starts, strict=False)]
        self.rows: NDArray[np.int64] = np.concatenate([*starts, self.sources[0].starts[-1:]])
        """Where each row begins in the values, and their end."""
        self.dtype: np.dtype[Any] = self.sources[0].dtype
        self.shape: tuple[int, ...] = (*[len(selection.offsets)] * selection.kept, self.width)

    def cuts(self, axis: Any) -> NDArray[np.int64] | None:
        """Return the rows in which chunks of values begin, and the number of rows."""
        if axis != self.selection.axis:
            return None
        found = np.searchsorted(self.rows, self.sources[0].bounds[0][:-1], side="right") - 1
        return np.unique(np.append(np.minimum(found, len(self.rows) - 2), len(self.rows) - 1))

    def spans(self, starts: Starts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the values of each sample begin and end."""
        first = starts[self.selection.axis] + self.selection.offsets[0]
        return self.rows[first], self.rows[first + len(self.selection.offsets)]

    def needs(self, starts: Starts, count: int) -> list[Needs]:
        """Return the chunks that samples need."""
        begin, end = self.spans(starts)
        found = []
        for source in self.sources:
            first = np.searchsorted(source.bounds[0], begin, side="right") - 1
            chunks = np.where(end > begin, np.searchsorted(source.bounds[0], end - 1, side="right") - first, 0)
            places, within = _runs(chunks)
            found.append((places, first[places] + within))
        return found

    def new(self, starts: Starts, count: int, memory: BufferLease) -> SparseValues:
        """Return memory for the rows of a batch."""
        return SparseValues(self, starts, memory)


class SparseValues(Values):
    """Rows of CSR matrices in a batch: values and columns of all rows, one after the other."""

    def __init__(self, field: SparseField, starts: Starts, memory: BufferLease) -> None:
        self._field = field
        self._begin, self._end = field.spans(starts)
        self._ends = np.cumsum(self._end - self._begin)
        count = int(self._ends[-1]) if len(self._ends) else 0
        dtypes = [source.dtype for source in field.sources]
        self._flat = [array(memory, (count,), dtype) for dtype in dtypes]
        rows = starts[field.selection.axis][:, None] + field.selection.offsets
        self._lengths = np.diff(field.rows)[rows.reshape(-1)]

    def put(self, source: int, places: NDArray[np.int64], place: Sequence[tuple[int, int]], values: Any) -> None:
        """Write a chunk of values or of columns into rows."""
        [(low, high)] = place
        if (
            source
            and values.size
            and not 0 <= values[: high - low].min() <= values[: high - low].max() < self._field.width
        ):
            raise ValueError(f"a column is not one of {self._field.width}")
        begin, end = self._begin[places], self._end[places]
        first, last = np.maximum(begin, low), np.minimum(end, high)
        row, within = _runs(last - first)
        target = within + (self._ends[places] - end + first)[row]
        self._flat[source][target] = values[within + (first - low)[row]] if values.ndim else values

    def sample(self, at: int) -> Any:
        """Return one sample: a row, or the columns that have values, and these."""
        end = int(self._ends[at])
        begin = end - int(self._end[at] - self._begin[at])
        values, columns = (each[begin:end] for each in self._flat)
        if not self._field.dense:
            return columns, values
        rows = len(self._field.selection.offsets)
        found = _dense(
            np.zeros((rows, self._field.width), self._field.dtype), self._lengths[at * rows :][:rows], columns, values
        )
        return found.reshape(self._field.shape)

    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the rows, and their bytes."""
        values, columns = self._flat
        if self._field.dense:
            out = array(lease, (len(self._lengths), self._field.width), self._field.dtype)
            out[...] = 0
            out = _dense(out, self._lengths, columns, values).reshape(len(self._begin), *self._field.shape)
            return HostTensor(out, pinned=lease.pinned), out.nbytes
        found = SparseRows(np.append(0, self._ends), columns, values, self._field.width)
        return found, values.nbytes + columns.nbytes


class SparseRows(DeferredTensor):
    """A batch of rows that becomes one sparse tensor."""

    def __init__(self, starts: Any, columns: NDArray[Any], values: NDArray[Any], width: int) -> None:
        self._parts = (starts.astype(np.int64), columns.astype(np.int64), values)
        self._width = width

    def arrive(self, copy: Any) -> Any:
        """Make the tensor, ``torch.sparse_csr``, of copies of its parts."""
        import torch

        starts, columns, values = (copy(HostTensor(np.ascontiguousarray(part))) for part in self._parts)
        return torch.sparse_csr_tensor(starts, columns, values, (len(starts) - 1, self._width), check_invariants=False)


def _begin(starts: Starts, axis: Any, count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64) if axis is None else starts[axis]


def _runs(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each element of runs the number of its run, and its place in that."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _dense(out: NDArray[Any], lengths: NDArray[np.int64], columns: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    out[np.repeat(np.arange(len(lengths)), lengths), columns] = values
    return out


def nbytes_of(fields: Sequence[Field]) -> int:
    """Return the bytes of a sample; of sparse rows, those of an average one."""
    found = 0
    for field in fields:
        if isinstance(field, SparseField):
            rows = len(field.rows) - 1
            each = sum(source.shape[0] * source.dtype.itemsize for source in field.sources)
            found += each * len(field.selection.offsets) // max(rows, 1)
        else:
            found += math.prod(field.shape) * field.dtype.itemsize
    return max(found, 1)
