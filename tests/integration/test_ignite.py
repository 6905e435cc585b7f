"""Ignite with `aiofeed.DataLoader`: the batches of torch's `DataLoader`, and resume in mid-epoch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import aiofeed
from tests.support.framework_parts import SAMPLES, Samples, same

BATCHES, EPOCHS = 7, 2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def ignite() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ignite")
        return pytest.importorskip("ignite.engine")


@WORKERS
def test_engine_returns_the_batches_of_torch(ignite: Any, workers: int) -> None:
    """`Engine.run` gets the batches of torch's loader, and the generators end in the same state."""
    results = []
    for new_loader in (DataLoader, aiofeed.DataLoader):
        torch.manual_seed(1)
        batches: list[torch.Tensor] = []
        engine = ignite.Engine(lambda _, batch, batches=batches: batches.append(batch.clone()))
        engine.run(new_loader(Samples(), 4, shuffle=True, num_workers=workers), max_epochs=EPOCHS)
        results.append([*batches, torch.rand(1)])
    assert len(results[0]) == EPOCHS * BATCHES + 1
    assert same(*results)


@WORKERS
def test_deterministic_engine_makes_the_loader_again(ignite: Any, workers: int) -> None:
    """`DeterministicEngine` replaces the batch sampler: the new loader is an `aiofeed.DataLoader` with the same
    further arguments; a run that starts in the second epoch returns the rest of the first run."""

    def add_one(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    def run(state: dict[str, Any] | None = None) -> list[list[float]]:
        torch.manual_seed(1)
        batches: list[list[float]] = []
        engine = ignite.DeterministicEngine(lambda _, batch: batches.append(batch[:, 0].tolist()))
        if state is not None:
            engine.load_state_dict(state)
        loader: Any = aiofeed.DataLoader(Samples(), 4, shuffle=True, num_workers=workers, transform=add_one)
        engine.run(loader, max_epochs=EPOCHS)
        made = engine.state.dataloader
        assert type(made) is aiofeed.DataLoader
        assert made is not loader
        assert made.transform is add_one
        return batches

    whole = run()
    assert sorted(sum(whole[:BATCHES], [])) == list(range(1, SAMPLES + 1))
    state = {"iteration": 9, "max_epochs": EPOCHS, "epoch_length": BATCHES, "rng_states": None}
    assert run(state) == whole[9:]


@WORKERS
def test_resume_by_the_state_of_the_loader(ignite: Any, workers: int) -> None:
    """An engine continues in mid-epoch with the next batch of a loader that has loaded its state."""
    torch.manual_seed(1)
    loader: Any = aiofeed.DataLoader(Samples(), 4, shuffle=True, num_workers=workers)
    states: list[dict[str, Any]] = []
    batches: list[torch.Tensor] = []

    def step(_: Any, batch: torch.Tensor) -> None:
        batches.append(batch.clone())
        states.append(loader.state_dict())

    ignite.Engine(step).run(loader, max_epochs=EPOCHS)
    torch.manual_seed(99)
    loader = aiofeed.DataLoader(Samples(), 4, shuffle=True, num_workers=workers)
    loader.load_state_dict(states[8])
    rest: list[torch.Tensor] = []
    ignite.Engine(lambda _, batch: rest.append(batch.clone())).run(loader, max_epochs=1, epoch_length=BATCHES - 2)
    assert same(rest, batches[9:])
