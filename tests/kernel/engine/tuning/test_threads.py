"""Which numbers of threads and reads are found, as arithmetic: workloads are simulated, nothing is timed."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

import pytest

from aiofeed.kernel.engine.concurrency import REPORT_AFTER_S, Tuner
from aiofeed.kernel.engine.tuning.threads import JOBS, GilLimit, JobTiming, Score, ThreadTuner, gil_limit, gil_message
from aiofeed.kernel.runtime import machine

BATCH = 64


@dataclass(frozen=True)
class Work:
    """What a sample takes.

    Args:
        held_s: under the GIL.
        free_s: on the processor without it.
        wait_s: off it, for storage.
        handover: how much longer what is held takes where another thread wants the GIL.
        cores: that the threads have between them.
        noise: standard deviation of a job's time, as a part of it.
        queued: part of a job's time that its thread waits for a core that another program has.
        memory_s: on the processor, for memory: that of ``threads ** 1.5`` where there are more.
        mapped_s: off it, beside each other thread, for memory that the system maps for one at a time.
        nbytes: that it copies.
    """

    held_s: float = 0.0
    free_s: float = 0.0
    wait_s: float = 0.0
    handover: float = 0.0
    cores: int = 64
    noise: float = 0.0
    queued: float = 0.0
    memory_s: float = 0.0
    mapped_s: float = 0.0
    nbytes: int = 0

    def cpu(self, threads: int) -> float:
        """Seconds of a processor, per sample, where so many threads are at it."""
        return self.held_s + self.free_s + self.memory_s * threads**1.5

    def seconds(self, threads: int) -> float:
        """Of a thread, per sample, where so many are at it."""
        held = self.held_s * (1 + (self.handover if threads > 1 else 0.0))
        memory = self.memory_s * threads**1.5 + self.mapped_s * (threads - 1)
        alone = held + self.free_s + self.wait_s + memory
        by_gil = held * threads
        by_cores = (held + self.free_s) * threads / self.cores
        return max(alone, by_gil, by_cores)

    def rate(self, threads: int) -> float:
        """Samples per second."""
        return threads / self.seconds(threads)


@dataclass
class Pool:
    """Threads that always have something to do, as far as ``share`` of their jobs goes."""

    tuner: ThreadTuner
    random: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0
    samples: int = 0
    used: list[int] = field(default_factory=list)
    _running: list[tuple[float, int, JobTiming | None, int]] = field(default_factory=list)
    _serial: int = 0

    def __post_init__(self) -> None:
        self.tuner.warm = True

    def batches(self, work: Work, count: int, *, saturated: bool = True) -> float:
        """Decode so many batches; samples per second."""
        began, goal = self.now, self.samples + count * BATCH
        start = self.samples
        while self.samples < goal:
            while len(self._running) < self.tuner.threads:
                self._start(work, saturated)
            end, _, job, samples = heapq.heappop(self._running)
            self.now = max(self.now, end)
            self.samples += samples
            before = self.tuner.threads
            if job is not None:
                self.tuner.observe(job)
            self.used.append(self.tuner.threads)
            if self.tuner.threads != before:
                # What runs on was begun beside another number of threads.
                self._running = [(at, serial, None, n) for at, serial, _, n in self._running]
        return (self.samples - start) / (self.now - began)

    def _start(self, work: Work, saturated: bool) -> None:
        threads = self.tuner.threads
        samples = -(-BATCH // threads)
        wall = samples * work.seconds(threads) * max(0.2, self.random.gauss(1, work.noise))
        cpu = samples * work.cpu(threads)
        queued = wall * work.queued / (1 - work.queued)
        at_work, nbytes = threads if saturated else 0, samples * work.nbytes
        job = JobTiming(samples, wall + queued, cpu, at_work, nbytes) if self.tuner.listening else None
        self._serial += 1
        heapq.heappush(self._running, (self.now + wall + queued, self._serial, job, samples))


GIL_BOUND = Work(held_s=90e-6, free_s=10e-6, handover=0.4)
CPU_BOUND = Work(held_s=20e-6, free_s=1.5e-3)
WAITING = Work(held_s=20e-6, wait_s=5e-3)
MIXED = Work(held_s=100e-6, free_s=300e-6)
WORKS = {"gil": GIL_BOUND, "cpu": CPU_BOUND, "waiting": WAITING, "mixed": MIXED}


def best(work: Work, most: int) -> float:
    return max(work.rate(threads) for threads in range(1, most + 1))


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", WORKS)
def test_after_twenty_batches_it_is_within_five_per_cent_of_the_best_number(name: str, most: int, noise: float) -> None:
    """Whatever the threads wait for, and whatever there is of them, the number found gives what the best would."""
    work = replace(WORKS[name], noise=noise)
    for seed in range(5):
        pool = Pool(ThreadTuner(most), random.Random(seed))
        pool.batches(work, 20)
        found = pool.batches(replace(work, noise=0.0), 20)
        assert found >= 0.95 * best(work, most), (pool.used, seed)


@pytest.mark.parametrize("cores", range(1, 17))
def test_cores_that_other_programs_use_too_are_all_used(cores: int) -> None:
    """If threads wait for cores that other programs have, all of them stay: fewer threads decode less."""
    pool = Pool(ThreadTuner(cores))
    pool.batches(replace(CPU_BOUND, queued=0.5), 20)
    assert pool.batches(replace(CPU_BOUND, queued=0.5), 200) >= 0.9 * CPU_BOUND.rate(cores) / 2


def test_threads_of_one_core_each_are_never_taken_away_to_look() -> None:
    """Threads that do not wait leave nothing to find out: no batch is decoded by fewer."""
    pool = Pool(ThreadTuner(16))
    pool.batches(replace(CPU_BOUND, noise=0.05), 500)
    assert set(pool.used) == {16}


def test_a_slow_consumer_takes_no_thread_away() -> None:
    """Jobs beside idle threads say nothing."""
    pool = Pool(ThreadTuner(4))
    pool.batches(GIL_BOUND, 100, saturated=False)
    assert set(pool.used) == {4}


@pytest.mark.parametrize(("first", "then"), [("gil", "cpu"), ("cpu", "gil"), ("mixed", "gil"), ("gil", "mixed")])
@pytest.mark.parametrize("most", [2, 4, 16])
def test_work_that_changes_is_followed(first: str, then: str, most: int) -> None:
    """Other samples in the middle of an epoch: the number that suits them is found within 60 batches."""
    pool = Pool(ThreadTuner(most))
    pool.batches(WORKS[first], 200)
    pool.batches(WORKS[then], 60)
    assert pool.batches(WORKS[then], 20) >= 0.95 * best(WORKS[then], most), pool.used


def test_other_work_is_looked_at_at_once() -> None:
    """However long the next look is away: samples that take more show by themselves."""
    pool = Pool(ThreadTuner(2))
    pool.batches(GIL_BOUND, 20)
    assert pool.tuner.threads == 1
    pool.tuner._retry_s = 1e9
    pool.batches(CPU_BOUND, 60)
    assert pool.tuner.threads == 2


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("most", [2, 4, 16])
def test_noise_makes_nothing_flap(name: str, most: int) -> None:
    """Over thousands of noisy batches the number changes rarely, and what the looks cost stays below 3 %."""
    work = replace(WORKS[name], noise=0.1)
    pool = Pool(ThreadTuner(most))
    pool.batches(work, 50)
    at = len(pool.used)
    rate = pool.batches(work, 3000)
    changes = sum(a != b for a, b in zip(pool.used[at:], pool.used[at + 1 :], strict=False))
    assert changes <= 60
    assert rate >= 0.94 * best(work, most)


def test_neighbours_that_give_the_same_do_not_take_turns() -> None:
    """A second thread that brings 5 % is neither worth adding nor worth taking away."""
    bare = ThreadTuner(2)
    bare.warm = True
    for threads, rate in ((2, 1.05), (1, 1.0)):
        while bare.threads == threads and bare._search is not None:
            bare.observe(JobTiming(10, 10 * threads / rate, 7.0, threads))
    assert bare.threads == 2


@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_the_user_said_stays(most: int) -> None:
    """A given number of threads is that number, and is not measured."""
    tuner = ThreadTuner(most, given=True)
    Pool(tuner).batches(GIL_BOUND, 50)
    assert tuner.threads == most
    assert not tuner.listening


def test_jobs_before_the_first_batch_and_the_first_of_each_thread_say_nothing() -> None:
    """They import modules and fill caches: whatever they take, nothing else is tried."""
    tuner = ThreadTuner(2)
    for _ in range(50):
        tuner.observe(JobTiming(10, 2.0, 1.0, 2))
    assert tuner.threads == 2
    tuner = ThreadTuner(2)
    tuner.warm = True
    for _ in range(2 + JOBS - 1):
        tuner.observe(JobTiming(10, 2.0, 1.0, 2))
    assert tuner.threads == 2
    tuner.observe(JobTiming(10, 2.0, 1.0, 2))
    assert tuner.threads == 1


@pytest.mark.parametrize("most", [2, 4])
def test_a_look_that_the_consumer_interrupts_is_given_up(most: int) -> None:
    """Where a number is being tried and jobs stop to say anything, the number from before comes back."""
    pool = Pool(ThreadTuner(most))
    pool.batches(GIL_BOUND, 20)
    assert pool.tuner.threads == 1
    while pool.tuner.threads == 1:
        pool.batches(GIL_BOUND, 1)
    pool.batches(GIL_BOUND, 60, saturated=False)
    assert pool.tuner.threads == 1


def test_a_first_look_that_the_consumer_interrupts_begins_again() -> None:
    """Before anything was found out, all threads come back, and the look begins anew."""
    pool = Pool(ThreadTuner(2))
    while pool.tuner.threads == 2:
        pool.batches(GIL_BOUND, 1)
    pool.batches(GIL_BOUND, 120, saturated=False)
    assert pool.tuner.threads == 2
    pool.batches(GIL_BOUND, 20)
    assert pool.tuner.threads == 1


def test_known_work_is_measured_seldom() -> None:
    """Once the number is found, one job in eight is measured."""
    pool = Pool(ThreadTuner(2))
    pool.batches(CPU_BOUND, 20)
    assert sum(pool.tuner.listening for _ in range(80)) == 10


@pytest.fixture(autouse=True)
def with_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated threads share a GIL, also if Python has none."""
    monkeypatch.setattr(machine, "has_gil", lambda: True)


