"""The command line: ``python -m aiofeed``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from aiofeed.diagnostics import device_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand in ``arguments`` (default: those of the command line); returns the exit code."""
    parser = argparse.ArgumentParser(prog="aiofeed", description="Feeds PyTorch training.")
    parser.add_argument("--version", action="version", version=f"aiofeed {version('aiofeed')}")
    commands = parser.add_subparsers(metavar="command")
    doctor = commands.add_parser("doctor", help="report accelerators, packages and limits, with advice for problems")
    doctor.add_argument("--quick", action="store_true", help="do not measure copy rates")
    options = parser.parse_args(arguments)
    if not hasattr(options, "quick"):
        parser.print_help()
        return 0
    print(device_report(measure=not options.quick))
    return 0
