"""Runs each benchmark in its own process with a share of the time; ends a process that hangs.

The process runs ``python -m benchmarks.gpu.runner NAME SETUP RESULT``, with the arguments of ``Setup`` in JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Part, from_json, to_json
from benchmarks.harness import PROJECT

LEAST_S = 15.0
"""A part that would get less time is left out."""
RESERVE = 0.25
"""Share of a part's time for the end of its last round; a part that runs longer than its time hangs."""

Run = Callable[[str, Mapping[str, Any], float], Part]


def run_all(
    names: Sequence[str],
    arguments: Mapping[str, Any],
    limit_s: float,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Part]:
    """Run the benchmarks within ``limit_s``; yields each part when it ends.

    ``arguments`` are those of ``Setup``, plain values; ``limit_s``, within which all rounds should end, is added.
    ``run`` runs a benchmark with such arguments within a number of seconds.
    """
    run = run or run_in_process
    ends = clock() + limit_s
    for number, name in enumerate(names):
        part_s = share(ends - clock(), len(names) - number)
        if part_s < LEAST_S:
            yield Part(name, title_of(name), failed=f"left out: the {limit_s:.0f} s of all parts are over")
        else:
            yield run(name, {**arguments, "limit_s": part_s * (1 - RESERVE)}, part_s)


def share(left_s: float, parts: int) -> float:
    """Time of the next of ``parts`` parts: twice an equal share, since most need less; the last part gets the rest."""
    return min(left_s, 2 * left_s / (parts + 1))


def run_in_process(name: str, arguments: Mapping[str, Any], limit_s: float) -> Part:
    """Run a benchmark in a new process; after ``limit_s`` that process and all its children are killed."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="aiofeed-benchmarks-gpu-") as result:
        task = [name, json.dumps(arguments), result.name]
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.runner", *task], cwd=PROJECT, process_group=0)
        try:
            failed = f"its process ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            failed = f"it did not end within {limit_s:.0f} s"
        finally:
            end(process)
        try:
            [part] = from_json(Path(result.name).read_text())
        except ValueError:  # no result, or an incomplete one
            duration_s = time.monotonic() - started
            return Part(name, title_of(name), failed=failed, duration_s=duration_s, real=not arguments["quick"])
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


def run_here(name: str, arguments: Mapping[str, Any]) -> Part:
    """Run a benchmark in this process; returns its part, failed or not."""
    started = time.perf_counter()
    figures: tuple[Any, ...] = ()
    notes: list[str] = []
    machine = failed = ""
    real = not arguments["quick"]
    try:
        from benchmarks.gpu.setup import Setup

        setup = Setup(**arguments, notes=notes)
        setup.backend.enter_thread()
        real = real and setup.on_cuda
        machine = setup.conditions()
        figures = tuple(import_module(f"benchmarks.gpu.{name}").run(setup))
    except Exception as error:  # noqa: BLE001 - reported in the part; the other parts run
        traceback.print_exc()
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    duration_s = time.perf_counter() - started
    return Part(name, title_of(name), figures, tuple(notes), failed, machine, duration_s, real)


def main(name: str, setup: str, result: str) -> int:
    """Run a benchmark and write its result; prints the tracebacks of all threads if it runs for too long."""
    arguments = json.loads(setup)
    faulthandler.dump_traceback_later(1.1 * arguments["limit_s"])
    part = run_here(name, arguments)
    faulthandler.cancel_dump_traceback_later()
    Path(result).write_text(to_json([part]))
    return 1 if part.failed else 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    # The result is written. Skip the interpreter's exit, in which a worker or a driver may hang.
    os._exit(code)
