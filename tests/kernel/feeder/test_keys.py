"""``keys=True``: each batch with the names of its samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder
from tests.support.simulated_device import SimulatedDevice

N = 40
BAD = (3, 4, 17, 39)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """The numbers from 0; some fail."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in BAD:
            raise ValueError("it is bad")
        return torch.tensor(index)


def number_in(data: bytes) -> torch.Tensor:
    """Decode a file of one number; some fail."""
    if int(data) in BAD:
        raise ValueError("it is bad")
    return torch.tensor(int(data))


@pytest.fixture
def files(tmp_path: Path) -> aiofeed.Files:
    """Files of one number each, which is their name."""
    for number in range(N):
        (tmp_path / f"{number}.txt").write_text(str(number))
    return aiofeed.Files([tmp_path / f"{number}.txt" for number in range(N)])


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize(
    "options",
    [{}, {"in_order": "samples"}, {"in_order": False}, {"device": "simulated"}, {"engine": "process:2"}],
    ids=str,
)
def test_keys_are_those_of_the_samples_that_are_left(
    files: aiofeed.Files, options: dict[str, Any], action: Any, request: pytest.FixtureRequest
) -> None:
    """A skipped sample leaves no key, and a replaced one has the key of its replacement."""
    if "engine" in options:
        request.getfixturevalue("forked_workers")
    if "device" in options:
        options = {"device": SimulatedDevice()}
    policy = aiofeed.FailurePolicy(action, max_failures=len(BAD))
    with Feeder(files, decode=number_in, batch_size=4, shuffle=True, on_error=policy, keys=True, **options) as feeder:
        epoch: list[Any] = list(feeder)
    for batch, keys in epoch:
        assert [int(Path(key).stem) for key in keys] == batch.tolist()
    assert sum(len(keys) for _, keys in epoch) == (N - len(BAD) if action == "skip" else N)


def test_keys_of_a_dataset_are_its_indices() -> None:
    """Also those of a part, after a resume, in asyncio and with ``transform=``."""
    feeder: Feeder[Any] = Feeder(
        aiofeed.FromDataset(Numbers())[20:30], batch_size=3, shuffle=True, transform=torch.neg, keys=True
    )
    with feeder:
        batches = iter(feeder)
        first = next(batches)
        feeder.load_state_dict(feeder.state_dict())

        async def rest() -> list[Any]:
            return [batch async for batch in feeder]

        epoch = [first, *asyncio.run(rest())]
        epoch += feeder.steps(2)
    assert all(keys == (-batch).tolist() for batch, keys in epoch)
    assert sorted(key for _, keys in epoch[:4] for key in keys) == list(range(20, 30))


@pytest.mark.parametrize("data", ["Dataset", "Tensors", "cache"])
def test_keys_of_batches_that_the_training_thread_makes(data: str) -> None:
    """Batches of small items, of tensors and of samples in memory have keys in every epoch."""
    numbers = torch.arange(4000)
    dataset = torch.utils.data.TensorDataset(numbers)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "keys": True}
    source: Any = aiofeed.Tensors(numbers) if data == "Tensors" else dataset
    if data == "cache":
        source, options["cache"] = aiofeed.FromDataset(dataset), "device"
    with Feeder(source, **options) as feeder:
        for _ in range(4):
            epoch: list[Any] = list(feeder)
            assert all(keys == batch[0].tolist() for batch, keys in epoch)
            assert len(epoch) == 500


def test_keys_of_packed_documents() -> None:
    """With ``Pack`` each row has the keys of its documents, without those that were skipped."""

    class Documents(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> torch.Tensor:
            if index in BAD:
                raise ValueError("it is bad")
            return torch.full((1 + index % 5,), index)

    plan = aiofeed.Pack([1 + index % 5 for index in range(N)], context=8, rows=3, pad=-1)
    policy = aiofeed.FailurePolicy("skip", max_failures=len(BAD))
    with Feeder(Documents(), batch_size=plan, shuffle=True, on_error=policy, keys=True) as feeder:
        epoch: list[Any] = list(feeder)
    for batch, rows in epoch:
        tokens = batch["tokens"].numpy()
        assert [sorted(row) for row in rows] == [sorted({*np.unique(row).tolist()} - {-1}) for row in tokens]
    assert {key for _, rows in epoch for row in rows for key in row} == {*range(N)} - {*BAD}


def test_keys_of_a_mixture_begin_with_the_source(files: aiofeed.Files) -> None:
    """So that losses can be summed by source."""
    mixture = aiofeed.Mixture({"a": files[5:10], "b": files[20:30]}, weights={"a": 1, "b": 2})
    with Feeder(mixture, decode=number_in, batch_size=6, keys=True) as feeder:
        [_, keys], *_ = feeder
    assert sorted(key.split(": ")[0] for key in keys) == ["a"] * 2 + ["b"] * 4


def test_keys_is_a_bool(files: aiofeed.Files) -> None:
    """Another value is refused by name."""
    with pytest.raises(TypeError, match="keys must be True or False"):
        Feeder(files, decode=number_in, batch_size=4, keys="path")  # type: ignore[call-overload]
