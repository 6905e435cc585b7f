"""``MDSShards``: data that MosaicML Streaming has written.

Source: ``streaming.base.format.mds``: a shard is the number of samples n, n + 1 offsets (uint32), the columns as JSON
and the samples; a sample is the sizes of its columns of variable size (uint32) and the columns.
"""

from __future__ import annotations

import asyncio
import bz2
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from aiofeed.common.expanded import check_expanded
from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import explain_arguments
from aiofeed.kernel.sources.file_io import Content
from aiofeed.shards.arrow import arrow
from aiofeed.shards.base import FieldShards, RecentParts, reason_of
from aiofeed.shards.index import ShardIndex, ranges_of
from aiofeed.shards.indexing import DAMAGED, IndexRules, Scan
from aiofeed.shards.urls import Shard, ShardFinder, Urls, parse_json

# The numbers of dtypes in an array of any dtype.
_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
# The names of compressions in pyarrow; Python decompresses bz2.
_CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}
# The offsets in a shard are uint32.
_MOST_BYTES = 1 << 32


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


def _array(dtype: str, shape: str, data: bytes) -> Any:
    """Return an array; dtype and shape come first in the data if the column does not have them."""
    at = 0
    if not dtype:
        dtype, at = _DTYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        sizes = np.frombuffer(data, f"<u{width}", axes, at + 1).tolist()
        at += 1 + axes * width
    return np.frombuffer(data[at:], dtype).reshape(sizes).copy()  # torch warns of arrays that cannot be written


def _image(data: bytes) -> Any:
    """Return an image of Pillow, of its raw pixels after width, height, length of the mode and mode."""
    from PIL import Image

    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    check_expanded("an image", width * height, len(data))
    return Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _list(decode: Callable[[bytes], Any], at: int, data: bytes) -> list[Any]:
    """Return the items; ``at`` is where their number stands, before their sizes and themselves."""
    count = int.from_bytes(data[at : at + 4], "little")
    ends = [*accumulate(np.frombuffer(data, "<u4", count, at + 4).tolist(), initial=at + 4 + 4 * count)]
    if ends[-1] != len(data):
        raise ValueError(f"a list has {len(data)} bytes, by the sizes of its {count} items {ends[-1]}")
    return [decode(data[start:end]) for start, end in pairwise(ends)]


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "int": partial(int.from_bytes, byteorder="little", signed=True),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "pil": _image,
    "list[pil]": partial(_list, _image, 4),
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_list, bytes, 4)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(_list, bytes, 0)),
    **{dtype: partial(_scalar, dtype) for dtype in _DTYPES.values()},
}


def scan_mds(size: int, target: Sequence[str] = ()) -> Scan:
    """Reads the offsets of samples. It collects no targets."""
    count = int.from_bytes((yield 0, 4), "little")
    if 4 * (count + 2) > size:
        raise ValueError("it is truncated or no MDS file")
    offsets = np.frombuffer((yield 4, 4 * (count + 2)), "<u4")
    if int(offsets[-1]) != size or not (offsets[1:] >= offsets[:-1]).all():
        raise ValueError(f"it is truncated or damaged: it has {size} bytes, by its offsets {int(offsets[-1])}")
    return ranges_of(offsets[:-1], offsets[1:])


