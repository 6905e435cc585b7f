"""The index of a shard: the byte ranges and keys of its samples, as arrays, and the file that it is saved in."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.objects.keys import PackedSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

Unsigned: TypeAlias = "NDArray[np.unsignedinteger[Any]]"

MAGIC = b"aiofeed index 1\n"
SUFFIX = ".aiofeed"
_DTYPES = ("|u1", "<u2", "<u4", "<u8")
_ARRAYS = ("starts", "ends", "first", "fields", "sizes", "crcs", "inflated")


class PackedBytes(PackedSequence[bytes]):
    """Short byte strings."""

    def _value(self, data: memoryview) -> bytes:
        return bytes(data)

    @staticmethod
    def pack(values: Sequence[bytes]) -> PackedBytes:
        """Return a copy of the values."""
        ends = np.fromiter(accumulate(map(len, values)), np.uint64, len(values))
        return PackedBytes.of(np.frombuffer(b"".join(values), np.uint8), narrow(ends))

    @staticmethod
    def of(data: NDArray[np.uint8], ends: Unsigned) -> PackedBytes:
        """Byte strings of which only the ends are given."""
        return PackedBytes(data, np.concatenate([np.zeros(1, ends.dtype), ends]))


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the samples of a shard are. A sample has one or more members, a member is one range of bytes.

    Args:
        starts: The first byte of each member, its header included.
        ends: The byte after each member.
        first: The number of the first member of each sample, and the number of members; ``None``: each has one.
        fields: The position in ``names`` of each member's field; ``None``: a member has all fields of its sample.
        names: The names of the fields.
        keys: The key of each sample; ``None``: samples have numbers only.
        labels: The bytes of each sample's target, if they were collected.
        unlabelled: The samples without a target.
        sizes: The bytes of each member's data in a zip file.
        crcs: The CRC-32 of each member's contents in a zip file.
        inflated: The bytes of each member's contents in a zip file.
        read: Returns a sample, in place of its bytes, which are none.
    """

    starts: Unsigned
    ends: Unsigned
    first: Unsigned | None = None
    fields: Unsigned | None = None
    names: tuple[str, ...] = ()
    keys: PackedBytes | None = None
    labels: PackedBytes | None = None
    unlabelled: frozenset[int] = frozenset()
    sizes: Unsigned | None = None
    crcs: Unsigned | None = None
    inflated: Unsigned | None = None
    read: Any = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.starts) if self.first is None else len(self.first) - 1

    @cached_property
    def suffixes(self) -> list[bytes]:
        """Return the part of a name in a tar file behind the key, for each of ``names``."""
        return [b".%b\0" % name.encode("utf-8", "surrogateescape") for name in self.names]

    def members(self, sample: int) -> range:
        """Return the numbers of the members of a sample."""
        if self.first is None:
            return range(sample, sample + 1)
        return range(self.first.item(sample), self.first.item(sample + 1))

    def select(self, names: Sequence[str]) -> ShardIndex:
        """Return the same samples with the members of some fields only."""
        if self.fields is None:
            return replace(self, names=tuple(names))
        assert self.first is not None
        numbers = [number for number, name in enumerate(self.names) if name in names]
        mask = np.isin(self.fields, numbers)
        kept = np.concatenate([[0], np.cumsum(mask)])
        chosen = {
            name: values[mask] for name in _ARRAYS if name != "first" and (values := getattr(self, name)) is not None
        }
        return replace(self, first=narrow(kept[self.first]), **chosen)

    def to_bytes(self, **shard: Any) -> bytes:
        """Return the contents of an index file; ``shard`` describes the shard."""
        parts = {name: values for name in _ARRAYS if (values := getattr(self, name)) is not None}
        for name in ("keys", "labels"):
            if (packed := getattr(self, name)) is not None:
                parts[f"{name}.ends"] = packed.offsets[1:]
                parts[f"{name}.data"] = packed.data
        arrays = [(name, values.dtype.str, len(values)) for name, values in parts.items()]
        header = {**shard, "names": self.names, "unlabelled": sorted(self.unlabelled), "arrays": arrays}
        line = json.dumps(header).encode("utf-8", "surrogatepass")
        body = b"".join([line, b"\n", *[values.tobytes() for values in parts.values()]])
        return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    @staticmethod
    def from_bytes(data: bytes) -> tuple[ShardIndex, dict[str, Any]]:
        """Return the index in a file, and the description of its shard.

        Raises:
            ValueError: The file is no index or is damaged.
        """
        body = data[len(MAGIC) + 4 :]
        if not data.startswith(MAGIC):
            raise ValueError("it is no index file of this version")
        if zlib.crc32(body) != int.from_bytes(data[len(MAGIC) :][:4], "little"):
            raise ValueError("the index file is damaged")
        line, _, rest = body.partition(b"\n")
        header = json.loads(line)
        at, parts = 0, dict[str, Any]()
        for name, dtype, count in header.pop("arrays"):
            if dtype not in _DTYPES:
                raise ValueError(f"the index file has an array of dtype {dtype!r}")
            # A copy: a view of one array would keep the contents of the whole file in memory.
            parts[name] = np.frombuffer(rest, dtype, count, at).copy()
            at += parts[name].nbytes
        names, unlabelled = tuple(header.pop("names")), frozenset(header.pop("unlabelled"))
        arrays: dict[str, Any] = {name: parts[name] for name in _ARRAYS if name in parts}
        for name in ("keys", "labels"):
            if f"{name}.ends" in parts:
                arrays[name] = PackedBytes.of(parts[f"{name}.data"], parts[f"{name}.ends"])
        index = ShardIndex(names=names, unlabelled=unlabelled, **arrays)
        if at != len(rest) or not index.is_consistent():
            raise ValueError("the arrays of the index file do not fit together")
        return index, header

    def is_consistent(self) -> bool:
        """Return whether the arrays have the same members, samples and names."""
        members, first, fields = len(self.starts), self.first, self.fields
        packed = [each for each in (self.keys, self.labels) if each is not None]
        columns = (self.ends, fields, self.sizes, self.crcs, self.inflated)
        return (
            (first is None) == (fields is None) == (self.keys is None)
            and all(isinstance(name, str) for name in self.names)
            and (first is None or (len(first) > 0 and _rises(first, members)))
            and (fields is None or bool((fields < len(self.names)).all()))
            and all(each is None or len(each) == members for each in columns)
            and bool((self.starts <= self.ends).all())
            and all(len(each) == len(self) and _rises(each.offsets, len(each.data)) for each in packed)
        )


