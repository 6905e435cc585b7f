"""Two ranks under torchrun: in each framework, `aiofeed.DataLoader` returns what torch's `DataLoader` returns."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils._pytree import tree_flatten

TorchRun: TypeAlias = Callable[..., subprocess.Popen[str]]

SCRIPT = Path(__file__).with_name("train_ranks.py")
SAMPLES, EPOCHS = 27, 2
"""The same values as in train_ranks.py."""

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.filterwarnings("default")]


def train(torchrun: TorchRun, folder: Path, *frameworks: str) -> None:
    """Train with both loaders in each framework, one after the other, and save the results."""
    process = torchrun(2, SCRIPT, folder, *frameworks)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def trained(torchrun: TorchRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of a plain script and, if it is installed, of Accelerate."""
    folder = tmp_path_factory.mktemp("ranks")
    train(torchrun, folder, "torchrun", *(["accelerate"] if find_spec("accelerate") else []))
    return folder


def results(folder: Path, framework: str) -> list[dict[str, Any]]:
    """The results of `aiofeed.DataLoader` for each rank, which equal torch's."""
    ranks = [torch.load(folder / f"{framework}-{rank}.pt", weights_only=True) for rank in range(2)]
    for rank in ranks:
        found, structure = tree_flatten(rank["aiofeed"])
        expected, expected_structure = tree_flatten(rank["torch"])
        assert structure == expected_structure
        assert all(
            torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            for one, other in zip(found, expected, strict=True)
        )
    return [rank["aiofeed"] for rank in ranks]


def numbers(batches: list[torch.Tensor]) -> list[int]:
    return torch.cat(batches)[:, 0].int().tolist()


def test_torchrun_script_that_takes_a_first_batch(trained: Path) -> None:
    """A script that calls `next(iter(loader))` before the training gets the batches of torch's loader."""
    ranks = results(trained, "torchrun")
    assert all(rank["length"] * EPOCHS == len(rank["batches"]) == 8 for rank in ranks)
    assert set(numbers(ranks[0]["batches"][:4]) + numbers(ranks[1]["batches"][:4])) == set(range(SAMPLES))


def test_accelerate(trained: Path) -> None:
    """Batches, learning rates, accumulation, `skip_first_batches` and `gather_for_metrics` are those of torch's loader;
    the learning rate falls to 0 in the last step. With a feeder it does, too, as the feeder's warning advises."""
    pytest.importorskip("accelerate")
    for rank in results(trained, "accelerate"):
        assert len(rank["batches"]) == 3 + 4
        assert rank["rates"][-1] == pytest.approx(0)
        assert rank["rates"][-2] > 0
        assert numbers([rank["metrics"]]) == list(range(SAMPLES))
        assert rank["feeder rates"] == pytest.approx([0.75, 0.5, 0.25, 0])


def test_lightning_and_fabric(torchrun: TorchRun, tmp_path: Path) -> None:
    """Lightning and Fabric make `aiofeed.DataLoader` again with a sampler of their own; `predict` returns each sample
    once."""
    pytest.importorskip("lightning")
    train(torchrun, tmp_path, "lightning")
    ranks = results(tmp_path, "lightning")
    assert set(numbers(ranks[0]["batches"][:4]) + numbers(ranks[1]["batches"][:4])) == set(range(SAMPLES))
    assert sorted(numbers(ranks[0]["predictions"]) + numbers(ranks[1]["predictions"])) == list(range(SAMPLES))
    for epoch in range(EPOCHS):
        seen = [numbers(rank["fabric"][4 * epoch : 4 * epoch + 4]) for rank in ranks]
        assert set(seen[0] + seen[1]) == set(range(SAMPLES))
