"""``TarShards``: samples of several files in tar files, grouped as WebDataset does.

Headers are those of POSIX ustar, pax, GNU and V7. Sources: POSIX.1-2017 "pax",
https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html; GNU tar's "Basic Tar Format"; ``wds2idx`` of DALI;
``TarIndexWriter`` of energon.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np

from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import counted, explain_arguments
from aiofeed.shards.base import FieldShards
from aiofeed.shards.index import IndexBuilder, ShardIndex, ranges_of, split_name
from aiofeed.shards.indexing import IndexRules, Scan, drive, idx_key
from aiofeed.shards.urls import Shard

BLOCK = 512
_ZEROS = bytes(BLOCK)
_FILE = b"0\x007"
# Kinds of members that have no contents, whatever their size field says: links, devices, folders, FIFOs.
_EMPTY = b"123456"
# More than a pax header of a file has.
_MOST_HEADER_BYTES = 1 << 20
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# More than the zeros at the end of a tar file: it fills a record, of 10 KiB by default.
_END_BYTES = 1 << 20


def scan_tar(size: int, target: Sequence[str] = ()) -> Scan:
    """Return a pass over the headers of a tar file, which also reads the members with the fields of targets."""
    builder = IndexBuilder(target)
    yield from _members(size, builder.add, builder.label)
    return builder.finish()


def members_of(data: bytes) -> dict[str, bytes]:
    """Return the fields of a sample, of all bytes of its members."""
    found: dict[str, bytes] = {}

    def add(name: str, start: int, end: int) -> bool:
        key, field = split_name(name)
        if key is not None:
            found[field] = data[start + BLOCK : end]
        return False

    drive(_members(len(data), add, whole=False), lambda start, end: data[start:end])
    return found


def _members(
    size: int, add: Callable[[str, int, int], bool], label: Callable[[bytes], None] | None = None, *, whole: bool = True
) -> Generator[tuple[int, int], bytes, None]:
    """Yield a pass over the headers of a tar file. It yields ``(start, end)`` and is sent these bytes.

    Tar files joined by ``cat`` are read to the end of the last one, as by ``tar --ignore-zeros``.

    Args:
        size: The size of the tar file.
        add: Called with name, start and end of each file, its last header included; returns whether to read it.
        label: Called with the contents of each file that is read.
        whole: Whether the end must be marked.
    """
    at, number, ended = 0, 0, not whole
    name: str | None = None
    long_size: int | None = None
    while at < size or not ended:
        header = yield at, at + BLOCK
        if header == _ZEROS[: len(header)] and (ended or len(header) == BLOCK):
            at, ended = at + BLOCK, True
            continue
        kind = next((name for magic, name in _COMPRESSED.items() if not number and header.startswith(magic)), None)
        if kind is not None:
            raise ValueError(
                f"it is compressed with {kind}, which has no random access: decompress the tar file; images and other "
                f"members that are compressed themselves do not grow"
            )
        if len(header) < BLOCK:
            what = "the tar file is truncated" if number or size == 0 or b"\0" in header else "this is not a tar file"
            raise ValueError(f"{what}: it ends at byte {size} without an end mark")
        # The checksum counts as eight spaces in its own sum.
        if sum(header) - sum(header[148:156]) + 8 * 32 != _octal(header[148:156]):
            raise ValueError(
                "this is not a tar file" if not number else f"the tar file is damaged: there is no header at byte {at}"
            )
        number, ended = number + 1, not whole
        kind_of, length = header[156:157], member_size(header)
        body = at + BLOCK
        if kind_of in (b"x", b"g", b"L", b"K"):
            if length < 0 or length > _MOST_HEADER_BYTES or body + length > size:
                raise ValueError(f"the tar file is damaged or truncated: a header of {length} bytes at byte {at}")
            data = yield body, body + length
            if kind_of == b"L":
                name = _text(data.split(b"\0", 1)[0])
            elif kind_of == b"x":
                records = _pax(data, at)
                if any(record.startswith("GNU.sparse.") for record in records):
                    raise ValueError(f"the member at byte {at} is sparse: write the tar file without --sparse")
                name = _text(records["path"]) if "path" in records else name
                long_size = int(records["size"]) if "size" in records else long_size
            at = body + -(-length // BLOCK) * BLOCK
            continue
        if kind_of == b"S":
            raise ValueError(f"the member at byte {at} is sparse: write the tar file without --sparse")
        found, name = name if name is not None else _name(header), None
        length, long_size = length if long_size is None else long_size, None
        if kind_of in _EMPTY:
            length = 0
        if length < 0:
            raise ValueError(f"the tar file is damaged: the size of {found!r} is no number")
        if body + length > size:
            raise ValueError(
                f"the tar file is truncated: {found!r} ends at byte {body + length}, the file at byte {size}"
            )
        if kind_of in _FILE and not found.endswith("/") and add(found, at, body + length) and label is not None:
            label((yield body, body + length))
        at = body + -(-length // BLOCK) * BLOCK


def member_size(header: bytes) -> int:
    """Return the size of a member; larger ones than 8 GiB are numbers to the base 256."""
    return _octal(header[124:136])


def _octal(field: bytes) -> int:
    try:
        return int(field.split(b"\0", 1)[0] or b"0", 8)
    except ValueError:
        if field[0] & 0x80:
            return int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        return 0 if not field.strip(b" \0") else -1


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def may_be_named(header: bytes, name: bytes) -> bool:
    """Return whether a header may be that of a member. Long names, and others than ASCII, are in another header."""
    found = header[:100].split(b"\0", 1)[0]
    return len(found) == 100 or header[345] != 0 or not name.isascii() or found.lower() == name.lower()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(data: bytes, at: int) -> dict[str, bytes]:
    """Return the records ``length key=value`` of a pax header."""
    records, position = {}, 0
    while position < len(data) and data[position : position + 1] != b"\0":
        digits, _, _ = data[position : position + 20].partition(b" ")
        if not digits.isdigit() or not len(digits) + 1 < int(digits) <= len(data) - position:
            raise ValueError(f"the tar file is damaged: the pax header at byte {at} has a record without its length")
        key, _, value = data[position + len(digits) + 1 : position + int(digits) - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value
        position += int(digits)
    return records


def foreign_index(data: bytes, size: int) -> ShardIndex | None:
    """Return the index in a file of DALI (text) or energon (offsets of samples); ``None`` for another file."""
    if data.startswith(b"v1.2 "):
        return _dali_index(data)
    if data.startswith(b"v1.") or len(data) % 8 or len(data) < 16:
        return None
    offsets = np.frombuffer(data, "<u8")
    if int(offsets[-1]) > size or not (offsets[1:] > offsets[:-1]).all() or (offsets % BLOCK).any():
        raise ValueError("it has no ascending offsets of samples")
    return ranges_of(offsets[:-1], offsets[1:])


def _dali_index(data: bytes) -> ShardIndex:
    """``v1.2 count``, then a line per sample: extension, offset of the contents, size and name of each member."""
    head, *lines = data.decode().splitlines()
    if len(lines) != int(head.split()[1]):
        raise ValueError(f"it has {counted(len(lines), 'line')}, its first line says {head!r}")
    builder = IndexBuilder()
    for line in lines:
        words = line.split(" ")
        if len(words) % 4:
            raise ValueError(f"the names in {line!r} contain spaces")
        for at in range(0, len(words), 4):
            start, length = int(words[at + 1]) - BLOCK, int(words[at + 2])
            builder.add(words[at + 3], start, start + BLOCK + length)
    index = builder.finish()
    if len(index) != len(lines):
        raise ValueError(f"it has {counted(len(lines), 'sample')}, the names in it are those of {len(index)}")
    return index


# The index of DALI is x.idx, that of energon x.tar.idx.
TAR_RULES = IndexRules("tar", scan_tar, {idx_key: foreign_index, lambda key: f"{key}.idx": foreign_index})


@public
@explain_arguments()
class TarShards(FieldShards):
    """Samples in tar files, grouped as WebDataset does. Any sample is read without those before it.

    Example:
        ```python
        import aiofeed

        shards = aiofeed.TarShards("train-{000..001}.tar", data="jpg", target="cls")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(shards, decode=decode, batch_size=4, shuffle="window")
        for images, labels in feeder:
            print(images.shape, labels)
        ```

    Consecutive members whose names agree up to the first dot of the last part are a sample: ``0001.jpg`` and
    ``0001.cls`` have the key ``0001`` and the fields ``jpg`` and ``cls``. Without ``data``, a sample is a dict of all
    its fields as bytes. Of tar files joined by ``cat`` all samples are read.

    The index of each shard is taken from the cache folder, from ``x.tar.aiofeed``, or from an index of DALI
    (``x.idx``) or energon (``x.tar.idx``) beside the shard, if it fits. Otherwise it is made in one pass, which reads
    the headers of a file or streams an object, and cached. ``aiofeed index`` makes indexes in advance.

    Args:
        urls: URLs or paths: a list, or one with braces such as ``s3://bucket/train-{000..099}.tar`` or a glob; or a
            JSON list of shards made by ``widsindex``.
        data: The field whose bytes ``decode=`` gets, or alternatives: ``"jpg;png"``. A list of names: a dict of these.
            Default: a dict of all.
        target: The field of the target; a sample is then ``(decoded, target)``. The bytes of all targets are read once,
            when the source is made, and stay in memory.
        to_target: Makes a target of the bytes of its field. Default: ``int``.
        store: An obstore store that reads the URLs. Default: made of the URLs.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        FileNotFoundError: A shard does not exist.
        ValueError: A shard is compressed, truncated, damaged or no tar file; no sample has a field; or a URL cannot be
            read.
        OSError: A shard cannot be read.
    """

    rules = TAR_RULES
    default_to_target = int

    async def _check_fit(self, shard: Shard, index: ShardIndex) -> None:
        await super()._check_fit(shard, index)
        if (index.starts % BLOCK).any():
            raise ValueError("a member does not begin at a multiple of 512 bytes")
        # A tar file may grow without another size, because it ends with zeros. Other tar files may be joined to it.
        after = -(-int(index.ends.max(initial=0)) // BLOCK) * BLOCK
        stop = min(after + _END_BYTES, shard.size)
        if after < stop and any((await shard.read([(after, stop)]))[0]):
            raise ValueError(f"other members follow at byte {after}, behind those that it has")

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> dict[str, bytes]:
        if index.fields is None:
            found = members_of(parts[0])
            return {field: data for field, data in found.items() if not index.names or field in index.names}
        assert index.keys is not None
        fields, key, suffixes = {}, index.keys[sample], index.suffixes
        for member, part in zip(index.members(sample), parts, strict=True):
            number = index.fields.item(member)
            name = key + suffixes[number]
            if member_size(part) != len(part) - BLOCK or not (part.startswith(name) or may_be_named(part, name[:-1])):
                raise ValueError("the header of a member is not where the index says; the shard has another index")
            fields[index.names[number]] = part[BLOCK:]
        return fields
