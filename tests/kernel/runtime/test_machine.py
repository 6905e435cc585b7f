"""Cores and memory of the cgroups of this process, its part of them among ranks, and whether Python has a GIL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiofeed.kernel.runtime import machine
from tests.support.paths import environment

MIB = 1 << 20


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /sys/fs/cgroup, of a machine with 64 GiB free; ``own`` is this process's list of groups."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 64 << 30)
    monkeypatch.setattr(machine, "affinity", lambda: 16)
    return tmp_path


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_limit_the_machine_counts(cgroups: Path) -> None:
    write(cgroups, memory__max="max", memory__current=5 * MIB, cpu__max="max 100000")
    assert machine.free_memory() == 64 << 30
    assert machine.memory_limit() is None
    assert machine.cpus() == 16


def test_the_group_of_a_container(cgroups: Path) -> None:
    """The root's limit counts; page cache that the kernel reclaims is free."""
    write(cgroups, memory__max=900 * MIB, memory__current=500 * MIB, cpu__max="150000 100000")
    write(cgroups, memory__stat=f"anon 1\ninactive_file {100 * MIB}")
    assert machine.free_memory() == 500 * MIB
    assert machine.memory_limit() == 900 * MIB
    assert machine.cpus() == 2


@pytest.mark.parametrize("limited", ["job_7/step_0", "job_7"])
def test_nested_groups_as_slurm_makes_them(cgroups: Path, limited: str) -> None:
    """The lowest limit counts, of the process's own group or of one above it."""
    (cgroups / "own").write_text("0::/job_7/step_0\n")
    for group in ("job_7", "job_7/step_0"):
        write(cgroups / group, memory__max="max", memory__current=100 * MIB, cpu__max="max 100000")
    write(cgroups / limited, memory__max=900 * MIB, cpu__max="400000 100000")
    assert machine.free_memory() == 800 * MIB
    assert machine.memory_limit() == 900 * MIB
    assert machine.cpus() == 4


