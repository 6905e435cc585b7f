"""Zarr, versions 2 and 3: zarr reads the metadata; chunks, also those within shards, are read by range requests."""

from __future__ import annotations

import asyncio
import errno
import json
import lzma
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import imagecodecs
import numcodecs
import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, opened, text
from aiofeed.common.expanded import check_expanded
from aiofeed.kernel.sources.file_io import MAX_BYTES, Content, ReadRules, read_file
from aiofeed.objects.reader import ObjectReader, etag_of, read_ranges
from aiofeed.objects.requests import changed
from aiofeed.shards.base import RecentParts
from aiofeed.shards.urls import parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

Decode: TypeAlias = Callable[[Any, int], Any]
"""Undoes a codec: gets what it made, and the bytes of a decoded chunk."""

# Of numpy's arrays.
MOST_AXES = 64
# A chunk of a shard that is not stored.
_EMPTY = 2**64 - 1


@dataclass(eq=False)
class ArrayMetadata:
    """The file that describes an array.

    Args:
        path: Its path.
        described: What it says about chunks.
        version: The version of the file that says so; empty until it is checked.
    """

    path: str
    described: str
    version: str = ""

    def check(self) -> None:
        """Raise ``OSError`` if the array was written again, so that its chunks are others."""
        version = etag_of(os.stat(self.path))
        if version != self.version:
            if _described(parse_json(self.path, read_file(self.path, ReadRules()))) != self.described:
                raise changed(self.path)
            self.version = version


def _described(document: Mapping[str, Any]) -> str:
    """Return what metadata say about chunks, as JSON: all but the attributes."""
    kept = {key: value for key, value in document.items() if key not in ("attributes", "consolidated_metadata")}
    return json.dumps(kept, sort_keys=True)


@dataclass(eq=False, kw_only=True)
class ZarrArray(ChunkedArray):
    """A Zarr array.

    Args:
        key: Returns the key of a chunk, or of a shard if there are shards.
        decoders: What undoes the codecs, in the order in which they were applied; by name, which can be pickled.
        axes: The order of the axes in a chunk.
        counts: Chunks of a shard along each axis; none: there are no shards.
        index_first: Whether the index of a shard is at its beginning.
        index_checked: Whether it has a checksum.
    """

    key: Callable[[Chunk], str]
    decoders: list[str | Decode]
    axes: tuple[int, ...]
    counts: tuple[int, ...] = ()
    index_first: bool = False
    index_checked: bool = False
    # The indexes of shards, at URLs and in folders.
    _indexes: RecentParts = field(default_factory=RecentParts)
    _of_files: dict[str, tuple[NDArray[np.uint64], tuple[int, int]]] = field(default_factory=dict)

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        try:
            if not self.counts:
                return bytes(await self.reader.read_buffer(self.key(chunk), MAX_BYTES))
            key, inner = self._in_shard(chunk)
            index = await self._indexes.get(key, lambda: self._read_index(key))
            start, size = index[inner].tolist()
            return None if start == _EMPTY else (await self.reader.read_ranges(key, [start], [start + size]))[0]
        except FileNotFoundError:
            return None

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        try:
            if not self.counts:
                return read_file(self.reader.url(self.key(chunk)), ReadRules())
            key, inner = self._in_shard(chunk)
            path = self.reader.url(key)
            status = os.stat(path)
            version = status.st_mtime_ns, status.st_size
            if key not in self._of_files:
                index = self._index(*read_ranges(path, [self._place_of_index(status.st_size)]))
                self._of_files[key] = index, version
            index, known = self._of_files[key]
            if version != known:
                raise changed(path)
            start, size = index[inner].tolist()
            return None if start == _EMPTY else read_ranges(path, [(start, start + size)])[0]
        except FileNotFoundError:
            if not os.path.isdir(self.reader.url("")):
                raise  # not a chunk that is not stored
            return None

    def content_parts(self, most: int) -> list[Content]:
        """Return what the metadata say, and some chunks or shards in a folder."""
        if not self.local:
            return [Content(self.metadata.described.encode(), kind="metadata")]
        paths = [self.reader.url(self.key(at)) for at in self.some_chunks(most, self.counts or 1)]
        return [Content(self.metadata.described.encode()), *(Content(path) for path in paths if os.path.exists(path))]

    def _in_shard(self, chunk: Chunk) -> tuple[str, Chunk]:
        at, inner = zip(*map(divmod, chunk, self.counts), strict=True)
        return self.key(at), inner

    async def _read_index(self, key: str) -> NDArray[np.uint64]:
        start, end = self._place_of_index(0 if self.index_first else (await self.reader.head(key)).size)
        return self._index(*await self.reader.read_ranges(key, [start], [end]))

    def _place_of_index(self, size: int) -> tuple[int, int]:
        nbytes = check_expanded(f"the index of {self.name}", 16 * math.prod(self.counts) + 4 * self.index_checked, 0)
        return (0, nbytes) if self.index_first else (max(size - nbytes, 0), size)

    def _index(self, data: bytes) -> NDArray[np.uint64]:
        """Return the first byte of each chunk of a shard, and its bytes."""
        body = _without_crc32c(data) if self.index_checked else data
        return np.frombuffer(body, "<u8").reshape(*self.counts, 2)

    def unpack(self, data: Any, nbytes: int, chunk: Chunk) -> Any:
        """Return the stored values of a chunk."""
        for at in reversed(range(len(self.decoders))):
            # What one codec makes of another one's result may be longer than the chunk.
            name_or_function = self.decoders[at]
            decode = _DECODERS[name_or_function] if isinstance(name_or_function, str) else name_or_function
            data = decode(data, nbytes + (8 * nbytes + 1024) * bool(at))
        if self.dtype.hasobject:
            return data
        shape = [self.chunks[axis] for axis in self.axes]
        return np.frombuffer(data, self.dtype).reshape(shape).transpose(np.argsort(self.axes))


