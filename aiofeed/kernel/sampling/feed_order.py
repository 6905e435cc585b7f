"""The order of a feeder as its arguments specify it: shuffled, sampled, sharded by rank and world size."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.statistics import EpochStats, Event, new_events
from aiofeed.kernel.core.validation import check_int_from, counted
from aiofeed.kernel.sampling.epochs import EpochStart, EpochStream
from aiofeed.kernel.sampling.lister import Lister
from aiofeed.kernel.sampling.order import BatchLists, EpochList
from aiofeed.kernel.sampling.schedule import Position, Schedule

log: logging.Logger = logging.getLogger("aiofeed.sampling")

# The index list of a shuffled epoch of this length takes 240 MB, and seconds to make.
LARGE_EPOCH = 30_000_000
# Variables with the number of this process and of all, as torchrun and others, srun and mpirun set them. A batch script
# of SLURM, which has a job but no step, is one process, however many tasks the job may have.
_LAUNCHED = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class FeedOrder:
    """The order of a feeder. Finds rank and world size when they are first needed.

    Args:
        base: The order without lister and shard.
        shard: See ``Feeder``.
        lister: Lists the epochs in place of ``base``, which counts batches if those are listed.

    Attributes:
        lister: Lists the epochs.
        events: Receives the events of all epochs.
        replica: The number of this process among those that get the same batches.

    Raises:
        TypeError: The shard has the wrong type.
        ValueError: The rank is not below the world size.
    """

    def __init__(
        self, base: Schedule, shard: tuple[int, int] | Literal["auto"] | None, lister: Lister | None = None
    ) -> None:
        self._base = base
        self.lister: Lister = Lister(base.length) if lister is None else lister
        self._batch_size: object = self.lister if self.lister.argument == "batch_size" else base.batch_size
        self._unit = "batch" if self.lister.by_batches else "sample"
        self._shard: tuple[int, int] | None = None
        self._given = shard
        if self.lister.distributed or shard is None:
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
        """Return the order in the words of ``Feeder``'s arguments."""
        lister, base = self.lister, self._base
        size = "" if lister.argument == "batch_sampler" else f"batch_size={self._batch_size}, "
        order = f"shuffle={base.shuffle!r}"
        if lister.argument not in ("", "batch_size"):
            order = f"{lister.argument}={lister}"
        return f"{size}{order}" + ("" if lister.listed_once else f", seed={base.seed}")

    def schedule(self, length: int | None = None) -> Schedule:
        """Return the schedule of an epoch of ``length`` samples, by default the sampler's or the source's length.

        Raises:
            TypeError: ``length`` is ``None`` and the sampler has no length.
        """
        if self._shard is None:
            self._shard = find_shard()
        self.lister.check_ranks(self._shard[1])
        if length is None:
            length = len(self.lister)
        return replace(self._base, length=length, rank=self._shard[0], world_size=self._shard[1])

    @property
    def rank(self) -> int:
        """The rank, once it was needed; 0 before, and on one of the processes that get the same batches only."""
        return (0 if self._shard is None else self._shard[0]) + self.replica

    def may_differ(self) -> bool:
        """Return whether ranks may return different numbers of batches: there is one only, or ``pad=False``.

        Other ranks are those that share the samples, by ``shard=`` or a sampler, and all processes of the training.
        """
        given = 1 if self._given is None or self._given == "auto" else self._given[1]
        return not self._base.pad or max(given, self.lister.sample_lister.ranks, find_shard()[1]) == 1

    def batches_of_rank(self) -> int:
        """Return the number of batches per epoch of this rank. Warn once under Accelerate, which expects all ranks'."""
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
        """Return the epoch at ``position`` from there on, or the next one if none of it is left."""
        lister = self.lister
        if not self._epoch_used:
            lister.repeat_last_epoch()
        while True:
            listed = lister.list_epoch(position.epoch, resumed=not position.at_start)
            schedule = self.schedule(None if listed is None else len(listed))
            schedule.check(position)
            start = schedule.normalize(position)
            if listed is None or start.epoch == position.epoch:
                self._epoch_used = False
                if listed is None:
                    self._suggest_keyed(schedule)
                self._warn_if_empty(schedule)
                # The next epoch may have another number of batches.
                waits = listed is None or lister.listed_once or lister.by_batches
                list_next = None if waits else partial(lister.list_epoch, resumed=False)
                return EpochStream(schedule, EpochStart(EpochStats(events=self.events), start, listed, list_next))
            position = start

    def normalize(self, position: Position) -> Position:
        """Return the position, or the start of the next epoch if none of this one is left; never lists the sampler."""
        if position.at_start or not self.lister.sized:
            return position
        return self.schedule().normalize(position)

    def after(self, position: Position, batches: int) -> Position:
        """Return the position so many batches after another one, in a later epoch if need be.

        Raises:
            ValueError: An epoch has no batches.
        """
        if self.lister.listed_once:
            self.lister.load_state(self.lister.state(position))
        return self.seek(position, batches)[0]

    def seek(
        self, position: Position, batches: int, rank: int | None = None
    ) -> tuple[Position, Schedule, EpochList | None]:
        """Return the position so many batches after another one, with the schedule and the list of its epoch."""
        while True:
            listed = self.lister.list_epoch(position.epoch, resumed=not position.at_start)
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

    def _suggest_keyed(self, schedule: Schedule) -> None:
        if schedule.shuffle is True and schedule.length > LARGE_EPOCH and not self._suggested:
            self._suggested = True
            log.warning(
                "shuffle=True makes a list of %d indices (%d MiB) before each epoch; shuffle='keyed' begins at once",
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
        """Do not repeat the list of the epoch planned last: it has returned a batch, or has ended without one."""
        self._epoch_used = True

    def resumed(self, position: Position, state: str) -> Position:
        """Return the position of a state, which may exclude other samples, in this order.

        Raises:
            StateError: It is in an epoch of a plan, or one of which batches or samples were returned before others.
        """
        from aiofeed.kernel.sampling.state import json_dict

        lister = self.lister.sample_lister
        saved = json_dict(state) if state else {"at": position.consumed}
        if "plan" in saved:
            saved = json_dict(saved.get("order") or '{"at": 0}')
        if not saved.keys() & {"at", "mixture"} or saved.get("exclude") == lister.excluded:
            return position
        if position.ahead or (self.lister.by_batches and position.consumed):
            raise StateError("exclude= cannot change within an epoch of a plan, or of batches returned out of order")
        at = check_int_from(0, "at", saved.get("at", position.consumed))
        return self.normalize(Position(position.epoch, lister.consumed(position.epoch, at)))

    def sampler_state(self, position: Position) -> str:
        """Return the state that restores the sampler for the epoch of a position, as JSON; empty without a sampler."""
        return self.lister.state(position)

    def load_sampler_state(self, state: str) -> None:
        """Restore the sampler from ``sampler_state``."""
        self.lister.load_state(state)
        self._epoch_used = True


def find_shard() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a launcher.

    Uses ``torch.distributed`` if it is initialised, else ``RANK`` and ``WORLD_SIZE`` as torchrun sets them, else the
    numbers of the task as srun or mpirun sets them, if there are several tasks.

    Raises:
        ValueError: The environment's values are no rank and world size.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        shard = (int(distributed.get_rank()), int(distributed.get_world_size()))
        log.info("shard %d of %d, from torch.distributed", *shard)
        return shard
    for names in _LAUNCHED:
        rank, world_size = map(os.environ.get, names)
        if not rank or not world_size:  # an empty variable is one that is not set
            continue
        if names[1] == "SLURM_NTASKS" and "SLURM_JOB_ID" in os.environ:
            continue
        try:
            shard = check_shard((int(rank), int(world_size)))
        except ValueError as error:
            raise ValueError(
                f"{names[0]}={rank!r} and {names[1]}={world_size!r} in the environment: {error}"
            ) from error
        if names[0] == "RANK" or shard[1] > 1:
            # Tasks may also be independent programs, which each want all samples: they should see this line.
            level = logging.INFO if names[0] == "RANK" else logging.WARNING
            log.log(level, "shard %d of %d, from %s and %s; shard=None reads all samples", *shard, *names)
            return shard
    return (0, 1)


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Return the shard as a tuple; ``TypeError`` or ``ValueError`` if it is not (rank, world size)."""
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
