"""What the tests of other projects' loops share: a feed whose every sample can be told apart, and child processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from aiofeed import Feeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SAMPLES = 26
BATCH_SIZE = 4
BATCHES = 7
"""Per epoch, the last of two samples."""


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


def augment(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
    """The number, and a draw of the sample's own generator, as random augmentation would use it: float32 [2]."""
    return torch.cat([torch.tensor([float(data)]), torch.rand(1, generator=rng)])


@pytest.fixture
def make_feeder() -> Iterator[Callable[..., Feeder[torch.Tensor]]]:
    """`make_feeder(**options)` gives a shuffled feeder over 26 samples in fours; closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(samples: int = SAMPLES, **options: Any) -> Feeder[torch.Tensor]:
            chosen = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, **options}
            return opened.enter_context(Feeder(Numbers(samples), decode=augment, **chosen))

        yield make


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`torchrun(workers, script, *arguments)`: running processes whose output can be read; none outlives the module."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    environment = {
        # Workers with as many threads each as there are cores would wait for each other more than compute.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    started = []

    def start(workers: int, script: Path, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*launch, f"--nproc-per-node={workers}", str(script), *map(str, arguments)],
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
        kill_family(process)


@pytest.fixture(scope="module")
def kill() -> Callable[[subprocess.Popen[str]], None]:
    """`kill(process)`: SIGKILL to it and to all that it started, and wait for them."""
    return kill_family


def kill_family(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process and all that it started. torchrun puts its workers into process groups of their own."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        parent.suspend()  # So that it starts nothing meanwhile.
        family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family[:-1], timeout=10)
    process.wait(timeout=10)
    if process.stdout is not None:
        process.stdout.close()
