"""`aiofeed run`: a script runs as under `python`, with the same output, and its loaders are listed on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import environment

INSIDE = """
import os, sys
print(sys.argv, __name__, __file__, sys.path, sys.flags.optimize, sys.modules.get("sitecustomize"))
print(sorted(vars()), os.getcwd())
if len(sys.argv) > 2:
    exec(sys.argv[2])
"""

TRAINING = """
import multiprocessing, sys
from torch.utils.data import *
import torch

class Noisy(TensorDataset):
    def __getitem__(self, index):
        return self.tensors[0][index] + torch.randn(3), self.tensors[1][index]

def train(name, workers):
    torch.manual_seed(1)
    data = Noisy(torch.randn(40, 3), torch.randn(40, 1))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, 8, shuffle=True, num_workers=workers)
    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(name, epoch, loss.item().hex(), flush=True)

if __name__ == "__main__":
    train("parent", 2)
    for method in ("spawn", "fork"):
        child = multiprocessing.get_context(method).Process(target=train, args=(method, 0))
        child.start()
        child.join()
"""

DISTRIBUTED = """
import torch
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
sampler = DistributedSampler(range(12), shuffle=False)
batches = [batch.tolist() for batch in DataLoader(range(12), 2, sampler=sampler, num_workers=1)]
everything = [None, None]
torch.distributed.all_gather_object(everything, batches)
if rank == 0:
    print(everything)
"""


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that has `script.py`."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=150,
    )


NOTHING = "aiofeed run: this process took no batch from a torch DataLoader\n"
RUN = ("-m", "aiofeed", "run")


@pytest.mark.parametrize(
    "arguments",
    [("script.py", "--device", "", "--", "-m"), ("-m", "script"), ("./script.py",), ("script.py", "--", "1", "--")],
)
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Arguments, names, paths and flags are those of `python`."""
    (tmp_path / "script.py").write_text(INSIDE)
    # Python's own name for an empty PYTHONPATH is the current folder, so there is one with a folder in both runs.
    before, after = (python(tmp_path, "-O", *way, *arguments) for way in ((), RUN))
    assert before.returncode == after.returncode == 0, after.stderr
    assert before.stdout == after.stdout
    assert after.stderr == NOTHING


def test_a_sitecustomize_of_the_environment_is_imported(tmp_path: Path) -> None:
    """The module of that name on the path is imported, as Python does."""
    (tmp_path / "script.py").write_text("import sitecustomize; print(sitecustomize.__file__)")
    (tmp_path / "sitecustomize.py").write_text("print('here')")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = python(tmp_path, *RUN, "script.py", PYTHONPATH=path)
    assert done.stdout == f"here\nhere\n{tmp_path / 'sitecustomize.py'}\n", done.stderr


def test_a_process_with_a_part_of_the_variables(tmp_path: Path) -> None:
    """A child with PYTHONPATH alone, or an empty variable of aiofeed's, runs as without aiofeed; a forked child that
    exits prints no line."""
    part = "{'PYTHONPATH': os.environ['PYTHONPATH']}"
    children = [
        f"subprocess.run([sys.executable, '-c', ''], env={env})" for env in (part, f"{part} | {{'AIOFEED_RUN': ''}}")
    ]
    fork = "os.fork() or sys.exit()"
    (tmp_path / "script.py").write_text("\n".join(["import os, subprocess, sys", *children, fork, "os.wait()"]))
    done = python(tmp_path, *RUN, "script.py")
    assert (done.returncode, done.stderr) == (0, NOTHING)


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_options_without_the_path_are_refused(tmp_path: Path, option: str) -> None:
    """Python would start the script without aiofeed."""
    code = "import sys; sys.path[:] = eval(sys.argv.pop(1)); from aiofeed.reports.commands.cli import main; main()"
    done = python(tmp_path, option, "-c", code, repr(sys.path), "run", "script.py")
    assert done.returncode == 1
    assert "which Python ignores with -I, -E or -S" in done.stderr


@pytest.mark.parametrize(
    "end", ["sys.exit(3)", "sys.exit('wrong')", "raise KeyError('lost')", "os.kill(os.getpid(), 2)"]
)
def test_how_a_script_ends(tmp_path: Path, end: str) -> None:
    """Exit codes, signals and tracebacks are those of the script, without a line of aiofeed."""
    (tmp_path / "script.py").write_text(INSIDE)
    before, after = (python(tmp_path, *way, "script.py", "", end) for way in ((), RUN))
    assert before.returncode == after.returncode
    assert after.returncode != 0
    assert after.stderr.removesuffix(NOTHING) == before.stderr


def test_a_missing_script(tmp_path: Path) -> None:
    """A name that is neither a file nor a command is Python's error."""
    before, after = (python(tmp_path, *way, "missing.py") for way in ((), RUN))
    assert before.returncode == after.returncode == 2
    assert after.stderr.removesuffix(NOTHING) == before.stderr


def test_a_command(tmp_path: Path) -> None:
    """A command of the path is started with the variables that its Python processes need."""
    done = python(
        tmp_path, *RUN, "env", "-u", "HOME", sys.executable, "-c", "import sys; print('aiofeed' in sys.modules)"
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.slow
def test_a_training_and_its_children(tmp_path: Path) -> None:
    """Losses are the same bit for bit, and the loaders of the script and of spawned and forked children are listed."""
    (tmp_path / "script.py").write_text(TRAINING)
    before, after = (python(tmp_path, *way, "script.py") for way in ((), RUN))
    assert before.returncode == after.returncode == 0, after.stderr
    assert before.stdout == after.stdout
    assert before.stdout.count("parent") == before.stdout.count("spawn") == before.stdout.count("fork") == 10
    lines = [line.partition(", waited")[0] for line in after.stderr.splitlines()]
    name = "aiofeed: script.py:15 DataLoader of Noisy, num_workers="
    assert sorted(lines) == [f"{name}0: 10 batches", f"{name}0: 10 batches", f"{name}2: 10 batches"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        (*RUN, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"),
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *RUN[1:], "script.py"),
    ],
    ids=["run torchrun", "torchrun run"],
)
def test_ranks_of_torchrun(tmp_path: Path, way: tuple[str, ...]) -> None:
    """Each rank of torchrun has aiofeed's iterators, on both sides of the command; rank 0 lists its loaders."""
    (tmp_path / "script.py").write_text(DISTRIBUTED)
    done = python(tmp_path, *way)
    assert done.stdout == "[[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]\n", done.stderr
    line = "aiofeed: script.py:9 DataLoader of range, num_workers=1: 3 batches, waited"
    assert done.stderr.count(line) == done.stderr.count("num_workers") == 1, done.stderr
