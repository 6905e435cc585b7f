"""Whether a server lives, asked in any thread: what its device memory held counts only if it did."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from aiofeed.core.errors import FeedError, WorkerDiedError
from aiofeed.devices.backend import Event
from aiofeed.processes.ipc.peers import exiting, is_alive
from aiofeed.processes.ipc.shared_device import SharedEvent

# How soon, and then how seldom, an event is looked at again.
_FIRST_LOOK_S = 20e-6
_LOOK_S = 1e-3


class Pulse:
    """Tells of a process's life as it is now, not as of its last message.

    Where the server dies, its device may drop what it had queued, or complete events whose work was never done. So an
    event of a copy proves that the copy is right only if the server is seen to live after the event was complete.

    Args:
        pid: the process.
        died: makes the error to raise.
    """

    def __init__(self, pid: int, died: Callable[[], FeedError]) -> None:
        self._pid = pid
        self._died = died
        self._lock = threading.Lock()
        self._descriptor = -1
        self._settled = self._ended = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = True
            except OSError:
                pass  # no room for one, or an older kernel: a signal's number then asks

    def alive(self) -> bool:
        """Whether the process has not ended, nor begun to."""
        with self._lock:
            if self._ended or self._descriptor < 0:
                self._ended = self._ended or not is_alive(self._pid)
            else:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                self._ended = bool(poll.poll(0)) or exiting(self._pid)
            return not self._ended

    def check(self) -> None:
        """Raise where it has ended, unless all that was copied is known to be right."""
        if not self._settled and not self.alive():
            raise self._died()

    def wait(self, event: Event | SharedEvent, limit_s: float | None = None) -> None:
        """Wait until work on its memory is complete, and known to be right. For threads of aiofeed's own.

        An event whose server has died may never be complete, so it is looked at and not waited for.

        Raises:
            WorkerDiedError: the process has ended.
            TimeoutError: it took longer than ``limit_s``.
        """
        pause_s, deadline = _FIRST_LOOK_S, None if limit_s is None else time.monotonic() + limit_s
        while not self._complete(event):
            self.check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"a copy from the server's device memory took longer than {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        self.check()

    def _complete(self, event: Event | SharedEvent) -> bool:
        try:
            return event.query()
        except RuntimeError:
            self.check()  # the server has died, and what it had with it: that is what is to be heard of
            raise

    def settle(self) -> None:
        """All that was copied is right, and nothing is copied any more: from here on the process may end."""
        self._settled = True

    def close(self) -> None:
        """Ask no more; idempotent."""
        with self._lock:
            descriptor, self._descriptor, self._ended = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)


def died(path: object, pid: int) -> WorkerDiedError:
    """The error of a server that ended without a word."""
    who = f" (pid {pid})" if pid else ""
    return WorkerDiedError(f"the server at {path}{who} has died: start it again, and attach again")
