"""HDF5 and NetCDF4: h5py finds the chunks once; they are read and decoded without HDF5's library, lock and handles."""

from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, OpenedArray, opened, rows_of
from aiofeed.common.cache_folder import cache_path, write_cached
from aiofeed.shards.urls import Shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is read of a file at a URL at once, to find its chunks.
BLOCK_BYTES = 1 << 20

_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF, _BLOSC, _LZ4, _ZSTD = 1, 2, 3, 32000, 32001, 32004, 32015
_REFUSED = {4: "szip", 5: "nbit", 6: "scale-offset", 32008: "bitshuffle", 32013: "zfp", 32026: "blosc2"}


@dataclass(eq=False, kw_only=True)
class HDF5Array(ChunkedArray):
    """A data set of an HDF5 file.

    Args:
        shard: The file.
        filters: The numbers of its filters, in the order in which they were applied.
        table: By the number of a chunk: the first byte, 0 if it is not stored, the bytes, and the filters left out.
    """

    shard: Shard
    filters: list[int]
    table: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.local: bool = self.shard.local
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

    def _range(self, chunk: Chunk) -> list[tuple[int, int]]:
        start, size, _ = self.table[np.ravel_multi_index(chunk, self._grid)].tolist()
        return [(start, start + size)] if start else []

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        ranges = self._range(chunk)
        return (await self.shard.read(ranges))[0] if ranges else None

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        ranges = self._range(chunk)
        return self.shard.read_now(ranges)[0] if ranges else None

    def unpack(self, data: Any, chunk: Chunk) -> NDArray[Any]:
        """Return the stored values of a chunk."""
        number = np.ravel_multi_index(chunk, self._grid)
        nbytes, left_out = self.expected(data), int(self.table[number][2])
        for place in reversed(range(len(self.filters))):
            if not left_out >> place & 1:
                data = _undo(self.filters[place], data, nbytes, self.dtype.itemsize)
        if len(data) != nbytes and not self.filters:  # a part of a contiguous data set
            return np.frombuffer(data, self.dtype).reshape(-1, *self.chunks[1:])
        return np.frombuffer(data, self.dtype).reshape(self.chunks)


