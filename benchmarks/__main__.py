"""``python -m benchmarks [names...] [--rounds N] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib import import_module

from benchmarks import MODULES, report
from benchmarks.command_line import LEAST_ROUNDS, add_arguments, check_arguments, say, say_of, tell_of_quick
from benchmarks.harness import PROJECT, Settings


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
    tell_of_quick(given)
    if given.write:
        for path in report.write(results, conditions, PROJECT):
            print(f"wrote {path}")


def run(name: str, settings: Settings) -> report.Result:
    """One benchmark's results."""
    module = import_module(f"benchmarks.{name}")
    return report.Result(name, module.TITLE, module.run(settings))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures aiofeed; prints ratios.")
    add_arguments(parser, "benchmark", MODULES)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, README.md and their pictures")
    given = parser.parse_args(arguments)
    check_arguments(parser, given, "benchmark", MODULES)
    if given.write and (given.names or given.quick or given.rounds < LEAST_ROUNDS):
        parser.error(f"--write takes all benchmarks, real inputs and {LEAST_ROUNDS} rounds or more")
    return given


if __name__ == "__main__":
    main()
