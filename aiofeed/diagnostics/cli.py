"""``python -m aiofeed``: the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiofeed.diagnostics import device_report

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line's) name; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiofeed", description="Feeds PyTorch training.")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_doctor(commands)
    given = parser.parse_args(arguments)
    code: int = given.run(given)
    return code


def _add_doctor(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="what the machine has for feeding a training, what is amiss, and how to mend it"
    )
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    """Print the report; 0, whatever it says."""
    print(device_report(measure=not given.quick))
    return 0
