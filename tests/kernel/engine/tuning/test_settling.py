"""Whether the tuner settles on what a given number of threads would decode, on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from aiofeed.kernel.engine.tuning.threads import ThreadTuner
from aiofeed.kernel.runtime import machine
from tests.kernel.engine.tuning.simulated_machine import Machine, Sample

CORES = (16, 32, 64, 128)
MS = (0.3, 1.28, 10.0)
KINDS = ("sleeping", "computing", "Pillow", "Python")
GRID = [(most, batch, ms, kind) for most in CORES for batch in (64, 256) for ms in MS for kind in KINDS]
QUICK = [
    case for case in GRID if case[:2] == (16, 64) or (case[:2] in ((64, 64), (128, 256)) and case[3] != "computing")
]
# Where threads copy, one is best: two take three times as long.
LARGE = Sample(free_s=0.1e-3, memory_s=1.3e-3, computes=True, nbytes=16 << 20)


@pytest.fixture(autouse=True)
def with_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated threads share a GIL, also if Python has none."""
    monkeypatch.setattr(machine, "has_gil", lambda: True)


def sample(kind: str, ms: float) -> Sample:
    seconds = ms * 1e-3
    return {
        "sleeping": Sample(free_s=seconds, native=True),
        "computing": Sample(free_s=seconds, native=True, computes=True),
        "Pillow": Sample(held_s=0.3 * seconds, free_s=0.7 * seconds, computes=True),
        "Python": Sample(held_s=seconds),
        "waiting": Sample(held_s=0.1e-3, free_s=5e-3),
    }[kind]


def quiet(now: float) -> float:
    return 1.0


@cache
def given(
    work: Sample, batch: int, threads: int, cores: int, load: Callable[[float], float] = quiet, seconds: float = 2.0
) -> float:
    """Samples per second with a given number of threads."""
    bare = Machine(lambda now: work, batch, ThreadTuner(threads, given=True), cores, load=load)
    bare.run(1.0)
    return bare.run(1.0 + seconds) / seconds


def best(work: Sample, batch: int, cores: int) -> float:
    grid = [threads for threads in (1, 4, 8, cores) if threads <= cores]
    return max(given(work, batch, threads, cores) for threads in grid)


def tuned(work: Sample, batch: int, cores: int, **options: object) -> Machine:
    return Machine(lambda now: work, batch, ThreadTuner(cores), cores, **options)  # type: ignore[arg-type]


def share_of_best(most: int, batch: int, ms: float, kind: str) -> float:
    work = sample(kind, ms)
    feeding = tuned(work, batch, most)
    feeding.run(1.0)
    return feeding.run(8.0) / 7.0 / best(work, batch, most)


@pytest.mark.parametrize(("most", "batch", "ms", "kind"), QUICK)
def test_from_the_second_second_on_it_is_as_fast_as_a_given_number(most: int, batch: int, ms: float, kind: str) -> None:
    """Whatever the cores, the batch and the sample: nine tenths of the best given number, searches included."""
    assert share_of_best(most, batch, ms, kind) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("most", "batch", "ms", "kind"), [case for case in GRID if case not in QUICK])
def test_it_is_so_for_other_cores_and_batches(most: int, batch: int, ms: float, kind: str) -> None:
    """The same for the rest of the grid."""
    assert share_of_best(most, batch, ms, kind) >= 0.9


@pytest.mark.parametrize(("ms", "seconds"), [(0.3, 12.0), (1.28, 20.0), (10.0, 20.0)])
@pytest.mark.parametrize("most", [16, 64])
def test_searches_take_two_per_cent(most: int, ms: float, seconds: float) -> None:
    """Where all threads are best, what fewer threads decode less is 2 % of the whole at most."""
    feeding = tuned(sample("sleeping", ms), 64, most)
    feeding.run(seconds)
    changes = [(at, threads) for at, threads in feeding.changes if at > 1.0]
    ends = [at for at, _ in changes[1:]] + [seconds]
    lost_s = sum((end - at) * (1 - threads / most) for (at, threads), end in zip(changes, ends, strict=False))
    assert lost_s <= 0.02 * (seconds - 1.0)


