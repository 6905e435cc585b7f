"""The guarantees of torchdata's StatefulDataLoader, tested on a Feeder; differences are tested, too.

`docs/compatibility.md` lists both.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from aiofeed import Feeder, FromDataset, Limits
from aiofeed.errors import ReadError
from tests.support import process_parts as parts

FEW = Limits(read_concurrency=1, decode_threads=1, prefetch_batches=1)
MANY = Limits(read_concurrency=64, decode_threads=3, prefetch_batches=4)


class Squares(Dataset):  # type: ignore[type-arg]
    """A thread-safe dataset; sample i is i squared."""

    def __init__(self, n: int = 100) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index * index


MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(n, **options)`: a feeder of n squares with batch size 7, closed after the test."""
    made: list[Feeder[Any]] = []

    def new(source: Any = 100, **options: Any) -> Feeder[Any]:
        source = FromDataset(Squares(source), threads=3) if isinstance(source, int) else source
        made.append(Feeder(source, **{"batch_size": 7, "shard": None, **options}))
        return made[-1]

    yield new
    for feeder in made:
        feeder.close()


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# --- checkpoint and resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True, "keyed"])
@pytest.mark.parametrize("interrupt", [0, 1, 10, 14])
@pytest.mark.parametrize(("here", "there"), [(FEW, MANY), (MANY, FEW), (MANY, MANY)])
def test_a_resumed_epoch_is_exact(make: MakeFeeder, shuffle: Any, interrupt: int, here: Limits, there: Limits) -> None:
    """A new feeder with any concurrency that loads the state gives the remaining batches of the first."""
    first = make(shuffle=shuffle, limits=here)
    iterator = iter(first)
    for _ in range(interrupt):
        next(iterator)
    state = first.state_dict()
    wanted = values(iterator)
    second = make(shuffle=shuffle, limits=there)
    second.load_state_dict(state)
    assert values(second) == wanted
    assert len(wanted) == 15 - interrupt


def test_resume_after_every_batch(make: MakeFeeder) -> None:
    """A state can be taken after every batch; there are no snapshots between which batches are repeated."""
    first = make(30, shuffle=True)
    got, states = [], []
    for batch in first:
        got.append(batch.tolist())
        states.append(first.state_dict())
    for done, state in enumerate(states[:-1], 1):
        second = make(30, shuffle=True)
        second.load_state_dict(state)
        assert values(second) == got[done:]


def test_concurrency_may_change(make: MakeFeeder) -> None:
    """The state contains no number of workers or threads, and loads with other limits."""
    state = make(limits=FEW).state_dict()
    assert not [name for name in state if "worker" in name or "thread" in name]
    make(limits=MANY).load_state_dict(state)


def test_the_first_and_a_later_state_in_the_same_feeder(make: MakeFeeder) -> None:
    """Two states of one shuffled epoch, loaded one after the other, give its rest and the complete epoch."""
    feeder = make(30, shuffle=True, batch_size=1)
    iterator = iter(feeder)
    at_first = feeder.state_dict()
    got = [next(iterator).tolist() for _ in range(4)]
    later = feeder.state_dict()
    feeder.load_state_dict(later)
    got += values(feeder)
    feeder.load_state_dict(at_first)
    assert values(feeder) == got


