"""`state_dict` and `load_state_dict`, `set_epoch`, samplers and shards."""

from __future__ import annotations

import io
import json
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import aiofeed
from aiofeed import Buckets, Feeder, Files, Limits
from aiofeed.errors import ReadError, StateError

SECONDS = 10


class Numbers:
    """A source of n samples; sample i is i. Reads of indices in ``broken`` fail; ``read_ever`` has the others."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.broken: set[int] = set()
        self.read_ever: list[int] = []
        self.last_was_read = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {"n": self.n}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        if index in self.broken:
            raise OSError("unreadable")
        self.read_ever.append(index)
        if index == self.n - 1:
            self.last_was_read.set()
        return b"%d" % index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(n, **options)`: a feeder of n numbers (or of a source), batch size 2, closed after the test."""
    made: list[Feeder[Any]] = []

    def new(source: Any = 10, **options: Any) -> Feeder[Any]:
        source = Numbers(source) if isinstance(source, int) else source
        made.append(Feeder(source, decode=number, **{"batch_size": 2, "shard": None, **options}))
        return made[-1]

    yield new
    for feeder in made:
        feeder.close()


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [value for batch in values(batches) for value in batch]


def taken(feeder: Feeder[Any], count: int) -> list[list[int]]:
    """The first `count` batches of a new iterator, which is then dropped."""
    iterator = iter(feeder)
    return [next(iterator).tolist() for _ in range(count)]


def position_of(feeder: Feeder[Any]) -> tuple[int, int]:
    """Epoch and position of the feeder's state."""
    state = feeder.state_dict()
    return state["epoch"], state["position"]


def shuffled(n: int, epoch: int, seed: int = 0) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


# --- the position in a state (R1, R2, R4) -----------------------------------------------------------------------------


def test_only_batches_that_were_handed_out_count(make: MakeFeeder) -> None:
    """The state counts batches that were returned, not those read ahead."""
    source = Numbers(6)
    feeder = make(source, limits=Limits(prefetch_batches=4))
    iterator = iter(feeder)
    next(iterator)
    assert source.last_was_read.wait(SECONDS)
    assert position_of(feeder) == (0, 2)
    next(iterator)
    assert position_of(feeder) == (0, 4)


@pytest.mark.parametrize("leave", ["break", "close", "iter", "set_epoch"])
def test_the_position_reached_stays_until_the_next_batch(make: MakeFeeder, leave: str) -> None:
    """break, close, a new iter() and set_epoch do not change the state; the next batch does."""
    feeder = make()
    taken(feeder, 2)
    if leave == "close":
        feeder.close()
    elif leave == "set_epoch":
        feeder.set_epoch(1)
    assert position_of(feeder) == (0, 4)
    iterator = iter(feeder)
    assert position_of(feeder) == (0, 4)
    next(iterator)
    assert position_of(feeder) == (1, 2)


@pytest.mark.parametrize("bad", [0, 1, 5, 9])
def test_after_an_error_it_points_at_the_failed_batch(make: MakeFeeder, bad: int) -> None:
    """A resumed epoch starts with the batch that failed."""
    source = Numbers(10)
    source.broken.add(bad)
    feeder = make(source)
    got = []
    with pytest.raises(ReadError):
        got.extend(iter(feeder))
    assert position_of(feeder) == (0, bad // 2 * 2)
    state = feeder.state_dict()
    source.broken.clear()
    feeder.load_state_dict(state)
    assert values(feeder)[0] == [bad // 2 * 2, bad // 2 * 2 + 1]


def test_after_an_error_in_the_first_batch_it_is_that_epoch(make: MakeFeeder) -> None:
    """If the first batch of an epoch fails, the state is the start of that epoch."""
    source = Numbers(10)
    feeder = make(source)
    taken(feeder, 2)
    source.broken.update(range(10))
    with pytest.raises(ReadError):
        next(iter(feeder))
    assert position_of(feeder) == (1, 0)


@pytest.mark.parametrize("seen_the_end", [True, False])
@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, 5),
        ({"batch_size": 4}, 3),
        ({"batch_size": 4, "drop_last": True}, 2),
        ({"in_order": False}, 5),
        ({"batch_size": 4, "drop_last": True, "in_order": "samples"}, 2),
    ],
)
def test_after_the_last_batch_it_is_the_next_epoch(
    make: MakeFeeder, options: dict[str, Any], batches: int, seen_the_end: bool
) -> None:
    """After the last batch the state is the start of the next epoch, whether or not StopIteration was seen."""
    feeder = make(shuffle=True, **options)
    iterator = iter(feeder)
    for _ in range(batches):
        assert position_of(feeder)[0] == 0
        next(iterator)
    if seen_the_end:
        assert next(iterator, None) is None
    state = feeder.state_dict()
    assert (state["epoch"], state["position"], state["handed_out"]) == (1, 0, [])
    other = make(shuffle=True, **options)
    other.load_state_dict(state)
    assert len(values(other)) == batches
    assert other.epoch == 1


