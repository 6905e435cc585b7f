"""Every way in which a worker process or its trainer can end; no process is left behind."""

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

from aiofeed import DecodeImage, Feeder, FeedError, ImageFolder
from aiofeed.errors import IteratorClosedError, WorkerDiedError
from aiofeed.workers.handle import _command
from tests.soak.shared_tensors import kill_at_random_moments
from tests.support import process_parts as parts
from tests.support.fork_server import ForkServer
from tests.support.paths import ROOT, environment
from tests.support.waiting import children, until

# The promise is one second; this allows for a busy machine.
LIMIT_S = 15.0


def wait_until_gone(limit_s: float = LIMIT_S) -> None:
    until(lambda: not children(), limit_s)


def endless(decode: Any = parts.number, engine: str = "process", **more: Any) -> Feeder[Any]:
    return Feeder(parts.Numbers(100_000), decode=decode, batch_size=4, engine=engine, **more)


# --- starting ---


def test_a_worker_does_not_import_torch() -> None:
    """Neither aiofeed nor the trainer's script imports it there."""
    with Feeder(parts.Numbers(4), decode=parts.modules, batch_size=4, engine="process") as feeder:
        [batch] = feeder
    assert batch.tolist() == [[False, True]] * 4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_worker_that_decodes_images_does_not_load_torch(jpeg_folder: Path) -> None:
    """Not even its libraries, which are hundreds of megabytes."""
    decode = DecodeImage(16)
    with Feeder(ImageFolder(jpeg_folder), decode=decode, batch_size=2, engine="process") as feeder:
        iterator = iter(feeder)  # if it is dropped, the worker ends
        next(iterator)
        [child] = children()
        assert "libtorch" in Path("/proc/self/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()


def test_ctrl_c_while_a_worker_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker ignores Ctrl-C before it imports anything of aiofeed, so that it prints no traceback."""
    module = tmp_path / "aiofeed" / "workers" / "main.py"
    module.parent.mkdir(parents=True)
    module.write_text("import signal\nprint(signal.getsignal(signal.SIGINT).name)\ndef main(*_): pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    done = subprocess.run(_command(0, 0, 0), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "SIG_IGN\n"


def test_ctrl_c_while_the_interpreter_of_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits until the worker ignores it; the threads of the worker do not block it, nor does this process."""

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(self.pid, signal.SIGINT)

    monkeypatch.setattr("aiofeed.workers.handle.subprocess.Popen", Interrupted)
    with Feeder(parts.Numbers(4), decode=parts.blocked_signals, batch_size=4, engine="process") as feeder:
        [batch] = feeder
    assert batch.tolist() == [0] * 4
    assert capfd.readouterr().err == ""
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


# --- leaving the loop ---


@pytest.mark.slow
def test_after_break() -> None:
    """The workers end although the feeder lives on; the next loop starts new ones."""
    feeder = Feeder(parts.Numbers(40), decode=parts.number, batch_size=4, engine="process:2")
    for _ in range(2):
        for _ in feeder:
            break
        wait_until_gone()
    assert sum(1 for _ in feeder) == 10
    feeder.close()
    assert not children()


def test_after_an_exception_in_the_body() -> None:
    """It propagates, and the workers end."""

    def train() -> None:
        for _ in endless():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    wait_until_gone()


def test_after_the_last_reference_is_dropped() -> None:
    """In mid-epoch, and before the first batch."""
    for steps in (0, 3):
        feeder = endless()
        iterator = iter(feeder)
        for _ in range(steps):
            next(iterator)
        del feeder, iterator
        gc.collect()
        wait_until_gone()


def test_a_second_iterator_closes_the_first() -> None:
    """It has its own workers, which start after the first iterator's have ended."""
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
    """Reads that never end are cancelled in the worker, which need not be killed."""
    monkeypatch.setattr("aiofeed.workers.pool.GRACE_S", 60.0)
    feeder = Feeder(parts.Stuck(40), decode=parts.number, batch_size=4, engine="process")
    iterator = iter(feeder)
    until(children)
    started = time.monotonic()
    feeder.close()
    assert not children()
    assert time.monotonic() - started < LIMIT_S
    with pytest.raises(IteratorClosedError):
        next(iterator)


@pytest.mark.slow
def test_a_stuck_decoder_ends_with_its_worker() -> None:
    """It delays neither close() nor anything else."""
    feeder = endless(parts.stuck_at_nine)
    iterator = iter(feeder)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    feeder.close()
    assert not children()


HEAD = "import sys\nfrom tests.support import process_parts as parts\nimport aiofeed\n"


def script(body: str, path: str, *arguments: str, shell: str = "") -> subprocess.Popen[str]:
    """Start a script; ``shell`` redirects its standard streams."""
    Path(path).write_text(HEAD + textwrap.dedent(body))
    command = [sys.executable, path, *arguments]
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *command] if shell else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def output(server: ForkServer, folder: Path, body: str) -> tuple[int, str, str]:
    """Run a script in a fork; return its exit status and what it prints to both streams."""
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.dedent(body))
    done = server.run(path, env=environment())
    return done.returncode, done.stdout, done.stderr


