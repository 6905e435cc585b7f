"""Installs the peers, one after the other, into the environment this runs in; what fails is noted and stops nothing.

``python -m benchmarks.peers.install``; ``make bench-peers`` calls it in ``.venv-peers``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PROJECT = REQUIREMENTS.parent.parent.parent
LIMIT_S = 1200


@dataclass(frozen=True)
class Line:
    """One line of requirements.txt: what pip is asked for, and the peer that needs it (empty: all of them do)."""

    requirement: str
    peer: str


def lines(text: str) -> list[Line]:
    """The requirements in ``text``, without comments and empty lines."""
    found = []
    for line in text.splitlines():
        requirement, _, peer = (part.strip() for part in line.partition("#"))
        if requirement:
            found.append(Line(requirement, peer))
    return found


def reason(log: str) -> str:
    """The first line of pip's output that says what went wrong, short enough for a table."""
    told = [line.strip() for line in log.splitlines() if re.match(r"\s*(\w*Error|ERROR|error|fatal)\b.*[:!]", line)]
    told = [line.removeprefix("ERROR: ").removeprefix("error: ") for line in told]
    said = [line for line in told if not line.startswith(("Failed to build", "subprocess-exited", "Command errored"))]
    return (said or told or ["pip failed without a word"])[0][:160]


def failures(prefix: Path) -> dict[str, str]:
    """Why peers could not be installed into the environment at ``prefix``; empty where nothing was noted."""
    path = prefix / "peers-not-installed.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def pip(*arguments: str) -> str | None:
    """``pip install``; the reason if it failed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip was still at it after {LIMIT_S} s"
    return None if done.returncode == 0 else reason(done.stderr + done.stdout)


def main() -> None:
    constraint = f"--constraint={REQUIREMENTS}"
    failed: dict[str, str] = {}
    wanted = lines(REQUIREMENTS.read_text())
    for shared in (line for line in wanted if not line.peer):
        if why := pip(constraint, shared.requirement):
            sys.exit(f"{shared.requirement}, which all peers need, could not be installed: {why}")
    if why := pip(constraint, "--editable", ".[pillow,turbo,bench]"):
        sys.exit(f"aiofeed could not be installed: {why}")
    pip("setuptools<81", "wheel")
    for line in (line for line in wanted if line.peer):
        print(f"installing {line.requirement}", flush=True)
        if (why := pip(constraint, line.requirement)) and (
            why := pip(constraint, "--no-build-isolation", line.requirement)
        ):
            failed[line.peer] = why
            print(f"  not installed: {why}", flush=True)
    # Other packages pull Pillow in, so Pillow-SIMD goes over it last; where it does not build, Pillow serves.
    if why := pip("--force-reinstall", "--no-deps", "--no-binary=pillow-simd", "pillow-simd"):
        print(f"Pillow-SIMD did not build, so all decode by Pillow: {why}")
    (Path(sys.prefix) / "peers-not-installed.json").write_text(json.dumps(failed, indent=1) + "\n")


if __name__ == "__main__":
    main()
