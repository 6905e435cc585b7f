"""The batch plans of successive epochs, as the engine requests them: the next epoch starts without a gap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.sampling.order import EpochList
from aiofeed.kernel.sampling.progress import EpochProgress, InOrder
from aiofeed.kernel.sampling.schedule import Position, Schedule


@dataclass(frozen=True, eq=False)
class EpochStart:
    """The batches that follow belong to another epoch.

    Args:
        counters: The statistics of the epoch.
        position: Where the epoch starts.
        sampled: The sampler's indices, a computed order, or the batches; ``None`` for the schedule's own order.
        list_next: Gives another epoch's order, of the same length; ``None`` if a sampler has to be listed for it.
        first_batch: The number of the first batch; those before it were made by another pipeline.
    """

    counters: EpochStats
    position: Position = field(default_factory=Position)
    sampled: EpochList | None = None
    list_next: Callable[[int], EpochList | None] | None = None
    first_batch: int = 0

    @property
    def followed(self) -> bool:
        """Whether the next epoch can be planned before its ``iter()``."""
        return self.sampled is None or self.list_next is not None


@dataclass(frozen=True, eq=False)
class EpochEnds:
    """Every batch of the epoch has been planned, or every one that this stream is to plan.

    Args:
        error: Raised after these batches instead of the end of the epoch.
        next_batch: The first batch of the epoch that was not planned, because the stream was cut.
    """

    error: Exception | None = None
    next_batch: int | None = None


Step: TypeAlias = BatchPlan | EpochStart | EpochEnds


class EpochStream:
    """The steps of an engine: one epoch, and the following ones that were permitted or taken over in time.

    The engine's thread iterates. The consumer's thread permits epochs to be planned ahead, and takes over the next
    epoch when its ``iter()`` is called. When an epoch has been planned, ``after`` decides under a lock whether another
    one follows. If none does, an epoch that is taken over later needs a new stream.
    """

    def __init__(self, schedule: Schedule, first: EpochStart) -> None:
        self.schedule = schedule
        self.first = first
        self._lock = threading.Lock()
        self._counters = {first.position.epoch: first.counters}
        # The last epochs that the consumer has taken over, that may be planned, and that are being planned.
        self._taken = self._permitted = self._planned = first.position.epoch
        self._over = False
        self.is_cut: bool = False

    def cut(self) -> None:
        """Plan no more batches: another pipeline makes the rest of the epoch."""
        with self._lock:
            self.is_cut = True

    def __iter__(self) -> Iterator[Step]:
        start: EpochStart | None = self.first
        while start is not None:
            yield start
            try:
                for plan in self.schedule.plans(start.position, start.sampled, start.first_batch):
                    if self.is_cut:
                        yield EpochEnds(next_batch=plan.number)
                        return
                    yield plan
            except Exception as error:  # noqa: BLE001 - raised at its place, if the epoch is used: it may be a later one
                yield EpochEnds(error)
                return
            yield EpochEnds()
            start = self.after(start)

    def new_progress(self, start: Position, in_order: InOrder) -> EpochProgress:
        """Count the batches of an epoch that the consumer takes over; call it before the first is returned."""
        return EpochProgress(self.schedule, start, in_order)

    def after(self, start: EpochStart) -> EpochStart | None:
        """Return the epoch after one that has been planned; ``None`` if no further epoch is permitted.

        Another call returns the same, unless an epoch was permitted in between.
        """
        position = Position(start.position.epoch + 1)
        with self._lock:
            if position.epoch > self._permitted or self.is_cut:
                self._over = True
                return None
            self._planned = max(self._planned, position.epoch)
            sampled = None if start.list_next is None else start.list_next(position.epoch)
            counters = self._counters.setdefault(position.epoch, EpochStats(events=start.counters.events))
            return EpochStart(counters, position, sampled, start.list_next)

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
            return self._counters.setdefault(position.epoch, EpochStats(events=self.first.counters.events))

    def drained(self) -> bool:
        """Return whether no further epoch follows and every planned one was taken over."""
        with self._lock:
            return self._over and self._planned == self._taken