LOOP = """
    if __name__ == "__main__":
        feeder = aiofeed.Feeder(parts.Numbers(10**6), decode=parts.number, batch_size=4, engine="process:2")
        iterator = iter(feeder)
        next(iterator)
        print(*parts.worker_pids(feeder), flush=True)
        {then}
"""


@pytest.mark.slow
def test_at_interpreter_exit(tmp_path: Path) -> None:
    """A script that exits in mid-epoch exits at once and prints nothing; its workers end."""
    process = script(LOOP.format(then="sys.exit(0)"), str(tmp_path / "script.py"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in out.split()), LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_trainer_is_killed(number: int, tmp_path: Path) -> None:
    """Its workers end within a second, whatever the signal."""
    process = script(LOOP.format(then="[None for _ in iterator]"), str(tmp_path / "script.py"))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=120)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), LIMIT_S)


@pytest.mark.slow
def test_when_the_trainer_is_killed_but_its_fork_lives_on(tmp_path: Path) -> None:
    """The fork holds the connections open, and still the workers end."""
    then = "import os, time; os.fork() or time.sleep(60); [None for _ in iterator]"
    process = script(LOOP.format(then=then), str(tmp_path / "script.py"))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    trainer = psutil.Process(process.pid)
    until(lambda: len(trainer.children()) == 3)
    [fork] = [each for each in trainer.children() if each.pid not in pids]
    process.kill()
    process.wait(30)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), LIMIT_S)
    fork.kill()
    process.communicate()


@pytest.mark.slow
def test_ctrl_c_interrupts_only_the_trainer(tmp_path: Path) -> None:
    """The terminal sends it to all processes; the workers print nothing."""
    then = "import signal, os; os.kill(int(sys.argv[1]), 0); [None for _ in iterator]"
    process = script(LOOP.format(then=then), str(tmp_path / "script.py"), str(os.getpid()))
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    for pid in (*pids, process.pid):
        os.kill(pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), LIMIT_S)


# --- dying ---


@pytest.mark.parametrize(
    ("decode", "message", "status"),
    [
        (
            parts.killed_at_nine,
            r"was killed by SIGKILL \(exit status -9\).*out of memory.*unfinished, the first is batch",
            -9,
        ),
        (parts.exits_at_nine, "ended with exit status 3.*unfinished, the first is batch", 3),
    ],
)
def test_a_worker_that_dies_is_a_worker_died_error(decode: Any, message: str, status: int) -> None:
    """Raised in the consumer after batches in order, with the exit status; the next iter() starts another worker."""
    feeder = endless(decode)
    for _ in range(2):
        iterator, seen = iter(feeder), []
        with pytest.raises(WorkerDiedError, match=message) as caught:
            for batch in iterator:
                seen += batch.tolist()
        # Batches that it had finished and not sent are lost.
        assert seen in ([], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7])
        assert caught.value.exit_status == status
        assert list(iterator) == []
    wait_until_gone()


