"""The saved state of a feeder.

How a resumed epoch knows where to go on: ``SavedState`` has a ``Position``, ``Checkpoint.load`` of ``progress.py``
stores it, the next ``iter()`` starts at ``Checkpoint.next_position``, and ``Schedule`` computes the remaining batches
from it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.validation import check_bool, check_epoch, check_int_from, check_positive_int, check_seed
from aiofeed.kernel.sampling.progress import InOrder, Trail, check_in_order, digest
from aiofeed.kernel.sampling.schedule import Position, Schedule, check_shuffle

T = TypeVar("T")

VERSION = 1

# A fingerprint with a digest of contents, and of what kind that is.
_WITH_CONTENTS = re.compile(r"(.*) ([a-z+-]+)=[0-9a-f]{32}", re.DOTALL)

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
            # Where the state of any rank serves all, it is the same on all.
            "rank": 0 if self.in_order is True and self.schedule.pad else self.schedule.rank,
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

    def check_compatible(self, mine: SavedState) -> str | None:
        """Raise if a feeder with the state ``mine`` cannot resume from this state.

        Returns:
            In words, what of the data could not be compared, if anything.

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
        missing = uncompared(self.fingerprint, mine.fingerprint)
        if missing is None and not changed:
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
        return missing

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


def uncompared(saved: str, here: str) -> str | None:
    """Compare two fingerprints of data.

    Returns:
        An empty text if they are equal, ``None`` if they are of other data. Otherwise, in words, what could not be
        compared: fingerprints of older versions have no digest of contents, and those of files and objects differ.
    """
    if saved == here:
        return ""
    (names, kind), (own_names, own_kind) = (
        (found[1], found[2]) if (found := _WITH_CONTENTS.fullmatch(each)) else (each, "") for each in (saved, here)
    )
    if names != own_names or kind == own_kind:
        return None
    known, own = (f"a digest of {each}" if each else "no digest of contents" for each in (kind, own_kind))
    return f"the contents of the data could not be compared, only the names: there is {known} in it, and {own} here"
