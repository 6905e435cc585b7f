"""HDF5 and NetCDF4: h5py finds the chunks once; they are read and decoded without HDF5's library, lock and handles."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import zipfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, grid_of, opened, rows_of, text
from aiofeed.common.cache_folder import cache_path, write_cached
from aiofeed.common.expanded import check_expanded
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.sources.file_io import Content
from aiofeed.shards.urls import Shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is read at once of a file at a URL, to find its chunks.
BLOCK_BYTES = 64 << 10

# A text takes about so many in memory.
TEXT_BYTES = 64

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
# Filters that compress; each function gets the most bytes that it may return.
_COMPRESSORS: dict[int, Callable[[Any, int], Any]] = {
    _DEFLATE: lambda data, most: imagecodecs.deflate_decode(data, raw=False, out=most),
    32000: lambda data, most: imagecodecs.lzf_decode(data, header=False, out=most),
    32001: lambda data, most: imagecodecs.blosc_decode(data, out=most),
    32004: lambda data, most: imagecodecs.lz4h5_decode(data, out=most),
    32015: lambda data, most: imagecodecs.zstd_decode(data, out=most),
}
_PACKED = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
_ATTRIBUTES = (*_PACKED, "encoding-type", "shape", "_index")
# Of groups in the layout of AnnData, these arrays are described.
_PARTS = ("data", "indices", "indptr", "codes", "categories", "values", "mask", "shape", "_index")
# How NetCDF names a variable that has the name of a dimension but not its axis, and what a dimension without one says.
_HIDDEN = "_nc4_non_coord_"
_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
# By the first bytes of a file, what it is and what to do.
_OTHER_FILES = {
    b"CDF": "NetCDF 3: write it as NetCDF 4 by 'nccopy -k nc4 old.nc new.nc', or pass the array that xarray opens",
    b"\x0e\x03\x13\x01": "HDF 4: write it as HDF 5 by 'h4toh5 old.hdf new.h5'",
    b"PK": "a zip file: pass the array that zarr opens",
    b"\x93NUM": "a NumPy file: pass numpy.load(path, mmap_mode='r'), which reads parts of it",
}
_REFUSED = {4: "szip", 5: "nbit", 6: "scale-offset", 307: "bzip2", 32008: "bitshuffle", 32013: "zfp", 32026: "blosc2"}


@dataclass(eq=False, kw_only=True)
class HDF5Array(ChunkedArray):
    """A data set of an HDF5 file.

    Args:
        shard: The file.
        filters: The numbers of its filters, in the order in which they were applied.
        table: [n, 3]: the first byte of each stored chunk, its bytes, and the filters left out; of a contiguous data
            set the place of all.
        numbers: The number of each of them in the grid, ascending; ``None``: the data set is contiguous.
        written: The shape of the data set; beyond that, the array has the fill value.
    """

    shard: Shard
    filters: list[int]
    table: NDArray[np.int64]
    numbers: NDArray[np.int64] | None
    written: tuple[int, ...]

    def _places(self, chunk: Chunk) -> list[list[int]]:
        """Return the row of the table for a chunk; none if it is not stored."""
        if self.numbers is None:
            first, most = chunk[0] * self.chunk_bytes, self.chunk_bytes
            return [[start + first, min(size - first, most), mask] for start, size, mask in self.table.tolist()]
        number = 0
        for at, count in zip(chunk, grid_of(self.shape, self.chunks), strict=True):
            number = number * count + at
        first = bisect_left(self.numbers, number)
        return self.table[first : bisect_right(self.numbers, number, first)].tolist()  # type: ignore[no-any-return]

    def _ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        return [(start, start + size) for start, size, _ in self._places(chunk)]

    def mapped_values(self) -> Any:
        """Return all values of a contiguous data set in a file."""
        stored = [start + size <= self.shard.size for start, size, _ in self.table.tolist()] == [True]
        fits = stored and self.local and self.written == self.shape and self.numbers is None
        if not fits or self.scaling is not None or self.places is not None:
            return None
        self.shard.read_now([])  # raises if the file has changed: to read behind its end would end the process
        return np.memmap(self.shard.key, self.dtype, "r", int(self.table[0, 0]), self.shape)

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        ranges = self._ranges(chunk)
        return (await self.shard.read(ranges))[0] if ranges else None

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        ranges = self._ranges(chunk)
        return self.shard.read_now(ranges)[0] if ranges else None

    def content_parts(self, most: int) -> list[Content]:
        """Return the file and some chunks in it; at a URL its etag."""
        whole = [self.shard.content] if self.shard.content else []
        ranges = [each for chunk in self.some_chunks(most) for each in self._ranges(chunk)] if self.local else []
        return whole + [Content(self.shard.url, start, end) for start, end in ranges]

    def unpack(self, data: Any, nbytes: int, chunk: Chunk) -> Any:
        """Return the stored values of a chunk."""
        left_out = self._places(chunk)[0][2]
        for at in reversed(range(len(self.filters))):
            number = self.filters[at]
            if left_out >> at & 1:
                continue
            if number == _SHUFFLE:
                data = _unshuffled(data, self.dtype.itemsize)
            elif number == _FLETCHER32:
                data, stored = data[:-4], bytes(data[-4:])
                if imagecodecs.h5checksum_fletcher32(data).to_bytes(4, "little") != stored:
                    raise ValueError("its checksum is wrong")
            else:
                # What one filter makes of another one's result may be longer than the chunk.
                longer = bool({*self.filters[:at]} - {_SHUFFLE})
                data = _COMPRESSORS[number](data, nbytes + (nbytes + 1024) * longer)
        # The last part of a contiguous data set is shorter.
        rows = self.chunks[0] if len(data) == nbytes else self.shape[0] - chunk[0] * self.chunks[0]
        values = np.frombuffer(data, self.dtype).reshape(rows, *self.chunks[1:])
        if self.written != self.shape:
            ends = np.subtract(self.written, np.multiply(chunk, self.chunks)).clip(0, self.chunks)
            beyond = [(0, size) for size in self.chunks - ends]
            values = np.pad(values[tuple(map(slice, ends))], beyond, constant_values=self.fill)
        return values


def _unshuffled(data: Any, itemsize: int) -> Any:
    """Put the bytes of each number together again."""
    given = np.frombuffer(data, np.uint8)
    rest = given[len(given) // itemsize * itemsize :]
    planes = given[: len(given) - len(rest)].reshape(itemsize, -1)
    found = np.empty((planes.shape[1], itemsize), np.uint8)
    for at, plane in enumerate(planes):  # three times as fast as a transposed copy
        found[:, at] = plane
    return np.append(found, rest) if len(rest) else found.reshape(-1)


async def open_hdf5(shard: Shard, path: str) -> dict[str, Any]:
    """Return the array at a path, under the name ""; or the attributes of the group there, and its arrays by name.

    Raises:
        ValueError: There is nothing, the file is damaged, or a filter is unknown.
    """
    await shard.open()
    file = shard.key if shard.local else _Remote(shard, asyncio.get_running_loop(), path)
    nodes = await asyncio.to_thread(_describe, file, path, shard)
    if isinstance(file, _Remote):
        await asyncio.to_thread(file.keep)
    return nodes


def _describe(file: Any, path: str, shard: Shard) -> dict[str, Any]:
    import h5py

    try:
        with naming_file(str(shard)), h5py.File(file, "r") as root:
            return _nodes(root, path, shard)
    except Exception as error:  # of a damaged file, h5py raises any
        if str(shard) in str(error) or (isinstance(error, OSError) and type(error) is not OSError):
            raise
        head = shard.read_now([(0, min(4, shard.size))])[0] if shard.local else file.block(0)
        other = [what for magic, what in _OTHER_FILES.items() if head.startswith(magic)]
        raise ValueError(f"{shard} is {(*other, f'damaged, or no HDF5 file: {error}')[0]}") from None


def _nodes(root: Any, path: str, shard: Shard) -> dict[str, Any]:
    import h5py

    if not path:
        of_10x = [name for name, node in root.items() if isinstance(node, h5py.Group) and "barcodes" in node]
        if len(whole := ["X"] if {"X", "obs"} <= {*root} else of_10x) == 1:
            return {"": {"matrix::": whole[0]}}
        arrays: list[str] = []
        root.visititems(lambda name, node: arrays.append(name.replace(_HIDDEN, "")) if _is_variable(node) else None)
        if len(arrays) != 1:
            raise ValueError(f"{shard}: name one of its arrays, '{shard}::{min(arrays, default='x')}': {arrays}")
        [path] = arrays
    folder, slash, name = path.rpartition("/")
    if (node := root.get(f"{folder}{slash}{_HIDDEN}{name}", root.get(path))) is None:
        near = root.get(folder or "/")
        inside = near if isinstance(near, h5py.Group) else root
        raise ValueError(f"{shard}: there is no {path!r} in it; there are {sorted(inside)}")
    if node.file.filename != root.filename:
        raise ValueError(f"{shard}::{path} is a link to {node.file.filename}: name that file")
    if isinstance(node, h5py.Dataset):
        if not _is_variable(node):
            raise ValueError(f"{shard}::{path} is a dimension of NetCDF, which has a length and no values")
        found = _array_of(node, shard)
        if isinstance(names := node.attrs.get("categories"), h5py.Reference):  # before version 0.8 of anndata
            return {"": {"encoding-type": "categorical"}, "codes": found, "categories": _array_of(root[names], shard)}
        return {"": found}
    hard = [name for name in node if isinstance(node.get(name, getlink=True), h5py.HardLink)]
    groups = dict.fromkeys(name for name in hard if isinstance(node.get(name), h5py.Group))
    inner = {name.removeprefix(_HIDDEN): node[name] for name in hard if _is_variable(node.get(name))}
    known = {name: _array_of(each, shard) if name in _PARTS else None for name, each in inner.items()}
    return {"": attributes_of(node), **groups, **known}


def _is_variable(node: Any) -> bool:
    import h5py

    return isinstance(node, h5py.Dataset) and _NO_VARIABLE not in str(attributes_of(node, ("NAME",)))


def _axes(data: Any) -> tuple[list[str], tuple[int, ...], dict[str, str]]:
    """Return the names of the axes, the shape, and the names of coordinates by axis.

    In NetCDF, an unlimited axis is as long as any array has it.

    The functions of HDF5 for this end the process if a label is no text of variable length.
    """
    known = attributes_of(data, ("CLASS", "DIMENSION_LIST", "DIMENSION_LABELS"))
    scales = [_referred(data, each) for each in known.get("DIMENSION_LIST", ())][: data.ndim]
    if known.get("CLASS") == "DIMENSION_SCALE":  # a coordinate is its own axis
        scales = [data][: data.ndim]
    labels = [str(text(each)) for each in np.ravel(known.get("DIMENSION_LABELS", ()))]
    names, sizes, coordinates = list[str](), list[int](), dict[str, str]()
    for size, most, scale, label in zip_longest(data.shape or (), data.maxshape or (), scales, labels[: data.ndim]):
        names.append(scale.name.rpartition("/")[2] if scale else label or "")
        if scale and _is_variable(scale):
            coordinates[names[-1]] = scale.name
        if scale and scale.maxshape[:1] == (most,) == (None,):
            users = [(_referred(data, each), at) for each, at in scale.attrs.get("REFERENCE_LIST", ())]
            size = max(size, scale.shape[0], *[user.shape[at] for user, at in users if user])
        sizes.append(size)
    return names, tuple(sizes), coordinates


def _referred(data: Any, references: Any) -> Any:
    """Return the last data set that references name, as NetCDF does; ``None`` if it was deleted."""
    import h5py

    try:
        return h5py.Dataset(h5py.h5r.dereference(np.ravel(references)[-1], data.id))
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def _array_of(data: Any, shard: Shard) -> Any:
    """Return a data set as an array, or as a list if it has texts."""
    import h5py

    if h5py.check_string_dtype(data.dtype) is not None:
        check_expanded(f"{shard}::{data.name}", TEXT_BYTES * data.size, data.id.get_storage_size())
        return np.asarray(data.asstr()[...]).tolist()
    name, properties, dtype = f"{shard}::{data.name.lstrip('/')}", data.id.get_create_plist(), data.dtype
    dims, shape, coordinates = _axes(data)
    known: Any = {"name": name, "dims": tuple(dims) if all(dims) else None, "attributes": attributes_of(data)}
    known["coordinates"] = {axis: f"{shard}::{each.lstrip('/')}" for axis, each in coordinates.items()}
    if coordinates.get(dims[0] if dims else "") == data.name:
        known["attributes"] |= attributes_of(data, ("units", "calendar"))
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(f"{name} is a view of other files: pass a list of these")
    # h5py reads some types as the next larger one.
    bits = getattr(h5py.h5t, f"STD_B{8 * dtype.itemsize}{'BE' if dtype.byteorder == '>' else 'LE'}", None)
    if data.id.get_type() not in (h5py.h5t.py_create(dtype, logical=True), bits):  # bits: how PyTables has bools
        raise ValueError(f"{name} has a type of numbers that NumPy lacks, read by h5py as {dtype}")
    filters = [properties.get_filter(at) for at in range(properties.get_nfilters())]
    for number, _, _, label in filters:
        if number not in (_SHUFFLE, _FLETCHER32, *_COMPRESSORS):
            what = _REFUSED.get(number) or label.decode(errors="replace")
            raise ValueError(f"{name} is compressed by {what!r}, filter {number}, which aiofeed does not read")
    if not math.prod(shape) or not data.shape or properties.get_layout() == h5py.h5d.COMPACT:
        return opened(np.asarray(data[...]), **known)
    if chunks := data.chunks:
        found = array("q")
        data.id.chunk_iter(lambda one: found.extend((*one.chunk_offset, one.byte_offset, one.size, one.filter_mask)))
        places, table = np.split(np.array(found, np.int64).reshape(-1, data.ndim + 3), [data.ndim], axis=1)
        numbers: Any = np.ravel_multi_index(tuple((places // chunks).T), grid_of(shape, chunks))
        table, numbers = table[order := np.argsort(numbers)], numbers[order]
    else:
        chunks, numbers, stored = rows_of(data.shape, dtype), None, data.id.get_storage_size() > 0
        table = np.array([[data.id.get_offset() or 0, math.prod(data.shape) * dtype.itemsize, 0]] * stored, np.int64)
    is_undefined = properties.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED  # h5py gives zeros
    known["fill"] = None if dtype.hasobject else 0 if is_undefined else data.fillvalue
    known.update(shape=shape, chunks=chunks, dtype=dtype, filters=[number for number, *_ in filters])
    return HDF5Array(shard=shard, reader=shard.reader, table=table, numbers=numbers, written=data.shape, **known)


def attributes_of(node: Any, names: Sequence[str] = _ATTRIBUTES) -> dict[str, Any]:
    """Return those of some attributes that an object of h5py has."""
    # Not all: HDF5 may crash at damaged texts.
    return {name: text(node.attrs[name]) for name in names if name in node.attrs}


class _Remote(io.RawIOBase):
    """A file at a URL, of which h5py reads some parts; these are kept in the cache folder."""

    def __init__(self, shard: Shard, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._shard = shard
        self._loop = loop
        self._at = 0
        identity = shard.reader.identity
        self._kept = cache_path(identity and f"{identity} {shard.key} {shard.info} {path}", "hdf5")
        self._blocks: dict[int, bytes] = {}
        self._parts: dict[tuple[int, int], bytes | memoryview] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            if self._kept is not None:
                found = np.load(io.BytesIO(self._kept.read_bytes()), allow_pickle=False)
                places, data = found["places"].tolist(), memoryview(found["data"])
                if sum(end - start for start, end in places) == len(data):
                    for start, end in places:
                        self._parts[start, end], data = data[: end - start], data[end - start :]
        self._new = not self._parts

    def keep(self) -> None:
        """Keep the parts that were read, if they were not."""
        if self._kept is not None and self._new:
            file, data = io.BytesIO(), np.frombuffer(b"".join(self._parts.values()), np.uint8)
            np.savez(file, places=np.array(list(self._parts)), data=data)
            write_cached(self._kept, [file.getvalue()], f"{self._shard}: the places of its chunks are not kept")

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position, and return it; ``tell`` is ``seek(0, 1)``."""
        self._at = offset + (0, self._at, self._shard.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from the position on."""
        start, end = self._at, min(self._at + len(buffer), self._shard.size)
        if (start, end) not in self._parts:
            first = start // BLOCK_BYTES * BLOCK_BYTES
            data = b"".join(map(self.block, range(first, end, BLOCK_BYTES)))
            self._parts[start, end] = data[start - first : end - first]
            self._new = True
        buffer[: end - start] = self._parts[start, end]
        self._at = end
        return end - start

    def block(self, start: int) -> bytes:
        """Return a part, which is read once."""
        if start not in self._blocks:
            read = self._shard.read([(start, min(start + BLOCK_BYTES, self._shard.size))])
            [self._blocks[start]] = asyncio.run_coroutine_threadsafe(read, self._loop).result()
        return self._blocks[start]
