"""Threads of our own: daemons that grow on demand, stop when told, and are never waited for without a bound.

A ``ThreadPoolExecutor``'s threads are joined at interpreter exit, so that one stuck read holds up the exit for as
long as it is stuck; these are not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from aiofeed.runtime.threads import DaemonThread

P = ParamSpec("P")
R = TypeVar("R")

_Work = tuple["_Job", Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# Jobs that were abandoned and still run, each holding a thread. With more than these something is wrong with storage
# or decoder altogether, and more threads would not help.
ABANDONED_MOST = 64


class _Job(Future[Any]):
    """A job's future. Cancelling it while it runs cannot stop it, but gives its lane to another."""

    def __init__(self, pool: ThreadPool) -> None:
        super().__init__()
        self._pool = pool
        # The thread that it runs in.
        self.ident = 0

    def cancel(self) -> bool:
        """As ever: whether it will not run."""
        if super().cancel():
            return True
        self._pool.abandon(self)
        return False


class ThreadPool(ThreadPoolExecutor):
    """An executor of daemon threads, started as work arrives.

    It is a ``ThreadPoolExecutor`` in name only (a loop's default executor has to be one) and shares none of its
    machinery. Jobs must not submit to their own pool and wait: reading and decoding have one each.

    Args:
        name: threads are called ``aiofeed-<name>-<number>``.
        max_threads: the most there may be.
        max_running: how many jobs may run at a time; others wait. It can be changed as the pool runs.
    """

    def __init__(self, name: str, max_threads: int, max_running: int | None = None) -> None:
        self.name = name
        self.max_threads = max_threads
        self._max_running = max_threads if max_running is None else max_running
        self._ready: SimpleQueue[_Work | None] = SimpleQueue()
        self._backlog: deque[_Work] = deque()
        self._own_threads: list[DaemonThread] = []
        self._lock = threading.Lock()
        self._running = 0
        self._active: set[_Job] = set()
        self._abandoned: set[_Job] = set()
        self._stopped = False
        self._draining = False
        # Wall-clock and CPU seconds of the jobs, the older ones fading.
        self._wall_s = self._cpu_s = 0.0

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads that were started."""
        return tuple(thread.thread for thread in self._own_threads)

    @property
    def max_running(self) -> int:
        """How many jobs may run at a time."""
        return self._max_running

    @property
    def running(self) -> int:
        """Jobs that have a lane."""
        return self._running

    @property
    def backlog(self) -> int:
        """Jobs that wait for a lane."""
        return len(self._backlog)

    @property
    def abandoned(self) -> int:
        """Jobs that nobody waits for any more and that still run."""
        return len(self._abandoned)

    @property
    def waiting_share(self) -> float:
        """The part of its time that a job spends off the processor: near 1 for slow storage."""
        return 1.0 - self._cpu_s / self._wall_s if self._wall_s else 0.0

    def set_max_running(self, max_running: int) -> None:
        """Let so many jobs run at a time, within ``max_threads``; takes effect at once, or as jobs end."""
        with self._lock:
            self._max_running = max(1, min(max_running, self.max_threads))
            self._dispatch()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call; its result or exception arrives in the future.

        Raises:
            RuntimeError: the pool was stopped, or has no thread at work and the system gives it none.
        """
        future = _Job(self)
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"the thread pool {self.name!r} has been stopped")
            self._backlog.append((future, fn, args, kwargs))
            try:
                self._dispatch()
            except RuntimeError:
                self._backlog.pop()
                raise
        return future

    def abandon(self, job: Future[Any]) -> bool:
        """Nobody waits for a job any more: another may have its lane, if it runs still.

        False where that cannot be: there are too many such jobs, or no thread is to be had for another.
        """
        with self._lock:
            if job not in self._active or self._draining:
                return True
            if len(self._abandoned) >= ABANDONED_MOST:
                return False
            assert isinstance(job, _Job)
            self._active.discard(job)
            self._abandoned.add(job)
            self._running -= 1
            try:
                self._dispatch()
            except RuntimeError:
                return False
            return True

    def drain(self) -> None:
        """From now on a job that is abandoned gives its lane to nobody: what waits is about to be cancelled too."""
        self._draining = True

    def _dispatch(self) -> None:
        while self._backlog and self._running < self._max_running:
            if self._running + len(self._abandoned) == len(self._own_threads) and not self._start_thread():
                return
            self._ready.put(self._take())

    def _take(self) -> _Work:
        work = self._backlog.popleft()
        self._running += 1
        self._active.add(work[0])
        return work

    def _start_thread(self) -> bool:
        """Whether there is one thread more; ``RuntimeError`` where the system gives none and none is at work."""
        thread = DaemonThread(self._run, f"aiofeed-{self.name}-{len(self._own_threads)}")
        try:
            thread.start()
        except RuntimeError:
            if not self._running:
                raise
            return False  # those there are do the work; each job that ends tries again
        self._own_threads.append(thread)
        return True

    def _run(self) -> None:
        work: _Work | None = None
        while (work := work or self._ready.get()) is not None:
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                future.ident = threading.get_ident()
                wall, cpu = time.perf_counter(), time.thread_time()
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - whatever it was belongs to whoever awaits the future
                    work = self._done(future, wall, cpu)
                    future.set_exception(error)
                else:
                    work = self._done(future, wall, cpu)
                    future.set_result(result)
                    del result
            else:
                work = self._done(future, 0.0, 0.0)
            del future, fn, args, kwargs

    def _done(self, job: _Job, wall: float, cpu: float) -> _Work | None:
        """A job has ended; the next one that has a lane stays in this thread rather than wake another."""
        with self._lock:
            if job in self._abandoned:
                self._abandoned.discard(job)
            else:
                self._active.discard(job)
                self._running -= 1
            if wall:
                self._wall_s = self._wall_s * 0.9 + time.perf_counter() - wall
                self._cpu_s = self._cpu_s * 0.9 + time.thread_time() - cpu
            work = self._take() if self._backlog and self._running < self._max_running else None
            self._dispatch()
            return work

    def stop(self) -> None:
        """Cancel what has not started and let the threads go; never blocks."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            cancelled = [work[0] for work in self._backlog]
            self._backlog.clear()
        try:
            while (work := self._ready.get_nowait()) is not None:
                cancelled.append(work[0])
        except Empty:
            pass
        for future in cancelled:
            future.cancel()
        for _ in self._own_threads:
            self._ready.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end, up to ``timeout_s``; whether they all did, those with abandoned jobs aside."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            left = {job.ident for job in self._abandoned}
        waited = [thread for thread in self._own_threads if thread.thread.ident not in left]
        return all(thread.join(max(0.0, deadline - time.monotonic())) for thread in waited)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The executor protocol's name for ``stop``; a loop calls it when it closes. Never blocks."""
        self.stop()
