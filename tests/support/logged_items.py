"""Datasets that log the requested indices to a file. Child processes import this module, so it imports little."""

from __future__ import annotations

import time
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy as np

Scores = namedtuple("Scores", "first second")


def image_of(index: int) -> np.ndarray:
    """Return the item's array: float64 [7, 5], different for each index."""
    return np.random.default_rng(index).random((7, 5))


class Logged:
    """A Dataset that appends each requested index to the file ``asked``; an item takes ``pause_s``."""

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
        """The number of requests per index, by all processes."""
        file = self.folder / "asked"
        return Counter(map(int, file.read_text().split())) if file.exists() else Counter()


class Ragged(Logged):
    """Items whose arrays differ in length, most with a name."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        item["image"] = item["image"][: index % 7 + 1]
        return item if self.name_of(index) is None else item | {"name": self.name_of(index)}

    @staticmethod
    def name_of(index: int) -> str | None:
        """An item's name; ``None`` if it has none."""
        return None if index % 5 == 0 else f"item {index}" * (index % 4)


class LoggedMany(Logged):
    """The same Dataset with ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
