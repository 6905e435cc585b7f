"""Windows and macOS: each feature works there, or is refused with a message that names what to use instead.

Processes look like Windows or macOS to aiofeed: see `tests/support/other_platform.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")]

START = "import os\nfrom tests.support.other_platform import become\nbecome(os.environ['AIOFEED_TEST_PLATFORM'])\n"
WINDOWS = {
    "disk_cache": 'ValueError: DiskCache .* use cache="host"',
    "encoded_cache": 'ValueError: EncodedCache .* use cache="host"',
    "process_engine": 'ValueError: engine=.* use engine="thread"',
    "serve": "FeedError: aiofeed.serve and attach .* give each process a Feeder of its own",
    "attach": "FeedError: aiofeed.serve and attach .* give each process a Feeder of its own",
    "share": "FeedError: aiofeed.processes.share and .* map a file in each process, with numpy.load",
    "attach_tensors": "FeedError: aiofeed.processes.share and .* map a file in each process, with numpy.load",
    "loader_workers": "ValueError: num_workers=1 .* use num_workers=0, threads=1, or torch.utils.data.DataLoader",
}


def outcomes(platform: str, folder: Path) -> dict[str, str]:
    """The errors of all cases of `tests/support/platform_cases.py`, "" for those that work."""
    (folder / "sitecustomize.py").write_text(START)  # child processes import it, too
    (folder / "cases").mkdir()
    env = {
        **os.environ,
        "AIOFEED_CACHE": str(folder / "cache"),
        "AIOFEED_TEST_PLATFORM": platform,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "tests.support.platform_cases", platform, str(folder / "cases")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_windows(tmp_path: Path) -> None:
    """All features work in one process; those between processes and DiskCache are refused when they are made."""
    found = outcomes("win32", tmp_path)
    assert {case for case, error in found.items() if error} == set(WINDOWS), found
    for case, message in WINDOWS.items():
        assert re.match(message, found[case]), found[case]


def test_macos(tmp_path: Path) -> None:
    """All features work, without what only Linux has."""
    found = outcomes("darwin", tmp_path)
    assert len(found) > 10
    assert {case: error for case, error in found.items() if error} == {}
