"""DDP training, killed inside an epoch and resumed with the same number of processes, fewer or more.

Also elastic: nodes are killed and join while the training runs.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from tests.support.fork_server import Child, ForkServer
from tests.support.waiting import until

TorchRun: TypeAlias = Callable[..., subprocess.Popen[str]]

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("train_ddp.py")
SAMPLES, BATCH_SIZE, SEED = 101, 4, 3
"""The same values as in train_ddp.py."""

SAVED_STEP = 5
"""The step of the last checkpoint before the kill. An epoch of two ranks has 13 steps."""

Sample: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """The records of a training from its start, or from a checkpoint.

    Args:
        first_step: the first step, from 1.
        ranks: for each rank and each of its steps, the epoch and the batch.
        checkpoint: the last checkpoint.
    """

    first_step: int
    ranks: list[list[tuple[int, list[Sample]]]]
    checkpoint: dict[str, Any]

    def samples(self, epoch: int, steps: int | None = None) -> Counter[Sample]:
        """Count the samples of an epoch over all ranks, in their first ``steps`` steps."""
        return Counter(sample for rank in self.ranks for of, batch in rank[:steps] if of == epoch for sample in batch)


def read_runs(folder: Path) -> list[Run]:
    """Read the records of a training: a run for each launch, in order."""
    launches: dict[str, list[list[Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if lines := path.read_text(encoding="utf-8").splitlines():
            launches.setdefault(path.name.partition("-")[0], []).append([json.loads(line) for line in lines])
    runs = []
    for ranks in launches.values():
        batches = [[(epoch, [tuple(sample) for sample in batch]) for _, epoch, batch in rank] for rank in ranks]
        runs.append(Run(ranks[0][0][0], batches, load_checkpoint(folder)))
    return runs


def load_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.pt", weights_only=True)


def wait_for_hold(folder: Path, step: int, processes: int) -> Path:
    """Wait until each of ``processes`` ranks has a batch of ``step``, which the last checkpoint does not count.

    Returns the file that has the process id of rank 0, which goes on when the file is removed.
    """
    held = folder / f"held-{step}-{processes}"
    until(held.exists, limit_s=100)
    assert load_checkpoint(folder)["step"] == step - 1
    return held


@pytest.fixture(scope="module")
def whole(torchrun: TorchRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training of two ranks under torchrun, without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    process = torchrun(2, SCRIPT, folder / "last.pt", folder)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    [run] = read_runs(folder)
    return run


@pytest.fixture(scope="module")
def killed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The same training, killed after both ranks received a batch that the last checkpoint does not count."""
    folder = tmp_path_factory.mktemp("killed")
    ranks = start_ranks(fork_server, 2, folder, "--hold-at", SAVED_STEP + 1)
    wait_for_hold(folder, SAVED_STEP + 1, processes=2)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    for rank in ranks:
        rank.end()
    [run] = read_runs(folder)
    assert all(len(rank) > SAVED_STEP for rank in run.ranks)
    return folder, run


