"""In containers aiofeed works, or an error names the path or the figure and the way out.

Namespaces of this user stand for the container: a small /dev/shm, limits of a cgroup, a root that cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.shard_files import members_of, numbered, write_tar

MAP_USER = "unshare --user --map-user=12345 --map-group=12345"
SMALL = f"""
mount -t tmpfs -o size=64m none /dev/shm
mount -t tmpfs none /sys/fs/cgroup
cd /sys/fs/cgroup
echo 150000 100000 > cpu.max
echo {300 << 20} > memory.max
echo {100 << 20} > memory.current
cd /
"""
READ_ONLY = """
mount -o remount,ro,bind /
mount -t tmpfs -o ro none /dev/shm
mount -t tmpfs none {folder}/writable
unset HOME USER LOGNAME XDG_RUNTIME_DIR XDG_CACHE_HOME TMPDIR AIOFEED_CACHE
export PYTHONDONTWRITEBYTECODE=1
cd /
"""


def refusal() -> str | None:
    """Why this machine allows no such namespaces; ``None`` if it does."""
    if sys.platform != "linux":
        return "needs namespaces of Linux"
    try:
        command = ["unshare", "-rm", "sh", "-c", f"set -e; mount -t tmpfs none /dev/shm; {MAP_USER} true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return f"needs unshare: {error}"
    return f"namespaces are not allowed: {done.stderr.strip()}" if done.returncode else None


REFUSAL = refusal()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]


def outcomes(folder: Path, container: str, *groups: str, user: str = "") -> dict[str, str]:
    """Run groups of `tests/support/container_cases.py` in namespaces; returns errors and warnings by case."""
    for number in range(40):
        (folder / f"{number:02}.bin").write_bytes(bytes(number))
    write_tar(folder / "a.tar", members_of(numbered(0, 40)))
    (folder / "writable").mkdir()
    # An optional package that torch imports needs a temporary folder.
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['dill'] = None\n")
    program = [sys.executable, "-m", "tests.support.container_cases", str(folder), *groups]
    script = f"set -e\n{container.format(folder=shlex.quote(str(folder)))}\nexec {user} {shlex.join(program)}"
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, str], expected: dict[str, str]) -> None:
    """Cases have the expected texts, regular expressions, and others none."""
    for case, text in found.items():
        assert re.search(expected.get(case, r"\A\Z"), text, re.DOTALL), (case, text)
    assert not expected.keys() - found.keys()


def test_small(tmp_path: Path) -> None:
    """With 64 MiB of /dev/shm larger batches pass between processes; too little memory is said with the figures."""
    check(
        outcomes(tmp_path, SMALL, "small"),
        {
            "small.report": r"/dev/shm has 64.0 MiB.*only 200.0 MiB of memory are free \(the cgroup allows 300.0 MiB",
            "small.share_too_much": "FeedError: .*250.0 MiB.* 200.0 MiB",
            "small.batches_too_large": r"\Atwo batches of 64 samples.*take 384.0 MiB.*has 200.0 MiB left.*: make batch",
            "small.batches_too_large_in_processes": r"a batch needs 210\.\d MiB.*has 200.0 MiB left; make batch",
        },
    )


def test_read_only(tmp_path: Path) -> None:
    """Nothing is written to feed data; a socket or a file that cannot be made is an error with its path."""
    check(
        outcomes(tmp_path, READ_ONLY, "read_only", "one_folder", user=MAP_USER),
        {
            "read_only.serve": r"FeedError: no folder for sockets: .*'/tmp'.*; use the path .* or set TMPDIR",
            "read_only.serve_at": r"FeedError: no socket can be made at .*/x.sock: Read-only file system; use the path",
            "read_only.share": r"FeedError: no folder for sockets: .*'/tmp'.*; use the path .* or set TMPDIR",
            "read_only.shards": r"\Alistings and indexes are not cached, .* no home folder: set AIOFEED_CACHE[^\n]*\Z",
            "read_only.disk_cache": r"CacheError: .*/x.cache' cannot be created: .*Read-only .* writable folder",
            "read_only.encoded_cache": r"CacheError: .*/x.cache' cannot be created: .*Read-only .* writable folder",
        },
    )
