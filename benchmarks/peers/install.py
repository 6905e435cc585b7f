"""Installs the peers, one after the other, into the running environment; records those that fail, and continues.

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
    """One line of requirements.txt: a requirement, and the peer that needs it (empty: all peers)."""

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
    """The first line of pip's output with the cause of an error, short enough for a table."""
    errors = [line.strip() for line in log.splitlines() if re.match(r"\s*(\w*Error|ERROR|error|fatal)\b.*[:!]", line)]
    errors = [line.removeprefix("ERROR: ").removeprefix("error: ") for line in errors]
    causes = [line for line in errors if not line.startswith(("Failed to build", "subprocess-exited", "Command err"))]
    return (causes or errors or ["pip failed without a message"])[0][:160]


def failures(prefix: Path) -> dict[str, str]:
    """Why peers could not be installed into the environment at ``prefix``, by name."""
    path = prefix / "peers-not-installed.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def pip(*arguments: str) -> str | None:
    """Run ``pip install``; returns the error, or ``None``."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip did not end within {LIMIT_S} s"
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
    # Other packages install Pillow, so Pillow-SIMD is installed over it last; if it does not build, Pillow is used.
    if why := pip("--force-reinstall", "--no-deps", "--no-binary=pillow-simd", "pillow-simd"):
        print(f"Pillow-SIMD did not build, so all decode by Pillow: {why}")
    (Path(sys.prefix) / "peers-not-installed.json").write_text(json.dumps(failed, indent=1) + "\n")


if __name__ == "__main__":
    main()
