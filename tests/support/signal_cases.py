"""Child processes that run a script of `training.py` and receive signals, and checks of how they end.

Most children are forked from a process that has imported everything and started no thread. Such a child ends like a
fresh interpreter and starts about 100 times faster. The soak runs hundreds of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.support.paths import ROOT

# The guaranteed time from the signal to the end of the process, and extra time for a busy machine.
PROMISE_S = 2.0
GRACE_S = 18.0
# Longest time from a script's first line to the signal. It covers imports, construction and some epochs.
SPREAD_S = 0.4
FRESH_SPREAD_S = 0.8
# Time limit of each wait.
HANG_S = 90.0

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Other packages are imported before the signal: aiofeed is not responsible for a Ctrl-C during their imports.
IMPORTS = """
import faulthandler, sys
import aiofiles.os, numpy, torch, PIL.Image
try: import uvloop
except ImportError: pass
from tests.support import training
faulthandler.enable()
"""
FRESH = f"""{IMPORTS}
training.write_line("ready")
training.SCRIPTS[sys.argv[1]]()
"""
# torch is not imported before the feeder imports it.
WITHOUT_TORCH = """
import asyncio, sys, time
import aiofiles.os, numpy
try: import uvloop
except ImportError: pass
print("ready", flush=True)
from aiofeed import Feeder

class Numbers:
    def __len__(self):
        return 1000

    def key(self, index):
        return str(index)

    async def read(self, index):
        await asyncio.sleep(0)
        return b"%d" % index

feeder = Feeder(Numbers(), decode=lambda data: int(data), batch_size=4, shuffle=True)
iterator = iter(feeder)
while sys.argv[1] == "endless":
    for batch in feeder:
        pass
while "torch" not in sys.modules:
    time.sleep(0.001)
"""
SERVER = f"""{IMPORTS}
import aiofeed.testing
from tests.support import signal_cases
for name in aiofeed.__all__: getattr(aiofeed, name)
name = signal_cases.serve(int(sys.argv[1]))
training.write_line("ready")
training.SCRIPTS[name]()
"""

# A KeyboardInterrupt inside an `except` block, as in some modules of the standard library, still counts as one report.
CHAINED = "During handling of the above exception, another exception occurred:"


@dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        returncode: the exit code, or minus the number of the signal that ended it.
        out, err: its output; `out` without the first line.
        seconds: time from the signal, or without one from the first line, to its end.
        left: the resources that it leaked.
    """

    returncode: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...] = ()