class IndexBuilder:
    """Collects the members of a shard in their order; consecutive ones with the same key form a sample.

    Key and field are those of WebDataset: the path up to the first dot of its last part, and the rest in lower case.
    Names without an extension, hidden files and metadata such as ``__index__`` are left out.

    Args:
        labels: The names of the field of targets, the preferred one first.
    """

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self._labels = labels
        self._columns = {name: array("Q") for name in _ARRAYS}
        self._names: dict[str, int] = {}
        self._keys: list[bytes] = []
        self._seen: set[str] = set()
        self._targets: list[tuple[int, bytes] | None] = []

    def add(self, name: str, start: int, end: int, zipped: Sequence[int] = ()) -> bool:
        """Add a member; returns whether its contents are a target, to be passed to ``label``.

        A member of a zip file has ``zipped``: the bytes of its data, its CRC-32 and the bytes of its contents.

        Raises:
            ValueError: The sample has this field already.
        """
        key, field = split_name(name)
        if key is None:
            return False
        columns, encoded = self._columns, key.encode("utf-8", "surrogateescape")
        if not self._keys or self._keys[-1] != encoded:
            columns["first"].append(len(columns["starts"]))
            self._keys.append(encoded)
            self._targets.append(None)
            self._seen.clear()
        if field in self._seen:
            raise ValueError(f"the sample {key!r} has two members {field!r}")
        self._seen.add(field)
        columns["starts"].append(start)
        columns["ends"].append(end)
        columns["fields"].append(self._names.setdefault(field, len(self._names)))
        for column, value in zip(("sizes", "crcs", "inflated"), zipped, strict=False):
            columns[column].append(value)
        self._field = field
        return field in self._labels

    def label(self, data: bytes) -> None:
        """Set the target of the member that was added last."""
        rank, known = self._labels.index(self._field), self._targets[-1]
        if known is None or rank < known[0]:
            self._targets[-1] = rank, data

    def finish(self) -> ShardIndex:
        """Return the index."""
        columns = self._columns
        columns["first"].append(len(columns["starts"]))
        arrays: dict[str, Any] = {
            name: narrow(np.frombuffer(values, np.uint64)) for name, values in columns.items() if values
        }
        empty = np.zeros(0, np.uint8)
        index = ShardIndex(
            starts=arrays.pop("starts", empty),
            ends=arrays.pop("ends", empty),
            fields=arrays.pop("fields", empty),
            names=tuple(self._names),
            keys=PackedBytes.pack(self._keys),
            **arrays,
        )
        return with_labels(index, [each and each[1] for each in self._targets]) if self._labels else index


def with_labels(index: ShardIndex, labels: Sequence[bytes | None]) -> ShardIndex:
    """Return the index with the bytes of targets, ``None`` for samples without one."""
    missing = frozenset(at for at, label in enumerate(labels) if label is None)
    return replace(index, labels=PackedBytes.pack([label or b"" for label in labels]), unlabelled=missing)


def split_name(name: str) -> tuple[str | None, str]:
    """Return the key and the field of a member's name; ``None`` and "" if it is no part of a sample."""
    dot = name.find(".", name.rfind("/") + 1)
    top = name.partition("/")[0]
    if dot <= name.rfind("/") + 1 or (top.startswith("__") and top.endswith("__") and len(top) > 3):
        return None, ""
    return name[:dot], name[dot + 1 :].lower()


def _rises(offsets: Any, end: int) -> bool:
    """Return whether offsets rise from 0 to an end."""
    return bool(offsets[0] == 0 and offsets[-1] == end and (offsets[1:] >= offsets[:-1]).all())


def narrow(values: Any) -> Unsigned:
    """Unsigned integers in the smallest dtype that holds them."""
    found: Unsigned = values.astype(np.min_scalar_type(int(values.max())) if len(values) else np.uint8)
    return found


def ranges_of(starts: Iterable[int], ends: Iterable[int]) -> ShardIndex:
    """Return the index of samples that have one range and no key."""
    return ShardIndex(narrow(np.array(starts, np.uint64)), narrow(np.array(ends, np.uint64)))


def read_by(read: Any, count: int) -> ShardIndex:
    """Return the index of samples that a function reads by their numbers."""
    return ShardIndex(none := np.zeros(count, np.uint8), none, read=read)
