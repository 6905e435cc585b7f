"""Sources and decoders for actors, and what the tests do to actors and nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.support.paths import ROOT
from tests.support.process_parts import Numbers, append_line

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKS = [
    pytest.mark.integration,
    pytest.mark.slow,  # a cluster takes 10 to 20 s to start
    # Ray leaves files and sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
STORE = {"object_store_memory": 100_000_000}


@contextlib.contextmanager
def local_cluster(nodes: int) -> Iterator[Any]:
    """A Ray cluster on this machine; each node has a CPU, and a resource "node 0", "node 1", ...

    This process is on the first node, and processes that it starts find the cluster.
    """
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        head = {"num_cpus": 1, "include_dashboard": False, "resources": {"node 0": 9}, **STORE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", cluster.address)
        try:
            for number in range(1, nodes):
                cluster.add_node(num_cpus=1, resources={f"node {number}": 9}, **STORE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


class Unloadable(Numbers):
    """Cannot be unpickled in another process."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(pid: int) -> Any:
    if os.getpid() == pid:
        return Unloadable(4)
    raise ImportError("no module named 'secret'")


class Late:
    """Decodes numbers; the first process that gets a certain number waits until a file exists."""

    def __init__(self, number: int, path: str) -> None:
        self.number, self.path = number, path

    def __call__(self, data: bytes) -> Any:
        if int(data) == self.number:
            try:
                os.close(os.open(f"{self.path}.first", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                while not os.path.exists(self.path):
                    time.sleep(0.01)
        return np.array(int(data))


class Logged:
    """Decodes numbers in a millisecond; logs each with the process."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, data: bytes) -> Any:
        time.sleep(0.001)
        append_line(self.path, f"{os.getpid()} {int(data)}")
        return np.full(2048, int(data))


def kills_at_nine(data: bytes) -> Any:
    """Kills its process at number 9."""
    if int(data) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.array(int(data))


def in_ten_ms(data: bytes) -> Any:
    """Decode a number in 10 ms."""
    time.sleep(0.01)
    return np.array(int(data))


def slow_first_block(batch: dict[str, Any]) -> dict[str, Any]:
    """Double the numbers of a block of Ray Data; the first block takes longer than the others."""
    if batch["id"][0] == 0:
        time.sleep(0.3)
    return {"x": batch["id"] * 2}


def fails_at_sixty(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails for the block of Ray Data that has 60."""
    if 60 in batch["x"]:
        raise ValueError("sixty")
    return batch


def number_of(row: dict[str, Any]) -> int:
    """The number of a row of Ray Data."""
    return int(row["x"])


def with_random_number(row: dict[str, Any], *, rng: torch.Generator) -> torch.Tensor:
    """The number of a row of Ray Data, and a random number of its sample's generator: float32 [2]."""
    return torch.cat([torch.tensor([float(row["x"])]), torch.rand(1, generator=rng)])


def actors(feeder: Any) -> list[Any]:
    """The handles of a feeder's actors that are ready."""
    return [each for each in feeder._session.pipeline._pool._workers if each.ready]


def pid_of(handle: Any) -> int:
    """The process id of an actor."""
    return int(handle.name.rpartition("pid ")[2].rstrip(")"))
