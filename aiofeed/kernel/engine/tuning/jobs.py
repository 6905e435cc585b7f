"""How many samples a decode job has, and how many batches are decoded at the same time. Pure arithmetic.

A job is a run of samples of one batch. Threads work on different batches first: a batch is cut only as far as its jobs
become long enough to hide what a job costs. With few batches to decode (the first of an epoch, or a limit that the user
gave) a batch is cut further, so that every thread has a part of it.
"""

from __future__ import annotations

import math

from aiofeed.kernel.core.limits import JOBS_READY

# Seconds of decoding in a job: at least the first, and the second for each thread. A job holds the GIL for some 0.1 ms
# in all, to be requested, started, counted and delivered, so that a tenth of it is used for jobs however many threads
# there are.
JOB_S = 0.05
JOB_THREAD_S = 0.001
# A batch is not cut into shorter jobs than this for the sake of threads that have none.
LEAST_S = 0.004
# Samples of a job as long as their decode time is unknown.
FIRST_SAMPLES = 16
# Most encoded bytes of a job with several samples: they are decoded while a processor cache still has them, and their
# memory is used again for the next job.
JOB_BYTES = 16 << 20
# Share of its time below which a job mainly waits (for storage, a network) rather than computes.
CPU_BOUND = 0.1
# Threads that together use this part of a core may wait for the GIL, however little each of them computes. Or they wait
# for something else: at least this part of their time counts, so that slow samples still have jobs of their own.
GIL_BOUND = 0.7
GIL_COUNTS = 0.25


class JobSizer:
    """Chooses the size of decode jobs from moving averages of decode time and encoded bytes per sample."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self._bytes = 0.0
        self._threads = 1

    def observe_bytes(self, nbytes: int, samples: int) -> None:
        """Update the average with the encoded bytes of some samples together."""
        per_sample = nbytes / max(samples, 1)
        self._bytes += (per_sample - self._bytes) * (0.2 if self._bytes else 1.0)

    def observe(self, seconds: float, samples: int, cpu_s: float = 0.0) -> None:
        """Update the average with the seconds that some samples took together, ``cpu_s`` of them on the processor."""
        per_sample = work_s(seconds, cpu_s, self._threads) / max(samples, 1)
        self.seconds += (per_sample - self.seconds) * (0.2 if self.seconds else 1.0)

    def job_sizes(self, threads: int) -> tuple[int, int]:
        """Return how many samples a job should have at least and at most, whatever the size of a batch."""
        self._threads = threads
        if self.seconds == 0.0:
            return 1, FIRST_SAMPLES
        most_s = min(max(JOB_S, threads * JOB_THREAD_S), self.seconds * JOB_BYTES / max(self._bytes, 1.0))
        return max(1, int(min(LEAST_S, most_s) / self.seconds)), max(1, int(most_s / self.seconds))


def work_s(seconds: float, cpu_s: float, threads: int) -> float:
    """Return the seconds of a job that are work, if ``cpu_s`` of them were on the processor, beside so many threads.

    If the samples are CPU-bound, only ``cpu_s`` counts. The rest is waiting for the GIL or for a core: counted as
    work, it would make jobs smaller, which makes threads wait for each other even more.
    """
    if cpu_s > seconds * CPU_BOUND:
        return cpu_s
    return max(cpu_s, GIL_COUNTS * seconds) if cpu_s > seconds * GIL_BOUND / threads else seconds


def batches_at_once(job_size: int, threads: int, batch_size: int, most_samples: float) -> int:
    """Return how many batches should be decoded, or be finished, at a time, so that every thread has jobs ready.

    Args:
        job_size: Samples of a job.
        threads: Decode threads.
        batch_size: Samples of a batch.
        most_samples: Samples for which there is memory.
    """
    samples = min(JOBS_READY * threads * min(job_size, batch_size), most_samples)
    return math.ceil(samples / batch_size)


def samples_per_job(sizes: tuple[int, int], threads: int, batch_size: int, batches: int) -> int:
    """Return how many samples a job has if so many batches are decoded at the same time.

    ``sizes`` as of ``JobSizer.job_sizes``.
    """
    least, most = sizes
    even = -(-batches * batch_size // threads)  # more would leave a thread without a job
    jobs = -(-batch_size // min(most, max(least, even)))
    return -(-batch_size // jobs)
