"""Where the project lies, and the environment of programs that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import aiofeed

ROOT = Path(__file__).resolve().parents[2]
# How the path of each file of the package begins, whatever the folder of the checkout is called.
PACKAGE = os.path.join(os.path.dirname(aiofeed.__file__), "")


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the project on PYTHONPATH, before what stands there already."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
