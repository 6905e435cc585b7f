"""Every way in which an engine process, its trainer or its memory can end; nothing is left behind."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from aiofeed import Feeder, FeedError, IteratorClosedError, WorkerDiedError
from tests.soak.shared_tensors import kill_at_random_moments
from tests.support import process_parts as parts
from tests.support.paths import ROOT, environment
from tests.support.waiting import children, until

# The promise is a second. A machine that is busy with other things gets this much more.
TOLD_S = 15.0


def gone(limit_s: float = TOLD_S) -> None:
    until(lambda: not children(), limit_s)


def endless(decode: Any = parts.number, engine: str = "process", **more: Any) -> Feeder[Any]:
    return Feeder(parts.Numbers(100_000), decode=decode, batch_size=4, engine=engine, **more)


# --- leaving ---


def test_after_break() -> None:
    """The loop is left early: processes are gone although the feeder lives on, and it works again."""
    feeder = Feeder(parts.Numbers(40), decode=parts.number, batch_size=4, engine="process:2")
    for _ in range(2):
        for _ in feeder:
            break
        gone()
    assert sum(1 for _ in feeder) == 10
    feeder.close()
    assert not children()


def test_after_an_exception_in_the_body() -> None:
    """It passes through, and the processes go with it."""

    def train() -> None:
        for _ in endless():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    gone()


def test_after_the_last_reference_is_dropped() -> None:
    """In mid-epoch, and before the first batch."""
    for steps in (0, 3):
        feeder = endless()
        iterator = iter(feeder)
        for _ in range(steps):
            next(iterator)
        del feeder, iterator
        gc.collect()
        gone()


def test_a_second_iterator_closes_the_first() -> None:
    """With processes of its own, started once the first's are gone."""
    feeder = endless()
    first = iter(feeder)
    next(first)
    second = iter(feeder)
    assert next(second).tolist() == [0, 1, 2, 3]
    with pytest.raises(IteratorClosedError, match="newer iterator"):
        next(first)
    assert len(children()) == 1
    feeder.close()


def test_close_while_reads_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that never end are cancelled there as here; no process has to be killed."""
    monkeypatch.setattr("aiofeed.processes.workers.pool.GRACE_S", 60.0)
    feeder = Feeder(parts.Stuck(40), decode=parts.number, batch_size=4, engine="process")
    iterator = iter(feeder)
    until(children)
    started = time.monotonic()
    feeder.close()
    assert not children()
    assert time.monotonic() - started < TOLD_S
    with pytest.raises(IteratorClosedError):
        next(iterator)


@pytest.mark.slow
def test_a_decoder_that_is_stuck_ends_with_its_process() -> None:
    """A job that cannot be left holds up neither close() nor anything else."""
    feeder = endless(parts.stuck_at_nine)
    iterator = iter(feeder)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    feeder.close()
    assert not children()


def script(body: str, *arguments: str, main: bool = True) -> subprocess.Popen[str]:
    text = "import sys\nfrom tests.support import process_parts as parts\nimport aiofeed\n"
    text += textwrap.dedent(body)
    path = Path(arguments[0])
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path), *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


LOOP = """
    if __name__ == "__main__":
        feeder = aiofeed.Feeder(parts.Numbers(10**6), decode=parts.number, batch_size=4, engine="process:2")
        iterator = iter(feeder)
        next(iterator)
        print(*feeder._session.pipeline._processes.pids, flush=True)
        {then}
"""


def test_at_interpreter_exit(tmp_path: Path) -> None:
    """A script that ends in mid-epoch ends at once, prints nothing, and its processes with it."""
    process = script(LOOP.format(then="sys.exit(0)"), str(tmp_path / "script.py"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err == ""
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in out.split()), TOLD_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_when_the_trainer_is_killed(number: int, tmp_path: Path) -> None:
    """Its processes end within a second, whatever it was killed by."""
    process = script(LOOP.format(then="[None for _ in iterator]"), str(tmp_path / "script.py"))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=120)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), TOLD_S)


@pytest.mark.slow
def test_when_the_trainer_is_killed_but_its_fork_lives_on(tmp_path: Path) -> None:
    """Somebody who holds the connection open without knowing does not keep the processes alive."""
    then = "import os, time; os.fork() or time.sleep(60); [None for _ in iterator]"
    process = script(LOOP.format(then=then), str(tmp_path / "script.py"))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    trainer = psutil.Process(process.pid)
    until(lambda: len(trainer.children()) == 3)
    [fork] = [each for each in trainer.children() if each.pid not in pids]
    process.kill()
    process.wait(30)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), TOLD_S)
    fork.kill()
    process.communicate()


@pytest.mark.slow
def test_ctrl_c_goes_to_the_trainer_alone(tmp_path: Path) -> None:
    """Sent to all of a terminal's processes, it is the trainer's KeyboardInterrupt; the processes say nothing."""
    then = "import signal, os; os.kill(int(sys.argv[1]), 0); [None for _ in iterator]"
    process = script(LOOP.format(then=then), str(tmp_path / "script.py"), str(os.getpid()))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    for pid in (*pids, process.pid):
        os.kill(pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), TOLD_S)


# --- dying ---


@pytest.mark.parametrize(
    ("decode", "told", "status"),
    [
        (parts.killed_at_nine, r"was killed by SIGKILL \(exit status -9\).*out of memory.*under way, from batch", -9),
        (parts.exits_at_nine, "ended with exit status 3.*under way, from batch", 3),
    ],
)
def test_a_process_that_dies_is_a_worker_died_error(decode: Any, told: str, status: int) -> None:
    """At the `for` line, behind batches in order, with the exit status; the next iter() starts another."""
    feeder = endless(decode)
    for _ in range(2):
        iterator, seen = iter(feeder), []
        with pytest.raises(WorkerDiedError, match=told) as caught:
            for batch in iterator:
                seen += batch.tolist()
        # What it had finished and not yet handed over died with it.
        assert seen in ([], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7])
        assert caught.value.exit_status == status
        assert list(iterator) == []
    gone()


def test_one_of_several_is_killed_while_the_consumer_waits() -> None:
    """The consumer hears of it within a second, though the others are well; those end too."""
    feeder = Feeder(parts.Stuck(400), decode=parts.number, batch_size=4, engine="process:3")
    iterator = iter(feeder)
    until(lambda: feeder._session.pipeline is not None and len(children()) == 3)
    assert feeder._session.pipeline is not None
    processes: Any = feeder._session.pipeline._processes
    until(lambda: all(each.ready for each in processes._processes))
    started = time.monotonic()
    os.kill(children()[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"number [123] of 3"):
        next(iterator)
    assert time.monotonic() - started < TOLD_S
    gone()


def test_killed_while_it_starts() -> None:
    """Before it has said a word."""
    feeder = endless()
    iterator = iter(feeder)
    until(children)
    os.kill(children()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        next(iterator)
    gone()


def test_killed_at_random_moments() -> None:
    """Whenever it is: a WorkerDiedError, right bytes before it, nothing left."""
    kill_at_random_moments(6, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whoever_is_killed_at_random_moments_200_times() -> None:
    """Engines, consumers of both modes, servers, holders of tensors: heard of with its exit status, nothing left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.kills", "--times", "200", "--seed", "2", "--within", str(TOLD_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "200 processes killed" in done.stdout


