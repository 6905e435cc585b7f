"""Which batches were returned, the position that follows from them, and a digest of the samples that they had.

``EpochProgress`` counts the batches of an iterator from its first one on. ``Checkpoint`` has the position to save, and
the one where the next ``iter()`` starts. Receipts are made of a ``Trail``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from aiofeed.kernel.sampling.schedule import Position, Returned, Schedule

InOrder: TypeAlias = bool | Literal["samples"]


def check_in_order(name: str, value: Any) -> InOrder:
    """``value`` if it is True, False or "samples"."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "samples"):
        return value  # type: ignore[return-value]
    raise TypeError(f'{name} must be True, False or "samples", got {value!r}')


def digest(*parts: object) -> str:
    """Return a digest of some values, by their texts."""
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def order_digest(schedule: Schedule, in_order: InOrder, lister: str) -> str:
    """Identifies the order of an epoch, whose lister identifies itself.

    If ranks may return different numbers of samples, also the rank whose samples are known.
    """
    own: tuple[object, ...] = ()
    if in_order is not True or not schedule.pad:
        own = (in_order, schedule.rank, schedule.world_size, in_order is False and schedule.batch_size)
    return digest(schedule.seed, schedule.shuffle, schedule.length, lister, *own)


@dataclass(frozen=True)
class Trail:
    """What a run has seen: consecutive samples of one order and epoch, and a digest of all before.

    An interrupted run that goes on where it was has the trail of an uninterrupted one, also with another batch size or
    world size. Skipping batches, or leaving an epoch, ends a span.

    Args:
        before: The digest of earlier spans; empty if there are none.
        order: The digest of the order of this span; empty if there is no span.
        first: The position of its first sample.
        end: The position after its last sample.
    """

    before: str = ""
    order: str = ""
    first: int = 0
    end: Position = field(default_factory=Position)

    def digest(self) -> str:
        """Return the digest of all spans."""
        if not self.order:
            return self.before
        end = self.end
        return digest(self.before, self.order, end.epoch, self.first, end.consumed, sorted(end.ahead))

    def extended(self, order: str, start: Position, end: Position) -> Trail:
        """Return the trail after the samples between two positions of an epoch."""
        if start == end:
            return self
        if (self.order, self.end) == (order, start):
            return replace(self, end=end)
        return Trail(self.digest(), order, start.consumed, end)

    def at(self, position: Position) -> Trail:
        """Return the trail of a run that goes on at a position."""
        return self if self.order and self.end == position else Trail(self.digest(), "", position.consumed, position)


class EpochProgress:
    """The batches that one iterator has returned. Computes the position only when asked for it.

    Args:
        schedule: The order of samples.
        start: Where the iterator began.
        in_order: The order in which batches are returned, see ``Feeder``.

    Attributes:
        ended: Whether the consumer has seen the end of the epoch, after the last batch.
        order_digest: The digest of the order.
        before: What was seen before.
    """

    def __init__(self, schedule: Schedule, start: Position, in_order: InOrder) -> None:
        self.start = start
        self.order_digest: str = ""
        self.before: Trail = Trail()
        self._schedule = schedule
        self._last = -1
        # Batches that `_last` and `_left` count as returned, and that still wait here.
        self._following: Sized = ()
        self._batches = self._left = schedule.batches_left(start)
        # The batches that `_left` counts and that do not exist, because the epoch is shorter than the schedule.
        self._surplus = 0
        self.ended = False
        # A dict and not a set, because set.add is a call, and a signal handler may run after a call.
        self._numbers: dict[int, None] | None = None if in_order else {}
        # ``None`` if the batches returned are those that were planned.
        self._returned_samples: Returned | None = None

    @property
    def started(self) -> bool:
        """Whether a batch was returned."""
        return self._last >= 0

    def record(self, number: int, samples: Returned | None = None, following: Sized = (), followers: int = 0) -> None:
        """Count a batch. Makes no call, so that Ctrl-C arrives before or after it and never in the middle.

        Args:
            number: The number of the batch.
            samples: With ``in_order="samples"`` the samples that are now returned.
            following: The batches after it that are counted when they are deleted from this list, if in order.
            followers: Their number at first.
        """
        self._last = number + followers
        self._left -= 1 + followers
        self._following = following
        self._returned_samples = samples
        if self._numbers is not None:
            self._numbers[number] = None

    def shorten(self, length: int) -> None:
        """Set the length of an epoch, once it is known; call it before the last batch is returned.

        The engine's thread may call it: it changes nothing that ``record`` changes.
        """
        schedule = replace(self._schedule, length=length)
        self._surplus = self._schedule.batches(self.start.consumed) - schedule.batches(self.start.consumed)
        self._schedule = schedule

    @property
    def returned(self) -> int:
        """The number of batches that were returned."""
        return self._batches - self._left - len(self._following)

    @property
    def one_left(self) -> bool:
        """Whether all batches but one were returned."""
        return self._left + len(self._following) - self._surplus == 1

    @property
    def complete(self) -> bool:
        """Whether all batches were returned."""
        return self._left + len(self._following) == self._surplus

    @property
    def looked_at(self) -> bool:
        """Whether no more than one batch of several was returned."""
        return self.returned <= 1 and not self.complete

    def position(self) -> Position:
        """Return the position after the batches that were returned."""
        if not self.started:
            return Position(self.start.epoch + 1) if self.ended else self.start
        if self._returned_samples is not None:
            schedule: Any = self._schedule  # a ``SampleSchedule``
            found: Position = schedule.position_at(self.start, self._returned_samples)
            return found
        numbers = None if self._numbers is None else self._numbers.keys()
        return self._schedule.position_after(self.start, self._last - len(self._following), numbers)

    def trail(self) -> Trail:
        """Return what was seen up to the batches that were returned."""
        end = self.position()
        if end.epoch != self.start.epoch and self.started:
            schedule, consumed = self._schedule, self.start.consumed
            end = Position(self.start.epoch, schedule.consumed_after(consumed, schedule.batches(consumed)))
        return self.before.extended(self.order_digest, self.start, end if self.started else self.start)


