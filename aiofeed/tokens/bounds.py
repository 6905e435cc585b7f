"""Finds where the documents of token files end: by separators, indexes, descriptions or lists."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.objects.reader import run_all
from aiofeed.tables.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Tokens that are compared with the separator at once, and objects that are read for that at the same time.
SCAN_TOKENS, SCANS = 1 << 22, 8


def document_bounds(tokens: Any, separator: int | None, at_start: bool | None = None) -> NDArray[np.int64]:
    """Return the first token of each document, counted through all files, and the number of tokens.

    Args:
        tokens: ``Tokens``, whose files may have documents without tokens: these are left out.
        separator: As ``Documents`` takes it.
        at_start: As ``Documents`` takes it.

    Raises:
        ValueError: Nothing says where the documents of a file end.
    """
    files = np.cumsum([0, *(layout.count for layout in tokens._layouts)])
    if separator is not None:
        ends = run_blocking(lambda: _ends_by(tokens, files, separator, at_start))
    elif tokens._column is not None:
        (store, options), paths = tokens._storage, [str(path) for path, *_ in tokens._files]
        lengths = Table(paths, data=tokens._column, store=store, options=options).lengths("")
        if lengths is None:
            raise ValueError(f"column {tokens._column!r} of {tokens!r} has nulls, and a document is a list of tokens")
        ends = [np.cumsum(lengths)]
    else:
        ends = run_blocking(lambda: run_all([_known_ends(tokens, files, number) for number in range(len(files) - 1)]))
    bounds = np.concatenate([files[:1], *ends])
    return bounds[np.append(True, np.diff(bounds) > 0)]  # type: ignore[no-any-return]


async def _ends_by(tokens: Any, files: NDArray[Any], separator: int, at_start: bool | None) -> list[NDArray[np.int64]]:
    """Return where documents end by a separator, of each file."""
    turn = asyncio.Semaphore(SCANS)
    [first] = await read_ranges(tokens, 0, np.zeros(1, np.int64), np.ones(1, np.int64))
    after = not (first[0] == separator if at_start is None else at_start)

    async def scan(number: int) -> NDArray[np.int64]:
        begin, end = files[number : number + 2].tolist()
        found = []
        async with turn:
            for at in range(0, end - begin, SCAN_TOKENS):
                stop = min(at + SCAN_TOKENS, end - begin)
                [part] = await read_ranges(tokens, number, np.array([at]), np.array([stop]))
                found.append(np.flatnonzero(part == separator) + (begin + at + after))
        return np.concatenate([*found, [end]])

    found = await run_all([scan(number) for number in range(len(files) - 1)])
    if sum(map(len, found)) == len(found):
        raise ValueError(f"separator={separator}: {tokens._files[0][0]} and the other files have no such token")
    return found


async def read_ranges(tokens: Any, number: int, firsts: Any, lasts: Any) -> list[NDArray[Any]]:
    """Return ranges of tokens of a file of ``Tokens``."""
    if not tokens.looks_ahead:
        return [tokens.arrays[number][first:last] for first, last in zip(firsts, lasts, strict=True)]
    parts = await tokens._read_tokens(tokens._shards[number], np.asarray(firsts), np.asarray(lasts))
    return [np.frombuffer(part, tokens._layouts[number].dtype) for part in parts]


async def _known_ends(tokens: Any, files: NDArray[Any], number: int) -> NDArray[np.int64]:
    """Return where the documents of a file end, by the index of Megatron or the description that dolma writes.

    Raises:
        ValueError: There is none, or it does not fit.
    """
    name, (begin, end) = str(tokens._files[number][0]), files[number : number + 2].tolist()
    if (documents := tokens._layouts[number].documents) is not None:
        return documents + begin  # type: ignore[no-any-return]
    beside = f"{os.path.splitext(name)[0]}.csv.gz"
    try:
        if tokens.looks_ahead:
            shard = tokens._shards[number]
            shard = shard.beside(f"{os.path.splitext(shard.key)[0]}.csv.gz")
            data = await shard.reader.read(shard.key)
        else:
            data = await asyncio.to_thread(Path(beside).read_bytes)
    except (FileNotFoundError, PermissionError):  # S3 denies access to a key that does not exist
        raise ValueError(
            f"nothing says where the documents of {name} end: there is no {beside}, as OLMo and dolma write it, "
            f"and no .idx of Megatron. Pass separator=, the token between documents"
        ) from None
    try:
        spans = np.loadtxt(io.BytesIO(gzip.decompress(data)), np.int64, delimiter=",", usecols=(0, 1), ndmin=2)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{beside} has not the first and the last token of each document: {error}") from None
    starts, stops = spans.T if len(spans) else (np.zeros(1, np.int64), np.array([end - begin]))
    if starts[0] != 0 or stops[-1] != end - begin or (starts[1:] != stops[:-1]).any() or (stops < starts).any():
        raise ValueError(f"{beside} does not describe the {end - begin} tokens of {name}, one document after the other")
    return stops + begin  # type: ignore[no-any-return]
