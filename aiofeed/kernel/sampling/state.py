"""The position of a feeder, and its saved state.

How a resumed epoch knows where to go on: ``SavedState`` has a ``Position``, ``Checkpoint.load`` stores it, the next
``iter()`` starts at ``Checkpoint.next_position``, and ``Schedule`` computes the remaining batches from it. From the
first batch on, ``EpochProgress`` counts the batches that the user gets; ``Checkpoint.position`` is computed from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.validation import check_bool, check_epoch, check_int_from, check_positive_int, check_seed
from aiofeed.kernel.sampling.schedule import Position, Returned, Schedule, check_shuffle
from aiofeed.kernel.sampling.trail import Trail, digest

T = TypeVar("T")

InOrder: TypeAlias = bool | Literal["samples"]

VERSION = 1

# Stands for the samples seen before a state that has no receipt.
UNKNOWN = "unknown"

OTHER_STATES = {
    "own_generators": "an aiofeed.DataLoader; a Feeder saves and loads states of its own",
    "_iterator_finished": "torchdata's StatefulDataLoader, whose order a Feeder does not have; a Feeder can begin at "
    "an epoch, with set_epoch(n)",
}
"""The program that has saved a state, by a key that only its states have."""

ORDERS = {
    "stream plan": "a plan over a Stream",
    "plan": "a plan (Buckets, TokenBudget, Balanced or Pack)",
    "mixture": "a Mixture",
    "weights": "weights=",
    "exclude": "exclude=",
    "shuffle": 'shuffle="window"',
    "snapshot": "a Stream",
    "epoch": "sampler= or batch_sampler=",
}
"""Names of orders, by a key of the sampler's state."""


