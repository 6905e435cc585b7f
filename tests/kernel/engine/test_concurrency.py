"""Tests of the tuner's effect on a feeder, with job timings set by the test."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiofeed import Feeder, FromDataset, Limits
from aiofeed.kernel.core.limits import resolve_limits
from aiofeed.kernel.core.types import Row
from aiofeed.kernel.engine import decode_stage
from aiofeed.kernel.engine.admission import Admission, MemoryBudget
from aiofeed.kernel.engine.batch import ReorderBuffer
from aiofeed.kernel.engine.concurrency import AHEAD_BATCHES, Concurrency, JobTimer, Tuner
from aiofeed.kernel.engine.tuning import reads
from aiofeed.kernel.engine.tuning.threads import JobTiming
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES = 512
BATCH = 8


class Numbers:
    """A source whose reads return at once."""

    def __len__(self) -> int:
        return SAMPLES

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        return index.to_bytes(2, "big")


def decode(data: bytes) -> torch.Tensor:
    return torch.tensor(int.from_bytes(data, "big"))


class FakeTimer(JobTimer):
    """Reports jobs that run one at a time, as under the GIL."""

    created = 0

    def __init__(self, pool: ThreadPool) -> None:
        type(self).created += 1
        self._max_running = pool.max_running

    def job(self, samples: int, nbytes: int) -> JobTiming:
        return JobTiming(samples, self._max_running * samples * 1e-4, samples * 0.9e-4, self._max_running)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpus", lambda: 4)
    monkeypatch.setattr(machine, "has_gil", lambda: True)
    # Otherwise one thread would decode samples this cheap, whatever the tuner chooses.
    monkeypatch.setattr("aiofeed.kernel.engine.fetch.source.TINY_DECODE_S", 0.0)
    FakeTimer.created = 0
    monkeypatch.setattr(decode_stage, "JobTimer", FakeTimer)


def feeding(source: Any, **options: Any) -> Feeder[Any]:
    return Feeder(source, **options)


def iterate_until(feeder: Feeder[Any], threads: int) -> None:
    """Iterate epochs until ``threads`` decode threads are in use, or the test times out."""
    while feeder.statistics().decode_threads != threads:
        for _ in feeder:
            pass


@pytest.mark.slow
@pytest.mark.usefixtures("four_cores")
def test_useless_threads_are_removed_and_the_gil_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """GIL-bound decoding goes from four threads to one; statistics and one warning per feeder name the GIL."""
    with (
        caplog.at_level(logging.WARNING, logger="aiofeed"),
        feeding(Numbers(), decode=decode, batch_size=BATCH) as feeder,
    ):
        assert feeder.statistics().decode_threads == 4
        assert feeder.statistics().gil_us == 0
        while not feeder.statistics().gil_us:  # one thread may still be on trial
            iterate_until(feeder, 1)
            for _ in feeder:
                pass
        assert feeder.statistics().gil_us == pytest.approx(90, rel=0.02)
        assert not caplog.records, "warned after a fraction of a second"
        while not caplog.records:
            for _ in feeder:
                pass
        feeder.close()
        iterate_until(feeder, 1)
        for _ in feeder:
            pass
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    for part in ("GIL-bound: 90 us", "1 of 4 decode threads", 'engine="process:4"'):
        assert part in messages[0]


@pytest.mark.usefixtures("four_cores")
def test_the_choice_outlives_close() -> None:
    """A feeder that is closed and iterated again starts with the threads chosen before."""
    feeder = feeding(Numbers(), decode=decode, batch_size=BATCH)
    iterate_until(feeder, 1)
    feeder.close()
    for _ in feeder:
        break
    assert feeder._session.pipeline.loop_thread.decode_pool.max_running == 1  # type: ignore[union-attr]
    feeder.close()


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("source", [Numbers(), FromDataset(list(range(SAMPLES)), threads=3)], ids=["limits", "dataset"])
def test_user_specified_threads_stay(source: Any) -> None:
    """With ``decode_threads`` or ``FromDataset(threads=)`` the number does not change and jobs are not timed."""
    dataset = isinstance(source, FromDataset)
    limits = None if dataset else Limits(decode_threads=3)
    with feeding(source, decode=None if dataset else decode, batch_size=BATCH, limits=limits) as feeder:
        for _ in range(3):
            for _ in feeder:
                pass
        assert feeder.statistics().decode_threads == 3
    assert FakeTimer.created == 0


class Near(Numbers):
    """A source that the decode thread may read itself."""

    answers_at_once = True

    def read_now(self, indices: list[int]) -> list[bytes]:
        return [index.to_bytes(2, "big") for index in indices]


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("limits", "max_running"), [(None, 1), (Limits(decode_threads=3), 3)])
def test_cheap_samples_get_one_thread_unless_the_user_specifies_more(
    limits: Limits | None, max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples below ``TINY_DECODE_S`` are decoded by one thread without tuning; statistics report the number in use."""
    for name in ("TINY_DECODE_S", "SMALL_DECODE_S"):
        monkeypatch.setattr(f"aiofeed.kernel.engine.fetch.source.{name}", 1.0)
    monkeypatch.setattr(FakeTimer, "job", lambda timer, samples, nbytes: None)
    with feeding(Near(), decode=decode, batch_size=BATCH, limits=limits) as feeder:
        for _ in feeder:
            pass
        assert feeder.statistics().decode_threads == max_running
        assert feeder._session.pipeline.loop_thread.decode_pool.max_running == max_running  # type: ignore[union-attr]