def test_with_drop_last_a_global_batch_counts(make: MakeFeeder) -> None:
    """The epoch ends when the remaining samples do not fill a batch on every rank."""
    feeder = make(drop_last=True, shard=(0, 2))
    assert taken(feeder, 2) == [[0, 2], [4, 6]]
    assert position_of(feeder) == (1, 0)


def test_an_error_of_transform_does_not_advance_the_state(make: MakeFeeder) -> None:
    """The batch for which transform= raised was not returned."""
    broken: list[int] = []

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if batch[0] in broken:
            raise ZeroDivisionError
        return batch

    feeder = make(transform=transform)
    taken(feeder, 2)
    broken.append(0)
    with pytest.raises(ZeroDivisionError):
        next(iter(feeder))
    assert position_of(feeder) == (1, 0)
    broken[:] = [2]
    with pytest.raises(ZeroDivisionError):
        list(feeder)
    assert position_of(feeder) == (1, 2)


def test_a_saved_state_does_not_change(make: MakeFeeder) -> None:
    """Taking more batches does not change a saved state."""
    feeder = make(in_order=False)
    iterator = iter(feeder)
    next(iterator)
    state = feeder.state_dict()
    kept = json.loads(json.dumps(state))
    next(iterator)
    assert state == kept != feeder.state_dict()


def test_every_rank_has_the_same_state(make: MakeFeeder) -> None:
    """With in_order=True the states of all ranks are equal."""
    feeders = [make(30, shard=(rank, 3)) for rank in range(3)]
    for feeder in feeders:
        taken(feeder, 2)
    states = [feeder.state_dict() for feeder in feeders]
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 12


# --- loading a state (R3, R5) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unused_iterators", [0, 1, 3])
def test_a_load_counts_once(make: MakeFeeder, unused_iterators: int) -> None:
    """A load affects the next epoch only, also if iter() is called several times before a batch is taken."""
    feeder = make(shuffle=True)
    taken(feeder, 3)
    feeder.load_state_dict(feeder.state_dict())
    for _ in range(unused_iterators):
        iter(feeder)
    assert flat(feeder) == shuffled(10, 0)[6:]
    assert flat(feeder) == shuffled(10, 1)
    assert flat(feeder) == shuffled(10, 2)


def test_a_load_does_not_affect_an_older_iterator(make: MakeFeeder) -> None:
    """Batches of an iterator created before the load neither use up the load nor change the state."""
    feeder = make()
    taken(feeder, 1)
    state = feeder.state_dict()
    iterator = iter(feeder)
    feeder.load_state_dict(state)
    assert next(iterator).tolist() == [0, 1]
    assert next(iterator).tolist() == [2, 3]
    assert position_of(feeder) == (0, 2)
    assert flat(feeder) == list(range(2, 10))


def test_a_load_survives_close_and_error(make: MakeFeeder) -> None:
    """close() and an error before the first batch do not discard a load."""
    source = Numbers(10)
    feeder = make(source)
    taken(feeder, 2)
    feeder.load_state_dict(feeder.state_dict())
    feeder.close()
    source.broken.add(4)
    with pytest.raises(ReadError):
        next(iter(feeder))
    source.broken.clear()
    assert flat(feeder) == list(range(4, 10))


def test_the_state_after_a_load_is_the_loaded_one(make: MakeFeeder) -> None:
    """Until a batch is taken, the state is the loaded one, also in the middle of another epoch."""
    other = make(shuffle=True)
    taken(other, 2)
    state = other.state_dict()
    feeder = make(shuffle=True)
    feeder.load_state_dict(state)
    assert feeder.state_dict() == state
    iter(feeder)
    assert feeder.state_dict() == state
    list(feeder)
    taken(feeder, 1)
    feeder.load_state_dict(state)
    assert feeder.state_dict() == state
    assert feeder.epoch == 0


