"""The batches of one epoch after another, as the engine asks for them: no bubble where epochs meet."""

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
    """What follows belongs to another epoch, and is counted there."""

    counters: EpochStats


@dataclass(frozen=True, eq=False)
class EpochEnds:
    """Every batch of the epoch has been planned."""


@dataclass(frozen=True, eq=False)
class EpochStart:
    """An epoch of a stream.

    Args:
        position: where it begins.
        permutation: what a sampler gave for it.
        counters: of what is done for it.
    """

    position: Position
    permutation: Permutation | None
    counters: EpochStats


Step: TypeAlias = BatchPlan | EpochBegins | EpochEnds


class EpochStream:
    """The steps of an engine: an epoch, and those after it that were allowed or claimed by then.

    The engine's thread iterates; the consumer's thread allows and claims. Whether another epoch follows is decided
    under a lock when the one before has been planned: an epoch that was claimed before is planned for certain, one
    claimed after must begin a stream of its own.

    Args:
        schedule: the order.
        start: where it begins.
        counters: of the first epoch.
        permutation: the first epoch's, where a sampler gave it.
    """

    def __init__(
        self, schedule: Schedule, start: Position, counters: EpochStats, permutation: Permutation | None = None
    ) -> None:
        self.schedule = schedule
        self._start = start
        self._permutation = permutation
        self._lock = threading.Lock()
        self._counters = {start.epoch: counters}
        self._claimed = self._allowed = start.epoch
        self._begun = start.epoch
        self._over = False

    def __iter__(self) -> Iterator[Step]:
        for start in self.epochs():
            yield EpochBegins(start.counters)
            yield from self.schedule.plans(start.position, start.permutation)
            yield EpochEnds()

    def epochs(self) -> Iterator[EpochStart]:
        """Where each epoch begins; asked for the next, one is planned."""
        start: EpochStart | None = self.first
        while start is not None:
            yield start
            start = self.after(start)

    @property
    def first(self) -> EpochStart:
        """Where it begins."""
        return EpochStart(self._start, self._permutation, self._counters_of(self._start.epoch))

    def after(self, start: EpochStart) -> EpochStart | None:
        """The epoch after one that was planned, which is planned next; ``None`` where that is the last.

        Asked again it says the same, unless an epoch was allowed meanwhile.
        """
        position = Position(start.position.epoch + 1)
        with self._lock:
            if position.epoch > self._allowed:
                self._over = True
                return None
            self._begun = max(self._begun, position.epoch)
        return EpochStart(position, None, self._counters_of(position.epoch))

    def _counters_of(self, epoch: int) -> EpochStats:
        with self._lock:
            counters = self._counters.setdefault(epoch, EpochStats())
        return counters

    def permit_until(self, epoch: int) -> None:
        """Epochs up to this one may be begun before they are claimed."""
        with self._lock:
            self._allowed = max(self._allowed, epoch)

    def take_over(self, schedule: Schedule, position: Position) -> EpochStats | None:
        """Take the next epoch of this stream, if it is the one that is wanted; its counters."""
        with self._lock:
            follows = position.fresh and position.epoch == self._claimed + 1 and schedule == self.schedule
            if not follows or (self._over and self._begun < position.epoch):
                return None
            self._claimed = position.epoch
            self._allowed = max(self._allowed, position.epoch)
            self._counters.pop(position.epoch - 1, None)
            return self._counters.setdefault(position.epoch, EpochStats())

    def drained(self) -> bool:
        """Whether all that it gave was claimed, and no more comes."""
        with self._lock:
            return self._over and self._begun == self._claimed
