"""Child processes that run a script of `training.py` and are sent signals; what they leave behind.

Most of them are forked from a process that has imported everything and started no thread: an interpreter that ends
as any other does, for a hundredth of the price. It is one of these that the soak runs by the hundred.
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

# The promise for a process that was told to end. A machine that is busy with other things gets this much more.
PROMISE_S = 2.0
GRACE_S = 18.0
# From the first line of a script to the signal, at most: imports, construction, some epochs.
SPREAD_S = 0.4
FRESH_SPREAD_S = 0.8
# Whatever has not come by then never comes.
HANG_S = 90.0

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Other people's modules come first: a Ctrl-C in the middle of one of theirs is not ours to answer for.
IMPORTS = """
import faulthandler, sys
import aiofiles.os, numpy, torch, PIL.Image
try: import uvloop
except ImportError: pass
from tests.support import training
faulthandler.enable()
"""
FRESH = f"""{IMPORTS}
training.say("ready")
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
from tests.support import signal_cases as processes
for name in aiofeed.__all__: getattr(aiofeed, name)
name = processes.serve(int(sys.argv[1]))
training.say("ready")
training.SCRIPTS[name]()
"""

# Raised within `except`: one report still. Modules of Python's own look things up that way, and Ctrl-C may come then.
CHAINED = "During handling of the above exception, another exception occurred:"


@dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        returncode: negative for the signal that it died of.
        out, err: what it wrote; `out` without the first line.
        seconds: from the signal, or else from the first line, to its end.
        left: what it left behind.
    """

    returncode: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...] = ()


