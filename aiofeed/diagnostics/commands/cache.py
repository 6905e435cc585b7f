"""``aiofeed cache``: describes and verifies the file of an ``EncodedCache``."""

from __future__ import annotations

import sqlite3
import sys

from aiofeed.cache.encoded.database import CacheDatabase
from aiofeed.core.errors import CacheError
from aiofeed.core.formatting import format_bytes


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
