"""Thread pools of daemon threads, started on demand and joined with a bound.

The threads of ``concurrent.futures.ThreadPoolExecutor`` are joined at interpreter exit, so one stuck read delays the
exit for as long as it is stuck. These are not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.threads import DaemonThread

P = ParamSpec("P")
R = TypeVar("R")

_Work = tuple["_Job | _AwaitedJob", Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# The most abandoned jobs that may still run, each in a thread of its own. With more, the storage or the decoder is
# broken altogether, and more threads would not help.
ABANDONED_MOST = 64

# ReadPoolSizer runs this often; the first interval is used while decode threads wait for reads. Doubled each time, 64
# reads run within 0.1 s. They are halved after so many runs in all that found a decode backlog.
STARVING_INTERVAL_S = 0.005
RESIZE_INTERVAL_S = 0.05
BACKLOG_RUNS = 4
# More concurrent reads help if a read spends more than this share of its time waiting. Reading from the page cache
# beside busy decoders it is a half or less; on storage with a latency of a millisecond it is nearly 1.
WAITING_SHARE = 0.9
GIL_RELEASED_S = 0.0001
# Jobs that mostly wait may wait for each other, as for a lock: one that runs alone shows it. All other threads wait
# meanwhile, for some two jobs. So the first ones run alone after so many jobs for each thread, which is soon known, and
# later ones are rare, which costs half a percent.
ALONE_FIRST = 4
ALONE_SOON = 2
ALONE_LATER = 512
# A job that waits for this share of its time mostly waits.
MOSTLY_WAITS = 0.5
# On a free-threaded build an object that another thread dropped is freed when the thread that made it next runs. So
# idle threads run this often, and the memory of dropped batches is not kept for longer.
IDLE_S = 0.5 if machine.FREE_THREADED else None


def gil_wait_s() -> float:
    """Release the GIL for a moment and return the seconds that it was then not free.

    Sleeps for 0.1 ms, so that a thread that waits for the GIL wakes up and takes it.
    """
    thread = threading.get_native_id()
    core_wait_s, started = machine.core_wait_s(thread), time.perf_counter()
    time.sleep(GIL_RELEASED_S)
    seconds = time.perf_counter() - started - GIL_RELEASED_S
    return max(0.0, seconds - (machine.core_wait_s(thread) - core_wait_s))


class _Job(Future[Any]):
    """The future of a job. Cancelling a running job does not stop it, but lets another job run in its place."""

    def __init__(self, pool: ThreadPool) -> None:
        super().__init__()
        self._pool = pool
        # The identifier of the thread that runs it.
        self.ident = 0
        self.alone = False

    def cancel(self) -> bool:
        """Cancel the job if it has not started, else abandon it; return whether it was cancelled."""
        if super().cancel():
            return True
        self._pool.abandon(self)
        return False


@dataclass(slots=True, eq=False)
class _AwaitedJob:
    """A job whose result a coroutine awaits: ``concurrent.futures.Future`` costs ten times as much."""

    pool: ThreadPool
    future: asyncio.Future[Any]
    ident: int = 0
    alone: bool = False

    def cancel(self) -> None:
        """Cancel the coroutine of a job that will not start."""
        self.pool.ended(self.future, None, asyncio.CancelledError())

    def set_running_or_notify_cancel(self) -> bool:
        """Return whether the job is to run."""
        return not self.future.done()

    def set_result(self, result: Any) -> None:
        """Return the result to the coroutine; in the job's thread, like ``set_exception``."""
        self.pool.ended(self.future, result, None)

    def set_exception(self, error: BaseException) -> None:
        """Raise an error in the coroutine."""
        self.pool.ended(self.future, None, error)


class HostedRun:
    """The run of a pool in a thread that exists before and after it.

    Args:
        run: Runs the pool in the calling thread until it stops.
        queue: The thread calls functions that are put here between two jobs.
        lost: Gives the pool another thread, because a function from ``queue`` does not return.
    """

    def __init__(self, run: Callable[[], None], queue: SimpleQueue[Any], lost: Callable[[], None]) -> None:
        self.queue = queue
        self.lost = lost
        self.ident: int | None = None
        self._run: Callable[[], None] | None = run
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the pool in the calling thread until it stops."""
        self.ident = threading.get_ident()
        run, self._run = self._run, None
        assert run is not None
        try:
            run()
        finally:
            del run
            self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the end of the run; return whether it has ended."""
        return self._ended.wait(timeout_s)


