"""`aiofeed profile`: a script runs as usual, and its feeders are explained at its end."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.fork_server import ForkServer

MODULE = "import runpy; runpy.run_module('aiofeed', run_name='__main__', alter_sys=True)"
"""Does what `python -m aiofeed` does."""

SCRIPT = """
import sys
import aiofeed

class Numbers:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

def train(name):
    seen = sum(len(batch) for batch in aiofeed.Feeder(Numbers(), batch_size=8))
    print(name, __name__, sys.argv[1:], seen)

if __name__ == "__main__":
    train("first")
    train("second")
"""


Profile: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def profile(tmp_path: Path, fork_server: ForkServer) -> Profile:
    """`profile(script, *arguments)` runs `python -m aiofeed profile` beside a `script.py`."""

    def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "script.py").write_text(script)
        return fork_server.run(MODULE, "profile", *arguments, cwd=tmp_path)

    return run


def test_a_script_runs_as_usual_and_is_explained(tmp_path: Path, profile: Profile) -> None:
    """Its arguments and output are its own; each feeder has a verdict and a timeline."""
    done = profile(SCRIPT, "--output", "t.html", "script.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{name} __main__ ['--epochs', '3'] 64\n" for name in ("first", "second"))
    assert done.stderr.count("Feeder(") == 2
    assert done.stderr.count("samples/s now") + done.stderr.count("too few batches") == 2
    assert (tmp_path / "t.html").stat().st_size > 500
    assert (tmp_path / "t-2.html").stat().st_size > 500


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [("sys.exit(3)", 3, ""), ("sys.exit('wrong')", 1, "wrong"), ("raise KeyError('lost')", 1, "KeyError: 'lost'")],
)
def test_how_a_script_ends(profile: Profile, end: str, code: int, message: str) -> None:
    """The exit code is the script's, and the report comes all the same."""
    done = profile(f"{SCRIPT}    {end}\n", "script.py")
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("Feeder(") == 2


def test_arguments_with_dashes(profile: Profile) -> None:
    """They are the script's, as under `python`."""
    done = profile("import sys; print(sys.argv)", "script.py", "--", "--output", "1", "--")
    assert done.stdout == "['script.py', '--', '--output', '1', '--']\n", done.stderr


def test_scripts_without_feeder(profile: Profile) -> None:
    """The report says so; a missing script is an error."""
    assert "took no batch from a Feeder" in profile("print(1)", "script.py").stderr
    missing = profile("", "missing.py")
    assert missing.returncode == 2
    assert missing.stderr == "aiofeed profile: there is no script 'missing.py'\n"
