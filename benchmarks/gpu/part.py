"""One benchmark in this process. ``python -m benchmarks.gpu.part TASK`` does what a ``Task`` in JSON says."""

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

SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Task:
    """What a process is to do.

    Args:
        name: of the benchmark.
        device: as the user named it.
        rounds: how often every contender has its turn.
        quick: tiny inputs.
        data: the folder of generated inputs.
        result: the file that the part is written to.
        limit_s: no round begins that would end later; what goes on a tenth longer says where it hangs.
    """

    name: str
    device: str
    rounds: int
    quick: bool
    data: str
    result: str
    limit_s: float


def main(text: str) -> int:
    """Do a task. What fails is said in its result."""
    task = Task(**json.loads(text))
    faulthandler.dump_traceback_later(1.1 * task.limit_s)
    part = run(
        task.name,
        task.device,
        rounds=task.rounds,
        quick=task.quick,
        data=Path(task.data),
        until=time.perf_counter() + task.limit_s,
        say=progress(task.name),
    )
    faulthandler.cancel_dump_traceback_later()
    Path(task.result).write_text(to_json([part]))
    return 1 if part.failed else 0


def run(
    name: str, device: Any, *, rounds: int, quick: bool, data: Path, until: float, say: Callable[[str], None]
) -> Part:
    """The part, failed or not."""
    began = time.perf_counter()
    title, machine, notes = name, "", list[str]()
    figures: tuple[Any, ...] = ()
    failed = ""
    real = not quick
    try:
        from benchmarks.gpu.hardware import conditions
        from benchmarks.gpu.setup import Setup

        setup = Setup(device, rounds, quick, data, say, notes.append, until)
        setup.backend.enter_thread()
        real = real and setup.on_cuda
        machine = conditions(setup.backend, rounds)
        module = import_module(f"benchmarks.gpu.{name}")
        title = module.TITLE
        figures = tuple(module.run(setup))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and the others have their turn
        traceback.print_exc()
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Part(name, title, figures, tuple(notes), failed, machine, time.perf_counter() - began, real)


def progress(name: str) -> Callable[[str], None]:
    """What says what goes on: over one line of a terminal; elsewhere in lines, one every few seconds at most."""
    began = time.perf_counter()
    last = -SAY_EVERY_S

    def say(line: str) -> None:
        nonlocal last
        now = time.perf_counter() - began
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}: {line}", end="", file=sys.stderr, flush=True)
        elif now - last >= SAY_EVERY_S:
            print(f"  {name}, {now:.0f} s: {line}", file=sys.stderr, flush=True)
            last = now

    return say


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    # The result is written: a worker or a driver that does not let go at the interpreter's exit holds up nobody.
    os._exit(code)
