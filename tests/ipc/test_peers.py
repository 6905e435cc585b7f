"""Whether another process runs, also while its connection is held open by a third."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

import pytest

from aiofeed.ipc import peers
from aiofeed.ipc.peers import ProcessMonitor, describe_exit, is_exiting
from tests.support.waiting import until


@pytest.fixture(params=["pidfd", "polling"])
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's pidfd, if it has one, and without."""
    if request.param == "polling":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.setattr(peers, "POLL_S", 0.01)


def cat() -> subprocess.Popen[bytes]:
    """A process that runs until it is killed."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


async def test_a_monitor_calls_back_once_when_the_process_ends(mechanism: None) -> None:
    """Not before; and it reports the process as dead from then on."""
    calls: list[float] = []
    ended = asyncio.Event()
    with cat() as process:
        monitor = ProcessMonitor(process.pid)
        monitor.call_at_end(lambda: (calls.append(time.monotonic()), ended.set()))
        assert monitor.alive()
        killed = time.monotonic()
        process.kill()
        process.wait()
        await ended.wait()
    assert [each >= killed for each in calls] == [True]
    assert not monitor.alive()
    monitor.close()
    monitor.close()


async def test_a_closed_monitor_does_not_call_back(mechanism: None) -> None:
    """Also if the process has ended in the meantime."""
    calls: list[None] = []
    with cat() as process:
        monitor = ProcessMonitor(process.pid)
        monitor.call_at_end(lambda: calls.append(None))
        process.kill()
        process.wait()
        monitor.close()
    with cat() as process:
        other, ended = ProcessMonitor(process.pid), asyncio.Event()
        other.call_at_end(ended.set)
        process.kill()
        process.wait()
        await ended.wait()
        other.close()
    assert calls == []


async def test_a_process_that_has_ended_before_is_reported(mechanism: None) -> None:
    """The process id is free, or still belongs to a zombie."""
    with cat() as process:
        process.kill()
    monitor, ended = ProcessMonitor(process.pid), asyncio.Event()
    monitor.call_at_end(ended.set)
    await ended.wait()
    assert not monitor.alive()
    monitor.close()


def test_unknown_processes_and_this_one_count_as_running() -> None:
    """Process id 0 is what the kernel reports for a process of another container."""
    for pid in (0, os.getpid()):
        monitor = ProcessMonitor(pid)
        assert monitor.alive()
        monitor.close()


def test_a_process_that_has_begun_to_exit_counts_as_dead() -> None:
    """It closes its devices before it has ended; signal 0 still reaches a process that has not been reaped."""
    assert not is_exiting(os.getpid())
    with cat() as process:
        assert not is_exiting(process.pid)
        process.kill()
        until(lambda: is_exiting(process.pid))
        monitor = ProcessMonitor(process.pid)
        assert not monitor.alive()
        monitor.close()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "ended; its exit status is unknown, because SIGCHLD is ignored or other code has reaped it"),
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL (exit status -9); the machine or its container may have run out of memory"),
        (
            -11,
            "was killed by SIGSEGV (exit status -11); native code of the dataset or source, the decoder or collate_fn "
            "crashed",
        ),
        (-15, "was killed by SIGTERM (exit status -15)"),
        (-40, "was killed by signal 40 (exit status -40)"),
    ],
)
def test_an_exit_status_is_described(status: int | None, text: str) -> None:
    """Signals by name, also those that Python has no name for, with the likely cause."""
    assert describe_exit(status) == text