def test_version_1(cgroups: Path) -> None:
    """Version 1 has a folder per controller, and a huge number in place of no limit."""
    (cgroups / "own").write_text("5:cpu,cpuacct:/slurm/job\n4:memory:/slurm/job\n1:name=systemd:/x\n")
    usage = {"memory__usage_in_bytes": 100 * MIB}
    write(cgroups / "memory", memory__limit_in_bytes=9223372036854771712, **usage)
    write(cgroups / "memory/slurm/job", memory__limit_in_bytes=900 * MIB, **usage)
    write(cgroups / "memory/slurm/job", memory__stat=f"inactive_file 1\ntotal_inactive_file {50 * MIB}")
    write(cgroups / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    write(cgroups / "cpu/slurm/job", cpu__cfs_quota_us=300_000, cpu__cfs_period_us=100_000)
    assert machine.free_memory() == 850 * MIB
    assert machine.memory_limit() == 900 * MIB
    assert machine.cpus() == 3


def test_a_path_of_the_host_that_a_container_does_not_see(cgroups: Path) -> None:
    """The groups that exist count."""
    (cgroups / "own").write_text("0::/../../docker/abc\n")
    write(cgroups, memory__max=900 * MIB, memory__current=0)
    assert machine.free_memory() == 900 * MIB


# --- ranks ------------------------------------------------------------------------------------------------------------

LAUNCHER, SCRIPT = 40, 50


class Machine:
    """A launcher with 128 cores, maybe a script that it has started, and this process, one of 8 ranks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.cores = {0: 128, LAUNCHER: 128, SCRIPT: 128}
        monkeypatch.setattr(machine, "_PROCESSES", folder)
        monkeypatch.setattr(os, "sched_getaffinity", self.affinity, raising=False)
        monkeypatch.setattr(machine, "affinity", lambda: self.cores[0])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        (folder / "own").write_text("0::/job\n")
        self.start(LAUNCHER, parent=1)

    def affinity(self, process: int) -> set[int]:
        return set(range(self.cores[process]))

    def start(self, process: int, parent: int, environ: str = "A=1", group: str = "/job") -> None:
        """Make a process, the parent of the next one or of this process."""
        write(self.folder / str(process), status=f"Name:\tx\nPPid:\t{parent}", environ=environ, cgroup=f"0::{group}")
        self.monkeypatch.setattr(os, "getppid", lambda: process)


@pytest.fixture
def ranks(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of 8 ranks, which share 64 GiB."""
    return Machine(cgroups, monkeypatch)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LOCAL_WORLD_SIZE", "8"),
        ("LOCAL_SIZE", "8"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
        ("MPI_LOCALNRANKS", " 8 "),
        ("SLURM_STEP_TASKS_PER_NODE", "8"),
        ("SLURM_STEP_TASKS_PER_NODE", "8(x2)"),
        ("SLURM_STEP_TASKS_PER_NODE", "8,4"),
    ],
)
def test_ranks_divide_what_they_share(
    ranks: Machine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Each has an eighth; the process itself has everything."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv(variable, value)
    assert (machine.rank_cpus(), machine.rank_memory()) == (16, 8 << 30)
    assert (machine.cpus(), machine.free_memory()) == (128, 64 << 30)


def test_torchrun_that_srun_has_started(ranks: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of torchrun count, although srun has started one task; its variable is that of the launcher, too."""
    ranks.start(LAUNCHER, parent=1, environ="SLURM_STEP_TASKS_PER_NODE=1")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    assert machine.rank_cpus() == 16


@pytest.mark.parametrize("text", ["", "abc", "0", "-1", "1.5", "8 ranks", "(8)", "\u00b2", "1"])
def test_a_number_of_ranks_that_is_none_is_one(ranks: Machine, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert (machine.rank_cpus(), machine.rank_memory()) == (128, 64 << 30)


def test_more_ranks_than_cores(ranks: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a core."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert machine.rank_cpus() == 1


@pytest.mark.parametrize(
    ("cores", "share"),
    [(16, 16), (12, 12), (64, 16)],
    ids=["cores of its own", "fewer than its part", "a NUMA node for four ranks"],
)
@pytest.mark.parametrize("script", [False, True])
def test_a_launcher_that_pins_ranks(ranks: Machine, cores: int, share: int, script: bool) -> None:
    """A rank has the cores that it is pinned to, up to its part; also if a script pins it. Memory is divided."""
    if script:  # which the launcher gives the variable, and which is pinned already
        ranks.start(SCRIPT, parent=LAUNCHER, environ="A=1\0LOCAL_WORLD_SIZE=8\0")
        ranks.cores[SCRIPT] = cores
    ranks.cores[0] = cores
    assert (machine.rank_cpus(), machine.rank_memory()) == (share, 8 << 30)


def test_a_container_of_all_ranks(ranks: Machine) -> None:
    """The launcher has its affinity and its quota, too: they are divided, also if each process has the variable."""
    ranks.cores |= {0: 32, LAUNCHER: 32}
    assert machine.rank_cpus() == 4
    write(ranks.folder, cpu__max="1600000 100000", memory__max=32 << 30, memory__current=0)
    assert (machine.rank_cpus(), machine.rank_memory()) == (2, 4 << 30)
    ranks.start(1, parent=0, environ="LOCAL_WORLD_SIZE=8")
    ranks.cores[1] = 32
    assert (machine.rank_cpus(), machine.rank_memory()) == (2, 4 << 30)
    ranks.cores[0] = 2  # pinned by the container's first process
    assert (machine.rank_cpus(), machine.rank_memory()) == (2, 4 << 30)


@pytest.mark.parametrize(("cores", "gib", "share"), [(16, 8, (16, 8)), (10, 2, (10, 2)), (64, 30, (16, 8))])
def test_a_cgroup_for_each_rank(ranks: Machine, cores: int, gib: int, share: tuple[int, int]) -> None:
    """A rank has what its cgroup allows, up to its part of what the launcher has."""
    (ranks.folder / "own").write_text("0::/job/rank_3\n")
    write(ranks.folder / "job/rank_3", cpu__max=f"{cores}00000 100000", memory__max=gib << 30, memory__current=0)
    assert (machine.rank_cpus(), machine.rank_memory()) == (share[0], share[1] << 30)


def test_a_cgroup_of_all_ranks_below_that_of_the_launcher(ranks: Machine) -> None:
    """As of a job of SLURM: the job's limits hold for the launcher, too, and are divided."""
    write(ranks.folder / "job", cpu__max="6400000 100000", memory__max=32 << 30, memory__current=0)
    (ranks.folder / "own").write_text("0::/job/user/task_3\n")
    ranks.start(LAUNCHER, parent=1, group="/job/slurm")
    assert (machine.rank_cpus(), machine.rank_memory()) == (8, 4 << 30)


def test_a_launcher_that_cannot_be_seen(ranks: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has is divided: the launcher has ended, or the system has no affinity."""
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert machine.rank_cpus() == 16

    def ended(process: int) -> set[int]:
        raise ProcessLookupError(process)

    monkeypatch.setattr(os, "sched_getaffinity", ended)
    assert machine.rank_cpus() == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    assert (machine.rank_cpus(), machine.rank_memory()) == (16, 8 << 30)


def test_a_launcher_that_ends_while_it_is_looked_at(ranks: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has is divided."""
    ranks.cores[0] = 64
    seen: list[int] = []

    def ends(process: int) -> set[int]:
        seen.append(process)
        if seen.count(LAUNCHER) > 1:
            raise ProcessLookupError(process)
        return ranks.affinity(process)

    monkeypatch.setattr(os, "sched_getaffinity", ends)
    assert machine.rank_cpus() == 8


EPOCH = """
import sys
import aiofeed
images = aiofeed.ImageFolder(sys.argv[1])
with aiofeed.Feeder(images, decode=aiofeed.DecodeImage(32), batch_size=4, cache="host") as feeder:
    for _ in feeder.epochs(2):
        for pixels, labels in feeder:
            assert pixels.shape[1:] == (3, 32, 32)
from aiofeed.kernel.runtime import machine
print(machine.has_gil())
"""


@pytest.mark.slow
def test_the_gil_stays_off(jpeg_folder: Path) -> None:
    """Importing aiofeed and two epochs of images do not turn on the GIL of a free-threaded build."""
    run = subprocess.run(
        [sys.executable, "-c", EPOCH, str(jpeg_folder)], capture_output=True, text=True, env=environment(), timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(not machine.FREE_THREADED)]
    assert "global interpreter lock" not in run.stderr
