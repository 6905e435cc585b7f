"""Daemon threads with bounded joins, and what happens to them at interpreter exit and after a fork.

Python runs signal handlers in the main thread, between any two bytecodes: Ctrl-C can arrive while a thread is being
started or joined, and everything here stays usable then. At interpreter exit all registered threads are signalled to
stop and joined, within ``EXIT_S``. A forked child has none of these threads. It keeps the parent's objects alive and
untouched, because closing its copy of an epoll descriptor would remove file descriptors from the parent's.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import contextvars
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

# The time that interpreter exit waits for the threads of all feeders together.
EXIT_S = 1.0
# The time that close() waits for threads whose current sample cannot be interrupted.
JOIN_S = 5.0
# A signal that arrives just before the main thread blocks does not wake it, so blocking waits are cut into pieces.
POLL_INTERVAL_S = 0.1
# After an interrupted start(), a thread that has not begun within this time does not exist.
BEGIN_S = 0.2
# The time that interpreter exit waits for an event loop to halt. A loop that takes longer is in a callback that blocks.
HALT_S = 0.1
# The names of decode threads begin with this.
DECODE_THREAD_NAME = "aiofeed-decode"


class _Flag:
    """Set once. A signal handler that raises out of ``wait`` leaves no lock acquired, unlike in ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Set the flag; call it once."""
        self._set = True
        self._unset.release()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the flag; return whether it is set."""
        if not self._set and self._unset.acquire(timeout=timeout_s):
            self._unset.release()
        return self._set


class DaemonThread:
    """A daemon thread whose ``start`` and ``join`` may be interrupted by Ctrl-C and repeated.

    ``threading.Thread`` does not allow that: a Ctrl-C in ``start`` may leave a lock acquired for which the new thread
    then waits forever, and before Python 3.13 an interrupted ``join`` counts as the end of the thread.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target: Callable[[], object] | None = target
        # By default a free-threaded Python 3.14 would give it the context of its creator, and so keep the objects of an
        # engine's task for the life of the thread.
        options: dict[str, Any] = {"context": contextvars.Context()} if sys.version_info >= (3, 14) else {}
        self.thread: threading.Thread = threading.Thread(target=self._run, name=name, daemon=True, **options)
        self._begun = _Flag()
        self._ended = _Flag()
        self._interrupted = False
        self.started: bool = False

    def start(self) -> None:
        """Start the thread. If an exception interrupts this call, the thread may run nevertheless."""
        self.started = True
        try:
            if threading.current_thread() is not threading.main_thread():
                self.thread.start()
                return
            # In another thread: only the main thread runs signal handlers.
            outcome: SimpleQueue[BaseException | None] = SimpleQueue()
            _thread.start_new_thread(self._start, (outcome,))
            if (error := outcome.get()) is not None:
                raise error
        except BaseException:
            self._interrupted = True
            raise

    def _start(self, outcome: SimpleQueue[BaseException | None]) -> None:
        try:
            self.thread.start()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            outcome.put(error)
        else:
            outcome.put(None)

    def _run(self) -> None:
        _running.add(self)
        self._begun.set()
        target, self._target = self._target, None
        assert target is not None
        try:
            target()
        finally:
            del target
            _running.discard(self)
            self._ended.set()

    @property
    def ident(self) -> int | None:
        """The thread's identifier; ``None`` before it runs."""
        return self.thread.ident

    @property
    def current(self) -> bool:
        """Whether this is the calling thread."""
        return threading.current_thread() is self.thread

    def is_alive(self) -> bool:
        """Return whether the target has begun and has not returned."""
        return self._begun.is_set() and not self._ended.is_set()

    def absent(self, timeout_s: float = BEGIN_S) -> bool:
        """Whether the thread does not exist; after an interrupted ``start`` this takes up to ``timeout_s`` to know."""
        return not self.started or (self._interrupted and not self._begun.wait(timeout_s))

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the end of the thread; return whether it has ended.

        A signal handler can raise out of this call.
        """
        if self.current:
            return True
        if self.absent(max(0.0, min(timeout_s, BEGIN_S))):
            return True
        deadline = time.monotonic() + timeout_s
        while not self._ended.wait(min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        # The target has returned, but the operating system's thread may exist for another moment.
        self.thread.join(POLL_INTERVAL_S)
        return True


class Stoppable(Protocol):
    """An object with threads that can be stopped."""

    pid: int

    def stop(self) -> None:
        """Signal the threads to end; never blocks."""

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the threads; return whether they have ended."""


