"""Runs one benchmark in this process: ``python -m benchmarks.gpu.part TASK``, with a ``Task`` in JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Part, to_json

PROGRESS_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Task:
    """The task of a process.

    Args:
        name: name of the benchmark.
        device: as the user specified it.
        rounds: measurements of every contender.
        quick: tiny inputs.
        data: folder of generated inputs.
        result: file to which the part is written.
        limit_s: no round starts that would end later; after a tenth more, tracebacks of all threads are printed.
    """

    name: str
    device: str
    rounds: int
    quick: bool
    data: str
    result: str
    limit_s: float


def main(text: str) -> int:
    """Run a task and write its result, with the error if it fails."""
    task = Task(**json.loads(text))
    faulthandler.dump_traceback_later(1.1 * task.limit_s)
    part = run(
        task.name,
        task.device,
        rounds=task.rounds,
        quick=task.quick,
        data=Path(task.data),
        until=time.perf_counter() + task.limit_s,
        progress=progress_printer(task.name),
    )
    faulthandler.cancel_dump_traceback_later()
    Path(task.result).write_text(to_json([part]))
    return 1 if part.failed else 0


def run(
    name: str, device: Any, *, rounds: int, quick: bool, data: Path, until: float, progress: Callable[[str], None]
) -> Part:
    """Run a benchmark; returns its part, failed or not."""
    started = time.perf_counter()
    title, machine, notes = name, "", list[str]()
    figures: tuple[Any, ...] = ()
    failed = ""
    real = not quick
    try:
        from benchmarks.gpu.hardware import conditions
        from benchmarks.gpu.setup import Setup

        setup = Setup(device, rounds, quick, data, progress, notes.append, until)
        setup.backend.enter_thread()
        real = real and setup.on_cuda
        machine = conditions(setup.backend, rounds)
        module = import_module(f"benchmarks.gpu.{name}")
        title = module.TITLE
        figures = tuple(module.run(setup))
    except Exception as error:  # noqa: BLE001 - reported in the part; the other parts run
        traceback.print_exc()
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Part(name, title, figures, tuple(notes), failed, machine, time.perf_counter() - started, real)


def progress_printer(name: str) -> Callable[[str], None]:
    """A function that shows progress: overwrites one line of a terminal, else prints a line every few seconds."""
    started = time.perf_counter()
    last = -PROGRESS_INTERVAL_S

    def show(line: str) -> None:
        nonlocal last
        now = time.perf_counter() - started
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}: {line}", end="", file=sys.stderr, flush=True)
        elif now - last >= PROGRESS_INTERVAL_S:
            print(f"  {name}, {now:.0f} s: {line}", file=sys.stderr, flush=True)
            last = now

    return show


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    # The result is written. Skip the interpreter's exit, in which a worker or a driver may hang.
    os._exit(code)
