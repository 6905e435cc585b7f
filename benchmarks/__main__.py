"""``python -m benchmarks [names...] [--rounds N] [--quick] [--write] [--list]``."""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib import import_module

from benchmarks import MODULES, report
from benchmarks.command_line import LEAST_ROUNDS, add_arguments, parsed, print_progress, warn_if_quick
from benchmarks.harness import PROJECT, Settings


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.list:
        for name in MODULES:
            print(f"{name:16}{(import_module(f'benchmarks.{name}').__doc__ or '').partition(chr(10))[0]}")
        return
    conditions = report.conditions(options.rounds)
    print(conditions)
    results = []
    for name in options.names or MODULES:
        started = time.perf_counter()
        progress = partial(print_progress, name=name)
        settings = Settings(rounds=options.rounds, quick=options.quick, data=options.data, progress=progress)
        results.append(run(name, settings, conditions))
        print_progress("")
        print(f"\n{report.plain(results[-1])}\n  {time.perf_counter() - started:.0f} s", flush=True)
    print("\n" + report.tally(results))
    warn_if_quick(options)
    if options.write:
        for path in report.write(results, PROJECT):
            print(f"wrote {path}")


def run(name: str, settings: Settings, conditions: str = "") -> report.Result:
    """Run one benchmark."""
    module = import_module(f"benchmarks.{name}")
    return report.Result(name, module.TITLE, module.run(settings), conditions)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures aiofeed; prints ratios.")
    add_arguments(parser, "benchmark", MODULES)
    parser.add_argument("--list", action="store_true", help="print each benchmark with its question")
    parser.add_argument(
        "--write", action="store_true", help=f"write these results to {report.DATA}; make the page and its chart"
    )
    options = parsed(parser, arguments, "benchmark", MODULES)
    if options.write and (options.quick or options.rounds < LEAST_ROUNDS):
        parser.error(f"--write needs real inputs and {LEAST_ROUNDS} rounds or more")
    return options


if __name__ == "__main__":
    main()