@pytest.mark.usefixtures("four_cores")
def test_batches_do_not_depend_on_the_number_of_threads() -> None:
    """While the tuner changes the threads, batches and order are the same as with one thread."""
    with feeding(Numbers(), decode=decode, batch_size=BATCH, shuffle=True, seed=3) as feeder:
        found = [batch.tolist() for _ in range(4) for batch in feeder]
        assert feeder.statistics().decode_threads < 4
    one = Limits(decode_threads=1)
    with feeding(Numbers(), decode=decode, batch_size=BATCH, shuffle=True, seed=3, limits=one) as feeder:
        assert found == [batch.tolist() for _ in range(4) for batch in feeder]


@pytest.mark.usefixtures("four_cores")
def test_a_slow_consumer_does_not_remove_threads() -> None:
    """Jobs that run while a finished batch waits are not scored, so a consumer that fills the queue has no effect."""
    with feeding(Numbers(), decode=decode, batch_size=BATCH) as feeder:
        left = SAMPLES // BATCH
        for _ in feeder:
            left -= 1
            while feeder.statistics().queue_depth < min(2, left):
                threading.Event().wait(0.0005)
        assert FakeTimer.created > SAMPLES // BATCH // 2
        assert feeder.statistics().decode_threads == 4


class Far(Numbers):
    """A source with slow reads that counts how many run at a time."""

    under_way = most = 0

    async def read(self, index: int) -> bytes:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        return await super().read(index)


def test_read_concurrency_grows_for_slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it helps, read concurrency doubles; statistics report it."""
    monkeypatch.setattr(reads, "SLOW_READ_S", 0.005)
    monkeypatch.setattr(reads, "READS_BRING", 0.0)
    source = Far()
    with feeding(source, decode=decode, batch_size=BATCH) as feeder:
        assert feeder.statistics().read_concurrency == 64
        while feeder.statistics().read_concurrency < 256:
            for _ in feeder:
                pass
        for _ in feeder:
            pass
    assert 64 < source.most <= feeder.statistics().read_concurrency


def test_a_given_read_concurrency_is_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``Limits(read_concurrency=16)`` at most 16 reads run, however slow they are."""
    monkeypatch.setattr(reads, "SLOW_READ_S", 0.0)
    monkeypatch.setattr(reads, "READS_BRING", 0.0)
    source = Far()
    with feeding(source, decode=decode, batch_size=BATCH, limits=Limits(read_concurrency=16)) as feeder:
        for _ in range(3):
            for _ in feeder:
                pass
    assert source.most == 16


class IntoRows:
    """Like ``decode``, into rows of the batch's buffer, so that the size of a batch is known before the first read."""

    row = Row((1,), "int64")
    takes_seed = False

    def __call__(self, data: bytes) -> torch.Tensor:
        return decode(data).reshape(1)

    def decode_into(self, data: bytes, out: NDArray[Any], seed: int | None = None) -> None:
        out[...] = int.from_bytes(data, "big")


