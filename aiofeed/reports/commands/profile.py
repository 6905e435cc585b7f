"""``aiofeed profile``: runs a script, then explains each of its feeders and writes their timelines."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiofeed import Feeder


def profile(script: str, arguments: Sequence[str], output: str | None) -> int:
    """Run a script as ``python script arguments`` does, and print the explanation of each feeder at its end.

    Args:
        script: The path of the script.
        arguments: Its arguments.
        output: The timeline of the first feeder, ``.html``, ``.png`` or ``.json``; the second has "-2" in its name.

    Returns:
        The exit code of the script. Exceptions other than ``SystemExit`` are raised after the report.
    """
    if not os.path.isfile(script):
        print(f"aiofeed profile: there is no script {script!r}", file=sys.stderr)
        return 2
    feeders: list[Feeder[Any]] = []
    original: Callable[..., None] = Feeder.__init__

    def observed(self: Feeder[Any], *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        feeders.append(self)

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    Feeder.__init__ = observed  # type: ignore[method-assign]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    finally:
        Feeder.__init__ = original  # type: ignore[method-assign]
        _report([feeder for feeder in feeders if feeder.statistics(total=True).batches], output)
    return 0


def _report(feeders: Sequence[Feeder[Any]], output: str | None) -> None:
    if not feeders:
        print("\naiofeed profile: the script took no batch from a Feeder", file=sys.stderr)
    for number, feeder in enumerate(feeders, 1):
        print(f"\n{feeder!r}\n{feeder.explain()}", file=sys.stderr)
        if output is not None:
            path = Path(output)
            path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
            try:
                feeder.timeline(path)
            except (ValueError, OSError, ImportError) as error:
                print(f"no timeline: {error}", file=sys.stderr)
            else:
                print(f"timeline: {path}", file=sys.stderr)
        feeder.close()
