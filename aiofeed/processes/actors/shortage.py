"""Measures by how much the actors are too few for the training."""

from __future__ import annotations

import math

from aiofeed.core.statistics import EpochStats

# Batches and seconds of a measurement, at least; and the share of waiting from which on actors are added.
_BATCHES, _SECONDS, _WORTH = 16, 1.0, 0.1


class Shortage:
    """The share of the time that the training waited for batches while all actors were busy."""

    def __init__(self) -> None:
        self._batches, self._waited_s, self._wall_s = 0, 0.0, 0.0
        self._last: tuple[EpochStats | None, float, float] = None, 0.0, 0.0

    def wanted(self, actors: int, stats: EpochStats, *, busy: bool) -> int:
        """Add a batch that was taken from the epoch with these totals; return how many actors are wanted.

        At most twice as many as there are, and as many until a measurement is complete. The first batch of an epoch
        does not count, because more actors would not make it come sooner.
        """
        (epoch, stall_s, wall_s), self._last = self._last, (stats, stats.stall_s, stats.wall_s)
        if stats is epoch:
            self._batches += 1
            self._waited_s += busy * (self._last[1] - stall_s)
            self._wall_s += self._last[2] - wall_s
        if self._batches < _BATCHES or self._wall_s < _SECONDS:
            return actors
        waiting = self._waited_s / self._wall_s
        self._batches, self._waited_s, self._wall_s = 0, 0.0, 0.0
        # With enough actors, the training is faster by 1 / (1 - waiting).
        return math.ceil(actors / (1 - min(waiting, 0.5))) if waiting > _WORTH else actors
