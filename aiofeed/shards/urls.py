"""Finds shards: braces, globs, lists and JSON lists of WebDataset's ``wids`` become shards with their readers."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from aiofeed.common.expanded import check_expanded
from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.kernel.core.formatting import redacted
from aiofeed.kernel.sources.file_io import Content, check_path
from aiofeed.objects.reader import ObjectReader, read_ranges
from aiofeed.objects.requests import ObjectInfo
from aiofeed.objects.urls import is_remote, split_url
from aiofeed.shards.index import SUFFIX, ShardIndex, ranges_of

Urls: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_GLOB = re.compile(r"[*?[]")

NO_SAMPLES = ranges_of((), ())


@dataclass(eq=False)
class Shard:
    """A shard, and its size and version when it was opened.

    Args:
        reader: Reads it.
        key: Its key in the reader.
        samples: The number of its samples in the list that names it.
        size: Its size in bytes.
        info: Its size, etag and time of change.
        version: Its etag, or the time of its last change.
        index: Where its samples are.
        extra: What else its format has to know.
        indexes: The keys of the index files in its folder, if that was listed.
        views: Whether large ranges may be memoryviews.
    """

    reader: ObjectReader
    key: str
    samples: int | None = None
    size: int = 0
    info: ObjectInfo | None = None
    version: str = ""
    index: ShardIndex = NO_SAMPLES
    extra: Any = None
    indexes: frozenset[str] | None = None
    views: bool = False

    def __str__(self) -> str:
        """Its URL without credentials, or its path."""
        return self.url

    @property
    def local(self) -> bool:
        """Whether it is a file."""
        return self.reader.is_local

    @property
    def path(self) -> str:
        """Its path; ``ValueError``: it is an object at a URL."""
        if not self.local:
            raise ValueError(f"only files are read in this format, not {self.url}: copy it, or mount the bucket")
        return self.key

    @property
    def url(self) -> str:
        """Its URL without credentials, or its path."""
        return self.reader.url(self.key)

    @property
    def content(self) -> Content | None:
        """What identifies its contents, once it is open; ``None`` if that is not known."""
        if self.reader.is_local:
            return Content(self.url)
        # Stores of local files and some servers make etags of inode, size and time.
        etag = (self.info and self.info.etag) or "--"
        return Content(f"{self.size} {etag}".encode(), kind="etags") if etag.count("-") < 2 else None

    def beside(self, key: str) -> Shard:
        """Another object of the same folder."""
        return Shard(self.reader, key, indexes=self.indexes)

    async def open(self) -> None:
        """Find out size and version."""
        self.info = info = await self.reader.head(self.key)
        self.size, self.version = info.size, info.etag or str(info.modified)

    async def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges.

        Raises:
            OSError: The shard cannot be read, or has changed since it was opened.
        """
        starts, ends = zip(*ranges, strict=True)
        read = self.reader.read_views if self.views else self.reader.read_ranges
        return await read(self.key, starts, ends, info=self.info)

    def read_now(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges of a file."""
        return read_ranges(self.key, ranges, self.version)


class ShardFinder:
    """Finds the shards of URLs.

    Args:
        store: An obstore store in place of those of the URLs.
        options: Arguments of ``obstore.store.from_url``.
    """

    def __init__(self, store: Any, options: Mapping[str, Any] | None) -> None:
        self._store = store
        self._options = options
        self._readers: dict[str, ObjectReader] = {}

    def shard(self, url: str) -> Shard:
        """Return the shard at one URL."""
        base, key = split_url(check_path(url))
        if base not in self._readers:
            if self._store is not None and self._readers:
                both = sorted(map(redacted, [base, *self._readers]))
                raise ValueError(f"store= is one bucket or host, and the URLs have several: {both}")
            self._readers[base] = ObjectReader(base, store=self._store, options=self._options)
        return Shard(self._readers[base], key)

    async def find(self, urls: Urls) -> list[Shard]:
        """Return all shards, in the order of the URLs; those of a glob are sorted.

        Raises:
            TypeError, ValueError: A URL is not one, or its braces cannot be expanded.
            FileNotFoundError: A glob has no match.
        """
        if isinstance(urls, str | os.PathLike) or not isinstance(urls, Iterable):
            urls = [urls]
        found: list[Shard] = []
        for given in urls:
            url = os.fspath(given) if isinstance(given, str | os.PathLike) else given
            if not isinstance(url, str):
                raise TypeError(f"shards are named by URLs or paths, got {given!r}")
            if url.startswith("pipe:"):
                raise ValueError("a pipe has no random access: name the shards by URLs, e.g. s3://bucket/key")
            for each in expand_braces(url):
                found += await self._expand(each)
        if not found:
            raise ValueError("the list of shards is empty")
        return found

    async def _expand(self, url: str) -> list[Shard]:
        shard = self.shard(url)
        wildcard = _GLOB.search(shard.key)
        if shard.key.endswith(".json") and wildcard is None:
            return await self._listed(shard, url)
        if wildcard is None:
            if shard.local and await asyncio.to_thread(os.path.isdir, shard.key):
                raise IsADirectoryError(f"{shard.key!r} is a folder; {await asyncio.to_thread(_inside, shard.key)}")
            return [shard]
        if url.startswith(("http://", "https://")):
            raise ValueError(f"{shard.url!r}: a web server cannot be listed; name shards with {{000..099}} or a list")
        if shard.local:
            keys = await asyncio.to_thread(_local_matches, shard.key)
        else:
            folder, slash, _ = shard.key[: wildcard.start()].rpartition("/")
            if "/" in shard.key[wildcard.start() :]:
                pages = shard.reader.list(folder + slash)
                keys = [key async for page in pages for key, _ in page if _matches(key, shard.key)]
            else:  # all matches are in one folder, below which there may be many more objects
                _, found = await shard.reader.list_top(folder + slash)
                keys = [key for key, _ in found if _matches(key, shard.key)]
                shard.indexes = frozenset(key for key, _ in found if key.endswith((".idx", SUFFIX)))
        if not keys:
            raise FileNotFoundError(f"no shard matches {shard.url!r}")
        return [shard.beside(key) for key in sorted(keys)]

    async def _listed(self, shard: Shard, url: str) -> list[Shard]:
        """Return the shards in a JSON file of ``wids``; relative ones lie beside the file."""
        listed = parse_json(shard.url, await shard.reader.read(shard.key))
        listed = listed if isinstance(listed, dict) else {}
        entries, base = listed.get("shardlist"), listed.get("base_path") or ""
        if not (isinstance(entries, list) and isinstance(base, str)) or not all(
            isinstance(each, dict) and isinstance(each.get("url"), str) for each in entries
        ):
            raise ValueError(f"{shard.url}: it is no list of shards as widsindex writes it, with the key 'shardlist'")
        folder = url.rpartition("/")[0]
        if base and not shard.local:
            base = self._at(shard, folder, base)
        found = []
        for entry in entries:
            found.append(self.shard(self._at(shard, base or folder, entry["url"])))
            found[-1].samples = entry.get("nsamples")
        return found

    def _at(self, listed_in: Shard, folder: str, name: str) -> str:
        """Where a list names a shard or a folder: a list at a URL, which may be of somebody else, names no files."""
        try:
            is_url = is_remote(name) and bool(split_url(name))
        except ValueError as error:
            raise ValueError(f"{listed_in.url}: {error}") from None
        if not is_url and not listed_in.local:
            check_foreign_name(listed_in.url, name, folder)
        return name if "://" in name or os.path.isabs(name) or not folder else f"{folder.rstrip('/')}/{name}"


def expand_braces(text: str) -> list[str]:
    """``"a-{08..10}.tar"`` and ``"{a,b}.tar"`` as lists; numbers have the width of the first one.

    Raises:
        ValueError: Braces are nested, or contain neither a range nor a list.
    """
    match = _BRACES.search(text)
    if match is None:
        if "{" in text or "}" in text:
            raise ValueError(f"{redacted(text)!r} has a brace without its counterpart")
        return [text]
    head, body, tail = text[: match.start()], match[1], text[match.end() :]
    if "{" in head:
        raise ValueError(f"{redacted(text)!r} has nested braces: write a list of the URLs")
    if numbers := _RANGE.fullmatch(body):
        first, last = int(numbers[1]), int(numbers[2])
        if last < first:
            raise ValueError(f"{redacted(text)!r}: the range {{{body}}} ends before it starts")
        parts = [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]
    elif "," in body:
        parts = body.split(",")
    else:
        raise ValueError(f"{redacted(text)!r}: braces contain a range {{000..099}} or a list {{a,b}}, not {{{body}}}")
    return [f"{head}{part}{rest}" for part in parts for rest in expand_braces(tail)]


def _inside(folder: str) -> str:
    for name, split in (("state.json", ""), ("dataset_dict.json", "['train']")):
        if os.path.exists(os.path.join(folder, name)):  # written by save_to_disk
            return f"pass the dataset: datasets.load_from_disk({folder!r}){split}"
    return f"{folder.rstrip('/')}/* are the files in it"


def _local_matches(path: str) -> list[str]:
    return [path] if os.path.exists(path) else glob.glob(path, recursive=True)


def _matches(key: str, pattern: str) -> bool:
    parts, wanted = key.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def parse_json(name: str, data: bytes | str) -> Any:
    """Return the value in a JSON file.

    Raises:
        ValueError: It is no JSON, or too large.
    """
    check_expanded(name, len(data), 0)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it is no JSON: {error}") from None
