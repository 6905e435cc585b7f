"""A `Dataset` that draws from the global generators: seeded per sample in processes, reported in threads."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from aiofeed import Feeder
from aiofeed.kernel.engine.fetch import generators
from aiofeed.kernel.sampling.order import SplitMix64


class Drawn(Dataset[list[float]]):
    """Items are the index and one number of each global generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), random.random(), float(np.random.random()), float(torch.rand(()))]


class DrawnTogether(Drawn):
    """The same, several in one call."""

    def __getitems__(self, indices: Sequence[int]) -> list[list[float]]:
        return [self[index] for index in indices]


def states() -> tuple[Any, ...]:
    return random.getstate(), *map(repr, np.random.get_state()), torch.get_rng_state().tolist()


def values(batches: Any) -> list[Any]:
    return [torch.stack(batch).tolist() for batch in batches]


DATASETS = {"items": Drawn(), "a part": Subset(Drawn(), range(23, -1, -1)), "together": DrawnTogether()}


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
@pytest.mark.usefixtures("forked_workers")
def test_items_depend_on_seed_epoch_and_position_only(dataset: Any) -> None:
    """Not on the number of processes or on a resume; they differ between samples, and this process draws nothing."""

    def feeder(processes: int) -> Feeder[Any]:
        return Feeder(dataset, batch_size=4, shuffle=True, seed=3, engine=f"process:{processes}")

    before = states()
    with feeder(1) as one, feeder(2) as two, feeder(1) as resumed:
        expected = [values(one) for _ in one.epochs(2)]
        iterator = iter(two)
        head = values([next(iterator), next(iterator)])
        resumed.load_state_dict(json.loads(json.dumps(two.state_dict())))
        assert head + values(iterator) == expected[0]
        assert head + values(resumed) == expected[0]
    numbers = [number for epoch in expected for batch in epoch for row in batch[1:] for number in row]
    assert len(set(numbers)) == len(numbers) == 2 * 24 * 3
    assert states() == before


class Noise:
    """A transform with a generator of its own."""

    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, values: list[float]) -> list[float]:
        return [*values, self.generator.random()]


class OwnGenerators(Dataset[list[float]]):
    """Items are the index and numbers of generators that the dataset has, some in its transforms."""

    def __init__(self) -> None:
        self.of_numpy = np.random.default_rng(0)
        self.others = {"legacy": np.random.RandomState(0), "torch": torch.Generator()}
        self.transforms = [Noise(), partial(Noise())]
        self.more = Subset([Noise()], [0])
        self.samples = list(range(100_000))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        legacy, of_torch = self.others.values()
        values = [float(index), float(self.of_numpy.random()), float(legacy.random_sample())]
        values.append(float(torch.rand((), generator=of_torch)))
        for transform in (*self.transforms, self.more[0]):
            values = transform(values)
        return values


@pytest.mark.usefixtures("forked_workers")
def test_generators_of_the_dataset_are_seeded_too() -> None:
    """Each process has a copy of them: without that, numbers come twice. They depend on the position only."""
    with (
        Feeder(OwnGenerators(), batch_size=4, shuffle=True, engine="process:1") as one,
        Feeder(OwnGenerators(), batch_size=4, shuffle=True, engine="process:2") as two,
    ):
        expected = [values(one) for _ in one.epochs(2)]
        assert [values(two) for _ in two.epochs(2)] == expected
    numbers = [number for epoch in expected for batch in epoch for row in batch[1:] for number in row]
    assert len(set(numbers)) == len(numbers) == 2 * 24 * 6


def test_a_dataset_without_generators_runs_no_code() -> None:
    """Its attributes are looked at, and none of its methods and properties is called."""

    class Careful:
        def __init__(self) -> None:
            self.itself = self

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def generator(self) -> Any:
            raise AssertionError("generator")

    assert generators.generators_of(Careful()) == []


def test_a_dataset_that_draws_in_threads_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the dataset, the generators and the ways out; the numbers drawn are those of the dataset alone."""
    generators._reported.clear()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = [Drawn()[index] for index in range(24)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING, "aiofeed"):
        for dataset in (Drawn(), Drawn()):
            with Feeder(dataset, batch_size=24) as feeder:
                [found] = values(feeder)
            if expected:
                torch.testing.assert_close(torch.tensor(found).T, torch.tensor(expected))
                expected = []
    [line] = [message for message in caplog.messages if "global generator" in message]
    assert line.startswith("Drawn draws from the global generator of numpy.random and random and torch")
    assert 'engine="process:N"' in line
    assert "aiofeed.DataLoader" in line


class Own(Drawn):
    """Items that depend on the index only."""

    def __getitem__(self, index: int) -> list[float]:
        return [SplitMix64(index).random()]


class OnceDrawn(Own):
    """The first item draws, for example to create something."""

    first = True

    def __getitem__(self, index: int) -> list[float]:
        if self.first:
            self.first = False
            torch.rand(())
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Own, OnceDrawn])
def test_a_dataset_that_does_not_draw_is_not_reported(kind: type[Own], caplog: pytest.LogCaptureFixture) -> None:
    """Nor one that draws at its first item alone; watching draws nothing."""
    dataset = kind()
    dataset[0]
    before = states()
    dataset.first = kind is OnceDrawn  # type: ignore[attr-defined]
    with Feeder(dataset, batch_size=4) as feeder:
        list(feeder)
    assert (states() == before) == (kind is Own)
    assert not any("global generator" in message for message in caplog.messages)
