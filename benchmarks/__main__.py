"""``python -m benchmarks [names...] [--rounds N] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks import MODULES, report
from benchmarks.data import default_folder
from benchmarks.harness import PROJECT, Settings

LEAST_ROUNDS = 5


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    conditions = report.conditions(given.rounds)
    print(conditions)
    results = []
    for name in given.names or MODULES:
        started = time.perf_counter()
        settings = Settings(rounds=given.rounds, quick=given.quick, data=given.data, say=partial(say_of, name))
        results.append(run(name, settings))
        print("\n" + report.plain(results[-1]), flush=True)
        say(f"{name}: {time.perf_counter() - started:.0f} s\n")
    print("\n" + report.tally(results))
    if given.quick:
        print("These were tiny inputs (--quick): the figures mean nothing.")
    if given.write:
        for path in report.write(results, conditions, PROJECT):
            print(f"wrote {path}")


def run(name: str, settings: Settings) -> report.Result:
    """One benchmark's results."""
    module = import_module(f"benchmarks.{name}")
    return report.Result(name, module.TITLE, module.run(settings))


def say_of(name: str, line: str) -> None:
    say(f"{name}: {line}")


def say(line: str) -> None:
    """Progress, in one line of the terminal that is written over; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures aiofeed; prints ratios.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones (default: all): {', '.join(MODULES)}")
    parser.add_argument("--rounds", type=int, help=f"turns of every contender (default: {LEAST_ROUNDS}; --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny inputs: shows that everything runs")
    parser.add_argument("--write", action="store_true", help="write README.md, docs/benchmarks.md and its picture")
    parser.add_argument("--data", type=Path, default=default_folder(), help="keep inputs here (default: %(default)s)")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(MODULES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    if given.rounds is None:
        given.rounds = 2 if given.quick else LEAST_ROUNDS
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")
    if given.write and (given.names or given.quick or given.rounds < LEAST_ROUNDS):
        parser.error(f"--write takes all benchmarks, real inputs and {LEAST_ROUNDS} rounds or more")
    return given


if __name__ == "__main__":
    main()
