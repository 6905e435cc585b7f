"""Objects in a folder of the file system, read in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence

from aiofeed.core.statistics import StorageStatistics
from aiofeed.sources.file_io import ReadRules, open_file, read_file, read_range
from aiofeed.sources.objects.requests import ObjectInfo, changed, too_short

_PAGE = 1000


class LocalObjects:
    """The files below a folder, with the methods of ``ObjectReader``; their keys are relative paths with slashes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def url(self, key: str) -> str:
        """The path of a file."""
        return os.path.join(self._folder, key)

    async def head(self, key: str) -> ObjectInfo:
        """Size, etag and time of change of a file."""
        return _info(await asyncio.to_thread(os.stat, self.url(key)))

    async def read(self, key: str, max_bytes: int) -> bytes:
        """A whole file."""
        return await asyncio.to_thread(read_file, self.url(key), ReadRules(max_bytes))

    async def read_ranges(
        self, key: str, starts: Sequence[int], ends: Sequence[int], *, etag: str | None = None
    ) -> list[bytes]:
        """Parts of a file."""
        return await asyncio.to_thread(read_ranges, self.url(key), list(zip(starts, ends, strict=True)), etag)

    async def list(self, prefix: str) -> AsyncIterator[list[tuple[str, ObjectInfo]]]:
        """The files of a folder and of those in it."""
        pages = _pages(self._folder, prefix)
        while page := await asyncio.to_thread(next, pages, None):
            yield page

    def statistics(self) -> StorageStatistics | None:
        """``None``: there are no requests."""
        return None


def _info(status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(status.st_size, _etag(status), status.st_mtime)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def read_ranges(path: str, ranges: Sequence[tuple[int, int]], etag: str | None = None) -> list[bytes]:
    """Parts of a file, in the calling thread."""
    with open(open_file(path), "rb", buffering=0) as file:
        if etag is not None and _etag(os.fstat(file.fileno())) != etag:
            raise changed(path)
        found = []
        for start, end in ranges:
            data = read_range(file, start, end)
            if len(data) != end - start:
                raise too_short(path, start, end)
            found.append(data)
        return found


def _pages(root: str, prefix: str) -> Iterator[list[tuple[str, ObjectInfo]]]:
    page: list[tuple[str, ObjectInfo]] = []
    for parent, folders, names in os.walk(os.path.join(root, prefix), onerror=_refuse):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            page.append((os.path.relpath(path, root).replace(os.sep, "/"), _info(os.stat(path))))
            if len(page) == _PAGE:
                yield page
                page = []
    yield page


def _refuse(error: OSError) -> None:
    raise error
