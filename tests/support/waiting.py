"""Waiting for other processes, and listing them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest


def until(condition: Callable[[], object], limit_s: float = 30.0) -> float:
    """Wait for a condition of another process or thread that gives no event; returns the seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"the condition did not hold within {limit_s:g} s"
        time.sleep(0.002)
    return time.monotonic() - started


def children() -> list[psutil.Process]:
    """The running child processes, without multiprocessing's resource tracker and fork server."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    running = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            if each.pid not in (tracker, server) and each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


@pytest.fixture(autouse=True)
def no_worker_left_running() -> object:
    """Fail a test after which a worker process still runs."""
    before = {each.pid for each in children()}
    yield
    deadline = time.monotonic() + 30.0
    while left := [each for each in children() if each.pid not in before]:
        assert time.monotonic() < deadline, f"processes still run after the test: {left}"
        time.sleep(0.01)
