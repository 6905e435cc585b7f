"""The timing of decode jobs, and the score of a thread count. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobTiming:
    """The time that a decode job took.

    Args:
        samples: decoded samples.
        wall_s: seconds from its start to its end.
        cpu_s: seconds of its thread on the processor.
        threads: threads that were at work from its start to its end; 0 if that changed or some were idle.
        nbytes: bytes that it read and wrote.
        pool_cpu_s: seconds of all threads on the processor from its start to its end; 0 if unknown.
    """

    samples: int
    wall_s: float
    cpu_s: float
    threads: int
    nbytes: int = 0
    pool_cpu_s: float = 0.0


@dataclass(eq=False)
class Score:
    """The jobs that ran with one thread count."""

    threads: int
    jobs: int = 0
    samples: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    nbytes: int = 0
    pool_cpu_s: float = 0.0

    def add(self, job: JobTiming) -> None:
        """Count one job."""
        self.jobs += 1
        self.samples += job.samples
        self.nbytes += job.nbytes
        # The clocks are read one after the other; a job cannot have used more processor time than passed.
        self.wall_s += max(job.wall_s, job.cpu_s)
        self.cpu_s += job.cpu_s
        self.pool_cpu_s += job.pool_cpu_s

    @property
    def rate(self) -> float:
        """Samples per second of all threads together."""
        # The jobs that end first had to wait least: the work of all threads shows how long the others wait.
        jobs = min(self.threads, self.pool_cpu_s / self.cpu_s) if self.pool_cpu_s and self.cpu_s else self.threads
        return jobs * self.samples / self.wall_s if self.wall_s else 0.0

    @property
    def cores(self) -> float:
        """The number of cores that all threads use together."""
        return self.rate * self.cpu_s / self.samples if self.wall_s else self.threads

    @property
    def at_work(self) -> float:
        """The part of its time that a thread is on the processor."""
        return self.cores / self.threads

    @property
    def cpu_per_sample(self) -> float:
        """Seconds of processor time per sample."""
        return self.cpu_s / self.samples