@pytest.mark.parametrize("kind", ["Pillow", "Python"])
@pytest.mark.parametrize(("most", "ms"), [(16, 0.3), (16, 1.28), (64, 0.3), (64, 1.28)])
def test_threads_that_want_the_gil_become_few_and_it_is_named(most: int, ms: float, kind: str) -> None:
    """The GIL's limit is that of the work, and a fraction of the threads remains."""
    work = sample(kind, ms)
    feeding = tuned(work, 64, most)
    feeding.run(24.0)
    limit = feeding.tuner.gil
    assert feeding.tuner.threads <= most // 2
    assert limit is not None
    assert 0.95 * work.held_s <= limit.held_s <= 1.4 * work.held_s + 20e-6


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cores", [2, 4, 16])
def test_one_thread_is_found_where_threads_wait_for_memory(cores: int, seed: int) -> None:
    """Threads that copy large samples count as on the processor; fewer are tried all the same, and no GIL is named."""
    feeding = tuned(LARGE, 8, cores, seed=seed)
    feeding.run(1.0)
    assert feeding.run(5.0) / 4.0 >= 0.9 * given(LARGE, 8, 1, cores)
    assert feeding.tuner.threads == 1
    assert feeding.tuner.gil is None


@pytest.mark.parametrize(
    ("first", "then"),
    [("Python", "sleeping"), ("Python", "computing"), ("Pillow", "waiting"), ("waiting", "Python"),
     ("sleeping", "Pillow"), ("computing", "Python")],
)  # fmt: skip
@pytest.mark.parametrize("most", [16, 64])
def test_work_that_changes_for_good_is_found(first: str, then: str, most: int) -> None:
    """Within some seconds, however long the intervals between searches have become."""
    before, after = sample(first, 0.3), sample(then, 1.28)
    feeding = Machine(lambda now: before if now < 5.0 else after, 64, ThreadTuner(most), most)
    feeding.run(11.0)
    assert feeding.run(14.0) / 3.0 >= 0.9 * best(after, 64, most)


@pytest.mark.parametrize("kind", ["sleeping", "computing"])
@pytest.mark.parametrize("ms", MS)
def test_samples_that_differ_by_chance_start_no_search(ms: float, kind: str) -> None:
    """Some take ten times as long as others: no more is tried than at the intervals of searches."""
    work = replace(sample(kind, ms), spread=2.0)
    feeding = tuned(work, 64, 16)
    feeding.run(1.0)
    assert feeding.run(12.0) / 11.0 >= 0.9 * given(work, 64, 16, 16, seconds=11.0)
    assert len(feeding.changes) <= 8


def loaded(now: float) -> float:
    """Other programs take three quarters of the processor for four seconds."""
    return 4.0 if 3.0 <= now < 7.0 else 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("most", "ms"), [(2, 1.28), (16, 1.28), (16, 10.0)])
def test_other_programs_do_not_mislead_it_for_long(most: int, ms: float, kind: str) -> None:
    """What is chosen while others use the processor is as good as a given number, then and after."""
    work = sample(kind, ms)
    feeding = tuned(work, 64, most, load=loaded)
    feeding.run(1.0)
    grid = [threads for threads in (1, 2, 4, most) if threads <= most]
    wanted = max(given(work, 64, threads, most, loaded, 13.0) for threads in grid)
    assert feeding.run(14.0) / 13.0 >= 0.9 * wanted


def test_while_the_training_does_not_wait_nothing_is_tried() -> None:
    """Decoding that is ahead of the training says nothing about threads."""
    feeding = tuned(sample("Python", 0.3), 64, 16, busy=lambda now: now > 4.0)
    feeding.run(4.0)
    assert not feeding.changes
    feeding.run(8.0)
    assert feeding.tuner.threads < 16
