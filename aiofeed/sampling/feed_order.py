"""The order of a feeder as its arguments specify it: shuffled, sampled, sharded by rank and world size."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from aiofeed.core.errors import StateError
from aiofeed.core.statistics import EpochStats, Event, new_events
from aiofeed.core.validation import check_epoch, check_int_from, counted
from aiofeed.sampling.epochs import EpochStart, EpochStream
from aiofeed.sampling.listers.computed import ComputedOrder, ExcludingOrder
from aiofeed.sampling.listers.length_plans import PlanLister
from aiofeed.sampling.listers.mixture import MixtureOrder
from aiofeed.sampling.listers.sampler import BatchSamplerAdapter, SamplerAdapter
from aiofeed.sampling.order import BatchLists, EpochList, sample_seed
from aiofeed.sampling.receipts import StepSample
from aiofeed.sampling.schedule import Position, Schedule
from aiofeed.sampling.state import json_dict

Lister: TypeAlias = BatchSamplerAdapter | PlanLister | MixtureOrder | ComputedOrder
"""Lists the epochs of a feeder in place of its schedule."""

log: logging.Logger = logging.getLogger("aiofeed.sampling")

# The index list of a shuffled epoch of this length takes 80 MB and 0.1 s to make.
LARGE_EPOCH = 10_000_000


class FeedOrder:
    """The order of a feeder. Finds rank and world size when they are first needed.

    Args:
        base: The order without sampler and shard.
        sampler, shard: See ``Feeder``.
        lister: Another order instead of a sampler. With a batch sampler or a plan, ``base`` counts batches and not
            samples.

    Attributes:
        events: Receives the events of all epochs.
        replica: The number of this process among those that get the same batches.

    Raises:
        TypeError: The sampler or the shard has the wrong type.
        ValueError: A sampler was given together with shuffle, or the rank is not below the world size.
    """

    def __init__(
        self,
        base: Schedule,
        sampler: Iterable[int] | None,
        shard: tuple[int, int] | Literal["auto"] | None,
        lister: Lister | None = None,
    ) -> None:
        if sampler is not None and base.shuffle:
            raise ValueError(f"sampler= decides the order, so shuffle={base.shuffle!r} has no effect; leave it out")
        self._base = base
        self._sampler: SamplerAdapter | Lister | None = lister
        self._batch_size: object = lister if isinstance(lister, PlanLister) else base.batch_size
        self._unit = "batch" if isinstance(lister, BatchSamplerAdapter | PlanLister) else "sample"
        if sampler is not None:
            self._sampler = SamplerAdapter(sampler, base.length)
        sharded = sampler is None and not (isinstance(lister, BatchSamplerAdapter) and lister.distributed)
        self._shard: tuple[int, int] | None = None
        if not sharded or shard is None:
            self._shard = (0, 1)
        elif shard != "auto":
            self._shard = check_shard(shard)
        # Whether the epoch planned last has returned a batch, or has ended without one.
        self._epoch_used = True
        self.events: deque[Event] = new_events(keep=False)
        self.replica: int = 0
        self._suggested = False
        self._warned = False
        self._warned_of_scheduler = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the events."""
        return self.__dict__ | {"events": deque(maxlen=self.events.maxlen)}

    def describe(self) -> str:
        """The order in the words of ``Feeder``'s arguments."""
        if isinstance(self._sampler, BatchSamplerAdapter):
            return f"batch_sampler={self._sampler}"
        size = f"batch_size={self._batch_size}"
        if isinstance(self._sampler, SamplerAdapter):
            return f"{size}, sampler={self._sampler}"
        if isinstance(self._sampler, ComputedOrder):
            return f"{size}, {self._sampler.argument}={self._sampler}, seed={self._base.seed}"
        return f"{size}, shuffle={self._base.shuffle!r}, seed={self._base.seed}"

    def schedule(self, length: int | None = None) -> Schedule:
        """The schedule of an epoch of ``length`` samples, by default the sampler's or the source's length.

        Raises:
            TypeError: ``length`` is ``None`` and the sampler has no length.
        """
        if self._shard is None:
            self._shard = find_shard()
        if isinstance(self._sampler, PlanLister):
            self._sampler.plan.check_ranks(self._shard[1])
        if length is None:
            length = self._base.length if self._sampler is None else len(self._sampler)
        return replace(self._base, length=length, rank=self._shard[0], world_size=self._shard[1])

    @property
    def rank(self) -> int:
        """The rank, once it was needed; 0 before, and on one of the processes that get the same batches only."""
        return (0 if self._shard is None else self._shard[0]) + self.replica

    def batches_of_rank(self) -> int:
        """The number of batches per epoch of this rank. Under Accelerate, which expects all ranks', warns once."""
        schedule = self.schedule()
        accelerate = sys.modules.get("accelerate.state")
        if schedule.world_size > 1 and not self._warned_of_scheduler and accelerate and accelerate.is_initialized():
            self._warned_of_scheduler = True
            log.warning(
                "len(feeder) is %d, the number of batches of one rank of %d. Accelerate calls a scheduler that was "
                "passed to prepare() %d times per step, because it expects a length over all ranks: for a schedule of "
                "len(feeder) steps create Accelerator(step_scheduler_with_optimizer=False), or use aiofeed.DataLoader",
                schedule.batches(),
                schedule.world_size,
                schedule.world_size,
            )
        return schedule.batches()

    def plan_epoch(self, position: Position) -> EpochStream:
        """The epoch at ``position`` from there on, or the next one if none of it is left."""
        if self._sampler is None:
            schedule = self.schedule()
            schedule.check(position)
            self._suggest_keyed(schedule)
            self._warn_if_empty(schedule)
            return EpochStream(schedule, EpochStart(EpochStats(events=self.events), schedule.normalize(position)))
        if not self._epoch_used:
            self._sampler.repeat_last_epoch()
        while True:
            sampled = self._sampler.list_epoch(position.epoch, resumed=not position.at_start)
            schedule = self.schedule(len(sampled))
            schedule.check(position)
            start = schedule.normalize(position)
            if start.epoch == position.epoch:
                self._epoch_used = False
                self._warn_if_empty(schedule)
                computed = isinstance(self._sampler, MixtureOrder | ComputedOrder)
                list_next = partial(self._sampler.list_epoch, resumed=False) if computed else None
                return EpochStream(schedule, EpochStart(EpochStats(events=self.events), start, sampled, list_next))
            position = start

    def normalize(self, position: Position) -> Position:
        """The position, or the start of the next epoch if none of this one is left; never lists the sampler."""
        if position.at_start or not (self._sampler is None or self._sampler.sized):
            return position
        return self.schedule().normalize(position)

    def after(self, position: Position, batches: int) -> Position:
        """The position so many batches after another one, in a later epoch if need be.

        Raises:
            ValueError: An epoch has no batches.
        """
        if isinstance(self._sampler, SamplerAdapter):
            self._sampler.load_state(self._sampler.state(position))
        return self._seek(position, batches)[0]

    def samples_at(self, step: int, epoch: int, rank: int | None, key: Callable[[int], str | None]) -> list[StepSample]:
        """The samples of a step, counted from the start of an epoch; ``rank``: by default this one.

        Raises:
            TypeError, ValueError: An argument is no such number, an epoch has no batches, or the order is a sampler's.
        """
        step, epoch = check_int_from(0, "step", step), check_epoch("epoch", epoch)
        if isinstance(self._sampler, SamplerAdapter):
            raise ValueError(
                f"the samples of a step are not known with {self.describe()}: it lists epochs one after another"
            )
        position, schedule, listed = self._seek(Position(epoch), step, rank)
        change = self._sampler.changed_at if isinstance(self._sampler, MixtureOrder) else Position()
        if (position.epoch, position.consumed) < (change.epoch, change.consumed):
            raise ValueError(
                f"the step is before the mixture was changed, after {counted(change.consumed, 'sample')} of epoch "
                f"{change.epoch}: ask a feeder over the mixture of that time"
            )
        plan, lister = next(schedule.plans(position, listed)), self._samples
        source = lister.name_of if isinstance(lister, MixtureOrder) else lambda _: None
        return [
            StepSample(index, key(index), source(index), position.epoch, at, sample_seed(plan.epoch_seed, at))
            for index, at in zip(plan.indices, plan.positions, strict=True)
        ]

    def _seek(
        self, position: Position, batches: int, rank: int | None = None
    ) -> tuple[Position, Schedule, EpochList | None]:
        """The position so many batches after another one, with the schedule and the list of its epoch."""
        sampler = self._sampler
        while True:
            listed = None if sampler is None else sampler.list_epoch(position.epoch, resumed=not position.at_start)
            schedule = self.schedule(None if listed is None else len(listed))
            if rank is not None:
                schedule = replace(schedule, rank=check_shard((rank, schedule.world_size))[0])
            schedule.check(position)
            if not schedule.batches():
                raise ValueError("an epoch has no batches, so there are no steps")
            left = schedule.batches_left(position)
            if batches < left:
                return schedule.after(position, batches), schedule, listed
            # All epochs are equally long, unless they are listed.
            epochs = 1 if isinstance(listed, BatchLists | np.ndarray) or not position.at_start else batches // left
            batches -= epochs * left
            position = Position(position.epoch + epochs)

    def counts(self, position: Position) -> dict[str, int]:
        """The samples drawn from each source of a mixture before a position, by all ranks; otherwise empty."""
        return self._sampler.counts(position) if isinstance(self._sampler, MixtureOrder | PlanLister) else {}

    def identity(self) -> str:
        """Identifies the order of the epoch planned last, besides the schedule."""
        return "" if self._sampler is None else self._sampler.identity()

    @property
    def _samples(self) -> SamplerAdapter | Lister | None:
        """The order of samples: that of a plan, too."""
        return self._sampler.order if isinstance(self._sampler, PlanLister) else self._sampler

    def _suggest_keyed(self, schedule: Schedule) -> None:
        if schedule.shuffle is True and schedule.length > LARGE_EPOCH and not self._suggested:
            self._suggested = True
            log.info(
                "shuffle=True makes a list of %d indices (%d MiB) per epoch; shuffle='keyed' computes them instead",
                schedule.length,
                schedule.length * 8 >> 20,
            )

    def _warn_if_empty(self, schedule: Schedule) -> None:
        """Warn once about an epoch without batches, which looks like one that has ended."""
        if self._warned or schedule.batches():
            return
        self._warned = True
        where, reason, ranks, number = "", "there are no samples", schedule.world_size, schedule.length
        if 0 < number < ranks:
            where = f" on rank {schedule.rank}"
            reason = f"{counted(number, self._unit)} {'is' if number == 1 else 'are'} fewer than {ranks} ranks, and "
            reason += "drop_last=True" if schedule.pad else "pad=False"
        elif number:
            each = f" on each of {ranks} ranks" if ranks > 1 else ""
            few = f"{counted(number, 'sample')} do{'es' * (number == 1)}"
            reason = f"{few} not fill a batch of {schedule.batch_size}{each}, and drop_last=True"
        log.warning("an epoch has no batches%s: %s", where, reason)

    def on_first_batch(self) -> None:
        """The epoch planned last has returned a batch, or has ended without one: its list is not repeated."""
        self._epoch_used = True

    def resumed(self, position: Position, state: str) -> Position:
        """The position of a state, which may exclude other samples, in this order.

        Raises:
            StateError: It is in an epoch of a plan, or one of which batches or samples were returned before others.
        """
        here = self._samples if isinstance(self._samples, ExcludingOrder) else None
        saved = json_dict(state) if state else {"at": position.consumed}
        if "plan" in saved:
            saved = json_dict(saved.get("order") or '{"at": 0}')
        if not saved.keys() & {"at", "mixture"} or saved.get("exclude") == (here and here.digest):
            return position
        if position.ahead or (isinstance(self._sampler, PlanLister) and position.consumed):
            raise StateError("exclude= cannot change within an epoch of a plan, or of batches returned out of order")
        at = check_int_from(0, "at", saved.get("at", position.consumed))
        return self.normalize(Position(position.epoch, here.consumed(position.epoch, at) if here else at))

    def sampler_state(self, position: Position) -> str:
        """The state that restores the sampler for the epoch of a position, as JSON; empty without a sampler."""
        return "" if self._sampler is None else self._sampler.state(position)

    def load_sampler_state(self, state: str) -> None:
        """Restore the sampler from ``sampler_state``."""
        assert self._sampler is not None
        self._sampler.load_state(state)
        self._epoch_used = True