def test_break_then_iter_is_a_new_epoch(make: MakeFeeder) -> None:
    """iter() after break starts a new epoch; the same iterator goes on."""
    feeder = make(shuffle=True)
    iterator = iter(feeder)
    first = [next(iterator).tolist() for _ in range(2)]
    assert flat(iter(iterator)) == shuffled(10, 0)[4:]
    assert sum(first, []) == shuffled(10, 0)[:4]
    taken(feeder, 2)
    assert flat(feeder) == shuffled(10, 2)


def test_len_does_not_change_after_a_resume(make: MakeFeeder) -> None:
    """len() is always the number of batches of a whole epoch."""
    feeder = make()
    taken(feeder, 3)
    feeder.load_state_dict(feeder.state_dict())
    assert len(feeder) == 5
    assert len(list(feeder)) == 2
    assert len(feeder) == 5


# --- set_epoch (R12) --------------------------------------------------------------------------------------------------


def test_set_epoch_equal_to_a_loaded_epoch_keeps_the_position(make: MakeFeeder) -> None:
    """Trainers call set_epoch before every epoch, including the resumed one."""
    feeder = make(shuffle=True)
    list(feeder)
    taken(feeder, 2)
    feeder.load_state_dict(feeder.state_dict())
    feeder.set_epoch(1)
    assert position_of(feeder) == (1, 4)
    assert flat(feeder) == shuffled(10, 1)[4:]


def test_any_other_set_epoch_discards_a_loaded_position(make: MakeFeeder) -> None:
    """The next epoch is whole, and the state is its start at once."""
    feeder = make(shuffle=True)
    taken(feeder, 2)
    feeder.load_state_dict(feeder.state_dict())
    feeder.set_epoch(4)
    assert position_of(feeder) == (4, 0)
    assert feeder.epoch == 4
    assert flat(feeder) == shuffled(10, 4)


@pytest.mark.parametrize("before", [0, 1])
def test_set_epoch_counts_at_the_next_iter(make: MakeFeeder, before: int) -> None:
    """An existing iterator stays in its epoch, also before its first batch."""
    feeder = make(shuffle=True)
    iterator = iter(feeder)
    got = [next(iterator).tolist() for _ in range(before)]
    feeder.set_epoch(7)
    assert feeder.epoch == 0
    assert sum(got, []) + flat(iterator) == shuffled(10, 0)
    assert flat(feeder) == shuffled(10, 7)
    assert flat(feeder) == shuffled(10, 8)


def test_set_epoch_to_the_epoch_just_begun_changes_nothing(make: MakeFeeder) -> None:
    """A trainer that calls set_epoch after iter() repeats no epoch."""
    feeder = make(shuffle=True)
    iterator = iter(feeder)
    feeder.set_epoch(0)
    assert flat(iterator) == shuffled(10, 0)
    assert flat(feeder) == shuffled(10, 1)


