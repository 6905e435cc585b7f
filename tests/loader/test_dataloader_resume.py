"""A property test: every state of every kind of ``DataLoader`` continues exactly, in a new loader and in a live one."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from aiofeed import DataLoader
from tests.support.loader_parts import draw_all, same, seed_all

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

EPOCHS = 3


def drawn(index: int) -> Any:
    return index, torch.rand(2), random.random(), np.random.rand()


class Map(Dataset[Any]):
    """Samples drawn from all generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return drawn(index)


class StatefulMap(Map):
    """Counts its samples, and saves the count."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return *drawn(index), self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Items(IterableDataset[Any]):
    """Samples drawn from all generators; worker 1 has three more."""

    def __init__(self, n: int) -> None:
        self.n = n

    def part(self) -> tuple[int, int, int]:
        worker = get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return number, self.n + 3 * number, step

    def __iter__(self) -> Iterator[Any]:
        for index in range(*self.part()):
            yield drawn(index)


class SizedItems(Items):
    def __len__(self) -> int:
        return self.n


class StatefulItems(Items):
    """Saves its position itself. At the end of an epoch it keeps that position until the next one is read."""

    at = 0
    loaded: int | None = None

    def __iter__(self) -> Iterator[Any]:
        start, stop, step = self.part()
        if self.loaded is not None:
            start, self.loaded = self.loaded, None
        for index in range(start, stop, step):
            self.at = index + step
            yield drawn(index)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


class SizedStatefulItems(StatefulItems):
    def __len__(self) -> int:
        return self.n


class Cursor:
    """An iterator that saves its position."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        self.at, self.stop, self.step = start, stop, step

    def __next__(self) -> Any:
        if self.at >= self.stop:
            raise StopIteration
        self.at += self.step
        return drawn(self.at - self.step)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulIterators(Items):
    def __iter__(self) -> Any:
        return Cursor(*self.part())


DATASETS = (Map, StatefulMap, Items, SizedItems, StatefulItems, SizedStatefulItems, StatefulIterators)
WORKERS = [
    {"num_workers": workers, "persistent_workers": persistent, "in_order": in_order}
    for workers in (1, 2)
    for persistent in (False, True)
    for in_order in (True, False)
]
CASES = [
    (dataset, generator, transform, workers)
    for workers in ({}, *WORKERS)
    for dataset, generator, transform in itertools.product(DATASETS, (False, True), (None, list))
]


def new_loader(case: Any, seed: int) -> DataLoader[Any]:
    """A loader whose generator has a seed. Its 8 samples, without workers, are complete batches."""
    dataset, generator, transform, workers = case
    return DataLoader(
        dataset(8),
        batch_size=2,
        shuffle=True if issubclass(dataset, Map) else None,
        generator=torch.Generator().manual_seed(seed) if generator else None,
        transform=transform,
        **workers,
    )


def saved(loader: DataLoader[Any]) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def epoch(loader: DataLoader[Any], states: list[Any] | None = None, *, twice: bool = False) -> list[Any]:
    """The batches of an epoch, with draws of the training after each; collects the states."""
    iterator = iter(loader)
    if twice:
        iterator = iter(loader)
    states = [] if states is None else states
    states.append(saved(loader))
    got = []
    for batch in iterator:
        got.append((batch, draw_all()))
        states.append(saved(loader))
    return got


def indices(batches: list[Any]) -> list[int]:
    return sorted(int(index) for batch, _ in batches for index in batch[0])


def check(case: Any, choose: Any) -> None:
    """Load states of two epochs in a new loader or in a live one, and call ``iter`` once or twice.

    Args:
        choose: Returns some of the combinations of a state, where it is loaded, and whether ``iter`` is called twice.
    """
    dataset, _, _, workers = case
    seed_all(3)
    live = new_loader(case, 5)
    expected, states = [], []
    places: list[Any] = []
    for _ in range(EPOCHS):
        between, within = saved(live), list[Any]()
        expected.append(epoch(live, within))
        states.append((between, within))
    sized = issubclass(dataset, Map) or hasattr(dataset, "__len__")
    for (between, within), batches, following in zip(states, expected, expected[1:], strict=False):
        places.append((between, [batches, following]))
        for handed, state in enumerate(within):
            # After the last batch comes the next epoch, if the dataset has a length.
            rest = [batches[handed:]] if handed < len(batches) or not sized else []
            places.append((state, [*rest, following]))
    in_order = workers.get("in_order", True) or workers["num_workers"] < 2
    for (state, wanted), in_live, twice in choose(list(itertools.product(places, (True, False), (True, False)))):
        loader = live if in_live else new_loader(case, 9)
        seed_all(99)
        loader.load_state_dict(state)
        got = [epoch(loader, twice=twice), *(epoch(loader) for _ in wanted[1:])]
        if in_order:
            assert same(got, wanted), (state["epoch"]["returned"], in_live, twice)
        else:
            assert [indices(each) for each in got] == [indices(each) for each in wanted]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [case for case in CASES if not case[-1]], ids=str)
def test_every_state_without_workers(case: Any, step: int) -> None:
    """Every state of two epochs, through JSON, continues bit for bit, the draws of the training included."""
    check(case, lambda all_of_them: all_of_them[::step])


@pytest.mark.parametrize("case", random.Random(4).sample([case for case in CASES if case[-1]], 6), ids=str)
def test_some_states_with_workers(case: Any) -> None:
    """States of workers in their first and second epoch continue bit for bit; out of order, with the batches left."""
    check(case, lambda all_of_them: random.Random(str(case)).sample(all_of_them, 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[-1]], ids=str)
def test_every_state_with_workers(case: Any) -> None:
    """Every state of workers in two epochs continues bit for bit; out of order, with the batches left."""
    check(case, lambda all_of_them: [each for number, each in enumerate(all_of_them) if number // 4 % 4 == number % 4])