def find_shard() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a launcher.

    Uses ``torch.distributed`` if it is initialised, else ``RANK`` and ``WORLD_SIZE`` as torchrun sets them.

    Raises:
        ValueError: The environment's values are no rank and world size.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        shard = (int(distributed.get_rank()), int(distributed.get_world_size()))
        log.info("shard %d of %d, from torch.distributed", *shard)
        return shard
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not rank or not world_size:  # an empty variable is one that is not set
        return (0, 1)
    try:
        shard = check_shard((int(rank), int(world_size)))
    except ValueError as error:
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world_size!r} in the environment: {error}") from error
    log.info("shard %d of %d, from RANK and WORLD_SIZE", *shard)
    return shard


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """The shard as a tuple; ``TypeError`` or ``ValueError`` if it is not (rank, world size)."""
    if (
        not isinstance(shard, tuple | list)
        or len(shard) != 2
        or not all(isinstance(number, int) and not isinstance(number, bool) for number in shard)
    ):
        raise TypeError(f"shard must be (rank, world_size), a DeviceMesh, (name, mesh), None or 'auto', got {shard!r}")
    rank, world_size = shard
    if not 0 <= rank < world_size:
        raise ValueError(f"shard must be (rank, world_size) with 0 <= rank < world_size, got {shard!r}")
    return (rank, world_size)
