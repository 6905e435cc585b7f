"""How long a thread holds the GIL: looked at from another process, some thousand times a second.

CPython keeps the GIL's state in a word of ``_PyRuntime``: 1 while a thread holds it, 0 while none does. The process
that is measured finds the word (``flag_address``) and says where it is; this one reads it through ``/proc/<pid>/mem``
at random moments. The process that is measured has one thread and is not disturbed: no tracer stops it, no probe is in
its way, and no second thread wants its GIL, which would add what it costs to pass it on. The share of the moments at
which the word was 1, times the thread's CPU time, is the time for which it held the GIL. Only the share is measured by
the clock on the wall, and other programs that take the core stretch both its parts alike.

Linux only, and the measured process has to be a child, or readable by ptrace's rules.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import PROJECT
from benchmarks.worker import resolve

_TRIALS = 40
_SEARCHES = 8
_MOST_BYTES = 1 << 20
# Mean of the random pauses between two looks.
PAUSE_S = 0.0002


def flag_address() -> int:
    """Where this process keeps the word that is 1 while the GIL is held.

    It is the only word of ``_PyRuntime`` that is always 1 where it is read under the GIL (ctypes' ``string_at``) and
    always 0 where it is read without (``os.pread``, while no other thread wants the GIL).

    Raises:
        RuntimeError: there is no such word, or there are several.
    """
    import numpy as np

    base = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    size = min(_mapped_after(base), _MOST_BYTES) & ~3
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        # A thread of a library that wants the GIL in between spoils one search, and not the next.
        for _ in range(_SEARCHES):
            words = np.ones(size // 4, bool)
            for _ in range(_TRIALS):
                words &= np.frombuffer(ctypes.string_at(base, size), np.int32) == 1
                words &= np.frombuffer(os.pread(memory, size, base), np.int32) == 0
            found = np.flatnonzero(words)
            if len(found) == 1:
                return base + 4 * int(found[0])
    finally:
        os.close(memory)
    raise RuntimeError(f"{len(found)} words of _PyRuntime look like the GIL's flag, where one should")


def _mapped_after(address: int) -> int:
    """Bytes that can be read from ``address`` on."""
    end = address
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, allowed = line.split()[:2]
            first, last = (int(number, 16) for number in where.split("-"))
            # What follows by chance may be a library's guard page.
            if first <= end < last and allowed.startswith("r"):
                end = last
    return end - address


class Measured:
    """A process in which one thread works when told to, watched meanwhile. Close it by ``with``.

    Args:
        function: "module:function" that takes the options and returns a function to call; that returns the items done.
        options: plain values for it.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.held", function, json.dumps(dict(options))],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{function}: its process ended at once")
        self._address = json.loads(line)["address"]
        self._memory = os.open(f"/proc/{self._process.pid}/mem", os.O_RDONLY)

    def measure(self) -> dict[str, float]:
        """Let it work once: ``items``, ``cpu_s``, ``held_s`` and how many ``looks`` that rests on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        self._process.stdout.readline()  # it begins
        looks = held = 0
        while not answers.poll(0):
            held += os.pread(self._memory, 4, self._address) != b"\0\0\0\0"
            looks += 1
            time.sleep(random.uniform(0, 2 * PAUSE_S))
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return {**found, "looks": looks, "held_s": found["cpu_s"] * held / max(looks, 1)}

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._memory)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10.0)


def control(kind: str) -> Callable[[], int]:
    """Work of which it is known: "python" holds the GIL throughout, "hashing" a large buffer hardly ever."""
    import hashlib

    buffer = bytes(1 << 22)

    def work() -> int:
        ends = time.perf_counter() + 0.3
        while time.perf_counter() < ends:
            if kind == "hashing":
                hashlib.sha256(buffer)
        return 1

    return work


def main() -> None:
    """The measured process: a line each for the address, the beginning and what was done."""
    work = resolve(sys.argv[1])(**json.loads(sys.argv[2]))
    work()
    print(json.dumps({"address": flag_address()}), flush=True)
    while sys.stdin.readline():
        print("{}", flush=True)
        began = time.thread_time()
        items = work()
        print(json.dumps({"items": items, "cpu_s": time.thread_time() - began}), flush=True)


if __name__ == "__main__":
    main()
