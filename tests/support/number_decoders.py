"""A source of numbers in decimal digits, and decoders of them to samples of several types."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CountedNumbers:
    """A source of n numbers as bytes that counts its reads; those in `bad` cannot be decoded. It is opened once."""

    def __init__(self, n: int = 22, bad: frozenset[int] = frozenset(), target: Any = lambda index: -index) -> None:
        self.n = n
        self.bad = bad
        self.reads: Counter[int] = Counter()
        self.opened = 0
        if target is not None:
            self.target = target

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def open(self) -> None:
        self.opened += 1

    async def aclose(self) -> None:
        self.opened -= 1

    async def read(self, index: int) -> bytes:
        assert self.opened == 1
        self.reads[index] += 1
        return b"bad" if index in self.bad else b"%d" % index


def tensor(data: bytes) -> torch.Tensor:
    """Return float32 [5]."""
    return torch.arange(5, dtype=torch.float32) + int(data)


def half(data: bytes) -> torch.Tensor:
    """Return bfloat16 [5]."""
    return tensor(data).to(torch.bfloat16)


def array(data: bytes) -> NDArray[Any]:
    """Return a numpy array, int16 [2, 3]."""
    return np.full((2, 3), int(data), np.int16)


def scalar(data: bytes) -> torch.Tensor:
    """Return int64 []."""
    return torch.tensor(int(data))
