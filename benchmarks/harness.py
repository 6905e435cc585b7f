"""Runs contenders in separate processes in interleaved rounds (A B C, B C A, ...), and samples their memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Race, Sample, per, turns
from benchmarks.worker import Measure as Measure
from benchmarks.worker import measured, resolve, tree_memory

PROJECT = Path(__file__).resolve().parent.parent

STEP_LIMIT_S = 300.0
"""A contender that does not answer within this time is killed."""

MEMORY_INTERVAL_S = 0.02

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}

BOUND_NOISE = 1.05
"""A contender that is faster than a bound by less than this factor, in the median, has not beaten it."""


class BenchmarkError(Exception):
    """A contender failed; the message contains its traceback."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        rounds: measurements of every contender.
        quick: tiny inputs, to check that everything runs.
        data: folder of generated inputs.
        progress: called with a line of progress.
        own_processes: whether each contender gets a process; False in tests, to import torch only once.
    """

    rounds: int
    quick: bool
    data: Path
    progress: Callable[[str], None] = field(default=lambda line: None)
    own_processes: bool = True

    def size(self, full: int, quick: int) -> int:
        """``full`` for real runs, ``quick`` for quick ones."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Contender:
    """One way of doing the work.

    Args:
        function: ``function(**options)``, in an importable module, is a context manager that sets up, warms up, and
            gives a ``Measure``.
        imports: "module" or "module:attribute", imported before the setup; memory is measured relative to that.
        bound: whether it is the best bare program for the work, which no other contender may beat, see
            ``check_bounds``. Its process keeps freed memory, or it would get the pages of each image from the system
            again, which takes up to half of its time.
        python: an interpreter with psutil, for a library that needs an environment of its own.
    """

    label: str
    function: Callable[..., AbstractContextManager[Measure]]
    options: Mapping[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    bound: bool = False
    python: str = sys.executable


class Process:
    """A contender's process. It imports on its start, then sets up and measures on request. A context manager."""

    def __init__(self, contender: Contender) -> None:
        self._label = contender.label
        function = contender.function
        task = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "options": dict(contender.options),
            "imports": contender.imports,
        }
        self._process = subprocess.Popen(
            [contender.python, "-m", "benchmarks.worker", json.dumps(task)],
            cwd=PROJECT,
            env={**os.environ, **(KEEP_FREED_MEMORY if contender.bound else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def imported(self) -> None:
        self._answer()

    def set_up(self) -> None:
        self._request()

    def measure(self) -> Sample:
        return self._request()

    def _request(self) -> Sample:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: _answer() reads its error, if it sent one
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Sample:
        assert self._process.stdout is not None
        killer = threading.Timer(STEP_LIMIT_S, self._process.kill)
        killer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            killer.cancel()
        if not line:
            raise BenchmarkError(f"{self._label}: its process ended or was killed after {STEP_LIMIT_S:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self._label}:\n{answer['error']}")
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # makes the process clean up and end
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Inline(ExitStack):
    """A contender in this process, with the interface of ``Process``, for tests; its figures are not meaningful."""

    pid = os.getpid()

    def __init__(self, contender: Contender) -> None:
        super().__init__()
        self._contender = contender

    def imported(self) -> None:
        for name in self._contender.imports:
            resolve(name)

    def set_up(self) -> None:
        self._measure = self.enter_context(self._contender.function(**self._contender.options))

    def measure(self) -> Sample:
        return measured(self._measure)


def start(contender: Contender, settings: Settings) -> Process | Inline:
    return Process(contender) if settings.own_processes else Inline(contender)


def interleave(contenders: Sequence[Contender], settings: Settings, dropped: dict[str, str] | None = None) -> Race:
    """Measure every contender once per round, in rotating order; each has one process for all rounds.

    ``dropped`` receives the labels of contenders that fail, with the reason; they get no samples, and the others
    continue. Without it the first failure is raised as ``BenchmarkError``.
    """
    samples = Race({contender.label: [] for contender in contenders})
    with ExitStack() as stack:
        processes: dict[str, Process | Inline] = {
            contender.label: stack.enter_context(start(contender, settings)) for contender in contenders
        }

        def each(labels: Sequence[str], act: Callable[[str], None]) -> None:
            for label in labels:
                try:
                    if label in samples:
                        act(label)
                except BenchmarkError as error:
                    if dropped is None:
                        raise
                    del samples[label]
                    dropped[label] = str(error).strip().splitlines()[-1]

        labels = list(processes)
        each(labels, lambda label: processes[label].imported())
        each(labels, lambda label: processes[label].set_up())
        for number in range(settings.rounds):

            def turn(label: str, number: int = number) -> None:
                settings.progress(f"round {number + 1} of {settings.rounds}: {label}")
                samples[label].append(processes[label].measure())

            each([labels[position] for position in turns(len(labels), number)], turn)
    if settings.own_processes and not settings.quick:
        check_bounds([contender.label for contender in contenders if contender.bound], samples)
    return samples


def check_bounds(bounds: Sequence[str], samples: Race) -> None:
    """Raise ``BenchmarkError`` if a contender is faster than all ``bounds``: then none of them is the best program."""
    for label in samples.keys() - set(bounds):
        ratios = {
            bound: statistics.median(per(samples.rate(label), samples.rate(bound)))
            for bound in bounds
            if bound in samples
        }
        if ratios and (least := min(ratios.values())) > BOUND_NOISE:
            raise BenchmarkError(f"{label} does {least:.2f} times the items of {' and of '.join(ratios)}: no bound")


def interleave_fresh(contenders: Sequence[Contender], settings: Settings) -> Race:
    """Measure every contender once per round, in rotating order, each time in a new process, one at a time."""
    samples = Race({contender.label: [] for contender in contenders})
    for number in range(settings.rounds):
        for position in turns(len(contenders), number):
            contender = contenders[position]
            settings.progress(f"round {number + 1} of {settings.rounds}: {contender.label}")
            with start(contender, settings) as process:
                process.imported()
                process.set_up()
                samples[contender.label].append(process.measure())
    return samples


def measure_memory(
    contender: Contender, settings: Settings, measures: Sequence[int] = (2,)
) -> tuple[list[int], list[Sample]]:
    """Peak memory of the process tree above its level after the imports, and the samples measured meanwhile.

    The contender runs alone, and measures ``measures[0]`` times, then ``measures[1]`` times, and so on. There is a peak
    for each of these, from the start up to its end.
    """
    with start(contender, settings) as process:
        process.imported()
        peaks: list[int] = []
        samples: list[Sample] = []
        level = highest = tree_memory(process.pid)
        done = threading.Event()

        def sample_memory() -> None:
            nonlocal highest
            while not done.wait(MEMORY_INTERVAL_S):
                highest = max(highest, tree_memory(process.pid))

        sampler = threading.Thread(target=sample_memory)
        sampler.start()
        try:
            process.set_up()
            for times in measures:
                samples += [process.measure() for _ in range(times)]
                time.sleep(2 * MEMORY_INTERVAL_S)
                peaks.append(highest - level)
        finally:
            done.set()
            sampler.join()
    return peaks, samples
