"""``ArrayRecordShards``: ArrayRecord files, which Grain and TensorFlow Datasets use."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import explain_arguments
from aiofeed.shards.base import Shards
from aiofeed.shards.index import read_by
from aiofeed.shards.urls import Shard, Urls

# The process that reads. In a fork of it threads that read would end the process, also with new readers.
_pid = 0


def _read(records: Any, number: int) -> Any:
    global _pid
    if _pid not in (0, pid := os.getpid()):
        raise FeedError(
            "this process is a fork of one that has opened ArrayRecord files, and a read would end it: start processes "
            "with the method 'spawn', or open the files for the first time in the forked process"
        )
    _pid = pid
    return records[number]


@public
@explain_arguments()
class ArrayRecordShards(Shards):
    """Records in ArrayRecord files, as Grain reads them; a sample is the bytes of one record.

    Example:
        ```python
        import array_record.python.array_record_module as array_record

        import aiofeed

        writer = array_record.ArrayRecordWriter("train-0.array_record", "group_size:1")
        for number in range(8):
            writer.write(bytes([number]))
        writer.close()
        shards = aiofeed.ArrayRecordShards("train-*.array_record")
        feeder = aiofeed.Feeder(shards, decode=ord, batch_size=4)
        ```

    Read by ``pip install "aiofeed[array-record]"``, from several threads. Files written with ``group_size:1`` are read
    record by record; of others, each record costs reading its group.

    Args:
        paths: Paths of files: a list, or one with braces or a glob, such as ``"train-*.array_record"``.

    Raises:
        ImportError: array-record is not installed.
        FileNotFoundError: A file does not exist.
        ValueError: A file is truncated, damaged or no ArrayRecord file, or is a URL.
    """

    def __init__(self, paths: Urls) -> None:
        super().__init__(paths)

    async def _index(self, shard: Shard) -> None:
        _read([None], 0)
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource

            records = await asyncio.to_thread(ArrayRecordDataSource, shard.path)
        except ImportError as error:
            raise ImportError('ArrayRecordShards needs array-record: pip install "aiofeed[array-record]"') from error
        except RuntimeError as error:
            raise ValueError(f"it is truncated, damaged or no ArrayRecord file: {error}") from error
        shard.index = read_by(partial(_read, records), len(records))
