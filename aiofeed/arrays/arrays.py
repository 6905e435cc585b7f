"""``Arrays``: windows of chunked arrays, and rows of sparse matrices."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, Joined
from aiofeed.arrays.fields import DenseField, Field, Selection, SparseField, Starts, Values, nbytes_of
from aiofeed.arrays.opening import Categories, Opener, SparseMatrix
from aiofeed.common.blocking import run_blocking
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.kernel.core.random_numbers import mix64
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Gathered, Traits, public
from aiofeed.kernel.core.validation import counted
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool
from aiofeed.kernel.sampling.order import sample_seed
from aiofeed.objects.reader import run_all, statistics_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# A shard, for shuffle="window", has at least so many samples.
LEAST_SAMPLES = 64
# Chunks are read at the same time up to so many bytes, and so many chunks.
READ_BYTES = 32 << 20
READS = 128


@public
class Arrays(GroupedSource):
    """Samples are positions along axes of chunked arrays, with windows around them; batches are dicts of tensors.

    Arrays are Zarr (versions 2 and 3), HDF5 and NetCDF4, on disk or at URLs. Each chunk is read by its own range
    request and decoded in threads, without HDF5's library, its lock and its handles: processes may be forked. With
    ``shuffle="window"`` each chunk is decoded once in an epoch; ``shuffle=True`` decodes it for each look-ahead that
    needs it. Needs ``pip install "aiofeed[arrays]"``.

    Args:
        arrays: By the name of a field, an array: a path or URL of a Zarr array, ``"era5.zarr/t2m"``, or of a data set,
            ``"era5.nc::t2m"``; braces, a glob or a list of these, joined along the first axis of ``sample``; or an
            array of zarr, h5py, xarray, dask or NumPy. Sparse rows, ``"cells.h5ad::X"``, and columns of categories,
            ``"cells.h5ad::obs/cell_type"``, in the layout of AnnData.
        sample: The axis whose positions are the samples, by its name or number; or several.
        window: What a sample has of the axis: offsets from the position, ``range(-3, 1)`` or ``[-24, -12, 0]``; an int
            for one of them without the axis; or a dict of these by field, and in a field by axis. Default: 0.
        tile: By axis, the size of the part of it that a sample has.
        stride: By axis, how far tiles are apart, each of which is a sample (default: their size); or ``"random"``: one
            tile for each position, at random, from the sample's own generator.
        pad: The value beyond an array. Default: samples that reach beyond are left out.
        decode_cf: Whether scale, offset and fill values of the CF conventions are applied, as xarray does.
        sparse: Whether rows of matrices are ``"dense"`` or, as ``torch.sparse_csr`` batches, ``"csr"``.
        store: An obstore store that reads the URLs.
        options: Arguments of ``obstore.store.from_url``.

    Attributes:
        categories: By field, the names of its categories.

    Raises:
        ImportError: zarr, h5py, numcodecs or imagecodecs is not installed.
        FileNotFoundError: A file does not exist.
        TypeError: No array, or an argument of another type.
        ValueError: Arrays do not fit each other or the arguments, a file is damaged, or a filter is unknown.
    """

    traits: Traits = Traits(decode="optional", rows=True)
    looks_ahead = True
    reads_whole_shards = True
    data = None

    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        sample: str | int | Sequence[str | int] = 0,
        window: Any = None,
        tile: Mapping[str | int, int] | None = None,
        stride: Mapping[str | int, int] | str | None = None,
        pad: float | None = None,
        decode_cf: bool = True,
        sparse: str = "dense",
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(arrays, Mapping) or not arrays:
            raise TypeError(f'Arrays takes a dict of arrays, {{"x": "era5.zarr/t2m"}}, got {type(arrays).__name__}')
        if sparse not in ("dense", "csr"):
            raise ValueError(f'Arrays(sparse=) is "dense" or "csr", got {sparse!r}')
        axes = [sample] if isinstance(sample, str | int) else list(sample)
        sizes = dict(tile or {})
        if isinstance(stride, str) and stride != "random":
            raise ValueError(f'Arrays(stride=) is a dict of ints or "random", got {stride!r}')
        if isinstance(window, Mapping) and (unknown := [name for name in window if name not in arrays]):
            raise ValueError(f"Arrays(window=) names {unknown}, and the fields are {list(arrays)}")
        opener = Opener(decode_cf, store, options)
        self.categories: dict[str, list[str]] = {}
        self.fields: dict[str, Field] = {}
        self._sizes: dict[Any, int] = {}
        self._spans: dict[Any, list[int]] = {axis: [0, 0] for axis in axes}
        for name, given in arrays.items():
            parts = opener.open(name, given)
            if isinstance(parts[0], Categories):
                self.categories[name] = parts[0].names
                for part in parts:
                    if part.names != parts[0].names:
                        raise ValueError(f"{part.codes.name} has other categories than {parts[0].codes.name}")
                parts = [part.codes for part in parts]
            offsets = window.get(name) if isinstance(window, Mapping) else window
            self.fields[name] = self._field(name, parts, axes, sizes, offsets, pad, sparse)
        for axis in (*axes, *sizes):
            if axis not in self._sizes:
                raise ValueError(f"Arrays: no array has the axis {axis!r}")
        self._lay_out(axes, sizes, stride, pad)
        self._selection = repr((axes, window, sizes, stride, pad, decode_cf, sparse))
        self._numbers: NDArray[np.int64] = np.cumsum(
            [0, *[np.prod(each.grid, dtype=np.int64) for each in self._sources]]
        )

    def _field(
        self, name: str, parts: list[Any], axes: list[Any], sizes: dict[Any, int], offsets: Any, pad: Any, sparse: str
    ) -> Field:
        if isinstance(parts[0], SparseMatrix):
            selection = self._select(name, axes[0], parts[0].shape[0] if len(parts) == 1 else 0, offsets, axes)
            if not selection.run:
                raise ValueError(f"Arrays: the window of {name!r}, which is sparse, must be a range of step 1")
            if sparse == "csr" and selection.kept:
                raise ValueError(f'Arrays: sparse="csr" is for single rows, and {name!r} has a window')
            if pad is not None:
                raise ValueError(f"Arrays: {name!r} is sparse, and pad= is for other arrays")
            found = SparseField(parts, selection, dense=sparse == "dense")
            self._measure(name, axes[0], len(found.rows) - 1)
            return found
        dims, ndim = parts[0].dims, len(parts[0].shape)
        names: dict[int, Any] = {}
        for axis in (*axes, *sizes):
            number = axis if isinstance(axis, int) else dims.index(axis) if dims and axis in dims else None
            if not isinstance(axis, int) and dims is None:
                raise ValueError(
                    f"{parts[0].name} has no names of axes: number them, sample={axes.index(axis) if axis in axes else 1}"
                )
            if number is not None and number < ndim:
                names[number] = axis
        along = next((number for number, axis in names.items() if axis == axes[0]), 0)
        joined = Joined(parts, along)
        if 0 in joined.shape:
            raise ValueError(f"{joined.first.name} is empty: its shape is {list(joined.shape)}")
        selections = []
        for number, size in enumerate(joined.shape):
            axis = names.get(number)
            if axis is None:
                selections.append(Selection(None, np.arange(size)))
                continue
            self._measure(name, axis, size)
            if axis in sizes:
                selections.append(Selection(axis, np.arange(sizes[axis])))
            else:
                selections.append(self._select(name, axis, size, offsets, axes))
        return DenseField(joined, selections, pad)

    def _measure(self, name: str, axis: Any, size: int) -> None:
        if self._sizes.setdefault(axis, size) != size:
            raise ValueError(f"Arrays: along {axis!r}, {name!r} has {size} positions, other fields {self._sizes[axis]}")

    def _select(self, name: str, axis: Any, size: int, given: Any, axes: list[Any]) -> Selection:
        """Return the window of a field along an axis of samples."""
        if isinstance(given, Mapping):
            given = given.get(axis)
        elif axis != axes[0]:
            given = None
        kept = given is not None and not isinstance(given, int)
        offsets = np.asarray([given or 0] if not kept else list(given))
        if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
            raise TypeError(f"Arrays(window=) takes ranges, lists of ints and ints; {name!r} has {given!r}")
        span = self._spans[axis]
        span[:] = min(span[0], int(offsets.min())), max(span[1], int(offsets.max()))
        return Selection(axis, offsets.astype(np.int64), kept)

    def _lay_out(self, axes: list[Any], sizes: dict[Any, int], stride: Any, pad: float | None) -> None:
        """Number the samples: those of one block of chunks, a shard, come together."""
        self._random: dict[Any, int] = {}
        self._axes: list[Any] = []
        self._firsts, self._steps, counts = list[int](), list[int](), list[int]()
        for axis in (*axes, *sizes):
            total, step, first = self._sizes[axis], 1, 0
            if axis in sizes:
                room = total - sizes[axis]
                if sizes[axis] < 1 or (room < 0 and pad is None):
                    raise ValueError(
                        f"Arrays(tile=): {sizes[axis]} is no size along {axis!r}, which has {total} positions"
                    )
                if stride == "random":
                    self._random[axis] = max(room, 0) + 1
                    continue
                step = (stride or {}).get(axis, sizes[axis])
                if not isinstance(step, int) or step < 1:
                    raise ValueError(f"Arrays(stride=) must be 1 or more along {axis!r}, got {step!r}")
                count = room // step + 1 if pad is None else -(-total // step)
            else:
                low, high = self._spans[axis] if pad is None else (0, 0)
                first, count = max(-low, 0), total - max(-low, 0) - max(high, 0)
                if count < 1:
                    raise ValueError(f"Arrays: along {axis!r} there are {total} positions, and the window has more")
            self._axes.append(axis)
            self._firsts.append(first)
            self._steps.append(step)
            counts.append(count)
        self._bounds = []
        for axis, first, step, count in zip(self._axes, self._firsts, self._steps, counts, strict=True):
            fields = sorted(self.fields.values(), key=lambda field: -nbytes_of([field]))
            cuts = next(found for field in fields if (found := field.cuts(axis)) is not None)
            at = np.unique(((cuts[:-1] - first + step - 1) // step).clip(0, count - 1))
            self._bounds.append(np.unique([0, *at, count]))
        each = np.prod([len_ / (len(bounds) - 1) for len_, bounds in zip(counts, self._bounds, strict=True)])
        if (several := int(-(-LEAST_SAMPLES // max(each, 1)))) > 1:
            self._bounds[0] = np.unique([*self._bounds[0][:-1:several], counts[0]])
        self._grid = tuple(len(bounds) - 1 for bounds in self._bounds)
        lengths = np.ones(1, np.int64)
        for bounds in self._bounds:
            lengths = np.multiply.outer(lengths, np.diff(bounds)).reshape(-1)
        self.shard_starts: NDArray[np.int64] = np.append(0, np.cumsum(lengths))
        self._sources: list[Joined] = [source for field in self.fields.values() for source in field.sources]
        self.gathered_bytes: int = nbytes_of(list(self.fields.values()))
        chunk_bytes = max(part.chunk_bytes for source in self._sources for part in source.parts)
        self.shards_at_once: int = max(1, min(READS, READ_BYTES // max(chunk_bytes, 1)))

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.shard_starts[-1])

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {list(field.shape)}" for name, field in self.fields.items())
        return f"Arrays({counted(len(self), 'sample')} of {fields})"

    def key(self, index: int, /) -> str:
        """Return the array of the first field and the position of the sample."""
        places = ", ".join(f"{axis}={at}" for axis, at in self.position(index).items())
        return f"{self._sources[0].first.name}[{places}]"

    def position(self, index: int, /) -> dict[Any, int]:
        """Return the position of a sample along each axis, and the first one of its tile unless that is random."""
        return {axis: int(found[0]) for axis, found in self._positions(np.array([index])).items()}

    def _positions(self, indices: NDArray[np.int64]) -> dict[Any, NDArray[np.int64]]:
        blocks = np.searchsorted(self.shard_starts, indices, side="right") - 1
        rest, found = indices - self.shard_starts[blocks], dict[Any, Any]()
        at = np.unravel_index(blocks, self._grid)
        for k in reversed(range(len(self._axes))):
            bounds = self._bounds[k]
            rest, within = np.divmod(rest, bounds[at[k] + 1] - bounds[at[k]])
            found[self._axes[k]] = self._firsts[k] + (bounds[at[k]] + within) * self._steps[k]
        return {axis: found[axis] for axis in self._axes}

    def _starts(self, indices: NDArray[np.int64], plan: BatchPlan | None, first: int) -> Starts:
        """Return where samples begin, which the plan has from its position ``first`` on."""
        starts = self._positions(indices)
        if self._random:
            if plan is None:
                raise ValueError("Arrays: random tiles are those of a feeder's epoch, and there is none")
            positions = plan.positions[first : first + len(indices)]
            seeds = [sample_seed(plan.epoch_seed, position) for position in positions]
            for number, (axis, count) in enumerate(self._random.items()):
                starts[axis] = np.array([(mix64(seed + number) * count) >> 64 for seed in seeds], np.int64)
        return starts

    # --- reading

    def new_gathered(self, indices: Any, memory: BufferLease, plan: BatchPlan | None, first: int = 0) -> GatheredArrays:
        """Make memory for the samples of a batch."""
        indices = np.asarray(indices, np.int64)
        return GatheredArrays(self, self._starts(indices, plan, first), len(indices), memory)

    async def gather_ahead(
        self, indices: Any, targets: Sequence[tuple[GatheredArrays, NDArray[np.int64]]], run: Any, shard: int
    ) -> None:
        """Read and decode a chunk, and write it into the samples that need it."""
        number = int(np.searchsorted(self._numbers, shard, side="right")) - 1
        part, chunk, place = self._sources[number].find(shard - int(self._numbers[number]))
        try:
            data = None if part.local else await part.read(chunk)
            await run(self._write, number, part, chunk, place, data, targets)
        except Exception as error:  # noqa: BLE001 - the error of each of these samples
            named: Exception = error.with_traceback(None)
            if type(error) in (OSError, ValueError) or not isinstance(error, OSError):
                named = (OSError if isinstance(error, OSError) else ValueError)(f"{part.where(chunk)}: {error}")
            for gathered, places in targets:
                gathered.errors.update(dict.fromkeys(places.tolist(), named))

    def _write(self, number: int, part: ChunkedArray, chunk: Chunk, place: Any, data: Any, targets: Any) -> None:
        started = time.perf_counter()
        data = part.read_now(chunk) if part.local else data
        values = part.decode(data, chunk)
        for gathered, places in targets:
            gathered.put(number, places, place, values)
        seconds, nbytes = time.perf_counter() - started, len(data) if isinstance(data, bytes) else 0
        targets[0][0].count(seconds, nbytes)

    async def read_planned(self, indices: Sequence[int], plan: BatchPlan | None, start: int) -> list[Any]:
        """Return samples, or the error of each that cannot be read."""
        gathered = self.new_gathered(indices, HostBufferPool(0), plan, start)
        await self._gather(gathered)
        return list(gathered)

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """``read_planned`` without a plan."""
        return await self.read_planned(indices, None, 0)

    async def _gather(self, gathered: GatheredArrays) -> None:
        places, numbers = gathered.shards
        turn = asyncio.Semaphore(self.shards_at_once)

        async def gather(number: int) -> None:
            async with turn:
                await self.gather_ahead(None, [(gathered, places[numbers == number])], asyncio.to_thread, number)

        await run_all([gather(number) for number in np.unique(numbers).tolist()])

    def in_batches(self) -> Arrays:
        """Return the source itself, whose batches are gathered."""
        return self

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of samples."""
        import torch

        batch: dict[str, Any] = {}
        for name, field in self.fields.items():
            values = [sample[name] for sample in samples]
            if isinstance(field, SparseField) and not field.dense:
                starts = torch.tensor([0, *np.cumsum([len(columns) for columns, _ in values]).tolist()])
                columns, numbers = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*values, strict=True))
                size = (len(values), field.width)
                batch[name] = torch.sparse_csr_tensor(starts, columns.long(), numbers, size, check_invariants=False)
            else:
                batch[name] = torch.from_numpy(np.stack(values))
        return batch

    # --- about the data

    def statistics(self, samples: int = 1000, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
        """Return ``mean``, ``std``, ``min`` and ``max`` of each field, float64, without values that are NaN.

        Args:
            samples: So many samples are read, drawn at random; all if there are fewer.
            seed: Draws others.
        """
        import torch

        generator = np.random.default_rng(seed)
        indices = np.sort(generator.choice(len(self), min(samples, len(self)), replace=False))
        sums = {name: np.zeros(3) for name in self.fields}
        ends = {name: [np.inf, -np.inf] for name in self.fields}
        for first in range(0, len(indices), 64):
            chosen = indices[first : first + 64]
            plan = BatchPlan(0, chosen.tolist(), chosen.tolist(), seed)
            for found in run_blocking(lambda: self.read_planned(plan.indices, plan, 0)):  # noqa: B023 - awaited at once
                if isinstance(found, Exception):
                    raise found
                for name, value in found.items():
                    numbers = np.asarray(value if not isinstance(value, tuple) else value[1], np.float64)
                    numbers = numbers[~np.isnan(numbers)]
                    sums[name] += len(numbers), numbers.sum(), np.square(numbers).sum()
                    if len(numbers):
                        ends[name] = [min(ends[name][0], numbers.min()), max(ends[name][1], numbers.max())]
        result = {}
        for name, (count, total, squares) in sums.items():
            mean = total / max(count, 1)
            found = {"mean": mean, "std": max(squares / max(count, 1) - mean**2, 0.0) ** 0.5}
            found.update(min=ends[name][0], max=ends[name][1])
            result[name] = {key: torch.tensor(float(value), dtype=torch.float64) for key, value in found.items()}
        return result

    def nbytes(self, index: int, /) -> int:
        """Return the bytes of a sample."""
        return self.gathered_bytes

    def version(self, index: int, /) -> str:
        """Return the versions of the arrays, and what a sample has of them."""
        return f"{self.fingerprint()} {[part.version for source in self._sources for part in source.parts]}"

    def fingerprint(self) -> str:
        """Names, shapes and dtypes of the arrays, and what a sample has of them."""
        digest = hashlib.sha256(self._selection.encode())
        for source in self._sources:
            for part in source.parts:
                digest.update(f"\n{os.path.basename(part.name)} {part.shape} {part.dtype}".encode())
        return digest.hexdigest()[:32]

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests for arrays at URLs in this process; ``None`` for files."""
        parts = [part for source in self._sources for part in source.parts]
        readers = [
            getattr(part, "reader", None) or getattr(getattr(part, "shard", None), "reader", None) for part in parts
        ]
        return statistics_of({id(reader): reader for reader in readers if reader is not None}.values())


class GatheredArrays(Gathered):
    """The samples of a batch, into which chunks are written one by one."""

    errors: dict[int, Exception]
    shards: tuple[NDArray[np.int64], NDArray[np.int64]]

    def __init__(self, source: Arrays, starts: Starts, count: int, memory: BufferLease) -> None:
        super().__init__(count)
        self.errors = {}
        self.nbytes: int = 0
        self.seconds: float = 0.0
        self._names = list(source.fields)
        self._values: list[Values] = []
        self._owners: list[tuple[Values, int]] = []
        needs = []
        for field in source.fields.values():
            values = field.new(starts, count, memory)
            self._values.append(values)
            for at, (places, numbers) in enumerate(field.needs(starts, count)):
                needs.append((places, numbers + source._numbers[len(self._owners)]))
                self._owners.append((values, at))
        self.shards = tuple(map(np.concatenate, zip(*needs, strict=True)))  # type: ignore[assignment]

    def put(self, number: int, places: NDArray[np.int64], place: Any, values: Any) -> None:
        """Write a chunk of a joined array into samples; from any thread."""
        found, at = self._owners[number]
        found.put(at, places, place, values)

    def count(self, seconds: float, nbytes: int) -> None:
        """Count what a chunk took."""
        self.seconds += seconds
        self.nbytes += nbytes

    def __iter__(self) -> Any:
        for at in range(len(self)):
            sample = {name: values.sample(at) for name, values in zip(self._names, self._values, strict=True)}
            yield self.errors.get(at) or sample

    def batch(self, lease: BufferLease) -> tuple[Any, int]:
        """Return the tensors of the fields, and their bytes."""
        found = {name: values.batch(lease) for name, values in zip(self._names, self._values, strict=True)}
        return {name: tensor for name, (tensor, _) in found.items()}, sum(nbytes for _, nbytes in found.values())
