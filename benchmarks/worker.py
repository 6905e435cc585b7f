"""A contender's process. It imports, then sets up and measures on requests from stdin, and answers in lines of JSON."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import psutil

Measure = Callable[[], Mapping[str, float]]
"""Does the work once; returns measurements in addition to ``wall_s`` and ``cpu_s``, which the worker measures."""


def main() -> None:
    task = json.loads(sys.argv[1])
    # Redirect prints to stderr; stdout is for answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            work(task, answers)
        except Exception:  # noqa: BLE001 - the harness raises it
            answer(answers, {"error": traceback.format_exc()})


def work(task: dict[str, Any], answers: TextIO) -> None:
    for name in task["imports"]:
        resolve(name)
    function = resolve(task["function"])
    answer(answers, {})
    if not sys.stdin.readline():
        return
    with function(**task["options"]) as measure:
        answer(answers, {})
        while sys.stdin.readline():
            answer(answers, measured(measure))


def measured(measure: Measure) -> dict[str, float]:
    """Measure; adds ``wall_s`` and ``cpu_s`` (of the process tree) unless ``measure`` returns its own."""
    gc.collect()
    cpu_s = tree_cpu_s()
    started = time.perf_counter()
    sample = measure()
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "cpu_s": tree_cpu_s() - cpu_s, **sample}


def resolve(name: str) -> Any:
    """Import "module" or "module:attribute"."""
    module, _, attributes = name.partition(":")
    return reduce(getattr, attributes.split(".") if attributes else (), import_module(module))


def answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def tree_cpu_s() -> float:
    """User and system time of this process and its descendants, including those that have ended."""
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(map(_cpu_s, psutil.Process().children(recursive=True)))
    return time.process_time() + waited_for.ru_utime + waited_for.ru_stime + living


def _cpu_s(process: psutil.Process) -> float:
    try:
        if sys.platform == "linux":
            # The clock id of another process, see clock_getcpuclockid(3): in nanoseconds; /proc has hundredths.
            return time.clock_gettime((~process.pid << 3) | 2)
        times = process.cpu_times()
        return times.user + times.system
    except (psutil.NoSuchProcess, OSError):
        return 0.0


def tree_memory(pid: int) -> int:
    """Memory in bytes of a process and its descendants; RSS if the system does not report parts.

    A page without a file that n processes share counts 1/n in each. Mapped files are those of the process with the most
    of them: the others map the same ones, and their PSS rises whenever another program that maps them ends.
    """
    try:
        root = psutil.Process(pid)
        parts = [_memory(process) for process in (root, *root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(unmapped for unmapped, _ in parts) + max(mapped for _, mapped in parts)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Memory without mapped files, and mapped files."""
    try:
        sizes = _sizes(f"/proc/{process.pid}/smaps_rollup") | _sizes(f"/proc/{process.pid}/status")
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"], sizes["RssFile"]
    except (OSError, KeyError):
        pass  # another system, an older kernel, or the process has just ended
    try:
        return int(process.memory_info().rss), 0
    except psutil.Error:
        return 0, 0


def _sizes(path: str) -> dict[str, int]:
    """The lines of a file in /proc that are in kB, in bytes."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}


if __name__ == "__main__":
    main()
