"""Threads of our own."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from aiofeed.runtime.thread_pool import ThreadPool


def test_threads_start_on_demand_and_end_when_told() -> None:
    """A pool has no thread before work, no more than its bound under load, none after stop."""
    pool = ThreadPool("test", 3)
    assert pool.threads == ()
    release = threading.Event()
    futures = [pool.submit(release.wait) for _ in range(8)]
    assert len(pool.threads) == 3
    release.set()
    assert all(future.result(5) for future in futures)
    pool.stop()
    assert pool.join(5)


def test_a_single_stream_of_jobs_uses_a_single_thread() -> None:
    """Jobs that follow one another do not start a second thread."""
    pool = ThreadPool("test", 8)
    for number in range(50):
        assert pool.submit(lambda number=number: number).result(5) == number
    assert len(pool.threads) == 1
    pool.stop()
    assert pool.join(5)


def test_a_job_that_waits_goes_on_in_the_thread_that_is_done() -> None:
    """With one lane and two threads, what has queued up behind a job runs where that ran: nobody is woken for it."""
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
    """An exception, SystemExit included, belongs to the future."""
    pool = ThreadPool("test", 1)
    for error in (ValueError("v"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            pool.submit(fail).result(5)
    assert pool.submit(lambda: 1).result(5) == 1
    pool.stop()
    assert pool.join(5)


def test_stop_cancels_what_has_not_started_and_does_not_wait() -> None:
    """stop() returns while a job is stuck; queued jobs are cancelled; join is bounded."""
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
    """The interpreter does not wait for them."""
    pool = ThreadPool("test", 1)
    pool.submit(int).result(5)
    assert all(thread.daemon for thread in pool.threads)
    pool.shutdown()
    assert pool.join(5)


def test_lanes_bound_what_runs_and_can_be_changed() -> None:
    """Jobs beyond the lanes wait, and start when lanes are added."""
    pool = ThreadPool("test", 4, max_running=1)
    release = threading.Event()
    futures = [pool.submit(release.wait) for _ in range(6)]
    assert (pool.running, pool.backlog, len(pool.threads)) == (1, 5, 1)
    pool.set_max_running(3)
    assert (pool.running, pool.backlog, len(pool.threads)) == (3, 3, 3)
    pool.set_max_running(100)
    assert pool.max_running == 4
    pool.set_max_running(1)
    release.set()
    assert all(future.result(5) for future in futures)
    pool.stop()
    assert pool.join(5)


def test_waiting_share_tells_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near 1 for jobs that wait, low for jobs that compute."""
    wall = cpu = 100.0

    def job(waits_s: float, computes_s: float) -> None:
        nonlocal wall, cpu
        wall, cpu = wall + waits_s + computes_s, cpu + computes_s

    clocks = SimpleNamespace(perf_counter=lambda: wall, thread_time=lambda: cpu, monotonic=time.monotonic)
    monkeypatch.setattr("aiofeed.runtime.thread_pool.time", clocks)
    pool = ThreadPool("test", 1)
    pool.submit(job, 0.05, 0.001).result(5)
    assert pool.waiting_share > 0.9
    for _ in range(30):
        pool.submit(job, 0.001, 0.005).result(5)
    assert pool.waiting_share < 0.3
    pool.stop()
    assert pool.join(5)