# --- the GIL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 4, 16])
def test_the_gil_is_found_to_be_the_limit_and_how_much_of_a_sample_is_under_it(most: int) -> None:
    """The figures are those of the work: what is held, and the samples per second that come of it."""
    pool = Pool(ThreadTuner(most))
    pool.batches(GIL_BOUND, 30)  # 0.2 s
    limit = pool.tuner.gil
    assert limit is not None
    assert limit.threads == 1
    assert limit.cores == 1.0
    assert 90e-6 <= limit.held_s <= 101e-6
    assert limit.ceiling == pytest.approx(1 / limit.held_s)


@pytest.mark.parametrize("name", ["cpu", "waiting"])
@pytest.mark.parametrize("most", [2, 16])
def test_nothing_else_is_taken_for_the_gil(name: str, most: int) -> None:
    """Neither storage that is waited for nor busy cores are the GIL's doing."""
    pool = Pool(ThreadTuner(most))
    pool.batches(replace(WORKS[name], noise=0.05), 100)
    assert pool.tuner.gil is None


# As measured of files of 8 MB whose bytes become a tensor: 1.4 ms alone; two at a time each take 3.8 ms and wait for 1.
COPYING = Work(free_s=0.1e-3, memory_s=1.3e-3, mapped_s=1e-3)
# Memory that nobody has touched yet is mapped for one thread at a time, as often as it is given back.
MAPPING = Work(free_s=1.2e-3, mapped_s=1.25e-3, nbytes=16 << 20)


