"""``LitDataShards``: chunks that ``litdata.optimize`` has written."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import torch

from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.core.types import Traits, public
from aiofeed.kernel.core.validation import check_positive_int, explain_arguments
from aiofeed.shards.base import Shards, reason_of
from aiofeed.shards.index import read_by
from aiofeed.shards.indexing import DAMAGED
from aiofeed.shards.urls import Shard, ShardFinder, parse_json

# LitData's tensors and bytes are views of a mapped chunk: to write into such a tensor would end the process.
_COPIES: dict[type, Any] = {torch.Tensor: torch.clone, memoryview: bytes}


class _Chunks(threading.local):
    """LitData's reader of a folder, made anew in each thread: it keeps the chunk that it reads."""

    def __init__(self, folder: str, block: int | None) -> None:
        try:
            import litdata
        except ImportError as error:
            raise ImportError('LitDataShards needs litdata: pip install "aiofeed[litdata]"') from error
        loader = block and litdata.TokensLoader(block)
        # 0: no others are decoded with a sample, which may be the only one of its chunk in this thread. 16: the chunks
        # that stay mapped, as many as shuffle="window" mixes.
        self._reader = litdata.StreamingDataset(folder, item_loader=loader, batch_decode=0, max_pre_download=16)
        self._given, self._place = (folder, block), litdata.streaming.sampler.ChunkedIndex

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given

    def read(self, chunk: int, first: int, sample: int) -> Any:
        """Return a sample of a chunk, the first of which has the index ``first``."""
        found = self._reader[self._place(index=first + sample, chunk_index=chunk)]
        return map_leaves(lambda leaf: _COPIES.get(type(leaf), lambda same: same)(leaf), found)


@public
@explain_arguments()
class LitDataShards(Shards):
    """Samples that ``litdata.optimize`` has written to a folder, as LitData decodes them; ``decode=`` may change them.

    Example:
        ```python
        import aiofeed

        # litdata.optimize(hex, list(range(8)), "optimized", chunk_bytes="64MB")
        shards = aiofeed.LitDataShards("optimized")
        feeder = aiofeed.Feeder(shards, batch_size=4, shuffle=True)
        for texts in feeder:
            print(texts)
        ```

    Read by ``pip install "aiofeed[litdata]"``; each thread has a reader of its own, which keeps a few chunks open:
    ``shuffle="window"`` suits many chunks.

    Args:
        folder: A folder with an ``index.json``, or this file.
        block: For chunks written with ``TokensLoader``: the tokens of a sample. What is left of a chunk is left out.

    Raises:
        ImportError: litdata is not installed.
        FileNotFoundError: There is no ``index.json``, or a chunk is missing.
        ValueError: Chunks are compressed as a whole, which gives no random access, encrypted or truncated, or of tokens
            and ``block`` is missing; values are pickled, which may run any code; or the folder is a URL.
    """

    traits: Traits = Traits(decode="optional")
    # In the decode threads: each thread that reads has open chunks.
    answers_at_once: Any = True

    def __init__(self, folder: str | os.PathLike[str], block: int | None = None) -> None:
        self._block = None if block is None else check_positive_int("LitDataShards(block=...)", block)
        super().__init__(folder)

    def _selection(self) -> Any:
        return self._block

    async def _list(self, finder: ShardFinder, urls: Any) -> list[Shard]:
        folder = os.fspath(urls).removesuffix("index.json").rstrip("/") or "."
        listed, first, found = finder.shard(f"{folder}/index.json"), 0, list[Shard]()
        index = parse_json(listed.path, await listed.reader.read(listed.key))
        try:
            config = index["config"]
            if (loader := config.get("item_loader")) not in (None, "TokensLoader" if self._block else "PyTreeLoader"):
                raise ValueError(f"its chunks are read by {loader}, and block={self._block}; TokensLoader needs block=")
            kinds = {kind.partition(":")[0] for kind in config["data_format"]}
            whole = config["compression"] and config.get("compression_level") in (None, "chunk")
            if whole or config["encryption"] or kinds & {"pickle", "graph"}:
                raise ValueError("compressed as a whole, encrypted or pickled: pass Stream(StreamingDataset(...))")
            chunks = _Chunks(folder, self._block)
            for number, entry in enumerate(index["chunks"]):
                found.append(finder.shard(f"{folder}/{check_foreign_name('filename', entry['filename'], folder)}"))
                count = entry["chunk_size"] if self._block is None else entry["dim"] // self._block
                if count > entry["chunk_bytes"]:
                    raise ValueError(f"{entry['filename']} cannot have {count} samples in {entry['chunk_bytes']} bytes")
                found[-1].index = read_by(partial(chunks.read, number, first), count)
                found[-1].extra, first = entry["chunk_bytes"], first + count
        except (AssertionError, *DAMAGED) as error:  # LitData asserts that there are chunks
            raise ValueError(f"{listed.url}: {reason_of(error)}") from None
        return found

    async def _index(self, shard: Shard) -> None:
        if shard.size < shard.extra:
            raise ValueError(f"it is truncated: it has {shard.size} bytes, by the index {shard.extra}")
