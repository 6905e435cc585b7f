"""Episodes with other processes: a fork with a live feeder, a spawned process with a feeder. Slow, so rare."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from typing import Any

from aiofeed.errors import IteratorClosedError
from tests.soak.checks import HANG_S
from tests.soak.configurations import ViolationError
from tests.soak.episodes import Episode, whole_epoch


def fork(episode: Episode) -> None:
    """Fork with a live iterator: in the child it is closed and the feeder works; the parent's epoch continues."""
    rig = episode.rig(fixed={"latency": None})
    iterator = iter(rig.feeder)
    record = rig.start_record()
    for _ in range(episode.random.randrange(3)):
        batch = next(iterator, None)
        if batch is not None:
            record.add(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork with several threads
        child = os.fork()
    if child == 0:
        _run_child(rig, iterator)
    _, status = os.waitpid(child, 0)
    if (code := os.waitstatus_to_exitcode(status)) != 0:
        raise ViolationError(f"the child's exit code is {code}")
    for batch in iterator:
        record.add(batch)
    record.check_complete()
    episode.counts["forks"] += 1


def _run_child(rig: Any, iterator: Any) -> None:
    import signal

    signal.alarm(int(HANG_S))
    try:
        try:
            next(iterator)
        except (IteratorClosedError, StopIteration):
            pass
        else:
            os._exit(3)
        whole_epoch(rig)
        rig.feeder.close()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(4)


def _spawned(feeder: Any, results: Any) -> None:
    results.put([[int(index) for index in batch[:, 0].tolist()] for batch in feeder])
    feeder.close()


def spawn(episode: Episode) -> None:
    """A feeder passed to a spawned process delivers its epoch there."""
    rig = episode.rig(fixed={"latency": None, "width": 4, "in_order": True})
    if episode.random.random() < 0.5:
        whole_epoch(rig)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_spawned, args=(rig.feeder, results))
    process.start()
    process.join(HANG_S)
    if process.exitcode != 0:
        process.kill()
        raise ViolationError(f"the spawned process's exit code is {process.exitcode}")
    received = results.get()
    process.close()
    results.close()
    expected = rig.configuration.expected(rig.feeder.epoch + 1 if rig.feeder.state_dict()["epoch"] else 0)
    if sorted(received) != sorted(expected):
        raise ViolationError(f"the spawned process received {received}, expected {expected}")
    episode.counts["spawns"] += 1
