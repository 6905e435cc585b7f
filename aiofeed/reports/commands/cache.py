"""``aiofeed cache``: fills, describes and verifies the file of an ``EncodedCache``."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

import aiofeed
from aiofeed.cache.encoded.database import CacheDatabase, EncodedCache
from aiofeed.core.errors import CacheError, FeedError
from aiofeed.core.formatting import format_bytes
from aiofeed.reports.commands.data_set import nothing, open_data_set, quoted

# The cache stores samples in the background and drops those that the disk is too slow for: another pass reads them.
_PASSES = 5


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
