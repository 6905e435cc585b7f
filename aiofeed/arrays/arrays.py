"""``Arrays``: windows of chunked arrays, and rows of sparse matrices."""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import itertools
import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiofeed.arrays.cells import SparseMatrix
from aiofeed.arrays.chunked import MOST_CHUNKS, ChunkedArray, Joined, Needs, Scaling, equal_steps, expand, places_of
from aiofeed.arrays.fields import MAPPED, MOST_SHARDS, DenseField, Field, ReadChunk, Selection, SparseField, Starts
from aiofeed.arrays.opening import Opener
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Gathered, Traits, public
from aiofeed.kernel.core.validation import counted, explain_arguments
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.sampling.order import mix64, sample_seed
from aiofeed.kernel.sources.file_io import SAMPLED, Content, evenly
from aiofeed.objects.reader import run_all, statistics_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# A shard, for shuffle="window", has at least so many samples; of windows so many chunks, up to so many bytes.
LEAST_SAMPLES = 64
LEAST_CHUNKS = 8
SHARD_BYTES = 8 << 20
SAMPLE_BYTES = 4 << 10
FARTHEST = 1 << 40  # offset of a window
# Chunks are read at the same time up to so many bytes, and so many chunks.
READ_BYTES = 32 << 20
READS = 128
# One job decodes so many chunks, up to so many bytes: to begin a job and to plan copies takes as long as 100 KB.
TOGETHER_BYTES = 1 << 20
TOGETHER = 32


