"""Exact resume of ``DataLoader`` in mid-epoch by ``state_dict``."""

from __future__ import annotations

import copy
import io
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from aiofeed import DataLoader, Feeder
from aiofeed.errors import StateError
from aiofeed.loader.workers.random_state import pack_random_state, unpack_random_state
from tests.support.loader_parts import (
    Counting,
    DrawingSampler,
    Plain,
    Random,
    StatefulIterator,
    StatefulSampler,
    StatefulStream,
    Stream,
    draw_all,
    same,
    seed_all,
    without_none,
)
from tests.support.waiting import until

NewLoader = Callable[[], DataLoader[Any]]


class OwnState(IterableDataset[Any]):
    """A dataset that saves its position itself, and whose ``__iter__`` continues there."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.start = self.index = 0

    def __iter__(self) -> Any:
        self.index = self.start
        return _Eager(self, list(range(self.start, self.n)))

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["index"]


class _Eager:
    def __init__(self, dataset: OwnState, values: list[int]) -> None:
        self.dataset = dataset
        self.values = iter(values)

    def __next__(self) -> Any:
        value = next(self.values)
        self.dataset.index = value + 1
        return value, random.random()


CASES: dict[str, NewLoader] = {
    "map": lambda: DataLoader(Random(11), 3, shuffle=True, collate_fn=without_none),
    "map, 2 workers": lambda: DataLoader(Random(11), 2, shuffle=True, num_workers=2, collate_fn=without_none),
    "map, persistent": lambda: DataLoader(
        Random(11), 3, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=without_none
    ),
    "generator": lambda: DataLoader(
        Plain(9), 2, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5)
    ),
    "drawing sampler": lambda: DataLoader(Plain(7), 2, sampler=DrawingSampler(7), num_workers=2),
    "batch_sampler": lambda: DataLoader(
        Random(9), batch_sampler=BatchSampler(DrawingSampler(9), 2, False), collate_fn=without_none
    ),
    "no batches": lambda: DataLoader(Random(5), None, num_workers=2),
    "iterable": lambda: DataLoader(Stream(7, 2), 2),
    "iterable, 2 workers": lambda: DataLoader(Stream(7, 3), 2, num_workers=2),
    "iterable, persistent": lambda: DataLoader(Stream(7, 3), 2, num_workers=2, persistent_workers=True),
    "stateful dataset": lambda: DataLoader(Counting(7), 2),
    "stateful sampler": lambda: DataLoader(Plain(8), 2, sampler=StatefulSampler(8), num_workers=1),
}


def take(iterator: Iterator[Any], n: int) -> list[Any]:
    return list(itertools.islice(iterator, n))


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(loader: DataLoader[Any], epochs: int) -> list[Any]:
    return [(list(loader), draw_all()) for _ in range(epochs)]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("case", list(CASES))
def test_resume_at_every_batch(case: str, before: int) -> None:
    """A new loader continues after each batch, in the first and the second epoch, and so do all epochs after it."""
    seed_all(4)
    loader = CASES[case]()
    expected = run(loader, before + 2)
    n = len(expected[before][0])
    for stop, save in zip(range(n + 1), itertools.cycle((through_json, through_torch))):
        if loader.num_workers and stop not in (1, n) and not (stop == n - 1 and before == 0):
            continue
        seed_all(4)
        loader = CASES[case]()
        run(loader, before)
        iterator = iter(loader)
        got = take(iterator, stop)
        state = save(loader.state_dict())
        del iterator, loader
        seed_all(99)
        loader = CASES[case]()
        loader.load_state_dict(state)
        if not (stop == n and "iterable" not in case):
            # A state after the last batch of a map-style dataset is between two epochs.
            got += list(loader)
        assert same(got, expected[before][0]), stop
        assert same([draw_all()], [expected[before][1]]), stop
        assert same(run(loader, 1), expected[before + 1 :]), stop


@pytest.mark.parametrize("new", [lambda n: StatefulStream(9), lambda n: OwnState(9)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_stream_is_not_read_again(new: Any, workers: int) -> None:
    """An iterable dataset that saves its state, or whose iterator does, continues without reading from the start."""
    for stop in range(4):
        seed_all(1)
        expected = list(DataLoader(new(9), None, num_workers=workers))
        seed_all(1)
        loader = DataLoader(new(9), None, num_workers=workers)
        got = take(iter(loader), stop)
        state = through_json(loader.state_dict())
        StatefulIterator.reads = 0
        resumed = DataLoader(new(9), None, num_workers=workers)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert same([each[:2] for each in got + rest], [each[:2] for each in expected])
        if isinstance(resumed.dataset, StatefulStream):
            assert rest[-1][2] == (9 - stop if not workers else rest[-1][2])


def test_a_stateful_dataset_gets_its_state() -> None:
    """A map-style dataset with ``state_dict`` continues in each worker."""
    loader = DataLoader(Counting(8), None, num_workers=2)
    expected = list(loader)
    iterator = iter(loader)
    got = take(iterator, 3)
    state = loader.state_dict()
    resumed = DataLoader(Counting(8), None, num_workers=2)
    resumed.load_state_dict(state)
    assert got + list(resumed) == expected == [[index, 1 + index // 2] for index in range(8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_order_batches_are_returned_once(workers: int) -> None:
    """With ``in_order=False`` the rest of the epoch has the batches that were not returned."""
    loader = DataLoader(Plain(20), None, num_workers=workers, in_order=False)
    for stop in (0, 3, 10):
        iterator = iter(loader)
        got = take(iterator, stop)
        state = through_json(loader.state_dict())
        resumed = DataLoader(Plain(20), None, num_workers=workers, in_order=False)
        resumed.load_state_dict(state)
        assert sorted(got + list(resumed)) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_after_a_sample_that_failed(workers: int) -> None:
    """A batch that raised is not returned again once a later one was returned."""
    new = lambda: DataLoader(Random(6, (2,)), None, num_workers=workers)  # noqa: E731
    iterator = iter(loader := new())
    got = take(iterator, 2)
    with pytest.raises(ValueError, match="item 2 is bad"):
        next(iterator)
    got.append(next(iterator))
    resumed = new()
    resumed.load_state_dict(loader.state_dict())
    assert [each["index"] for each in [*got, *resumed]] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_load_in_the_loader_that_saved(workers: int) -> None:
    """A state loads into the same loader, as often as wanted; a state is returned until the next epoch begins."""
    seed_all(2)
    loader = DataLoader(Plain(9), 2, shuffle=True, num_workers=workers)
    first = loader.state_dict()
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    rest = list(iterator)
    for _ in range(2):
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert same(list(loader), rest)
    loader.load_state_dict(first)
    assert loader.state_dict() == first
    assert len(list(loader)) == 5
    assert len(list(loader)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_iter_twice_before_the_first_batch(workers: int) -> None:
    """A framework may call ``iter`` twice; both iterators continue from the state."""
    seed_all(2)
    loader = DataLoader(Plain(9), 2, shuffle=True, num_workers=workers)
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    rest = list(iterator)
    loader = DataLoader(Plain(9), 2, shuffle=True, num_workers=workers)
    loader.load_state_dict(state)
    iter(loader)
    assert same(list(loader), rest)
    assert len(list(loader)) == 5


def test_the_dataset_of_a_state_is_not_asked_for_skipped_samples() -> None:
    """Batches that were returned before are not loaded again from a dataset with indices."""

    class Logged(Plain):
        asked: ClassVar[list[int]] = []

        def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            return index

    loader = DataLoader(Logged(10), 2)
    iterator = iter(loader)
    take(iterator, 3)
    state = loader.state_dict()
    Logged.asked.clear()
    loader.load_state_dict(state)
    assert [each.tolist() for each in loader] == [[6, 7], [8, 9]]
    assert Logged.asked == [6, 7, 8, 9]


def test_a_state_of_another_loader() -> None:
    """Another number of workers or of batches is refused, and named."""
    state = DataLoader(Plain(9), num_workers=2).state_dict()
    with pytest.raises(StateError, match="num_workers: 2 in the state, 0 here"):
        DataLoader(Plain(9)).load_state_dict(state)
    with pytest.raises(StateError, match="batches per epoch: 9 in the state, 8 here"):
        DataLoader(Plain(8), num_workers=2).load_state_dict(state)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _places(each, (*path, key))


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_states(workers: int) -> None:
    """A state in which a value was removed or replaced is refused with ``StateError``, or loads."""
    loader = DataLoader(Random(9), 2, shuffle=True, num_workers=workers, collate_fn=without_none)
    iterator = iter(loader)
    take(iterator, 2)
    state = through_json(loader.state_dict())
    refused = 0
    for *path, last in _places(state):
        for damage in ("remove", None, "text", -7, [], {}, 1e300, [[None]], [3] * 5):
            broken = copy.deepcopy(state)
            place = broken
            for key in path:
                place = place[key]
            if damage == "remove":
                del place[last]
            else:
                place[last] = damage
            resumed = DataLoader(Random(9), 2, shuffle=True, num_workers=workers, collate_fn=without_none)
            try:
                resumed.load_state_dict(broken)
                if not workers:
                    list(resumed)
            except StateError:
                refused += 1
    assert refused > 100
    for broken in ({}, None, [], "text", 3, {"version": 99}):
        with pytest.raises(StateError):
            loader.load_state_dict(broken)  # type: ignore[arg-type]
    list(iterator)


@pytest.mark.parametrize("generator", [[], ["MT19937"], ["MT19937", "AAAA", 0, 0], -1, 10**9])
def test_a_damaged_state_of_numpys_generator(generator: Any) -> None:
    """It is refused: NumPy itself would read memory outside its state."""
    version, numpys, torchs = pack_random_state((random.getstate(), np.random.get_state(), torch.get_rng_state()))
    damaged = generator if isinstance(generator, list) else [*numpys[:2], generator, *numpys[3:]]
    with pytest.raises(StateError, match="damaged"):
        unpack_random_state([version, damaged, torchs])


def test_a_state_that_is_refused_changes_nothing() -> None:
    """The generators and the loader stay as they were."""
    loader = DataLoader(Plain(9), shuffle=True)
    state = through_json(loader.state_dict())
    seed_all(3)
    state["generators"][2] = "damaged"
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    numbers = draw_all()
    seed_all(3)
    assert same(draw_all(), numbers)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_dataset_must_load_what_it_saved(workers: int) -> None:
    """A state with one of the dataset is refused by a dataset that cannot load it."""
    loader = DataLoader(StatefulStream(9), None, num_workers=workers)
    take(iter(loader), 2)
    other = DataLoader(Stream(9), None, num_workers=workers)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="Stream has no load_state_dict"):
        iter(other)


class Flaky(IterableDataset[Any]):
    """Fails at some indices, and goes on."""

    def __iter__(self) -> Any:
        return FlakyItems()


class FlakyItems:
    def __init__(self) -> None:
        worker = get_worker_info()
        self.at, self.step = (-1, 1) if worker is None else (worker.id - 2, 2)

    def __next__(self) -> Any:
        self.at += self.step
        if self.at in (2, 3, 5):
            raise ValueError(f"item {self.at} is bad")
        if self.at > 8:
            raise StopIteration
        return self.at, random.random()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "transform": tuple}])
def test_errors_before_a_batch_are_not_raised_again(options: dict[str, Any]) -> None:
    """A resume raises the errors after the last batch that was returned, and no others, with the same numbers."""

    def outcomes(loader: DataLoader[Any], n: int) -> list[Any]:
        iterator, found = iter(loader), list[Any]()
        while len(found) < n:
            try:
                found.append(tuple(next(iterator)))
            except StopIteration:
                break
            except ValueError as error:
                found.append(str(error).splitlines()[-1][-13:])
        return found

    seed_all(1)
    expected = outcomes(DataLoader(Flaky(), None, **options), 99)
    assert sum(isinstance(each, str) for each in expected) == 3
    for n in range(1, len(expected), 1 + options.get("num_workers", 0)):
        seed_all(1)
        loader = DataLoader(Flaky(), None, **options)
        got = outcomes(loader, n)
        while isinstance(got[-1], str):
            got.pop()
        state = through_json(loader.state_dict())
        resumed = DataLoader(Flaky(), None, **options)
        resumed.load_state_dict(state)
        assert [*got, *outcomes(resumed, 99)] == expected, n


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_near_the_end_with_a_transform(workers: int) -> None:
    """Batches that a thread has received, and that were not returned, belong to the rest of the epoch."""
    loader = DataLoader(Plain(6), None, num_workers=workers, transform=lambda batch: batch)
    iterator = iter(loader)
    take(iterator, 5)
    until(lambda: not iterator._workers[0].is_alive())  # all batches were received
    resumed = DataLoader(Plain(6), None, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [5]


def test_out_of_order_batches_of_threads_are_returned_once() -> None:
    """With `threads=` and `in_order=False` the rest of the epoch has the batches that were not returned."""
    gate = threading.Event()

    class Gated(Plain):
        def __getitem__(self, index: int) -> Any:
            assert index or gate.wait(60)
            return super().__getitem__(index)

    def new() -> DataLoader[Any]:
        return DataLoader(Gated(9), 2, threads=2, in_order=False)

    loader = new()
    got = take(iter(loader), 2)
    state = through_json(loader.state_dict())
    gate.set()
    resumed = new()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert 0 not in torch.cat(got)
    assert sorted(torch.cat(got + rest).tolist()) == list(range(9))
    assert len(list(resumed)) == 5


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_state_of_another_rank(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Order and position are those of the state; the random numbers of the rank and of its workers stay its own."""

    def new() -> DataLoader[Any]:
        return DataLoader(Random(8), 2, shuffle=True, collate_fn=without_none, worker_init_fn=of_this_rank, **options)

    def of_this_rank(_: int) -> None:
        torch.manual_seed(torch.initial_seed() + 100 * rank)

    rank = 0
    monkeypatch.setattr("aiofeed.loader.workers.state._get_distributed_settings", lambda: (2, rank))
    seed_all(1)
    loader = new()
    iterator = iter(loader)
    take(iterator, 2)
    state = through_json(loader.state_dict())
    expected = list(iterator)
    rank = 1
    seed_all(2)
    before = draw_all()
    seed_all(2)
    resumed = new()
    with pytest.warns(UserWarning, match="saved by rank 0: position and order are restored, random numbers of the"):
        resumed.load_state_dict(state)
    assert same(draw_all(), before)
    got = list(resumed)
    assert same([each["index"] for each in got], [each["index"] for each in expected])
    assert not same(got[0]["tensor"], expected[0]["tensor"])
    assert len(list(resumed)) == 4


