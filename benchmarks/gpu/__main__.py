"""``python -m benchmarks.gpu [names...] [--device cuda:1] [--rounds N] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import platform
import time
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks import report
from benchmarks.__main__ import say, say_of
from benchmarks.data import default_folder
from benchmarks.gpu import MODULES
from benchmarks.gpu.setup import Setup
from benchmarks.harness import PROJECT

LEAST_ROUNDS = 5
PAGE = "docs/benchmarks-gpu.md"


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; without a GPU say so. The exit code is 0 either way."""
    given = parse(arguments)
    if given.device is None and (reason := why_not()):
        print(f"The GPU benchmarks were not run: {reason}.")
        return 0
    setup = Setup(given.device or "cuda", given.rounds, given.quick, given.data)
    found = conditions(setup)
    print(found)
    results = run(given.names or MODULES, setup)
    print("\n" + report.tally(results))
    if given.quick:
        print("These were tiny inputs (--quick): the figures mean nothing.")
    if given.write:
        print(f"wrote {write(results, found, PROJECT)}")
    return 0


def run(names: list[str] | tuple[str, ...], setup: Setup) -> list[report.Result]:
    """The results of the benchmarks named, printed as they come; those that do not apply are left out."""
    results = []
    for name in names:
        started = time.perf_counter()
        module = import_module(f"benchmarks.gpu.{name}")
        own = Setup(setup.device, setup.rounds, setup.quick, setup.data, partial(say_of, name))
        if figures := module.run(own):
            results.append(report.Result(name, module.TITLE, figures))
            print("\n" + report.plain(results[-1]), flush=True)
        else:
            print(f"\n{module.TITLE}  [{name}]\n  does not apply here", flush=True)
        say(f"{name}: {time.perf_counter() - started:.0f} s\n")
    return results


def why_not() -> str:
    """Why there is no CUDA device; empty where there is one."""
    import torch

    from aiofeed.absent import why_none

    return "" if torch.cuda.is_available() else why_none()


def conditions(setup: Setup) -> str:
    """The machine with its accelerator, the versions, and the number of rounds, in one line."""
    from aiofeed.diagnosis.accelerators import described

    accelerator = described(setup.backend)
    memory = "" if accelerator.total_bytes is None else f", {accelerator.total_bytes / 2**30:.0f} GiB"
    return f"{accelerator.name} ({accelerator.device}{memory}), driver {driver()}; {report.conditions(setup.rounds)}"


def driver() -> str:
    from aiofeed.diagnosis.surroundings import surroundings

    return surroundings().nvidia_driver or f"unknown ({platform.system()})"


def write(results: list[report.Result], found: str, project: Path) -> Path:
    """Put the results into the page."""
    path = project / PAGE
    parts = [found, report.tally(results)]
    for result in results:
        parts += [
            f"### {result.title}",
            report.markdown_table(report.HEADER, [report.row(line) for line in result.figures]),
        ]
    path.write_text(report.replace_between(path.read_text(), "results", "\n\n".join(parts)))
    return path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measures aiofeed on a GPU.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones (default: all): {', '.join(MODULES)}")
    parser.add_argument("--device", help="another one than the current CUDA device; 'cpu' shows that everything runs")
    parser.add_argument("--rounds", type=int, help=f"turns of every contender (default: {LEAST_ROUNDS}; --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny inputs: shows that everything runs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--data", type=Path, default=default_folder(), help="keep inputs here (default: %(default)s)")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(MODULES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    if given.rounds is None:
        given.rounds = 2 if given.quick else LEAST_ROUNDS
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    if given.write and (given.names or given.quick or given.rounds < LEAST_ROUNDS or given.device == "cpu"):
        parser.error(f"--write takes a GPU, all benchmarks, real inputs and {LEAST_ROUNDS} rounds or more")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
