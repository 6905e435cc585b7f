"""Datasets that log requests to a file. Processes import this module, so it imports little."""

from __future__ import annotations

import time
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy as np

Scores = namedtuple("Scores", "first second")


def image_of(index: int) -> np.ndarray:
    """An array that is different for each item."""
    return np.random.default_rng(index).random((7, 5))


class Logged:
    """A Dataset that logs each requested index to a file; an item takes ``pause_s``."""

    def __init__(self, folder: Path, n: int = 60, pause_s: float = 0.003) -> None:
        self.folder = folder
        self.n = n
        self.pause_s = pause_s

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        with open(self.folder / "asked", "a") as file:
            file.write(f"{index}\n")
        time.sleep(self.pause_s)
        return {"image": image_of(index), "label": index, "pair": Scores(index / 3, index > 9)}

    @property
    def asked(self) -> Counter[int]:
        """How often all processes have requested each index."""
        file = self.folder / "asked"
        return Counter(map(int, file.read_text().split())) if file.exists() else Counter()


class LoggedMany(Logged):
    """The same with ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
