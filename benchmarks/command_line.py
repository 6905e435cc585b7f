"""What the command lines of the benchmarks have in common: arguments, and progress in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import default_folder

LEAST_ROUNDS = 5
"""What is written to a page has so many rounds, or more."""


def add_arguments(parser: argparse.ArgumentParser, what: str, known: Sequence[str]) -> None:
    """``names`` of what is known, ``--rounds``, ``--quick`` and ``--data``."""
    parser.add_argument("names", nargs="*", metavar=what, help=f"which ones (default: all): {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help=f"turns of every contender (default: {LEAST_ROUNDS}; --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny inputs: shows that everything runs")
    parser.add_argument("--data", type=Path, default=default_folder(), help="keep inputs here (default: %(default)s)")


def check_arguments(
    parser: argparse.ArgumentParser, given: argparse.Namespace, what: str, known: Sequence[str]
) -> None:
    """Refuse names that are not known and rounds that are none; choose the rounds where they were not given."""
    if unknown := set(given.names) - set(known):
        parser.error(f"no {what} named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if given.rounds is None:
        given.rounds = 2 if given.quick else LEAST_ROUNDS
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {given.rounds}")


def tell_of_quick(given: argparse.Namespace) -> None:
    """Print what figures of tiny inputs are worth."""
    if given.quick:
        print("These were tiny inputs (--quick): the figures mean nothing.")


def say_of(name: str, line: str) -> None:
    """Progress of one of them."""
    say(f"{name}: {line}")


def say(line: str) -> None:
    """Progress, in one line of the terminal that is written over; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
