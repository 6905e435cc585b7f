"""One object per sample: the part of ``Files`` and ``ImageFolder`` that reads URLs."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.kernel.core.formatting import redacted
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import Uncopied
from aiofeed.kernel.sources.file_io import Content, evenly
from aiofeed.kernel.sources.links import check_beneath
from aiofeed.objects.keys import KeyPacker, PackedKeys
from aiofeed.objects.listing import list_objects
from aiofeed.objects.reader import ObjectReader, statistics_of
from aiofeed.objects.urls import join_url, split_url, with_query, without_signature

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A smaller object may be a part of a buffer of the client that is much larger.
UNCOPIED_LEAST = 64 << 10


@dataclass(eq=False, repr=False)
class ObjectList(Sequence[str]):
    """Objects of one or several roots; as a sequence, their URLs without credentials.

    Args:
        keys: The key of each object, relative to the root of its reader.
        readers: The readers.
        numbers: The number of the reader of each object; ``None``: all have the first.
        sizes: The size of each object in a listing; ``None``: they were not listed.
    """

    keys: PackedKeys
    readers: list[ObjectReader]
    numbers: Sequence[int] | None = None
    sizes: Sequence[int] | NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """The number of objects."""
        return len(self.keys)

    def __getitem__(self, index: Any, /) -> Any:
        """The URL of an object, or a list of URLs."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._reader(index).url(self.keys[index])

    def _reader(self, index: int) -> ObjectReader:
        return self.readers[0 if self.numbers is None else self.numbers[index]]

    @property
    def is_local(self) -> bool:
        """Whether the objects are files."""
        return all(reader.is_local for reader in self.readers)

    def by_object(self, indices: Sequence[int]) -> list[list[int]]:
        """For each object the positions in ``indices``."""
        groups: dict[tuple[int, str], list[int]] = {}
        for place, index in enumerate(indices):
            number = 0 if self.numbers is None else self.numbers[index]
            groups.setdefault((number, self.keys[index]), []).append(place)
        return list(groups.values())

    async def read_many(self, indices: Sequence[int], max_bytes: int) -> list[Any]:
        """Return the contents of objects, or the error of each that cannot be read."""
        reads = [self._read_buffer(index, max_bytes) for index in indices]
        found: list[Any] = await asyncio.gather(*reads, return_exceptions=True)
        for at, data in enumerate(found):
            if isinstance(data, BaseException):
                data.__traceback__ = None  # refers to frames, and so to the bytes of other objects
            else:
                found[at] = bytes(data)
        return found

    async def read_uncopied(self, index: int, max_bytes: int) -> Any:
        """Return the contents of an object; those of a large one stay in the client's memory, as ``Uncopied``."""
        data = await self._read_buffer(index, max_bytes)
        return bytes(data) if len(data) < UNCOPIED_LEAST else Uncopied(memoryview(data))

    def _read_buffer(self, index: int, max_bytes: int) -> Coroutine[Any, Any, Any]:
        size = None if self.sizes is None else int(self.sizes[index])
        return self._reader(index).read_buffer(self.keys[index], max_bytes, size)

    async def read_ranges(self, index: int, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Ranges of one object."""
        return await self._reader(index).read_ranges(self.keys[index], starts, ends)

    def stable_keys(self) -> PackedKeys:
        """Return the keys, without what changes when their queries are signed again."""
        if self.keys.data.all():
            return self.keys
        packer = KeyPacker()
        packer.add(map(without_signature, self.keys))
        return packer.packed()

    def content_parts(self) -> list[Content]:
        """Return the sizes of some objects; of none if they were not listed."""
        sizes = () if self.sizes is None else self.sizes
        return [Content(b"%d" % sizes[at], kind="sizes") for at in evenly(len(sizes))]

    def store_of(self, index: int) -> str:
        """Identifies the store of an object, which its URL may leave open."""
        return self._stores[0 if self.numbers is None else self.numbers[index]]

    @cached_property
    def _stores(self) -> list[str]:
        return [reader.identity or repr(reader) for reader in self.readers]

    def statistics(self) -> StorageStatistics | None:
        """Return the requests of all readers."""
        return statistics_of(self.readers)


def objects_of(paths: Iterable[object], root: str | None, store: Any, options: Mapping[str, Any] | None) -> ObjectList:
    """Return the objects of a list of URLs; with ``root`` or ``store``, of keys below it.

    Raises:
        TypeError, ValueError: An entry is not a URL, or not a key.
    """
    keys, numbers, known = KeyPacker(), array("i"), dict[str, int]()
    readers = [] if root is None else [ObjectReader(root, store=store, options=options)]
    last, shown = "", "" if root is None else redacted(root)
    for position, path in enumerate(paths):
        if not isinstance(path, str):
            raise TypeError(f"Files needs URLs as str; number {position} is {path!r}")
        if root is not None:
            check_beneath(shown, path)
            key, number = path, 0
        elif last and path.startswith(last):
            key = path[len(last) :]
        else:
            base, key = with_query(*split_url(path))
            if not base and store is None:
                raise ValueError(
                    f"{redacted(path)!r}, number {position}, is a file, and number 0 is a URL: Files reads either; "
                    f"aiofeed.Mixture reads both"
                )
            if base not in known:
                known[base] = len(readers)
                readers.append(ObjectReader(base, store=store, options=options))
            number = known[base]
            last = "" if base.startswith("http") or not base else f"{base}/"
        keys.add((key,))
        numbers.append(number)
    if store is not None and len(readers) > 1:
        raise ValueError(f"store= is one bucket or host, and the URLs have several: {sorted(map(redacted, known))[:5]}")
    return ObjectList(keys.packed(), readers, numbers if len(readers) > 1 else None)


def images_at(
    root: str, endings: Sequence[str], options: Mapping[str, Any] | None, refresh: bool
) -> dict[str, tuple[str, int]]:
    """Return the URL and the size of each object below a root whose key has one of the endings, by its key."""
    listing = list_objects(ObjectReader(root, options=options), refresh=refresh)
    keys = zip(listing.keys, listing.sizes.tolist(), strict=True)
    base, ends = root.rstrip("/"), tuple(endings)
    return {key: (join_url(base, key), size) for key, size in keys if key.lower().endswith(ends)}


def list_classes(
    root: str, extensions: Sequence[str], *, store: Any, options: Mapping[str, Any] | None, refresh: bool
) -> tuple[ObjectList, dict[str, int], int]:
    """Return the images in the folders below a root, sorted as ``ImageFolder`` sorts files.

    Returns:
        The images, the number of images of each class in sorted order, and the number of images in no folder.
    """
    reader = ObjectReader(root, store=store, options=options)
    listing = list_objects(reader, refresh=refresh)
    keys, sizes = listing.keys, listing.sizes
    ranges, loose, at = {}, 0, 0
    is_image = keys.ends_with(extensions)
    while at < len(keys):
        name, slash, _ = keys[at].partition("/")
        if slash:  # "0" is the character after "/"
            ranges[name] = at, (at := bisect_left(keys, f"{name}0", at))
        else:
            loose += int(is_image[at])
            at += 1
    nested = keys.slashes() > 1
    found, counts = [np.zeros(0, np.int64)], {}
    for name in sorted(ranges):
        if name.startswith("."):
            continue
        start, stop = ranges[name]
        images = np.flatnonzero(is_image[start:stop]) + start
        if nested[images].any():
            # Within a class by folder, then by name: the order of the bytes of keys has "a/b/c" before "a/b.jpg".
            images = np.array(sorted(images.tolist(), key=lambda at: keys[at].rpartition("/")[::2]), np.int64)
        counts[name] = len(images)
        found.append(images)
    selected = np.concatenate(found)
    if not np.array_equal(selected, np.arange(len(keys))):
        keys, sizes = keys.take(selected), sizes[selected]
    return ObjectList(keys, [reader], sizes=sizes), counts, loose
