"""What frameworks rely on in ``aiofeed.DataLoader``: its attributes, and the generators of nested samplers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

import aiofeed

NUMBERS = TensorDataset(torch.arange(20.0))


class Nested:
    """A batch sampler around another one, as Accelerate makes it."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def new_loader(place: str) -> aiofeed.DataLoader[Any]:
    """Return a loader with a new generator in the loader, in its sampler or in that of its batch sampler."""
    generator = torch.Generator().manual_seed(7)
    sampler = RandomSampler(NUMBERS, generator=generator)
    if place == "loader":
        return aiofeed.DataLoader(NUMBERS, 4, shuffle=True, generator=generator)
    if place == "sampler":
        return aiofeed.DataLoader(NUMBERS, 4, sampler=sampler)
    batches: Any = BatchSampler(sampler, 4, drop_last=False)
    return aiofeed.DataLoader(NUMBERS, batch_sampler=batches if place == "batch sampler" else Nested(batches))


def numbers(loader: aiofeed.DataLoader[Any]) -> list[float]:
    return [number for (batch,) in loader for number in batch.tolist()]


@pytest.mark.parametrize("place", ["loader", "sampler", "batch sampler", "nested batch sampler"])
def test_resume_restores_the_generator(place: str) -> None:
    """A state of the second epoch restores the generator in a new loader: the rest and the third epoch are equal."""
    torch.manual_seed(0)
    loader = new_loader(place)
    numbers(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [number for (batch,) in iterator for number in batch.tolist()]
    third = numbers(loader)
    resumed = new_loader(place)
    resumed.load_state_dict(state)
    assert numbers(resumed) == rest
    assert numbers(resumed) == third


def test_a_feeder_names_the_state_of_a_data_loader() -> None:
    """A feeder that gets the state of an `aiofeed.DataLoader` says so."""
    with (
        aiofeed.Feeder(NUMBERS, batch_size=4) as feeder,
        pytest.raises(aiofeed.StateError, match=r"the state of an aiofeed\.DataLoader"),
    ):
        feeder.load_state_dict(new_loader("loader").state_dict())


def test_public_attributes_are_arguments() -> None:
    """Each public attribute is an argument of `__init__`, so a framework can make the loader again from them."""
    attributes = {name for name in vars(new_loader("loader")) if not name.startswith("_")}
    assert attributes <= inspect.signature(aiofeed.DataLoader).parameters.keys()
