"""A thread beside the consumer that works only as far ahead of it as there is room."""

from __future__ import annotations

import asyncio
import os
import weakref
from queue import SimpleQueue

from aiofeed.kernel.runtime.threads import JOIN_S, DaemonThread, register, unregister


class BoundedThread:
    """A thread that handles batches as long as there is room for them and its owner exists; ``_main`` runs in it.

    It may handle ``room`` batches before the consumer takes one.
    """

    def __init__(self, name: str, room: int) -> None:
        self.pid: int = os.getpid()
        self._stopped = False
        self._owner: weakref.ref[object] | None = None
        # One True per batch that may be handled. Any other item ends the thread.
        self._room: SimpleQueue[object] = SimpleQueue()
        for _ in range(room):
            self._room.put(True)
        self._thread = DaemonThread(self._main, name)

    def start(self) -> None:
        """Start the thread; does nothing if it was started before. It is stopped at interpreter exit."""
        if not self._thread.started:
            register(self)
            self._thread.start()

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped. Replaces the previously watched owner."""
        # The callback is a C function: the collector runs no Python code.
        self._owner = weakref.ref(owner, self._room.put)

    def stop(self) -> None:
        """Tell the thread to end. Never blocks; user code that is running finishes first."""
        self._stopped = True
        self._room.put(False)

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the thread; return whether it has ended.

        After a timeout the interpreter's exit does not wait for it.
        """
        if self._thread.join(timeout_s):
            return True
        unregister(self)
        return False

    async def stopped(self) -> None:
        """Wait for the thread to end without blocking the caller's event loop."""
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _unwanted(self) -> bool:
        """Return whether the thread was stopped or its owner was dropped."""
        return self._stopped or (self._owner is not None and self._owner() is None)

    def _main(self) -> None:
        raise NotImplementedError
