"""``python -m benchmarks.peers [cases...] [--only PEER] [--rounds N] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks import report
from benchmarks.command_line import LEAST_ROUNDS, add_arguments, check_arguments, say, say_of, tell_of_quick
from benchmarks.harness import PROJECT, Settings
from benchmarks.peers import CASES, results, work
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.contest import OURS, Field, Found
from benchmarks.peers.install import failures


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    field = Field(frozenset(given.only), failures(Path(sys.prefix)))
    conditions = results.conditions(given.rounds)
    print(conditions)
    found: list[tuple[str, Found]] = []
    for name in given.names or CASES:
        started = time.perf_counter()
        if missing := [each for each in getattr(case(name), "NEEDS", ()) if find_spec(each) is None]:
            print(f"\n[{name}] was not run: {', '.join(missing)} is not installed", flush=True)
            continue
        settings = Settings(rounds=given.rounds, quick=given.quick, data=given.data, say=partial(say_of, name))
        found.append((name, run(name, settings, field)))
        print(f"\n{results.plain(*found[-1])}\n  took {time.perf_counter() - started:.0f} s", flush=True)
        say("")
    print("\n" + report.tally([results.result(*each) for each in found]))
    tell_of_quick(given)
    if given.write:
        for path in results.write(found, conditions, PROJECT):
            print(f"wrote {path}")


def case(name: str) -> object:
    return import_module(f"benchmarks.peers.{name}")


def run(name: str, settings: Settings, field: Field) -> Found:
    """One case's results."""
    found: Found = case(name).run(settings, field)  # type: ignore[attr-defined]
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    peers = sorted({work.adapter(name).NAME for name in ADAPTERS} - {OURS})
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measures aiofeed beside other loaders; prints tables and ratios.",
    )
    add_arguments(parser, "case", CASES)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PEER", help=f"this peer (repeatable): {', '.join(peers)}"
    )
    parser.add_argument("--write", action="store_true", help=f"write {results.PAGE} and {results.PICTURE}")
    given = parser.parse_args(arguments)
    check_arguments(parser, given, "case", CASES)
    if unknown := set(given.only) - set(peers):
        parser.error(f"no peer named {', '.join(sorted(unknown))}; there are {', '.join(peers)}")
    if given.write and (given.names or given.only or given.quick or given.rounds < LEAST_ROUNDS):
        parser.error(f"--write takes all cases and peers, real inputs and {LEAST_ROUNDS} rounds or more")
    return given


if __name__ == "__main__":
    main()
