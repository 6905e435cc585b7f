"""Tables of Parquet files, Lance datasets and streaming datasets, from which each batch is read."""

from __future__ import annotations

import asyncio
import glob
import importlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Self

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import Traits
from aiofeed.kernel.core.validation import counted
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.kernel.sources.file_io import Content
from aiofeed.objects.reader import run_all
from aiofeed.shards.arrow import arrow, stored_type
from aiofeed.shards.base import SCAN
from aiofeed.shards.parquet import ParquetRows, as_list, leaves, memory_of
from aiofeed.shards.urls import Shard
from aiofeed.streams.stream import Stream
from aiofeed.tables.columns import (
    Columns,
    GatheredRows,
    NumberColumn,
    ValueColumn,
    empty_column,
    example_of,
    is_encoded,
    list_lengths,
    take_rows,
)
from aiofeed.tables.table import MEMORY_SHARE, GatheredTable, Table, check_columns

log: logging.Logger = logging.getLogger("aiofeed.sources")

# An epoch that reads a table at so many places for each row group needs nearly all of them, in whatever order.
PLACES = 4
# Bytes of a text or list in memory besides its own.
OFFSET_BYTES = 4


class ParquetTable(ParquetRows, GatheredTable):
    """Rows of Parquet files, read by row groups as ``ParquetRows`` reads them, or whole by the first epoch."""

    # The bytes of the columns that may be in memory.
    _room: int = 0
    # Whether they are there in this epoch.
    _loads: bool = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        Table.__init__(self, *arguments, **options)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        ParquetRows.__init__(self, table, columns, data=self.data, target=target, **storage)
        self.name: str = self._shards[0].url
        if self._asked:
            self._check_room(self._decoded_bytes())

    def _decoded_bytes(self, most: float = math.inf) -> int:
        """Return the bytes of the columns in memory, as far as the files say; of more than ``most`` some of them."""
        columns = self._chosen_columns()
        numbers = [column for column in columns.values() if column.row_shape == () and isinstance(column, NumberColumn)]
        nbytes = len(self) * sum(column.row_bytes for column in numbers)
        others = [name for name, column in columns.items() if column not in numbers]
        for shard in self._shards if others else ():
            metadata = shard.extra.metadata
            chosen = leaves(metadata, others)
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                if nbytes > most:
                    return nbytes
                chunks = [group.column(leaf) for leaf in chosen]
                nbytes += sum(memory_of(chunk) + OFFSET_BYTES * group.num_rows for chunk in chunks)
        return nbytes

    def for_memory(self, nbytes: int, /) -> Self:
        """Return the table that may be in memory, if it fits, or if another feeder has it there."""
        columns = [each for each in self._chosen_columns().values() if isinstance(each, ValueColumn)]
        # A file that a URL names is an error of its row group.
        if any(is_encoded(each.column.type) for each in columns) and not all(shard.local for shard in self._shards):
            return self
        room = machine.rank_memory() // MEMORY_SHARE if self._asked else nbytes
        found = copy(self)
        found._room = room if self._asked or self._decoded_bytes(room) < room else 0
        found._loads = bool(self._asked)
        return found

    def load(self, places: int, /) -> bool:
        """Read all row groups, if an epoch needs them. Where an event loop runs, which must not wait, ``open`` does."""
        kept, groups = self._tables, len(self.shard_starts) - 1
        needed = self._asked or places >= min(PLACES * groups, len(self))
        self._loads = self._asked is not False and (kept.complete or bool(self._room and needed))
        if self._loads and not kept.complete and asyncio._get_running_loop() is None:
            run_blocking(self.open)
        if kept.complete and not self.answers_at_once:
            self._loads = False  # of row groups, samples have their errors
        return self.answers_at_once

    async def open(self) -> None:
        """Read all row groups into memory, unless some of them cannot be read: their samples have the errors."""
        kept = self._tables
        if not self._loads or kept.complete:
            return
        groups = [(shard, group) for shard in self._shards for group in range(shard.extra.metadata.num_row_groups)]
        # While a row group is decoded it takes up to twice its memory, and the table must not.
        threads = max(min(machine.rank_cpus(), SCAN, len(groups) // 2), 1)
        loop, turn, pool = asyncio.get_running_loop(), asyncio.Semaphore(threads + 1), ThreadPool("load", threads)
        nbytes, most = 0, min(2 * self._room, machine.rank_memory() // MEMORY_SHARE)

        async def read_group(shard: Shard, group: int) -> Any:
            nonlocal nbytes
            async with turn:
                file = None if shard.local else await self._parts_of(shard, group, shard.extra.leaves)
                if nbytes <= most:
                    table = await loop.run_in_executor(pool, self._decode_valid, shard, group, file)
                    nbytes += table.nbytes
                    return table

        try:
            found = await run_all([read_group(*each) for each in groups])
            if nbytes <= most:
                kept.columns = Columns.of(arrow().concat_tables(found))
        except Exception as error:  # noqa: BLE001 - damaged files, or such that differ, may raise any
            log.debug("%s: it is read by row groups: %s", self.name, error)
        finally:
            pool.stop()
            arrow().default_memory_pool().release_unused()
        kept.complete = True
        if nbytes > most:
            self._check_room(nbytes)
            log.info("%s: the row groups take more than %s in memory and are not kept", self.name, format_bytes(most))

    def _decode_valid(self, shard: Shard, group: int, file: Any) -> Any:
        self._chunks_of(shard, group, shard.extra.leaves)  # raises for a group that would expand too much
        table = self._decode_rows(shard, group, shard.extra.leaves, file)
        table.validate(full=True)
        return table

    @property
    def _held(self) -> Columns:  # type: ignore[override]
        return self._tables.columns  # type: ignore[no-any-return]

    @property
    def in_memory(self) -> bool:
        """Whether batches may be gathered from memory."""
        return self._whole and self._asked is not False

    @property
    def answers_at_once(self) -> bool:
        """Whether samples are in memory."""
        found = self._tables.columns if self._loads else None
        return found is not None and not (self._whole and found.has_values)

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        """Whether row groups are read before their batches begin."""
        return not self._loads

    def read_now(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples that are in memory."""
        return self._samples_of(self._held, np.asarray(indices, np.int64))

    def _path(self, fields: Any, name: str) -> list[str] | None:
        return [name] if name in fields.names else None  # a dot in the name of a column parts no fields

    def _value(self, column: Any, row: int) -> Any:
        return super()._value(column, row) if isinstance(column, np.ndarray) else ValueColumn(column, "").value(row)

    def __repr__(self) -> str:
        return f"Table({counted(len(self), 'row')} in {counted(len(self._shards), 'file')})"

    @property
    def new_gathered(self) -> Callable[..., GatheredRows] | None:
        """Makes the rows of a batch; ``None`` if samples are rows for ``decode=`` or ``collate_fn=``."""
        names, gathers = list(self._problems()), self._whole and not self._loads
        return (lambda indices, memory, _: GatheredRows(names, len(indices), memory)) if gathers else None

    @cached_property
    def gathered_bytes(self) -> float:
        """Bytes of a row in ``GatheredRows``, as far as the files say."""
        first = next(shard.extra for shard in self._shards if shard.extra.first[-1])
        groups = map(first.metadata.row_group, range(first.metadata.num_row_groups))
        nbytes: int = sum(memory_of(group.column(leaf)) for group in groups for leaf in first.leaves)
        return max(nbytes / int(first.first[-1]), 1.0)

    async def gather_ahead(self, indices: Any, targets: Sequence[tuple[GatheredRows, Any]], run: Any, _: Any) -> None:
        """Write rows of one row group into their batches."""
        shard, row = self._find(int(indices[0]))
        group = int(np.searchsorted(shard.extra.first, row, side="right")) - 1
        rows = indices - (indices[0] - row) - shard.extra.first[group]
        # A file is read in the thread.
        file = None if shard.local else await self._parts_of(shard, group, shard.extra.leaves)
        await run(self._spread, shard, group, file, rows, targets)

    def _spread(self, shard: Shard, group: int, file: Any, rows: Any, targets: Any) -> int:
        started, cpu_started, leaves = time.perf_counter(), time.thread_time(), shard.extra.leaves
        ranges, table = self._chunks_of(shard, group, leaves), self._decode_rows(shard, group, leaves, file)
        taken = Columns.of(table).blocks(rows)  # raises if there are null values; of which rows, `read_many` finds out
        nbytes, at = sum(end - start for start, end in ranges), 0
        seconds, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started
        for gathered, places in targets:
            share = len(places) / len(rows)
            blocks = [(names, block[:, at : at + len(places)]) for names, block in taken]
            gathered.put(places, blocks, share * nbytes, share * seconds, share * cpu_s)
            at += len(places)
        return len(rows)

    def _take(self, shard: Shard, table: Any, first: int, rows: Sequence[int]) -> list[Any]:
        table = take_rows(table, [row - first for row in rows])
        for name, column in zip(table.column_names, table.columns, strict=True):
            files = column if not shard.local and is_encoded(column.type) else ()
            if any(each.is_valid and not each["bytes"].is_valid and each["path"].is_valid for each in files):
                raise ValueError(f"{shard.url}: column {name!r} names a file, and a file at a URL may name none")
        return self._samples_read(table)

    def _chosen_columns(self) -> Mapping[str, NumberColumn | ValueColumn]:
        found, schemas = {}, [shard.extra.metadata.schema.to_arrow_schema() for shard in self._shards]
        for name in as_list(self.data) or self._columns or schemas[0].names:
            kind = schemas[0].field(name).type
            for shard, schema in zip(self._shards, schemas, strict=True):
                if stored_type(schema.field(name).type) != stored_type(kind):
                    raise ValueError(
                        f"{shard.url}: column {name!r} has the type {schema.field(name).type}, and {kind} in "
                        f"{self._shards[0].url}"
                    )
            found[name] = empty_column(kind)
        return found

    def _list_lengths(self, name: str) -> Any:
        """Read the column: the files say nothing about its lists without it."""

        async def read() -> list[Any]:
            turn = asyncio.Semaphore(SCAN)

            async def read_group(shard: Shard, group: int) -> Any:
                async with turn:
                    table = await self._read_rows(shard, group, leaves(shard.extra.metadata, [name]))
                return list_lengths(table.column(0))

            files = [(shard, shard.extra.metadata.num_row_groups) for shard in self._shards]
            return await run_all([read_group(shard, group) for shard, groups in files for group in range(groups)])

        found = run_blocking(read)
        return None if any(each is None for each in found) else np.concatenate(found)


class LanceTable(Table):
    """Rows of a Lance dataset; a read is one ``take``."""

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        if self._asked:
            raise ValueError("Table(in_memory=True): for a Lance dataset in memory pass Table(dataset.to_table())")
        if isinstance(table, str | os.PathLike):
            try:
                table = importlib.import_module("lance").dataset(os.fspath(table), **(storage["options"] or {}))
            except ImportError:
                raise ImportError(f"{table}: Lance datasets are read by pylance: pip install pylance") from None
        self._dataset, names = table, table.schema.names
        self.name: str = table.uri
        self._chosen = columns or (names if self.data is None else [self.data])
        check_columns(self.name, names, [*self._chosen, *as_list(target)])
        self._length = int(table.count_rows())
        if not self._length:
            raise ValueError(f"{self.name}: the table has no rows")
        # `target` is asked for one sample at a time.
        read = Columns.of(table.to_table(columns=as_list(target))) if target is not None else Columns({})
        self._set_targets(read, target)

    def _chosen_columns(self) -> Mapping[str, NumberColumn | ValueColumn]:
        return {name: empty_column(self._dataset.schema.field(name).type) for name in self._chosen}

    def _list_lengths(self, name: str) -> Any:
        return list_lengths(self._dataset.to_table(columns=[name]).column(0))

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Read rows."""
        return await asyncio.to_thread(self._take, list(indices))

    def _take(self, indices: list[int]) -> list[Any]:
        return self._samples_read(self._dataset.take(indices, columns=self._chosen))

    def content_parts(self) -> list[Content]:
        """Return the files of a dataset on disk."""
        return list(map(Content, sorted(glob.glob(f"{glob.escape(self.name)}/data/**/*.lance", recursive=True))))

    def fingerprint(self) -> str:
        """Name, version, number of rows and columns of the dataset."""
        return f"{os.path.basename(self.name)} {self._dataset.version} {len(self)} {self._chosen}"


class StreamTable(Stream, Table):  # type: ignore[misc]
    """Rows of a streaming dataset of Hugging Face, read in its order; its ``state_dict`` is a part of the feeder's."""

    traits: Traits = Traits(decode="optional", rows=True, indexed=False)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        Table.__init__(self, *arguments, **options)

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        names = columns or [*as_list(self.data), *as_list(target)]
        if self._asked:
            raise ValueError("Table(in_memory=True): a streaming dataset is read in its order; load it as a Dataset")
        self._target_columns, self._schema = target, table.features and table.features.arrow_schema
        if any(value is not None for value in storage.values()):
            raise ValueError("Table: store= and options= are for URLs of Parquet files")
        if (size := _shuffle_buffer(table._ex_iterable)) > 1:
            raise ValueError(
                f"Table: the state of a dataset has not the {size} rows of its shuffle buffer, so a resume would lose "
                f"them: dataset.shuffle(buffer_size=1) shuffles shards only, and aiofeed.Stream(dataset, "
                f"shuffle_buffer={size}) resumes exactly"
            )
        if table._distributed is not None:
            raise ValueError("Table: each rank takes its rows of all: pass the dataset before split_dataset_by_node")
        if self._schema is not None:
            check_columns("Table", self._schema.names, names)
        Stream.__init__(self, (table.select_columns(names) if names else table).with_format("arrow"))
        self.name = "Table"
        if target is not None:
            self.target: Callable[[int], Any] = self._target

    def __repr__(self) -> str:
        return f"Table({', '.join(self._problems()) or 'rows'} of a stream)"

    def _chosen_columns(self) -> Mapping[str, NumberColumn | ValueColumn]:
        names = getattr(self._make, "column_names", None) or ()
        return {} if self._schema is None else {name: empty_column(self._schema.field(name).type) for name in names}

    def _target(self, index: Any, /) -> Any:
        [row] = Columns.of(index.item.select(as_list(self._target_columns))).rows(np.arange(1))
        return row[self._target_columns] if isinstance(self._target_columns, str) else row

    def new_order(self, schedule: Any, shard: Any, plan: Any) -> Any:
        """Return the order of its rows; a plan that measures a whole row is refused."""
        if plan is not None and self._schema is not None and not callable(plan.length):
            row = {name: example_of(self._schema.field(name).type) for name in self._problems()}
            plan._length_in(row if self.data is None else row[self.data], 0)
        return super().new_order(schedule, shard, plan)

    def _measured(self, item: Any) -> Any:
        """Return the sample of a row; the row itself is a table.

        Raises:
            ValueError: It is null.
        """
        [sample] = self._samples_read(item)
        if isinstance(sample, Exception):
            raise sample
        return sample

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return the rows of ``ItemNumber``s."""
        return [self._samples_read(row)[0] for row in await Stream.read_many(self, indices)]


def _shuffle_buffer(examples: Any) -> int:
    """Return the size of the largest shuffle buffer within the iterables of a dataset."""
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    own = examples.buffer_size if type(examples).__name__ == "BufferShuffledExamplesIterable" else 0
    return max([own, *(_shuffle_buffer(each) for each in inner if each is not None)])
