"""Tests of the size of decode jobs and of how many batches are decoded at the same time, for 2 to 128 threads."""

from __future__ import annotations

import itertools
import math

import pytest

from aiofeed.kernel.engine.tuning.jobs import (
    FIRST_SAMPLES,
    JOB_BYTES,
    JOB_S,
    JOB_THREAD_S,
    LEAST_S,
    JobSizer,
    batches_at_once,
    samples_per_job,
)

THREADS = (2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 7, 32, 64, 256, 1000)
SECONDS = (1e-5, 1e-4, 0.00128, 0.004, 0.03, 0.2)


def sizer_of(seconds: float, nbytes: int = 0) -> JobSizer:
    """A sizer that has seen samples of so many seconds and bytes."""
    sizer = JobSizer()
    sizer.observe(seconds * 10, 10)
    sizer.observe_bytes(nbytes * 10, 10)
    return sizer


def test_waiting_for_the_gil_does_not_shrink_jobs() -> None:
    """If CPU time is a good part of the wall-clock time, only CPU time counts."""
    sizer = JobSizer()
    sizer.observe(0.064 * 4, 64, 0.064)
    assert sizer.seconds == pytest.approx(0.001)


@pytest.mark.parametrize("threads", [16, 32, 64, 128])
def test_many_threads_that_wait_for_the_gil_shrink_jobs_less(threads: int) -> None:
    """Threads that use a core together may wait for the GIL, or for storage: a quarter of their time counts."""
    sizer = JobSizer()
    sizer.job_sizes(threads)
    sizer.observe(threads * 0.001, 1, 0.001)
    assert sizer.seconds == pytest.approx(threads * 0.001 / 4)
    sizer = JobSizer()
    sizer.job_sizes(threads)
    sizer.observe(threads * 0.001, 1, 0.0001)
    assert sizer.seconds == pytest.approx(threads * 0.001)


def test_slow_samples_that_compute_a_little_have_small_jobs() -> None:
    """A sample that waits 50 ms and computes for one has a job of few samples, and a batch is cut for all threads."""
    sizer = JobSizer()
    sizer.job_sizes(64)
    sizer.observe(0.05, 1, 0.001)
    least, most = sizer.job_sizes(64)
    assert least == 1
    assert most <= 5


def test_a_decoder_that_sleeps_has_small_jobs() -> None:
    """If there is hardly any CPU time, wall-clock time counts."""
    sizer = JobSizer()
    sizer.observe(1.0, 10, 0.001)
    assert sizer.job_sizes(2) == (1, 1)


def test_jobs_of_large_samples_are_small() -> None:
    """A job has at most 16 MiB of encoded samples, or one sample."""
    assert sizer_of(0.00001, 8_000_000).job_sizes(2) == (2, 2)
    assert sizer_of(0.00001, JOB_BYTES * 2).job_sizes(64) == (1, 1)


def test_the_first_job_has_a_fixed_size() -> None:
    """Nothing is known before the first decode: a batch may be cut into single samples."""
    assert JobSizer().job_sizes(64) == (1, FIRST_SAMPLES)


@pytest.mark.parametrize("threads", THREADS)
def test_jobs_become_longer_with_the_threads(threads: int) -> None:
    """All threads together start at most one job per ``JOB_THREAD_S``, whatever their number."""
    for seconds in SECONDS[:-2]:
        _, most = sizer_of(seconds).job_sizes(threads)
        assert most * seconds <= max(JOB_S, threads * JOB_THREAD_S) < (most + 1.01) * seconds


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("batch_size", BATCHES)
def test_every_thread_has_work(threads: int, batch_size: int) -> None:
    """With the chosen size and number of batches there are more jobs than threads, and no batch more than needed."""
    for seconds in SECONDS:
        sizes = sizer_of(seconds).job_sizes(threads)
        batches = batches_at_once(sizes[1], threads, batch_size, math.inf)
        size = samples_per_job(sizes, threads, batch_size, batches)
        jobs = batches * math.ceil(batch_size / size)
        assert jobs >= 2 * threads
        assert (batches - 1) * batch_size < 2 * threads * sizes[1]
        assert size <= sizes[1]


@pytest.mark.parametrize(("threads", "batch_size"), [*itertools.product(THREADS, BATCHES)])
def test_few_batches_are_cut_for_all_threads(threads: int, batch_size: int) -> None:
    """With one batch each thread has a part of it, unless the parts would take less than ``LEAST_S``."""
    for seconds in SECONDS:
        sizes = sizer_of(seconds).job_sizes(threads)
        size = samples_per_job(sizes, threads, batch_size, batches=1)
        jobs = math.ceil(batch_size / size)
        assert jobs >= min(threads, batch_size) / 2 or size * seconds >= LEAST_S / 2 or jobs == 1
        assert size * seconds >= min(LEAST_S / 4, batch_size * seconds) or size == -(-batch_size // threads)


def test_jobs_shrink_with_the_memory() -> None:
    """If there is memory for fewer samples than the threads would have, all of them still get a part."""
    sizes = sizer_of(0.001).job_sizes(64)
    batches = batches_at_once(sizes[1], 64, 64, most_samples=512)
    assert batches == 8
    assert samples_per_job(sizes, 64, 64, batches) == 8


def test_a_batch_is_cut_evenly() -> None:
    """No job is much smaller than the others."""
    assert samples_per_job((1, 50), 2, 64, batches=8) == 32
    assert samples_per_job((1, 10**9), 2, 64, batches=2) == 64
