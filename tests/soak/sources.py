"""Sources whose samples contain their index, with faults and delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from aiofeed import Files

FILES = 96
"""Number of real files, of `FILE_WIDTH` numbers each."""

FILE_WIDTH = 4


def encoded(index: int, width: int) -> bytes:
    """Return a sample's bytes: its index `width` times, as int64."""
    return np.full(width, index, np.int64).tobytes()


@dataclass
class Faults:
    """A source's faults.

    Args:
        failing_reads: samples whose read raises an error.
        truncated: samples whose read returns too few bytes.
        open_fails: whether `open` raises an error.
    """

    failing_reads: frozenset[int] = frozenset()
    truncated: frozenset[int] = frozenset()
    open_fails: bool = False

    def clear(self) -> None:
        """Remove all faults."""
        self.failing_reads = self.truncated = frozenset()
        self.open_fails = False


@dataclass
class Numbers:
    """A source with a coroutine `read`.

    Args:
        length: number of samples.
        width: numbers per sample.
        read_delay: "none", "yields" for up to 3 iterations of the event loop, "tail" for a rare long delay.
        seed: seed of the delays.
    """

    length: int
    width: int
    read_delay: str = "none"
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    opened: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __len__(self) -> int:
        return self.length

    def key(self, index: int) -> str:
        return f"number {index}"

    async def open(self) -> None:
        await asyncio.sleep(0)
        if self.faults.open_fails:
            raise ConnectionError("open fails")
        self.opened += 1

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1

    async def read(self, index: int) -> bytes:
        await self._delay()
        if index in self.faults.failing_reads:
            raise OSError(5, "input/output error")
        data = encoded(index, self.width)
        return data[: len(data) // 2 + 3] if index in self.faults.truncated else data

    async def _delay(self) -> None:
        if self.read_delay == "yields":
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
        elif self.read_delay == "tail" and self.random.random() < 0.1:
            await asyncio.sleep(min(0.0002 * self.random.paretovariate(1.1), 0.02))


class Many(Numbers):
    """A source with `read_many`, which sometimes waits for a thread."""

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        if self.random.random() < 0.2:
            await asyncio.to_thread(int)
        return list(await asyncio.gather(*[self.read(index) for index in indices], return_exceptions=True))


class Items(Dataset[torch.Tensor]):
    """A torch Dataset with the same samples."""

    def __init__(self, length: int, width: int) -> None:
        self.length = length
        self.width = width
        self.faults = Faults()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.faults.failing_reads:
            raise OSError(5, "input/output error")
        return torch.full((self.width,), index)


class Decode:
    """Decodes bytes to an int64 tensor [width]; another number of bytes is a ValueError."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, data: bytes) -> torch.Tensor:
        if len(data) != 8 * self.width:
            raise ValueError(f"{8 * self.width} bytes expected, got {len(data)}")
        return torch.from_numpy(np.frombuffer(data, np.int64).copy())


def write_files(folder: Path) -> list[Path]:
    """Write small files, one sample each."""
    paths = [folder / f"{index:03d}" for index in range(FILES)]
    for index, path in enumerate(paths):
        path.write_bytes(encoded(index, FILE_WIDTH))
    return paths


def files(folder: Path, length: int) -> Files:
    """Return a source of the first `length` files."""
    paths = [folder / f"{index:03d}" for index in range(length)]
    return Files(paths if all(path.exists() for path in paths) else write_files(folder)[:length])
