"""Fixtures for the tests with other projects: a feeder with distinguishable samples, and torchrun processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed

from aiofeed import Feeder

SAMPLES = 26
BATCH_SIZE = 4
BATCHES = 7
"""Batches per epoch; the last one has two samples."""


class Numbers:
    """A source of n samples; sample i is i as text."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        return b"%d" % index


def leave_group() -> NoReturn:
    """End the process of a rank without the interpreter's clean-up.

    Torch 2.13 keeps gloo's threads after `destroy_process_group` if there was a `DistributedDataParallel`; at the exit
    of a process they seldom abort it ("terminate called without an active exception").
    """
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def augment(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
    """Return the number and a random number of the sample's generator, as an augmentation draws it: float32 [2]."""
    return torch.cat([torch.tensor([float(data)]), torch.rand(1, generator=rng)])


@pytest.fixture
def make_feeder() -> Iterator[Callable[..., Feeder[torch.Tensor]]]:
    """`make_feeder(**options)` makes a shuffled feeder over 26 samples, 4 per batch; it is closed after the test."""
    with contextlib.ExitStack() as feeders:

        def make(samples: int = SAMPLES, **options: Any) -> Feeder[torch.Tensor]:
            arguments = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, **options}
            return feeders.enter_context(Feeder(Numbers(samples), decode=augment, **arguments))

        yield make


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`torchrun(workers, script, *arguments)` starts processes with a readable output; they end with the module.

    `launch` has the options of torchrun: default, one node.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    environment = {
        # Workers that each use all cores slow each other down.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Torch 2.13 gives the ranks the address of a store whose node has ended, if that node had rank 0.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    started = []

    def start(
        workers: int, script: Path, *arguments: object, launch: Sequence[str] = ("--standalone",)
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, *launch, f"--nproc-per-node={workers}", str(script), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill_tree(process)


@pytest.fixture(scope="module")
def kill() -> Callable[[subprocess.Popen[str]], None]:
    """`kill(process)` kills a process and its descendants and waits for their end."""
    return kill_tree


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants. torchrun gives each worker its own process group."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        parent.suspend()  # It must not start further processes.
        tree = [*parent.children(recursive=True), parent]
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(tree[:-1], timeout=10)
    process.wait(timeout=10)
    if process.stdout is not None:
        process.stdout.close()