def _without_crc32c(data: Any, nbytes: int = 0) -> Any:
    import google_crc32c

    if google_crc32c.value(bytes(data[:-4])).to_bytes(4, "little") != bytes(data[-4:]):
        raise ValueError("its checksum is wrong")
    return data[:-4]


def _by_numcodecs(codec: Any, data: Any, nbytes: int) -> Any:
    return codec.decode(data)


def _unpack_lzma(settings: Mapping[str, Any], data: Any, nbytes: int) -> Any:
    return lzma.LZMADecompressor(**settings).decompress(data, nbytes + 1)


# bz2 and lzma cut what is longer.
_DECODERS: dict[str, Decode] = {
    "bz2": lambda data, nbytes: imagecodecs.bz2_decode(data, out=nbytes + 1),
    "blosc": lambda data, nbytes: imagecodecs.blosc_decode(data, out=nbytes),
    "crc32c": _without_crc32c,
    "gzip": lambda data, nbytes: imagecodecs.gzip_decode(data, out=nbytes),
    "lz4": lambda data, nbytes: imagecodecs.lz4_decode(data[4:], out=nbytes),
    "lzma": partial(_unpack_lzma, {}),
    "vlen-utf8": lambda data, nbytes: numcodecs.VLenUTF8().decode(data),
    "zlib": lambda data, nbytes: imagecodecs.deflate_decode(data, raw=False, out=nbytes),
    "zstd": lambda data, nbytes: imagecodecs.zstd_decode(data, out=nbytes),
}


def _decoder(codec: Mapping[str, Any]) -> str | Decode:
    """Return what undoes a codec of version 2."""
    name: str = codec["id"]
    if name == "lzma" and codec.get("format") == lzma.FORMAT_RAW:  # which does not name its filters
        return partial(_unpack_lzma, {"format": lzma.FORMAT_RAW, "filters": codec["filters"]})
    return name if name in _DECODERS else partial(_by_numcodecs, numcodecs.get_codec(codec))


