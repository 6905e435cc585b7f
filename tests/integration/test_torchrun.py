"""DDP training under torchrun, killed inside an epoch and resumed with the same number of processes, fewer or more."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    TorchRun: TypeAlias = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("train_ddp.py")
SAMPLES, BATCH_SIZE, SEED = 101, 4, 3
"""The same values as in train_ddp.py."""

SAVED_STEP = 5
"""The step of the last checkpoint before the kill. An epoch of two ranks has 13 steps."""

Sample: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """The records of a training.

    Args:
        ranks: for each rank and each of its steps, the epoch and the batch.
        checkpoint: the last checkpoint.
    """

    ranks: list[list[tuple[int, list[Sample]]]]
    checkpoint: dict[str, Any]

    def samples(self, epoch: int, steps: int | None = None) -> Counter[Sample]:
        """Count the samples of an epoch over all ranks, in their first ``steps`` steps."""
        return Counter(sample for rank in self.ranks for of, batch in rank[:steps] if of == epoch for sample in batch)


def read_run(folder: Path) -> Run:
    ranks = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ranks.append([(epoch, [tuple(sample) for sample in batch]) for _, epoch, batch in lines])
    return Run(ranks, torch.load(folder / "last.pt", weights_only=True))


def train(torchrun: TorchRun, folder: Path, workers: int) -> Run:
    """Train to the end, from the checkpoint in ``folder`` if it exists."""
    folder.mkdir(exist_ok=True)
    process = torchrun(workers, SCRIPT, folder / "last.pt", folder)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return read_run(folder)


@pytest.fixture(scope="module")
def killed(torchrun: TorchRun, kill: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A training of two ranks, killed after both received a batch that the last checkpoint does not count."""
    folder = tmp_path_factory.mktemp("killed")
    process = torchrun(2, SCRIPT, folder / "last.pt", folder, "--hold-at", SAVED_STEP + 1)
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.strip() == "held":
            break
    else:
        pytest.fail("the training ended before it was killed:\n" + "".join(printed))
    kill(process)
    run = read_run(folder)
    assert run.checkpoint["step"] == SAVED_STEP
    assert all(len(rank) > SAVED_STEP for rank in run.ranks)
    return folder, run


@pytest.fixture(scope="module")
def whole(torchrun: TorchRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training without interruption."""
    return train(torchrun, tmp_path_factory.mktemp("whole"), 2)


def resume(torchrun: TorchRun, killed: tuple[Path, Run], folder: Path, workers: int) -> Run:
    shutil.copy(killed[0] / "last.pt", folder)
    return train(torchrun, folder, workers)


def sharded(rank: int, workers: int, epoch: int) -> list[int]:
    """Return a rank's indices of an epoch from torch's sampler."""
    sampler = DistributedSampler(range(SAMPLES), num_replicas=workers, rank=rank, shuffle=True, seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_uninterrupted_training_follows_distributed_sampler(whole: Run) -> None:
    """Under torchrun, without a `shard` argument, each rank receives the samples of `DistributedSampler`."""
    for rank, steps in enumerate(whole.ranks):
        for epoch in range(2):
            indices = [int(index) for of, batch in steps if of == epoch for index, _ in batch]
            assert indices == sharded(rank, 2, epoch)


def test_resume_with_as_many_processes(
    torchrun: TorchRun, killed: tuple[Path, Run], whole: Run, tmp_path: Path
) -> None:
    """The batches before and after the checkpoint equal those of the uninterrupted training, rank by rank and bit for
    bit, and so do the final weights."""
    resumed = resume(torchrun, killed, tmp_path, 2)
    for before, after, expected in zip(killed[1].ranks, resumed.ranks, whole.ranks, strict=True):
        assert before[:SAVED_STEP] + after == expected
    assert torch.equal(resumed.checkpoint["model"]["weight"], whole.checkpoint["model"]["weight"])


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_resume_with_other_processes(
    torchrun: TorchRun, killed: tuple[Path, Run], whole: Run, tmp_path: Path, workers: int
) -> None:
    """Over all ranks, each sample of the epoch is delivered once, before or after the checkpoint, with its random
    numbers of the uninterrupted training; only padding repeats the epoch's first samples. The next epoch equals that
    of a new training with the new number of processes."""
    resumed = resume(torchrun, killed, tmp_path, workers)
    seen = killed[1].samples(epoch=0, steps=SAVED_STEP) + resumed.samples(epoch=0)
    order = sharded(0, 1, epoch=0)
    padding = -(SAMPLES - SAVED_STEP * BATCH_SIZE * 2) % workers
    assert Counter(int(index) for index, _ in seen.elements()) == Counter(order + order[:padding])
    # The last sample of the last rank is padding of the uninterrupted training: 101 samples on two ranks.
    assert not whole.samples(epoch=0) - Counter([whole.ranks[1][12][1][-1]]) - seen
    for rank, steps in enumerate(resumed.ranks):
        assert [int(index) for of, batch in steps if of == 1 for index, _ in batch] == sharded(rank, workers, 1)