# --- the contents of a state (R6, R7) ---------------------------------------------------------------------------------


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("travel", [through_json, through_torch])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": "keyed", "seed": -3},
        {"in_order": False},
        {"sampler": SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(5))},
    ],
)
def test_a_state_survives_json_and_safe_torch_load(
    make: MakeFeeder, travel: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    """A state is equal after a round trip, small, and resumes the epoch."""
    feeder = make(**options)
    iterator = iter(feeder)
    next(iterator)
    state = feeder.state_dict()
    rest = sorted(values(iterator))
    assert travel(state) == state
    assert len(json.dumps(state)) < 500 + 2 * len(state["sampler"])
    feeder.load_state_dict(travel(state))
    assert sorted(values(feeder)) == rest


def test_the_state_contains_the_order_and_the_source(make: MakeFeeder) -> None:
    """A state has version, seed, epoch, position, batch size, ranks, shuffle, drop_last, length and fingerprint."""
    options = {"seed": 3, "shuffle": True, "drop_last": True}
    state = make(shard=(1, 2), **options).state_dict()
    wanted = {"version": 1, "epoch": 0, "position": 0, "batch_size": 2, "world_size": 2, "length": 10, **options}
    assert {name: state[name] for name in wanted} == wanted
    # That of any rank serves all, if no rank may have returned other batches than the others.
    assert state["rank"] == 0
    assert make(shard=(1, 2), pad=False, **options).state_dict()["rank"] == 1
    assert make(shard=(1, 2), in_order=False, **options).state_dict()["rank"] == 1
    assert state["fingerprint"]


class Others(Numbers):
    """The same length, another type."""


class Renamed(Numbers):
    """The same length and type name, other keys."""

    __qualname__ = "Numbers"

    def key(self, index: int) -> str:
        return f"digit {index}"


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        ({"seed": 1}, {"seed": 2}, "seed: 1 in the state, 2 here"),
        ({"shuffle": True}, {"shuffle": "keyed"}, "shuffle: True in the state, 'keyed' here"),
        ({"drop_last": True}, {}, "drop_last: True in the state, False here"),
        ({"pad": False}, {}, "pad: False in the state, True here"),
        ({}, {"source": 11}, "length: 10 in the state, 11 here"),
        ({}, {"source": Others(10)}, "fingerprint of the source: '[0-9a-f]+' in the state, '[0-9a-f]+' here"),
        ({}, {"source": Renamed(10)}, "fingerprint of the source: '[0-9a-f]+' in the state, '[0-9a-f]+' here"),
        ({"sampler": [1, 2]}, {}, "order: sampler= or batch_sampler= in the state, shuffle= here"),
        ({}, {"sampler": [1, 2]}, "order: shuffle= in the state, sampler= or batch_sampler= here"),
        ({}, {"weights": [1] * 10}, "order: shuffle= in the state, weights= here"),
        ({"batch_size": Buckets([1] * 10, [], [2])}, {}, r"order: a plan \(Buckets, .*\) in the state, shuffle= here"),
    ],
)
def test_a_mismatch_is_refused_with_both_values(
    make: MakeFeeder, saved: dict[str, Any], here: dict[str, Any], message: str
) -> None:
    """The error has both values, and the feeder's state does not change."""
    state = make(**saved).state_dict()
    feeder = make(**here)
    before = feeder.state_dict()
    with pytest.raises(StateError, match=message):
        feeder.load_state_dict(state)
    assert feeder.state_dict() == before


def test_all_differences_are_reported_at_once(make: MakeFeeder) -> None:
    """The error lists every difference."""
    state = make(seed=1, shuffle=True).state_dict()
    with pytest.raises(StateError, match=r"seed: 1 .*shuffle: True .*length: 10 "):
        make(12).load_state_dict(state)


def test_a_state_of_another_version_is_refused(make: MakeFeeder) -> None:
    """The error has the version that this aiofeed reads; other values are those of test_edited_states.py."""
    feeder = make()
    with pytest.raises(StateError, match="version 99; this aiofeed reads version 1"):
        feeder.load_state_dict({**feeder.state_dict(), "version": 99})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "a dict, got list"),
        ({"model": 1}, r"the keys \['model'\]"),
        ({}, "this is not the state of a feeder"),
        ({"_snapshot": {}, "_iterator_finished": False}, r"torchdata's StatefulDataLoader.*set_epoch\(n\)"),
        (aiofeed.DataLoader([1, 2]).state_dict(), r"of an aiofeed\.DataLoader"),
    ],
)
def test_another_object_is_no_state(make: MakeFeeder, state: Any, message: str) -> None:
    """The error describes the object that was received."""
    with pytest.raises(StateError, match=message):
        make().load_state_dict(state)


@pytest.mark.parametrize(("batch_size", "world_size"), [(2, 2), (5, 1), (3, 3), (1, 4)])
def test_world_size_and_batch_size_may_change(make: MakeFeeder, batch_size: int, world_size: int) -> None:
    """The resumed epoch has the remaining samples, and padding from the head of the list."""
    first = make(30, shuffle=True)
    seen = sum(taken(first, 4), [])
    rest: list[int] = []
    for rank in range(world_size):
        feeder = make(30, shuffle=True, batch_size=batch_size, shard=(rank, world_size))
        feeder.load_state_dict(first.state_dict())
        rest += flat(feeder)
    padding = -(30 - len(seen)) % world_size
    assert sorted(rest) == sorted([*(set(range(30)) - set(seen)), *seen[:padding]])


# --- fingerprints -----------------------------------------------------------------------------------------------------


def files(root: Path, names: list[str]) -> Files:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    return Files([root / name for name in names])


