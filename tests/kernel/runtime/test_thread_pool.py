"""`ThreadPool`: threads on demand, bounded jobs, bounded joins."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.machine import LOWER_BY
from aiofeed.kernel.runtime.thread_pool import (
    BACKLOG_RUNS,
    RESIZE_INTERVAL_S,
    STARVING_INTERVAL_S,
    HostedRun,
    ReadPoolSizer,
    ThreadPool,
    gil_wait_s,
)
from tests.support.waiting import until


def threads_of(pool: ThreadPool) -> list[threading.Thread]:
    """The running threads of a pool."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"aiofeed-{pool.name}-")]


def test_threads_start_on_demand_and_end_with_stop() -> None:
    """A pool has no thread before the first job, at most `max_threads` under load, and none after stop."""
    pool = ThreadPool("test", 3)
    assert threads_of(pool) == []
    release = threading.Event()
    futures = [pool.submit(release.wait) for _ in range(8)]
    assert len(threads_of(pool)) == 3
    release.set()
    assert all(future.result(5) for future in futures)
    pool.stop()
    assert pool.join(5)
    assert threads_of(pool) == []


def test_a_single_stream_of_jobs_uses_a_single_thread() -> None:
    """Jobs submitted one after another do not start a second thread."""
    pool = ThreadPool("test", 8)
    for number in range(50):
        assert pool.submit(lambda number=number: number).result(5) == number
    assert len(threads_of(pool)) == 1
    pool.stop()
    assert pool.join(5)


def test_an_idle_thread_keeps_nothing_that_it_made() -> None:
    """An object made by a job is freed soon after its last reference is dropped elsewhere, although no job follows."""
    pool = ThreadPool("test", 1)
    made = pool.submit(threading.Event).result(5)
    reference = weakref.ref(made)
    del made
    until(lambda: reference() is None, 10)
    pool.stop()
    assert pool.join(5)


def test_a_queued_job_runs_in_the_thread_of_the_job_before() -> None:
    """With two threads and `max_running=1`, queued jobs wake no other thread."""
    pool = ThreadPool("queue", 2)
    barrier = threading.Barrier(3, timeout=10)
    both = [pool.submit(barrier.wait) for _ in range(2)]
    barrier.wait()
    for future in both:
        future.result(10)
    pool.set_max_running(1)
    begin = threading.Event()
    first = pool.submit(lambda: begin.wait(10) and threading.get_ident())
    rest = [pool.submit(threading.get_ident) for _ in range(5)]
    for future in [first, *rest]:
        future.add_done_callback(lambda _: time.sleep(0.01))  # a chance for the other thread
    begin.set()
    assert {future.result(10) for future in [first, *rest]} == {first.result(10)}
    pool.stop()
    assert pool.join(10)


