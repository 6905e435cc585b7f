"""Types as users see them, with pyright; `make lint` checks the same programs with mypy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def test_pyright_accepts_right_programs_and_finds_the_mistakes() -> None:
    """pyright reports nothing in the users' programs: every mistake in them is expected by a comment."""
    pytest.importorskip("basedpyright")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert checked.returncode == 0, checked.stdout + checked.stderr