def test_the_state_of_a_stateful_data_loader() -> None:
    """Torchdata's argument is accepted, and its states are refused by name."""
    loader = DataLoader(Plain(4), snapshot_every_n_steps=10)
    assert loader.snapshot_every_n_steps == 10
    for state in ({"_num_yielded": 1, "_sampler_iter_yielded": 1}, {"_snapshot": {}, "_steps_since_snapshot": 0}):
        with pytest.raises(StateError, match=r"torchdata's StatefulDataLoader.*finish its epoch with"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", [np.array, torch.tensor, list], ids=["arrays", "tensors", "lists"])
def test_batches_of_arrays_resume(form: Any, workers: int) -> None:
    """A batch sampler may give arrays or tensors, which have no truth value, and a resume returns the rest."""
    batches = [form(list(range(at, at + 4))) for at in range(0, 20, 4)]
    new: Any = lambda: DataLoader(range(20), batch_sampler=batches, num_workers=workers, collate_fn=list)  # noqa: E731
    loader = new()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    resumed = new()
    resumed.load_state_dict(loader.state_dict())
    assert [int(value) for batch in resumed for value in batch] == list(range(8, 20))
    feeder = Feeder(range(20), batch_sampler=batches)
    list(zip(range(2), feeder, strict=False))
    again = Feeder(range(20), batch_sampler=batches)
    again.load_state_dict(feeder.state_dict())
    assert [value for batch in again for value in batch.tolist()] == list(range(8, 20))
    del iterator


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.tensor([1, 2]), "1", 1.0])
@pytest.mark.parametrize("name", ["version", "num_workers", "batches", "rank"])
def test_a_state_with_arrays_is_refused(name: str, value: Any) -> None:
    """An array in place of a number is a `StateError`, not an error of its comparison."""
    loader = DataLoader(Plain(4), 2)
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), name: value})
