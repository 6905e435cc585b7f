"""Listings of the objects below a URL, and their cache on disk."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import mmap
import os
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.cache_folder import cache_path, write_cached
from aiofeed.common.progress_bar import LoadProgress
from aiofeed.objects.keys import KeyPacker, PackedKeys
from aiofeed.objects.reader import ObjectReader, Page, run_all
from aiofeed.objects.requests import ObjectInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("aiofeed.sources")

# Folders that are listed at the same time. A page of 1,000 keys takes a store some 100 ms.
FOLDERS = 16
_VERSION = 2
_ALIGN = 64


@dataclass(frozen=True, eq=False)
class Listing:
    """The objects below a URL, in the order of the bytes of their keys.

    Args:
        keys: The keys, relative to the URL.
        sizes: The size of each object in bytes.
        etag: A hash of the keys and of the etags of the objects.
        listed_at: When the objects were listed, in seconds since 1970.
    """

    keys: PackedKeys
    sizes: NDArray[np.int64]
    etag: str
    listed_at: float


def list_objects(reader: ObjectReader, *, refresh: bool = False) -> Listing:
    """Return the objects below the root of a reader: from the cache on disk, or listed now and cached.

    Args:
        reader: Its root is listed.
        refresh: Whether to list again, even if there is a cached listing.

    Raises:
        OSError: The objects cannot be listed.
        FeedError: This process is a fork of one that has used object storage.
    """
    path, url = cache_path(reader.identity, "listing"), reader.url("")
    if path is not None and not refresh and (cached := _load(path)) is not None:
        hours = (time.time() - cached.listed_at) / 3600
        log.info("%s: a listing %.1f hours old, in %s; refresh=True lists again", url, hours, path)
        return cached
    listing = run_blocking(lambda: read_listing(reader))
    if path is not None:
        write_cached(path, listing_file(listing, url), f"the listing of {url} is not cached")
    return listing


class _Part:
    """Objects that were listed one after the other."""

    def __init__(self) -> None:
        self.keys = KeyPacker()
        self.sizes = array("q")
        self.digest = hashlib.sha256()
        self.first = self.last = ""
        self.is_sorted = True

    def add(self, page: Iterable[tuple[str, ObjectInfo]]) -> _Part:
        for key, info in page:
            if not self.sizes:
                self.first = self.last = key
            self.is_sorted &= self.last <= key
            self.last = key
            self.keys.add((key,))
            self.sizes.append(info.size)
            self.digest.update(f"{key} {info.etag or info.modified}\n".encode("utf-8", "surrogateescape"))
        return self


async def read_listing(reader: ObjectReader) -> Listing:
    """Return the objects below the root of a reader, listed now.

    Raises:
        OSError: The objects cannot be listed.
    """
    pages, turn = reader.list(), asyncio.Semaphore(FOLDERS)
    first: list[tuple[str, ObjectInfo]] = await anext(pages, [])

    async def list_all(pages: AsyncIterator[Page], part: _Part) -> _Part:
        async with turn:
            async for page in pages:
                part.add(page)
                progress.add(len(page))
        return part

    url = reader.url("")
    with LoadProgress(f"listing {url}", "keys", None, lambda keys: f"listed {keys:,} keys of {url}") as progress:
        if reader.has_folders and any("/" in key for key, _ in first):
            folders, objects = await reader.list_top()
            parts = [_Part().add([each]) for each in objects]
            parts += await run_all([list_all(reader.list(folder), _Part()) for folder in folders])
        else:  # objects without folders, of which list_top would make one list
            parts = [await list_all(pages, _Part().add(first))]
    return _joined(sorted(parts, key=lambda part: part.first))


def _joined(parts: list[_Part]) -> Listing:
    packed = [part.keys.packed() for part in parts]
    lengths = np.concatenate([np.diff(each.offsets) for each in packed] or [np.zeros(0, np.int64)])
    data = np.concatenate([each.data for each in packed] or [np.zeros(0, np.uint8)])
    keys = PackedKeys(data, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    sizes = np.concatenate([np.frombuffer(part.sizes, np.int64) for part in parts] or [lengths])
    if not all(part.is_sorted for part in parts) or any(a.last > b.first for a, b in pairwise(parts)):
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        keys, sizes = keys.take(order), sizes[order]
    digest = hashlib.sha256(b"".join([part.digest.digest() for part in parts]))
    return Listing(keys, sizes, digest.hexdigest()[:32], time.time())


def listing_file(listing: Listing, url: str) -> list[bytes | memoryview]:
    """Return the parts of the file of a listing."""
    keys = listing.keys
    header: dict[str, Any] = {"version": _VERSION, "url": url, "etag": listing.etag, "listed_at": listing.listed_at}
    header |= {"objects": len(keys), "key_bytes": len(keys.data)}
    line = json.dumps(header).encode()
    arrays: list[Any] = [keys.offsets, listing.sizes, keys.data]
    padded = line + b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
    parts: list[bytes | memoryview] = [padded, *[memoryview(values) for values in arrays]]
    return [*parts, functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0).to_bytes(4, "little")]


def _load(path: Path) -> Listing | None:
    """Return the listing in a file; ``None`` if there is none or the file is not complete."""
    try:
        with open(path, "rb") as file:
            header = json.loads(first := file.readline())
            count, at = header["objects"], len(first)
            size = at + 8 * (2 * count + 1) + header["key_bytes"]
            if header["version"] != _VERSION or os.fstat(file.fileno()).st_size != size + 4:
                return None
            # Shared by processes, and in the page cache rather than in memory of this process.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if zlib.crc32(memoryview(memory)[:size]) != int.from_bytes(memory[size:], "little"):
            log.warning("the cached listing %s is damaged and is made again", path)
            return None
        offsets = np.frombuffer(memory, np.int64, count + 1, at)
        sizes = np.frombuffer(memory, np.int64, count, at + 8 * (count + 1))
        keys = PackedKeys(np.frombuffer(memory, np.uint8, header["key_bytes"], size - header["key_bytes"]), offsets)
        return Listing(keys, sizes, header["etag"], header["listed_at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cached listing %s cannot be read and is made again: %s", path, error)
        return None