@dataclass(eq=False)
class Checkpoint:
    """The position that ``state_dict`` saves, and the position where the next ``iter()`` starts.

    Args:
        start: The position while ``progress`` is ``None``.
        progress: The progress of the last iterator that has returned a batch, or has ended without one.
        loaded: A loaded position, until its iterator has returned a batch or ``set_epoch`` discards it.
        next_epoch: The epoch that the next ``iter()`` starts if no position is loaded.
        current_epoch: The epoch that is being iterated, or was iterated last.
        chosen: Whether the next epoch was chosen, by ``load`` or ``set_epoch``, after the last ``iter()``.
        before: What was seen while ``progress`` is ``None``.
    """

    start: Position = field(default_factory=Position)
    progress: EpochProgress | None = None
    loaded: Position | None = None
    next_epoch: int = 0
    current_epoch: int = 0
    chosen: bool = False
    before: Trail = field(default_factory=Trail)

    @property
    def trail(self) -> Trail:
        """Return the trail up to ``position``."""
        return (self.before if self.progress is None else self.progress.trail()).at(self.position)

    @property
    def position(self) -> Position:
        """The position that ``state_dict`` saves."""
        return self.start if self.progress is None else self.progress.position()

    def _reset(self, position: Position) -> None:
        self.before = self.before if self.progress is None else self.progress.trail()
        self.start, self.progress = position, None

    def next_position(self) -> Position:
        """Return where the next ``iter()`` starts."""
        return self.loaded if self.loaded is not None else Position(self.next_epoch)

    def load(self, position: Position, trail: Trail | None = None) -> None:
        """Let the next ``iter()`` start at ``position``, by default of the same run."""
        self.loaded = position
        self.chosen = True
        self._reset(position)
        self.before = self.before if trail is None else trail
        self.next_epoch = self.current_epoch = position.epoch

    def set_epoch(self, epoch: int, live: bool) -> None:
        """Let the next ``iter()`` start ``epoch``. A loaded position in the same epoch stays, another is discarded."""
        if self.loaded is not None and self.loaded.epoch == epoch:
            return
        discarded, self.loaded = self.loaded is not None, None
        self.next_epoch = epoch
        if live:
            self.chosen = epoch != self.current_epoch
        else:
            self.current_epoch, self.chosen = epoch, True
            if discarded or self.position.at_start:
                self._reset(Position(epoch))

    def on_iter(self, epoch: int) -> None:
        """Note that an iterator of ``epoch`` was created."""
        self.current_epoch = epoch
        self.chosen = False

    def on_first_batch(self, progress: EpochProgress) -> None:
        """Let ``progress`` give the position: its iterator returns its first batch, or ends without one.

        A position loaded, or an epoch chosen, after the iterator was created stays for the next iterator.
        """
        if not self.chosen:
            self.loaded = None
            self.next_epoch = progress.start.epoch + 1
        if self.loaded is None:
            progress.before = self.before if self.progress is None else self.progress.trail()
            self.progress = progress

    def on_failure(self, progress: EpochProgress) -> None:
        """Note that an iterator ends with an error; if it failed before its first batch, the position is its start."""
        if not progress.started and not self.chosen:
            self._reset(progress.start)
