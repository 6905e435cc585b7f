"""Whatever user code raises, also what is no `Exception`, is the failure of its own sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from aiofeed import EncodedCache, FailurePolicy, Feeder, Limits, Mixture

LENGTH, BAD = 16, 5
KINDS = [
    ValueError,
    asyncio.CancelledError,
    BaseException,
    GeneratorExit,
    KeyboardInterrupt,
    StopAsyncIteration,
    StopIteration,
    SystemExit,
]


class Numbers:
    """The numbers below 16, one of which raises `kind`."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return LENGTH

    def key(self, index: int) -> str:
        return f"number {index}"

    def get(self, index: int) -> bytes:
        if index == BAD:
            raise self.kind("broken")
        return b"%d" % index


class Single(Numbers):
    async def read(self, index: int) -> bytes:
        await asyncio.sleep(0)
        return self.get(index)


class Together(Single):
    async def read_many(self, indices: Sequence[int]) -> Iterable[bytes]:
        return [await self.read(index) for index in indices]


class Lazy(Single):
    async def read_many(self, indices: Sequence[int]) -> Iterable[bytes]:
        return (self.get(index) for index in indices)


class AtOnce(Single):
    """Raises where `read_many` is called, and not where it is awaited."""

    def read_many(self, indices: Sequence[int]) -> Awaitable[list[bytes]]:
        found = [self.get(index) for index in indices]

        async def done() -> list[bytes]:
            return found

        return done()


class InThreads(Single):
    answers_at_once = True

    def read_now(self, indices: Sequence[int]) -> list[bytes]:
        return [self.get(index) for index in indices]


class Items(Numbers, Dataset[bytes]):
    def __getitem__(self, index: int) -> bytes:
        return self.get(index)


class ItemsTogether(Items):
    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        return [self.get(index) for index in indices]


def decode(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def as_tensors(samples: list[bytes]) -> torch.Tensor:
    return torch.tensor([int(data) for data in samples])


def plain(source: Any, path: Path, **policy: Any) -> Feeder[Any]:
    items = isinstance(source, Dataset)
    options: dict[str, Any] = {"collate_fn": as_tensors} if items else {"decode": decode}
    skip = FailurePolicy("skip", max_failures=LENGTH, **policy)
    return Feeder(source, batch_size=8, on_error=skip, limits=Limits(decode_threads=4), **options)


def in_mixture(source: Any, path: Path) -> Feeder[Any]:
    skip = FailurePolicy("skip", max_failures=LENGTH)
    return Feeder(Mixture({"one": source}), decode=decode, batch_size=8, on_error=skip)


def in_cache(source: Any, path: Path) -> Feeder[Any]:
    skip = FailurePolicy("skip", max_failures=LENGTH)
    return Feeder(source, decode=decode, batch_size=8, on_error=skip, cache=EncodedCache(path, 1 << 20))


WAYS: dict[str, Callable[..., Feeder[Any]]] = {
    "plain": plain,
    "with a time limit": lambda source, path: plain(source, path, read_timeout_s=30.0),
    "with retries": lambda source, path: plain(source, path, retries=1),
    "mixture": in_mixture,
    "cache": in_cache,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", [Single, Together, Lazy, AtOnce, InThreads, Items, ItemsTogether])
def test_what_a_read_raises_takes_no_neighbours(source: type[Numbers], way: str, tmp_path: Path) -> None:
    """All other samples come, whichever are read in the same call, and the error is chained."""
    if issubclass(source, Items) and way in ("mixture", "cache"):
        pytest.skip("for sources that read")
    for kind in KINDS:
        with WAYS[way](source(kind), tmp_path / kind.__name__) as feeder:
            seen = [value for batch in feeder for value in batch.tolist()]
            assert sorted(seen) == [index for index in range(LENGTH) if index != BAD], kind
            [failure] = feeder.failures
            assert (failure.index, failure.stage) == (BAD, "read")
            assert kind.__name__ in str(failure.error)
