"""A process that has imported torch and aiofeed, and forks children that run a program each.

Such a child runs and ends like a new interpreter, but begins without the two seconds of processor time that the imports
take. The process has no threads. Programs whose imports matter, or that need a library with threads of its own in
native code (obstore, Arrow, Ray), get a new interpreter instead.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support.paths import ROOT, environment

HANG_S = 90.0
"""Time limit of each wait."""

spent_s = 0.0
"""Processor time of all children that have ended."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Its parent ends at once: tests that look at the children of their own process do not find the server among them.
SERVER = """
import faulthandler, gc, os, sys
if os.fork(): os._exit(0)
import aiofiles.os, numpy, torch, PIL.Image
try: import uvloop
except ImportError: pass
import aiofeed, aiofeed.testing
from tests.support import fork_server, training
for name in aiofeed.__all__: getattr(aiofeed, name)
faulthandler.enable()
gc.freeze()  # A child that collects garbage does not copy the memory of all that is imported.
exec(fork_server.serve(int(sys.argv[1])))
"""


@dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        returncode: the exit code, or minus the number of the signal that ended it.
        out, err: its output; `out` without the lines that were read before.
        seconds: time from the signal, or without one from the last line that was read, to its end.
        left: the resources that it leaked.
    """

    returncode: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...] = ()


class Child:
    """A process in its own session.

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


@contextlib.contextmanager
def pipes() -> Iterator[tuple[int, int, Any]]:
    """Open a pipe for a child's output and a file for its errors; close the write end after the child's start."""
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


class ForkServer:
    """A process that has imported everything and forks children; threads may use it at once."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            subprocess.run(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment(**ENVIRONMENT),
                check=True,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()  # the server then ends

    def start(self, program: str, *arguments: object) -> Child:
        """Run Python code in a child whose output can be read while it runs."""
        with pipes() as (out, write, err):
            pid, reap = self._fork([program, *arguments], ROOT, os.environ, (write, err.fileno()))
        return Child(pid, out, err, reap)

    def run(
        self,
        program: str | Path,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        merge: bool = False,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code, or a script's file, to its end, as `subprocess.run` does; `merge` sends stderr to stdout."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            outputs = (out.fileno(), (out if merge else err).fileno())
            pid, reap = self._fork([program, *arguments], cwd or Path.cwd(), env or os.environ, outputs)
            code = reap(timeout)
            if code is None:
                os.kill(pid, signal.SIGABRT)  # faulthandler then writes its stacks
                code = reap(HANG_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            out.seek(0)
            err.seek(0)
            assert code is not None
            return subprocess.CompletedProcess([str(program)], code, out.read().decode(), err.read().decode())

    def _fork(
        self, command: Sequence[object], cwd: Path, env: Mapping[str, str], outputs: tuple[int, int]
    ) -> tuple[int, Callable[[float], int | None]]:
        """Start a child; returns its id, and a function that waits so many seconds for its return code."""
        program, *arguments = command
        request = {
            "file" if isinstance(program, Path) else "code": str(program),
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd),
            "env": {**env, **ENVIRONMENT},
        }
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._socket, [b"."], [*outputs, file.fileno(), theirs.fileno()])
        answers = ours.makefile("rb", buffering=0)
        pid = int(answers.readline())
        codes: list[int] = []

        def reap(timeout_s: float) -> int | None:
            global spent_s
            if not codes and select.select([ours], [], [], timeout_s)[0]:
                code, seconds = answers.readline().split()
                codes.append(int(code))
                spent_s += float(seconds)
                answers.close()
                ours.close()
            return codes[0] if codes else None

        return pid, reap


def serve(descriptor: int) -> CodeType:
    """Run the fork server's loop; it returns only in a child, with the code that is to run as `__main__`."""
    with socket.socket(fileno=descriptor) as requests:
        while True:
            word, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
            if not word:
                os._exit(0)
            if os.fork() == 0:
                break
            for theirs in descriptors:
                os.close(theirs)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    out, err, file, answers = descriptors
    with socket.socket(fileno=answers) as parent:
        if pid := os.fork():  # This process waits for the child, so that the server need not.
            os.close(out)
            os.close(err)
            parent.sendall(b"%d\n" % pid)
            _, status, used = os.wait4(pid, 0)
            parent.sendall(b"%d %.6f\n" % (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
            os._exit(0)
    os.setsid()
    signal.alarm(int(2 * HANG_S))  # A child whose parent stopped waiting ends by this alarm.
    with open(file) as lines:
        request = json.load(lines)
    for number, theirs in enumerate((out, err), start=1):
        os.dup2(theirs, number)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update({"__name__": "__main__", "__builtins__": builtins, "__spec__": None, "__doc__": None})
    if path := request.get("file"):
        main["__file__"] = path
        sys.argv[:] = [path, *request["arguments"]]
        sys.path[0] = str(Path(path).parent)
        return compile(Path(path).read_bytes(), path, "exec")
    sys.argv[:] = ["-c", *request["arguments"]]
    return compile(request["code"], "<string>", "exec")
