"""Positions and batches of ``in_order="samples"``, where single samples are returned ahead of others."""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from aiofeed.kernel.sampling.order import Int64
from aiofeed.kernel.sampling.schedule import Position, Returned, Schedule


class SampleSchedule(Schedule):
    """A schedule whose positions have the numbers of samples in ``ahead``. They count the samples of this rank.

    A planned batch has the next samples in order. The batch that is returned has as many, whichever are ready.
    """

    def _numbers_ahead(self, start: Position) -> int:
        """Return the number after that of the last sample of this rank."""
        return self._undropped(start.consumed)

    def batch_numbers(self, start: Position) -> int:
        """Return the number of batches that the samples left fill."""
        return -(-self._samples_left(start) // self.batch_size)

    def batches_ahead(self, start: Position) -> Set[int]:
        """Empty: batches are numbered without gaps."""
        return frozenset()

    def positions_from(self, start: Position, batch: int, count: int = 1) -> Int64:
        """Return the positions of samples that were not returned before ``start``."""
        last = min((batch + count) * self.batch_size, self._samples_left(start))
        left = np.arange(batch * self.batch_size, last, dtype=np.int64)
        ahead = np.array(self._ahead(start), np.int64)
        # A sample's number is its place among those left, plus those returned that come before it.
        numbers = left + np.searchsorted(ahead - np.arange(len(ahead)), left, side="right")
        return start.consumed + self.rank + numbers * self.world_size

    def position_after(self, start: Position, number: int, earlier: Set[int] | None = None) -> Position:
        """Return the position after planned batches 0 to ``number``, which were returned in order."""
        if number + 1 >= self.batch_numbers(start):
            return Position(start.epoch + 1)
        following = int(self.positions_from(start, number + 1)[0])
        prefix = (following - start.consumed) // self.world_size
        ahead = frozenset(each - prefix for each in self._ahead(start) if each > prefix)
        return Position(start.epoch, start.consumed + prefix * self.world_size, ahead)

    def position_at(self, start: Position, returned: Returned) -> Position:
        """Return the position of an iterator that began at ``start`` and has returned these samples."""
        prefix, bits = returned
        ahead = frozenset(number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
        return self.normalize(Position(start.epoch, start.consumed + prefix * self.world_size, ahead))

    def tracker(self, start: Position) -> SampleTracker:
        """Return a tracker of the samples returned from ``start`` on."""
        return SampleTracker(start.consumed, self.world_size, self._ahead(start))

    def _samples_left(self, start: Position) -> int:
        return self._without_dropped(self._undropped(start.consumed) - len(self._ahead(start)))

    def _ahead(self, start: Position) -> list[int]:
        """Return the numbers of samples returned ahead, ascending."""
        return sorted(start.ahead)


class SampleTracker:
    """Tracks the samples of one rank and epoch that are returned; batches are added in the order of delivery.

    Args:
        consumed: The position of sample 0 of rank 0.
        world_size: The distance of this rank's positions.
        ahead: The numbers of samples that were returned before.
    """

    def __init__(self, consumed: int, world_size: int, ahead: Iterable[int]) -> None:
        self._consumed = consumed
        self._world_size = world_size
        self._prefix, self._bits = 0, sum(1 << number for number in ahead)

    def add(self, positions: Iterable[int]) -> Returned:
        """Add the samples of a batch; returns all that are returned when it is."""
        numbers = [(position - self._consumed) // self._world_size - self._prefix for position in positions]
        lowest, bits = min(numbers), 0
        for number in numbers:
            bits |= 1 << (number - lowest)
        bits = self._bits | bits << lowest
        ones = (bits ^ (bits + 1)).bit_length() - 1  # at the low end
        self._prefix, self._bits = self._prefix + ones, bits >> ones
        return self._prefix, self._bits