def test_a_chunk_larger_than_the_read_concurrency_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that waits while read concurrency falls below its size is still read."""
    monkeypatch.setattr(reads, "FREE_BYTES", 4)
    with feeding(Far(), decode=IntoRows(), batch_size=32, limits=Limits(decode_threads=1)) as feeder:
        assert torch.cat(list(feeder)).flatten().tolist() == list(range(SAMPLES))


# --- timing of jobs ---------------------------------------------------------------------------------------------------


def test_a_timer_separates_work_from_waiting() -> None:
    """A timing has wall-clock time, CPU time of the thread, and the number of threads if all were busy."""
    pool = ThreadPool("test", 1)

    def wait_and_work() -> JobTiming:
        timer = JobTimer(pool)
        threading.Event().wait(0.02)
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass
        return timer.job(3)

    job = pool.submit(wait_and_work).result(5)
    pool.stop()
    assert pool.join(5)
    assert job.samples == 3
    assert job.threads == 1
    assert job.cpu_s >= 0.005
    assert job.wall_s >= 0.02 + job.cpu_s - 0.001


def test_a_job_with_an_idle_thread_is_marked() -> None:
    """``threads`` is 0 if a thread of the pool is idle."""
    pool = ThreadPool("test", 2)
    assert pool.submit(lambda: JobTimer(pool).job(1)).result(5).threads == 0
    pool.stop()
    assert pool.join(5)


def all_at_once(pool: ThreadPool, threads: int, measured: Any) -> JobTiming:
    """What ``measured`` returns in one of so many threads of a pool that all run a job."""
    everyone, done = threading.Barrier(threads), threading.Event()

    def beside() -> None:
        everyone.wait(5)
        done.wait(5)

    others = [pool.submit(beside) for _ in range(threads - 1)]
    timed = pool.submit(lambda: (everyone.wait(5), measured())[1])
    try:
        return timed.result(5)  # type: ignore[no-any-return]
    finally:
        done.set()
        for other in others:
            other.result(5)


@pytest.mark.parametrize(("most", "at_work", "counts"), [(2, 2, True), (7, 6, False), (16, 8, True), (16, 7, False)])
def test_of_many_threads_half_may_be_idle(most: int, at_work: int, counts: bool) -> None:
    """The loop that gives them jobs waits for the GIL like they do."""
    pool = ThreadPool("test", most)
    job = all_at_once(pool, at_work, lambda: JobTimer(pool).job(1))
    pool.stop()
    assert pool.join(5)
    assert job.threads == (most if counts else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the time of other threads")
def test_a_timer_knows_what_the_other_threads_do() -> None:
    """The work of all threads of the pool counts, also of those whose job has not ended."""
    pool = ThreadPool("test", 2)
    began, worked = threading.Event(), threading.Event()

    def measured() -> JobTiming:
        timer = JobTimer(pool)
        began.set()
        assert worked.wait(5)
        return timer.job(1)

    timed = pool.submit(measured)

    def beside() -> None:
        assert began.wait(5)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        worked.set()
        timed.result(5)

    other = pool.submit(beside)
    job = timed.result(5)
    other.result(5)
    pool.stop()
    assert pool.join(5)
    assert job.cpu_s < 0.02 <= job.pool_cpu_s


def test_a_job_counts_unless_batches_waited_for_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that end together finish batches together: those that wait then do not mean that the consumer is slow."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    tuner = Tuner(decode_threads=2, threads_given=False, read_concurrency=64, reads_given=False)
    counted: list[int] = []
    monkeypatch.setattr(tuner.decoding, "observe", lambda job: counted.append(job.threads))
    controller = Concurrency.__new__(Concurrency)
    controller._empty_at, controller._on_gil_limit = 0.0, None
    monkeypatch.setattr(controller, "apply", lambda tuner: None)
    for later_s, saturated in ((0.0, False), (0.0, True), (0.01, False), (0.03, False)):
        now[0] += later_s
        controller.observe_job(tuner, JobTiming(1, 0.1, 0.1, 2), saturated=saturated)
    assert counted == [0, 2, 2, 0]


def test_small_batches_use_all_threads() -> None:
    """By default as many batches are decoded at the same time as give every thread a job."""
    threads, warm = 32, 256
    active, all_active, lock = 0, threading.Event(), threading.Lock()

    def decode(data: bytes) -> torch.Tensor:
        nonlocal active
        with lock:
            started = next(count)
            active += 1
            if active == threads:
                all_active.set()
        if started >= warm:
            all_active.wait(20)
        with lock:
            active -= 1
        return torch.zeros(1)

    count = itertools.count()
    with Feeder(Numbers(), decode=decode, batch_size=BATCH, limits=Limits(decode_threads=threads)) as feeder:
        assert sum(len(batch) for batch in feeder) == SAMPLES
    assert all_active.is_set()


def test_decode_threads_yield_when_they_are_ahead() -> None:
    """For good, when batches have waited for the consumer for long enough; not if they wait now and then."""
    buffer, pool = ReorderBuffer(in_order=True, prefetch_batches=4), ThreadPool("test", 2)
    limits = resolve_limits(Limits(), batch_size=1, cpus=2, free_memory=1 << 30)
    admission = Admission(limits, batch_size=1, budget=MemoryBudget(1 << 20), buffer=buffer)
    fetcher: Any = SimpleNamespace(max_running=lambda threads: threads)
    concurrency = Concurrency(admission, fetcher, pool, None, None)
    most = AHEAD_BATCHES + buffer.prefetch_batches
    for waiting in [1] * (most - 1) + [0] * most + [1, 0] * most:
        buffer.waiting = waiting
        concurrency.resize_executor()
        assert not pool.yields
    buffer.waiting = 2
    for _ in range(most):
        assert not pool.yields
        concurrency.resize_executor()
    buffer.waiting = 0
    concurrency.resize_executor()
    assert pool.yields
