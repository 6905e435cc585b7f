"""Obtains the index of a shard: cached on disk, found beside the shard, or made by one pass over it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from aiofeed.common.cache_folder import cache_path, write_cached, write_whole
from aiofeed.kernel.sources.file_io import open_file
from aiofeed.objects.reader import read_range
from aiofeed.objects.requests import too_short
from aiofeed.shards.index import SUFFIX, ShardIndex
from aiofeed.shards.urls import Shard

ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("aiofeed.sources")

Scan: TypeAlias = Generator[tuple[int, int], bytes, ShardIndex]
"""A pass over a shard: yields the ranges that it needs, in order, is sent their bytes, and returns the index."""

# What the contents of a damaged index raise.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
# A pass over an object reads this many bytes at once, in parallel parts.
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class IndexRules:
    """How the shards of a format are indexed.

    Args:
        kind: The name of the format.
        scan: Makes the pass over a shard of a size that collects the targets of a field.
        foreign: Index files of other programs: functions from a key to the key of the index, and from its contents and
            the size of the shard to an index, or ``None`` if it is of another kind.
        streams: Whether the pass goes over the whole shard, and not just a part of it.
    """

    kind: str
    scan: Callable[[int, Sequence[str]], Scan]
    foreign: Mapping[Callable[[str], str], Callable[[bytes, int], ShardIndex | None]] = field(default_factory=dict)
    streams: bool = True


def _cache_path(shard: Shard, rules: IndexRules, target: Sequence[str]) -> Path | None:
    """The file of an index in the cache folder; ``None`` for a store that has no name, or without such a folder."""
    place = os.path.abspath(shard.key) if shard.reader.is_local else shard.reader.identity
    return cache_path(None if place is None else "\n".join([rules.kind, place, shard.key, *target]), "index")


async def save(
    shard: Shard, index: ShardIndex, rules: IndexRules, target: Sequence[str], path: Path | None = None
) -> None:
    """Write an index file, by default in the cache folder, where a failure is a warning."""
    described = {"url": shard.url, "kind": rules.kind, "size": shard.size, "version": shard.version}
    data = index.to_bytes(**described, target=list(target))
    if path is not None:
        await asyncio.to_thread(write_whole, path, [data])
    elif (path := _cache_path(shard, rules, target)) is not None:
        await asyncio.to_thread(write_cached, path, [data], f"the index of {shard.url} is not saved")


def load(shard: Shard, rules: IndexRules, target: Sequence[str]) -> ShardIndex | None:
    """Return the index of an open shard in the cache folder; ``None`` if there is none."""
    if (path := _cache_path(shard, rules, target)) is None:
        return None
    try:
        index, described = ShardIndex.from_bytes(path.read_bytes())
        return index if (described["size"], described["version"]) == (shard.size, shard.version) else None
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGED) as error:
        log.warning("the cached index %s cannot be read and is made again: %s", path, error)
        return None


async def beside(
    shard: Shard, rules: IndexRules, target: Sequence[str], fits: Callable[[ShardIndex], Awaitable[None]]
) -> ShardIndex | None:
    """Return the index in a file beside a shard, if it is that of the shard.

    A copy of the shard has another etag, so that some samples are read instead to find out: ``fits`` raises
    ``ValueError`` if they are not where the index says.
    """
    names: dict[str, Callable[[bytes, int], ShardIndex | None]] = {shard.key + SUFFIX: partial(_own, target)}
    names.update({name(shard.key): read for name, read in rules.foreign.items()})
    for key, read in names.items():
        if shard.indexes is not None and key not in shard.indexes:
            continue
        try:
            data = await shard.reader.read(key)
        except (FileNotFoundError, PermissionError):  # S3 denies access to a key that does not exist
            continue
        try:
            if (index := read(data, shard.size)) is None:
                continue
            if len(index.ends) and int(index.ends.max()) > shard.size:
                raise ValueError(f"it ends at byte {int(index.ends.max())}, the shard at byte {shard.size}")
            await fits(index)
        except (OSError, *DAMAGED) as error:
            log.warning("%s does not fit its shard, which is indexed anew: %s", shard.beside(key).url, error)
            continue
        return index
    return None


def _own(target: Sequence[str], data: bytes, size: int) -> ShardIndex:
    index, described = ShardIndex.from_bytes(data)
    if described["size"] != size:
        raise ValueError(f"it is the index of {described['size']} bytes, the shard has {size}")
    return index if described["target"] == list(target) else replace(index, labels=None)


async def run_scan(shard: Shard, scan: Scan, block_bytes: int) -> ShardIndex:
    """Run a pass over a shard.

    A file is read where the pass needs it. An object is read in large blocks, because many small requests take longer.
    """
    if shard.local:
        return await asyncio.to_thread(_scan_file, shard.key, scan)
    block, at = b"", 0
    try:
        start, end = next(scan)
        while True:
            end = min(end, shard.size)
            if start < at or end > at + len(block):
                stop = min(max(end, start + block_bytes), shard.size)
                [block], at = await shard.read([(start, stop)]), start
            start, end = scan.send(block[start - at : end - at])
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def _scan_file(path: str, scan: Scan) -> ShardIndex:
    with open(open_file(path), "rb", buffering=0) as file:

        def read(start: int, end: int) -> bytes:
            data = read_range(file, start, end)
            if len(data) < min(end, os.fstat(file.fileno()).st_size) - start:
                raise too_short(path, start, end)
            return data

        return drive(scan, read)


def drive(scan: Generator[tuple[int, int], bytes, ResultT], read: Callable[[int, int], bytes]) -> ResultT:
    """Run a pass over bytes in memory or in a file; return its result."""
    try:
        start, end = next(scan)
        while True:
            start, end = scan.send(read(start, end))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def idx_key(key: str) -> str:
    """Return where DALI's tools put the index of a shard: ``a/x.tar`` has ``a/x.idx``."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}.idx"
