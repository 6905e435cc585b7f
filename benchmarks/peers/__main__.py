"""``python -m benchmarks.peers [cases...] [--only PEER] [--rounds N] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.command_line import LEAST_ROUNDS, add_arguments, parsed, print_progress, warn_if_quick
from benchmarks.harness import PROJECT, Settings
from benchmarks.peers import CASES, contest, races
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.contest import OURS, CaseResult, Participants
from benchmarks.peers.install import failures


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    participants = Participants(frozenset(options.only), failures(Path(sys.prefix)))
    conditions = contest.conditions(options.rounds)
    print(conditions)
    finished: list[tuple[str, CaseResult]] = []
    for name in options.names or CASES:
        started = time.perf_counter()
        progress = partial(print_progress, name=name)
        settings = Settings(rounds=options.rounds, quick=options.quick, data=options.data, progress=progress)
        finished.append((name, case(name)(settings, participants)))
        print(f"\n{contest.plain(*finished[-1])}\n  {time.perf_counter() - started:.0f} s", flush=True)
        print_progress("")
    print("\n" + report.tally(contest.result(*each) for each in finished))
    warn_if_quick(options)
    if options.write:
        for path in contest.write(finished, conditions, PROJECT):
            print(f"wrote {path}")


def case(name: str) -> Callable[[Settings, Participants], CaseResult]:
    found: Callable[[Settings, Participants], CaseResult] = getattr(races, name)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    peers = sorted({*ADAPTERS} - {OURS})
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Compares aiofeed with other loaders; prints tables and ratios."
    )
    add_arguments(parser, "case", [*CASES])
    parser.add_argument(
        "--only", action="append", default=[], metavar="PEER", help=f"this peer (repeatable): {', '.join(peers)}"
    )
    parser.add_argument("--write", action="store_true", help=f"write {report.DATA} and {contest.PICTURE}")
    options = parsed(parser, arguments, "case", [*CASES])
    if unknown := set(options.only) - set(peers):
        parser.error(f"no peer named {', '.join(sorted(unknown))}; there are {', '.join(peers)}")
    if options.write and (options.names or options.only or options.quick or options.rounds < LEAST_ROUNDS):
        parser.error(f"--write needs all cases and peers, real inputs and {LEAST_ROUNDS} rounds or more")
    return options


if __name__ == "__main__":
    main()