@dataclass(eq=False, kw_only=True)
class CompressedShard(Shard):
    """A shard that is decompressed as a whole, unless it lies decompressed beside the compressed one.

    Args:
        packed: The compressed shard.
        codec: Its compression.
        unpacked_bytes: Its size when it is decompressed.
        parts: Keeps decompressed shards.
        plain: Whether it lies decompressed beside the compressed one.
    """

    packed: Shard
    codec: str
    unpacked_bytes: int
    parts: RecentParts
    plain: bool = True

    @property
    def local(self) -> bool:
        """Whether it is a file that is read as it is."""
        return self.plain and super().local

    @property
    def content(self) -> Content | None:
        """What identifies its contents, which are not those of a shard that is not compressed."""
        found = super().content if self.plain else self.packed.content
        return found if self.plain or found is None else found._replace(kind=f"compressed-{found.kind}")

    async def open(self) -> None:
        """Find out which of both there is, its version and the size."""
        try:
            await super().open()
        except (FileNotFoundError, PermissionError):  # S3 denies access to a key that does not exist
            await self.packed.open()
            if self.codec not in _CODECS or not 0 <= self.unpacked_bytes < _MOST_BYTES:
                raise ValueError(
                    f"{self.packed.url} has {self.unpacked_bytes} bytes compressed with {self.codec}; aiofeed reads "
                    f"less than 4 GiB compressed with {', '.join(_CODECS)}: decompress it with MosaicML Streaming"
                ) from None
            check_expanded(self.packed.url, self.unpacked_bytes, self.packed.size)
            self.plain = False
            self.size: int = self.unpacked_bytes
            self.version: str = self.packed.version

    async def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges of the decompressed shard."""
        if self.plain:
            return await super().read(ranges)
        data = await self.parts.get(self, self._decompressed)
        return [bytes(data[start:end]) for start, end in ranges]

    async def _decompressed(self) -> memoryview:
        [data] = await self.packed.read([(0, self.packed.size)])
        codec = _CODECS[self.codec]
        unpack = bz2.BZ2Decompressor().decompress if codec == "bz2" else partial(arrow().decompress, codec=codec)
        try:
            return memoryview(await asyncio.to_thread(unpack, data, self.unpacked_bytes))
        except (OSError, ValueError, NotImplementedError) as error:  # those of pyarrow are subclasses
            raise ValueError(f"{self.packed.url}: its {self.codec} data are truncated or damaged: {error}") from None


@public
@explain_arguments()
class MDSShards(FieldShards):
    """Samples that MosaicML Streaming has written; the fields are the columns.

    Example:
        ```python
        import aiofeed

        shards = aiofeed.MDSShards("mds", data="image", target="label")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(shards, decode=decode, batch_size=4, shuffle="window")
        for images, labels in feeder:
            print(images.shape, labels)
        ```

    Columns of the encodings bytes, str, int, str_int, str_float, str_decimal, json, ndarray and of scalars have their
    values, pil an image of Pillow; jpeg and png have the encoded bytes, for ``decode=``. list[pil], list[jpeg],
    list[png] and jpeg_array are lists of these. pkl is an error, unless ``data`` leaves it out: it may run any code.

    Shards compressed with zstd, gz, br, snappy or bz2 are decompressed as a whole, and up to 256 MiB of them are kept:
    ``shuffle="window"`` suits them, and an ``EncodedCache``. All but bz2 need ``pip install "aiofeed[parquet]"``.

    Args:
        urls: Folders with an ``index.json``, or these files: URLs or paths, one or a list.
        data: The column that ``decode=`` gets. A list of names: a dict of these. Default: a dict of all.
        target: The column of the target; a sample is then ``(decoded, target)``. All samples are read once for it, and
            the targets are cached.
        to_target: Makes a target of the value of its column.
        store: An obstore store that reads the URLs. Default: made of the URLs.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        FileNotFoundError: There is no ``index.json``, or a shard is missing.
        ImportError: A shard is compressed, and pyarrow is not installed.
        ValueError: A shard is truncated or damaged, a column does not exist or has another encoding, or a URL cannot be
            read.
        OSError: A shard cannot be read.
    """

    rules: ClassVar[IndexRules] = IndexRules("mds", scan_mds, streams=False)

    def _check_names(self) -> None:
        super()._check_names()
        self._decoders = {name: self._decoder(name) for name in self._encodings}

    async def _list(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        self._encodings: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        self._unpacked = RecentParts()
        found: list[Shard] = []
        for url in [urls] if isinstance(urls, str | os.PathLike) else urls:
            text = os.fspath(url)
            folder = text.removesuffix("index.json") if text.rpartition("/")[2] == "index.json" else text
            base = folder.rstrip("/") or "."
            listed = finder.shard(f"{base}/index.json")
            index = parse_json(listed.url, await listed.reader.read(listed.key))
            if not isinstance(index, dict) or index.get("version") != 2 or not isinstance(index.get("shards"), list):
                raise ValueError(f"{listed.url}: it is no index of MDS shards of version 2")
            for entry in index["shards"]:
                try:
                    found.append(self._shard(finder, base, entry))
                except DAMAGED as error:
                    raise ValueError(f"{listed.url}: an entry of a shard: {reason_of(error)}") from None
        if not found:
            raise ValueError("the list of shards is empty")
        return found

    def _shard(self, finder: ShardFinder, base: str, entry: dict[str, Any]) -> Shard:
        if entry.get("format") != "mds" or entry.get("version") != 2:
            raise ValueError(f"it has the format {entry.get('format')!r}, not MDS of version 2")
        names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
        columns = dict(zip(names, encodings, strict=True))
        sizes_are_right = all(size is None or (isinstance(size, int) and size >= 0) for size in sizes)
        if not sizes_are_right or not all(isinstance(text, str) for text in (*names, *encodings)):
            raise ValueError(f"it has columns of the names {names}, encodings {encodings} and sizes {sizes}")
        if self._encodings not in ({}, columns):
            raise ValueError(f"shards have different columns: {self._encodings} and {columns}")
        self._encodings, self._sizes = columns, dict(zip(names, sizes, strict=True))
        shard = finder.shard(f"{base}/{check_foreign_name('raw_data', entry['raw_data']['basename'], base)}")
        if entry.get("zip_data") is not None:
            shard = CompressedShard(
                shard.reader,
                shard.key,
                packed=finder.shard(f"{base}/{check_foreign_name('zip_data', entry['zip_data']['basename'], base)}"),
                codec=entry["compression"].partition(":")[0],
                unpacked_bytes=int(entry["raw_data"]["bytes"]),
                parts=self._unpacked,
            )
        shard.samples = entry["samples"]
        return shard

    async def _finish(self, shard: Shard, index: ShardIndex) -> None:
        await super()._finish(shard, replace(index, names=tuple(self._encodings)))

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> dict[str, bytes]:
        [data] = parts
        at = 4 * sum(not size for size in self._sizes.values())
        variable = iter(np.frombuffer(data, "<u4", at // 4).tolist())
        found = {}
        for name, size in self._sizes.items():
            length = size or next(variable)
            if name in index.names:
                found[name] = data[at : at + length]
            at += length
        if at != len(data):
            raise ValueError(f"sample {sample} has {len(data)} bytes, by the sizes of its columns {at}")
        return found

    def _value(self, field: str, data: bytes) -> Any:
        return self._decoders[field](data)

    def _decoder(self, name: str) -> Callable[[bytes], Any]:
        kind, _, arguments = self._encodings[name].partition(":")
        if kind in _DECODERS:
            return _DECODERS[kind]
        if kind == "ndarray":
            dtype, _, shape = arguments.partition(":")
            return partial(_array, dtype, shape)
        if name not in (self._data or self._fields or self._encodings) and name not in self._target_fields:
            return bytes
        ways = f"choose other columns with data=[...]; there are {self._encodings}"
        raise ValueError(f"MDSShards: the column {name!r} has the encoding {kind!r}, which is not read; {ways}")
