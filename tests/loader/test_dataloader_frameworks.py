"""What frameworks rely on in ``aiofeed.DataLoader``: its attributes, and the generators of nested samplers."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, TensorDataset

import aiofeed
from tests.support.loader_parts import Plain

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
        pytest.raises(aiofeed.errors.StateError, match=r"the state of an aiofeed\.DataLoader"),
    ):
        feeder.load_state_dict(new_loader("loader").state_dict())


def test_public_attributes_are_arguments() -> None:
    """Each public attribute is an argument of `__init__`, so a framework can make the loader again from them."""
    attributes = {name for name in vars(new_loader("loader")) if not name.startswith("_")}
    assert attributes <= inspect.signature(aiofeed.DataLoader).parameters.keys()


# --- subclasses, whose base class was replaced ---


class FilteredIterator:
    """Calls a function with each batch, as the iterator of PyTorch Geometric's `NodeLoader` does."""

    def __init__(self, iterator: Any, function: Any) -> None:
        self.iterator, self.function = iterator, function

    def __iter__(self) -> FilteredIterator:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __next__(self) -> Any:
        return self.function(next(self.iterator))


class NodeLoader(aiofeed.DataLoader[Any]):
    """Has a transform and a device of its own, set before `super().__init__`, and wraps the iterator."""

    def __init__(self, *arguments: Any, transform: Any, **options: Any) -> None:
        self.transform = transform
        super().__init__(*arguments, **options)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def threads(self) -> str:
        return "a method"

    def filtered(self, batch: Any) -> Any:
        return "filtered", self.transform(batch).tolist()

    def _get_iterator(self) -> Any:
        return FilteredIterator(super()._get_iterator(), self.filtered)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_attributes_and_iterators_of_a_subclass(options: dict[str, Any]) -> None:
    """A subclass keeps its attributes, and its `_get_iterator` makes the batches of each epoch and after a load."""
    loader = NodeLoader(Plain(4), 2, transform=lambda batch: batch + 10, **options)
    batches = [("filtered", [10, 11]), ("filtered", [12, 13])]
    assert list(loader) == list(loader) == batches
    assert (loader.device, loader.threads()) == (torch.device("cpu"), "a method")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for resumed in (loader, NodeLoader(Plain(4), 2, transform=lambda batch: batch + 10, **options)):
        resumed.load_state_dict(state)
        assert list(resumed) == batches[1:]
        assert list(resumed) == batches


class Repeated:
    """A batch sampler without an end."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches


class Endless(aiofeed.DataLoader[Any]):
    """Keeps one iterator for all epochs, as Ultralytics' loader does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_that_keeps_its_iterator(workers: int) -> None:
    """`transform=` is applied, the state continues in the next epoch, and the workers end as with torch's class."""
    new = lambda: Endless(Plain(6), 2, num_workers=workers, transform=lambda batch: batch.tolist())  # noqa: E731
    loader = new()
    assert [*loader, *loader] == [[0, 1], [2, 3], [4, 5]] * 2
    next(iter(loader))
    resumed = new()
    resumed.load_state_dict(loader.state_dict())
    resumed.reset()
    assert list(resumed) == [[2, 3], [4, 5], [0, 1]]
    for process in getattr(resumed.iterator, "_workers", []):
        process.terminate()
    resumed.iterator._shutdown_workers()
    assert not any(process.is_alive() for process in getattr(resumed.iterator, "_workers", []))
    assert list(getattr(resumed.iterator, "_index_queues", [])) == []


def test_attributes_of_every_subclass_are_free() -> None:
    """Beside its arguments a loader adds one attribute and no method to torch's, except those of its interface."""
    added = vars(aiofeed.DataLoader(NUMBERS)).keys() - vars(torch.utils.data.DataLoader(NUMBERS)).keys()
    assert {name for name in added if name.startswith("_")} == {"_aiofeed"}
    methods = {"__init__", "__aiter__", "__getstate__", "_get_iterator", "state_dict", "load_state_dict", "explain"}
    described = {"__module__", "__doc__", "__orig_bases__", "__parameters__", "__static_attributes__"}
    assert vars(aiofeed.DataLoader).keys() - {*described, "__firstlineno__", "__annotations__"} == methods


# --- a transform in the caller's thread ---


def test_stop_iteration_in_a_transform_is_an_error() -> None:
    """A transform that raises `StopIteration` does not end the epoch; the next batch follows."""

    def transform(batch: Any) -> Any:
        return next(iter([batch] if int(batch[0]) else []))

    iterator = iter(aiofeed.DataLoader(Plain(4), 2, transform=transform))
    with pytest.raises(RuntimeError, match="transform= raised StopIteration"):
        next(iterator)
    assert next(iterator).tolist() == [2, 3]


async def test_stop_iteration_in_a_transform_is_an_error_in_async_for() -> None:
    """A transform that raises `StopIteration` does not end `async for`."""
    with pytest.raises(RuntimeError, match="transform= raised StopIteration"):
        async for _ in aiofeed.DataLoader(Plain(4), 2, transform=lambda batch: next(iter(()))):
            pass


class Items(IterableDataset[int]):
    """Saves its position."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.at, 8):
            self.at = index + 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("new", [lambda: Plain(8), Items])
def test_ctrl_c_in_a_transform_loses_no_batch(new: Any) -> None:
    """After Ctrl-C inside `transform=` the iterator names the way out, and the state points at that batch."""
    interrupted: list[int] = []

    def transform(batch: Any) -> Any:
        if int(batch[0]) == 2 and not interrupted:
            interrupted.append(2)
            signal.raise_signal(signal.SIGINT)
        return batch

    loader = aiofeed.DataLoader(new(), 2, transform=transform)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    for _ in range(2):
        with pytest.raises(
            aiofeed.FeedError, match=r"interrupted at batch 1.*load_state_dict\(loader\.state_dict\(\)\)"
        ):
            next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert torch.cat(list(loader)).tolist() == [2, 3, 4, 5, 6, 7]
