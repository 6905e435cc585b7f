"""Tables of CSV and JSON Lines files, which are parsed into memory, or read in blocks if they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import Any

from aiofeed.common.blocking import run_blocking
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.runtime import machine
from aiofeed.objects.reader import run_all
from aiofeed.shards.arrow import arrow
from aiofeed.shards.urls import ShardFinder
from aiofeed.tables.blocks import BlockTable, named_files
from aiofeed.tables.manifest import TableFile
from aiofeed.tables.memory import MemoryTable
from aiofeed.tables.table import MEMORY_SHARE, PACKED

# The bytes of a file that is parsed, and its columns: in all twice those of the file.
PARSED_SHARE = 2


class ParsedTable(MemoryTable):
    """Rows of CSV and JSON Lines files."""

    def __new__(cls, table: Any = None, *_: Any, in_memory: Any = None, **storage: Any) -> Any:
        """Make a table in memory, or one of blocks if the files do not fit."""
        if table is not None:  # of a copy in another process
            finder = ShardFinder(storage.get("store"), storage.get("options"))
            files = list(map(finder.shard, run_blocking(partial(named_files, finder, table))))
            with suppress(OSError):  # to read it says why, or a server does not tell sizes
                run_blocking(lambda: run_all([file.open() for file in files]))
            nbytes, room = PARSED_SHARE * sum(file.size for file in files), machine.rank_memory() // MEMORY_SHARE
            packed = any(PurePath(file.key).suffix.lower() in PACKED for file in files)
            in_blocks = in_memory is False or nbytes > room
            if in_blocks and (in_memory or packed):
                raise ValueError(
                    f"{files[0].url}: to parse it needs {format_bytes(nbytes)}, half of this rank's free memory is "
                    f"{format_bytes(room)}, and in_memory={in_memory}. {_CONVERT if packed else 'Leave in_memory= out'}"
                )
            if in_blocks:
                return object.__new__(BlockTable)
        return object.__new__(cls)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        self._storage = storage
        super()._open(table, columns, target)

    def _opened(self, paths: Sequence[Any]) -> tuple[list[Any], Any]:
        store, options = self._storage["store"], self._storage["options"]
        names = run_blocking(partial(named_files, ShardFinder(store, options), paths))
        files = [TableFile(name, None, store, options) for name in names]
        tables = [file.read(None, {}) for file in files]
        try:
            return [], tables[0] if len(tables) == 1 else arrow().concat_tables(tables, promote_options="permissive")
        except (arrow().ArrowException, KeyError) as error:
            raise ValueError(f"{names[0]} and other files differ in their columns: {error}") from None


_CONVERT = (
    "Compressed files are not read in blocks: decompress it, or write Parquet by `import pyarrow.dataset as ds` and "
    '`ds.write_dataset(ds.dataset("train.csv.gz", format="csv"), "folder", format="parquet")`, format="json" for JSON '
    'Lines; then Table("folder/*.parquet")'
)