@dataclass(frozen=True)
class SavedState:
    """The state of a feeder.

    Args:
        schedule: The order of samples.
        position: The position of the user.
        fingerprint: Identifies the source.
        in_order: The order in which batches are returned, see ``Feeder``.
        sampler: The state of the sampler as the JSON of a dict; empty without one.
        trail: What was seen before the position.
        moved: Whether the position is another one than was saved.
    """

    schedule: Schedule
    position: Position
    fingerprint: str
    in_order: InOrder = True
    sampler: str = ""
    trail: Trail = field(default_factory=Trail)
    moved: bool = False

    @property
    def receipt(self) -> str:
        """See ``Feeder.receipt``; empty for a stream."""
        return "" if self.order == ORDERS["snapshot"] else digest(self.fingerprint, self.trail.digest())

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values, for JSON and ``torch.load(weights_only=True)``; always with the same keys."""
        return {
            "version": VERSION,
            "epoch": self.position.epoch,
            "position": self.position.consumed,
            "handed_out": sorted(self.position.ahead),
            **asdict(self.schedule),
            "in_order": self.in_order,
            "fingerprint": self.fingerprint,
            "sampler": self.sampler,
            "receipt": self.receipt,
            # The receipt does not have the position at the start of an epoch and after `skip`; its digest is there for
            # `load_state_dict`.
            "trail": [self.trail.before, self.trail.order, self.trail.first, _digest_of(self.position)],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedState:
        """Return the state from a dict of ``to_dict``.

        Raises:
            StateError: The dict is not a state, or is damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"a feeder's state is a dict, got {type(state).__name__}{state_hint(state, 'handed_out')}")
        for key, owner in OTHER_STATES.items():
            if key in state:
                raise StateError(f"this is the state of {owner}")
        if "version" not in state:
            keys, hint = sorted(map(str, state))[:16], state_hint(state, "handed_out")
            raise StateError(f"this is not the state of a feeder: it has the keys {keys}{hint}")
        if not isinstance(state["version"], int) or state["version"] != VERSION:
            raise StateError(f"the state has version {state['version']!r}; this aiofeed reads version {VERSION}")

        def field_of(name: str, check: Callable[[str, object], T]) -> T:
            if name not in state:
                raise KeyError(name)
            return check(name, state[name])

        natural = partial(check_int_from, 0)
        older = not state.keys() & {"receipt", "trail"}
        try:
            position = Position(
                field_of("epoch", check_epoch), field_of("position", natural), field_of("handed_out", _batch_numbers)
            )
            world_size = field_of("world_size", check_positive_int)
            rank = field_of("rank", natural)
            if rank >= world_size:
                raise ValueError(f"rank must be less than world_size={world_size}, got {rank}")
            saved = cls(
                Schedule(
                    length=field_of("length", natural),
                    batch_size=field_of("batch_size", check_positive_int),
                    seed=field_of("seed", lambda _, value: check_seed(value)),
                    shuffle=field_of("shuffle", check_shuffle),
                    drop_last=field_of("drop_last", check_bool),
                    pad=field_of("pad", check_bool),
                    rank=rank,
                    world_size=world_size,
                ),
                position,
                field_of("fingerprint", _text),
                field_of("in_order", check_in_order),
                field_of("sampler", partial(_sampler, position.epoch)),
                Trail(UNKNOWN) if older else field_of("trail", partial(_trail, position)),
                not older and list(state["trail"][3:]) not in ([], [_digest_of(position)]),
            )
            if not older and field_of("receipt", _text) != saved.receipt:
                raise ValueError("its receipt is not that of its epoch, position, handed_out, trail and fingerprint")
            return saved
        except (TypeError, ValueError, KeyError) as error:
            raise unreadable("the state", error) from error

    def check_compatible(self, mine: SavedState) -> None:
        """Raise if a feeder with the state ``mine`` cannot resume from this state.

        Raises:
            StateError: It cannot; the message lists all differences.
        """
        differences = []
        if self.order != mine.order and {self.order, mine.order} != {"shuffle=", ORDERS["exclude"]}:
            differences.append(f"order: {self.order} in the state, {mine.order} here")
        # Whether a mixture may change like this is for its order to judge.
        mixture, own = (json.loads(each.sampler).get("mixture") if each.sampler else None for each in (self, mine))
        changed = isinstance(mixture, str) and isinstance(own, str) and mixture != own
        fixed = ("seed", "shuffle", "drop_last", "pad", *([] if changed else ["length"]))
        values = [(name, getattr(self.schedule, name), getattr(mine.schedule, name)) for name in fixed]
        differences += [f"{name}: {saved!r} in the state, {own!r} here" for name, saved, own in values if saved != own]
        if self.fingerprint != mine.fingerprint and not changed:
            differences.append(
                f"fingerprint of the source: {self.fingerprint!r} in the state, {mine.fingerprint!r} here (another "
                f"type of source, other data, or other names of samples)"
            )
        differences += self._differences_of_shards(mine)
        if differences:
            raise StateError("the state does not match this feeder: " + "; ".join(differences))
        if not self.sampler:  # with one, the epoch has to be listed first
            mine.schedule.check(self.position)
        if self.moved:
            raise StateError("the state is damaged: its trail is not that of its epoch, position and handed_out")

    @property
    def order(self) -> str:
        """What decides the order, in the words of ``Feeder``'s arguments."""
        if not self.sampler:
            return "shuffle="
        return next(words for key, words in ORDERS.items() if key in json.loads(self.sampler))

    def _differences_of_shards(self, mine: SavedState) -> list[str]:
        """The differences of batch size, world size and rank, if the rest of the epoch cannot be sharded again."""
        fixed: tuple[str, ...]
        if self.position.at_start:
            return []
        if self.position.ahead and self.in_order != mine.in_order and "samples" in (self.in_order, mine.in_order):
            units = {"samples": "samples", False: "batches"}
            return [
                f"in_order: {self.in_order!r} in the state, {mine.in_order!r} here (the state lists the "
                f"{units[self.in_order]} that were returned before others)"
            ]
        if self.in_order == "samples":
            why = 'in_order="samples" each rank has returned other samples, and must load the state that it has saved:'
            fixed = ("world_size", "rank")
        elif self.position.ahead or not (self.in_order and mine.in_order):
            # The state has the numbers of batches, which mean other samples with another batch size. And each rank has
            # returned other numbers.
            why = "in_order=False"
            fixed = ("batch_size", "world_size") if self.in_order else ("batch_size", "world_size", "rank")
        elif not self.schedule.pad:
            # Ranks have different numbers of batches, so near the end of an epoch their states differ.
            why, fixed = "pad=False", ("batch_size", "world_size", "rank")
        else:
            return []
        return [
            f"{name}: {getattr(self.schedule, name)} in the state, {getattr(mine.schedule, name)} here "
            f"(with {why} the rest of an epoch cannot be sharded again)"
            for name in fixed
            if getattr(self.schedule, name) != getattr(mine.schedule, name)
        ]


