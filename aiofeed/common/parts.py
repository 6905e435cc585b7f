"""Several samples at once: which part of a source each is in, and their order afterwards."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any


class Parts:
    """Finds the part of an index that counts through several parts.

    Args:
        lengths: The number of samples of each part.

    Attributes:
        starts: The first index of each part, and the number of samples.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.starts: list[int] = [0, *accumulate(lengths)]

    def __len__(self) -> int:
        """Return the number of samples of all parts."""
        return self.starts[-1]

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the part, and the index in it.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < self.starts[-1]:
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect.bisect_right(self.starts, index) - 1
        return number, index - self.starts[number]

    def group(self, indices: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
        """For each part the places in ``indices``, and the indices in the part."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for place, index in enumerate(indices):
            number, local = self.find(index)
            places, locals_ = groups.setdefault(number, ([], []))
            places.append(place)
            locals_.append(local)
        return groups


def in_order(count: int, groups: Iterable[tuple[Sequence[int], Sequence[Any]]]) -> list[Any]:
    """Return the values of several groups, each with the places of its values, in the order of the places."""
    found: list[Any] = [None] * count
    for places, values in groups:
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found
