"""The notebooks of examples/ run from top to bottom, and show explanations and the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=120).execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path) -> None:
    """No cell fails; each explanation is a table, and the timeline an image."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    changes = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | changes, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    outputs: list[Any] = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    reports = ["".join(data["text/html"]) for data in outputs if "text/html" in data]
    assert len(reports) == 3
    assert all(" is the limit" in report and "<table>" in report for report in reports)
    assert "one thread" in reports[0]
    assert any("image/png" in data for data in outputs)
