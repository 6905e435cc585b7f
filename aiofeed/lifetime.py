"""Interpreter exit and forks: what happens to threads that are still there.

At exit they are told to stop and waited for, with a bound. After a fork the child has none of them; it keeps the
parent's objects alive and untouched, since closing its copy of an epoll descriptor takes descriptors out of the
parent's.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

# An interpreter that ends waits this long for all feeders together.
EXIT_S = 1.0


class Stoppable(Protocol):
    """Threads with an end."""

    pid: int

    def stop(self) -> None:
        """Signal the threads to end; never blocks."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for them, up to ``timeout_s``; whether they have ended."""
        ...


_live: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_inherited: list[Stoppable] = []


def register(threads: Stoppable) -> None:
    """Stop these threads when the interpreter ends, unless they have been collected before."""
    _live.add(threads)


@atexit.register
def _stop_all() -> None:
    ours = [threads for threads in _live if threads.pid == os.getpid()]
    for threads in ours:
        threads.stop()
    for threads in ours:
        threads.join(EXIT_S / len(ours))


def _keep_inherited() -> None:
    _inherited.extend(_live)
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)
