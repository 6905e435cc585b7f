"""A thread that runs an event loop, and the thread pools that belong to it.

How it stops; ``engine.py`` relies on it:

- ``stop`` only sets a signal. Any thread, a signal handler and an exiting interpreter may call it.
- The loop's thread then cancels and awaits running tasks, awaits the clean-up coroutines (a source's ``aclose``), stops
  the pools and closes the loop. Whatever exceeds its time limit is left behind in a daemon thread, with a log line.
- Creating an ``EventLoopThread`` starts nothing, so its owner can always stop the thread that it launches.
- Nothing here refers to a feeder or an iterator. When the watched owner is collected, its weak reference is appended to
  a deque by a C function (no Python code runs in the collector), and the loop polls that deque.
- Interpreter exit and forks are handled in ``threads.py``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from queue import SimpleQueue
from typing import Any

from aiofeed.kernel.core.errors import WorkerDiedError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.runtime import machine, threads
from aiofeed.kernel.runtime.thread_pool import ReadPoolSizer, ThreadPool
from aiofeed.kernel.runtime.threads import DaemonThread

log: logging.Logger = logging.getLogger("aiofeed.runtime")

# The time limit of a source's aclose(), and of coroutines after they were cancelled.
CLEANUP_S = 5.0
# Reading is waiting: a few threads suffice for local files; a network file system needs one per concurrent request.
MOST_READ_THREADS = 64
# Timers of uvloop count whole milliseconds, and an idle machine takes a part of one to run a thread.
TIMER_SLACK_S = 0.002


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop, or asyncio's own where uvloop is not installed."""
    reserve_standard_descriptors()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def reserve_standard_descriptors() -> None:
    """Open /dev/null in place of each closed standard stream, so that no socket or pipe gets descriptor 0, 1 or 2.

    libuv aborts the process when it closes such a descriptor of its own, and ``print`` would write into a socket.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is this one. Child processes inherit it, as they do standard streams.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class EventLoopThread:
    """The engine's thread: an event loop, a pool for blocking reads and a pool for decoding.

    Args:
        read_threads: The maximum number of threads for blocking reads, started on demand.
        decode_threads: The maximum number of decode threads.
        after: A thread to wait for before any task starts, so that a source is not opened twice at a time.
    """

    def __init__(self, *, read_threads: int, decode_threads: int, after: EventLoopThread | None = None) -> None:
        self.pid: int = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.read_pool: ThreadPool = ThreadPool("read", read_threads, max_running=1)
        self.decode_pool: ThreadPool = ThreadPool("decode", decode_threads)
        self.finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._read_pool_sizer = ReadPoolSizer(self.read_pool, self.decode_pool)
        self._after = after
        self._tasks: set[asyncio.Task[Any]] = set()
        self._early: list[Callable[[], Coroutine[Any, Any, Any]]] | None = []
        self._cleanups: list[Callable[[], Awaitable[None]]] = []
        self._at_exit: list[Callable[[], object]] = []
        self._at_death: list[Callable[[WorkerDiedError], object]] = []
        self._dropped: deque[Any] = deque()
        self._watched: weakref.ref[Any] | None = None
        self._beat_due = float("inf")
        self._loop_delay_s = 0.0
        self._stop_requested = False
        self._stop_signal = asyncio.Event()
        # The outcome of creating the loop.
        self._created: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = DaemonThread(self._main, "aiofeed-engine")

    def launch(self, *, import_torch: bool = True) -> None:
        """Start the thread; does nothing if it was started before.

        Args:
            import_torch: Import torch here, in the caller's thread. Ctrl-C or interpreter exit while a daemon thread
                imports torch would print a second traceback, and hide from CPython that Ctrl-C ended the process.
                Worker processes do not need torch.
        """
        if self.loop is not None:
            return
        if import_torch:
            import torch  # noqa: F401
        try:
            threads.register(self)
            self._thread.start()
            # The thread creates the loop: a Ctrl-C here would lose a new loop, whose descriptors would stay open.
            if (error := self._created.get()) is not None:
                raise error
        except BaseException:  # Ctrl-C, the system refuses a thread or descriptors, or the interpreter is exiting
            if self._thread.absent():
                self._finish()
            raise

    def _finish(self) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it is finished
            self.finished.set_result(None)

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called or the watched owner was collected."""
        return self._stop_requested or bool(self._dropped)

    @property
    def inherited(self) -> bool:
        """Whether the threads belong to the parent process, because this process is a fork."""
        return self.pid != os.getpid()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is collected; replaces the previous owner."""
        self._watched = weakref.ref(owner, self._dropped.append)

    def start(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function as a task of the loop, from any thread; does nothing after ``stop``.

        The coroutine is created on the loop: one created here and lost to Ctrl-C would warn that it was never awaited.
        """
        self.call(self._start, function)

    def _start(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self._stop_requested:
            return
        if self._early is not None:
            self._early.append(function)
            return
        task = asyncio.get_running_loop().create_task(function())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the loop, from any thread; does nothing after the loop is closed."""
        if self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the loop is closed; the caller learns of it from the queue

    def at_stop(self, cleanup: Callable[[], Awaitable[None]]) -> None:
        """Await ``cleanup()`` on the loop when the thread stops. Call this on the loop."""
        self._cleanups.append(cleanup)

    def at_exit(self, function: Callable[[], object]) -> None:
        """Call a function when the loop has ended. It must not block: stop another thread, for example."""
        self._at_exit.append(function)

    def at_death(self, function: Callable[[WorkerDiedError], object]) -> None:
        """Call a function with the error if the loop ends without ``stop``. It must not block."""
        self._at_death.append(function)

    def stop(self) -> None:
        """Signal the threads to end. Never blocks; idempotent."""
        self._stop_requested = True
        if not self._thread.started:
            self._finish()
        elif not self.inherited:
            self.call(self._stop_signal.set)  # before the loop exists, the flag suffices

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for all threads; return whether they have ended.

        After a timeout the interpreter's exit does not wait for them.
        """
        if self.inherited or self._thread.current:
            return True
        deadline = time.monotonic() + timeout_s
        for part in (self._thread, self.read_pool, self.decode_pool):
            if not part.join(max(0.0, deadline - time.monotonic())):
                threads.unregister(self)
                return False
        return True

    def _main(self) -> None:
        try:
            loop = new_event_loop()
        except BaseException as error:  # noqa: BLE001 - raised in `launch`
            self._finish()
            self._created.put(error)
            return
        # The jobs of asyncio.to_thread and aiofiles run in daemon threads, too.
        loop.set_default_executor(self.read_pool)
        loop.set_exception_handler(self._on_error)
        self.loop = loop
        self._created.put(None)
        with threads.halted_at_exit(loop):
            self._run(loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for step in (self._serve, self._wind_down):
                try:
                    loop.run_until_complete(step())
                except BaseException as error:  # noqa: BLE001 - SystemExit in a task of user code, for example
                    self._report_death(error)
        finally:
            self.read_pool.stop()
            self.decode_pool.stop()
            for function in self._at_exit:
                function()
            # Not a method: the collector does not see the references of uvloop's loop.
            loop.set_exception_handler(_log_unless_fatal)
            loop.close()
            log.debug("event loop: stopped")
            self._finish()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the loop after an error in a callback of aiofeed; otherwise the consumer would wait forever."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception) and _is_of_aiofeed(error):
            self._report_death(error)
            self.stop()
        else:
            _log_unless_fatal(loop, context)

    def _report_death(self, error: BaseException) -> None:
        died = WorkerDiedError(f"the thread that feeds this iterator died of {format_error(error)}")
        died.__cause__ = error
        for function in self._at_death:
            function(died)

    async def _serve(self) -> None:
        if self._after is not None:
            predecessor, self._after = self._after.finished, None
            await asyncio.wait([asyncio.wrap_future(predecessor)], timeout=CLEANUP_S)
        log.debug("event loop: started")
        early, self._early = self._early or [], None
        for function in early:
            self._start(function)
        self._beat()
        # A stop() before the loop existed has set the flag only, not the signal.
        if not self._stop_requested:
            await self._stop_signal.wait()

    def cpu_s(self) -> float:
        """The seconds in all for which the threads of the loop and of decoding were on the processor; 0 if unknown."""
        return machine.threads_cpu_s([self._thread.thread.native_id or 0, *self.decode_pool.core_waits])

    def loop_delay_s(self) -> float:
        """The seconds in all by which the loop's regular timer was late, because other threads held the GIL or cores.

        A thread that holds the GIL for much less than the timer's interval, of 5 to 50 ms, is mostly not noticed.
        """
        return self._loop_delay_s + max(0.0, time.perf_counter() - self._beat_due)

    def _beat(self) -> None:
        self._loop_delay_s = self.loop_delay_s()
        if self._dropped:
            self._stop_signal.set()
        else:
            interval_s = self._read_pool_sizer.resize()
            self._beat_due = time.perf_counter() + interval_s + TIMER_SLACK_S
            asyncio.get_running_loop().call_later(interval_s, self._beat)

    async def _wind_down(self) -> None:
        self._stop_requested = True
        self.read_pool.drain()
        self.decode_pool.drain()
        await _cancel(set(self._tasks))
        for cleanup in reversed(self._cleanups):
            await _run_cleanup(cleanup)
        # Tasks created by user code, such as a session's keep-alive; pending at close they would cause a warning.
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        await asyncio.get_running_loop().shutdown_asyncgens()


def _log_unless_fatal(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's handler, without its "exception was never retrieved" for exceptions that ended the loop."""
    if not isinstance(context.get("exception"), SystemExit | KeyboardInterrupt):
        loop.default_exception_handler(context)


def _is_of_aiofeed(error: Exception) -> bool:
    """Return whether the callback that raised an error is a function of aiofeed."""
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(("asyncio", "uvloop")):
            return bool(module.startswith("aiofeed"))
        traceback = traceback.tb_next
    return False


async def _cancel(tasks: set[Any]) -> None:
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    _, stuck = await asyncio.wait(tasks, timeout=CLEANUP_S)
    for task in stuck:
        log.warning("a coroutine did not end within %.0f s of being cancelled and is left behind: %r", CLEANUP_S, task)
        # asyncio would log at collection that the task is still pending.
        task._log_destroy_pending = False


async def _run_cleanup(cleanup: Callable[[], Awaitable[None]]) -> None:
    try:
        await asyncio.wait_for(cleanup(), CLEANUP_S)
    except (Exception, asyncio.CancelledError):  # user code may raise anything, and no caller is left to receive it
        log.exception("a source's aclose() failed")
