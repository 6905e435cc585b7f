"""Cores and memory of the cgroups of this process, and whether Python has a GIL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aiofeed.runtime import machine
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


EPOCH = """
import sys
import aiofeed
images = aiofeed.ImageFolder(sys.argv[1])
with aiofeed.Feeder(images, decode=aiofeed.DecodeImage(32), batch_size=4, cache="host") as feeder:
    for _ in feeder.epochs(2):
        for pixels, labels in feeder:
            assert pixels.shape[1:] == (3, 32, 32)
from aiofeed.runtime import machine
print(machine.has_gil())
"""


def test_the_gil_stays_off(jpeg_folder: Path) -> None:
    """Importing aiofeed and two epochs of images do not turn on the GIL of a free-threaded build."""
    run = subprocess.run(
        [sys.executable, "-c", EPOCH, str(jpeg_folder)], capture_output=True, text=True, env=environment(), timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(not machine.FREE_THREADED)]
    assert "global interpreter lock" not in run.stderr
