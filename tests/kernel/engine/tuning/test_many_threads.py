"""Which number of threads is found where many want the GIL: the pool is simulated event by event, nothing is timed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from aiofeed.kernel.engine.tuning.threads import JobTiming, Score, ThreadTuner
from tests.kernel.engine.tuning.simulated_pool import Decoding, GilPool

GRID = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BATCH = 64
WORKS = {
    # Sleeps without the GIL, and holds it for what the engine itself does.
    "native chunks": Decoding(8e-6, 1.28e-3, pieces=1),
    "native": Decoding(20e-6, 1.28e-3),
    "cpu": Decoding(10e-6, 1.5e-3, computes=True),
    "Pillow that sleeps": Decoding(0.3e-3, 0.7e-3),
    "Pillow": Decoding(0.3e-3, 0.7e-3, computes=True),
    "half": Decoding(0.5e-3, 0.5e-3),
    "twentieth": Decoding(50e-6, 950e-6, computes=True),
    "Python": Decoding(1e-3, 0.0),
    "a little Python": Decoding(0.1e-3, 0.0, pieces=1),
    "costly to pass on": Decoding(0.2e-3, 0.8e-3, handover_s=60e-6),
    "slow reads": Decoding(50e-6, 5e-3),
    "two cores": Decoding(0.1e-3, 0.9e-3, computes=True, cores=2),
}
COMMON = ("native chunks", "cpu", "Pillow that sleeps", "Pillow", "Python", "slow reads")
# A job of every thread has to end before another number can be tried.
SETTLED = {2: 20, 4: 20, 16: 24, 32: 32, 64: 48, 128: 96}


@cache
def fixed(work: Decoding, threads: int) -> float:
    """Samples per second with so many threads."""
    pool = GilPool(replace(work, noise=0.1), threads=threads)
    pool.run(2 * threads * work.job)
    return pool.run(max(4 * threads * work.job, 4000))


def found(work: Decoding, most: int, noise: float, seed: int) -> tuple[GilPool, ThreadTuner]:
    tuner = ThreadTuner(most)
    pool = GilPool(replace(work, noise=noise), tuner, seed=seed)
    pool.run(SETTLED[most] * BATCH)
    return pool, tuner


def part_of_the_best(work: Decoding, most: int, noise: float, seed: int) -> float:
    _, tuner = found(work, most, noise, seed)
    best = max(fixed(work, threads) for threads in GRID if threads <= most)
    return fixed(work, tuner.threads) / best


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("name", WORKS)
def test_the_number_found_gives_what_the_best_of_a_grid_does(name: str, most: int) -> None:
    """Whether threads compute, sleep or wait for the GIL, the number found is as good as the best."""
    assert part_of_the_best(WORKS[name], most, 0.05, 0) >= (0.97 if name in COMMON else 0.93)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("most", SETTLED)
@pytest.mark.parametrize("name", WORKS)
def test_it_does_so_whatever_the_noise_and_the_cores(name: str, most: int, noise: float) -> None:
    """The same for other numbers of cores, and for samples that differ."""
    parts = [part_of_the_best(WORKS[name], most, noise, seed) for seed in range(3)]
    assert min(parts) >= 0.93


@pytest.mark.parametrize("name", ["Pillow that sleeps", "Pillow", "half", "Python", "a little Python"])
def test_threads_that_the_gil_cannot_feed_are_taken_away(name: str) -> None:
    """Of 64 threads some eight remain, after as many batches as 64 threads have in flight and a few more."""
    _, tuner = found(WORKS[name], 64, 0.1, 1)
    assert tuner.threads <= 8


@pytest.mark.parametrize("name", ["native chunks", "native", "cpu", "slow reads", "twentieth"])
def test_a_search_costs_little(name: str) -> None:
    """While it lasts, no more than half a second of 64 threads is lost."""
    pool, _ = found(WORKS[name], 64, 0.1, 1)
    best = max(fixed(WORKS[name], threads) for threads in GRID if threads <= 64)
    assert pool.now - pool.samples / best < 0.5


@pytest.mark.parametrize("job", [1, 4, 64])
@pytest.mark.parametrize("name", ["native chunks", "Pillow", "Python"])
def test_jobs_of_all_sizes_are_understood(name: str, job: int) -> None:
    """The size of a job decides when the number is found, not which."""
    work, tuner = replace(WORKS[name], job=job), ThreadTuner(32)
    pool = GilPool(replace(work, noise=0.05), tuner)
    pool.run(max(20 * BATCH, 64 * job * 3))
    assert fixed(work, tuner.threads) >= 0.95 * max(fixed(work, threads) for threads in GRID if threads <= 32)


def test_the_first_jobs_to_end_do_not_pass_for_all() -> None:
    """The first of 64 jobs that start together under the GIL waits for none; the work of all says so."""
    seen: list[JobTiming] = []

    class Listener(ThreadTuner):
        def observe(self, job: JobTiming) -> None:
            seen.append(job)

    work = Decoding(1e-3, 0.0, pieces=1, job=1)
    GilPool(work, Listener(64)).run(4)
    first = seen[0]
    assert first.wall_s == pytest.approx(first.cpu_s, rel=0.05)
    assert first.pool_cpu_s == pytest.approx(first.cpu_s, rel=0.05)
    score = Score(64)
    score.add(first)
    assert score.rate == pytest.approx(1000, rel=0.05)