def unreadable(state: str, error: Exception) -> StateError:
    """Return the error of a state that lacks an entry, as that of another version does, or is damaged."""
    if not isinstance(error, KeyError):
        return StateError(f"{state} is damaged: {error}")
    return StateError(
        f"{state} is not of version {VERSION} as this aiofeed reads it: it lacks {error}, so another aiofeed has saved "
        f"it. Go on to the end of its epoch with that one, or begin an epoch without the state"
    )


def states_in(value: object, key: str, name: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the dicts with a key within dicts and lists, such as a checkpoint, each with its place."""
    if isinstance(value, Mapping) and key in value:
        yield name, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for at, each in inner:
        yield from states_in(each, key, (*name, at))


def state_hint(given: object, key: str) -> str:
    """Return what to load in place of a path or a whole checkpoint, as the end of a message."""
    if isinstance(given, str | os.PathLike):
        return f": load the file first, torch.load({os.fspath(given)!r}), and pass its state"
    places = ["".join(f"[{at!r}]" for at in name) for name, _ in states_in(given, key)]
    return f"; did you mean state{' or state'.join(places[:4])}?" if places else ""


def check_in_order(name: str, value: Any) -> InOrder:
    """``value`` if it is True, False or "samples"."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "samples"):
        return value  # type: ignore[return-value]
    raise TypeError(f'{name} must be True, False or "samples", got {value!r}')


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    return value


def json_dict(text: object) -> dict[str, Any]:
    """Return the state of a sampler from its JSON.

    Raises:
        StateError: It is not the JSON of a dict.
    """
    try:
        state = json.loads(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise StateError(f"the state is damaged: its sampler must be the JSON of a dict, got {text!r:.200}")
    return state


def _sampler(epoch: int, name: str, value: object) -> str:
    """``value`` if it is empty, or the JSON of a sampler's state for an epoch."""
    text = _text(name, value)
    if text:
        state = json_dict(text)
        if not ORDERS.keys() & state.keys():
            raise ValueError(f"{name} must be the state of a sampler or another order, got {text!r:.200}")
        if state.get("epoch", epoch) != epoch:
            raise ValueError(f"{name} has the state of epoch {state['epoch']!r}, and the position is in epoch {epoch}")
    return text


def _digest_of(position: Position) -> str:
    return digest(position.epoch, position.consumed, sorted(position.ahead))


def _trail(end: Position, name: str, value: object) -> Trail:
    # In a state of an older version it has no digest of the position.
    if not isinstance(value, list | tuple) or len(value) not in (3, 4):
        raise TypeError(f"{name} must be two digests, a position and its digest, got {value!r:.200}")
    before, order, *_ = [_text(name, digest) for digest in (*value[:2], *value[3:])]
    return Trail(before, order, check_int_from(0, name, value[2]), end)


def _batch_numbers(name: str, value: object) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} must be a list of ints, got {value!r}")
    return frozenset(check_int_from(0, f"{name}[{at}]", number) for at, number in enumerate(value))


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
