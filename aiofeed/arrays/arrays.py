"""``Arrays``: windows of chunked arrays, and rows of sparse matrices."""

from __future__ import annotations

import asyncio
import copy
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
from aiofeed.arrays.chunked import MOST_CHUNKS, ChunkedArray, Joined, Needs, Scaling, equal_steps, places_of
from aiofeed.arrays.fields import MAPPED, DenseField, Field, ReadChunk, Selection, SparseField, Starts
from aiofeed.arrays.layout import SampleLayout, shards_of
from aiofeed.arrays.opening import Opener
from aiofeed.arrays.statistics import statistics_of_values
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.common.progress_bar import log
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Gathered, Traits, public
from aiofeed.kernel.core.validation import counted, explain_arguments
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.sampling.order import mix64, sample_seed
from aiofeed.kernel.sources.file_io import SAMPLED, Content, evenly
from aiofeed.kernel.sources.subset import Subset
from aiofeed.objects.reader import run_all, statistics_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

SAMPLE_BYTES = 4 << 10
FARTHEST = 1 << 40  # offset of a window
IMAGE = "image"  # the axis of arrays that are samples
_JOINED = "the joined axis, by array"
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
            axis is the same for all positions. ``()``: each array of a list, a glob or a plate is an image, the
            positions are those of the axis ``"image"``, and an array beside lists has a row for each image.
        window: What a sample has of the axis: offsets from the position, ``range(-3, 1)`` or ``[-24, -12, 0]``; an int
            for one of them without the axis; or a dict of these by field, and in a field by axis. Default: 0.
        tile: By axis, the size of the part of it that a sample has. Joined arrays may differ in size along it; then no
            window crosses the border of two.
        stride: By axis, how far tiles are apart, each of which is a sample (default: their size); or ``"random"``: one
            tile for each position, at random, from the sample's own generator.
        samples_per_position: How many random tiles each position has.
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
        samples_per_position: int = 1,
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
        axes: list[Any] = [sample] if isinstance(sample, str | int) else list(sample) or [IMAGE]
        # By axis: all offsets; the size of a tile; the length. And the names of axes, for messages.
        self._windows = {axis: [0] for axis in axes}
        self._tiles, self._lengths, self._names = dict(tile or {}), dict[Any, Any](), set[str]()
        if len({*axes, *self._tiles}) < len(axes) + len(self._tiles):
            raise ValueError(f"Arrays: sample={sample!r} and tile={tile!r} must name one axis, and none twice")
        if wrong := [size for size in self._tiles.values() if not isinstance(size, Integral) or size < 1]:
            raise ValueError(f"Arrays(tile=): a size must be 1 or more, got {wrong[0]!r}")
        repeats = samples_per_position
        if int(repeats) != repeats or not 1 <= repeats <= (FARTHEST if stride == "random" else 1):
            raise ValueError(f'Arrays(samples_per_position={repeats!r}) is 1, or more with stride="random"')
        if not isinstance(stride, Mapping | str | None):
            raise TypeError(f'Arrays(stride=) is a dict of ints or "random", got {stride!r}')
        if stride and (not tile or (isinstance(stride, Mapping) and not stride.keys() <= self._tiles.keys())):
            raise ValueError(f"Arrays(stride={stride!r}) needs a size for each of its axes in tile=")
        is_images = not isinstance(sample, str | int) and not len(sample)
        if within is not None and (within not in axes or pad is not None or is_images):
            raise ValueError(f"Arrays(within={within!r}) is one of sample={sample!r}, and not for pad=")
        self._within, self._asked = within, select or {}
        # By field and axis, what select= has; by axis, this part of it, the arrays that have it, and its coordinate.
        self._chosen, self._ranges, self._homes = dict[Any, Any](), dict[Any, range](), dict[Any, list[Any]]()
        self._coordinates: dict[Any, Any] = {}
        self._fields: dict[str, Field] = {}
        chosen = {name: self._asked_of(name).get("var") for name in arrays}
        opened = {name: opener.open(name, given, axes[0], chosen[name]) for name, given in arrays.items()}
        opener.sort(opened, arrays, axes[0])
        self._images: int = max(map(len, opened.values())) * is_images
        if self._images == 1 and not tile:
            raise ValueError("Arrays(sample=()) needs several arrays in a field, each of which is a sample, or tile=")
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
        self._selection += repr(repeats) if repeats > 1 else ""
        self._selection += hashlib.sha256(repr((join, self.columns)).encode()).hexdigest() if join else ""
        found = {axis for _, axis in self._chosen}
        for key, given in (select or {}).items():
            if key not in found and not (isinstance(given, Mapping) and key in arrays and given.keys() <= found):
                raise ValueError(f"Arrays(select=): no field or axis is {key!r}: {given!r}, only {sorted(self._names)}")
        # To write a sample takes as long as to copy so many bytes.
        self.gathered_bytes: int = max(sum(field.nbytes for field in self._fields.values()), SAMPLE_BYTES)
        self._lay_out(stride, pad, int(repeats))
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
        stacked = len(parts) == self._images
        names = [*[IMAGE] * stacked, *(dims or [None] * len(parts[0].shape))]
        names[:1] = [IMAGE] if self._images else names[:1]
        for axis in (*self._windows, *self._tiles):
            if not isinstance(axis, int) and dims is None and stacked == bool(self._images) and axis not in names:
                raise ValueError(f"{first} has no names of axes: give numbers in place of {axis!r}")
            is_number = isinstance(axis, int)
            number = axis + bool(self._images) if is_number else names.index(axis) if axis in names else -1
            if 0 <= number < len(names):
                named[number] = axis
        along = next((number for number, axis in named.items() if axis in self._windows), 0)
        tiled = [number for number, axis in named.items() if axis in self._tiles]
        joined, selections = Joined(parts, along, tiled, stacked=stacked), []
        if 0 in joined.shape:
            raise ValueError(f"{first} has no values: its shape is {list(joined.shape)}")
        for number, size in enumerate(joined.shape):
            axis, sizes = named.get(number), joined.sizes(number)
            home = (parts if number == along else parts[:1]), number - stacked
            chosen = self._choose(name, *home, size) if number >= stacked else None
            if len({*sizes}) > 1:
                self._measure(name, axis, sizes)
                self._measure(name, _JOINED, joined.lengths)
            elif axis is not None:
                self._measure(name, axis, size)
                self._homes.setdefault(axis, []).append(home)
            if axis is not None:
                is_slice = pad is None and getattr(chosen, "step", 0) == 1 and axis in self._homes
                if chosen is not None and not (is_slice and self._ranges.setdefault(axis, chosen) == chosen):
                    raise ValueError(f"Arrays(select=): along {axis!r} all fields have one slice, and no pad=")
            if axis in self._windows:
                selections.append(self._select(name, axis, offsets))
            elif axis is None and chosen is not None:
                selections.append(Selection(None, *(([chosen], False) if isinstance(chosen, int) else (chosen, True))))
            else:
                selections.append(Selection(axis, range(size if axis is None else self._tiles[axis])))
        return DenseField(joined, selections, pad)

    def _measure(self, name: str, axis: Any, size: Any) -> None:
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

    def _lay_out(self, stride: Any, pad: float | None, repeats: int) -> None:
        """Number the samples; of arrays of different sizes, those of each one apart."""
        joined = [field.sources[0] for field in self._fields.values()]
        self._joined: Joined = max(joined, key=lambda each: len(each.parts))
        sizes = self._lengths.get(_JOINED, ())
        if sizes and pad is not None and len(set(next(iter(self._windows.values())))) > 1:
            raise ValueError("Arrays(pad=): of arrays of different sizes, windows do not reach beyond one")
        borders, grids = np.cumsum([0, *(sizes or [MOST_CHUNKS])]).tolist(), list[Any]()
        for part in range(len(borders) - 1):
            try:
                grids.append(self._grid_of(part, range(*borders[part : part + 2]), stride, pad, repeats))
            except ValueError:  # an array that is too small has no samples
                if not grids and part + 2 == len(borders):
                    raise
        if missing := len(borders) - 1 - len(grids):
            log.warning("Arrays: %d of %d are smaller than a sample and left out; pad= keeps them", missing, len(sizes))
        axes, bounds, random = map(list, zip(*grids, strict=True))
        self._layout = SampleLayout(axes, bounds, repeats)
        self.shard_starts: NDArray[np.int64] = self._layout.starts
        self._random: list[dict[Any, tuple[int, int]]] = random

    def _grid_of(self, part: int, inside: range, stride: Any, pad: float | None, repeats: int) -> Any:
        """Return the positions along each axis, the bounds of shards in these, and what random tiles are drawn of.

        Args:
            part: The number of an array, if they differ in size; otherwise 0.
            inside: Its place along the first axis of samples.
            stride: As given.
            pad: As given.
            repeats: The samples at each position.
        """
        is_ragged = _JOINED in self._lengths
        fields: Any = [each for each in self._fields.values() if not is_ragged or len(each.sources[0].parts) > 1]
        fields.sort(key=lambda field: field.nbytes, reverse=True)
        along, bounds, random = dict[Any, Any](), list[Any](), dict[Any, tuple[int, int]]()
        for axis in (*self._windows, *self._tiles):
            if axis not in self._lengths:
                raise ValueError(f"Arrays: no array has the axis {axis!r}; there are {sorted(self._names)}")
            length = self._lengths[axis]
            places = self._ranges.get(axis, range(length[part] if isinstance(length, tuple) else length))
            if not along:
                places = range(max(places.start, inside.start), min(places.stop, inside.stop))
            length, size, first, step = len(places), self._tiles.get(axis, 1), places.start, 1
            if axis in self._tiles:
                step = self._tiles[axis] if not isinstance(stride, Mapping) else stride.get(axis, size)
                if not isinstance(step, Integral) or step < 1:
                    raise ValueError(f"Arrays(stride=) must be 1 or more along {axis!r}, got {step!r}")
                if stride == "random":  # the first place, and how many there are
                    random[axis], size = (first, max(length - size, 0) + 1), size if pad is None else 0
            elif pad is None:
                first, size = first - min(self._windows[axis]), max(self._windows[axis]) - min(self._windows[axis]) + 1
            count = -(-length // step) if pad is not None else (length - size) // step + 1
            if count < 1:
                raise ValueError(f"Arrays: along {axis!r} there are {length} positions, and a sample needs {size}")
            if axis not in random:
                cuts = next(at for each in fields if (at := each.cuts(axis, part if is_ragged else None)) is not None)
                positions: Any = range(first, first + count * step, step)
                before = -(-(cuts[:-1] - first) // step)
                if axis == self._within:
                    positions = self._unbroken(axis, np.array(positions))
                    before, count = np.searchsorted(positions, cuts[:-1]), len(positions)
                along[axis] = positions
                ascending = np.r_[0, before.clip(0, count - 1), count]
                bounds.append(ascending[np.diff(ascending, prepend=-1) > 0])  # numpy.unique takes seconds
        if (claimed := math.prod(map(len, along.values()))) > MOST_CHUNKS:
            raise ValueError(f"{fields[0].name} claims {claimed} samples: it is damaged")
        wide = len(set(next(iter(self._windows.values())))) > 1 or isinstance(fields[0], SparseField)
        return along, shards_of(bounds, self.gathered_bytes * repeats, wide=wide), random

    def _coordinate(self, axis: Any) -> Any:
        """Return the coordinate of an axis of samples, which is read once; ``None`` if no field has one."""
        if axis not in self._coordinates and axis == IMAGE and self._images:
            names = [part.label or part.name for part in self._joined.parts]
            self._coordinates[axis] = np.array(names, object) if len({*names}) == len(names) else None
        elif axis not in self._coordinates:
            found = next(filter(None, (self._opener.coordinate(*home) for home in self._homes.get(axis, ()))), None)
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

    def _starts(self, indices: NDArray[np.int64], plan: BatchPlan | None, places: Sequence[int] | None) -> Starts:
        """Return where samples begin, which the plan has at some places."""
        found, grids = self._layout.positions(indices)
        starts = {**found, None: 0 * indices}
        if self._random[0]:
            if plan is None:
                raise ValueError("random tiles are others in each epoch: no cache can keep them")
            positions = plan.positions if places is None else [plan.positions[place] for place in places]
            seeds = [sample_seed(plan.epoch_seed, position) for position in positions]
            for number, axis in enumerate(self._random[0]):
                drawn = zip(seeds, [self._random[grid][axis] for grid in grids.tolist()], strict=True)
                firsts = [first + ((mix64(seed + number) * count) >> 64) for seed, (first, count) in drawn]
                starts[axis] = np.array(firsts, np.int64)
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
        places, name = self.position(index), next(iter(self._fields.values())).name
        if self._images or self._joined.first.label or _JOINED in self._lengths:
            axis = next(iter(places))
            part, places[axis] = self._joined.within(places[axis])
            name, _ = part.name, places.pop(IMAGE, None)
        if self._layout.repeats > 1:
            places["tile"] = index % self._layout.repeats
        return f"{name}[{', '.join(f'{axis}={at}' for axis, at in places.items())}]"

    def position(self, index: int, /) -> dict[Any, int]:
        """Return the position of a sample along each axis; of a tile, its first one, unless that is random."""
        found, _ = self._layout.positions(np.array([index]))
        return {axis: int(places[0]) for axis, places in found.items()}

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
        grid, numbers, axes = 0, list[int](), [*self._layout.axes[0]]
        given = {**dict(zip(axes, values, strict=False)), **by_axis}
        if len(values) + len(by_axis) != len(axes) or given.keys() != {*axes}:
            raise TypeError(f"at() takes one value for each of {axes}, got {values} and {by_axis}")
        for axis in axes:
            # An image has a name and a number.
            known = None if axis == IMAGE and isinstance(given[axis], int) else self._coordinate(axis)
            place = places_of(known, np.max(self._lengths[axis]), given[axis], f"at(): {axis!r}")
            if not numbers:
                grid = max(bisect_right([each[axis][0] for each in self._layout.axes], place) - 1, 0)
            positions = self._layout.axes[grid][axis]
            numbers.append(bisect_right(positions, place) - 1)
            if numbers[-1] < 0 or place - positions[numbers[-1]] >= self._tiles.get(axis, 1):
                raise ValueError(f"at(): no sample is at {given[axis]!r} along {axis!r}: it would not be whole")
        return self._layout.index(grid, numbers)

    def fingerprint(self) -> str:
        """Names, shapes and dtypes of the arrays, and what a sample has of them."""
        digest = hashlib.sha256(self._selection.encode())
        digest.update(self._layout.fingerprint())
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

    def statistics(
        self, samples: int = 1000, seed: int = 0, by: str | int | Sequence[str | int] = ()
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return ``mean``, ``std``, ``min`` and ``max`` of the values of each real field that are not NaN, float64.

        Of a part, ``weather[:80].statistics()``, of its samples only.

        Args:
            samples: So many samples are read, drawn at random; all if there are fewer.
            seed: Draws others.
            by: Axes of samples, by name or number in the array, such as levels or channels. There are numbers of each
                position along them, NaN where there are no values. They have all axes of a sample, the others of size
                1: ``(batch["x"] - mean) / std`` is right, and ``mean.flatten()`` is a list of channels. Of an axis of
                windows or tiles, positions are those in the sample.

        Raises:
            ValueError: No field has such an axis.
        """
        return statistics_of_values(self, self._fields, samples, seed, by)

    def _part(self, rows: NDArray[np.int64]) -> Any:
        return ArraysPart(self, rows)

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


class ArraysPart(Subset):
    """The samples of ``Arrays`` at some indices."""

    def statistics(self, *arguments: Any, **named: Any) -> dict[str, dict[str, torch.Tensor]]:
        """Return ``Arrays.statistics`` of these samples."""
        return statistics_of_values(self, self.whole._fields, *arguments, **named)


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
