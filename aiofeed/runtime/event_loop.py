"""A thread with an event loop of its own, and the executors that belong to it.

The shutdown contract, kept here and in ``engine.py``:

- ``stop`` only signals. It may be called from any thread, a signal handler or a dying interpreter.
- Then, on the loop's thread: running tasks are cancelled and awaited, clean-ups run (a source's ``aclose``), the
  executors let go of their threads, the loop is closed. Whatever does not end within its bound is left behind as a
  daemon, with a log line.
- Making a runtime starts nothing: whoever made it has it in hand when its thread starts, and can stop it.
- Nothing here refers to a feeder or an iterator. When the one that is watched is dropped, its weak reference lands in
  a deque (a C function: no Python code runs in the collector) and the loop's heartbeat sees it.
- Interpreter exit and forks are ``threads.py``'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiofeed.core.errors import WorkerDiedError
from aiofeed.runtime import threads
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.runtime.threads import DaemonThread

log = logging.getLogger("aiofeed.runtime")

# Dropped feeders are noticed within this; 20 wake-ups a second cost a ten-thousandth of a core.
HEARTBEAT_S = 0.05
# How often the lanes of blocking reads are looked at while decoders wait for them. Doubling each time, the widest are
# open within 0.1 s; they are halved again when so many looks in all found the decoders with more than they can do.
LOOK_S = 0.005
SURPLUS_LOOKS = 4
# Part of its time that a read spends waiting where more of them at a time help. Reading from the page cache beside
# busy decoders it is a half or less; on storage that answers in a millisecond, nearly all of it.
WAITING_SHARE = 0.9
# What a source's aclose, or a coroutine that resists cancellation, may take before it is left behind.
CLEANUP_S = 5.0
# Reading is waiting: on local files a few threads do; a network file system wants one per request under way.
MOST_READ_THREADS = 64


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop is not to be had."""
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
    """The engine's thread: its loop, the threads that read and the threads that decode.

    Args:
        read_threads: most threads for blocking reads; they are started as needed.
        decode_threads: most threads that decode.
        after: a runtime that has to be gone first, so that a source is never opened twice at a time.
    """

    def __init__(self, *, read_threads: int, decode_threads: int, after: EventLoopThread | None = None) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.read_pool = ThreadPool("read", read_threads, max_running=1)
        self.decode_pool = ThreadPool("decode", decode_threads)
        self.finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._after = after
        self._tasks: set[asyncio.Task[Any]] = set()
        self._early: list[Callable[[], Coroutine[Any, Any, Any]]] | None = []
        self._cleanups: list[Callable[[], Awaitable[None]]] = []
        self._at_exit: list[Callable[[], object]] = []
        self._at_death: list[Callable[[WorkerDiedError], object]] = []
        self._surplus = 0
        self._dropped: deque[Any] = deque()
        self._watched: weakref.ref[Any] | None = None
        self._stop_requested = False
        self._stop_signal = asyncio.Event()
        self._thread = DaemonThread(self._main, "aiofeed-engine")

    def launch(self) -> None:
        """Start the thread; nothing happens where it was started before."""
        if self.loop is not None:
            return
        threads.register(self)
        try:
            self.loop = new_event_loop()
            # Whatever a source hands to the loop's default executor (asyncio.to_thread, aiofiles) stays among daemons.
            self.loop.set_default_executor(self.read_pool)
            self._thread.start()
        except BaseException:  # Ctrl-C, or no more threads
            if self._thread.absent():
                self._never_began()
            raise

    def _never_began(self) -> None:
        if self.loop is not None:
            self.loop.close()
        if not self.finished.done():
            self.finished.set_result(None)

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called, or what was watched has been dropped."""
        return self._stop_requested or bool(self._dropped)

    @property
    def inherited(self) -> bool:
        """Whether this runtime's threads live in a parent process."""
        return self.pid != os.getpid()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped; it replaces the one watched before."""
        self._watched = weakref.ref(owner, self._dropped.append)

    def start(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function as a task of the loop, from any thread.

        The coroutine is made on the loop: made here and lost to Ctrl-C, it would complain that nobody awaited it.
        """
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._start, function)

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
        """Call a function on the loop, from any thread; nothing happens once the loop is closed."""
        if self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # closed: whoever asked learns of it from the handoff

    def at_stop(self, cleanup: Callable[[], Awaitable[None]]) -> None:
        """Await ``cleanup()`` on the loop when the runtime stops; called on the loop."""
        self._cleanups.append(cleanup)

    def at_exit(self, function: Callable[[], object]) -> None:
        """Call a function that only signals, once the loop has come to its end; another thread to stop, say."""
        self._at_exit.append(function)

    def at_death(self, function: Callable[[WorkerDiedError], object]) -> None:
        """Call a function that only signals, should the loop come to an end that nobody asked for."""
        self._at_death.append(function)

    def stop(self) -> None:
        """Signal the threads to end. Never blocks; idempotent."""
        self._stop_requested = True
        if self.loop is None:
            self._never_began()
        elif not self.inherited:
            self.call(self._stop_signal.set)

    def join(self, timeout_s: float) -> bool:
        """Wait until all threads have ended, up to ``timeout_s``; whether they have."""
        if self.inherited or self._thread.current:
            return True
        deadline = time.monotonic() + timeout_s
        return all(
            ending.join(max(0.0, deadline - time.monotonic()))
            for ending in (self._thread, self.read_pool, self.decode_pool)
        )

    def _main(self) -> None:
        assert self.loop is not None
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - SystemExit in a task of the user's, say; whoever waits must hear
            died = WorkerDiedError(f"the thread that feeds this iterator died of {type(error).__name__}: {error}")
            died.__cause__ = error
            for tell in self._at_death:
                tell(died)
        finally:
            self.read_pool.stop()
            self.decode_pool.stop()
            for function in self._at_exit:
                function()
            self.loop.close()
            log.debug("event loop: stopped")
            self.finished.set_result(None)

    async def _serve(self) -> None:
        if self._after is not None:
            predecessor, self._after = self._after.finished, None
            await asyncio.wait([asyncio.wrap_future(predecessor)], timeout=CLEANUP_S)
        log.debug("event loop: started")
        early, self._early = self._early or [], None
        for function in early:
            self._start(function)
        self._beat()
        self._watch_reads()
        # Where it was stopped before the loop was there, nobody could wake the wait.
        if not self._stop_requested:
            await self._stop_signal.wait()
        self._stop_requested = True
        self.read_pool.drain()
        self.decode_pool.drain()
        await _cancel(set(self._tasks))
        for cleanup in reversed(self._cleanups):
            await _bounded(cleanup)
        # Tasks of the user's own (a session's keep-alive, say) end here rather than with a warning.
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _watch_reads(self) -> None:
        """Widen the lanes of blocking reads while that helps, and narrow them while it does not.

        Files in the page cache are read faster than anybody decodes them, by one thread; a second only fights the
        decoders for the GIL. Storage that makes its readers wait wants as many as there are reads. So lanes are
        added where reads wait for storage and decoders for reads, and taken away where decoders have a backlog.
        """
        reads, decodes = self.read_pool, self.decode_pool
        starving = bool(reads.backlog) and decodes.running < decodes.max_running
        if starving and reads.waiting_share > WAITING_SHARE:
            reads.set_max_running(reads.max_running * 2)
        elif decodes.backlog > decodes.max_threads and reads.max_running > 1:
            self._surplus += 1
            if self._surplus >= SURPLUS_LOOKS:
                self._surplus = 0
                reads.set_max_running(reads.max_running // 2)
        asyncio.get_running_loop().call_later(LOOK_S if starving else HEARTBEAT_S, self._watch_reads)

    def _beat(self) -> None:
        if self._dropped:
            self._stop_signal.set()
        else:
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)


async def _cancel(tasks: set[Any]) -> None:
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    _, stuck = await asyncio.wait(tasks, timeout=CLEANUP_S)
    for task in stuck:
        log.warning("a coroutine did not end within %.0f s of being cancelled and is left behind: %r", CLEANUP_S, task)
        # It can never finish, and the line above said so: asyncio need not say it again when it is collected.
        task._log_destroy_pending = False


async def _bounded(cleanup: Callable[[], Awaitable[None]]) -> None:
    try:
        await asyncio.wait_for(cleanup(), CLEANUP_S)
    except (Exception, asyncio.CancelledError):  # the user's coroutine may raise anything; nobody is left to hear it
        log.exception("a source's aclose() failed")
