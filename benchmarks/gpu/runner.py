"""Runs each benchmark in its own process with a share of the time; keeps the results as JSON and as the page.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Figure
from benchmarks.gpu import MODULES
from benchmarks.harness import PROJECT

PAGE = "docs/benchmarks-gpu.md"


@dataclass(frozen=True)
class Part:
    """The result of one benchmark.

    Args:
        figures: empty if it failed or does not apply.
        notes: sentences to print below the figures.
        failed: the error; empty if it did not fail.
        machine: the hardware, the versions, and the number of rounds.
        real: whether it ran on a GPU with real inputs.
    """

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    failed: str = ""
    machine: str = ""
    duration_s: float = 0.0
    real: bool = True

    @property
    def result(self) -> report.Result:
        return report.Result(self.name, self.title, self.figures)


def to_json(parts: Iterable[Part]) -> str:
    return json.dumps([asdict(part) for part in parts], indent=1)


def from_json(text: str) -> list[Part]:
    """Parse the text of ``to_json``."""
    found = []
    for fields in json.loads(text):
        figures = tuple(report.figure_of(**each) for each in fields["figures"])
        found.append(Part(**{**fields, "figures": figures, "notes": tuple(fields["notes"])}))
    return found


def merged(before: Iterable[Part], later: Iterable[Part]) -> list[Part]:
    """One part per name, the last one, in the order of the modules."""
    by_name = {part.name: part for part in (*before, *later)}
    return [by_name[name] for name in MODULES if name in by_name]


def plain(part: Part) -> str:
    """A part for the terminal."""
    lines = [report.plain(part.result) if part.figures else f"{part.title}  [{part.name}]"]
    if part.failed or not part.figures:
        lines.append(f"  FAILED: {part.failed}" if part.failed else "  does not apply here")
    return "\n".join([*lines, *(f"  {note}" for note in part.notes)])


def tally(parts: Sequence[Part]) -> str:
    """The number of targets that are met, the names of those that are not, and of the parts that failed."""
    line = report.tally(part.result for part in parts)
    failed = [part.name for part in parts if part.failed]
    return line + (f"\n\nFailed: {', '.join(failed)}." if failed else "")


def markdown(parts: Sequence[Part]) -> str:
    """All parts, for the page: figures without targets. If all are of one machine, it is described once."""
    machines = {part.machine for part in parts if part.machine}
    text = [*(machines if len(machines) == 1 else ())]
    for part in parts:
        if part.figures or part.failed:
            rows = [report.row(figure)[:3] for figure in part.figures]
            text += [f"### {part.title}", part.machine if len(machines) > 1 else ""]
            text.append(report.markdown_table(report.HEADER[:3], rows) if rows else "")
            text += [f"Failed: {part.failed}" if part.failed else "", *part.notes]
    return "\n\n".join(filter(None, text))


def write(parts: Sequence[Part], project: Path) -> Path:
    """Write the parts into the page."""
    path = project / PAGE
    path.write_text(report.replace_between(path.read_text(), "results", markdown(parts)))
    return path


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