@pytest.mark.parametrize("most", [2, 4, 16])
@pytest.mark.parametrize("work", [COPYING, MAPPING])
def test_memory_is_not_taken_for_the_gil(work: Work, most: int) -> None:
    """Threads that copy fight for memory, or wait for it; both look like the GIL where only time is looked at."""
    for seed in range(5):
        pool = Pool(ThreadTuner(most), random.Random(seed))
        pool.batches(replace(work, noise=0.05), 100)
        assert pool.tuner.gil is None


@pytest.mark.parametrize("nbytes", [0, 2048, 150_000, 1 << 20])
def test_the_gil_is_found_beside_copying(nbytes: int) -> None:
    """Samples of up to 1 MiB do not count as copying, however fast they are."""
    pool = Pool(ThreadTuner(2))
    pool.batches(replace(GIL_BOUND, nbytes=nbytes), 20)
    assert pool.tuner.gil is not None


def test_what_it_costs_to_pass_the_gil_on_is_its_own() -> None:
    """Two threads that pass the GIL to and fro use more processor time per sample, and the GIL is still found."""
    one, two = Score(1), Score(2)
    one.add(JobTiming(1000, 0.110, 0.105, 1))
    two.add(JobTiming(1000, 0.300, 0.180, 2))
    limit = gil_limit(one, two)
    assert limit is not None
    assert limit.held_s == pytest.approx(105e-6, rel=0.01)


