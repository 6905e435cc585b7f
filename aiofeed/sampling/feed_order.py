"""A feeder's order as its user asked for it: shuffled, sampled, sharded; settled when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from aiofeed.sampling.order import ListPermutation
from aiofeed.sampling.sampler import SamplerAdapter
from aiofeed.sampling.schedule import Position, Schedule, Shuffle
from aiofeed.sampling.sharding import check_shard, find_shard

log = logging.getLogger("aiofeed.sampling")

# From here on the list of a shuffled epoch takes 80 MB, and a tenth of a second to make.
LISTED_MOST = 10_000_000


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """An epoch about to be iterated.

    Args:
        schedule: the order it follows.
        start: where it begins.
        permutation: what the sampler gave for it; ``None`` without a sampler.
    """

    schedule: Schedule
    start: Position
    permutation: ListPermutation | None = None


class FeedOrder:
    """Arguments about order, checked, and what becomes of them.

    Raises:
        TypeError: a sampler or a shard that is none.
        ValueError: a sampler together with shuffle, or a rank outside its world.
    """

    def __init__(
        self,
        *,
        length: int,
        batch_size: int,
        shuffle: Shuffle,
        seed: int,
        drop_last: bool,
        pad: bool,
        sampler: Iterable[int] | None,
        shard: tuple[int, int] | Literal["auto"] | None,
    ) -> None:
        if sampler is not None and shuffle:
            raise ValueError(f"sampler= decides the order, so shuffle={shuffle!r} makes no sense beside it")
        self._base = Schedule(
            length=length, batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, pad=pad
        )
        self._sampling = None if sampler is None else SamplerAdapter(sampler, length)
        self._shard: tuple[int, int] | None = None
        if sampler is not None or shard is None:
            self._shard = (0, 1)
        elif shard != "auto":
            self._shard = check_shard(shard)
        # Whether the epoch listed last has handed out a batch.
        self._began = True
        self._suggested = False
        self._warned = False

    def schedule(self, length: int | None = None) -> Schedule:
        """The order of an epoch of ``length`` samples; settles rank and world size.

        Raises:
            TypeError: no ``length`` was given, and the sampler has none.
        """
        if self._shard is None:
            self._shard = find_shard()
        if length is None:
            length = self._base.length if self._sampling is None else len(self._sampling)
        return replace(self._base, length=length, rank=self._shard[0], world_size=self._shard[1])

    def begin(self, position: Position) -> EpochPlan:
        """What the next ``iter()`` goes through, from ``position``, or the next epoch where nothing is left there."""
        if self._sampling is None:
            schedule = self.schedule()
            self._suggest_keyed(schedule)
            self._warn_of_nothing(schedule)
            return EpochPlan(schedule, schedule.begin(position))
        if not self._began:
            self._sampling.again()
        while True:
            permutation = self._sampling.list_epoch(position.epoch, resumed=not position.fresh)
            schedule = replace(self._base, length=len(permutation.indices))
            start = schedule.begin(position)
            if start.epoch == position.epoch:
                self._began = False
                self._warn_of_nothing(schedule)
                return EpochPlan(schedule, start, permutation)
            position = start

    def settle(self, position: Position) -> Position:
        """The position itself, or the next epoch where nothing is left there, by the sampler's own length."""
        if position.fresh or not (self._sampling is None or self._sampling.sized):
            return position
        return self.schedule().begin(position)

    def _suggest_keyed(self, schedule: Schedule) -> None:
        if schedule.shuffle is True and schedule.length > LISTED_MOST and not self._suggested:
            self._suggested = True
            log.info(
                "shuffle=True keeps a list of %d indices, %d MiB, made anew each epoch; shuffle='keyed' stores nothing",
                schedule.length,
                schedule.length * 8 >> 20,
            )

    def _warn_of_nothing(self, schedule: Schedule) -> None:
        """Say once that an epoch has no batch: a loop over it does nothing, and looks like one that is done."""
        if self._warned or schedule.shard().batches:
            return
        self._warned = True
        ranks = f" on each of {schedule.world_size} ranks" if schedule.world_size > 1 else ""
        log.warning(
            "an epoch has no batches: %s",
            f"{schedule.length} samples do not fill one of {schedule.batch_size}{ranks}, and drop_last=True"
            if schedule.length
            else "there are no samples",
        )

    def began(self) -> None:
        """The epoch that was begun last has handed out a batch."""
        self._began = True

    def saved_sampler(self, epoch: int) -> str:
        """What restores the sampler for an epoch; empty without one."""
        return "" if self._sampling is None else self._sampling.saved(epoch)

    def restore_sampler(self, saved: str) -> None:
        """Take up what ``saved_sampler`` gave."""
        assert self._sampling is not None
        self._sampling.restore(saved)
        self._began = True