@pytest.mark.parametrize("names", [["a/1", "a/2", "b/1"], ["a/1", "a/2"], ["a/1"]])
def test_a_folder_may_move(make: MakeFeeder, tmp_path: Path, names: list[str]) -> None:
    """The fingerprint does not contain the common folder of the files."""
    state = make(files(tmp_path / "here", names)).state_dict()
    make(files(tmp_path / "quite" / "elsewhere", names)).load_state_dict(state)


def test_other_file_names_are_another_source(make: MakeFeeder, tmp_path: Path) -> None:
    """One other file name changes the fingerprint."""
    state = make(files(tmp_path / "one", ["a/1", "a/2", "b/1"])).state_dict()
    with pytest.raises(StateError, match="fingerprint of the source"):
        make(files(tmp_path / "two", ["a/1", "a/3", "b/1"])).load_state_dict(state)


def test_at_most_1024_keys_are_asked_for(make: MakeFeeder) -> None:
    """The fingerprint of a large source uses 1,024 keys and is computed once."""
    asked: list[int] = []

    class Asked(Numbers):
        def key(self, index: int) -> str:
            asked.append(index)
            return super().key(index)

    feeder = make(Asked(5_000_000))
    feeder.state_dict()
    feeder.state_dict()
    assert len(asked) == 1024
    assert asked[0] == 0
    assert asked[-1] > 4_990_000


def test_a_sources_own_fingerprint_is_used(make: MakeFeeder) -> None:
    """The source's fingerprint() replaces the computed one."""

    class Versioned(Numbers):
        def __init__(self, n: int, version: str) -> None:
            super().__init__(n)
            self.version = version

        def fingerprint(self) -> str:
            return self.version

    state = make(Versioned(10, "v1")).state_dict()
    assert state["fingerprint"] == "v1"
    with pytest.raises(StateError, match="'v1' in the state, 'v2' here"):
        make(Versioned(10, "v2")).load_state_dict(state)


# --- samplers (R13) ---------------------------------------------------------------------------------------------------


class Stateful:
    """A sampler that rotates by one more each epoch, with a state_dict."""

    def __init__(self) -> None:
        self.turn = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(index + self.turn) % 10 for index in range(10)])

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn = state["turn"]


class Positioned(DistributedSampler):  # type: ignore[type-arg]
    """A DistributedSampler whose state is the position within the epoch, like torchdata's."""

    given = 0
    skip = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.skip = self.skip, 0
        for index in list(super().__iter__())[self.given :]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["yielded"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


RESUMABLE: dict[str, Callable[[int], Any]] = {
    "list": lambda seed: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3],
    "RandomSampler": lambda seed: RandomSampler(range(10), generator=seeded(seed)),
    "replacement": lambda seed: RandomSampler(range(10), replacement=True, num_samples=10, generator=seeded(seed)),
    "SubsetRandomSampler": lambda seed: SubsetRandomSampler(range(10), generator=seeded(seed)),
    "WeightedRandomSampler": lambda seed: WeightedRandomSampler([1.0] * 10, 10, generator=seeded(seed)),
    "DistributedSampler": lambda seed: DistributedSampler(range(20), 2, 1),
    "state_dict": lambda seed: Stateful(),
    "set_epoch and state_dict": lambda seed: Positioned(range(20), 2, 1),
}


