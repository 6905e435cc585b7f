"""``aiofeed run``: Python runs a script as it is; a variable and a module at its start let aiofeed make the batches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence


def run(
    script: str, arguments: Sequence[str], *, module: bool, device: str | None, threads: int | None, explain: bool
) -> int:
    """Replace this process by one that runs the script; on Windows, wait for that and return its exit code.

    The script sees what it sees under ``python train.py``: ``sys.argv``, ``sys.path``, ``__main__``, signals.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("aiofeed run needs PYTHONPATH and site, which Python ignores with -I, -E or -S: leave the option out")
    found = None if module or os.path.exists(script) else shutil.which(script)
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    command = [found] if found else [*interpreter, *(["-m"] if module else []), script]
    folder = os.path.abspath(os.path.join(__file__, "..", "..", "..", "loader", "run"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    given = {"device": device, "threads": threads, "explain": explain}
    os.environ["AIOFEED_RUN"] = json.dumps({"process": os.getpid(), "prefix": sys.prefix, **given})
    if os.name == "nt":  # execv would not wait
        return subprocess.call([*command, *arguments])
    os.execv(command[0], [*command, *arguments])