@public
@explain_arguments(
    dict.fromkeys(("target", "obs", "obs_keys"), 'targets are fields of the dict, "y": "cells.h5ad::obs/cell_type"')
    | dict.fromkeys(("genes", "var", "var_names"), 'pass select={"var": names}, or join="inner" or "outer"')
)
class Arrays(GroupedSource):
    """Samples are positions along axes of chunked arrays, with windows around them; batches are dicts of tensors.

    Example:
        ```python
        import aiofeed

        weather = aiofeed.Arrays({"t2m": "weather.zarr/t2m"}, sample="time", window=range(-3, 1))
        feeder = aiofeed.Feeder(weather, batch_size=4, shuffle="window")
        for batch in feeder:
            print(batch["t2m"].shape)  # the hour and the three before it: [N, 4, lat, lon]
        ```

    Arrays are Zarr (versions 2 and 3), HDF5 and NetCDF4, on disk or at URLs. Each chunk is read by its own range
    request and decoded in threads, without HDF5's library, its lock and its handles: processes may be forked. With
    ``shuffle="window"`` each chunk is decoded once in an epoch, or for both shards if it is at the border of two;
    ``shuffle=True`` decodes it for each look-ahead that needs it. Needs ``pip install "aiofeed[arrays]"``.

    Args:
        arrays: By the name of a field, an array: a path or URL of a Zarr array, ``"era5.zarr/t2m"``, or of a data set,
            ``"era5.nc::t2m"``; braces, a glob or a list of these, joined along the first axis of ``sample``; or an
            array of zarr, h5py, xarray, dask or NumPy without a mask. Sparse rows, ``"cells.h5ad::X"``, and columns of
            categories, ``"cells.h5ad::obs/cell_type"``, are in the layout of AnnData or, ``"matrix.h5"``, of Cell
            Ranger; or an ``AnnData``, a matrix of scipy or a column of pandas.
        sample: The axis whose positions are the samples, by its name or number; or several. An array that lacks a named
            axis is the same for all positions.
        window: What a sample has of the axis: offsets from the position, ``range(-3, 1)`` or ``[-24, -12, 0]``; an int
            for one of them without the axis; or a dict of these by field, and in a field by axis. Default: 0.
        tile: By axis, the size of the part of it that a sample has.
        stride: By axis, how far tiles are apart, each of which is a sample (default: their size); or ``"random"``: one
            tile for each position, at random, from the sample's own generator.
        select: By axis, what is used of it: a value of its coordinate, a list of them, or a slice with both ends, as in
            ``sel`` of xarray; of an axis with a number or without a coordinate, indices. Of an axis of samples or
            tiles, a slice. Or a dict of these by field.
        within: An axis of samples. Samples whose window crosses a gap of its coordinate, that is a step unlike most
            others, are left out; without a coordinate, those whose window crosses the border of two joined arrays.
        pad: The value beyond an array. Default: samples that reach beyond are left out.
        scale: Of images of OME-Zarr, ``"plate.zarr"``, the number of the scale: 0 is the largest.
        decode_cf: Whether scale, offset and fill values of the CF conventions are applied, as xarray does.
        join: Of joined matrices with columns of other names (``var`` of AnnData): whether columns that some lack are
            left out, ``"inner"``, or zeros there, ``"outer"``, as in ``anndata.concat``. Default: an error. Columns
            are chosen by ``select={"var": names}``.
        sparse: Whether rows of matrices are ``"dense"`` or, in ``torch.sparse_csr`` batches, ``"csr"``.
        store: An obstore store that reads the URLs.
        options: Arguments of ``obstore.store.from_url``.

    Attributes:
        categories: By field, the names of its categories; of joined ones, their union.
        columns: By field, the names of the columns of its matrix.

    Raises:
        ImportError: zarr, h5py, numcodecs or imagecodecs is not installed.
        FileNotFoundError: A file does not exist.
        TypeError: No array, one of another kind, or an argument of another type.
        ValueError: Arrays do not fit each other or the arguments, a file is damaged, or a filter is unknown.
    """

    traits: Traits = Traits(decode="optional", rows=True)
    looks_ahead = True
    reads_whole_shards = True
    data = None
    _apart = True

    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        sample: str | int | Sequence[str | int] = 0,
        window: Any = None,
        tile: Mapping[str | int, int] | None = None,
        stride: Mapping[str | int, int] | str | None = None,
        select: Mapping[Any, Any] | None = None,
        within: str | int | None = None,
        pad: float | None = None,
        scale: int = 0,
        decode_cf: bool = True,
        join: str | None = None,
        sparse: str = "dense",
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(arrays, Mapping) or not arrays:
            example = '{"x": "era5.zarr/t2m"} or {"x": adata}'
            raise TypeError(f"Arrays takes a dict of arrays, {example}, got {type(arrays).__name__}")
        texts = {"sparse": (sparse, "dense", "csr"), "stride": (stride, "random"), "join": (join, "inner", "outer")}
        for argument, (value, *known) in texts.items():
            if isinstance(value, str) and value not in known:
                raise ValueError(f"Arrays({argument}=) knows {' and '.join(map(repr, known))}, got {value!r}")
        if isinstance(window, Mapping) and (unknown := [name for name in window if name not in arrays]):
            raise ValueError(f"Arrays(window=) names {unknown}, and the fields are {list(arrays)}")
        self._opener = opener = Opener(decode_cf, scale, join, store, options)
        axes = [sample] if isinstance(sample, str | int) else list(sample)
        # By axis: all offsets; the size of a tile; the length. And the names of axes, for messages.
        self._windows = {axis: [0] for axis in axes}
        self._tiles, self._lengths, self._names = dict(tile or {}), dict[Any, int](), set[str]()
        if not axes or len({*axes, *self._tiles}) < len(axes) + len(self._tiles):
            raise ValueError(f"Arrays: sample={sample!r} and tile={tile!r} must name one axis, and none twice")
        if wrong := [size for size in self._tiles.values() if not isinstance(size, Integral) or size < 1]:
            raise ValueError(f"Arrays(tile=): a size must be 1 or more, got {wrong[0]!r}")
        if not isinstance(stride, Mapping | str | None):
            raise TypeError(f'Arrays(stride=) is a dict of ints or "random", got {stride!r}')
        if stride and (not tile or (isinstance(stride, Mapping) and not stride.keys() <= self._tiles.keys())):
            raise ValueError(f"Arrays(stride={stride!r}) needs a size for each of its axes in tile=")
        if within is not None and (within not in axes or pad is not None):
            raise ValueError(f"Arrays(within={within!r}) is one of sample={sample!r}, and not for pad=")
        self._within, self._asked = within, select or {}
        # By field and axis, what select= has; by axis, this part of it, the arrays that have it, and its coordinate.
        self._chosen, self._ranges, self._homes = dict[Any, Any](), dict[Any, range](), dict[Any, list[Any]]()
        self._coordinates: dict[Any, Any] = {}
        self._fields: dict[str, Field] = {}
        chosen = {name: self._asked_of(name).get("var") for name in arrays}
        opened = {name: opener.open(name, given, axes[0], chosen[name]) for name, given in arrays.items()}
        opener.sort(opened, arrays, axes[0])
        for name, parts in opened.items():
            offsets = window.get(name) if isinstance(window, Mapping) else window
            is_matrix = isinstance(parts[0], SparseMatrix)
            if is_matrix and pad is not None:
                raise ValueError(f"Arrays: {name!r} is sparse, and pad= is for other arrays")
            make = self._rows_of if is_matrix else self._windows_of
            self._fields[name] = make(name, parts, offsets, sparse == "dense" if is_matrix else pad)
        self.categories: dict[str, list[str]] = opener.categories
        self.columns: dict[str, list[str]] = opener.columns
        self._chosen |= {(name, "var"): names for name, names in self.columns.items() if chosen[name] is not None}
        named = [(name, *each) for name, field in self._fields.items() for each in enumerate(field.sources)]
        self._sources, self._field_of = [source for *_, source in named], [(name, at) for name, at, _ in named]
        counts = [MAPPED if self._fields[name].is_mapped else source.count for name, _, source in named]
        self._numbers = np.cumsum([0, *counts])
        self._selection = repr((list(arrays), window, sample, tile, stride, pad, decode_cf, sparse))
        self._selection += repr((self._chosen, within)) if select or within is not None else ""
        self._selection += hashlib.sha256(repr((join, self.columns)).encode()).hexdigest() if join else ""
        found = {axis for _, axis in self._chosen}
        for key, given in (select or {}).items():
            if key not in found and not (isinstance(given, Mapping) and key in arrays and given.keys() <= found):
                raise ValueError(f"Arrays(select=): no field or axis is {key!r}: {given!r}, only {sorted(self._names)}")
        # To write a sample takes as long as to copy so many bytes.
        self.gathered_bytes: int = max(sum(field.nbytes for field in self._fields.values()), SAMPLE_BYTES)
        self._lay_out(stride, pad)
        chunk_bytes = max(part.chunk_bytes for source in self._sources for part in source.parts)
        self.shards_at_once: int = max(1, min(READS, READ_BYTES // max(chunk_bytes, 1)))
        self.shards_per_read: int = max(1, min(TOGETHER, TOGETHER_BYTES // max(chunk_bytes, 1)))

    # --- the layout of samples

    def _asked_of(self, field: str) -> dict[Any, Any]:
        """Return what ``select=`` has for a field, by axis, and for other fields and axes."""
        own = self._asked.get(field)
        return {**self._asked, **(own if isinstance(own, Mapping) else {})}

    def _rows_of(self, name: str, parts: Any, offsets: Any, dense: Any) -> SparseField:
        axis = next(iter(self._windows))
        selection = self._select(name, axis, offsets)
        if len(selection.runs(1)) > 1 or (selection.kept and not dense):
            raise ValueError(f"Arrays: {name!r} is sparse: its window is a range of step 1, and none for sparse='csr'")
        found = SparseField(parts, selection, dense=dense)
        self._measure(name, axis, len(found.rows) - 1)
        return found

    def _windows_of(self, name: str, parts: Any, offsets: Any, pad: Any) -> DenseField:
        dims, named, first = parts[0].dims, dict[int, Any](), parts[0].name
        axis: Any
        self._names.update(dims or ())
        for axis in (*self._windows, *self._tiles):
            if not isinstance(axis, int) and dims is None:
                raise ValueError(f"{first} has no names of axes: give numbers in place of {axis!r}")
            number = axis if isinstance(axis, int) else dims.index(axis) if axis in dims else -1
            if 0 <= number < len(parts[0].shape):
                named[number] = axis
        along = next((number for number, axis in named.items() if axis in self._windows), 0)
        joined, selections = Joined(parts, along), []
        if 0 in joined.shape:
            raise ValueError(f"{first} has no values: its shape is {list(joined.shape)}")
        for number, size in enumerate(joined.shape):
            axis = named.get(number)
            home = (parts if number == along else parts[:1]), number
            chosen = self._choose(name, *home, size)
            if axis is not None:
                self._measure(name, axis, size)
                self._homes.setdefault(axis, []).append(home)
                is_slice = pad is None and getattr(chosen, "step", 0) == 1
                if chosen is not None and not (is_slice and self._ranges.setdefault(axis, chosen) == chosen):
                    raise ValueError(f"Arrays(select=): along {axis!r} all fields have one slice, and no pad=")
            if axis in self._windows:
                selections.append(self._select(name, axis, offsets))
            elif axis is None and chosen is not None:
                selections.append(Selection(None, *(([chosen], False) if isinstance(chosen, int) else (chosen, True))))
            else:
                selections.append(Selection(axis, range(size if axis is None else self._tiles[axis])))
        return DenseField(joined, selections, pad)

    def _measure(self, name: str, axis: Any, size: int) -> None:
        if self._lengths.setdefault(axis, size) != size:
            raise ValueError(f"Arrays: along {axis!r} {name!r} has {size} positions, others {self._lengths[axis]}")

    def _choose(self, name: str, parts: Any, number: int, size: int) -> Any:
        """Return the places of an axis that ``select=`` has, if any."""
        asked = self._asked_of(name)
        for axis in filter(asked.__contains__, (number, (parts[0].dims or {number: number})[number])):
            found = self._opener.coordinate(parts, axis) if isinstance(axis, str) else None
            values, what = found and np.concatenate(found), f"Arrays(select=): {parts[0].name} along {axis!r}"
            self._chosen[name, axis] = places_of(values, size, asked[axis], what)
            return self._chosen[name, axis]
        return None

    def _select(self, name: str, axis: Any, given: Any) -> Selection:
        """Return the window of a field along an axis of samples."""
        if isinstance(given, Mapping):
            if not given.keys() <= self._windows.keys():
                raise ValueError(f"Arrays(window=): {name!r} has {list(given)}, and sample= {list(self._windows)}")
            given = given.get(axis)
        elif axis != next(iter(self._windows)):
            given = None
        kept = isinstance(given, Iterable)
        offsets = [*given] if kept else [given or 0]
        if not offsets or not all(isinstance(offset, Integral) and abs(int(offset)) < FARTHEST for offset in offsets):
            raise TypeError(f"Arrays(window=) takes ranges, ints and lists of ints; {name!r} has {given!r}")
        self._windows[axis] += map(int, offsets)
        return Selection(axis, self._windows[axis][-len(offsets) :], kept)

    def _lay_out(self, stride: Any, pad: float | None) -> None:
        """Number the samples: those of one block of chunks, a shard, come together."""
        largest = sorted(self._fields.values(), key=lambda field: field.nbytes, reverse=True)
        self._random: dict[Any, tuple[int, int]] = {}  # the first place, and how many there are
        self._axes: list[tuple[Any, Any]] = []  # with the positions: a range or an array
        self._bounds: list[NDArray[np.int64]] = []  # in positions, of the shards along each axis
        for axis in (*self._windows, *self._tiles):
            if axis not in self._lengths:
                raise ValueError(f"Arrays: no array has the axis {axis!r}; there are {sorted(self._names)}")
            part = self._ranges.get(axis, range(self._lengths[axis]))
            length, size, first, step = len(part), self._tiles.get(axis, 1), part.start, 1
            if axis in self._tiles:
                step = self._tiles[axis] if not isinstance(stride, Mapping) else stride.get(axis, size)
                if not isinstance(step, Integral) or step < 1:
                    raise ValueError(f"Arrays(stride=) must be 1 or more along {axis!r}, got {step!r}")
                if stride == "random":
                    self._random[axis], size = (first, max(length - size, 0) + 1), size if pad is None else 0
            elif pad is None:
                first, size = first - min(self._windows[axis]), max(self._windows[axis]) - min(self._windows[axis]) + 1
            count = -(-length // step) if pad is not None else (length - size) // step + 1
            if count < 1:
                raise ValueError(f"Arrays: along {axis!r} there are {length} positions, and a sample needs {size}")
            if axis not in self._random:
                cuts = next(found for field in largest if (found := field.cuts(axis)) is not None)
                positions: Any = range(first, first + count * step, step)
                before = -(-(cuts[:-1] - first) // step)
                if axis == self._within:
                    positions = self._unbroken(axis, np.array(positions))
                    before, count = np.searchsorted(positions, cuts[:-1]), len(positions)
                self._axes.append((axis, positions))
                ascending = np.r_[0, before.clip(0, count - 1), count]
                self._bounds.append(ascending[np.diff(ascending, prepend=-1) > 0])  # numpy.unique takes seconds
        counts = [int(bounds[-1]) for bounds in self._bounds]
        if math.prod(counts) > MOST_CHUNKS:
            raise ValueError(f"{largest[0].name} claims {math.prod(counts)} samples: it is damaged")
        each = np.prod([count / (len(bounds) - 1) for count, bounds in zip(counts, self._bounds, strict=True)])
        several = max(int(LEAST_SAMPLES / each), 1)
        if len(set(next(iter(self._windows.values())))) > 1 or isinstance(largest[0], SparseField):
            # Samples at a border need the chunks of two shards: few borders, but no large shards.
            several = max(several, min(LEAST_CHUNKS, int(SHARD_BYTES / (each * self.gathered_bytes))))
        # A chunk with very many samples makes several shards: the first batch waits for the samples of a shard.
        most = max(int(SHARD_BYTES / self.gathered_bytes / (each * (len(self._bounds[0]) - 1) / counts[0])), 1)
        most = max(most, counts[0] // MOST_SHARDS)
        firsts = self._bounds[0][:-1:several]
        lengths = np.diff(firsts, append=counts[0])
        pieces, within = expand(np.where(lengths > 2 * most, -(-lengths // most), 1))
        self._bounds[0] = np.append(firsts[pieces] + within * most, counts[0])
        while math.prod(len(bounds) - 1 for bounds in self._bounds) > MOST_SHARDS:
            at = max(range(len(self._bounds)), key=lambda number: len(self._bounds[number]))
            self._bounds[at] = np.append(self._bounds[at][:-1:2], counts[at])
        self._grid = [len(bounds) - 1 for bounds in self._bounds]
        lengths = functools.reduce(np.multiply.outer, map(np.diff, self._bounds)).reshape(-1)
        self.shard_starts: NDArray[np.int64] = np.append(0, np.cumsum(lengths))

    def _coordinate(self, axis: Any) -> Any:
        """Return the coordinate of an axis of samples, which is read once; ``None`` if no field has one."""
        if axis not in self._coordinates:
            found = next(filter(None, (self._opener.coordinate(*home) for home in self._homes[axis])), None)
            self._coordinates[axis] = found and np.concatenate(found)
        return self._coordinates[axis]

    def _unbroken(self, axis: Any, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions whose windows cross no gap."""
        values, low, high = self._coordinate(axis), min(self._windows[axis]), max(self._windows[axis])
        has_steps = values is not None and values.dtype.kind in "iufM"
        whole = equal_steps(values) if has_steps else np.full(self._lengths[axis] - 1, True)
        for parts, number in () if has_steps else self._homes[axis]:
            whole[np.cumsum([part.shape[number] for part in parts])[:-1] - 1] = False
        gaps = np.append(0, np.cumsum(~whole))
        positions = positions[gaps[positions + low] == gaps[positions + high]]
        if not len(positions):
            raise ValueError(f"Arrays(within={axis!r}): each window, from {low} to {high}, crosses a gap")
        return positions

    def _positions(self, indices: NDArray[np.int64]) -> dict[Any, NDArray[np.int64]]:
        shards = np.searchsorted(self.shard_starts, indices, side="right") - 1
        rest, found = indices - self.shard_starts[shards], dict[Any, Any]()
        blocks = zip(self._axes, self._bounds, np.unravel_index(shards, self._grid), strict=True)
        for (axis, positions), bounds, at in reversed(list(blocks)):
            rest, within = np.divmod(rest, bounds[at + 1] - bounds[at])
            within += bounds[at]
            is_range = isinstance(positions, range)
            found[axis] = positions.start + within * positions.step if is_range else positions[within]
        return found

    def _starts(self, indices: NDArray[np.int64], plan: BatchPlan | None, places: Sequence[int] | None) -> Starts:
        """Return where samples begin, which the plan has at some places."""
        starts = {**self._positions(indices), None: 0 * indices}
        if self._random:
            if plan is None:
                raise ValueError("random tiles are others in each epoch: no cache can keep them")
            positions = plan.positions if places is None else [plan.positions[place] for place in places]
            seeds = [sample_seed(plan.epoch_seed, position) for position in positions]
            for number, (axis, (first, count)) in enumerate(self._random.items()):
                starts[axis] = np.array([first + ((mix64(seed + number) * count) >> 64) for seed in seeds], np.int64)
        return starts

    # --- what a feeder asks

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.shard_starts[-1])

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {list(field.shape)}" for name, field in self._fields.items())
        return f"Arrays({counted(len(self), 'sample')} of {fields})"

    def key(self, index: int, /) -> str:
        """Return the array of the first field and the position of the sample."""
        places = ", ".join(f"{axis}={at}" for axis, at in self.position(index).items())
        return f"{next(iter(self._fields.values())).name}[{places}]"

    def position(self, index: int, /) -> dict[Any, int]:
        """Return the position of a sample along each axis; of a tile, its first one, unless that is random."""
        found = self._positions(np.array([index]))
        return {axis: int(found[axis][0]) for axis, _ in self._axes}

    def coords(self, index: int, /) -> dict[Any, Any]:
        """Return the position of a sample as values of coordinates, times as ``datetime64``; otherwise ``position``."""
        known = {axis: (at, self._coordinate(axis)) for axis, at in self.position(index).items()}
        return {axis: at if values is None else values[at] for axis, (at, values) in known.items()}

    def at(self, *values: Any, **by_axis: Any) -> int:
        """Return the index of the sample at values of coordinates: ``weather.at("2019-07-01T00")``.

        Of a part, ``weather[80:]``, it is the index in the whole, as ``coords`` and ``position`` take it.

        Args:
            values: Of the axes of samples and then of tiles, in their order; indices where there is no coordinate.
            by_axis: The same by name: ``at("2019-07-01T00", lat=45, lon=10)``. A tile is the last one that begins
                there or before.

        Raises:
            TypeError: There is not one value for each axis.
            ValueError: There is no such value, or no sample that is whole is there.
        """
        axes = [axis for axis, _ in self._axes]
        given = {**dict(zip(axes, values, strict=False)), **by_axis}
        if len(values) + len(by_axis) != len(axes) or given.keys() != {*axes}:
            raise TypeError(f"at() takes one value for each of {axes}, got {values} and {by_axis}")
        blocks, within = [], 0
        for (axis, positions), bounds in zip(self._axes, self._bounds, strict=True):
            place = places_of(self._coordinate(axis), self._lengths[axis], given[axis], f"at(): {axis!r}")
            number = bisect_right(positions, place) - 1
            if number < 0 or place - positions[number] >= self._tiles.get(axis, 1):
                raise ValueError(f"at(): no sample is at {given[axis]!r} along {axis!r}: it would not be whole")
            blocks.append(bisect_right(bounds, number) - 1)
            within = within * int(bounds[blocks[-1] + 1] - bounds[blocks[-1]]) + number - int(bounds[blocks[-1]])
        return int(self.shard_starts[np.ravel_multi_index(blocks, self._grid)]) + within

    def fingerprint(self) -> str:
        """Names, shapes and dtypes of the arrays, and what a sample has of them."""
        digest = hashlib.sha256(self._selection.encode())
        if len(self._axes) > 1:
            # The number of a sample depends on them.
            digest.update(b"".join(bounds.tobytes() for bounds in self._bounds))
        for _, positions in self._axes:
            digest.update(b"" if isinstance(positions, range) else positions.tobytes())
        for part in self._parts():
            digest.update(f"\n{os.path.basename(part.name)} {part.shape} {part.dtype}".encode())
        return digest.hexdigest()[:32]

    def content_parts(self) -> list[Content]:
        """Return what identifies the values of all arrays, and what else decides samples."""
        parts, told = list(self._parts()), [str(self.categories)]
        for part in parts:
            scaling = part.scaling or Scaling(part.dtype, part.dtype)
            told.append(f"{part.fill} {scaling.factor} {scaling.offset} {[*map(float, scaling.missing)]}")
        for field in self._fields.values():
            told += [str(field.rows[evenly(len(field.rows))].tolist())] if isinstance(field, SparseField) else []
        found = [each for part in parts for each in part.content_parts(max(SAMPLED // len(parts), 1))]
        return [Content("\n".join(told).encode("utf-8", "surrogatepass"), kind=found[0].kind), *found] if found else []

    def nbytes(self, index: int, /) -> int:
        """Return the bytes of a sample."""
        return self.gathered_bytes

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests for arrays at URLs in this process; ``None`` for files."""
        return statistics_of({id(part.reader): part.reader for part in self._parts() if part.reader}.values())

    def _parts(self) -> Iterator[ChunkedArray]:
        return (part for source in self._sources for part in source.parts)

    def structure(self) -> Mapping[str, Sequence[int] | None]:
        """Return the shapes of the fields; of rows in CSR ``None``."""
        return {name: field.shape if field.is_dense else None for name, field in self._fields.items()}

    def in_batches(self) -> Self:
        """Return the source whose batches are gathered."""
        found = copy.copy(self)
        found._apart = False
        return found

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        """Return a batch of samples."""
        found = {name: field.collate([sample[name] for sample in samples]) for name, field in self._fields.items()}
        return as_tensors(found)

    def statistics(self, samples: int = 1000, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
        """Return ``mean``, ``std``, ``min`` and ``max`` of the values of each real field that are not NaN, float64.

        Args:
            samples: So many samples are read, drawn at random; all if there are fewer.
            seed: Draws others.
        """
        import torch

        from aiofeed import Feeder

        chosen = np.random.default_rng(seed).choice(len(self), min(samples, len(self)), replace=False)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self._fields}
        with Feeder(self[np.sort(chosen)], batch_size=16, seed=seed) as feeder:
            for batch in feeder:
                for name, tensor in batch.items():
                    if tensor.is_complex():
                        continue
                    values = (tensor if tensor.layout is torch.strided else tensor.to_dense()).double()
                    values = values[~values.isnan()]
                    if len(values):
                        count, mean = torch.tensor(len(values)).double(), values.mean()
                        squares = (values - mean).square().sum()
                        found[name].append(torch.stack([count, mean, squares, values.min(), values.max()]))
        return {name: _moments(torch.stack(parts)) for name, parts in found.items() if parts}

    # --- reading

    def new_gathered(
        self, indices: Any, memory: BufferLease, plan: BatchPlan | None, places: Sequence[int] | None = None
    ) -> GatheredArrays:
        """Make memory for the samples of a batch, or for those at some places of it."""
        starts = self._starts(np.asarray(indices, np.int64), plan, places)
        gathered = GatheredArrays(self._fields, self._numbers, starts, memory)
        gathered.apart = self._apart
        return gathered

    async def gather_several(self, shards: Mapping[int, Any], run: Any) -> None:
        """Read and decode chunks, and write them into the samples that need them."""
        chunks = []
        for shard, targets in shards.items():
            number = int(np.searchsorted(self._numbers, shard, side="right")) - 1
            source, (name, at) = self._sources[number], self._field_of[number]
            is_mapped = self._fields[name].is_mapped
            part, chunk, place = source.find(0 if is_mapped else shard - int(self._numbers[number]))
            if is_mapped:
                chunk, place = (), [(0, size) for size in source.shape]
            chunks.append(ReadChunk(name, at, part, chunk, place, targets))
        if remote := [each for each in chunks if not each.part.local]:
            read = await asyncio.gather(*[each.part.read(each.at) for each in remote], return_exceptions=True)
            for each, data in zip(remote, read, strict=True):
                each.data = data
        try:
            await run(self._decode, chunks)
        except Exception as error:  # noqa: BLE001 - the error of each of these samples
            for each in chunks:
                each.fail(error)

    def _decode(self, chunks: Sequence[ReadChunk]) -> int:
        """Decode chunks and write them into samples; return how many these are."""
        started, cpu_started, [(first, _), *_] = time.perf_counter(), time.thread_time(), chunks[0].targets
        for (name, *_), group in itertools.groupby(chunks, lambda each: (each.field, each.source, each.size)):
            field = self._fields[name]
            if decoded := [each for each in group if each.decode(mapped=field.is_mapped)]:
                field.put(decoded, first.memory)
        first.nbytes += sum(len(each.data) for each in chunks if isinstance(each.data, bytes))
        first.seconds += time.perf_counter() - started
        first.cpu_seconds += time.thread_time() - cpu_started
        return sum(len(places) for each in chunks for _, places in each.targets)

    async def read_planned(
        self, indices: Sequence[int], plan: BatchPlan | None, places: Sequence[int] | None
    ) -> list[Any]:
        """Return samples, or the error of each that cannot be read."""
        gathered = self.new_gathered(indices, HostBufferPool(0), plan, places)
        (needing, numbers), turn = gathered.shards, asyncio.Semaphore(-(-self.shards_at_once // self.shards_per_read))

        async def gather(some: Sequence[int]) -> None:
            async with turn:
                shards = {number: [(gathered, needing[numbers == number])] for number in some}
                await self.gather_several(shards, asyncio.to_thread)

        each = np.unique(numbers).tolist()
        firsts = range(0, len(each), self.shards_per_read)
        await run_all([gather(each[first : first + self.shards_per_read]) for first in firsts])
        return list(gathered)

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """``read_planned`` without a plan."""
        return await self.read_planned(indices, None, None)


def _moments(parts: torch.Tensor) -> dict[str, torch.Tensor]:
    counts, means, squares = parts[:, :3].unbind(1)
    mean = (counts * means).sum() / counts.sum()
    deviations = squares.sum() + (counts * (means - mean).square()).sum()
    found = {"mean": mean, "std": (deviations / counts.sum()).sqrt()}
    return {**found, "min": parts[:, 3].min(), "max": parts[:, 4].max()}


class GatheredArrays(Gathered):
    """The samples of a batch, into which chunks are written one by one.

    Args:
        fields: The fields.
        numbers: The number of the first chunk of each joined array.
        starts: Where the samples begin.
        memory: For their values.
    """

    def __init__(self, fields: Mapping[str, Field], numbers: Any, starts: Starts, memory: BufferLease) -> None:
        super().__init__(len(starts[None]))
        self.errors: dict[int, Exception] = {}
        self.memory: BufferLease = memory
        self._fields = fields
        self.states: dict[str, Any] = {name: field.new(starts, memory) for name, field in fields.items()}
        needs = [each for field in fields.values() for each in field.needs(starts)]
        shards = [each + first for (_, each), first in zip(needs, numbers, strict=False)]
        self.shards: Needs = np.concatenate([places for places, _ in needs]), np.concatenate(shards)

    def __iter__(self) -> Iterator[Any]:
        found = {name: field.samples(self.states[name]) for name, field in self._fields.items()}
        for at in range(len(self)):
            yield self.errors.get(at) or {name: samples[at] for name, samples in found.items()}

    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the tensors of the fields, and their bytes."""
        found = {name: field.batch(self.states[name], lease) for name, field in self._fields.items()}
        return found, sum(field.nbytes for field in self._fields.values()) * len(self)
