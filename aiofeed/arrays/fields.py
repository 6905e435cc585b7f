"""The fields of samples: which chunks a sample needs, and how a chunk is written into the samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.arrays.cells import SparseMatrix
from aiofeed.arrays.chunked import Chunk, ChunkedArray, Joined, Needs, expand, grid_of
from aiofeed.kernel.core.types import DeferredTensor, HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease, array

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A source has at most so many shards: 32 MiB for their first samples.
MOST_SHARDS = 1 << 22
# Parts of samples of up to so many bytes are copied together: a copy of its own takes 3 us.
SMALL_BYTES, FEW = 8 << 10, 8
# So many blocks are planned together.
MOST_BLOCKS = 1 << 16
# Samples that need so many chunks of an array in memory, or of a file that can be mapped, but few bytes of each, or a
# part of rows that are so many times as long, are copied from there batch by batch, each as one of so many chunks.
MANY, LARGE, MAPPED = 4, 64 << 10, 1 << 40

Starts: TypeAlias = "Mapping[Any, NDArray[np.int64]]"
"""For each axis where the samples of a batch begin; for the axis ``None`` zeros."""


@dataclass(eq=False)
class ReadChunk:
    """A chunk that is read.

    Args:
        field: The field, by its name.
        source: The number of its joined array in that.
        part: The array that has it.
        at: Its place in that.
        place: Where it begins and ends along each axis of the joined array.
        targets: The samples that need it: for each batch its ``GatheredArrays``, and places in it.
        data: Its bytes, or the error of reading them.
        values: Its values.
    """

    field: str
    source: int
    part: ChunkedArray
    at: Chunk
    place: Sequence[tuple[int, int]]
    targets: Sequence[tuple[Any, NDArray[np.int64]]]
    data: Any = None
    values: Any = None

    @property
    def size(self) -> list[int]:
        """Its shape in the array."""
        return [end - first for first, end in self.place]

    def decode(self, *, mapped: bool) -> bool:
        """Set its values, after reading it from a file; return whether it has some."""
        try:
            if isinstance(self.data, Exception):
                raise self.data
            if mapped:
                self.values = self.part.mapped_values()
            else:
                if self.part.local:
                    self.data = self._read_now()
                self.values = self.part.decode(self.data, self.at)
            if 0 < self.values.ndim < len(self.place):  # of one that is stacked
                self.values = self.values[None]
        except Exception as error:  # noqa: BLE001 - the error of each of these samples
            self.fail(error)
        return self.values is not None

    def _read_now(self) -> Any:
        try:
            return self.part.read_now(self.at)
        finally:
            if self.part.metadata is not None:
                self.part.metadata.check()  # after reading: of the array that has this chunk

    def fail(self, error: Exception) -> None:
        """Make an error that of each sample."""
        named: Exception = error.with_traceback(None)
        if type(error) is OSError or not isinstance(error, OSError):
            text = f"{self.part.name}, chunk {'.'.join(map(str, self.at))}: {error}"
            code = [error.errno] if isinstance(error, OSError) and error.errno else []
            named = (OSError if isinstance(error, OSError) else ValueError)(*code, text)
        for gathered, places in self.targets:
            gathered.errors.update(dict.fromkeys(places.tolist(), named))


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

    @property
    def step(self) -> int:
        """The distance from each offset to the next one, if it is the same for all and not 0; otherwise 1."""
        if isinstance(self.offsets, range):
            return self.offsets.step  # not listed: of any length
        steps = {*np.diff(self.offsets).tolist()}
        return next(iter(steps)) or 1 if len(steps) == 1 else 1

    def runs(self, step: int) -> NDArray[np.int64]:
        """Return, for each run of offsets in steps, the first offset, the place of it, and their number."""
        if isinstance(self.offsets, range) and self.offsets.step == step:
            return np.array([[self.offsets[0], 0, len(self.offsets)]])
        offsets = np.asarray(self.offsets, np.int64)
        firsts = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - step - 1) != step)
        return np.stack([offsets[firsts], firsts, np.diff(firsts, append=len(offsets))], 1)


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
        is_mapped: Whether samples are copied from memory, without chunks.
        axes: Of each axis of a sample its number in the array, and its name if it has one.
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
        numbers = range(-joined.stacked, len(selections) - joined.stacked)
        names = [(at, *(joined.first.dims or ())[at : at + 1]) if at >= 0 else ("image",) for at in numbers]
        self.axes: list[Sequence[Any]] = [each for each, chosen in zip(names, selections, strict=True) if chosen.kept]
        self._full = [len(each.offsets) for each in selections]
        steps = np.array([each.step for each in selections], np.int64)
        self._order = tuple(slice(None, None, step) for step in np.sign(steps).tolist())
        # Of longer steps, some chunks are not needed.
        steps = np.where(np.abs(steps) <= joined.shortest, np.abs(steps), 1)
        # Blocks of one run of offsets along each axis: first offsets, their places in samples, and lengths.
        along = zip(selections, self._order, steps.tolist(), strict=True)
        runs = [Selection(each.axis, each.offsets[order]).runs(step) for each, order, step in along]
        counts = [len(each) for each in runs]
        grid = np.indices(counts).reshape(len(runs), math.prod(counts))
        found = [each[at] for each, at in zip(runs, grid, strict=True)]
        blocks = np.array(found, np.int64).reshape(*grid.shape, 3).transpose(2, 0, 1)
        self._begins, self._spans = blocks[0], (blocks[2] - 1) * steps[:, None] + 1
        needed = math.prod(grid_of(self._full[joined.stacked :], joined.first.chunks))
        few = needed >= MANY and math.prod(self._full) * joined.dtype.itemsize < needed * LARGE
        few |= MANY * math.prod(self._full[1:]) <= math.prod(joined.shape[1:])
        self.is_mapped: bool = few and len(joined.parts) == 1 and joined.first.mapped_values() is not None
        # The axes along which samples begin at different places, or a chunk and a sample have parts of each other. They
        # come first where chunks are copied, by blocks.
        cut = zip(joined.cut_axes, joined.shape, selections, strict=True)
        is_part = [(cuts and not self.is_mapped) or each.offsets != range(size) for cuts, size, each in cut]
        self._varying = [at for at, axis in enumerate(self._axes) if axis is not None or is_part[at]]
        self._turned = sorted(range(len(self._axes)), key=lambda number: number not in self._varying)
        self._steps = steps[self._varying, None, None]
        self._offsets, self._firsts, self._lengths = blocks[:, self._varying, None]
        self.shape: tuple[int, ...] = tuple(len(each.offsets) for each in selections if each.kept)
        self.nbytes: int = math.prod(self.shape) * joined.dtype.itemsize

    def cuts(self, axis: Any, part: int | None = None) -> NDArray[np.int64] | None:
        """Return where the chunks along an axis begin, of a part or all, and its end; ``None`` if it lacks the axis."""
        return self.sources[0].cuts(self._axes.index(axis), MOST_SHARDS, part) if axis in self._axes else None

    def needs(self, starts: Starts) -> list[Needs]:
        """Return the chunks that samples need, of each joined array."""
        [joined], count, blocks = self.sources, len(starts[None]), self._begins.shape[1]
        if self.is_mapped:
            first = [starts[axis][0] for axis in self._axes]
            return [(np.arange(count), np.full(count, hash(tuple(map(int, first))) % MAPPED))]
        firsts = zip(self._axes, self._begins, strict=True)
        begins = [(starts[axis][:, None] + offsets).reshape(-1) for axis, offsets in firsts]
        ends = [begin + np.tile(spans, count) for begin, spans in zip(begins, self._spans, strict=True)]
        places, numbers = joined.needed(count * blocks, begins, ends, self._varying)
        if blocks > 1:
            found, at = np.unique(numbers, return_inverse=True)
            places, at = np.divmod(np.unique(places // blocks * len(found) + at), max(len(found), 1))
            numbers = found[at]
        return [(places, numbers)]

    def new(self, starts: Starts, memory: BufferLease) -> Any:
        """Return memory for the samples of a batch, a view of it for ``put``, and where samples begin."""
        count = len(starts[None])
        out = array(memory, (count, *self._full), self.sources[0].dtype)
        if self._pad is not None:
            out[...] = self._pad
        begins = [starts[self._axes[number]] for number in self._varying]
        view = out[(slice(None), *self._order)].transpose(0, *(1 + number for number in self._turned))
        return out, view, np.array(begins, np.int64).reshape(-1, count)

    def put(self, chunks: Sequence[ReadChunk], memory: BufferLease) -> None:
        """Write chunks of one size of a joined array into samples."""
        axes, name, targets = len(self._varying), chunks[0].field, [each for chunk in chunks for each in chunk.targets]
        size = chunks[0].size
        place = (*map(slice, size),)
        inside = [each.values[place] if each.values.ndim else np.broadcast_to(each.values, size) for each in chunks]
        values = inside[0][None]
        if len(inside) > 1:
            values = np.stack(inside, out=array(memory, (len(inside), *size), self.sources[0].dtype))
        values = values.transpose(0, *(1 + number for number in self._turned))
        if not axes:
            for gathered, places in targets:
                gathered.states[name][1][places] = values[0]
            return
        # By batch, and the batch, the place and the chunk of each sample.
        states = {gathered: gathered.states[name] for gathered, _ in targets}
        batches = dict(zip(states, range(len(states)), strict=True))
        outs = [out for _, out, _ in states.values()]
        by = [(batches[gathered], number) for number, chunk in enumerate(chunks) for gathered, _ in chunk.targets]
        batch, chunk = np.repeat(np.transpose(by), [len(places) for _, places in targets], axis=1)
        samples = np.stack([batch, np.concatenate([places for _, places in targets]), chunk])
        starts = np.concatenate([states[gathered][2][:, places] for gathered, places in targets], axis=1)
        low = np.array([[each.place[axis][0] for each in chunks] for axis in self._varying])
        starts, high = starts - low[:, chunk], np.array(size)[self._varying, None, None]
        steps, blocks = self._steps, self._offsets.shape[2]
        most = max(MOST_BLOCKS // blocks, 1)
        for some in (slice(at, at + most) for at in range(0, starts.shape[1], most)):
            inner = starts[:, some, None] + self._offsets
            outer, ends = -inner, high - inner
            if (steps > 1).any():
                outer, ends = -(inner // steps), -(-ends // steps)
            outer = np.maximum(outer, 0)
            sizes = np.minimum(ends, self._lengths) - outer
            parts = [each.reshape(axes, -1) for each in (inner + outer * steps, outer + self._firsts, sizes)]
            parts.insert(0, np.repeat(samples[:, some], blocks, axis=1))
            _copy(values, outs, steps[:, 0, 0], *_some(parts, (parts[-1] > 0).all(0)))

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


def _copy(values: Any, outs: Sequence[Any], steps: Any, samples: Any, inner: Any, outer: Any, sizes: Any) -> None:
    """Copy parts of chunks into samples.

    Args:
        values: [chunks, ...]: the chunks; their first axes are those of the parts.
        outs: The samples of each batch.
        steps: By axis, those in the array.
        samples: [3, parts]: the batch, the place of the sample in it, and the chunk.
        inner: [axes, parts]: where a part begins in the chunk.
        outer: The same in the sample.
        sizes: The sizes of a part.
    """
    if not sizes.size:
        return
    longest, axes = sizes.max(1), len(steps)
    nbytes = math.prod(longest.tolist()) * math.prod(values.shape[1 + axes :]) * values.itemsize
    alike = (sizes == longest[:, None]).all(0) if nbytes <= SMALL_BYTES else steps[:0]
    if np.count_nonzero(alike) > FEW:
        together = _some((samples, inner, outer), alike)
        order = np.argsort(together[0][0], kind="stable")
        (batch, sample, chunk), begins, places = (each[:, order] for each in together)
        taken = _parts(values, longest, steps)[(chunk, *begins)]
        ends = np.searchsorted(batch, np.arange(len(outs) + 1)).tolist()
        for out, part in zip(outs, map(slice, ends, ends[1:]), strict=False):
            _parts(out, longest, 1)[(sample[part], *places[:, part])] = taken[part]
        samples, inner, outer, sizes = (each[:, ~alike] for each in (samples, inner, outer, sizes))
    ends = inner + (sizes - 1) * steps[:, None] + 1, outer + sizes
    by, bounds = steps.tolist(), (each.T.tolist() for each in (inner, ends[0], outer, ends[1]))
    for batch, sample, chunk, begin, end, first, last in zip(*samples.tolist(), *bounds, strict=True):
        outs[batch][(sample, *map(slice, first, last))] = values[(chunk, *map(slice, begin, end, by))]


def _some(arrays: Sequence[NDArray[np.int64]], chosen: NDArray[np.bool_]) -> Sequence[NDArray[np.int64]]:
    """Return the chosen columns of arrays."""
    return arrays if chosen.all() else [each[:, chosen] for each in arrays]


def _parts(values: Any, sizes: NDArray[np.int64], steps: Any) -> Any:
    """Return a view that has, at each place along the axes after the first, the part of some sizes from there on."""
    end = 1 + len(sizes)
    shape, strides = list(values.shape), list(values.strides)
    shape[end:end] = sizes.tolist()
    strides[end:end] = (np.array(strides[1:end]) * steps).tolist()
    shape[1:end] = (np.array(shape[1:end]) - (sizes - 1) * steps).tolist()
    return np.lib.stride_tricks.as_strided(values, shape, strides)


class SparseField:
    """Rows of CSR matrices.

    Args:
        parts: The matrices, one below the other.
        selection: What a sample has of the rows.
        dense: Whether samples are rows with all columns.

    Attributes:
        name, sources, shape, nbytes, axes: As of ``DenseField``; values and columns.
        rows: Where each row begins in the values, and their end.
    """

    is_mapped = False

    def __init__(self, parts: Sequence[SparseMatrix], selection: Selection, *, dense: bool) -> None:
        self.name: str = parts[0].name
        self.sources: list[Joined] = [Joined([each.values for each in parts]), Joined([each.columns for each in parts])]
        self._axis = selection.axis
        self._offset, self._count = selection.offsets[0], len(selection.offsets)
        self.is_dense: bool = dense
        self._width = parts[0].width
        self._places = [part.columns.places for part in parts if part.columns.places is not None]
        self._unordered = any((np.diff(each[each < self._width]) < 0).any() for each in self._places)
        if other := next((part for part in parts if part.width != self._width), None):
            raise ValueError(f"{other.name} has {other.width} columns, and {parts[0].name} {self._width}")
        ends = np.cumsum([part.values.shape[0] for part in parts])
        rows = [part.starts[:-1] + end - part.values.shape[0] for part, end in zip(parts, ends, strict=True)]
        self.rows: NDArray[np.int64] = np.concatenate([*rows, ends[-1:]])
        self.shape: tuple[int, ...] = (*[self._count] * selection.kept, self._width)
        self.axes: list[Sequence[Any]] = [(number,) for number in range(not selection.kept, 2)]
        each = sum(source.shape[0] * source.dtype.itemsize for source in self.sources)
        self.nbytes: int = each * self._count // max(len(self.rows) - 1, 1)

    def cuts(self, axis: Any, part: int | None = None) -> NDArray[np.int64] | None:
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
        return flat, begin, end, self.rows[rows + 1] - self.rows[rows], np.cumsum(end - begin) - end

    def put(self, chunks: Sequence[ReadChunk], memory: BufferLease) -> None:
        """Write chunks of values or of columns into rows."""
        for chunk, (gathered, places) in ((each, target) for each in chunks for target in each.targets):
            [(low, high)] = chunk.place
            flat, begins, ends, _, firsts = gathered.states[chunk.field]
            begin, end = np.maximum(begins[places], low), np.minimum(ends[places], high)
            bounds = begin - low, end - low, firsts[places] + begin, firsts[places] + end
            out, values = flat[chunk.source], np.broadcast_to(chunk.values, chunk.values.shape or (high - low,))
            for at, stop, first, last in zip(*map(np.ndarray.tolist, bounds), strict=True):
                out[first:last] = values[at:stop]

    def _entries(self, state: Any) -> Any:
        """Return values, their columns, and how many each row has, without columns that are left out."""
        (values, columns), _, _, lengths, _ = state
        if not self._places:
            return values, columns, lengths
        kept, rows = np.flatnonzero(columns < self._width), expand(lengths)[0]
        if self._unordered and not self.is_dense:  # torch wants columns in their order
            kept = kept[np.argsort(rows[kept] * self._width + columns[kept], kind="stable")]
        return values[kept], columns[kept], np.bincount(rows[kept], minlength=len(lengths))

    def _dense_rows(self, state: Any, out: NDArray[Any]) -> NDArray[Any]:
        values, columns, lengths = self._entries(state)
        out[...] = 0
        # What occurs twice is added, as by scipy. At numbers, numpy adds as fast as it assigns.
        np.add.at(out.reshape(-1), expand(lengths)[0] * self._width + columns, values)
        return out.reshape(-1, *self.shape)

    def samples(self, state: Any) -> Any:
        """Return the samples of a batch: rows, or the columns that have values, and these."""
        if self.is_dense:
            return self._dense_rows(state, np.empty((len(state[3]), self._width), self.sources[0].dtype))
        values, columns, lengths = self._entries(state)
        cuts = np.cumsum(lengths)[:-1]
        return list(zip(np.split(columns, cuts), np.split(values, cuts), strict=True))

    def batch(self, state: Any, lease: BufferLease) -> Any:
        """Return the tensor of a batch."""
        if not self.is_dense:
            values, columns, lengths = self._entries(state)
            return SparseRows(np.cumsum(lengths), columns, values, self._width)
        out = array(lease, (len(state[3]), self._width), self.sources[0].dtype)
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
