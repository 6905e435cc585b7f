"""Worker processes of ``engine="process"`` that are forked from the tests' process instead of started afresh.

A new interpreter that imports torch takes more than a second of CPU time; a fork has imported it already. Tests of how
workers start and end, `tests/processes`, start new ones, and so do tests of libraries that are not safe in a fork
because they have threads of their own in native code (obstore, Arrow).
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import types
import warnings

import torch

HIGHEST_DESCRIPTOR = 4096


class ForkedProcess:
    """What a worker's handle uses of ``subprocess.Popen``, for the command ``python ... -c PROGRAM``.

    Attributes:
        pid: Process id of the child.
        returncode: Set by the handle.
    """

    returncode: int | None = None

    def __init__(self, command: list[str], *, stdin: int, pass_fds: tuple[int, ...], env: dict[str, str]) -> None:
        *_, option, program = command
        assert (option, stdin) == ("-c", subprocess.DEVNULL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of processes with threads.
            self.pid: int = os.fork()
        if self.pid == 0:
            run_in_fork(program, pass_fds)


def run_in_fork(program: str, descriptors: tuple[int, ...]) -> None:
    """Run a program in this process, a fork, with the standard streams and some descriptors only; exit."""
    status = 1
    try:
        gc.freeze()  # The feeders of the parent are not collected here.
        signal.set_wakeup_fd(-1)
        torch.set_num_threads(1)  # A fork does not have OpenMP's threads.
        first = 3
        for descriptor in sorted(descriptors):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, HIGHEST_DESCRIPTOR)
        exec(program, {"__name__": "__main__"})
        status = 0
    finally:
        os._exit(status)


FORKING = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})
"""The module ``subprocess``, as a worker's handle uses it, with a ``Popen`` that forks."""
