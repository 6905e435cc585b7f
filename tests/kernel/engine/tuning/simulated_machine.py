"""A machine that decodes with a ``ThreadTuner``, on a clock of its own: cores, a GIL, an event loop, other programs.

Everything that an engine does for a job costs time under the GIL, in the decode thread and on the loop; the sizes of
jobs, and how many are ready, are those of the engine.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aiofeed.kernel.engine.tuning.jobs import JobSizer, batches_at_once, samples_per_job
from aiofeed.kernel.engine.tuning.threads import JobTiming, ThreadTuner

# A thread that computes passes the GIL on after so many seconds if others want it, and this is what that takes.
SWITCH_S = 5e-3
HANDOVER_S = 10e-6
# A job begins and ends with so many seconds under the GIL in its thread, and costs the loop so many.
JOB_S = 150e-6
LOOP_S = 90e-6
COSTS = 1.2, 1 / 1.2  # of a gamma distribution


@dataclass(frozen=True)
class Sample:
    """What decoding a sample takes.

    Args:
        held_s: seconds with the GIL.
        free_s: without it, on the processor if ``computes``; asleep otherwise.
        computes: see ``free_s``.
        memory_s: on the processor without the GIL, longer by the power 1.5 of the threads that do the same.
        native: a whole job is one call, so that the GIL is passed on once.
        nbytes: read and written.
        spread: standard deviation of a sample's time as a part of it; samples have a gamma distribution.
    """

    held_s: float = 0.0
    free_s: float = 0.0
    computes: bool = False
    memory_s: float = 0.0
    native: bool = False
    nbytes: int = 0
    spread: float = 0.1


@dataclass(eq=False)
class _Job:
    """A job in its thread; ``parts`` that are left: what they need, and seconds."""

    parts: list[tuple[str, float]]
    samples: int
    nbytes: int
    began: float
    pool_cpu_s: float
    threads: int
    listening: bool
    share: float
    cpu_s: float = 0.0


@dataclass
class Machine:
    """Decodes samples as the engine does.

    Args:
        work: the sample at a time.
        batch: samples of a batch.
        tuner: says how many threads; the pool is as large as its ``most``.
        cores: of the machine.
        load: how many times as long the processor takes at a time, for other programs.
        busy: whether the consumer waits for batches at a time.
    """

    work: Callable[[float], Sample]
    batch: int
    tuner: ThreadTuner
    cores: int
    seed: int = 0
    load: Callable[[float], float] = lambda now: 1.0
    busy: Callable[[float], bool] = lambda now: True
    now: float = 0.0
    samples: float = 0.0
    running: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._sizer = JobSizer()
        self._events: list[tuple[float, int, str, float, float, _Job | None]] = []
        self._serial = self._ready = self._delivered = 0
        self._free = {"gil": 1, "core": self.cores, "memory": 1 << 30, "sleep": 1 << 30}
        self._waiting: dict[str, deque[tuple[float, _Job | None]]] = {what: deque() for what in self._free}
        self._finished: deque[tuple[JobTiming, bool]] = deque()
        self._counted = 0  # finished jobs that the loop is about to count
        self._computing = self._cpu_s = 0.0
        self._in_memory = 0
        self._last_threads = self.tuner.threads

    def run(self, until: float) -> float:
        """Run until a time; returns the samples decoded in it, with parts of those that are not done."""
        first = self.samples
        self._refill()
        while self._events and self._events[0][0] < until:
            now, _, what, seconds, lasts, job = heapq.heappop(self._events)
            self._cpu_s += self._computing * (now - self.now)
            self.now = now
            self._leave(what, seconds, lasts, job)
            if job is None:
                self._observed()
            else:
                self._next(job)
        self.now = until
        return self.samples - first

    # --- the pool

    def _refill(self) -> None:
        """Let as many jobs be ready as the engine does."""
        threads = self.tuner.threads
        if threads != self._last_threads:
            self._last_threads = threads
            self.changes.append((self.now, threads))
        least, most = self._sizer.job_sizes(threads)
        most = min(most, max(64, self.batch))
        batches = max(2, batches_at_once(most, threads, self.batch, math.inf)) if self.tuner.warm else 2
        self._size = samples_per_job((least, most), threads, self.batch, batches)
        wanted = batches * math.ceil(self.batch / self._size)
        self._ready = max(self._ready, wanted - self.running - len(self._finished))
        while self._ready and self.running < threads:
            self._start()

    def _start(self) -> None:
        self._ready -= 1
        self.running += 1
        work, size, threads = self.work(self.now), self._size, self.tuner.threads
        gauss, shape = self._random.gammavariate, size / work.spread**2
        many = gauss(shape, 1 / shape)
        # Waking up is not always as fast.
        costs = JOB_S * gauss(*COSTS) / 2
        parts: list[tuple[str, float]] = [("gil", costs)]
        seconds = work.held_s + work.free_s + work.memory_s
        pieces = 1 if work.native else max(1, min(size, 8, math.ceil(size * seconds / 2e-3)))
        pieces = max(pieces, math.ceil(size * work.held_s / SWITCH_S))
        for _ in range(pieces):
            scale = many * size / pieces
            parts += [("gil", work.held_s * scale)] if work.held_s else []
            parts += [("core" if work.computes else "sleep", work.free_s * scale)] if work.free_s else []
            parts += [("memory", work.memory_s * scale)] if work.memory_s else []
        parts.append(("gil", costs))
        parts.reverse()
        busy = threads if self._busy() else 0
        job = _Job(parts, size, size * work.nbytes, self.now, self._cpu_s, busy, self.tuner.listening, 1 / len(parts))
        self._want(*job.parts.pop(), job)

    def _busy(self) -> bool:
        threads = self.tuner.threads
        return self.running >= threads - threads // 8 * 4

    def _next(self, job: _Job) -> None:
        self.samples += job.samples * job.share
        if job.parts:
            self._want(*job.parts.pop(), job)
        else:
            self._end(job)

    def _end(self, job: _Job) -> None:
        threads = self.tuner.threads
        wall_s, pool_cpu_s = self.now - job.began, self._cpu_s - job.pool_cpu_s
        same = job.threads if job.threads == threads and self._busy() and self.busy(self.now) else 0
        timing = JobTiming(job.samples, wall_s, min(job.cpu_s, wall_s), same, job.nbytes, pool_cpu_s)
        self._finished.append((timing, job.listening))
        self.running -= 1
        if self._ready and self.running < threads:
            self._start()
        self._loop()

    # --- the loop

    def _loop(self) -> None:
        if self._finished and not self._counted:
            self._counted = len(self._finished)
            self._want("gil", self._counted * LOOP_S, None)

    def _observed(self) -> None:
        for _ in range(self._counted):
            ended, listening = self._finished.popleft()
            self._sizer.observe(ended.wall_s, ended.samples, ended.cpu_s)
            self._sizer.observe_bytes(ended.nbytes, ended.samples)
            if listening:
                self.tuner.observe(ended)
            self._delivered += ended.samples
            self.tuner.warm = self._delivered >= self.batch
        self._counted = 0
        self._refill()
        self._loop()

    # --- what there is a limited number of

    def _want(self, what: str, seconds: float, job: _Job | None) -> None:
        if self._free[what]:
            self._take(what, seconds, job)
        else:
            self._waiting[what].append((seconds, job))

    def _take(self, what: str, seconds: float, job: _Job | None, late_s: float = 0.0) -> None:
        self._free[what] -= 1
        if what == "memory":
            self._in_memory += 1
            seconds *= self._in_memory**1.5
        lasts = seconds
        if what != "sleep":
            lasts *= self.load(self.now)
            self._computing += 0.0 if job is None else seconds / lasts  # the loop is no decode thread
        self._serial += 1
        heapq.heappush(self._events, (self.now + late_s + lasts, self._serial, what, seconds, lasts, job))

    def _leave(self, what: str, seconds: float, lasts: float, job: _Job | None) -> None:
        self._free[what] += 1
        self._in_memory -= what == "memory"
        if job is not None and what != "sleep":
            job.cpu_s += seconds
            self._computing -= seconds / lasts
        if self._waiting[what]:
            self._take(what, *self._waiting[what].popleft(), HANDOVER_S)
