"""The fields of samples: which chunks a sample needs, and how a chunk is written into the samples of a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.arrays.chunked import Joined, Needs, expand
from aiofeed.arrays.opening import SparseMatrix
from aiofeed.kernel.core.types import DeferredTensor, HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A source has at most so many shards: 32 MiB for their first samples.
MOST_SHARDS = 1 << 22

Starts: TypeAlias = "Mapping[Any, NDArray[np.int64]]"
"""For each axis where the samples of a batch begin; for the axis ``None`` zeros."""
Place: TypeAlias = Sequence[tuple[int, int]]
"""Where a chunk begins and ends along each axis."""


@dataclass(frozen=True)
class Selection:
    """What a sample has of an axis of a field.

    Args:
        axis: The axis whose positions are samples or tiles; ``None``: all samples have the same part.
        offsets: The places from the sample's position on.
        kept: Whether the sample has the axis.
    """

    axis: Any
    offsets: Sequence[int]
    kept: bool = True

    def runs(self) -> list[tuple[Any, int, int, int]]:
        """Return the axis and, for each run of offsets, the first one, their number and the place of the first."""
        if isinstance(self.offsets, range) and self.offsets.step == 1:
            return [(self.axis, self.offsets[0], len(self.offsets), 0)]  # not listed: of any length
        cuts = np.flatnonzero(np.diff(self.offsets) != 1) + 1
        firsts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(self.offsets)]
        return [(self.axis, self.offsets[first], end - first, first) for first, end in zip(firsts, ends, strict=True)]


class DenseField:
    """Windows of an array.

    Args:
        joined: The array.
        selections: What a sample has of each axis.
        pad: The value beyond the array.

    Attributes:
        name: That of the array in messages.
        sources: The joined arrays that the field is made of.
        shape: The shape of a sample.
        nbytes: Bytes of a sample.
    """

    is_dense = True

    def __init__(self, joined: Joined, selections: Sequence[Selection], pad: float | None) -> None:
        self.name: str = joined.first.name
        self.sources: list[Joined] = [joined]
        try:
            self._pad = None if pad is None else np.asarray(pad, joined.dtype)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"Arrays(pad={pad}) is no value of {joined.first.name}, {joined.dtype}") from None
        self._axes = [each.axis for each in selections]
        self._full = [len(each.offsets) for each in selections]
        self._blocks = list(itertools.product(*[each.runs() for each in selections]))
        self.shape: tuple[int, ...] = tuple(len(each.offsets) for each in selections if each.kept)
        self.nbytes: int = math.prod(self.shape) * joined.dtype.itemsize

    def cuts(self, axis: Any) -> NDArray[np.int64] | None:
        """Return where the chunks along an axis begin, and its end; ``None`` if the field lacks the axis."""
        return self.sources[0].cuts(self._axes.index(axis), MOST_SHARDS) if axis in self._axes else None

    def needs(self, starts: Starts) -> list[Needs]:
        """Return the chunks that samples need, of each joined array."""
        [joined], found = self.sources, []
        for block in self._blocks:
            begins = [starts[axis] + offset for axis, offset, _, _ in block]
            ends = [begin + length for begin, (_, _, length, _) in zip(begins, block, strict=True)]
            found.append(np.stack(joined.needed(len(starts[None]), begins, ends)))
        places, numbers = np.unique(np.concatenate(found, axis=1), axis=1) if len(found) > 1 else found[0]
        return [(places, numbers)]

    def new(self, starts: Starts, memory: BufferLease) -> Any:
        """Return memory for the samples of a batch, and where they begin, as lists."""
        out = array(memory, (len(starts[None]), *self._full), self.sources[0].dtype)
        if self._pad is not None:
            out[...] = self._pad
        return out, {axis: starts[axis].tolist() for axis in self._axes}

    def put(self, state: Any, source: int, places: NDArray[np.int64], place: Place, values: Any) -> None:
        """Write a chunk of a joined array into samples."""
        out, starts = state
        # Mostly few samples of a batch: numpy would take longer.
        for block, at in itertools.product(self._blocks, places.tolist()):
            outer, inner = [at], []
            for (axis, offset, length, first), (low, high) in zip(block, place, strict=True):
                begin = starts[axis][at] + offset
                start, end = max(begin, low), min(begin + length, high)
                if start >= end:
                    break
                outer.append(slice(start - begin + first, end - begin + first))
                inner.append(slice(start - low, end - low))
            else:
                out[tuple(outer)] = values[tuple(inner)] if values.ndim else values

    def samples(self, state: Any) -> Any:
        """Return the samples of a batch."""
        return state[0].reshape(len(state[0]), *self.shape)

    def batch(self, state: Any, lease: BufferLease) -> HostTensor:
        """Return the tensor of a batch."""
        out = self.samples(state)
        if lease.pinned:
            pinned = array(lease, out.shape, out.dtype)
            pinned[...] = out
            out = pinned
        return HostTensor(out, pinned=lease.pinned)

    def collate(self, samples: Sequence[Any]) -> HostTensor:
        """Return the tensor of some samples."""
        return HostTensor(np.stack(samples))


class SparseField:
    """Rows of CSR matrices.

    Args:
        parts: The matrices, one below the other.
        selection: What a sample has of the rows.
        dense: Whether samples are rows with all columns.

    Attributes:
        name, sources, shape, nbytes: As of ``DenseField``; values and columns.
        rows: Where each row begins in the values, and their end.
    """

    def __init__(self, parts: Sequence[SparseMatrix], selection: Selection, *, dense: bool) -> None:
        self.name: str = parts[0].name
        self.sources: list[Joined] = [Joined([each.values for each in parts]), Joined([each.columns for each in parts])]
        self._axis = selection.axis
        self._offset, self._count = selection.offsets[0], len(selection.offsets)
        self.is_dense: bool = dense
        self._width = parts[0].width
        for part in parts:
            part.columns.limit = self._width
        if other := next((part for part in parts if part.width != self._width), None):
            raise ValueError(f"{other.name} has {other.width} columns, and {parts[0].name} {self._width}")
        ends = np.cumsum([part.values.shape[0] for part in parts])
        self.rows: NDArray[np.int64] = np.concatenate(
            [part.starts[:-1] + end - part.values.shape[0] for part, end in zip(parts, ends, strict=True)] + [ends[-1:]]
        )
        self.shape: tuple[int, ...] = (*[self._count] * selection.kept, self._width)
        each = sum(source.shape[0] * source.dtype.itemsize for source in self.sources)
        self.nbytes: int = each * self._count // max(len(self.rows) - 1, 1)

    def cuts(self, axis: Any) -> NDArray[np.int64] | None:
        """Return the rows in which chunks of values begin, and the number of rows."""
        found = np.searchsorted(self.rows, self.sources[0].cuts(0, MOST_SHARDS)[:-1], side="right") - 1
        rows = len(self.rows) - 1
        return np.unique([*found.clip(0, rows - 1), rows]) if axis == self._axis else None

    def _spans(self, starts: Starts) -> tuple[Any, Any]:
        """Return where the values of samples begin and end."""
        first = starts[self._axis] + self._offset
        return self.rows[first], self.rows[first + self._count]

    def needs(self, starts: Starts) -> list[Needs]:
        """Return the chunks that samples need, of values and of columns."""
        begin, end = self._spans(starts)
        return [source.needed(len(begin), [begin], [end]) for source in self.sources]

    def new(self, starts: Starts, memory: BufferLease) -> Any:
        """Return memory for the values and columns of a batch, where samples are, and the lengths of rows."""
        begin, end = self._spans(starts)
        rows = (starts[self._axis][:, None] + self._offset + np.arange(self._count)).reshape(-1)
        flat = [array(memory, (int((end - begin).sum()),), source.dtype) for source in self.sources]
        flat[1][...] = 0  # where a chunk fails, none are written
        lists = (begin.tolist(), end.tolist(), (np.cumsum(end - begin) - end + begin).tolist())
        return flat, begin, end, self.rows[rows + 1] - self.rows[rows], lists

    def put(self, state: Any, source: int, places: NDArray[np.int64], place: Place, values: Any) -> None:
        """Write a chunk of values or of columns into rows."""
        (flat, *_, (begins, ends, firsts)), [(low, high)] = state, place
        # Mostly few rows of a batch: numpy would take longer.
        for at in places.tolist():
            begin, end = max(begins[at], low), min(ends[at], high)
            first = firsts[at] + begin - begins[at]
            flat[source][first : first + end - begin] = values[begin - low : end - low] if values.ndim else values

    def _dense_rows(self, state: Any, out: NDArray[Any]) -> NDArray[Any]:
        (values, columns), _, _, lengths, _ = state
        out[...] = 0
        # What occurs twice is added, as by scipy. At numbers, numpy adds as fast as it assigns.
        np.add.at(out.reshape(-1), expand(lengths)[0] * self._width + columns, values)
        return out.reshape(-1, *self.shape)

    def samples(self, state: Any) -> Any:
        """Return the samples of a batch: rows, or the columns that have values, and these."""
        (values, columns), begin, end, lengths, _ = state
        if self.is_dense:
            return self._dense_rows(state, np.empty((len(lengths), self._width), values.dtype))
        cuts = np.cumsum(end - begin)[:-1]
        return list(zip(np.split(columns, cuts), np.split(values, cuts), strict=True))

    def batch(self, state: Any, lease: BufferLease) -> Any:
        """Return the tensor of a batch."""
        (values, columns), begin, end, lengths, _ = state
        if not self.is_dense:
            return SparseRows(np.cumsum(end - begin), columns, values, self._width)
        out = array(lease, (len(lengths), self._width), values.dtype)
        return HostTensor(self._dense_rows(state, out), pinned=lease.pinned)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return the tensor of some samples."""
        if self.is_dense:
            return HostTensor(np.stack(samples))
        columns, values = zip(*samples, strict=True)
        ends = np.cumsum([len(each) for each in columns])
        return SparseRows(ends, np.concatenate(columns), np.concatenate(values), self._width)


class SparseRows(DeferredTensor):
    """Rows that become one ``torch.sparse_csr`` tensor."""

    def __init__(self, ends: NDArray[Any], columns: NDArray[Any], values: NDArray[Any], width: int) -> None:
        # torch takes both, and most files have int32.
        columns = columns if columns.dtype in (np.int32, np.int64) else columns.astype(np.int64)
        self._parts = [np.append(0, ends).astype(columns.dtype), columns, values]
        self._size = (len(ends), width)

    def arrive(self, copy: Any) -> Any:
        """Make the tensor of copies of its parts."""
        import torch

        starts, columns, values = map(copy, map(HostTensor, self._parts))
        return torch.sparse_csr_tensor(starts, columns, values, self._size, check_invariants=False)


Field: TypeAlias = DenseField | SparseField
