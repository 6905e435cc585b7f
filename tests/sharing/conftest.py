"""What the tests of engine processes need."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

# Where the processes, too, find what is sent to them by name.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def until(condition: Callable[[], object], limit_s: float = 30.0) -> float:
    """Wait for a condition of another process, which has no event to wait for; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, "it did not come"
        time.sleep(0.002)
    return time.monotonic() - started


def children() -> list[psutil.Process]:
    """The processes of this one that run; multiprocessing's own tracker, which runs for good, is none of ours."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    running = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if each.pid != tracker and each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


@pytest.fixture(autouse=True)
def no_process_left_behind() -> object:
    """Fail a test after which an engine process still runs."""
    before = {each.pid for each in children()}
    yield
    deadline = time.monotonic() + 30.0
    while left := [each for each in children() if each.pid not in before]:
        assert time.monotonic() < deadline, f"processes still run after the test: {left}"
        time.sleep(0.01)