class Child:
    """A process that runs a script in its own session.

    Args:
        pid: its process id.
        out: the read end of its standard output.
        err: a file with its standard error.
        reap: waits up to the given seconds for its end and returns its return code, or `None`.
    """

    def __init__(self, pid: int, out: int, err: Any, reap: Callable[[float], int | None]) -> None:
        assert pid > 1, "a signal to the group of 1 is one to every process there is"
        self.pid = pid
        self._out = out
        self._err = err
        self._reap = reap
        self._started = time.monotonic()
        self._output = b""

    def line(self) -> str:
        """Read the next line of its output; an empty string at the end."""
        while b"\n" not in self._output and (more := self._read(HANG_S)):
            self._output += more
        line, _, self._output = self._output.partition(b"\n")
        self._started = time.monotonic()
        return line.decode()

    def _read(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        return os.read(self._out, 65536) if ready else b""

    def send(self, number: int) -> None:
        """Send a signal and start the measurement of the time to the end."""
        self._started = time.monotonic()
        # The process may have ended already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def drop(self) -> None:
        """Close the files, without waiting for the process."""
        os.close(self._out)
        self._err.close()

    def end(self) -> End:
        """Wait for the end; kill a process that does not end in time."""
        left = []
        try:
            code = self._reap(HANG_S)
            seconds = time.monotonic() - self._started
            if code is None:
                left.append(f"it had to be killed after {HANG_S:.0f} s")
                os.kill(self.pid, signal.SIGABRT)  # faulthandler then writes its stacks
                code = self._reap(HANG_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
                left.append("processes of its session")
            while more := self._read(0.0):
                self._output += more
            left += [name for name in shared_memory() if str(self.pid) in re.findall(r"\d+", name)]
            self._err.seek(0)
            assert code is not None
            return End(code, self._output.decode(), self._err.read().decode(), seconds, tuple(left))
        finally:
            self.drop()


def shared_memory() -> list[str]:
    """Return the names of the machine's shared memory, empty on systems without /dev/shm."""
    return os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []


# --- start a child ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pipes() -> Iterator[tuple[int, int, Any]]:
    """Open a pipe for the output and a file for the errors; close the write end after the child's start."""
    out, write = os.pipe()
    err = tempfile.TemporaryFile()  # noqa: SIM115 - `Child.drop` closes it
    try:
        yield out, write, err
    except BaseException:
        os.close(out)
        err.close()
        raise
    finally:
        os.close(write)


def fresh(name: str, code: str = FRESH) -> Child:
    """A new interpreter, about to run a script."""
    with _pipes() as (out, write, err):
        process = subprocess.Popen(
            [sys.executable, "-c", code, name],
            stdout=write,
            stderr=err,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def reap(timeout_s: float) -> int | None:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    return Child(process.pid, out, err, reap)


class ForkServer:
    """A process that has imported everything and forks one child at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = b""
        # The last child, until its return code is known.
        self._running: int | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        try:
            self._process.wait(HANG_S)
        finally:
            self._process.kill()

    def __call__(self, name: str) -> Child:
        """Fork a child that runs a script; kill an earlier child that still runs."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
        with _pipes() as (out, write, err):
            socket.send_fds(self._socket, [json.dumps(name).encode()], [write, err.fileno()])
            while (answer := self._answer(HANG_S)) is not None and len(answer) > 1:
                pass  # the return code of an earlier child
            assert answer is not None, "the fork server does not answer"
            [self._running] = answer
        return Child(answer[0], out, err, functools.partial(self._reap, answer[0]))

    def _reap(self, pid: int, timeout_s: float) -> int | None:
        """Wait for the child ``pid`` and return its return code; `None` after the time limit."""
        while (answer := self._answer(timeout_s)) is not None:
            if answer[0] == pid and len(answer) > 1:
                self._running = None
                return answer[1]
        return None

    def _answer(self, timeout_s: float) -> list[int] | None:
        """Read the server's next line: a new child's id, or a child's id and its return code."""
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready or not (more := self._socket.recv(1024)):
                return None
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return [int(number) for number in line.split()]


def serve(descriptor: int) -> str:
    """Run the fork server's loop; it returns only in a child, with the name of the script to run."""
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, 1024, 2)
            if not request:
                os._exit(0)
            if (pid := os.fork()) == 0:
                os.setsid()
                for number, theirs in enumerate(descriptors, start=1):
                    os.dup2(theirs, number)
                    os.close(theirs)
                # A child whose parent stopped waiting ends by this alarm.
                signal.alarm(int(2 * HANG_S))
                return str(json.loads(request))
            for theirs in descriptors:
                os.close(theirs)
            requests.sendall(b"%d\n" % pid)
            requests.sendall(b"%d %d\n" % (pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


# --- check how a child ended ------------------------------------------------------------------------------------------


def complaints(end: End, returncode: int, error: str | None, chained: bool = False) -> list[str]:
    """Return what is wrong with an end: return code, number of reports of `error`, time, leaks, other messages."""
    wrong = [f"leaked: {name}" for name in end.left]
    if end.returncode != returncode:
        wrong.append(f"return code {end.returncode}, expected {returncode}")
    if end.seconds > PROMISE_S + GRACE_S:
        wrong.append(f"it took {end.seconds:.1f} s to end")
    parts = end.err.split(CHAINED)
    if not chained and any("/aiofeed/" in part for part in parts[:-1]):
        wrong.append("raised while aiofeed handled another error")
    reports = end.err.count("Traceback (most recent call last)") + 1 - len(parts)
    if error is None:
        if end.err:
            wrong.append("stderr is not empty")
    elif reports != 1 or not re.search(rf"^{re.escape(error)}\Z", end.err.rstrip(), re.MULTILINE):
        wrong.append(f"stderr is not one traceback of {error}")
    wrong += [
        f"{words!r} in stderr"
        for words in ("Exception ignored", "never awaited", "was destroyed", "Fatal", "never retrieved", "Warning:")
        if words in end.err
    ]
    return wrong


def interrupted(end: End, name: str) -> list[str]:
    """Return what is wrong with the end of a script that received SIGINT."""
    # asyncio.run turns the CancelledError into a KeyboardInterrupt, and the report shows both.
    return complaints(end, -signal.SIGINT, "KeyboardInterrupt", chained=name.startswith("asynchronous"))


def terminated(end: End) -> list[str]:
    """Return what is wrong with the end of a script that received SIGTERM."""
    return complaints(end, -signal.SIGTERM, None)


@dataclass
class Totals:
    """The results of many signals."""

    signals: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, name: str, end: End, wrong: list[str]) -> None:
        """Count one signal; keep a failure with the child's output."""
        self.signals += 1
        self.scripts[name] += 1
        self.slowest_s = max(self.slowest_s, end.seconds)
        if wrong:
            self.failures.append(f"{case}: {'; '.join(wrong)}\n--- stdout\n{end.out}\n--- stderr\n{end.err}")

    def check(self) -> None:
        """Raise an `AssertionError` with all failures, if there are any."""
        if self.failures:
            raise AssertionError(f"{len(self.failures)} of {self.signals} signals:\n" + "\n".join(self.failures))


def run_signal_cases(
    count: int, seed: int, number: int = signal.SIGINT, names: tuple[str, ...] | None = None, servers: int = 2
) -> Totals:
    """Send `count` signals to training scripts, each at a random moment drawn from `seed`.

    A failure names the seed, the script and the moment.
    """
    from tests.support.training import TRAINING

    random_ = random.Random(seed)
    scripts = itertools.islice(itertools.cycle(names or TRAINING), count)
    cases = [(name, random_.uniform(0, SPREAD_S)) for name in scripts]
    random_.shuffle(cases)
    totals = Totals()

    def run(cases: list[tuple[str, float]]) -> None:
        with ForkServer() as start:
            for name, after_s in cases:
                child = start(name)
                first = child.line()
                time.sleep(after_s)
                child.send(number)
                end = child.end()
                wrong = interrupted(end, name) if number == signal.SIGINT else terminated(end)
                wrong += ["the script did not start"] if first != "ready" else []
                totals.add(f"seed {seed}, {name} after {after_s:.4f} s", name, end, wrong)

    with ThreadPoolExecutor(servers) as pool:
        list(pool.map(run, [cases[part::servers] for part in range(servers)]))
    return totals
