"""The check of the processor time of tests."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fork_server import ForkServer

RUN = """
import os, sys, pytest
os.environ.pop("AIOFEED_EXAMPLES", None)  # of `make test-long`
from tests.support import processor_time
processor_time.slowness = lambda: 1.0
options = ["-q", "-rA", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, sys.argv[1]], plugins=[processor_time.ProcessorTime(limit_s=0.007)]))
"""

TESTS = """
import subprocess, sys, time, pytest

def work(seconds=0.06):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

@pytest.fixture
def laborious():
    work()

@pytest.fixture
def laborious_end():
    yield
    work()

@pytest.fixture(scope="module")
def shared():
    work()

def test_call(): work()
def test_setup(laborious): pass
def test_teardown(laborious_end): pass
def test_child(): subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.06: pass"])
@pytest.mark.slow
def test_marked(): work()
def test_with_what_others_share(shared): pass
def test_idle(): time.sleep(0.1)
def test_that_imports(): work(); sys.modules.update({f"module_{number}": sys for number in range(100)})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tests are judged on Linux")
def test_an_unmarked_test_that_takes_too_much_processor_time_fails(fork_server: ForkServer, tmp_path: Path) -> None:
    """Setup, call, teardown and children count; sleep, shared fixtures, imports of libraries and `slow` ones do not."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    run = fork_server.run(RUN, tmp_path, cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    failed = set(re.findall(r"^ERROR test_some.py::test_(\w+)", run.stdout, re.MULTILINE))
    assert failed == {"call", "setup", "teardown", "child"}, run.stdout
    assert "make it smaller" in run.stdout
    assert "or mark it `slow`" in run.stdout
    assert "processor time of the tests: 0.0 min" in run.stdout