def _undo(number: int, data: Any, nbytes: int, itemsize: int) -> Any:
    """Return the bytes that a filter was applied to, at most ``nbytes`` and a checksum."""
    if number == _FLETCHER32:
        data, stored = data[:-4], int.from_bytes(data[-4:], "little")
        if imagecodecs.h5checksum_fletcher32(data) != stored:
            raise ValueError("its checksum is wrong")
        return data
    if number == _SHUFFLE:
        planes = np.frombuffer(data, np.uint8)[: len(data) // itemsize * itemsize].reshape(itemsize, -1)
        found = np.empty((planes.shape[1], itemsize), np.uint8)
        for place, plane in enumerate(planes):  # three times as fast as a transposed copy
            found[:, place] = plane
        return found.reshape(-1)
    # A checksum may be inside of what is compressed.
    out = np.empty(nbytes + 4, np.uint8)
    try:
        if number == _DEFLATE:
            return imagecodecs.deflate_decode(data, raw=False, out=out)
        if number == _LZF:
            return imagecodecs.lzf_decode(data, header=False, out=out)
        decode = {_BLOSC: imagecodecs.blosc_decode, _LZ4: imagecodecs.lz4h5_decode, _ZSTD: imagecodecs.zstd_decode}
        return decode[number](data, out=out)
    except RuntimeError as error:
        raise ValueError(f"its bytes cannot be decompressed: {error}") from None


async def open_hdf5(shard: Shard, path: str) -> dict[str, Any]:
    """Return what a file has at a path: a ``ChunkedArray``, or a group of those, by name.

    Raises:
        ValueError: There is nothing, the file is damaged, or a filter is unknown.
    """
    await shard.open()
    where = None
    if not shard.local:
        identity = shard.reader.identity
        where = cache_path(identity and f"{identity} {shard.key} {shard.info} {path}", "hdf5")
    if where is not None and (found := await asyncio.to_thread(_load, where)) is not None:
        nodes = found
    else:
        loop = asyncio.get_running_loop()
        file = shard.reader.url(shard.key) if shard.local else _Remote(shard, loop)
        nodes = await asyncio.to_thread(_describe, file, path, shard.url)
        if where is not None:
            parts = io.BytesIO()
            tables = {f"{at}": table for at, (_, table) in enumerate(nodes)}
            np.savez(parts, nodes=np.array(json.dumps([node for node, _ in nodes])), **tables)  # type: ignore[arg-type]
            await asyncio.to_thread(write_cached, where, [parts.getvalue()], f"{shard.url}: its index is not kept")
    return {node["path"]: _array(shard, node, table) for node, table in nodes}


def _array(shard: Shard, node: dict[str, Any], table: NDArray[Any]) -> Any:
    attributes = {
        key: np.array(value[1], value[0]) if type(value) is list and type(value[1]) is list else value
        for key, value in node["attributes"].items()
    }
    if node["kind"] == "group":
        return attributes
    if node["kind"] == "text":
        return table.tolist()
    name, dims = node["name"], node["dims"]
    known = {"attributes": attributes, "dims": tuple(dims) if dims else None, "version": shard.version}
    if node["kind"] == "values":
        return opened(table, name, **known)
    dtype = np.dtype(node["dtype"])
    fill = np.frombuffer(bytes.fromhex(node["fill"]), dtype)[0]
    shape, chunks = tuple(node["shape"]), tuple(node["chunks"])
    filters = node["filters"]
    return HDF5Array(
        name=name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill=fill,
        shard=shard,
        filters=filters,
        table=table,
        **known,
    )


def _load(path: Any) -> Any:
    try:
        with np.load(path, allow_pickle=False) as found:
            return [(node, found[f"{at}"]) for at, node in enumerate(json.loads(str(found["nodes"])))]
    except (OSError, ValueError, KeyError):
        return None


def _describe(file: Any, path: str, name: str) -> list[Any]:
    """Return the nodes at a path and in the group there, each with its table."""
    import h5py

    try:
        opened_file = h5py.File(file, "r")
    except OSError as error:
        raise ValueError(f"{name}: h5py cannot open it: {error}") from None
    with opened_file as root:
        if not path:
            names: list[str] = []
            root.visititems(lambda each, node: names.append(each) if isinstance(node, h5py.Dataset) else None)
            if len(names) != 1:
                raise ValueError(
                    f"{name}: name one of its data sets: {', '.join(f'{name}::{each}' for each in names[:20])}"
                )
            [path] = names
        if path not in root:
            raise ValueError(f"{name}: there is no {path!r} in it; there are {sorted(root)}")
        node = root[path]
        if isinstance(node, h5py.Dataset):
            return [_describe_data(node, "", name)]
        group = {"kind": "group", "path": "", "dims": None, "attributes": _attributes(node)}
        inner = [(each, node[each]) for each in node if isinstance(node.get(each), h5py.Dataset)]
        return [(group, np.empty(0)), *[_describe_data(found, each, name) for each, found in inner]]


def _describe_data(data: Any, path: str, name: str) -> Any:
    import h5py

    where = f"{name}::{data.name.lstrip('/')}"
    scales = [scale[0].name if len(scale) else scale.label for scale in data.dims]
    # A coordinate of NetCDF is its own axis.
    dims = [each.rpartition("/")[2] for each in ([data.name] if data.is_scale and data.ndim == 1 else scales)]
    node = {
        "path": path,
        "dims": dims if all(dims) else None,
        "attributes": _attributes(data),
        "kind": "chunks",
        "name": where,
    }
    properties, shape = data.id.get_create_plist(), list(data.shape or ())
    if h5py.check_string_dtype(data.dtype) is not None:
        return {**node, "kind": "text"}, np.array(data.asstr()[...], str)
    layout, filters = properties.get_layout(), [properties.get_filter(at) for at in range(properties.get_nfilters())]
    if layout == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(f"{where} is a view of other files: pass the list of these")
    for number, _, _, label in filters:
        if number not in (_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF, _BLOSC, _LZ4, _ZSTD):
            known = _REFUSED.get(number) or label.decode(errors="replace")
            raise ValueError(f"{where} is compressed by {known!r} (filter {number}), which aiofeed does not read")
    if not shape or 0 in shape or layout == h5py.h5d.COMPACT:
        return {**node, "kind": "values"}, np.asarray(data[...])
    dtype = data.dtype
    if layout == h5py.h5d.CHUNKED:
        chunks = list(data.chunks)
        grid = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
        table = np.zeros((math.prod(grid), 3), np.int64)

        def add(found: Any) -> None:
            at = [start // chunk for start, chunk in zip(found.chunk_offset, chunks, strict=True)]
            table[np.ravel_multi_index(at, grid)] = found.byte_offset, found.size, found.filter_mask

        data.id.chunk_iter(add)
    else:
        chunks = list(rows_of(shape, dtype))
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        firsts = np.arange(0, shape[0], chunks[0])
        start = data.id.get_offset()
        table = np.zeros((len(firsts), 3), np.int64)
        if start is not None:
            table[:, 0] = start + firsts * row_bytes
            table[:, 1] = (np.minimum(firsts + chunks[0], shape[0]) - firsts) * row_bytes
    fill = np.zeros(1, dtype) if dtype.hasobject else np.full(1, data.fillvalue, dtype)
    numbers = [number for number, *_ in filters]
    found = {"shape": shape, "chunks": chunks, "dtype": dtype.str, "fill": fill.tobytes().hex(), "filters": numbers}
    return {**node, **found}, table


def _attributes(node: Any) -> dict[str, Any]:
    """Return attributes that are texts or a few numbers, as JSON has them, with the dtype of numbers."""
    found = {}
    for name in node.attrs:
        try:
            value = np.asarray(node.attrs[name])
        except (OSError, TypeError):  # of a type that h5py does not know
            continue
        if value.size <= 64 and value.dtype.kind in "OSU":
            value = [
                each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in value.reshape(-1)
            ]
            found[name] = value[0] if len(value) == 1 else value
        elif value.size <= 64 and value.dtype.kind in "iuf":
            found[name] = [value.dtype.str, value.reshape(-1).tolist()]
    return found


class _Remote(io.RawIOBase):
    """A file at a URL that h5py reads in blocks."""

    def __init__(self, shard: Shard, loop: asyncio.AbstractEventLoop) -> None:
        self._shard = shard
        self._loop = loop
        self._blocks: dict[int, bytes] = {}
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position."""
        self._at = offset + (self._at if whence == 1 else self._shard.size if whence == 2 else 0)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read from the position on."""
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and self._at < self._shard.size:
            number, start = divmod(self._at, BLOCK_BYTES)
            if number not in self._blocks:
                first = number * BLOCK_BYTES
                ranges = [(first, min(first + BLOCK_BYTES, self._shard.size))]
                [self._blocks[number]] = asyncio.run_coroutine_threadsafe(self._shard.read(ranges), self._loop).result()
            part = self._blocks[number][start : start + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)
            self._at += len(part)
        return done
