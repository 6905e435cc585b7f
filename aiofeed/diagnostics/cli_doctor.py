"""``python -m aiofeed doctor``: what the machine has for feeding a training, and what is amiss."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from aiofeed.diagnostics import device_report

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "doctor", help="what the machine has for feeding a training, what is amiss, and how to mend it"
    )
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the report; 0, whatever it says."""
    print(device_report(measure=not given.quick))
    return 0
