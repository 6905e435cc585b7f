"""The batch plans of successive epochs, as the engine requests them: the next epoch starts without a gap."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import BatchPlan
from aiofeed.sampling.order import Permutation
from aiofeed.sampling.schedule import Position, Schedule


@dataclass(frozen=True, eq=False)
class EpochBegins:
    """The batches that follow belong to another epoch; ``counters`` are its statistics."""

    counters: EpochStats


@dataclass(frozen=True, eq=False)
class EpochEnds:
    """Every batch of the epoch has been planned."""


@dataclass(frozen=True, eq=False)
class EpochStart:
    """An epoch of a stream.

    Args:
        position: Where it starts.
        permutation: The sampler's indices; ``None`` without a sampler.
        counters: The statistics of the epoch.
    """

    position: Position
    permutation: Permutation | None
    counters: EpochStats


Step: TypeAlias = BatchPlan | EpochBegins | EpochEnds


class EpochStream:
    """The steps of an engine: one epoch, and the following ones that were permitted or taken over in time.

    The engine's thread iterates. The consumer's thread permits epochs to be planned ahead, and takes over the next
    epoch when its ``iter()`` is called. When an epoch has been planned, a decision under a lock says whether another
    one follows: an epoch taken over before it is planned, and an epoch taken over later needs a new stream.

    Args:
        schedule: The order of samples.
        start: Where the first epoch starts.
        counters: The statistics of the first epoch.
        permutation: The sampler's indices of the first epoch; ``None`` without a sampler.
    """

    def __init__(
        self, schedule: Schedule, start: Position, counters: EpochStats, permutation: Permutation | None = None
    ) -> None:
        self.schedule = schedule
        self._start = start
        self._permutation = permutation
        self._lock = threading.Lock()
        self._counters = {start.epoch: counters}
        # The last epochs that the consumer has taken over, that may be planned, and that are being planned.
        self._taken = self._permitted = self._planned = start.epoch
        self._over = False

    def __iter__(self) -> Iterator[Step]:
        for start in self.epochs():
            yield EpochBegins(start.counters)
            yield from self.schedule.plans(start.position, start.permutation)
            yield EpochEnds()

    def epochs(self) -> Iterator[EpochStart]:
        """The epochs; request the next one after the one before has been planned."""
        start: EpochStart | None = self.first
        while start is not None:
            yield start
            start = self.after(start)

    @property
    def first(self) -> EpochStart:
        """The first epoch."""
        return EpochStart(self._start, self._permutation, self._counters_of(self._start.epoch))

    def after(self, start: EpochStart) -> EpochStart | None:
        """The epoch after one that has been planned; ``None`` if no further epoch is permitted.

        Another call returns the same, unless an epoch was permitted in between.
        """
        position = Position(start.position.epoch + 1)
        with self._lock:
            if position.epoch > self._permitted:
                self._over = True
                return None
            self._planned = max(self._planned, position.epoch)
        return EpochStart(position, None, self._counters_of(position.epoch))

    def _counters_of(self, epoch: int) -> EpochStats:
        with self._lock:
            counters = self._counters.setdefault(epoch, EpochStats())
        return counters

    def permit_until(self, epoch: int) -> None:
        """Permit epochs up to this one to be planned before they are taken over."""
        with self._lock:
            self._permitted = max(self._permitted, epoch)

    def take_over(self, schedule: Schedule, position: Position) -> EpochStats | None:
        """Take over the next epoch and return its statistics; ``None`` if this stream does not have that epoch."""
        with self._lock:
            is_next = position.at_start and position.epoch == self._taken + 1 and schedule == self.schedule
            if not is_next or (self._over and self._planned < position.epoch):
                return None
            self._taken = position.epoch
            self._permitted = max(self._permitted, position.epoch)
            self._counters.pop(position.epoch - 1, None)
            return self._counters.setdefault(position.epoch, EpochStats())

    def drained(self) -> bool:
        """Whether no further epoch follows and every planned one was taken over."""
        with self._lock:
            return self._over and self._planned == self._taken