class ThreadHost(Protocol):
    """A thread that can be the thread of a pool."""

    def host(self, run: HostedRun) -> bool:
        """Run a pool until it stops; return False if the thread is that of another pool."""


class ThreadPool(ThreadPoolExecutor):
    """An executor of daemon threads that are started on demand.

    It derives from ``ThreadPoolExecutor`` because an event loop's default executor must, and uses none of its code.
    Jobs must not submit to their own pool and wait: reading and decoding have one pool each.

    Args:
        name: Threads are called ``aiofeed-<name>-<number>``.
        max_threads: The maximum number of threads.
        max_running: The maximum number of jobs that run at a time. ``set_max_running`` changes it.

    Attributes:
        running: Number of jobs that run or are about to; abandoned ones do not count.
        isolates: Whether some jobs may run alone. A slow one then delays the others.
        alone: Whether the job that runs is to do so alone.
        measured_alone: The jobs that ran alone.
        alone_sample_s: Their seconds per sample, without those in which they waited for a core.
        core_waits: For each thread that runs, by its native identifier, the seconds for which it had waited for a core
            when it began.
        host: A thread to use as the first one, if it is free.
        yields: Whether the threads, except that of a host, lower their priority before the next job; for good.
    """

    host: ThreadHost | None = None
    yields: bool = False

    def __init__(self, name: str, max_threads: int, max_running: int | None = None) -> None:
        self.name = name
        self.max_threads = max_threads
        self.max_running: int = max_threads if max_running is None else max_running
        self._ready: SimpleQueue[_Work | Callable[[], None] | None] = SimpleQueue()
        self._backlog: deque[_Work] = deque()
        self._own_threads: list[DaemonThread | HostedRun] = []
        self._lock = threading.Lock()
        self.running: int = 0
        self.isolates: bool = True
        self.alone: bool = False
        self.measured_alone: int = 0
        self.alone_sample_s: float = 0.0
        self._alone_samples = 0
        self._isolates = False
        self._until_alone: float = ALONE_FIRST
        self._active: set[_Job | _AwaitedJob] = set()
        self._abandoned: set[_Job | _AwaitedJob] = set()
        # Results of awaited jobs, and whether the loop has been woken for them; a pool has the jobs of one loop.
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._wakes = False
        self._stopped = False
        self._draining = False
        # Wall-clock and CPU seconds of the jobs, exponentially weighted towards recent ones.
        self._wall_s = self._cpu_s = 0.0
        # Seconds of all jobs, and of all threads that have ended in which they waited for a core.
        self.busy_s: float = 0.0
        self._core_wait_s = 0.0
        self.core_waits: dict[int, float] = {}

    @property
    def backlog(self) -> int:
        """Number of jobs that wait because ``max_running`` jobs run."""
        return len(self._backlog)

    @property
    def waiting_share(self) -> float:
        """Share of a job's wall-clock time without CPU time: near 1 for slow storage."""
        return 1.0 - self._cpu_s / self._wall_s if self._wall_s else 0.0

    def core_wait_s(self) -> float:
        """Seconds in all in which threads of the pool could run and waited for a core; 0 if unknown."""
        # Without the lock, which a fork may have copied while it was held.
        running = sum(machine.core_wait_s(thread) - at for thread, at in list(self.core_waits.items()))
        return max(self._core_wait_s + running, 0.0)

    def set_max_running(self, max_running: int) -> None:
        """Change ``max_running``, at most to ``max_threads``. Fewer take effect as jobs end, more at once."""
        with self._lock:
            self.max_running = max(1, min(max_running, self.max_threads))
            self._dispatch()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call; the future receives its result or exception.

        Raises:
            RuntimeError: The pool was stopped, or it has no running job and the system refuses a new thread.
        """
        future = _Job(self)
        self._queue((future, fn, args, kwargs))
        return future

    async def run(self, fn: Callable[..., R], *args: Any) -> R:
        """Return the result of a call in a thread. Calls that end at about the same time wake the event loop once.

        Raises:
            RuntimeError: As ``submit``.
        """
        job = _AwaitedJob(self, asyncio.get_running_loop().create_future())
        self._queue((job, fn, args, {}))
        del fn, args
        try:
            result: R = await job.future
            return result
        except asyncio.CancelledError:
            self.abandon(job)
            raise

    def _queue(self, work: _Work) -> None:
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"the thread pool {self.name!r} has been stopped")
            self._backlog.append(work)
            try:
                self._dispatch()
            except RuntimeError:
                self._backlog.pop()
                raise

    def ended(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Set the result of a future on its loop; not from a thread in which signal handlers run."""
        self._ended.append((future, result, error))
        if not self._wakes:
            self._wakes = True
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                future.get_loop().call_soon_threadsafe(self._set_results)

    def _set_results(self) -> None:
        self._wakes = False
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def abandon(self, job: Future[Any] | _AwaitedJob) -> bool:
        """Stop counting a running job, so that another can run; its result is not wanted any more.

        Returns False if too many abandoned jobs still run, or if the system refuses a thread for the next job.
        """
        with self._lock:
            if job not in self._active or self._draining:
                return True
            if len(self._abandoned) >= ABANDONED_MOST:
                return False
            assert isinstance(job, _Job | _AwaitedJob)
            self._active.discard(job)
            self._abandoned.add(job)
            self.running -= 1
            try:
                self._dispatch()
            except RuntimeError:
                return False
            return True

    def drain(self) -> None:
        """From now on start no job in place of an abandoned one, because queued jobs are about to be cancelled."""
        self._draining = True

    def _dispatch(self) -> None:
        while self._may_start():
            if self.running + len(self._abandoned) == len(self._own_threads) and not self._start_thread():
                return
            self._ready.put(self._take())

    def _may_start(self) -> bool:
        return bool(self._backlog) and self.running < (1 if self._isolates else self.max_running)

    def _take(self) -> _Work:
        work = self._backlog.popleft()
        self.running += 1
        self.alone = work[0].alone = self._isolates
        self._active.add(work[0])
        return work

    def _start_thread(self) -> bool:
        """Start another thread; return whether there is one.

        Raises:
            RuntimeError: The system refuses a thread and no job is running.
        """
        try:
            if not self._own_threads and (run := self._hosted()) is not None:
                self._own_threads.append(run)
                return True
            thread = DaemonThread(self._run, f"aiofeed-{self.name}-{len(self._own_threads)}")
            thread.start()
        except RuntimeError:
            if not self.running:
                raise
            return False  # the existing threads do the work; the end of each job tries again
        self._own_threads.append(thread)
        return True

    def _hosted(self) -> HostedRun | None:
        """Return a run of this pool in the host's thread; ``None`` if there is no host or it is not free."""
        if self.host is None:
            return None
        run = HostedRun(self._run, self._ready, self._lost)
        return run if self.host.host(run) else None

    def _lost(self) -> None:
        with self._lock:
            if not self._stopped:
                self._start_thread()

    def _hand_over(self, work: _Work | None) -> bool:
        """Continue in the host's thread, if it has become free; return whether the calling thread is to end."""
        if isinstance(self._own_threads[0], HostedRun):
            return False
        with self._lock:
            if self._stopped or len(self._own_threads) > 1 or (run := self._hosted()) is None:
                return False
            self._own_threads[0] = run
            if work is not None:
                self._ready.put(work)
        return True

    def _run(self) -> None:
        thread = threading.get_native_id()
        self.core_waits[thread] = machine.core_wait_s(thread)
        try:
            self._run_jobs()
        finally:
            with self._lock:
                self._core_wait_s += machine.core_wait_s(thread) - self.core_waits.pop(thread)

    def _run_jobs(self) -> None:
        lowered = False
        work: _Work | Callable[[], None] | None = None
        while (work := work or self._next()) is not None:
            if not isinstance(work, tuple):
                work()  # for the host
                work = None
                continue
            if self.yields and not lowered and self.host is None:
                machine.lower_priority()
                lowered = True
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                future.ident = threading.get_ident()
                wall, cpu = time.perf_counter(), time.thread_time()
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - the future delivers any exception to its awaiter
                    work = self._done(future, wall, cpu)
                    future.set_exception(error)
                else:
                    work = self._done(future, wall, cpu)
                    future.set_result(result)
                    del result
            else:
                work = self._done(future, 0.0, 0.0)
            del future, fn, args, kwargs
            if self.host is not None and self._hand_over(work):
                return

    def _next(self) -> _Work | Callable[[], None] | None:
        while True:
            try:
                return self._ready.get(timeout=IDLE_S)
            except Empty:
                pass

    def _done(self, job: _Job | _AwaitedJob, wall: float, cpu: float) -> _Work | None:
        """Count a job as ended; return the next one, which runs in the same thread so that no other is woken."""
        with self._lock:
            if job in self._abandoned:
                self._abandoned.discard(job)
            else:
                self._active.discard(job)
                self.running -= 1
            if wall:
                wall = time.perf_counter() - wall
                self.busy_s += wall
                self._wall_s = self._wall_s * 0.9 + wall
                self._cpu_s = self._cpu_s * 0.9 + time.thread_time() - cpu
            self._isolate_next(job)
            work = self._take() if self._may_start() else None
            self._dispatch()
            return work

    def count_alone(self, seconds: float, samples: int) -> None:
        """Count a job that ran alone; ``seconds``: without those in which it waited for a core."""
        self.measured_alone += 1
        self._alone_samples += samples
        self.alone_sample_s += (seconds - samples * self.alone_sample_s) / max(self._alone_samples, 1)

    def _isolate_next(self, ended: _Job | _AwaitedJob) -> None:
        """Let the next job run alone if it is time for one; later ones side by side when it has ended."""
        self._until_alone -= 1 / self.max_running
        if ended.alone:
            self._isolates = self.alone = False
            self._until_alone = ALONE_FIRST if self.measured_alone < ALONE_SOON else ALONE_LATER
        elif self._until_alone <= 0 and self.max_running > 1 and self.isolates:
            # Only such jobs may wait for each other, which one that runs alone then shows.
            self._isolates = self._isolates or self.waiting_share > MOSTLY_WAITS

    def stop(self) -> None:
        """Cancel the jobs that have not started and end the threads; never blocks."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            cancelled = [work[0] for work in self._backlog]
            self._backlog.clear()
        try:
            while (work := self._ready.get_nowait()) is not None:
                if isinstance(work, tuple):
                    cancelled.append(work[0])
        except Empty:
            pass
        for future in cancelled:
            future.cancel()
        for _ in self._own_threads:
            self._ready.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the threads, except those of abandoned jobs; return whether they have ended."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            abandoned = {job.ident for job in self._abandoned}
        joined = [thread for thread in self._own_threads if thread.ident not in abandoned]
        return all(thread.join(max(0.0, deadline - time.monotonic())) for thread in joined)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """``stop``, under the name that an event loop calls when it closes."""
        self.stop()


@dataclass(eq=False)
class ReadPoolSizer:
    """Changes the number of concurrent blocking reads to what the decode threads need.

    One thread reads files from the page cache faster than they are decoded, and a second one only competes with the
    decoders for the GIL. Storage with latency needs many concurrent reads. So ``max_running`` of the read pool is
    doubled while reads wait for storage and decode threads wait for reads, and halved while decoding has a backlog.
    """

    reads: ThreadPool
    decodes: ThreadPool
    _backlog_runs: int = field(default=0, init=False)

    def resize(self) -> float:
        """Resize the read pool if needed; return the seconds until the next call."""
        reads, decodes = self.reads, self.decodes
        starving = bool(reads.backlog) and decodes.running < decodes.max_running
        # Reads from the page cache hardly wait: more of them would only compete with the decoders for the GIL.
        if starving and reads.waiting_share > WAITING_SHARE:
            reads.set_max_running(reads.max_running * 2)
        elif decodes.backlog > decodes.max_threads and reads.max_running > 1:
            self._backlog_runs += 1
            if self._backlog_runs >= BACKLOG_RUNS:
                self._backlog_runs = 0
                reads.set_max_running(reads.max_running // 2)
        return STARVING_INTERVAL_S if starving else RESIZE_INTERVAL_S