def start_ranks(fork_server: ForkServer, workers: int, folder: Path, *arguments: object) -> list[Child]:
    """Start ranks with torchrun's variables, in processes that have imported torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    variables["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    program = "import os, runpy; os.environ.update({!r}); runpy.run_path({!r}, run_name='__main__')"
    programs = [program.format({**variables, "RANK": str(rank)}, str(SCRIPT)) for rank in range(workers)]
    paths = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
    return [fork_server.start(paths + each, folder / "last.pt", folder, *arguments) for each in programs]


def resume(fork_server: ForkServer, killed: tuple[Path, Run], folder: Path, workers: int) -> Run:
    """Train to the end from the checkpoint of the killed training."""
    shutil.copy(killed[0] / "last.pt", folder)
    for rank in start_ranks(fork_server, workers, folder):
        ended = rank.end()
        assert ended.returncode == 0, ended.err
    [run] = read_runs(folder)
    return run


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
    fork_server: ForkServer, killed: tuple[Path, Run], whole: Run, tmp_path: Path
) -> None:
    """The batches before and after the checkpoint equal those of the uninterrupted training, rank by rank and bit for
    bit, and so do the final weights."""
    resumed = resume(fork_server, killed, tmp_path, 2)
    for before, after, expected in zip(killed[1].ranks, resumed.ranks, whole.ranks, strict=True):
        assert before[:SAVED_STEP] + after == expected
    assert torch.equal(resumed.checkpoint["model"]["weight"], whole.checkpoint["model"]["weight"])


@pytest.mark.parametrize("workers", [1, 3])
def test_resume_with_other_processes(
    fork_server: ForkServer, killed: tuple[Path, Run], whole: Run, tmp_path: Path, workers: int
) -> None:
    """Over all ranks, each sample of the epoch is delivered once, before or after the checkpoint, with its random
    numbers of the uninterrupted training; only padding repeats the epoch's first samples. The next epoch equals that
    of a new training with the new number of processes."""
    resumed = resume(fork_server, killed, tmp_path, workers)
    seen = killed[1].samples(epoch=0, steps=SAVED_STEP) + resumed.samples(epoch=0)
    order = sharded(0, 1, epoch=0)
    padding = -(SAMPLES - SAVED_STEP * BATCH_SIZE * 2) % workers
    assert Counter(int(index) for index, _ in seen.elements()) == Counter(order + order[:padding])
    # The last sample of the last rank is padding of the uninterrupted training: 101 samples on two ranks.
    assert not whole.samples(epoch=0) - Counter([whole.ranks[1][12][1][-1]]) - seen
    for rank, steps in enumerate(resumed.ranks):
        assert [int(index) for of, batch in steps if of == 1 for index, _ in batch] == sharded(rank, workers, 1)


@pytest.fixture(scope="module")
def rendezvous() -> torch.distributed.TCPStore:
    """The place where nodes meet; it stays when any of them leaves."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.timeout(400)
def test_nodes_leave_and_join(
    torchrun: TorchRun, kill: Callable[..., None], rendezvous: torch.distributed.TCPStore, whole: Run, tmp_path: Path
) -> None:
    """Of three nodes, that of rank 0 is killed with its worker, another one joins, and one more is killed. Each launch
    goes on after the last checkpoint, and each sample of an epoch is delivered once, with its random numbers."""
    elastic = ["--nnodes=1:3", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0,last_call_timeout=8"]
    elastic += [f"--rdzv-endpoint=127.0.0.1:{rendezvous.port}"]

    def start_node() -> subprocess.Popen[str]:
        arguments = (SCRIPT, tmp_path / "last.pt", tmp_path, "--hold-at", 6, 9, 14, 15)
        return torchrun(1, *arguments, launch=elastic)

    def node_of_rank_0(held: Path) -> subprocess.Popen[str]:
        parent = psutil.Process(int(held.read_text())).ppid()
        [node] = [node for node in nodes if node.pid == parent]
        return node

    nodes = [start_node() for _ in range(3)]
    leaving = node_of_rank_0(wait_for_hold(tmp_path, 6, processes=3))
    nodes.remove(leaving)
    kill(leaving)
    wait_for_hold(tmp_path, 6, processes=2).unlink()

    wait_for_hold(tmp_path, 9, processes=2)
    nodes.append(start_node())
    wait_for_hold(tmp_path, 9, processes=3).unlink()

    held = wait_for_hold(tmp_path, 14, processes=3)
    leaving = next(node for node in nodes if node is not node_of_rank_0(held))
    nodes.remove(leaving)
    kill(leaving)
    held.unlink()  # rank 0 saves step 14, and finds in step 15 that a rank is missing
    wait_for_hold(tmp_path, 15, processes=2).unlink()
    for node in nodes:
        output, _ = node.communicate(timeout=100)
        assert node.returncode == 0, output

    runs = read_runs(tmp_path)
    assert [(run.first_step, len(run.ranks)) for run in runs] == [(1, 3), (6, 2), (9, 3), (15, 2)]
    ends = [*(run.first_step for run in runs[1:]), load_checkpoint(tmp_path)["step"] + 1]
    for epoch in range(2):
        seen: Counter[Sample] = Counter()
        for run, end in zip(runs, ends, strict=True):
            seen += run.samples(epoch, end - run.first_step)
        padding = seen - Counter(dict.fromkeys(whole.samples(epoch), 1))
        assert seen - padding == Counter(dict.fromkeys(whole.samples(epoch), 1))
        assert [int(index) for index, _ in padding.elements()] == sharded(0, 1, epoch)[: padding.total()]
        assert padding.total() < 3
