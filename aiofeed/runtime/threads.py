"""Threads that can be told to end and waited for, interpreter exit, and forks.

A signal handler runs in the main thread, between any two calls: Ctrl-C may come while a thread is being started, or
while one waits for its end. Whatever is written here holds then, too. At exit threads are told to stop and waited for,
with a bound. After a fork the child has none of them; it keeps the parent's objects alive and untouched, since closing
its copy of an epoll descriptor takes descriptors out of the parent's.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

# An interpreter that ends waits this long for all feeders together.
EXIT_S = 1.0
# close() waits this long for threads that are at a sample they cannot leave.
JOIN_S = 5.0
# A signal that arrives just before the main thread blocks does not wake it: it looks this often whether there was one.
LOOK_S = 0.1
# A thread whose start was interrupted has begun by then, or was never made.
BEGIN_S = 0.2
# Of Linux's flags of a process, include/linux/sched.h.
_PF_FORKNOEXEC = 0x40


class DaemonThread:
    """A daemon thread that can be waited for, whatever interrupted its start or an earlier wait.

    ``threading.Thread`` cannot: before Python 3.13, one whose ``join`` was interrupted counts as ended, and one whose
    ``start`` was, as not started.

    Args:
        target: what it runs.
        name: as debuggers show it.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target: Callable[[], object] | None = target
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        # threading notes each thread in a WeakSet, whose callback is Python code: a Ctrl-C that came in it, as a thread
        # of an earlier pass was dropped, was printed and lost. Whoever runs is noted elsewhere, too.
        if (noted := getattr(threading, "_dangling", None)) is not None:
            noted.discard(self.thread)
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._interrupted = self._started = False

    def start(self) -> None:
        """Start it; if this is interrupted, it may run nevertheless."""
        self._started = True
        try:
            self.thread.start()
        except BaseException:
            self._interrupted = True
            raise

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
    def current(self) -> bool:
        """Whether it is the calling thread."""
        return threading.current_thread() is self.thread

    def is_alive(self) -> bool:
        """Whether there is more for it to do."""
        return self._begun.is_set() and not self._ended.is_set()

    def interrupt(self) -> None:
        """Let SystemExit be raised in it, once it is back in Python code."""
        import ctypes

        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(SystemExit))

    def absent(self, timeout_s: float = BEGIN_S) -> bool:
        """Whether there is no such thread; where its start was interrupted, that is known after ``timeout_s``."""
        return not self._started or (self._interrupted and not self._begun.wait(timeout_s))

    def join(self, timeout_s: float) -> bool:
        """Wait for its end, up to ``timeout_s``; whether it has ended. A signal handler can raise out of it."""
        if self.current:
            return True
        if self.absent(min(timeout_s, BEGIN_S)):
            return True
        deadline = time.monotonic() + timeout_s
        while not self._ended.wait(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        # It has nothing more to do, but the operating system's thread may be there for another moment.
        self.thread.join(LOOK_S)
        return True


class Stoppable(Protocol):
    """Threads with an end."""

    pid: int

    def stop(self) -> None:
        """Signal the threads to end; never blocks."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for them, up to ``timeout_s``; whether they have ended."""
        ...


# No WeakSet: its callback is Python code, and a Ctrl-C that came as the collector called it would be lost.
_live: set[weakref.ref[Stoppable]] = set()
_inherited: list[Stoppable] = []
# Since this module was imported.
_forked = False
_ending = False
_running: set[DaemonThread] = set()


def register(threads: Stoppable) -> None:
    """Stop these threads when the interpreter ends, unless they have been collected before."""
    _live.add(weakref.ref(threads, _live.discard))


def forget(threads: Stoppable) -> None:
    """They have been waited for in vain: the interpreter's end need not do so again."""
    _live.discard(weakref.ref(threads))


def _registered() -> list[Stoppable]:
    return [threads for reference in list(_live) if (threads := reference()) is not None]


@atexit.register
def _stop_all() -> None:
    global _ending
    _ending = True
    ours = [threads for threads in _registered() if threads.pid == os.getpid()]
    for threads in ours:
        threads.stop()
    _wait(ours, EXIT_S / 2)
    # An interpreter that has ended unwinds the threads that come back to it, and C++ code does not survive that: a
    # decoder that goes from one call of torch to the next would abort the process. Such a one is to end before.
    late = list(_running)
    if late:
        _quiet_about(late)
    for thread in late:
        thread.interrupt()
    _wait(late, EXIT_S / 2)


def _quiet_about(late: Sequence[DaemonThread]) -> None:
    """An interrupt that comes while a thread is in a finalizer is reported: let that not be a process's last word."""
    report = sys.unraisablehook
    threads = {thread.thread for thread in late}

    def unless_interrupted(what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is not SystemExit or threading.current_thread() not in threads:
            report(what)

    sys.unraisablehook = unless_interrupted


def _wait(all_of: Sequence[Stoppable | DaemonThread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        for threads in all_of:
            threads.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass  # somebody is in a hurry, and the interpreter ends anyway


def is_ending() -> bool:
    """Whether the interpreter is about to end: daemon threads should begin no more C++ that comes back to it."""
    return _ending


def may_be_fork() -> bool:
    """Whether this process may have been forked from one with threads of native libraries, which a fork does not copy.

    OpenMP waits for them for ever.
    """
    import multiprocessing

    if _forked or _forked_by_the_kernel():
        return True
    if multiprocessing.parent_process() is None:
        return False
    # A child of multiprocessing that was not forked has loaded its parent's main module anew, under this name.
    return getattr(sys.modules.get("__main__"), "__name__", None) != "__mp_main__"


@cache
def _forked_by_the_kernel() -> bool:
    """Whether this process was forked and has begun no other program since; before this module was imported, say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The program's name, in parentheses, may have spaces. The flags are the ninth field, its the second.
            flags = int(file.read().rpartition(b")")[2].split()[6])
    except (OSError, IndexError, ValueError):  # not Linux's
        return False
    return bool(flags & _PF_FORKNOEXEC)


def _keep_inherited() -> None:
    global _forked
    _forked = True
    _inherited.extend(_registered())
    _live.clear()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)