def test_random_augmentation_resumes_bit_for_bit() -> None:
    """A decoder's rng depends on seed, epoch and position, so a resume repeats the augmentation exactly."""

    def noise(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
        return torch.rand(3, generator=rng)

    with Feeder(parts.Numbers(40), decode=noise, batch_size=6, shard=None) as feeder:
        iterator = iter(feeder)
        for _ in range(3):
            next(iterator)
        state = feeder.state_dict()
        wanted = list(iterator)
        feeder.load_state_dict(state)
        assert all(torch.equal(one, other) for one, other in zip(feeder, wanted, strict=True))


def test_a_datasets_own_state_is_not_saved(make: MakeFeeder) -> None:
    """state_dict and load_state_dict of a Dataset are not called: a sample is a function of its index."""

    class Remembers(Squares):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

        load_state_dict = state_dict

    feeder = make(Remembers())
    next(iter(feeder))
    feeder.load_state_dict(feeder.state_dict())
    assert len(list(feeder)) == 14


# --- when a state is taken --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_before_the_first_iter_is_a_whole_epoch(make: MakeFeeder, shuffle: bool) -> None:
    """A state from before the first iter(), loaded in mid-epoch, starts the epoch again; then the next epoch comes."""
    feeder = make(shuffle=shuffle)
    state = feeder.state_dict()
    wanted = values(feeder), values(feeder)
    iterator = iter(feeder)
    next(iterator)
    feeder.load_state_dict(state)
    assert (values(feeder), values(feeder)) == wanted


@pytest.mark.parametrize("first", ["load", "state"])
def test_a_load_and_a_state_in_either_order(make: MakeFeeder, first: str) -> None:
    """state_dict() before a load does not change the result; after a load it returns the loaded state."""
    one = make(shuffle=True)
    iterator = iter(one)
    for _ in range(9):
        next(iterator)
    state = one.state_dict()
    wanted = values(iterator)
    other = make(shuffle=True)
    if first == "state":
        other.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert values(other) == wanted


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_after_the_last_batch_is_the_next_epoch(make: MakeFeeder, shuffle: bool) -> None:
    """A state taken in the loop after the last batch is the start of the next epoch, as after the loop."""
    feeder = make(shuffle=shuffle)
    for _ in feeder:
        inside = feeder.state_dict()
    assert inside == feeder.state_dict()
    other = make(shuffle=shuffle)
    other.load_state_dict(inside)
    assert values(other) == values(feeder)
    assert other.epoch == 1


def test_a_state_after_an_epoch_continues_with_the_next(make: MakeFeeder) -> None:
    """A state after epoch 0, loaded in mid-epoch elsewhere, continues with epochs 1 and 2."""
    feeder = make(shuffle=True)
    list(feeder)
    state = feeder.state_dict()
    wanted = values(feeder), values(feeder)
    other = make(shuffle=True)
    iterator = iter(other)
    next(iterator)
    other.load_state_dict(state)
    assert (values(other), values(other)) == wanted


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_epochs_and_two_more_are_four(make: MakeFeeder, shuffle: bool) -> None:
    """Two epochs, a resume in another feeder, and two more equal four epochs without interruption."""
    whole = make(shuffle=shuffle)
    wanted = [values(whole) for _ in range(4)]
    first = make(shuffle=shuffle)
    got = [values(first) for _ in range(2)]
    second = make(shuffle=shuffle)
    second.load_state_dict(first.state_dict())
    assert got + [values(second) for _ in range(2)] == wanted
    assert (wanted[0] == wanted[1]) is not shuffle


def test_state_dict_changes_nothing(make: MakeFeeder) -> None:
    """Calling state_dict() twice after every batch changes neither batches nor states."""
    feeder = make(shuffle=True)
    wanted = values(feeder)
    feeder.set_epoch(0)
    got = []
    for batch in feeder:
        assert feeder.state_dict() == feeder.state_dict()
        got.append(batch.tolist())
    assert got == wanted


def test_a_state_is_a_copy(make: MakeFeeder) -> None:
    """A state does not change later, and changing it does not change the feeder."""
    feeder = make()
    iterator = iter(feeder)
    next(iterator)
    state = feeder.state_dict()
    kept = copy.deepcopy(state)
    next(iterator)
    assert state == kept != feeder.state_dict()
    state["handed_out"].append(5)
    assert feeder.state_dict()["handed_out"] == []


def test_json(make: MakeFeeder) -> None:
    """A state survives JSON."""
    feeder = make(shuffle=True)
    iterator = iter(feeder)
    next(iterator)
    text = json.dumps(feeder.state_dict())
    wanted = values(iterator)
    feeder.load_state_dict(json.loads(text))
    assert values(feeder) == wanted


def test_the_state_is_the_feeders_not_the_iterators(make: MakeFeeder) -> None:
    """An iterator has no state_dict; the feeder has."""
    assert not hasattr(iter(make()), "state_dict")


# --- errors -----------------------------------------------------------------------------------------------------------


class Broken(Squares):
    def __getitem__(self, index: int) -> int:
        raise ValueError("Iteration error")


def test_an_error_of_the_dataset_is_raised_at_the_loop(make: MakeFeeder) -> None:
    """An error of the dataset is a ReadError that names the sample, raised by next() and not by iter()."""
    iterator = iter(make(Broken()))
    with pytest.raises(ReadError, match=r"Broken\[0\]") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("interrupt", [1, 5, 14])
def test_an_iterable_dataset_resumes(make: MakeFeeder, interrupt: int) -> None:
    """An IterableDataset without a state is read again up to the position."""

    class Numbers(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    whole = values(make(Numbers()))
    first = make(Numbers())
    iterator = iter(first)
    got = [next(iterator).tolist() for _ in range(interrupt)]
    second = make(Numbers())
    second.load_state_dict(first.state_dict())
    assert got + values(second) == whole


# --- several loaders --------------------------------------------------------------------------------------------------


def test_two_feeders_and_a_dataloader_of_one_dataset(make: MakeFeeder) -> None:
    """Two feeders and a DataLoader of one dataset give the same batches, also when iterated alternately."""
    dataset = Squares()
    wanted = values(DataLoader(dataset, batch_size=7))
    one, other = iter(make(dataset)), iter(make(dataset))
    assert [pair for batch in wanted for pair in (batch, batch)] == [
        batch.tolist() for pair in zip(one, other, strict=True) for batch in pair
    ]


# --- samplers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", [1, 5, 14])
@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler])
def test_a_sampler_of_the_global_generator_with_the_same_seed(
    make: MakeFeeder, sampler: Callable[..., Any], interrupt: int
) -> None:
    """If the global generator is seeded alike, a sampler that uses it resumes exactly."""
    torch.manual_seed(0)
    whole = values(make(sampler=sampler(range(100))))
    torch.manual_seed(0)
    first = make(sampler=sampler(range(100)))
    iterator = iter(first)
    got = [next(iterator).tolist() for _ in range(interrupt)]
    torch.manual_seed(0)
    second = make(sampler=sampler(range(100)))
    second.load_state_dict(first.state_dict())
    assert got + values(second) == whole


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_resumes(make: MakeFeeder, shuffle: bool) -> None:
    """torch's DistributedSampler resumes exactly without a state of its own."""

    def sampler() -> Any:
        return DistributedSampler(range(100), 3, 1, shuffle=shuffle, seed=5)

    whole = make(sampler=sampler())
    wanted = values(whole), values(whole)
    first = make(sampler=sampler())
    iterator = iter(first)
    got = [next(iterator).tolist() for _ in range(2)]
    second = make(sampler=sampler())
    second.load_state_dict(first.state_dict())
    assert (got + values(second), values(second)) == wanted


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_resume_and_cover_the_dataset(make: MakeFeeder, drop_last: bool) -> None:
    """Three ranks resume from the state of one of them and together cover the dataset."""
    options = {"batch_size": 5, "drop_last": drop_last, "shuffle": True}
    seen: list[int] = []
    for rank in range(3):
        feeder = make(shard=(rank, 3), **options)
        iterator = iter(feeder)
        seen += [value for _ in range(2) for value in next(iterator).tolist()]
        state = feeder.state_dict()
    for rank in range(3):
        feeder = make(shard=(rank, 3), **options)
        feeder.load_state_dict(state)
        seen += [value for batch in feeder for value in batch.tolist()]
    squares = {index * index for index in range(100)}
    if drop_last:
        assert len(seen) == len(set(seen)) == 90
    else:
        assert len(seen) == 102
        assert set(seen) == squares


