"""``shuffle="window"``: shards in random order, and samples mixed over a few shards at a time.

An epoch is cut into groups of ``width`` shards of the shuffled list of shards. The samples of a group are permuted.
Every sample comes once, and each shard is read within ``width`` shards' worth of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from aiofeed.core.random_numbers import mix64
from aiofeed.sampling.listers.computed import ComputedOrder
from aiofeed.sampling.order import Int64, Permutation, epoch_seed, feistel


class WindowOrder(ComputedOrder):
    """The order of a feeder with ``shuffle="window"``.

    Args:
        starts: The index of the first sample of each shard, and the number of samples.
        width: The number of shards whose samples are mixed.
        seed: Seeds the order, together with the epoch.
    """

    argument = "shuffle"
    differs = 'other shards, whose samples shuffle="window" mixes'

    def __init__(self, starts: Sequence[int], width: int, seed: int) -> None:
        self._starts = np.asarray(starts, np.int64)
        super().__init__(int(starts[-1]), hashlib.sha256(f"{width} {list(starts)}".encode()).hexdigest()[:32])
        self._width = width
        self._seed = seed

    def __str__(self) -> str:
        return f"{self._width} shards"

    def permutation(self, epoch: int) -> Permutation:
        """The index at each position of an epoch."""
        shards = feistel(len(self._starts) - 1, self._seed, epoch)(np.arange(len(self._starts) - 1))
        first, ends = self._starts[shards], np.cumsum(np.diff(self._starts)[shards])
        # The position where each group of shards ends.
        groups = np.append(ends[self._width - 1 : -1 : self._width], ends[-1])
        seed = epoch_seed(self._seed, epoch)

        def indices(positions: Int64) -> Int64:
            found = np.empty_like(positions)
            numbers = np.searchsorted(groups, positions, side="right")
            for group in np.unique(numbers).tolist():
                start = int(groups[group - 1]) if group else 0
                at = np.flatnonzero(numbers == group)
                mixed = start + feistel(int(groups[group]) - start, mix64(seed ^ group), 0)(positions[at] - start)
                shard = np.searchsorted(ends, mixed, side="right")
                found[at] = first[shard] + mixed - np.where(shard > 0, ends[shard - 1], 0)
            return found

        return indices
