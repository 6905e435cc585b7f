"""States of every kind of feeder, with each field set to other values."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from aiofeed import Buckets, Feeder, Mixture, Pack, Stream, Tensors, TokenBudget, pad_collate
from aiofeed.errors import StateError

N = 24
ITEMS = list(range(N))
LENGTHS = [1 + 5 * index % 7 for index in ITEMS]
TEXTS = [torch.full((length,), index) for index, length in enumerate(LENGTHS)]


class Sharded(list[int]):
    """Items in two shards."""

    shard_starts = (0, 10, N)


class Turns:
    """A sampler, or an iterable, whose state is how often it was iterated."""

    turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter(ITEMS[self.turn :] + ITEMS[: self.turn])

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn = range(N)[state["turn"]]


class Counting:
    """An iterable that goes on from its state."""

    first = loaded = 0

    def __iter__(self) -> Iterator[int]:
        self.first, self.loaded = self.loaded, 0
        while self.first < N:
            self.first += 1
            yield self.first - 1

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = range(N)[state["first"]]


def random_sampler() -> RandomSampler:
    return RandomSampler(ITEMS, generator=torch.Generator().manual_seed(3))


def items(**options: Any) -> Feeder[Any]:
    return Feeder(options.pop("source", ITEMS), **{"batch_size": 4, "shard": None, **options})


def texts(plan: Any, **options: Any) -> Feeder[Any]:
    collate_fn = None if isinstance(plan, Pack) else pad_collate(-1)
    source = options.pop("source", TEXTS)
    return Feeder(
        source, batch_size=plan, collate_fn=collate_fn, shuffle="weights" not in options, shard=None, **options
    )


KINDS: dict[str, Callable[[], Feeder[Any]]] = {
    "shuffled": lambda: items(shuffle=True),
    "keyed": lambda: items(shuffle="keyed", drop_last=True, batch_size=5),
    "replacement": lambda: items(shuffle="replacement"),
    "window": lambda: items(source=Sharded(ITEMS), shuffle="window:1"),
    "not padded": lambda: items(pad=False),
    "unordered": lambda: items(in_order=False),
    "samples": lambda: items(in_order="samples"),
    "tensors": lambda: items(source=Tensors(torch.arange(N)), shuffle=True),
    "weights": lambda: items(weights=[1.0] * N),
    "list": lambda: items(sampler=ITEMS),
    "generator": lambda: items(sampler=random_sampler()),
    "set_epoch": lambda: items(sampler=DistributedSampler(ITEMS, 2, 1)),
    "stateful": lambda: items(sampler=Turns()),
    "batch sampler": lambda: items(batch_sampler=BatchSampler(random_sampler(), 4, False), batch_size=None),
    "mixture": lambda: items(source=Mixture({"a": ITEMS, "b": ITEMS}, [2, 1]), shuffle=True),
    "buckets": lambda: texts(Buckets(LENGTHS, [4], [4, 3])),
    "budget": lambda: texts(TokenBudget(LENGTHS, 20)),
    "pack": lambda: texts(Pack(LENGTHS, 8, 2)),
    "weighted plan": lambda: texts(TokenBudget(LENGTHS, 20), weights=[1.0] * N),
    "mixed plan": lambda: texts(TokenBudget(LENGTHS * 2, 20), source=Mixture({"a": TEXTS, "b": TEXTS}, [2, 1])),
    "stream": lambda: items(source=Stream(lambda: iter(ITEMS), shuffle_buffer=3)),
    "sized stream": lambda: items(source=Stream(ITEMS, length=N), in_order=False),
    "stateful stream": lambda: items(source=Stream(Counting())),
    "sharded stream": lambda: items(source=Stream(Counting(), sharded=True)),
}

MISSING = object()
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 1.0, 10**6, 10**30, float("nan"), float("inf"), torch.tensor(1), True, False, None, MISSING),
    torch.tensor([1, 2]),
    *("x", "ab", "[]", "{}", "[" * 5000, [], [1], [-1], [10**30], ["x"], [[0, 1]], {}, {"x": 1}),
)
COUNTS = (0, 1, 10**6)
ANY = ODD
ALLOWED: dict[str, tuple[Any, ...]] = {
    "version": (1, True),
    "epoch": COUNTS,
    "position": (0, 1),
    "handed_out": ([], [1]),
    "batch_size": (1, 10**6, 10**30),
    "world_size": (1, 10**6, 10**30),
    "in_order": (True, False),
    # Used for a resume within an epoch only, or to show them.
    "digest": ANY,
    # That of an older version, of a mixture that was not changed.
    "course": (MISSING,),
    "generator": (MISSING,),
    # Content of the iterable's own state, and the place where it was saved.
    "state": (MISSING,),
    "turn": (0, 1, -1, True, False),
    "first": (0, 1, -1, True, False),
    "snapshot": (None,),
    "item": (*COUNTS, 10**30),
    "reason": ANY,
    "shard": (None,),
}
"""The values of ODD that a field may have, besides the one that it has."""
OTHER_NAMES = {
    "position": ("item", "resumed"),
    "handed_out": ("resumed",),
    "version": ("not the state",),
    "order": ("mixture", "weights"),
}
"""The words of an error that do not have the name of the field."""
# The counts of a mixture are checked with the mixture.
NOT_EDITED = ("counts", "samples")


def places(value: Any) -> Iterator[tuple[str, ...]]:
    """The paths of all fields, also of those within JSON."""
    value = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name not in NOT_EDITED:
            yield (name,)
            yield from ((name, *rest) for rest in places(inner))


def edited(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """A copy with another value of one field."""
    if isinstance(value, str):
        return json.dumps(edited(json.loads(value), path, new), default=repr)
    changed = {**value, path[0]: new if len(path) == 1 else edited(value[path[0]], path[1:], new)}
    return {name: each for name, each in changed.items() if each is not MISSING}


def value_at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = (json.loads(value) if isinstance(value, str) else value)[name]
    return value


def among(value: Any, values: Any) -> bool:
    return any(value is one or (type(value) is type(one) and value == one) for one in values)


def saved(make: Callable[[], Feeder[Any]], *, in_the_middle: bool) -> Any:
    with make() as feeder:
        iterator = iter(feeder)
        for _ in range(2) if in_the_middle else iterator:
            next(iterator, None)
        return copy.deepcopy(feeder.state_dict())


def refusal(feeder: Feeder[Any], state: Any) -> str | None:
    """The error of a state, when it is loaded or when its epoch begins; `None` if that epoch works."""
    try:
        feeder.load_state_dict(state)
        loaded = feeder.state_dict()
        assert list(feeder)
    except StateError as error:
        return str(error).lower()
    assert (loaded["epoch"], loaded["position"]) == (state["epoch"], state["position"])
    return None


@pytest.mark.parametrize("in_the_middle", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_state_works_or_is_refused_by_name(kind: str, in_the_middle: bool) -> None:
    """Another value of a field is a `StateError` that names it, or the epoch begins there."""
    state = saved(KINDS[kind], in_the_middle=in_the_middle)
    del state["trail"][3:]  # as in a state of an older version: each field has checks of its own
    with KINDS[kind]() as feeder:
        for path in places(state):
            for value in ODD:
                if len(path) > 1 and isinstance(value, torch.Tensor):
                    continue  # not JSON
                message = refusal(feeder, edited(state, path, value))
                if message is None:
                    assert among(value, (*ALLOWED.get(path[-1], ()), value_at(state, path))), (path, value)
                else:
                    names = (*path, *OTHER_NAMES.get(path[-1], ()))
                    assert any(name in message for name in names), (path, value, message)


@pytest.mark.parametrize("steps", [0, 3, 6])
@pytest.mark.parametrize("skipped", [0, 7])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sharded" not in kind])
def test_an_edited_position_is_refused_everywhere(kind: str, skipped: int, steps: int) -> None:
    """In mid-epoch, at the start of an epoch and after `skip`, another position is a `StateError` that names it."""
    with KINDS[kind]() as feeder:
        for _ in feeder.steps(steps) if steps else ():
            pass
        if skipped and "stream" not in kind:
            feeder.skip(skipped)
        state = feeder.state_dict()
    with KINDS[kind]() as other:
        for name in ("epoch", "position"):
            for value in {0, 1, 2, 3, 8} - {state[name]}:
                assert name in (refusal(other, {**state, name: value}) or ""), (name, value, state)
        assert "handed_out" in (refusal(other, {**state, "handed_out": [1, 5]}) or "")
        assert "trail" in (refusal(other, {**state, "trail": [*state["trail"][:3], "0"]}) or "")
        other.load_state_dict(state)


def mutations(state: Any, rng: random.Random) -> Any:
    """The state with one to three of its values replaced, removed, repeated or cut, at any depth."""
    text = json.dumps(state)
    if rng.random() < 0.3:  # in the text of the file
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "0", "9" * 30, "-", '"', "null", "[", "}", "\\u0000"]) + text[at + 1 :]
        try:
            return json.loads(text)
        except ValueError:
            return state
    changed = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        holder: Any = changed
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = holder[key]
            if isinstance(inner, str) and inner.startswith("{") and rng.random() < 0.7:
                holder[key] = json.dumps(mutations(json.loads(inner), rng))
                break
            if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
                holder = inner
                continue
            plain = [value for value in ODD if not isinstance(value, torch.Tensor) and value is not MISSING]
            holder[key] = copy.deepcopy(rng.choice(plain))
            if rng.random() < 0.3:
                del holder[key]
            break
    return changed


def load_mutated(kind: str, seeds: range) -> int:
    """Load a state with each mutation; return how many of them are refused."""
    states = [saved(KINDS[kind], in_the_middle=middle) for middle in (True, False)]
    refused = 0
    with KINDS[kind]() as feeder:
        for seed in seeds:
            state = mutations(states[seed % 2], random.Random(f"{kind} {seed}"))
            try:
                feeder.load_state_dict(state)
                list(feeder)
            except StateError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}: {state}") from error
    return refused


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(30), 10), pytest.param(range(30, 1000), 300, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_states_are_refused(kind: str, seeds: range, least: int) -> None:
    """A damaged state is a `StateError`, or harmless."""
    assert load_mutated(kind, seeds) > least