async def open_zarr(reader: ObjectReader) -> dict[str, Any]:
    """Return the array in a folder, under the name ""; or the attributes of the group there.

    Raises:
        ValueError: There is neither, or its metadata are damaged.
    """
    found = await _read_json(reader, "zarr.json")
    for name in () if found else (".zarray", ".zgroup"):
        if not found and (found := await _read_json(reader, name)):
            found["attributes"] = await _read_json(reader, ".zattrs") or {}
    name = reader.url("").rstrip("/")
    if not found and reader.is_local and not await asyncio.to_thread(os.path.exists, name):
        raise FileNotFoundError(errno.ENOENT, "there is no such array; one in a file is named after '::'", name)
    if not found:
        raise ValueError(f"{name} is no Zarr array: it has neither zarr.json nor .zarray")
    if "shape" not in found:
        return {"": {name: text(value) for name, value in found.get("attributes", {}).items()}}
    try:
        return {"": array_of(found, reader)}
    except Exception as error:  # zarr raises any
        if name in str(error):
            raise
        raise ValueError(f"{name}: its metadata are damaged: {error!r}") from None


async def _read_json(reader: ObjectReader, key: str) -> Any:
    try:
        found = parse_json(reader.url(key), await reader.read(key))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # S3 denies access to keys that do not exist
        return None
    if not isinstance(found, dict):
        raise ValueError(f"{reader.url(key)} describes no array")
    return found


def described(metadata: Any) -> dict[str, Any]:
    """Return the names of the axes, and the attributes, that an array has by the metadata of zarr."""
    dims = metadata.dimension_names if metadata.zarr_format == 3 else metadata.attributes.get("_ARRAY_DIMENSIONS")
    attributes = {name: text(value) for name, value in metadata.attributes.items()}
    if metadata.zarr_format == 2 and dims and metadata.fill_value is not None:
        attributes.setdefault("_FillValue", metadata.fill_value)  # xarray moves it there
    names = () if not metadata.shape else None if dims is None or None in dims else tuple(dims)
    return {"dims": names, "attributes": attributes}


def array_of(document: Any, reader: ObjectReader) -> ChunkedArray:
    """Return an array by its metadata, as JSON.

    Raises:
        ValueError: A codec is unknown.
    """
    from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata

    name, v3 = reader.url("").rstrip("/"), document["zarr_format"] == 3
    if len(document["shape"]) > MOST_AXES:  # zarr takes half a minute for 100,000 axes
        raise ValueError(f"{name} claims {len(document['shape'])} axes, and numpy has {MOST_AXES} at most")
    found: Any = (ArrayV3Metadata if v3 else ArrayV2Metadata).from_dict(document)
    fill, dtype = found.fill_value, found.dtype.to_native_dtype()
    known: dict[str, Any] = {"name": name, "chunks": tuple(found.chunks), **described(found)}
    known["coordinates"] = {axis: f"{name.rpartition('/')[0]}/{axis}" for axis in known["dims"] or ()}
    known["metadata"] = ArrayMetadata(reader.url("zarr.json" if v3 else ".zarray"), _described(document))
    axes, decoders, sharding = tuple(range(len(found.shape))), list[str | Decode](), dict[str, Any]()
    if v3:
        codecs = document["codecs"]
        if codecs[0]["name"] == "sharding_indexed" and len(codecs) == 1:
            inner = codecs[0]["configuration"]
            codecs, known["chunks"] = inner["codecs"], tuple(inner["chunk_shape"])
            sharding["counts"] = tuple(map(int.__floordiv__, found.chunk_grid.chunk_shape, known["chunks"]))
            sharding["index_first"] = inner.get("index_location") == "start"
            sharding["index_checked"] = any(codec["name"] == "crc32c" for codec in inner["index_codecs"])
        for codec in codecs:
            settings = codec.get("configuration", {})
            if codec["name"] == "transpose":
                axes = tuple(axes[axis] for axis in settings["order"])
            elif codec["name"] == "bytes":
                dtype = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
            elif codec["name"] in _DECODERS:
                decoders.append(codec["name"])
            elif reader.is_local:
                import zarr

                return opened(zarr.open_array(reader.url(""), mode="r"), **known)
            else:
                raise ValueError(f"{name}: the codec {codec['name']!r} is not read at URLs")
    else:
        compressor, filters = document["compressor"], document["filters"] or []
        decoders = [_decoder(codec) for codec in [*filters, *[compressor] * bool(compressor)]]
        axes = axes if document["order"] == "C" else axes[::-1]
    known.update(shape=tuple(found.shape), dtype=dtype, fill=0 if fill is None else fill, reader=reader)
    return ZarrArray(key=found.encode_chunk_key, decoders=decoders, axes=axes, **known, **sharding)
