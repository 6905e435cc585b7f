"""A source of bytes for tests of ``EncodedCache``, and programs that fill one."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiofeed.cache.encoded.source import CachedSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiofeed import EncodedCache


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
    import random

    source, rng = CachedSource(Blocks(2000, 20_000), cache), random.Random(seed)
    while True:
        await source.read_many([rng.randrange(2000) for _ in range(20)])
        write_now(source)
        sys.stdout.write("x\n")
        sys.stdout.flush()
