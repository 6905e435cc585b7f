"""A source of bytes for tests of ``EncodedCache``, and programs that fill one."""

from __future__ import annotations

import hashlib
import random
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from aiofeed import EncodedCache, Feeder
from aiofeed.cache.encoded.source import CachedSource
from aiofeed.sampling.schedule import Position, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aiofeed.core.types import BatchPlan


SIZE = 1000


class Blocks:
    """Samples of ``size`` bytes that follow from their index; counts its reads."""

    def __init__(self, n: int = 40, size: int = 1000, name: str = "block") -> None:
        self.n = n
        self.size = size
        self.name = name
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"{self.name} {index}"

    def data(self, index: int) -> Any:
        return block(index, self.size)

    async def read(self, index: int) -> Any:
        [sample] = await self.read_many([index])
        return sample

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        self.reads.update(indices)
        return [self.data(index) for index in indices]


def block(index: int, size: int) -> bytes:
    return hashlib.shake_128(b"%d" % index).digest(size)


def write_now(source: CachedSource) -> None:
    """Write what a source has queued for the database."""
    source._write_pending(wait=True)


def of_feeder(feeder: Any) -> Any:
    """What a feeder with an ``EncodedCache`` counts."""
    return feeder.statistics().storage


async def fill_forever(cache: EncodedCache, seed: int) -> None:
    """Read random samples until killed, write each transaction at once, and print a line after each."""
    source, rng = CachedSource(Blocks(2000, 20_000), cache), random.Random(seed)
    while True:
        await source.read_many([rng.randrange(2000) for _ in range(20)])
        write_now(source)
        sys.stdout.write("x\n")
        sys.stdout.flush()


def head(data: bytes) -> torch.Tensor:
    """The first bytes of a sample, which identify it."""
    return torch.tensor(int.from_bytes(data[:7], "little"))


def as_it_is(data: Any) -> Any:
    return data


def heads(feeder: Feeder[Any]) -> list[int]:
    return [int(number) for batch in feeder for number in batch]


HEADS = [int(head(block(index, SIZE))) for index in range(200)]


def entries(path: Path) -> dict[str, int]:
    """The number of entries and their bytes, from the rows themselves."""
    with closing(sqlite3.connect(path)) as connection:
        count, nbytes = connection.execute("SELECT count(*), coalesce(sum(length(bytes)), 0) FROM data").fetchone()
        assert connection.execute("SELECT total FROM budget").fetchone() == (nbytes,)
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (count,)
    return {"count": count, "nbytes": nbytes}


def damage(path: Path, assignment: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {assignment}")


async def filled(path: Path, n: int = 40) -> None:
    """Fill a cache with samples of ``Blocks``."""
    source = CachedSource(Blocks(n), EncodedCache(path, n * SIZE))
    await source.read_many(range(n))
    await source.aclose()


def plans(schedule: Schedule, epochs: int) -> list[BatchPlan]:
    return [plan for epoch in range(epochs) for plan in schedule.plans(Position(epoch))]
