"""One actor, as the trainer's loop sees it: its calls, the memory of its batches, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from aiofeed.ipc.ring import Ring
from aiofeed.ipc.schema import encode
from aiofeed.ipc.shared_memory import Segment
from aiofeed.workers.handle import Handle
from aiofeed.workers.protocol import BatchFinished, FromWorker, ToWorker, decode_from_worker
from aiofeed.workers.ray.actor import ActorLocation, Parcel, versions
from aiofeed.workers.ray.cluster import ClusterConnection

if TYPE_CHECKING:
    from aiofeed.kernel.runtime.buffers import Bytes

# Calls of `receive` in flight: while one result is on its way, the actor answers the next.
_RECEIVING = 2
# Calls that compare the clocks of two machines; that with the shortest way counts.
_CLOCK_CALLS = 5
# Memory that a fork of this process has, too, and that Ray must not use again.
_inherited: list[Ring] = []


class ActorHandle(Handle):
    """One actor. Created on the running loop, which waits for the actor.

    Args:
        number, count: Number of the actor, from 0, of how many.
        actor: Ray's handle.
        config: Ray's reference to the pickled configuration.
        connection: In which the actor was made.
        received: Called with each message.
        lost: Called once when the actor has died.
    """

    def __init__(
        self,
        number: int,
        count: int,
        actor: Any,
        config: Any,
        *,
        connection: ClusterConnection,
        received: Callable[[ActorHandle, FromWorker], None],
        lost: Callable[[ActorHandle, Exception], None],
    ) -> None:
        self._title = f'actor {number + 1} of {count} (engine="ray"'
        super().__init__(number, f"actor {number + 1}", f"{self._title}, not placed on a node yet)", Ring())
        self._actor = actor
        self._connection = connection
        self._on_message = received
        self._on_loss: Callable[[ActorHandle, Exception], None] | None = lost
        self._clock_ahead_s = 0.0
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._serve(config))}

    def send(self, message: ToWorker) -> None:
        """Send a message; does nothing if the actor has died."""
        try:
            self._call("send", encode(message))
        except Exception as error:  # noqa: BLE001 - Ray raises plain exceptions if the actor cannot be reached
            self._lose(error)

    def release_slot(self, serial: int, ring: Ring, reusable: bool = True) -> None:
        """Keep memory that a fork of the trainer may read; Ray frees the other when nothing refers to it."""
        if not reusable:
            _inherited.append(ring)

    def kill(self) -> None:
        """End the actor at once."""
        import ray

        ray.kill(self._actor)

    async def stop(self) -> None:
        """Have the actor close its source; see ``FeedActor.stop``."""
        await self._call("stop")

    def close(self) -> None:
        """Wait for no more messages, and end the actor."""
        self._on_loss = None
        for task in self._tasks:
            task.cancel()
        self.kill()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._connection.call(self._actor, method, *arguments)

    async def _serve(self, config: Any) -> None:
        try:
            location: ActorLocation = await self._call("start", config, versions())
            self.name: str = f"{self._title}, node {location.ip} [{location.node}], pid {location.pid})"
            await self._compare_clocks(location)
            async with asyncio.TaskGroup() as group:
                for _ in range(_RECEIVING):
                    group.create_task(self._receive())
        except ExceptionGroup as errors:
            self._lose(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds of errors if an actor, its node or its results are lost
            self._lose(error)

    async def _compare_clocks(self, location: ActorLocation) -> None:
        """Find by how much the actor's clock is ahead of this one; machines start theirs when they boot."""
        import ray

        if location.node == ray.get_runtime_context().get_node_id()[:8]:
            return
        found = []
        for _ in range(_CLOCK_CALLS):
            asked = time.perf_counter()
            clock_s = await self._call("clock")
            answered = time.perf_counter()
            found.append((answered - asked, clock_s - (asked + answered) / 2))
        self._clock_ahead_s = min(found)[1]

    async def _receive(self) -> None:
        while True:
            parcel: Parcel = await self._call("receive")
            payload, arrays = parcel
            message = decode_from_worker(payload)
            if isinstance(message, BatchFinished):
                self.ring: Ring = ObjectRing(arrays)
                if ahead_s := self._clock_ahead_s:
                    events = [
                        (what, lane, a - ahead_s, b - ahead_s, *rest) for what, lane, a, b, *rest in message.events
                    ]
                    message = structs.replace(message, events=events)
            del parcel, arrays
            self._on_message(self, message)
            self.ring = Ring()

    def _lose(self, error: Exception) -> None:
        lost, self._on_loss = self._on_loss, None
        if lost is not None:
            lost(self, error)


class ObjectRing(Ring):
    """The memory of one batch, in Ray's object store if the batch is large.

    Ray gives arrays that cannot be written, because other processes may have the same object. This object is the result
    of one call, and only this process gets it, so its memory may be written.
    """

    def __init__(self, arrays: dict[int, Bytes]) -> None:
        super().__init__()
        for number, array in arrays.items():
            address: int = array.__array_interface__["data"][0]
            block: Any = (ctypes.c_uint8 * array.nbytes).from_address(address)
            block.keeps = array
            self._segments[number] = Segment(number, np.frombuffer(block, np.uint8), address)
