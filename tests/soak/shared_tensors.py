"""Worker processes killed at random moments: a few times in the tests, hundreds of times in a soak."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from aiofeed import Feeder, Limits
from aiofeed.errors import WorkerDiedError
from tests.support import process_parts as parts


def kill_at_random_moments(times: int, seed: int = 0, *, within_s: float = 15.0) -> None:
    """Kill one of two workers at a random moment and check the error in the consumer, several times.

    Args:
        times: Number of kills.
        seed: Of the random moments.
        within_s: Limit for the error to reach the consumer; the promise is one second on a machine that is not busy.
    """
    moments = random.Random(seed)
    before = descriptors()
    for _ in range(times):
        kill_once(moments.random() ** 2 * 0.8, moments.randrange(2), within_s)
    until_closed(before)


def until_closed(before: set[str]) -> None:
    """Wait until no descriptor is open that was not open before."""
    deadline = time.monotonic() + 10.0
    while left := descriptors() - before:
        assert time.monotonic() < deadline, f"left open: {left}"
        time.sleep(0.01)


def kill_once(after_s: float, which: int, within_s: float) -> float:
    """Kill one worker of a feeder; returns the seconds until the consumer has got the error."""
    others = {each.pid for each in psutil.Process().children()}
    limits = Limits(decode_threads=2, prefetch_batches=3)
    feeder = Feeder(parts.Numbers(10**7), decode=parts.slow_number, batch_size=4, engine="process:2", limits=limits)
    killed: list[float] = []

    def kill() -> None:
        found: list[psutil.Process] = []
        while len(found) < 2:
            found = [each for each in psutil.Process().children() if each.pid not in others]
            time.sleep(0.001)
        time.sleep(after_s)
        killed.append(time.monotonic())
        os.kill(found[which].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    seen = 0
    with pytest.raises(WorkerDiedError) as caught:
        for batch in feeder:
            assert batch.tolist() == list(range(4 * seen, 4 * seen + 4))
            seen += 1
    took = time.monotonic() - killed[0]
    assert took < within_s
    assert caught.value.exit_status == -signal.SIGKILL
    killer.join()
    feeder.close()
    assert {each.pid for each in psutil.Process().children()} <= others
    return took


def descriptors() -> set[str]:
    """The open memfds and sockets."""
    folder = Path("/proc/self/fd")
    found = set()
    for name in os.listdir(folder):
        try:
            found.add(f"{name} {os.readlink(folder / name)}")
        except OSError:
            continue
    return {each for each in found if "memfd" in each or "socket" in each}