def test_one_of_several_workers_is_killed_while_the_consumer_waits() -> None:
    """The consumer gets the error within a second, and the other workers end."""
    feeder = Feeder(parts.Stuck(400), decode=parts.number, batch_size=4, engine="process:3")
    iterator = iter(feeder)
    until(lambda: feeder._session.pipeline is not None and len(children()) == 3)
    assert feeder._session.pipeline is not None
    processes: Any = feeder._session.pipeline._pool
    until(lambda: all(each.ready for each in processes._workers))
    started = time.monotonic()
    os.kill(children()[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"worker process [123] of 3"):
        next(iterator)
    assert time.monotonic() - started < LIMIT_S
    wait_until_gone()


def test_a_worker_is_killed_while_it_starts() -> None:
    """Before it has sent a message."""
    feeder = endless()
    iterator = iter(feeder)
    until(children)
    os.kill(children()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        next(iterator)
    wait_until_gone()


@pytest.mark.slow
def test_a_worker_is_killed_at_random_moments() -> None:
    """Correct batches, then a WorkerDiedError; no process is left."""
    kill_at_random_moments(6, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_processes_of_every_kind_are_killed_at_random_moments_200_times() -> None:
    """Workers, consumers of both modes, servers, processes with shared tensors: reported in time, nothing is left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.kills", "--times", "200", "--seed", "2", "--within", str(LIMIT_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "200 processes killed" in done.stdout


def test_an_exit_status_that_cannot_be_obtained_is_reported_as_unknown(fork_server: ForkServer, tmp_path: Path) -> None:
    """Not as status 0: if the trainer ignores SIGCHLD, the kernel discards the status."""
    status, out, err = output(
        fork_server,
        tmp_path,
        """
        import signal
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            feeder = aiofeed.Feeder(parts.Numbers(40), decode=parts.killed_at_nine, batch_size=4, engine="process")
            try:
                list(feeder)
            except aiofeed.errors.WorkerDiedError as error:
                print(error.exit_status, error)
            feeder.close()
        """,
    )
    assert (status, err) == (0, "")
    assert out.startswith("None worker process 1 of 1")
    assert "its exit status is unknown" in out


# --- starting ---


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
@pytest.mark.parametrize("engine", ["thread", "process:2"])
def test_closed_standard_streams(engine: str, closed: str, tmp_path: Path) -> None:
    """A script that was started without them (`python script.py <&-`) gets its batches and exits normally."""
    process = script(
        f"""
        import os
        if __name__ == "__main__":
            feeder = aiofeed.Feeder(parts.Numbers(8), decode=parts.number, batch_size=4, engine="{engine}")
            batches = [batch.tolist() for batch in feeder]
            feeder.close()
            with open(sys.argv[1], "w") as file:
                print(batches, file=file)
        """,
        str(tmp_path / "script.py"),
        str(tmp_path / "out"),
        shell=" ".join(f"{number}>&-" for number in closed.split()),
    )
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == "[[0, 1, 2, 3], [4, 5, 6, 7]]\n"


def test_a_script_without_a_guard(fork_server: ForkServer, tmp_path: Path) -> None:
    """With a decoder of the script: a TypeError of the constructor, which names the script and the guard."""
    status, out, err = output(
        fork_server,
        tmp_path,
        """
        sys.modules["cloudpickle"] = None  # as if it were not installed
        def decode(data):
            return parts.number(data)
        for batch in aiofeed.Feeder(parts.Numbers(8), decode=decode, batch_size=4, engine="process"):
            print(batch.tolist())
        """,
    )
    assert (status, out) == (1, "")
    assert re.search(r"TypeError: decode= uses decode.*script\.py.*__name__", err)


@pytest.mark.slow
def test_a_script_whose_guard_is_not_around_the_loop(fork_server: ForkServer, tmp_path: Path) -> None:
    """The worker that imports the script refuses to start another; the trainer gets the reason."""
    status, out, err = output(
        fork_server,
        tmp_path,
        """
        def decode(data):
            return parts.number(data)
        if __name__ != "__main__":
            print("imported", flush=True)
        for batch in aiofeed.Feeder(parts.Numbers(8), decode=decode, batch_size=4, engine="process"):
            print(batch.tolist())
        """,
    )
    assert (status, out) == (1, "imported\n")
    assert 'below `if __name__ == "__main__":`' in err.strip().splitlines()[-1] or "could not start" in err


def test_a_script_that_needs_no_guard(fork_server: ForkServer, tmp_path: Path) -> None:
    """If none of the objects is defined in the script, workers do not import it, nor what it imports."""
    done = output(
        fork_server,
        tmp_path,
        """
        import torch
        for batch in aiofeed.Feeder(parts.Numbers(4), decode=parts.modules, batch_size=4, engine="process"):
            print(batch[0].tolist())
        """,
    )
    assert done == (0, "[False, True]\n", "")


@pytest.mark.slow
def test_a_decoder_of_the_script(fork_server: ForkServer, tmp_path: Path) -> None:
    """With the guard, workers import the script and find its decoder."""
    done = output(
        fork_server,
        tmp_path,
        """
        import numpy
        def decode(data):
            return numpy.array(-int(data))
        if __name__ == "__main__":
            feeder = aiofeed.Feeder(parts.Numbers(4), decode=decode, batch_size=4, engine="process")
            print([batch.tolist() for batch in feeder])
        """,
    )
    assert done == (0, "[[0, -1, -2, -3]]\n", "")


@pytest.mark.slow
def test_an_interactive_session() -> None:
    """A decoder defined at the prompt needs cloudpickle; without it, it is refused. An imported one works."""
    program = """
import sys
import aiofeed
from tests.support import process_parts as parts
def decode(data): return parts.number(data)
sys.modules["cloudpickle"] = None
try:
    aiofeed.Feeder(parts.Numbers(4), decode=decode, batch_size=4, engine="process")
except TypeError as error:
    print(error)
del sys.modules["cloudpickle"]
feeder = aiofeed.Feeder(parts.Numbers(4), decode=decode, batch_size=4, engine="process")
print([batch.tolist() for batch in feeder])
feeder = aiofeed.Feeder(parts.Numbers(4), decode=parts.number, batch_size=4, engine="process")
print([batch.tolist() for batch in feeder])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=120, check=True
    )
    refusal, pickled, batches = done.stdout.splitlines()
    assert pickled == batches
    assert "decode= uses decode, which is defined in an interactive session" in refusal
    assert batches == "[[0, 1, 2, 3]]"


def test_a_module_that_a_worker_cannot_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error is raised in the consumer, with the name of the module."""
    (tmp_path / "decoders_elsewhere.py").write_text("def number(data):\n    return data\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        feeder = endless(importlib.import_module("decoders_elsewhere").number)
    with pytest.raises(FeedError, match="could not start: ModuleNotFoundError: No module named 'decoders_elsewhere'"):
        next(iter(feeder))
    wait_until_gone()
