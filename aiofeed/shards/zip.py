"""``ZipShards``: samples of several files in zip files.

Source: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 (local header) and 4.3.12 to 4.5.3 (central directory, zip64).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from aiofeed.common.expanded import check_expanded
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import explain_arguments
from aiofeed.shards.base import FieldShards
from aiofeed.shards.index import IndexBuilder, ShardIndex
from aiofeed.shards.indexing import IndexRules, Scan

_STORED, _DEFLATED = 0, 8
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
# The end record is followed by a comment of at most 65,535 bytes.
_TAIL = _END.size + 0xFFFF + _LOCATOR.size


def scan_zip(size: int, target: Sequence[str] = ()) -> Scan:
    """Read the central directory. Targets are not collected: their members are stored elsewhere in the file."""
    first = max(size - _TAIL, 0)
    tail = yield first, size
    at = tail.rfind(b"PK\5\6")
    while at >= 0 and (len(tail) - at < _END.size or at + _END.size + _END.unpack_from(tail, at)[7] != len(tail)):
        at = tail.rfind(b"PK\5\6", 0, at)
    if at < 0:
        raise ValueError("this is not a zip file, or it is truncated: it has no end record")
    _, disk, _, _, count, length, offset, _ = _END.unpack_from(tail, at)
    end = first + at
    if at >= _LOCATOR.size and tail.startswith(b"PK\6\7", at - _LOCATOR.size):
        place = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        record = yield place, place + _END64.size
        if len(record) < _END64.size or not record.startswith(b"PK\6\6"):
            raise ValueError("the zip64 end record is damaged")
        (_, _, _, _, disk, _, _, count, length, offset), end = _END64.unpack(record), place
    if disk or length > end:
        raise ValueError("the zip file has several parts or its end record is damaged")
    # Bytes before the archive, as in a self-extracting one, shift all offsets.
    shift = end - length - offset
    if shift and (yield 0, 4) == b"PK\3\4":
        raise ValueError(f"several zip files are joined, and the last one begins at byte {shift}: keep them apart")
    directory = yield end - length, end
    if len(directory) < length:
        raise ValueError("the zip file is truncated: its directory is not complete")
    entries = _entries(directory, count, shift)
    if any(not 0 <= start < end - length for start, *_ in entries):
        raise ValueError("the directory of the zip file is damaged")
    starts = sorted([start for start, *_ in entries] + [end - length])
    ends = dict(pairwise(starts))
    builder = IndexBuilder()
    for start, name, *zipped in entries:
        builder.add(name, start, ends[start], zipped)
    return builder.finish()


def _entries(directory: bytes, count: int, shift: int) -> list[tuple[int, str, int, int, int]]:
    """Return where each member starts, its name, the bytes of its data, its CRC-32 and its size."""
    found, at = [], 0
    for _ in range(count):
        if len(directory) < at + _ENTRY.size or not directory.startswith(b"PK\1\2", at):
            raise ValueError("the directory of the zip file is damaged")
        _, _, _, flags, method, _, _, crc, stored, size, name_size, extra_size, comment, _, _, _, start = (
            _ENTRY.unpack_from(directory, at)
        )
        at += _ENTRY.size
        encoded, extra = directory[at : at + name_size], directory[at + name_size : at + name_size + extra_size]
        name = encoded.decode("utf-8" if flags & 0x800 else "cp437", "surrogateescape")
        at += name_size + extra_size + comment
        if flags & 1:
            raise ValueError(f"the member {name!r} is encrypted")
        if method not in (_STORED, _DEFLATED):
            raise ValueError(f"the member {name!r} is compressed with method {method}; stored and deflated can be read")
        large = _zip64(extra)
        if size == 0xFFFFFFFF:
            size, *large = large or [0]
        if stored == 0xFFFFFFFF:
            stored, *large = large or [0]
        if start == 0xFFFFFFFF:
            start = (large or [0])[0]
        check_expanded(f"the member {name!r}", size, stored)
        found.append((start + shift, name, stored, crc, size))
    return found


def _zip64(extra: bytes) -> list[int]:
    """Return the 64-bit numbers of a member: those of size, size of the data and start that are missing in 32 bits."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            return list(struct.unpack_from(f"<{min(size, len(extra) - 4) // 8}Q", extra, 4))
        extra = extra[4 + size :]
    return []


def _contents(part: bytes, stored: int, size: int) -> bytes:
    """Return the contents of a member, from the bytes from its local header on."""
    if len(part) < _LOCAL.size or not part.startswith(b"PK\3\4"):
        raise ValueError("there is no member where the directory says")
    _, _, _, method, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack_from(part)
    begin = _LOCAL.size + name_size + extra_size
    data = part[begin : begin + stored]
    if len(data) < stored:
        raise ValueError("a member ends before its directory says")
    if method == _STORED:
        return data
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        contents = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"a member cannot be inflated: {error}") from None
    if not inflater.eof or len(contents) != size:
        raise ValueError(f"a member is cut, or has another size than the {size} bytes that its directory says")
    return contents


@public
@explain_arguments()
class ZipShards(FieldShards):
    """Samples in zip files, grouped as in ``TarShards``, whose arguments and errors it has.

    Example:
        ```python
        import aiofeed

        shards = aiofeed.ZipShards("train.zip", data="jpg", target="cls")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(shards, decode=decode, batch_size=4, shuffle=True)
        for images, labels in feeder:
            print(images.shape, labels)
        ```

    Members may be stored or deflated. The central directory at the end of each shard is its index. The CRC-32 of each
    member is checked.

    Raises:
        ValueError: A shard is encrypted or no zip file, or a member is compressed otherwise.
    """

    _in_thread = True
    rules: ClassVar[IndexRules] = IndexRules("zip 2", scan_zip, streams=False)
    default_to_target = int

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> dict[str, bytes]:
        columns: Any = index  # with all of them, as scan_zip makes them
        found = {}
        for member, part in zip(index.members(sample), parts, strict=True):
            data = _contents(part, int(columns.sizes[member]), int(columns.inflated[member]))
            if zlib.crc32(data) != int(columns.crcs[member]):
                raise ValueError("a member has another CRC-32 than its directory says")
            found[index.names[int(columns.fields[member])]] = data
        return found
