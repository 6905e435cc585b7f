"""Listings of the objects below a URL, and their cache on disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.threads import JOIN_S, POLL_INTERVAL_S
from aiofeed.sampling.feed_order import find_shard
from aiofeed.sources.objects.keys import KeyPacker, PackedKeys
from aiofeed.sources.objects.reader import ObjectReader, Page, run_all
from aiofeed.sources.objects.requests import ObjectInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("aiofeed.sources")

# Folders that are listed at the same time. A page of 1,000 keys takes a store some 100 ms.
FOLDERS = 16
LOG_EVERY_S = 5.0
# A bar appears after this time, and is drawn at most this often. A drawing takes some 0.1 ms.
BAR_AFTER_S = 0.5
BAR_EVERY_S = 0.1
_VERSION = 2
_ALIGN = 64


# At the end of a warning that nothing was cached.
SET_FOLDER = "set AIOFEED_CACHE to a writable folder"


def cache_folder() -> Path | None:
    """The folder for listings and indexes: ``$AIOFEED_CACHE``, or ``aiofeed`` in the cache folder of the platform.

    ``None`` if the user has no home: in a container, ``HOME`` may be unset and the user id may have no account.
    """
    if given := os.environ.get("AIOFEED_CACHE"):
        return Path(given)
    if sys.platform not in ("win32", "darwin") and (given := os.environ.get("XDG_CACHE_HOME")):
        return Path(given) / "aiofeed"
    try:
        home = Path.home()
    except RuntimeError:
        _warn_without_home()
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "aiofeed" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "aiofeed"
    return home / ".cache" / "aiofeed"


def cache_path(identity: str | None, suffix: str) -> Path | None:
    """Return the file in the cache folder for an identity; ``None`` without an identity, or without such a folder."""
    if identity is None or (folder := cache_folder()) is None:
        return None
    return folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.{suffix}"


@functools.cache  # once per process
def _warn_without_home() -> None:
    log.warning("listings and indexes are not cached, because this user has no home folder: %s", SET_FOLDER)


def run_blocking(function: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Return the result of a coroutine function, run by an event loop in a thread; Ctrl-C cancels it.

    For constructors, which may be called where an event loop runs already.
    """
    thread = EventLoopThread(read_threads=4, decode_threads=1)
    outcome: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

    async def run() -> None:
        try:
            outcome.set_result(await function())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            outcome.set_exception(error)

    try:
        thread.launch(import_torch=False)
        thread.start(run)
        while not outcome.done():
            # In pieces: a signal that arrives just before the thread blocks does not wake it.
            concurrent.futures.wait([outcome], POLL_INTERVAL_S)
        return outcome.result()
    finally:
        thread.stop()
        thread.join(JOIN_S)


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


def shows_progress() -> bool:
    """Whether this process shows bars: it has rank 0, and its standard error is a terminal or it is a notebook."""
    try:
        if find_shard()[0]:
            return False
    except ValueError:  # a wrong RANK, which a feeder reports if it needs it
        pass
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and "IPKernelApp" in shell.config:
        return True
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def new_bar(name: str, total: int | None, **options: Any) -> Any:
    """Return a bar of tqdm that draws in each ``update``; ``None`` if tqdm is not installed."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    # Ctrl-C within a drawing leaves the lock acquired, so that bars of other threads must have another one. The thread
    # that monitors bars would outlive them.
    new: Any = type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock()})
    return new(desc=name, total=total, mininterval=0, miniters=0, dynamic_ncols=True, **options)


class LoadProgress:
    """Shows how far a long listing or indexing is: in a bar if ``shows_progress``, otherwise in log lines.

    Args:
        name: The name of the bar.
        unit: What is counted.
        total: The count at the end; ``None`` if it is unknown.
        message: Makes the log line from the count.
    """

    def __init__(self, name: str, unit: str, total: int | None, message: Callable[[int], str]) -> None:
        self._bar: Any = None
        self._new_bar: Callable[[], Any] = lambda: new_bar(name, total, unit=f" {unit}", leave=False)
        self._message = message
        self._count = 0
        self._shown = shows_progress()
        self._due = time.monotonic() + (BAR_AFTER_S if self._shown else LOG_EVERY_S)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """Count; draw the bar or log a line if it is time."""
        self._count += count
        if time.monotonic() <= self._due:
            return
        if self._shown and self._bar is None:
            self._bar = self._new_bar()
            self._shown = self._bar is not None
        self._due = time.monotonic() + (BAR_EVERY_S if self._shown else LOG_EVERY_S)
        if self._shown:
            self._bar.update(self._count - self._bar.n)
        else:
            log.warning("%s", self._message(self._count))


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
    header = {
        "version": _VERSION,
        "url": url,
        "etag": listing.etag,
        "listed_at": listing.listed_at,
        "objects": len(keys),
        "key_bytes": len(keys.data),
    }
    line = json.dumps(header).encode()
    arrays: list[Any] = [keys.offsets, listing.sizes, keys.data]
    padded = line + b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
    parts: list[bytes | memoryview] = [padded, *[memoryview(values) for values in arrays]]
    return [*parts, functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0).to_bytes(4, "little")]


def write_cached(path: Path, parts: Iterable[bytes | memoryview], failure: str) -> None:
    """Write a file of the cache folder; if that is not possible, log a warning that begins with ``failure``."""
    try:
        write_whole(path, parts)
    except OSError as error:
        log.warning("%s: %s; %s", failure, error, SET_FOLDER)


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that is complete or not there, also if this process dies; make its folder.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            for part in parts:
                file.write(part)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


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
