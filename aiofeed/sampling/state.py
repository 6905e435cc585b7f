"""Where a feeder stands, and how that is written down and read again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiofeed.core.errors import StateError
from aiofeed.sampling.schedule import Position, Schedule, Shuffle

VERSION = 1


@dataclass(frozen=True)
class SavedState:
    """A feeder's state, as it is written down: plain numbers and strings.

    Args:
        schedule: the order it belongs to.
        position: where it stands.
        fingerprint: of the source.
        in_order: whether batches are handed out in order.
        sampler: what restores the sampler, as JSON; empty without one.
    """

    schedule: Schedule
    position: Position
    fingerprint: str
    in_order: bool = True
    sampler: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same keys always; survives JSON and ``torch.load(weights_only=True)``."""
        schedule, position = self.schedule, self.position
        return {
            "version": VERSION,
            "seed": schedule.seed,
            "epoch": position.epoch,
            "position": position.consumed,
            "handed_out": sorted(position.ahead),
            "batch_size": schedule.batch_size,
            "rank": schedule.rank,
            "world_size": schedule.world_size,
            "shuffle": schedule.shuffle,
            "drop_last": schedule.drop_last,
            "pad": schedule.pad,
            "in_order": self.in_order,
            "length": schedule.length,
            "fingerprint": self.fingerprint,
            "sampler": self.sampler,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedState:
        """Read a state; ``StateError`` where it is none."""
        if not isinstance(state, Mapping):
            raise StateError(f"a feeder's state is a dict, got {type(state).__name__}")
        if "version" not in state:
            raise StateError(f"this is no state of a feeder: it has the keys {sorted(map(str, state))}")
        if state["version"] != VERSION:
            raise StateError(f"the state has version {state['version']!r}; this aiofeed reads version {VERSION}")
        try:
            position = Position(int(state["epoch"]), int(state["position"]), frozenset(map(int, state["handed_out"])))
            if position.consumed < 0 or any(number < 0 for number in position.ahead):
                raise ValueError(f"position {position.consumed}, handed_out {sorted(position.ahead)}")
            return cls(
                Schedule(
                    length=int(state["length"]),
                    batch_size=int(state["batch_size"]),
                    seed=int(state["seed"]),
                    shuffle=_shuffle(state["shuffle"]),
                    drop_last=bool(state["drop_last"]),
                    pad=bool(state["pad"]),
                    rank=int(state["rank"]),
                    world_size=int(state["world_size"]),
                ),
                position,
                str(state["fingerprint"]),
                bool(state["in_order"]),
                str(state["sampler"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state is damaged: {type(error).__name__}: {error}") from error

    def check(self, mine: SavedState) -> None:
        """``StateError``, saying exactly what differs, where a feeder like ``mine`` cannot continue this state."""
        differ = [
            f"{name}: {saved!r} in the state, {own!r} here"
            for name, saved, own in (
                ("seed", self.schedule.seed, mine.schedule.seed),
                ("shuffle", self.schedule.shuffle, mine.schedule.shuffle),
                ("drop_last", self.schedule.drop_last, mine.schedule.drop_last),
                ("pad", self.schedule.pad, mine.schedule.pad),
                ("length", self.schedule.length, mine.schedule.length),
                ("fingerprint of the source", self.fingerprint, mine.fingerprint),
            )
            if saved != own
        ]
        if bool(self.sampler) != bool(mine.sampler):
            differ.append(f"sampler: {'one' if self.sampler else 'none'} in the state, the contrary here")
        differ += self._cannot_restripe(mine)
        if differ:
            raise StateError("the state belongs to another feed: " + "; ".join(differ))
        end = -(-self.schedule.length // self.schedule.world_size) * self.schedule.world_size
        if not self.sampler and self.position.consumed > end:
            raise StateError(f"the state is damaged: position {self.position.consumed}, but its epoch ends at {end}")

    def _cannot_restripe(self, mine: SavedState) -> list[str]:
        """What differs where the rest of the epoch cannot be spread anew over other batches or ranks."""
        fixed: tuple[str, ...]
        if self.position.fresh:
            return []
        if self.position.ahead or not (self.in_order and mine.in_order):
            # Batches out of order are known by number, and a number means nothing to other batches.
            # Nor is one rank's part of them another's, once it has handed them out as they came.
            why = "in_order=False"
            fixed = ("batch_size", "world_size") if self.in_order else ("batch_size", "world_size", "rank")
        elif not self.schedule.pad:
            # Ranks end unevenly, so near the end of an epoch one rank's state is not another's.
            why, fixed = "pad=False", ("batch_size", "world_size", "rank")
        else:
            return []
        return [
            f"{name}: {getattr(self.schedule, name)} in the state, {getattr(mine.schedule, name)} here "
            f"(with {why} the rest of an epoch cannot be striped anew)"
            for name in fixed
            if getattr(self.schedule, name) != getattr(mine.schedule, name)
        ]


def _shuffle(value: Any) -> Shuffle:
    if value is True or value is False or value == "keyed":
        return value  # type: ignore[no-any-return]
    raise ValueError(f"shuffle is {value!r}")


class EpochProgress:
    """What one pass has handed out. Told of every batch, so it only takes note; where it stands is worked out if asked.

    Args:
        schedule: the order of the pass.
        start: where it began.
        in_order: whether batches come in order.

    Attributes:
        ended: whether the end was seen, behind the last batch.
    """

    def __init__(self, schedule: Schedule, start: Position, in_order: bool) -> None:
        self.start = start
        self._schedule = schedule
        self._last = -1
        self._left = schedule.shard(start.consumed).batches - len(start.ahead)
        self.ended = False
        # A dict, because to put something into a set is a call, and a signal handler may run after it.
        self._numbers: dict[int, None] | None = None if in_order else {}

    @property
    def began(self) -> bool:
        """Whether it has handed out a batch."""
        return self._last >= 0

    def handed_out(self, number: int) -> None:
        """Note a batch. No call: Ctrl-C comes before or after this, never in the middle."""
        self._last = number
        self._left -= 1
        if self._numbers is not None:
            self._numbers[number] = None

    @property
    def last_to_come(self) -> bool:
        """Whether all but the last batch were handed out."""
        return self._left == 1

    @property
    def complete(self) -> bool:
        """Whether the last batch was handed out."""
        return self._left == 0

    def position(self) -> Position:
        """Where the epoch stands now."""
        if not self.began:
            return self.start
        numbers = None if self._numbers is None else self._numbers.keys()
        return self._schedule.after(self.start, self._last, numbers)


@dataclass(eq=False)
class Checkpoint:
    """Where a feeder stands, what the next ``iter()`` begins with, and what a state says meanwhile.

    Args:
        start: what ``state_dict`` says, unless a pass has handed out batches since.
        account: of the pass that has.
        loaded: a loaded position, until it has handed out a batch or was discarded.
        coming: the epoch that begins next where nothing was loaded.
        current: the epoch that is being iterated, or was last.
        chosen: whether what comes next was chosen, by a load or by ``set_epoch``, after the last pass was begun.
    """

    start: Position = field(default_factory=Position)
    account: EpochProgress | None = None
    loaded: Position | None = None
    coming: int = 0
    current: int = 0
    chosen: bool = False

    @property
    def reported(self) -> Position:
        """What ``state_dict`` says."""
        return self.start if self.account is None else self.account.position()

    def _report(self, position: Position) -> None:
        self.start, self.account = position, None

    def next_position(self) -> Position:
        """Where the next ``iter()`` begins."""
        return self.loaded if self.loaded is not None else Position(self.coming)

    def begin(self, epoch: int) -> None:
        """A pass through ``epoch`` begins."""
        self.current = epoch
        self.chosen = False

    def load(self, position: Position) -> None:
        """The next pass begins at ``position``."""
        self.loaded = position
        self.chosen = True
        self._report(position)
        self.coming = self.current = position.epoch

    def set_epoch(self, epoch: int, live: bool) -> None:
        """The next pass begins ``epoch``; a loaded position of the same epoch stays, any other is discarded."""
        if self.loaded is not None and self.loaded.epoch == epoch:
            return
        discarded, self.loaded = self.loaded is not None, None
        self.coming = epoch
        if live:
            self.chosen = epoch != self.current
        else:
            self.current = epoch
            if discarded or self.reported.fresh:
                self._report(Position(epoch))

    def follow(self, account: EpochProgress) -> None:
        """A pass hands out its first batch: from now on it says where the feeder stands.

        A position that was loaded, or an epoch that was chosen, after the pass was begun counts at the next one.
        """
        if not self.chosen:
            self.loaded = None
            self.coming = account.start.epoch + 1
        if self.loaded is None:
            self.account = account

    def failed(self, account: EpochProgress) -> None:
        """A pass ends with an error: it stands at the batch that failed, be it the first."""
        if not account.began and not self.chosen:
            self._report(account.start)
