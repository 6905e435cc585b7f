"""Runs each benchmark in its own process with a share of the time; ends a process that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.part import Task
from benchmarks.gpu.results import Part, from_json

PROJECT = Path(__file__).resolve().parent.parent.parent

LEAST_S = 15.0
"""A part that would get less time is left out."""
RESERVE = 0.25
"""Share of a part's time for the end of its last round; a part that runs longer than its time hangs."""

Run = Callable[[Task, float], Part]


def run_all(
    names: Sequence[str],
    new_task: Callable[[str, float, str], Task],
    limit_s: float,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Part]:
    """Run the benchmarks; yields each part when it ends.

    Args:
        names: names of the benchmarks.
        new_task: creates the task of a name, with the seconds within which all rounds should end, and the result's
            file.
        limit_s: time limit of all parts together.
        run: runs a task within a number of seconds.
        clock: time in seconds.
    """
    run = run or run_in_process
    ends = clock() + limit_s
    with tempfile.TemporaryDirectory(prefix="aiofeed-benchmarks-gpu-") as folder:
        for number, name in enumerate(names):
            part_s = share(ends - clock(), len(names) - number)
            if part_s < LEAST_S:
                yield Part(name, title_of(name), failed=f"left out: the {limit_s:.0f} s of all parts are over")
                continue
            yield run(new_task(name, part_s * (1 - RESERVE), str(Path(folder) / f"{name}.json")), part_s)


def share(left_s: float, parts: int) -> float:
    """Time of the next of ``parts`` parts: twice an equal share, since most need less; the last part gets the rest."""
    return min(left_s, 2 * left_s / (parts + 1))


def run_in_process(task: Task, limit_s: float) -> Part:
    """Run a task in a new process; after ``limit_s`` that process and all its children are killed."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.part", json.dumps(asdict(task))], cwd=PROJECT, process_group=0
    )
    reason = ""
    try:
        code = process.wait(limit_s)
        reason = f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {limit_s:.0f} s"
    finally:
        end(process)
    try:
        [part] = from_json(Path(task.result).read_text())
    except (OSError, ValueError):  # no result, or an incomplete one
        duration_s = time.monotonic() - started
        return Part(task.name, title_of(task.name), failed=reason, duration_s=duration_s, real=not task.quick)
    return part


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process's group, since leftover workers would keep the device's memory."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def title_of(name: str) -> str:
    """A benchmark's title, or its name if its module cannot be imported."""
    try:
        title: str = import_module(f"benchmarks.gpu.{name}").TITLE
    except Exception:  # noqa: BLE001 - the part reports the same error
        return name
    return title
