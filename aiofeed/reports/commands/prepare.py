"""``aiofeed index`` writes indexes of shards; ``aiofeed cache`` fills, describes and verifies an ``EncodedCache``."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiofeed
from aiofeed.cache.encoded.database import CacheDatabase, EncodedCache
from aiofeed.core.errors import CacheError, FeedError
from aiofeed.core.formatting import format_bytes
from aiofeed.core.validation import counted
from aiofeed.reports.commands.data_set import nothing, open_data_set, quoted
from aiofeed.sources.objects.listing import run_blocking
from aiofeed.sources.shards import indexing
from aiofeed.sources.shards.index import SUFFIX
from aiofeed.sources.shards.tar import TAR_RULES
from aiofeed.sources.shards.tfrecord import TFRECORD_RULES
from aiofeed.sources.shards.urls import Shard, ShardFinder

# Shards that are read at the same time.
_SHARDS = 4
# The cache stores samples in the background and drops those that the disk is too slow for: another pass reads them.
_PASSES = 5


# --- index


def write_indexes(urls: Sequence[str], *, target: str | None, output: str | None) -> int:
    """Make a pass over each shard, write its index and print a line; returns the exit code.

    Args:
        urls: URLs or paths, with braces or globs; names with "tfrecord" are TFRecord files, others tar files.
        target: The field of targets, whose values the indexes then contain.
        output: The folder of the indexes. Default: beside files; the cache folder for objects.
    """
    fields = tuple(target.split(";")) if target else ()
    return run_blocking(lambda: _write_all(urls, fields, output))


async def _write_all(urls: Sequence[str], target: Sequence[str], output: str | None) -> int:
    turn, samples, failed = asyncio.Semaphore(_SHARDS), 0, 0

    async def write_one(shard: Shard) -> None:
        nonlocal samples, failed
        rules = TFRECORD_RULES if "tfrecord" in shard.key.rpartition("/")[2] else TAR_RULES
        path = Path(shard.key + SUFFIX) if shard.local else None
        if output is not None:
            path = Path(output, Path(shard.key).name + SUFFIX)
        try:
            async with turn:
                await shard.open()
                index = await indexing.run_scan(shard, rules.scan(shard.size, target), indexing.BLOCK_BYTES)
                await indexing.save(shard, index, rules, target, path)
        except (OSError, ValueError) as error:
            failed += 1
            print(f"{shard.url}: {error}", file=sys.stderr)
        else:
            samples += len(index)
            print(f"{path or shard.url}: {counted(len(index), 'sample')}", flush=True)

    try:
        shards = await ShardFinder(None, None).find(urls)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    await asyncio.gather(*[write_one(shard) for shard in shards])
    lost = f", {counted(failed, 'shard')} failed" if failed else ""
    print(f"{counted(samples, 'sample')} in {counted(len(shards) - failed, 'shard')}{lost}")
    return 1 if failed else 0


# --- cache


def show_cache(path: str, *, verify: bool, repair: bool = False) -> int:
    """Print the number of entries, their bytes, and the budget or the damaged entries; returns the exit code.

    Args:
        path: Path of the file.
        verify: Verify all checksums. The exit code is 1 if one is wrong.
        repair: Delete damaged entries.
    """
    try:
        database = CacheDatabase(path)
        try:
            damaged = database.verify(repair=repair) if verify else 0
            entries, (total, max_bytes) = database.count(), database.budget()
        finally:
            database.close()
    except (CacheError, sqlite3.Error) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    found = f"{path}: {entries} entries, {format_bytes(total)}"
    if not verify:
        print(f"{found} of {format_bytes(max_bytes)}")
    else:
        print(f"{found}, {damaged} damaged" + (", deleted" if damaged and repair else ""))
    return 1 if damaged else 0


def build_cache(path: str, data: Sequence[str], gigabytes: float | None) -> int:
    """Read a data set once and store its encoded samples; returns the exit code.

    Args:
        path: Path of the cache's file.
        data: A folder of images, a manifest, or shards: paths or URLs, with braces or globs.
        gigabytes: The budget in units of 2**30 bytes. Default: half of the disk's free space.
    """
    try:
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
        cache = EncodedCache(path, free // 2 if gigabytes is None else int(gigabytes * 2**30))
        data_set = open_data_set(data)
        failed = _store(data_set.source, cache)
    except KeyboardInterrupt:
        print("Stopped. Run it again to continue.", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError, ImportError, RuntimeError, FeedError) as error:
        print(f"aiofeed cache build: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    show_cache(path, verify=False)
    if failed:
        print(f"{failed} of {len(data_set.source)} samples could not be read", file=sys.stderr)
    used = f"aiofeed.EncodedCache({quoted(path)}, {cache.max_bytes})"
    print(f"Use it as: aiofeed.Feeder({data_set.code}, ..., cache={used})")
    return 1 if failed else 0


def _store(source: Any, cache: EncodedCache) -> int:
    """Read all samples that the cache lacks; returns the number of those that cannot be read."""
    misses, failed = len(source) + 1, 0
    for _ in range(_PASSES):
        with aiofeed.Feeder(
            source, decode=nothing, batch_size=64, cache=cache, on_error=aiofeed.FailurePolicy("skip", max_failures=1.0)
        ) as feeder:
            for _batch in feeder.progress("cache"):
                pass
            found = feeder.statistics()
        before, misses, failed = misses, found.storage.cache_misses if found.storage else 0, found.failures
        if misses == failed or misses >= before:  # all are stored, or the cache is full
            break
    return failed
