"""``aiofeed ls``: what is at a URL: the objects of a folder, the samples of shards, the rows of a manifest."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from aiofeed.core.errors import FeedError
from aiofeed.core.formatting import format_bytes
from aiofeed.sources.objects.listing import read_listing, run_blocking
from aiofeed.sources.objects.manifest import TableFile, format_of
from aiofeed.sources.objects.reader import ObjectReader, run_all
from aiofeed.sources.objects.urls import redacted, split_url
from aiofeed.sources.shards import indexing
from aiofeed.sources.shards.base import OPEN, SCAN
from aiofeed.sources.shards.index import ShardIndex
from aiofeed.sources.shards.parquet import ParquetRows, summary_of
from aiofeed.sources.shards.tar import TAR_RULES
from aiofeed.sources.shards.tfrecord import TFRECORD_RULES
from aiofeed.sources.shards.urls import Shard, ShardFinder
from aiofeed.sources.shards.zip import ZIP_RULES

_RULES = {"tar": TAR_RULES, "zip": ZIP_RULES, "tfrecord": TFRECORD_RULES}
# The keys of a folder, and the kinds of its extensions, that are shown.
_SHOWN = 5
_BYTES = ("size", "smallest", "median", "largest")


def list_urls(urls: Sequence[str], *, as_json: bool) -> int:
    """Print a table for each folder, object or manifest, and one for consecutive shards of one format.

    Args:
        urls: URLs or paths; those of shards with braces or globs.
        as_json: Whether to print a JSON object per line in place of tables.

    Returns:
        The exit code: 1 if something cannot be read, for which a line is printed.
    """
    failed, gap = False, ""
    for (kind, _), consecutive in groupby(urls, _group):
        group = list(consecutive)
        title = redacted(group[0]) + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        try:
            found = {"url": title, "kind": kind, **_describe(kind, group)}
        except (OSError, ValueError, TypeError, ImportError, FeedError) as error:
            failed = True
            print(f"{title}: {' '.join(redacted(str(error)).split())}", file=sys.stderr)
        else:
            print(json.dumps(found) if as_json else gap + _table(found))
            gap = "\n"
    return int(failed)


def _group(url: str) -> tuple[str, str | None]:
    """Equal for URLs that make one table."""
    kind = _kind(url)
    return kind, None if kind in (*_RULES, "parquet") else url


def _kind(url: str) -> str:
    """The format of shards or of a manifest, by the name; "folder" otherwise."""
    key = url.partition("?")[0] if url.startswith("http") else url
    name = key.rpartition("/")[2].lower()
    suffix = os.path.splitext(name)[1]
    if not name or os.path.isdir(url):
        return "folder"
    if name == "index.json":
        return "mds"
    if "tfrecord" in name:
        return "tfrecord"
    return suffix[1:] if suffix[1:] in _RULES else format_of(name)[0] or "folder"


def _describe(kind: str, urls: Sequence[str]) -> dict[str, Any]:
    if kind in _RULES:
        return run_blocking(lambda: _archives(kind, urls))
    if kind == "parquet":
        return summary_of(ParquetRows(urls, columns=[]))  # files may differ in their columns
    [url] = urls
    if kind == "folder":
        return _folder(url)
    if kind == "mds":
        return run_blocking(lambda: _mosaic(url))
    file = TableFile(url, None, None, None)
    names = file.names()
    return {"rows": len(file.read(names[:1], {})) if names else 0, "columns": names}


def _folder(url: str) -> dict[str, Any]:
    root, key = split_url(url)
    reader = ObjectReader(url)
    # A web server cannot be listed.
    is_object = os.path.isfile(key) if reader.is_local else root.startswith("http")
    if not is_object:
        listing = run_blocking(lambda: read_listing(reader))
        sizes, keys = listing.sizes, listing.keys
        is_object = not len(sizes) and not reader.is_local and key != "" and not key.endswith("/")
    if is_object:
        size = run_blocking(lambda: ObjectReader(root).head(key)).size
        return {"kind": "object", "size": size}
    known = Counter(os.path.splitext(each)[1].lower() or "none" for each in keys)
    found: dict[str, Any] = {"objects": len(sizes), "size": int(sizes.sum())}
    if len(sizes):
        found |= {"smallest": int(sizes.min()), "median": int(np.median(sizes)), "largest": int(sizes.max())}
    return {**found, "extensions": dict(known.most_common()), "keys": list(keys[:_SHOWN])}


async def _archives(kind: str, urls: Sequence[str]) -> dict[str, Any]:
    """The samples of shards; of objects without an index, which would have to be read, none."""
    rules, shards = _RULES[kind], await ShardFinder(None, None).find(urls)
    turn, scans = asyncio.Semaphore(OPEN), asyncio.Semaphore(SCAN)

    async def fits(index: ShardIndex) -> None:
        """Read no samples to find out whether an index beside a shard is that of the shard."""

    async def index_of(shard: Shard) -> ShardIndex | None:
        async with turn:
            await shard.open()
            try:
                if shard.local or not rules.streams:
                    return await indexing.obtain(shard, rules, (), fits, scans)
                return await indexing.find(shard, rules, (), fits)
            except ValueError as error:
                raise ValueError(f"{shard.url}: {error}") from None

    indexes = await run_all([index_of(shard) for shard in shards])
    known = [index for index in indexes if index is not None]
    found: dict[str, Any] = {"shards": len(shards), "size": sum(shard.size for shard in shards)}
    found["samples"] = sum(map(len, known)) if len(known) == len(shards) else None
    return {**found, "indexed": len(known), "fields": sorted({name for index in known for name in index.names})}


async def _mosaic(url: str) -> dict[str, Any]:
    listed = ShardFinder(None, None).shard(url)
    try:
        shards = json.loads(await listed.reader.read(listed.key))["shards"]
        found = {"shards": len(shards), "size": sum(shard["raw_data"]["bytes"] for shard in shards)}
        found["samples"] = sum(shard["samples"] for shard in shards)
        return {**found, "fields": sorted({name for shard in shards for name in shard["column_names"]})}
    except (LookupError, TypeError, ValueError):
        raise ValueError("it is no index of MDS shards") from None


def _table(found: dict[str, Any]) -> str:
    """One line for each fact."""
    rows = [(name, _text(name, value)) for name, value in found.items() if name not in ("url", "kind")]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{found['url']} ({found['kind']})", *[f"{name:<{width}}  {text}" for name, text in rows]])


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        shown = [f"{key} {count:,}" for key, count in list(value.items())[:_SHOWN]]
        return ", ".join([*shown, *(["..."] if len(value) > _SHOWN else [])]) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if value is None:
        return "unknown; `aiofeed index` reads the shards and writes their indexes"
    return format_bytes(value) if name in _BYTES else f"{value:,}"