def test_the_order_depends_on_the_seed(make: MakeFeeder) -> None:
    """The order depends on seed=, not on the global generator."""
    torch.manual_seed(1)
    one = values(make(shuffle=True, seed=7))
    torch.manual_seed(2)
    assert values(make(shuffle=True, seed=7)) == one
    assert values(make(shuffle=True, seed=8)) != one


# --- out of order -----------------------------------------------------------------------------------------------------


def test_out_of_order_with_a_slow_sample() -> None:
    """A state taken while the first sample is stuck resumes with it and all other remaining samples."""
    stuck: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    reading = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 10

        def key(self, index: int) -> str:
            return str(index)

        async def read(self, index: int) -> bytes:
            if index == 0 and not stuck:
                stuck.append((asyncio.get_running_loop(), asyncio.Event()))
                reading.set()
                await stuck[0][1].wait()
            return b"%d" % index

    def feeder() -> Feeder[Any]:
        return Feeder(Slow(), decode=lambda data: int(data), batch_size=1, in_order=False, shard=None)

    with feeder() as first, feeder() as second:
        iterator = iter(first)
        assert reading.wait(10)
        before = [next(iterator).item() for _ in range(4)]
        assert 0 not in before
        second.load_state_dict(first.state_dict())
        assert sorted(before + [batch.item() for batch in second]) == list(range(10))
