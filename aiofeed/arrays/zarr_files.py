"""Zarr, versions 2 and 3: zarr reads the metadata; chunks, also those within shards, are read by range requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import imagecodecs
import numcodecs
import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, opened
from aiofeed.kernel.sources.file_io import MAX_BYTES, ReadRules, read_file
from aiofeed.objects.reader import ObjectReader, read_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Indexes of shards that are kept.
INDEXES = 4096
_EMPTY = 2**64 - 1


@dataclass(eq=False, kw_only=True)
class ZarrArray(ChunkedArray):
    """A Zarr array.

    Args:
        reader: Reads its folder.
        key: Returns the key of a chunk that is stored, of a shard if it has shards.
        codecs: Undo what was done to a chunk, the last one first.
        shard: How many chunks a shard has along each axis, its codecs and where its index is; ``None``: there are none.
    """

    reader: ObjectReader
    key: Callable[[Chunk], str]
    codecs: list[Codec]
    shard: ShardLayout | None = None

    def __post_init__(self) -> None:
        self.local: bool = self.reader.is_local
        self._indexes: dict[str, NDArray[np.uint64] | None] = {}

    def _in_shard(self, chunk: Chunk) -> tuple[str, Chunk]:
        assert self.shard is not None
        outer = tuple(at // count for at, count in zip(chunk, self.shard.counts, strict=True))
        return self.key(outer), tuple(at % count for at, count in zip(chunk, self.shard.counts, strict=True))

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of a chunk; ``None`` if it is not stored."""
        try:
            if self.shard is None:
                return await self.reader.read_buffer(self.key(chunk), MAX_BYTES)
            key, inner = self._in_shard(chunk)
            if key not in self._indexes:
                size = (await self.reader.head(key)).size
                start, end = self.shard.place_of_index(size)
                [found] = await self.reader.read_ranges(key, [start], [end])
                self._keep_index(key, found)
            if (place := self._place(key, inner)) is None:
                return None
            return (await self.reader.read_ranges(key, [place[0]], [place[1]]))[0]
        except FileNotFoundError:
            return None

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        try:
            if self.shard is None:
                return read_file(self.reader.url(self.key(chunk)), ReadRules())
            key, inner = self._in_shard(chunk)
            path = self.reader.url(key)
            if key not in self._indexes:
                [found] = read_ranges(path, [self.shard.place_of_index(os.path.getsize(path))])
                self._keep_index(key, found)
            return None if (place := self._place(key, inner)) is None else read_ranges(path, [place])[0]
        except FileNotFoundError:
            return None

    def _keep_index(self, key: str, data: bytes) -> None:
        assert self.shard is not None
        index = self.shard.index(data)
        if len(self._indexes) >= INDEXES:
            self._indexes.clear()
        self._indexes[key] = index

    def _place(self, key: str, inner: Chunk) -> tuple[int, int] | None:
        found: Any = self._indexes[key]
        start, size = found[inner].tolist()
        return None if start == _EMPTY else (start, start + size)

    def unpack(self, data: Any, chunk: Chunk) -> NDArray[Any]:
        """Return the stored values of a chunk."""
        nbytes = self.expected(data)
        try:
            for codec in reversed(self.codecs):
                data = codec(data, nbytes, self)
        except (RuntimeError, zlib.error, EOFError) as error:
            raise ValueError(f"its bytes cannot be decompressed: {error}") from None
        return data  # type: ignore[no-any-return]


@dataclass(eq=False)
class ShardLayout:
    """Where the chunks of a shard are."""

    counts: Chunk
    at_end: bool
    checked: bool

    def place_of_index(self, size: int) -> tuple[int, int]:
        """Return the bytes of a shard that are its index."""
        nbytes = 16 * int(np.prod(self.counts)) + 4 * self.checked
        return (max(size - nbytes, 0), size) if self.at_end else (0, nbytes)

    def index(self, data: bytes) -> NDArray[np.uint64]:
        """Return start and bytes of each chunk.

        Raises:
            ValueError: The index is damaged.
        """
        body = _check_crc32c(data, 0, None) if self.checked else data
        return np.frombuffer(body, "<u8").reshape(*self.counts, 2)


# Undoes a codec: gets what it made, the bytes of a decoded chunk, and the array.
Codec = Callable[[Any, int, ChunkedArray], Any]


def _numcodec(codec: Any, data: Any, nbytes: int, array: ChunkedArray) -> Any:
    return codec.decode(data)


def _blosc(data: Any, nbytes: int, array: ChunkedArray) -> Any:
    return numcodecs.Blosc().decode(data, np.empty(nbytes, np.uint8))


def _zstd(data: Any, nbytes: int, array: ChunkedArray) -> Any:
    return imagecodecs.zstd_decode(data, out=nbytes)


def _gzip(data: Any, nbytes: int, array: ChunkedArray) -> Any:
    try:
        return imagecodecs.gzip_decode(data, out=nbytes)
    except RuntimeError:  # several members
        return gzip.decompress(data)


def _zlib(data: Any, nbytes: int, array: ChunkedArray) -> Any:
    return imagecodecs.deflate_decode(data, raw=False, out=nbytes)


def _check_crc32c(data: Any, nbytes: int, array: Any) -> Any:
    import google_crc32c

    data = bytes(data)
    if int(google_crc32c.value(data[:-4])) != int.from_bytes(data[-4:], "little"):
        raise ValueError("its checksum is wrong")
    return data[:-4]


