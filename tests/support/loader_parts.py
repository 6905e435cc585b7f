"""Datasets and samplers for the tests of ``DataLoader``, and a strict comparison of batches."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from aiofeed import DataLoader


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal: types, structure, dtypes, strides and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensors(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseException):
        return last_line(one) == last_line(other)
    return bool(one == other)


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in everything that a script can see but their memory."""
    if list(one.__dict__) != list(other.__dict__):
        return False
    if one.layout != other.layout or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        return False
    if one.is_nested:
        return all(map(same_tensors, one.unbind(), other.unbind()))
    if one.shape != other.shape:
        return False
    if one.layout == torch.sparse_coo:
        return same_tensors(one._indices(), other._indices()) and same_tensors(one._values(), other._values())
    if one.layout != torch.strided:
        return bool(one.to_dense().equal(other.to_dense()))
    if one.stride() != other.stride() or one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg():
        return False
    with torch.no_grad():
        plain, other_plain = (each.detach().resolve_conj().resolve_neg().clone() for each in (one, other))
        if one.numel() == 0:
            return True
        plain, other_plain = (each.contiguous().reshape(-1).view(torch.uint8) for each in (plain, other_plain))
        return plain.equal(other_plain)


def last_line(error: BaseException) -> str:
    """The type and the last line of an exception: a traceback of a worker process names files before it."""
    lines = [line for line in str(error).splitlines() if not line.startswith("in sample ")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def both(make: Any) -> tuple[Any, Any]:
    """What a function of the loader's class does with torch's, and with ours."""
    return _outcome(make, torch.utils.data.DataLoader), _outcome(make, DataLoader)


def _outcome(make: Any, cls: Any) -> Any:
    seed_all(3)
    try:
        return make(cls)
    except Exception as error:
        # A traceback would keep torch's iterator alive.
        return error.with_traceback(None)


def seed_all(seed: int) -> None:
    """Seed the three global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw_all() -> tuple[Any, ...]:
    """Draw from the three global generators."""
    return random.random(), float(np.random.rand()), torch.rand(2)


class Pair(NamedTuple):
    index: Any
    name: Any


class Plain(Dataset[Any]):
    """The indices themselves, or the items of a list."""

    def __init__(self, items: Any) -> None:
        self.items = range(items) if isinstance(items, int) else items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


_calls = itertools.count()


class Counts(Plain):
    """The items, as numbers, with how many this process has taken before, and the folder it is in."""

    def __getitem__(self, index: int) -> Any:
        return int(self.items[index]), next(_calls), os.getcwd()


class Random(Dataset[Any]):
    """Items drawn from all generators, of many types; some fail."""

    def __init__(self, n: int, bad: tuple[int, ...] = (), error: type[Exception] = ValueError) -> None:
        self.n = n
        self.bad = bad
        self.error = error

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise self.error(f"item {index} is bad")
        worker = get_worker_info()
        return {
            "index": index,
            "tensor": torch.randn(3, 5) + torch.rand(()),
            "python": random.random(),
            "numpy": np.random.rand(4),
            "pair": Pair(torch.tensor(index), str(index)),
            "worker": None if worker is None else f"{worker.id} of {worker.num_workers}",
        }


def without_none(items: list[dict[str, Any]]) -> Any:
    """Collate dicts whose worker may be ``None``."""
    return torch.utils.data.default_collate([{**each, "worker": str(each["worker"])} for each in items])


class Stream(IterableDataset[Any]):
    """Random numbers; worker k has `uneven * k` items more than worker 0. Some fail."""

    def __init__(self, n: int, uneven: int = 0, bad: tuple[int, ...] = (), *, shard: bool = True) -> None:
        self.n = n
        self.uneven = uneven
        self.bad = bad
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker is not None and self.shard else (0, 1)
        for index in range(number, self.n + self.uneven * number, step):
            if index in self.bad:
                raise ValueError(f"item {index} is bad")
            yield index, torch.randn(2), random.random(), np.random.rand()


class DrawingSampler(Sampler[int]):
    """Draws each index from the global generator at the time it is asked for it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield int(torch.randint(self.n, ()))


class StatefulStream(IterableDataset[Any]):
    """A stream whose iterator saves its position."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return StatefulIterator(self.n)


class StatefulIterator:
    reads = 0

    def __init__(self, n: int) -> None:
        worker = get_worker_info()
        self.index = 0 if worker is None else worker.id
        self.step = 1 if worker is None else worker.num_workers
        self.n = n

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> Any:
        if self.index >= self.n:
            raise StopIteration
        StatefulIterator.reads += 1
        self.index += self.step
        return self.index - self.step, torch.rand(()), StatefulIterator.reads

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]


class Counting(Dataset[Any]):
    """A dataset that counts its calls, and saves the count."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.calls = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class StatefulSampler(Sampler[int]):
    """Permutations that continue over epochs from a seed of its own."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