@pytest.mark.parametrize(("cpu_2_ms", "blamed"), [(1.4, True), (2.0, True), (2.8, False), (3.8, False)])
def test_threads_that_slow_each_other_on_the_processor_are_not_gil_bound(cpu_2_ms: float, blamed: bool) -> None:
    """If two threads gain nothing even without waiting, memory is the limit."""
    one, two = Score(1), Score(2)
    one.add(JobTiming(100, 0.140, 0.139, 1))
    two.add(JobTiming(100, 0.1 * cpu_2_ms / 0.75, 0.1 * cpu_2_ms, 2))
    assert (gil_limit(one, two) is not None) == blamed


def test_without_a_gil_it_is_never_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a free-threaded build, threads that decode no more than one wait for something else."""
    monkeypatch.setattr(machine, "has_gil", lambda: False)
    pool = Pool(ThreadTuner(4))
    pool.batches(GIL_BOUND, 20)
    assert pool.tuner.threads == 1
    assert pool.tuner.gil is None


def test_the_gil_is_forgotten_where_work_changes() -> None:
    """It is what limits now, not what once did."""
    pool = Pool(ThreadTuner(2))
    pool.batches(GIL_BOUND, 40)
    assert pool.tuner.gil is not None
    pool.batches(CPU_BOUND, 60)
    assert pool.tuner.gil is None


def test_the_message_names_the_gil_the_figures_and_the_way_out() -> None:
    """What is held, where one process stops, and what to do."""
    limit = GilLimit(1, 100e-6)
    message = gil_message(limit, cores=4, turbo=True)
    for part in ("GIL-bound: 100 us", "10,000 samples/s", "1 of 4 decode threads", "aiofeed[turbo]", '"process:4"'):
        assert part in message
    assert "turbo" not in gil_message(limit, cores=4, turbo=False)
    # 64 cores, of which one process can use four: 16 processes.
    assert 'engine="process:16"' in gil_message(GilLimit(6, 1e-4, 4.0), cores=64, turbo=False)


def test_the_gil_is_told_of_once() -> None:
    """News is new once."""
    tuner = Tuner(decode_threads=2, threads_given=False, read_concurrency=64, reads_given=False)
    tuner.decoding.worked_s = REPORT_AFTER_S
    assert tuner.gil_report() is None
    tuner.decoding.gil = GilLimit(1, 3e-5)
    assert tuner.gil_report() is None
    tuner.decoding.gil = GilLimit(1, 1e-4)
    assert tuner.gil_report() == GilLimit(1, 1e-4)
    assert tuner.gil_report() is None


def test_the_gil_is_not_told_of_for_a_little_work() -> None:
    """It is found early, and told of once so much was decoded that a way out would gain something."""
    tuner = Tuner(decode_threads=2, threads_given=False, read_concurrency=64, reads_given=False)
    pool = Pool(tuner.decoding)
    found_s = worked_s = 0.0
    while tuner.gil_report() is None:
        pool.batches(GIL_BOUND, 1)
        worked_s += BATCH * GIL_BOUND.held_s
        found_s = found_s or (worked_s if tuner.decoding.gil is not None else 0.0)
        assert worked_s < 2 * REPORT_AFTER_S, "it is never told of"
    assert 0 < found_s < REPORT_AFTER_S / 4
    assert worked_s > 0.75 * REPORT_AFTER_S


def test_work_that_nobody_waits_for_does_not_count() -> None:
    """While the consumer has enough, the GIL holds up nobody."""
    pool = Pool(ThreadTuner(2))
    pool.batches(GIL_BOUND, 40)
    worked_s = pool.tuner.worked_s
    pool.batches(GIL_BOUND, 400, saturated=False)
    assert pool.tuner.worked_s == worked_s


def test_the_simulated_gil_is_what_makes_one_thread_best() -> None:
    """The simulation itself: one thread beats two where the GIL is passed on at a price."""
    assert GIL_BOUND.rate(1) > GIL_BOUND.rate(2) * 1.2
    assert MIXED.rate(4) == pytest.approx(4 * MIXED.rate(1))
