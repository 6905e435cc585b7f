"""Feeders of every kind of batches over the same small data, for tests that hold for all of them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Buckets, Feeder, Limits, Mixture, Pack, Stream, Table, Tensors, TokenBudget, Tokens, pad_collate

SIZES = {"web": 19, "books": 7, "code": 12}
SAMPLES = sum(SIZES.values())
LENGTHS = np.random.default_rng(3).integers(1, 9, SAMPLES)


class Documents:
    """Documents of tokens, each of which tells its document: 100 times the index from ``first`` on, plus its place."""

    def __init__(self, first: int = 0, size: int = SAMPLES) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        index += self.first
        return torch.arange(int(LENGTHS[index])) + 100 * (index + 1)


def mixture(**options: Any) -> Mixture:
    firsts = np.cumsum([0, *SIZES.values()])
    sources = {name: Documents(int(first), size) for first, (name, size) in zip(firsts, SIZES.items(), strict=False)}
    return Mixture(sources, **{"weights": [0.5, 0.2, 0.3], **options})


def shuffled(source: Callable[[], Any] = Documents, **batching: Any) -> Callable[..., Feeder[Any]]:
    """A factory of shuffled feeders, each over a source of its own, whose collate function pads."""

    def new(**options: Any) -> Feeder[Any]:
        return Feeder(
            **{"source": source(), "shuffle": True, "seed": 5, "collate_fn": pad_collate(-1), **batching, **options}
        )

    return new


def listed(**options: Any) -> Feeder[Any]:
    options.pop("drop_last", None)
    lists = [[(7 * index + at) % SAMPLES for at in range(1 + index % 4)] for index in range(14)]
    return Feeder(**{"source": Documents(), "collate_fn": pad_collate(-1), "batch_sampler": lists, **options})


def weighted(**options: Any) -> Feeder[Any]:
    weights = np.arange(SAMPLES) % 4
    return Feeder(
        **{
            "source": Documents(),
            "batch_size": 4,
            "seed": 5,
            "collate_fn": pad_collate(-1),
            "weights": weights,
            **options,
        }
    )


def documents() -> Iterator[torch.Tensor]:
    """The same documents as a stream."""
    source = Documents()
    return (source[index] for index in range(len(source)))


def stream(**options: Any) -> Feeder[Any]:
    """A feeder over a stream, whose padding is its last document."""
    return Feeder(
        **{
            "source": Stream(documents, shuffle_buffer=8),
            "batch_size": 4,
            "seed": 5,
            "collate_fn": pad_collate(-1),
            **options,
        }
    )


ROWS = np.arange(2 * SAMPLES).reshape(SAMPLES, 2)


@functools.cache
def folder() -> Path:
    """A folder with the tokens of ``ROWS`` in a file, which exists as long as this process."""
    kept = tempfile.TemporaryDirectory()
    folder.kept = kept  # type: ignore[attr-defined]
    ROWS.astype(np.uint16).tofile(Path(kept.name) / "tokens.bin")
    return Path(kept.name)


def tokens_in_file(*, in_memory: bool = True) -> Tokens:
    """Windows that the consumer's thread gathers or, if not ``in_memory``, others."""
    source = Tokens(folder() / "tokens.bin", 2)
    source.in_memory = in_memory
    return source


def table() -> Table:
    pytest.importorskip("pyarrow")
    return Table(np.array([(row,) for row in ROWS], [("tokens", np.int64, 2)]))


KINDS: dict[str, Callable[..., Feeder[Any]]] = {
    "plain": shuffled(batch_size=4),
    "keyed": shuffled(batch_size=4, shuffle="keyed"),
    "replacement": shuffled(batch_size=4, shuffle="replacement"),
    "weights": weighted,
    "batch sampler": listed,
    "buckets": shuffled(batch_size=Buckets(LENGTHS, [3, 6], [6, 4, 3])),
    "token budget": shuffled(batch_size=TokenBudget(LENGTHS, 24, window=16)),
    "packed": shuffled(batch_size=Pack(LENGTHS, 9, rows=2, separator=7, pad=-1), collate_fn=None),
    "packed whole": shuffled(batch_size=Pack(LENGTHS, 9, rows=2, split=False, pad=-1), collate_fn=None),
    "stream": stream,
    "samples": shuffled(batch_size=4, in_order="samples", limits=Limits(read_concurrency=1, decode_threads=1)),
    "samples of a mixture": shuffled(
        source=mixture, batch_size=4, in_order="samples", limits=Limits(read_concurrency=1, decode_threads=1)
    ),
    "mixture": shuffled(source=mixture, batch_size=4),
    "random mixture": shuffled(source=partial(mixture, random=True, until=50), batch_size=4),
    "changing mixture": shuffled(
        source=partial(mixture, weights=lambda drawn: [1, 1 + drawn // 1024, 2], until=50), batch_size=4
    ),
    "packed mixture": shuffled(
        source=mixture, batch_size=Pack(LENGTHS, 9, rows=2, separator=7, pad=-1), collate_fn=None
    ),
    "token budget of a mixture": shuffled(source=mixture, batch_size=TokenBudget(LENGTHS, 24, window=16)),
    "tensors": shuffled(lambda: Tensors(torch.from_numpy(ROWS)), batch_size=4, collate_fn=None),
    "tokens": shuffled(tokens_in_file, batch_size=4, collate_fn=None),
    "tokens in threads": shuffled(partial(tokens_in_file, in_memory=False), batch_size=4, collate_fn=None),
    "table": shuffled(table, batch_size=4, collate_fn=None),
}
"""Each function makes a feeder; its keyword arguments replace those of ``Feeder``."""


def tensor(batch: Any) -> torch.Tensor:
    """The tokens of a batch, with padding."""
    batch = batch["tokens"] if isinstance(batch, dict) else batch
    found: torch.Tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return found


def tokens(batch: Any) -> list[int]:
    """The tokens of a batch, in order, without padding."""
    return [token for token in tensor(batch).flatten().tolist() if token >= 0]


def all_tokens(batches: Any) -> list[list[int]]:
    """The tokens of each batch."""
    return [tokens(batch) for batch in batches]
