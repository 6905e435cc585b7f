"""Tables of CSV and JSON Lines files, which are parsed into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiofeed.common.blocking import run_blocking
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.runtime import machine
from aiofeed.objects.urls import split_url
from aiofeed.shards.arrow import arrow
from aiofeed.shards.urls import ShardFinder
from aiofeed.tables.manifest import TableFile
from aiofeed.tables.memory import MemoryTable
from aiofeed.tables.table import MEMORY_SHARE

# The bytes of a file that is parsed, and its columns: in all twice those of the file.
PARSED_SHARE = 2


class ParsedTable(MemoryTable):
    """Rows of CSV and JSON Lines files."""

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        if self._asked is False:
            raise ValueError(f"Table(in_memory=False): CSV and JSON Lines are parsed into memory. {_CONVERT}")
        self._storage = storage
        super()._open(table, columns, target)

    def _opened(self, paths: Sequence[Any]) -> tuple[list[Any], Any]:
        store, options = self._storage["store"], self._storage["options"]
        names: list[str] = []
        for path in map(os.fspath, paths):
            is_pattern = any(mark in path for mark in "*?[{") and not os.path.exists(path)
            shards = run_blocking(partial(ShardFinder(store, options).find, path)) if is_pattern else ()
            names += [shard.key if shard.local else shard.url for shard in shards] if is_pattern else [path]
        local = [name for name in names if not split_url(name)[0] and os.path.exists(name)]
        nbytes, room = PARSED_SHARE * sum(map(os.path.getsize, local)), machine.rank_memory() // MEMORY_SHARE
        if nbytes > room:
            raise ValueError(
                f"{names[0]}: to parse it needs {format_bytes(nbytes)}, and half of the free memory of this rank is "
                f"{format_bytes(room)}. {_CONVERT}"
            )
        files = [TableFile(name, None, store, options) for name in names]
        tables = [file.read(None, {}) for file in files]
        try:
            return [], tables[0] if len(tables) == 1 else arrow().concat_tables(tables, promote_options="permissive")
        except (arrow().ArrowException, KeyError) as error:
            raise ValueError(f"{names[0]} and other files differ in their columns: {error}") from None


_CONVERT = (
    "Parquet is read by parts; it is written by two lines: `import pyarrow.dataset as ds` and `ds.write_dataset(ds."
    'dataset("train.csv", format="csv"), "folder", format="parquet")`, format="json" for JSON Lines; then '
    'Table("folder/*.parquet")'
)
