"""A source of bytes for tests of caches of encoded samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from aiofeed import Feeder
from aiofeed.cache.disk_format import open_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZE = 1000
# The header and the table of a cache of at most 256 samples, and the record of one of ``SIZE`` bytes.
HEAD_BYTES, RECORD_BYTES = 8192, 1088


class Blocks:
    """Samples of ``size`` bytes that follow from their index; counts its reads."""

    def __init__(self, n: int = 40, size: int = SIZE, name: str = "block") -> None:
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


def block(index: int, size: int = SIZE) -> bytes:
    return hashlib.shake_128(b"%d" % index).digest(size)


def head(data: bytes) -> torch.Tensor:
    """The first bytes of a sample, which identify it."""
    return torch.tensor(int.from_bytes(data[:7], "little"))


def as_it_is(data: Any) -> Any:
    return data


def heads(feeder: Feeder[Any]) -> list[int]:
    return [int(number) for batch in feeder for number in batch]


HEADS = [int(head(block(index))) for index in range(200)]


def stored(path: Path) -> int:
    """The number of samples in a file."""
    file = open_file(str(path), create=False)
    assert file is not None
    assert file.describe() is not None
    return int((file.table()["row"] > 0).sum())
