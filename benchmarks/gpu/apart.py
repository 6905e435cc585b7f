"""Benchmarks in processes of their own, each with a share of the time: one that hangs is ended, and the next begins."""

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
"""A part that would have less is left out."""
RESERVE = 0.25
"""Of a part's time, kept for the end of its last round: what still runs when it is over hangs."""

Run = Callable[[Task, float], Part]


def each(
    names: Sequence[str],
    task_of: Callable[[str, float, str], Task],
    limit_s: float,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Part]:
    """The parts, as they come.

    Args:
        names: of the benchmarks.
        task_of: makes the task of a name, of the seconds after which no round should end, and of the result's file.
        limit_s: of all together.
        run: runs a task in at most so many seconds.
        clock: seconds.
    """
    run = run or apart
    ends = clock() + limit_s
    with tempfile.TemporaryDirectory(prefix="aiofeed-benchmarks-gpu-") as folder:
        for number, name in enumerate(names):
            part_s = share(ends - clock(), len(names) - number)
            if part_s < LEAST_S:
                yield Part(name, title_of(name), failed=f"left out: the {limit_s:.0f} s of all parts were up")
                continue
            yield run(task_of(name, part_s * (1 - RESERVE), str(Path(folder) / f"{name}.json")), part_s)


def share(left_s: float, parts: int) -> float:
    """What the next of so many parts may take: twice its share, since most need less; the last, all that is left."""
    return min(left_s, 2 * left_s / (parts + 1))


def apart(task: Task, limit_s: float) -> Part:
    """Do a task in a process of its own, which is ended with all that it started when its time is up."""
    began = time.monotonic()
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
    except (OSError, ValueError):  # nothing, or the half of it
        return Part(task.name, title_of(task.name), failed=reason, took_s=time.monotonic() - began, real=not task.quick)
    return part


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process's group: workers that it leaves behind keep the device's memory."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def title_of(name: str) -> str:
    """A benchmark's title; its name where its module cannot even be imported."""
    try:
        title: str = import_module(f"benchmarks.gpu.{name}").TITLE
    except Exception:  # noqa: BLE001 - whatever is missing is what the part failed of
        return name
    return title