# Not a WeakSet: its callback is Python code, and a KeyboardInterrupt raised in it during a collection would be lost.
_live: set[weakref.ref[Stoppable]] = set()
_inherited: list[Stoppable] = []
_running: set[DaemonThread] = set()
_loops: set[asyncio.AbstractEventLoop] = set()
_forked = False
# Also if this module is imported by an atexit handler: then `_stop_all` is registered too late to be called.
_ending = not threading.main_thread().is_alive()


def register(threads: Stoppable) -> None:
    """Stop these threads when the interpreter exits. Holds a weak reference.

    Raises:
        RuntimeError: The exit has stopped all threads already. Threads that start later would run on in a finalized
            interpreter, which aborts the process if one of them is in C++ code.
    """
    if _ending:
        raise RuntimeError(
            "the interpreter is exiting, and aiofeed starts no more threads: an atexit handler may use a feeder only "
            "if it was registered after `import aiofeed`"
        )
    _live.add(weakref.ref(threads, _live.discard))


def unregister(threads: Stoppable) -> None:
    """Do not wait for these threads at interpreter exit, because an earlier join timed out."""
    _live.discard(weakref.ref(threads))


@contextlib.contextmanager
def halted_at_exit(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Halt an event loop that runs in this context at interpreter exit, if it cannot be stopped in time."""
    _loops.add(loop)
    try:
        yield
    finally:
        _loops.discard(loop)


def _registered() -> list[Stoppable]:
    return [threads for reference in list(_live) if (threads := reference()) is not None]


@atexit.register
def _stop_all() -> None:
    global _ending
    _ending = True
    ours = [threads for threads in _registered() if threads.pid == os.getpid()]
    for threads in ours * 2:  # a second Ctrl-C may interrupt a call, which is then repeated
        with contextlib.suppress(KeyboardInterrupt):
            threads.stop()
    _join_all(ours, EXIT_S / 2)
    if sys.version_info < (3, 14):
        _interrupt_decode_threads()
    _join_all(list(_running), EXIT_S / 2)
    _halt_loops()


def _halt_loops() -> None:
    """Block the threads of event loops that still run, because they wait for user code that does not return.

    A timer of uvloop that fires after the interpreter was finalized ends the process with a segmentation fault.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for loop in list(_loops):
            halted = _Flag()
            with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
                loop.call_soon_threadsafe(_halt, halted)
                halted.wait(HALT_S)


def _halt(halted: _Flag) -> None:
    halted.set()
    _Flag().wait(threading.TIMEOUT_MAX)


def _interrupt_decode_threads() -> None:
    """Raise SystemExit in the decode threads that still run; it takes effect when they next run Python bytecode.

    Before Python 3.14, an exited interpreter unwinds the stack of a daemon thread that returns from C++ to Python. C++
    frames do not survive that: a decoder between two calls of torch would abort the process. From 3.14 on such a thread
    hangs instead (CPython gh-87135), so this function can be deleted together with the support of 3.13.
    """
    decoding = [thread.thread for thread in list(_running) if thread.thread.name.startswith(DECODE_THREAD_NAME)]
    if not decoding:
        return
    import ctypes

    for thread in decoding:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def _join_all(all_threads: Sequence[Stoppable | DaemonThread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        for threads in all_threads:
            threads.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass  # the user wants the process to end now, and it is about to


def is_ending() -> bool:
    """Whether the interpreter is exiting: daemon threads should not call C++ code that calls back into Python."""
    return _ending


def may_be_fork() -> bool:
    """Return whether this process may be a fork of a process in which native libraries had threads.

    A fork does not copy threads, and OpenMP waits for them without end. A fork by ``os.fork`` before this module was
    imported is not noticed.
    """
    import multiprocessing

    if _forked:
        return True
    if multiprocessing.parent_process() is None:
        return False
    # A child of multiprocessing that was spawned, not forked, has imported its parent's main module under this name.
    return getattr(sys.modules.get("__main__"), "__name__", None) != "__mp_main__"


def _after_fork_in_child() -> None:
    global _forked
    _forked = True
    _inherited.extend(_registered())
    _live.clear()
    _running.clear()
    _loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