@pytest.mark.parametrize("kind", RESUMABLE)
@pytest.mark.parametrize("done", [0, 2, 5, 7, 10])
@pytest.mark.parametrize("twice", [False, True])
def test_a_sampler_is_resumed_exactly(make: MakeFeeder, kind: str, done: int, twice: bool) -> None:
    """An epoch resumed with a new sampler, after any batch, equals the rest of an uninterrupted one."""
    whole = make(20, sampler=RESUMABLE[kind](1))
    wanted = [values(whole) for _ in range(3)]
    first = make(20, sampler=RESUMABLE[kind](1))
    for _ in range(done // 5):
        list(first)
    taken(first, done % 5)
    second = make(20, sampler=RESUMABLE[kind](2))  # another seed: the state restores the generator
    second.load_state_dict(first.state_dict())
    if twice:
        iter(second)
    assert values(second) == wanted[done // 5][done % 5 :]
    if done < 10:
        assert values(second) == wanted[done // 5 + 1]


def test_two_iterators_of_an_epoch_get_the_same_list(make: MakeFeeder) -> None:
    """If an iterator returns no batch, the next one gets the same list from a sampler with a generator."""
    wanted = list(RandomSampler(range(10), generator=seeded(1)))
    feeder = make(sampler=RandomSampler(range(10), generator=seeded(1)))
    iter(feeder)
    iter(feeder)
    assert flat(feeder) == wanted


def test_a_sampler_without_a_generator_cannot_be_resumed(make: MakeFeeder) -> None:
    """The rest of an epoch from the global generator is lost; the error says what the sampler needs."""
    first = make(sampler=RandomSampler(range(10)))
    taken(first, 2)
    state = first.state_dict()
    second = make(sampler=RandomSampler(range(10)))
    second.load_state_dict(state)
    with pytest.raises(StateError, match=r"epoch 0 cannot be resumed: RandomSampler .*generator=torch\.Generator\(\)"):
        iter(second)
    second.set_epoch(1)
    assert sorted(flat(second)) == list(range(10))


def test_at_the_start_of_an_epoch_any_sampler_resumes(make: MakeFeeder) -> None:
    """At the start of an epoch the list need not be the same as before."""
    first = make(sampler=RandomSampler(range(10)))
    list(first)
    second = make(sampler=RandomSampler(range(10)))
    second.load_state_dict(first.state_dict())
    assert sorted(flat(second)) == list(range(10))
    assert second.epoch == 1


def test_a_sampler_is_asked_once_per_epoch(make: MakeFeeder) -> None:
    """A sampler is iterated at iter() only; not by the constructor, len() or state_dict()."""
    calls: list[int] = []

    class Counted:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            calls.append(1)
            return iter(range(4))

    feeder = make(sampler=Counted())
    assert len(feeder) == 2
    feeder.state_dict()
    assert calls == []
    for epoch in (1, 2, 3):
        list(feeder)
        assert len(calls) == epoch


def test_a_samplers_draws_begin_with_the_first_epoch(make: MakeFeeder) -> None:
    """The first list of a sampler that shuffles in __iter__ is the first epoch."""

    class Eager:
        generator = seeded(3)

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(10, generator=self.generator).tolist())

    assert flat(make(sampler=Eager())) == torch.randperm(10, generator=seeded(3)).tolist()


def test_a_sampler_is_not_sharded_again(make: MakeFeeder) -> None:
    """The sampler's list is this rank's own; indices may repeat or be missing."""
    feeder = make(sampler=[7, 7, 2], shard=(1, 4))
    assert values(feeder) == [[7, 7], [2]]
    assert len(feeder) == 2


def test_set_epoch_is_passed_to_the_sampler(make: MakeFeeder) -> None:
    """The sampler's set_epoch is called for each epoch, chosen or not."""
    sampler = DistributedSampler(range(20), 2, 0, seed=4)
    feeder = make(20, sampler=sampler)
    for epoch in (0, 1, 9):
        if epoch == 9:
            feeder.set_epoch(9)
        sampler_of_its_own = DistributedSampler(range(20), 2, 0, seed=4)
        sampler_of_its_own.set_epoch(epoch)
        assert flat(feeder) == list(sampler_of_its_own)


@pytest.mark.parametrize(
    ("sampler", "message"), [([0, 10], "the index 10, but the source has 10 samples"), ([0, -1], "the index -1")]
)
def test_an_index_out_of_range_is_named(make: MakeFeeder, sampler: list[int], message: str) -> None:
    """iter() raises for an index outside the source, before anything is read."""
    source = Numbers(10)
    feeder = make(source, sampler=sampler)
    with pytest.raises(ValueError, match=message):
        iter(feeder)
    assert source.read_ever == []


@pytest.mark.parametrize("sampler", [[[0, 1], [2, 3]], [0.5, 1.0], ["0"], [None]])
def test_entries_must_be_ints(make: MakeFeeder, sampler: Any) -> None:
    """Lists of indices, as of a BatchSampler, floats and texts are refused."""
    with pytest.raises(TypeError, match="one int per sample"):
        iter(make(sampler=sampler))


@pytest.mark.parametrize("sampler", [torch.tensor([3, 1]), (3, 1), range(3, 0, -2), {3: 0, 1: 0}])
def test_any_iterable_of_indices_is_a_sampler(make: MakeFeeder, sampler: Any) -> None:
    """A tensor, a tuple, a range and a dict are samplers."""
    assert flat(make(sampler=sampler)) == [3, 1]


@pytest.mark.parametrize(
    ("sampler", "options", "error", "message"),
    [
        (iter([1]), {}, TypeError, "one epoch only"),
        ((i for i in [1]), {}, TypeError, "one epoch only"),
        (3, {}, TypeError, "sampler must be an iterable of indices, got 3"),
        ([1], {"shuffle": True}, ValueError, "sampler= decides the order"),
    ],
)
def test_other_objects_are_no_samplers(
    make: MakeFeeder, sampler: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The constructor raises."""
    with pytest.raises(error, match=message):
        make(sampler=sampler, **options)


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter([4, 2, 0])


def test_a_sampler_without_len_iterates_and_resumes(make: MakeFeeder) -> None:
    """Only len(feeder) raises, a TypeError."""
    feeder = make(sampler=Unsized())
    with pytest.raises(TypeError, match=r"Unsized has no len\(\)"):
        len(feeder)
    taken(feeder, 1)
    feeder.load_state_dict(feeder.state_dict())
    assert values(feeder) == [[0]]
    feeder.load_state_dict({**feeder.state_dict()})
    assert [values(feeder) for _ in feeder.epochs(3)] == [[[4, 2], [0]]] * 2


def test_a_samplers_state_that_is_not_plain_is_refused(make: MakeFeeder) -> None:
    """A sampler's state must be JSON, because the feeder's is."""

    class Opaque(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"turn": object()}

    with pytest.raises(StateError, match="state of Opaque must be plain"):
        make(sampler=Opaque()).state_dict()


# --- shards (R11) -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return monkeypatch


def test_alone_there_is_one_shard(make: MakeFeeder, no_launcher: pytest.MonkeyPatch) -> None:
    """Without a launcher, or with half of its environment, there is one shard."""
    assert flat(make(shard="auto")) == list(range(10))
    no_launcher.setenv("WORLD_SIZE", "3")
    assert flat(make(shard="auto")) == list(range(10))
    no_launcher.setenv("RANK", "")  # of a job template whose variable is not set
    assert flat(make(shard="auto")) == list(range(10))
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "")
    assert flat(make(shard="auto")) == list(range(10))


def test_the_shard_comes_from_the_environment_when_first_needed(
    make: MakeFeeder, no_launcher: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RANK and WORLD_SIZE are read when the shard is first needed, logged, and read only once."""
    feeder = make(shard="auto")
    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO, "aiofeed"):
        assert len(feeder) == 3
    assert "shard 1 of 2, from RANK and WORLD_SIZE" in caplog.text
    no_launcher.setenv("RANK", "0")
    assert flat(feeder) == [1, 3, 5, 7, 9]
    assert feeder.state_dict()["world_size"] == 2


@pytest.mark.parametrize(
    "names",
    [
        "SLURM_PROCID SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID SLURM_NTASKS",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
    ],
)
def test_tasks_of_srun_and_mpirun_are_ranks(
    make: MakeFeeder, no_launcher: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    """Each of several tasks without RANK gets its part of the samples and says so; a single task gets all."""
    task, tasks = names.split()
    no_launcher.setenv(task, "1")
    no_launcher.setenv(tasks, "4")
    assert flat(make(shard="auto")) == [1, 5, 9]
    assert f"shard 1 of 4, from {task} and {tasks}; shard=None reads all samples" in caplog.text
    assert flat(make(shard=(0, 2))) == [0, 2, 4, 6, 8]
    assert flat(make(shard=None)) == list(range(10))
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "1")
    assert flat(make(shard="auto")) == list(range(10))
    no_launcher.setenv("RANK", "")
    no_launcher.setenv(task, "0")
    no_launcher.setenv(tasks, "1")
    assert flat(make(shard="auto")) == list(range(10))


def test_a_batch_script_of_slurm_is_one_process(make: MakeFeeder, no_launcher: pytest.MonkeyPatch) -> None:
    """A job may have several tasks; its script is none of them and gets all samples."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}.items():
        no_launcher.setenv(name, value)
    assert flat(make(shard="auto")) == list(range(10))


def test_torch_distributed_comes_before_the_environment(
    make: MakeFeeder, no_launcher: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An initialised process group has precedence over the environment."""
    import torch.distributed as dist

    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with caplog.at_level(logging.INFO, "aiofeed"):
            assert flat(make(shard="auto")) == list(range(10))
    finally:
        dist.destroy_process_group()
    assert "shard 0 of 1, from torch.distributed" in caplog.text


@pytest.mark.parametrize(("shard", "wanted"), [((1, 3), [1, 4, 7, 0]), ([0, 1], list(range(10))), (None, range(10))])
def test_an_argument_wins(make: MakeFeeder, no_launcher: pytest.MonkeyPatch, shard: Any, wanted: Any) -> None:
    """shard=(rank, world_size) and shard=None have precedence over the environment."""
    no_launcher.setenv("RANK", "1")
    no_launcher.setenv("WORLD_SIZE", "2")
    assert flat(make(shard=shard)) == list(wanted)


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0")])
def test_a_wrong_environment_is_refused(
    make: MakeFeeder, no_launcher: pytest.MonkeyPatch, rank: str, world_size: str
) -> None:
    """The error has the values of both variables."""
    no_launcher.setenv("RANK", rank)
    no_launcher.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"RANK='{rank}' and WORLD_SIZE='{world_size}'"):
        len(make(shard="auto"))


@pytest.mark.parametrize(
    ("shard", "error"),
    [((2, 2), ValueError), ((-1, 2), ValueError), ((0, 0), ValueError), ((0,), TypeError), ("all", TypeError),
     ((0.0, 2), TypeError), ((True, 2), TypeError)],
)  # fmt: skip
def test_other_values_are_no_shards(make: MakeFeeder, shard: Any, error: type[Exception]) -> None:
    """The constructor raises."""
    with pytest.raises(error, match="shard must be"):
        make(shard=shard)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_pickled_feeder_is_where_this_one_is(make: MakeFeeder) -> None:
    """A copy of an idle feeder has the same state and the same next epoch, and its own threads."""
    feeder = make(shuffle=True)
    list(feeder)
    copy = pickle.loads(pickle.dumps(feeder))
    assert copy.state_dict() == feeder.state_dict()
    assert flat(copy) == flat(feeder) == shuffled(10, 1)
    copy.close()


def test_a_feeder_pickled_in_mid_epoch_travels_without_its_threads(make: MakeFeeder) -> None:
    """A copy has the position reached; its next iter() is a new epoch, as it is for the original."""
    feeder = make(100, shuffle=True)
    iterator = iter(feeder)
    next(iterator)
    copy = pickle.loads(pickle.dumps(feeder))
    assert [thread.name for thread in threading.enumerate()].count("aiofeed-engine") == 1
    assert position_of(copy) == (0, 2)
    state = copy.state_dict()
    assert flat(copy) == shuffled(100, 1)
    copy.load_state_dict(state)
    assert flat(copy) == flat(iterator) == shuffled(100, 0)[2:]
    copy.close()


def test_a_loaded_position_is_pickled(make: MakeFeeder) -> None:
    """A copy resumes a loaded position, with the sampler and its generator."""
    feeder = make(sampler=RandomSampler(range(10), generator=seeded(1)))
    taken(feeder, 2)
    feeder.load_state_dict(feeder.state_dict())
    copy = pickle.loads(pickle.dumps(feeder))
    assert flat(copy) == flat(feeder) == list(RandomSampler(range(10), generator=seeded(1)))[4:]
    copy.close()


def test_without_padding_the_rest_stays_with_its_rank(make: MakeFeeder) -> None:
    """With pad=False, a state in mid-epoch is refused by other ranks, world sizes and batch sizes."""
    feeder = make(10, pad=False, shard=(0, 2))
    taken(feeder, 1)
    state = feeder.state_dict()
    for other in ({"shard": (1, 2)}, {"shard": (0, 3)}, {"shard": (0, 2), "batch_size": 3}):
        with pytest.raises(StateError, match="pad=False"):
            make(10, pad=False, **other).load_state_dict(state)
    rest = make(10, pad=False, shard=(0, 2))
    rest.load_state_dict(state)
    assert flat(rest) == [4, 6, 8]


def test_a_position_after_the_end_of_the_epoch_is_refused(make: MakeFeeder) -> None:
    """The error has the end of the epoch."""
    feeder = make(10)
    for position in (10, 11):
        with pytest.raises(StateError, match=rf"position {position}, .*ends at 10"):
            feeder.load_state_dict({**feeder.state_dict(), "position": position})
