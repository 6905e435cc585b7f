"""Decode threads that share a GIL and cores, event by event, on a clock of their own."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from aiofeed.kernel.engine.tuning.threads import JobTiming, ThreadTuner


@dataclass(frozen=True)
class Decoding:
    """What decoding a sample takes.

    Args:
        held_s: on the processor, with the GIL.
        free_s: without it.
        computes: whether it is on the processor then; it sleeps otherwise.
        pieces: into how many of each the sample is divided.
        noise: standard deviation of the time of a sample, as a part of it.
        handover_s: until the next thread has the GIL, where one waits for it.
        cores: for the threads that compute without the GIL.
        job: samples of a job.
    """

    held_s: float
    free_s: float
    computes: bool = False
    pieces: int = 2
    noise: float = 0.0
    handover_s: float = 10e-6
    cores: int = 128
    job: int = 16


class Station:
    """Something that so many threads can have at a time; the others wait in order."""

    def __init__(self, places: int, handover_s: float = 0.0) -> None:
        self.free = places
        self.handover_s = handover_s
        self.queue: deque[tuple[Worker, float]] = deque()


@dataclass(eq=False)
class Worker:
    """A thread and its job. ``parts``: where it is to go next, for how long."""

    parts: list[tuple[Station | None, float, bool]] = field(default_factory=list)
    began: float = 0.0
    cpu_s: float = 0.0
    pool_cpu_s: float = 0.0
    threads: int = 0
    samples: int = 0
    listening: bool = False


class GilPool:
    """Runs jobs in as many threads as the tuner says, or in ``threads``."""

    def __init__(self, work: Decoding, tuner: ThreadTuner | None = None, *, threads: int = 0, seed: int = 0) -> None:
        self.work = work
        self.tuner = tuner
        self._threads = threads
        self.now = 0.0
        self.samples = self.running = 0
        self._random = random.Random(seed)
        self._gil = Station(1, work.handover_s)
        self._cores = Station(work.cores)
        self._events: list[tuple[float, int, Worker, Station | None, bool]] = []
        self._serial = self._jobs = self._parts = 0
        # Threads on the processor now, and the seconds of all of them so far.
        self._computing = 0
        self._cpu_s = 0.0

    @property
    def threads(self) -> int:
        return self._threads if self.tuner is None else self.tuner.threads

    def run(self, samples: int) -> float:
        """Decode so many samples; samples per second, what is done of others counts too."""
        began, first, parts = self.now, self.samples, self._parts
        while self.samples < first + samples:
            while self.running < self.threads:
                self.running += 1
                self._start(Worker())
            now, _, worker, station, computes = heapq.heappop(self._events)
            self._cpu_s += self._computing * (now - self.now)
            self.now = now
            self._computing -= computes
            self._parts += 1
            if station is not None:
                self._leave(station)
            self._next(worker)
        per_sample = self.work.pieces * ((self.work.held_s > 0) + (self.work.free_s > 0))
        return (self._parts - parts) / per_sample / (self.now - began)

    def _start(self, worker: Worker) -> None:
        work, gil = self.work, self._gil
        self._jobs += 1
        worker.parts, worker.cpu_s = [], 0.0
        # The first batch is divided among the threads.
        worker.samples = 1 if self._jobs <= self.threads else work.job
        for _ in range(worker.samples):
            factor = max(0.1, self._random.gauss(1, work.noise)) / work.pieces
            for _ in range(work.pieces):
                if work.held_s:
                    worker.parts.append((gil, work.held_s * factor, True))
                if work.free_s:
                    worker.parts.append((self._cores if work.computes else None, work.free_s * factor, work.computes))
            worker.cpu_s += work.pieces * factor * (work.held_s + (work.free_s if work.computes else 0.0))
        worker.parts.reverse()
        worker.began, worker.pool_cpu_s = self.now, self._cpu_s
        worker.threads = self.threads if self.running >= self.threads else 0
        worker.listening = self.tuner is not None and self.tuner.listening
        self._next(worker)

    def _next(self, worker: Worker) -> None:
        if not worker.parts:
            self._end(worker)
            return
        station, seconds, computes = worker.parts.pop()
        if station is None or station.free:
            self._begin(worker, station, seconds, computes)
        else:
            station.queue.append((worker, seconds))

    def _begin(
        self, worker: Worker, station: Station | None, seconds: float, computes: bool, late: float = 0.0
    ) -> None:
        if station is not None:
            station.free -= 1
        self._computing += computes
        self._serial += 1
        heapq.heappush(self._events, (self.now + late + seconds, self._serial, worker, station, computes))

    def _leave(self, station: Station) -> None:
        station.free += 1
        if station.queue:
            worker, seconds = station.queue.popleft()
            self._begin(worker, station, seconds, True, station.handover_s)

    def _end(self, worker: Worker) -> None:
        tuner = self.tuner
        self.samples += worker.samples
        if worker.listening and tuner is not None:
            same = worker.threads if worker.threads == self.threads and self.running >= self.threads else 0
            pool_cpu_s = self._cpu_s - worker.pool_cpu_s
            tuner.observe(JobTiming(worker.samples, self.now - worker.began, worker.cpu_s, same, 0, pool_cpu_s))
        if tuner is not None and self.samples >= 64:
            tuner.warm = True
        if self.running > self.threads:
            self.running -= 1
        else:
            self._start(worker)
