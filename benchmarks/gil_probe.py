"""Measures how long a thread holds the GIL, by sampling from another process, some thousand times a second.

CPython stores the GIL's state in a word of ``_PyRuntime``: 1 while a thread holds it, else 0. The measured process
finds the word (``flag_address``) and sends its address; this process reads it through ``/proc/<pid>/mem`` at random
times. The measured process has one thread and is not disturbed: no tracer stops it, and no second thread requests its
GIL, which would add the cost of passing it on. The share of samples with 1, times the thread's CPU time, is the time
for which it held the GIL. Only the share depends on wall-clock time, and other programs on the same core stretch both
of its parts alike.

Linux only; the measured process has to be a child, or readable by ptrace's rules.
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
# Mean of the random pauses between two samples.
PAUSE_S = 0.0002


def flag_address() -> int:
    """Address of this process's word that is 1 while the GIL is held.

    It is the only word of ``_PyRuntime`` that is always 1 when read with the GIL (ctypes' ``string_at``) and always 0
    when read without (``os.pread``, while no other thread wants the GIL).

    Raises:
        RuntimeError: there is no such word, or there are several.
    """
    import numpy as np

    base = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    size = min(_mapped_after(base), _MOST_BYTES) & ~3
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        # Search again: a library's thread that takes the GIL in between makes one search fail.
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
            # The next mapping may be a library's guard page.
            if first <= end < last and allowed.startswith("r"):
                end = last
    return end - address


class ProbedProcess:
    """A process with one thread that works on request, and is sampled meanwhile. A context manager.

    Args:
        function: "module:function"; takes the options and returns the work, a function that returns a number of items.
        options: plain values for it.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gil_probe", function, json.dumps(dict(options))],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{function}: its process ended during its start")
        self._address = json.loads(line)["address"]
        self._memory = os.open(f"/proc/{self._process.pid}/mem", os.O_RDONLY)

    def measure(self) -> dict[str, float]:
        """Work once; returns ``items``, ``cpu_s``, ``held_s`` and the number of ``probes``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        self._process.stdout.readline()  # the work begins
        probes = held = 0
        while not answers.poll(0):
            held += os.pread(self._memory, 4, self._address) != b"\0\0\0\0"
            probes += 1
            time.sleep(random.uniform(0, 2 * PAUSE_S))
        sample: dict[str, float] = json.loads(self._process.stdout.readline())
        return {**sample, "probes": probes, "held_s": sample["cpu_s"] * held / max(probes, 1)}

    def __enter__(self) -> ProbedProcess:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._memory)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10.0)


def control(kind: str) -> Callable[[], int]:
    """Work with a known share: "python" always holds the GIL, "hashing" a large buffer hardly ever."""
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
    """The measured process: prints a line with the address, and for each request a line at its start and its end."""
    work = resolve(sys.argv[1])(**json.loads(sys.argv[2]))
    work()
    print(json.dumps({"address": flag_address()}), flush=True)
    while sys.stdin.readline():
        print("{}", flush=True)
        started = time.thread_time()
        items = work()
        print(json.dumps({"items": items, "cpu_s": time.thread_time() - started}), flush=True)


if __name__ == "__main__":
    main()
