"""``python -m aiofeed``: one module per subcommand, each with ``add`` and what it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from aiofeed.diagnostics import cli_doctor as doctor

_COMMANDS = (doctor,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` (default: the command line's) name; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiofeed", description="Feeds PyTorch training.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    given = parser.parse_args(arguments)
    code: int = given.run(given)
    return code
