"""Batches that somebody else makes: an iterable in a thread of its own, an async iterable on the engine's loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterable, Iterable
from queue import SimpleQueue
from typing import Any

from aiofeed.core.errors import as_exception
from aiofeed.runtime import threads
from aiofeed.runtime.buffers import Memory
from aiofeed.runtime.cancellation import clear_cancellation, is_cancelled
from aiofeed.runtime.items import Closed, Ended, Failed, Item, Ready
from aiofeed.runtime.queue import Handoff
from aiofeed.runtime.tensors import stage
from aiofeed.runtime.threads import DaemonThread


def _ready(batch: Any, number: int, memory: Memory | None) -> Ready:
    if memory is None:
        return Ready(number, 0, batch)
    lease = memory.lease()
    staged, _ = stage(batch, lease)
    return Ready(number, 0, staged, lease)


class ThreadPull:
    """Takes batches from an iterable, a bounded number ahead.

    Args:
        batches: iterated in a thread of its own, started and closed there.
        handoff: where the batches go.
        room: how many may wait.
        memory: pinned memory that tensors are moved to; ``None`` leaves them where they are.
    """

    def __init__(self, batches: Iterable[Any], handoff: Handoff[Item], *, room: int, memory: Memory | None) -> None:
        self._batches: Iterable[Any] | None = batches
        self.pid = os.getpid()
        self._handoff = handoff
        self._memory = memory
        self._stopped = False
        self._watched: weakref.ref[Any] | None = None
        # Anything but True ends the thread. When the one that is watched is dropped, its weak reference lands here
        # (a C function: no Python code runs in the collector).
        self._room: SimpleQueue[object] = SimpleQueue()
        for _ in range(room):
            self._room.put(True)
        self._thread = DaemonThread(self._main, "aiofeed-pull")

    def launch(self) -> None:
        """Start the thread."""
        threads.register(self)
        self._thread.start()

    def taken(self) -> None:
        """A batch has left the queue."""
        self._room.put(True)

    def watch(self, owner: object) -> None:
        """End when ``owner`` is dropped."""
        self._watched = weakref.ref(owner, self._room.put)

    def stop(self) -> None:
        """Signal the thread to end. Never blocks; an iterable that is computing its next batch is left to finish it."""
        self._stopped = True
        self._room.put(False)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, up to ``timeout_s``; whether it has."""
        return self._thread.join(timeout_s)

    def _main(self) -> None:
        batches, self._batches = self._batches, None
        assert batches is not None
        try:
            iterator = iter(batches)
            del batches
            try:
                self._pull(iterator)
            finally:
                # A generator is closed by the thread that ran it.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # noqa: BLE001 - the user's iterable may raise anything; it is raised at the `for` line
            self._handoff.put(Failed(error))
        else:
            self._handoff.put(Closed())  # where it has not ended: a copy thread behind this one ends too

    def _over(self) -> bool:
        return self._stopped or (self._watched is not None and self._watched() is None)

    def _pull(self, iterator: Any) -> None:
        number = 0
        # Room that was there before it was told to end is not used any more.
        while self._room.get() is True and not self._over():
            try:
                batch = next(iterator)
            except StopIteration:
                self._handoff.put(Ended())
                return
            self._handoff.put(_ready(batch, number, self._memory))
            del batch
            number += 1


class LoopPull:
    """Takes batches from an async iterable, on the engine's loop.

    Args:
        batches: iterated by one task.
        handoff: where the batches go.
        room: how many may wait.
        memory: pinned memory that tensors are moved to; ``None`` leaves them where they are.
    """

    def __init__(
        self, batches: AsyncIterable[Any], handoff: Handoff[Item], *, room: int, memory: Memory | None
    ) -> None:
        self._batches = batches
        self._handoff = handoff
        self._memory = memory
        self._room = asyncio.Semaphore(room)

    def taken(self, _: int = 0) -> None:
        """A batch has left the queue; called on the loop."""
        self._room.release()

    async def run(self) -> None:
        """Take batches until there are none, or the task is cancelled."""
        iterator = None
        number = 0
        try:
            iterator = aiter(self._batches)
            while True:
                await self._room.acquire()
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    self._handoff.put(Ended())
                    return
                await clear_cancellation()  # the iterable may have swallowed ours, or left one of its own
                if self._memory is None:
                    item = Ready(number, 0, batch)
                else:
                    item = await asyncio.to_thread(_ready, batch, number, self._memory)
                self._handoff.put(item)
                number += 1
        except BaseException as error:  # the user's iterable may raise anything; it is raised at the `for` line
            if isinstance(error, GeneratorExit):
                raise
            if is_cancelled():
                if isinstance(error, asyncio.CancelledError):
                    raise
                return  # it failed as it was stopped, and nobody asks any more
            self._handoff.put(Failed(as_exception(error)))
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