def test_errors_reach_the_future_and_the_thread_lives_on() -> None:
    """The future gets any exception, SystemExit included."""
    pool = ThreadPool("test", 1)
    for error in (ValueError("v"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            pool.submit(fail).result(5)
    assert pool.submit(lambda: 1).result(5) == 1
    pool.stop()
    assert pool.join(5)


def test_stop_cancels_queued_jobs_and_does_not_wait() -> None:
    """stop() returns while a job is stuck and cancels queued jobs; join() keeps to its timeout."""
    pool = ThreadPool("test", 1)
    started, release = threading.Event(), threading.Event()

    def stuck() -> None:
        started.set()
        release.wait()

    running, queued = pool.submit(stuck), pool.submit(int)
    assert started.wait(5)
    pool.stop()
    assert queued.cancelled()
    assert not pool.join(0.01)
    with pytest.raises(RuntimeError, match="stopped"):
        pool.submit(int)
    release.set()
    running.result(5)
    assert pool.join(5)


def test_threads_are_daemons() -> None:
    """Interpreter exit does not wait for them."""
    pool = ThreadPool("test", 1)
    pool.submit(int).result(5)
    assert threads_of(pool)
    assert all(thread.daemon for thread in threads_of(pool))
    pool.shutdown()
    assert pool.join(5)


def test_max_running_bounds_the_running_jobs_and_can_be_changed() -> None:
    """Further jobs wait, and start when the bound is raised."""
    pool = ThreadPool("test", 4, max_running=1)
    release = threading.Event()
    futures = [pool.submit(release.wait) for _ in range(6)]
    assert (pool.running, pool.backlog, len(threads_of(pool))) == (1, 5, 1)
    pool.set_max_running(3)
    assert (pool.running, pool.backlog, len(threads_of(pool))) == (3, 3, 3)
    pool.set_max_running(100)
    assert pool.max_running == 4
    pool.set_max_running(1)
    release.set()
    assert all(future.result(5) for future in futures)
    pool.stop()
    assert pool.join(5)


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_threads_that_yield_lower_their_priority_once() -> None:
    """Each before its next job, also a thread that another such thread has started; that of a host never."""
    pool, hosted, usual = ThreadPool("test", 2), ThreadPool("test", 1), priority()
    hosted.host = NoHost()
    assert pool.submit(priority).result(5) == usual
    both = threading.Barrier(2)
    pool.yields = hosted.yields = True

    def meet() -> int:
        both.wait(5)
        return priority()

    for _ in range(2):
        assert [job.result(5) for job in [pool.submit(meet), pool.submit(meet)]] == [min(usual + LOWER_BY, 19)] * 2
    assert hosted.submit(priority).result(5) == priority() == usual
    for each in (pool, hosted):
        each.stop()
        assert each.join(5)


class NoHost:
    """A thread that is that of another pool."""

    def host(self, run: HostedRun) -> bool:
        return False


def test_waiting_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near 1 for jobs that wait, low for jobs that compute."""
    wall = cpu = 100.0

    def job(waits_s: float, computes_s: float) -> None:
        nonlocal wall, cpu
        wall, cpu = wall + waits_s + computes_s, cpu + computes_s

    clocks = SimpleNamespace(perf_counter=lambda: wall, thread_time=lambda: cpu, monotonic=time.monotonic)
    monkeypatch.setattr("aiofeed.kernel.runtime.thread_pool.time", clocks)
    pool = ThreadPool("test", 1)
    pool.submit(job, 0.05, 0.001).result(5)
    assert pool.waiting_share > 0.9
    for _ in range(30):
        pool.submit(job, 0.001, 0.005).result(5)
    assert pool.waiting_share < 0.3
    pool.stop()
    assert pool.join(5)


class PoolState:
    """What `ReadPoolSizer` reads from a pool, and the size that it sets."""

    def __init__(self, *, max_running: int, running: int = 0, backlog: int = 0, waiting_share: float = 0.0) -> None:
        self.max_threads = self.max_running = max_running
        self.running = running
        self.backlog = backlog
        self.waiting_share = waiting_share

    def set_max_running(self, max_running: int) -> None:
        self.max_running = max_running


def sizer(reads: PoolState, decodes: PoolState) -> ReadPoolSizer:
    return ReadPoolSizer(reads, decodes)  # type: ignore[arg-type]


def test_reads_that_wait_for_storage_get_more_threads() -> None:
    """While decode threads wait for them, the number of concurrent reads doubles, in short intervals."""
    reads = PoolState(max_running=1, backlog=9, waiting_share=0.95)
    resize = sizer(reads, PoolState(max_running=4, running=3)).resize
    assert [(resize(), reads.max_running) for _ in range(3)] == [(STARVING_INTERVAL_S, n) for n in (2, 4, 8)]


@pytest.mark.parametrize(
    ("reads", "decodes"),
    [
        (PoolState(max_running=2, backlog=9, waiting_share=0.5), PoolState(max_running=4, running=3)),
        (PoolState(max_running=2, backlog=9, waiting_share=0.95), PoolState(max_running=4, running=4)),
        (PoolState(max_running=2, waiting_share=0.95), PoolState(max_running=4, running=3)),
    ],
    ids=["reads that compute", "busy decoders", "no read that waits"],
)
def test_other_reads_get_no_more_threads(reads: PoolState, decodes: PoolState) -> None:
    """One thread reads the page cache faster than it is decoded; a second would compete for the GIL."""
    sizer(reads, decodes).resize()
    assert reads.max_running == 2


def test_reads_get_fewer_threads_while_decoding_has_a_backlog() -> None:
    """The number of concurrent reads is halved each time that some runs have found a backlog, down to 1."""
    reads = PoolState(max_running=4)
    resize = sizer(reads, PoolState(max_running=2, running=2, backlog=3)).resize
    found = []
    for _ in range(3 * BACKLOG_RUNS):
        assert resize() == RESIZE_INTERVAL_S
        found.append(reads.max_running)
    assert found == [4] * (BACKLOG_RUNS - 1) + [2] * BACKLOG_RUNS + [1] * (BACKLOG_RUNS + 1)


# --- what explains where the time goes


def test_waits_for_cores_count_while_threads_run_and_after_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for a core for a second each: two seconds, also after the pool was stopped."""
    waited = 10.0
    monkeypatch.setattr(machine, "core_wait_s", lambda thread: waited)
    pool = ThreadPool("test", 2)
    release = threading.Event()
    futures = [pool.submit(release.wait) for _ in range(2)]
    begun = threading.Barrier(3)
    more = [pool.submit(begun.wait) for _ in range(2)]
    release.set()
    begun.wait(5)
    assert pool.core_wait_s() == 0.0
    waited = 11.0
    assert pool.core_wait_s() == 2.0
    assert all(future.result(5) is not None for future in futures + more)
    pool.stop()
    assert pool.join(5)
    waited = 20.0  # of no thread of the pool
    assert pool.core_wait_s() == 2.0
    assert pool.busy_s > 0.0


@pytest.mark.skipif(not machine.has_gil(), reason="needs a GIL")
def test_a_wait_for_the_gil_is_measured() -> None:
    """While another thread holds the GIL for 5 ms at a time it is waited for; otherwise it is free."""
    usleep = ctypes.PyDLL(None).usleep
    assert sorted(gil_wait_s() for _ in range(21))[10] < 0.001
    ended = threading.Event()

    def hold_the_gil() -> None:
        while not ended.is_set():
            usleep(5_000)

    thread = threading.Thread(target=hold_the_gil)
    thread.start()
    try:
        assert max(gil_wait_s() for _ in range(10)) > 0.001
    finally:
        ended.set()
        thread.join()


def test_a_thread_that_does_not_exist_waits_for_no_core() -> None:
    assert machine.core_wait_s(0) == 0.0
    assert machine.core_wait_s(threading.get_native_id()) >= 0.0
