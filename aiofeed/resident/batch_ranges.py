"""Batches of data in memory, many at once: their numbers, and the indices of all their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.sampling.epochs import EpochStart
from aiofeed.kernel.sampling.order import ComputedEpoch, Int64, Permutation, sequential
from aiofeed.kernel.sampling.schedule import Position, Schedule

# The number of samples whose order is computed at once, see ``PLAN_BLOCK``; a range of batches is a slice of it.
RANGE_BLOCK = 1 << 14


@dataclass(frozen=True, eq=False)
class BatchRange:
    """Several batches.

    Args:
        numbers: The numbers of the batches, ascending.
        indices: The indices of all their samples, ``batch_size`` per batch; the last batch of an epoch may have fewer.
        batch_size: Samples per batch.
        run: Whether the indices are consecutive.
        plan: The plan of a single batch whose batches are listed.
    """

    numbers: Sequence[int]
    indices: Int64
    batch_size: int
    run: bool
    plan: BatchPlan | None = None

    def head(self, batches: int) -> BatchRange:
        """Return the first batches, at most so many."""
        indices = self.indices[: batches * self.batch_size]
        return BatchRange(self.numbers[:batches], indices, self.batch_size, self.run)


class BatchRanges:
    """The same batches as from ``Schedule.plans``, several at once and from any number on."""

    def __init__(self, schedule: Schedule, start: Position, sampled: Int64 | ComputedEpoch | None = None) -> None:
        self._schedule = schedule
        self._start = start
        self._sampled = sampled
        self._permutation: Permutation | None = None
        # The indices of a block of batches, of which ranges are slices, and the numbers of those batches.
        self._block: Int64 = np.empty(0, np.int64)
        self._block_numbers = range(0)

    def at(self, first: int, most: int) -> BatchRange | None:
        """Up to ``most`` batches from number ``first`` on; ``None`` if none is left."""
        schedule, skip = self._schedule, self._schedule.batches_ahead(self._start)
        while first in skip:
            first += 1
        count = min(most, schedule.batch_numbers(self._start) - first)
        if count <= 0:
            return None
        numbers: Sequence[int] = range(first, first + count)
        if skip and not skip.isdisjoint(numbers):
            numbers = [number for number in numbers if number not in skip]
            indices = np.concatenate([self._indices(number, 1) for number in numbers])
        else:
            indices = self._indices(first, count)
        # Sequential indices ascend, and with one rank there is no padding.
        ascending = self._permutation is sequential and schedule.world_size == 1
        run = ascending and int(indices[-1] - indices[0]) == len(indices) - 1
        return BatchRange(numbers, indices, schedule.batch_size, run)

    def _indices(self, first: int, count: int) -> Int64:
        """The indices of ``count`` batches from ``first`` on, as a view of memory that is never written again."""
        schedule, start = self._schedule, self._start
        if first not in self._block_numbers or first + count > self._block_numbers.stop:
            if self._permutation is None:
                self._permutation = schedule.permutation(start.epoch, self._sampled)
            several = max(count, RANGE_BLOCK // schedule.batch_size)
            self._block = self._permutation(schedule.positions_from(start, first, several) % schedule.length)
            self._block_numbers = range(first, first + several)
        at = (first - self._block_numbers.start) * schedule.batch_size
        return self._block[at : at + count * schedule.batch_size]


class PlannedRanges:
    """The batches of an epoch whose batches are listed, one after the other."""

    def __init__(self, schedule: Schedule, start: EpochStart) -> None:
        self._plans = schedule.plans(start.position, start.sampled)
        self._plan: BatchPlan | None = None

    def at(self, first: int, most: int) -> BatchRange | None:
        """Return the batch number ``first``, or the next one; ``None`` if none is left."""
        while self._plan is None or self._plan.number < first:
            if (plan := next(self._plans, None)) is None:
                return None
            self._plan = plan
        plan = self._plan
        return BatchRange([plan.number], np.array(plan.indices), len(plan.indices), run=False, plan=plan)
