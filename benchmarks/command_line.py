"""Arguments and progress display that the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import default_folder

LEAST_ROUNDS = 5
"""Results that are written to a page have at least this many rounds."""


def add_arguments(parser: argparse.ArgumentParser, kind: str, known: Sequence[str]) -> None:
    """Add ``names`` of known benchmarks, ``--rounds``, ``--quick`` and ``--data``."""
    parser.add_argument("names", nargs="*", metavar=kind, help=f"{kind}s to run (default: all): {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help=f"rounds of every contender (default: {LEAST_ROUNDS}; --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to check that everything runs")
    parser.add_argument("--data", type=Path, default=default_folder(), help="folder of inputs (default: %(default)s)")


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, kind: str, known: Sequence[str]
) -> argparse.Namespace:
    """Parse; refuse unknown names and fewer than one round, and set the default number of rounds."""
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(known):
        parser.error(f"no {kind} named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.rounds is None:
        options.rounds = 2 if options.quick else LEAST_ROUNDS
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def warn_if_quick(options: argparse.Namespace) -> None:
    """Print that the figures of ``--quick`` are not measurements."""
    if options.quick:
        print("These were tiny inputs (--quick): the figures mean nothing.")


def print_progress(line: str, name: str = "") -> None:
    """Overwrite one line of the terminal; does nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name}{name and ': '}{line}", end="", file=sys.stderr, flush=True)