class Child:
    """A process that runs a script, in a session of its own.

    Args:
        pid: its number.
        out: the reading end of its standard output.
        err: a file with its standard error.
        reap: waits for its end, up to so many seconds; its return code, or `None`.
    """

    def __init__(self, pid: int, out: int, err: Any, reap: Callable[[float], int | None]) -> None:
        assert pid > 1, "a signal to the group of 1 is one to every process there is"
        self.pid = pid
        self._out = out
        self._err = err
        self._reap = reap
        self._began = time.monotonic()
        self._said = b""

    def line(self) -> str:
        """The next line of its output; empty at the end."""
        while b"\n" not in self._said and (more := self._more(HANG_S)):
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        self._began = time.monotonic()
        return line.decode()

    def _more(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        return os.read(self._out, 65536) if ready else b""

    def send(self, number: int) -> None:
        """Send a signal; the time to the end counts from here."""
        self._began = time.monotonic()
        # It may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def drop(self) -> None:
        """Nobody waits for it any more."""
        os.close(self._out)
        self._err.close()

    def end(self) -> End:
        """Wait for the end; a process that does not end is killed and has the return code of that."""
        left = []
        try:
            code = self._reap(HANG_S)
            seconds = time.monotonic() - self._began
            if code is None:
                left.append(f"it had to be killed after {HANG_S:.0f} s")
                os.kill(self.pid, signal.SIGABRT)  # faulthandler then says where it is
                code = self._reap(HANG_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
                left.append("processes of its session")
            while more := self._more(0.0):
                self._said += more
            left += [name for name in shared_memory() if str(self.pid) in re.findall(r"\d+", name)]
            self._err.seek(0)
            assert code is not None
            return End(code, self._said.decode(), self._err.read().decode(), seconds, tuple(left))
        finally:
            self.drop()


def shared_memory() -> list[str]:
    """The entries of the shared memory of this machine, where it is a folder."""
    return os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []


# --- two ways of starting one -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pipes() -> Iterator[tuple[int, int, Any]]:
    """The ends of a pipe for output and a file for errors; the writing end is closed behind the child."""
    out, write = os.pipe()
    err = tempfile.TemporaryFile()  # noqa: SIM115 - the child's owner closes it
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
    """A process that has imported everything, and forks one child at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._said = b""
        # The child that was started last, until its end is known.
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
        """A fork, about to run a script; an earlier one that nobody has waited for is killed."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
        with _pipes() as (out, write, err):
            socket.send_fds(self._socket, [json.dumps(name).encode()], [write, err.fileno()])
            while (answer := self._answer(HANG_S)) is not None and len(answer) > 1:
                pass  # the end of an earlier one
            assert answer is not None, "the fork server does not answer"
            [self._running] = answer
        return Child(answer[0], out, err, functools.partial(self._reap, answer[0]))

    def _reap(self, pid: int, timeout_s: float) -> int | None:
        """The return code of the child ``pid``, once it has ended."""
        while (answer := self._answer(timeout_s)) is not None:
            if answer[0] == pid and len(answer) > 1:
                self._running = None
                return answer[1]
        return None

    def _answer(self, timeout_s: float) -> list[int] | None:
        """What the server says next: the id of a child that it has begun, or that and the child's return code."""
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready or not (more := self._socket.recv(1024)):
                return None
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return [int(number) for number in line.split()]


def serve(descriptor: int) -> str:
    """The fork server's loop; it returns in the children alone, with the name of the script to run."""
    with socket.socket(fileno=descriptor) as asked:
        while True:
            request, descriptors, _, _ = socket.recv_fds(asked, 1024, 2)
            if not request:
                os._exit(0)
            if (pid := os.fork()) == 0:
                os.setsid()
                for number, theirs in enumerate(descriptors, start=1):
                    os.dup2(theirs, number)
                    os.close(theirs)
                # One that nobody waits for any more ends by itself.
                signal.alarm(int(2 * HANG_S))
                return str(json.loads(request))
            for theirs in descriptors:
                os.close(theirs)
            asked.sendall(b"%d\n" % pid)
            asked.sendall(b"%d %d\n" % (pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


# --- what is expected of an end ---------------------------------------------------------------------------------------


def complaints(end: End, returncode: int, error: str | None, chained: bool = False) -> list[str]:
    """What is wrong with an end: the return code, more or less than one report of `error`, time, things left behind."""
    wrong = [f"left behind: {what}" for what in end.left]
    if end.returncode != returncode:
        wrong.append(f"return code {end.returncode}, not {returncode}")
    if end.seconds > PROMISE_S + GRACE_S:
        wrong.append(f"it took {end.seconds:.1f} s to end")
    parts = end.err.split(CHAINED)
    if not chained and any("/aiofeed/" in part for part in parts[:-1]):
        wrong.append("it was raised while aiofeed dealt with another error")
    reports = end.err.count("Traceback (most recent call last)") + 1 - len(parts)
    if error is None:
        if end.err:
            wrong.append("it wrote to stderr")
    elif reports != 1 or not re.search(rf"^{re.escape(error)}\Z", end.err.rstrip(), re.MULTILINE):
        wrong.append(f"not exactly one traceback, of {error}")
    wrong += [
        f"{words!r} in stderr"
        for words in ("Exception ignored", "never awaited", "was destroyed", "Fatal", "never retrieved", "Warning:")
        if words in end.err
    ]
    return wrong


def interrupted(end: End, name: str) -> list[str]:
    """What is wrong with the end of a script that was sent SIGINT."""
    # asyncio.run makes a KeyboardInterrupt of the CancelledError, and the report shows both.
    return complaints(end, -signal.SIGINT, "KeyboardInterrupt", chained=name.startswith("asynchronous"))


def terminated(end: End) -> list[str]:
    """What is wrong with the end of a script that was sent SIGTERM."""
    return complaints(end, -signal.SIGTERM, None)


@dataclass
class Totals:
    """What came of many signals."""

    signals: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, name: str, end: End, wrong: list[str]) -> None:
        """Count one; what is wrong is kept with all that is needed to see why."""
        self.signals += 1
        self.scripts[name] += 1
        self.slowest_s = max(self.slowest_s, end.seconds)
        if wrong:
            self.failures.append(f"{case}: {'; '.join(wrong)}\n--- stdout\n{end.out}\n--- stderr\n{end.err}")

    def check(self) -> None:
        """Fail where anything was wrong."""
        if self.failures:
            raise AssertionError(f"{len(self.failures)} of {self.signals} signals:\n" + "\n".join(self.failures))


def run_signal_cases(
    count: int, seed: int, number: int = signal.SIGINT, names: tuple[str, ...] | None = None, servers: int = 2
) -> Totals:
    """Send so many signals at random moments of the training scripts, in turn; what came of it.

    The moments are drawn from `seed`, which a failure names with the script and the moment.
    """
    from tests.support.training import TRAINING

    random_ = random.Random(seed)
    turns = itertools.islice(itertools.cycle(names or TRAINING), count)
    cases = [(name, random_.uniform(0, SPREAD_S)) for name in turns]
    random_.shuffle(cases)
    totals = Totals()

    def some(mine: list[tuple[str, float]]) -> None:
        with ForkServer() as start:
            for name, after_s in mine:
                child = start(name)
                first = child.line()
                time.sleep(after_s)
                child.send(number)
                end = child.end()
                wrong = interrupted(end, name) if number == signal.SIGINT else terminated(end)
                wrong += ["it did not begin"] if first != "ready" else []
                totals.add(f"seed {seed}, {name} after {after_s:.4f} s", name, end, wrong)

    with ThreadPoolExecutor(servers) as pool:
        list(pool.map(some, [cases[part::servers] for part in range(servers)]))
    return totals