# --- starting ---


def test_a_script_without_its_guard(tmp_path: Path) -> None:
    """A decoder of the script's own and no guard: a TypeError when the feeder is made, which names both."""
    process = script(
        """
        def decode(data):
            return parts.number(data)
        for batch in aiofeed.Feeder(parts.Numbers(8), decode=decode, batch_size=4, engine="process"):
            print(batch.tolist())
        """,
        str(tmp_path / "script.py"),
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out == ""
    assert re.search(r"TypeError: decode= uses decode.*script\.py.*__name__", err)


@pytest.mark.slow
def test_a_script_whose_guard_is_not_around_the_loop(tmp_path: Path) -> None:
    """The process that imports the script refuses to start another; the trainer hears why."""
    process = script(
        """
        def decode(data):
            return parts.number(data)
        if __name__ != "__main__":
            print("imported", flush=True)
        for batch in aiofeed.Feeder(parts.Numbers(8), decode=decode, batch_size=4, engine="process"):
            print(batch.tolist())
        """,
        str(tmp_path / "script.py"),
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out == "imported\n"
    assert 'below `if __name__ == "__main__":`' in err.strip().splitlines()[-1] or "could not start" in err


def test_a_script_that_needs_no_guard(tmp_path: Path) -> None:
    """Where nothing of the script itself is sent, it is not imported: no guard, and none of its imports."""
    process = script(
        """
        import torch
        for batch in aiofeed.Feeder(parts.Numbers(4), decode=parts.modules, batch_size=4, engine="process"):
            print(batch[0].tolist())
        """,
        str(tmp_path / "script.py"),
    )
    assert process.communicate(timeout=120) == ("[False, True]\n", "")


@pytest.mark.slow
def test_a_decoder_of_the_script(tmp_path: Path) -> None:
    """With the guard the script is imported, and its decoder found."""
    process = script(
        """
        import numpy
        def decode(data):
            return numpy.array(-int(data))
        if __name__ == "__main__":
            feeder = aiofeed.Feeder(parts.Numbers(4), decode=decode, batch_size=4, engine="process")
            print([batch.tolist() for batch in feeder])
        """,
        str(tmp_path / "script.py"),
    )
    assert process.communicate(timeout=120) == ("[[0, -1, -2, -3]]\n", "")


@pytest.mark.slow
def test_an_interactive_session() -> None:
    """What is defined at a prompt cannot be imported elsewhere, and is refused; what is imported works."""
    program = """
import aiofeed
from tests.support import process_parts as parts
def decode(data): return parts.number(data)
try:
    aiofeed.Feeder(parts.Numbers(4), decode=decode, batch_size=4, engine="process")
except TypeError as error:
    print(error)
feeder = aiofeed.Feeder(parts.Numbers(4), decode=parts.number, batch_size=4, engine="process")
print([batch.tolist() for batch in feeder])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=120, check=True
    )
    refusal, batches = done.stdout.splitlines()
    assert "decode= uses decode, which is defined in an interactive session" in refusal
    assert batches == "[[0, 1, 2, 3]]"


def test_a_module_that_cannot_be_imported_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is missing in the process is raised at the `for` line, with its name."""
    (tmp_path / "decoders_elsewhere.py").write_text("def number(data):\n    return data\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        feeder = endless(importlib.import_module("decoders_elsewhere").number)
    with pytest.raises(FeedError, match="could not start: ModuleNotFoundError: No module named 'decoders_elsewhere'"):
        next(iter(feeder))
    gone()