def _values(dtype: np.dtype[Any], order: tuple[int, ...], data: Any, nbytes: int, array: ChunkedArray) -> Any:
    """Return an array of its bytes, whose axes are stored in another order."""
    shape = [array.chunks[axis] for axis in order]
    return np.frombuffer(data, dtype).reshape(shape).transpose(np.argsort(order))


def _texts(data: Any, nbytes: int, array: ChunkedArray) -> Any:
    return numcodecs.VLenUTF8().decode(data)


_PLAIN: dict[str, Codec] = {"blosc": _blosc, "zstd": _zstd, "gzip": _gzip, "zlib": _zlib, "crc32c": _check_crc32c}


def _codecs(found: list[Mapping[str, Any]], dtype: np.dtype[Any], ndim: int) -> list[Codec] | None:
    """Return what undoes the codecs of version 3; ``None`` if one is unknown."""
    order, codecs = tuple(range(ndim)), list[Codec]()
    for each in found:
        name, settings = each["name"], each.get("configuration", {})
        if name == "transpose":
            order = tuple(order[axis] for axis in settings["order"])
        elif name == "bytes":
            kind = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
            codecs.append(partial(_values, kind, order))
        elif name == "vlen-utf8":
            codecs.append(_texts)
        elif name in _PLAIN:
            codecs.append(_PLAIN[name])
        else:
            return None
    return codecs


async def open_zarr(reader: ObjectReader) -> dict[str, Any]:
    """Return what a folder has: a ``ZarrArray``, or a group of those, by name.

    Raises:
        ValueError: It is no array or group, or a codec is unknown.
    """
    document = await _json(reader, "zarr.json")
    if document is None and (document := await _json(reader, ".zarray")) is not None:
        document["attributes"] = await _json(reader, ".zattrs") or {}
    if document is None and await _json(reader, ".zgroup") is not None:
        document = {"node_type": "group", "attributes": await _json(reader, ".zattrs") or {}}
    if document is None:
        raise ValueError(f"{reader.url('')}: it is no Zarr array: there is neither zarr.json nor .zarray in it")
    if document.get("node_type") == "group":
        return {"": document["attributes"]}
    try:
        return {"": array_of(document, reader)}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{reader.url('')}: its metadata are damaged: {error!r}") from None


async def _json(reader: ObjectReader, key: str) -> Any:
    try:
        found = json.loads(await reader.read(key, max_bytes=64 << 20))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # S3 denies access to keys that do not exist
        return None
    if not isinstance(found, dict):
        raise ValueError(f"{reader.url(key)}: it is no description of an array")
    return found


def array_of(document: Any, reader: ObjectReader, metadata: Any = None) -> ChunkedArray:
    """Return an array by its metadata, as JSON.

    Raises:
        ValueError: A codec is unknown.
    """
    from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata

    name, is_v3 = reader.url("").rstrip("/"), document.get("zarr_format") == 3
    metadata = metadata or (ArrayV3Metadata if is_v3 else ArrayV2Metadata).from_dict(document)
    shape, shard, attributes = tuple(metadata.shape), None, dict(metadata.attributes)
    dtype: np.dtype[Any] = metadata.dtype.to_native_dtype()
    chunks, ndim = tuple(metadata.chunks), len(shape)
    dims = metadata.dimension_names if is_v3 else attributes.get("_ARRAY_DIMENSIONS")
    codecs: list[Codec] | None
    if is_v3:
        found = document["codecs"]
        if found[0]["name"] == "sharding_indexed":
            inner = found[0]["configuration"]
            outer, chunks = tuple(metadata.chunk_grid.chunk_shape), tuple(inner["chunk_shape"])
            counts = tuple(size // chunk for size, chunk in zip(outer, chunks, strict=True))
            checked = any(each["name"] == "crc32c" for each in inner["index_codecs"])
            shard = ShardLayout(counts, inner.get("index_location", "end") == "end", checked)
            found = [] if len(found) > 1 else inner["codecs"]
        codecs = _codecs(found, dtype, ndim) or None
    else:
        order = tuple(range(ndim))
        codecs = [partial(_values, dtype, order if metadata.order == "C" else order[::-1])]
        codecs = [_texts] if dtype.hasobject else codecs
        steps = [] if dtype.hasobject else [partial(_numcodec, each) for each in metadata.filters or ()]
        compressor = document.get("compressor")
        if compressor is not None:
            plain = None if steps else _PLAIN.get(compressor["id"])
            steps.append(plain or partial(_numcodec, numcodecs.get_codec(compressor)))
        codecs += steps
        if "_FillValue" not in attributes and dims is not None and metadata.fill_value is not None:
            attributes["_FillValue"] = metadata.fill_value  # xarray moves it there
    known: dict[str, Any] = {"dims": tuple(dims) if dims and None not in dims else None, "attributes": attributes}
    if codecs is None:
        if not reader.is_local:
            raise ValueError(f"{name}: a codec of {[each['name'] for each in document['codecs']]} is not known at URLs")
        import zarr

        return opened(zarr.open_array(reader.url(""), mode="r"), name, chunks=chunks, **known)
    fill = metadata.fill_value
    return ZarrArray(
        name=name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill=0 if fill is None else fill,
        reader=reader,
        key=metadata.encode_chunk_key,
        codecs=codecs,
        shard=shard,
        version=json.dumps(document, sort_keys=True, default=str),
        **known,
    )
