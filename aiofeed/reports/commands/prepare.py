"""Write indexes of shards: ``aiofeed index``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from aiofeed.common.blocking import run_blocking
from aiofeed.kernel.core.validation import counted
from aiofeed.shards import indexing
from aiofeed.shards.index import SUFFIX
from aiofeed.shards.tar import TAR_RULES
from aiofeed.shards.tfrecord import TFRECORD_RULES
from aiofeed.shards.urls import Shard, ShardFinder

# Shards that are read at the same time.
_SHARDS = 4


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
