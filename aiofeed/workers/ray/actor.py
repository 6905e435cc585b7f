"""The actor of ``engine="ray"``: a worker on some node of the cluster. Its messages are results of calls.

The trainer calls ``send`` for each of its messages, and ``receive`` for each of the actor's. A finished batch is a
result of ``receive``, so that Ray copies it to its object store and moves it to the trainer's node.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from aiofeed.ipc.batch_codec import array_nodes
from aiofeed.ipc.error_codec import describe
from aiofeed.ipc.ring import Borrowed, Slot, free_dropped_slots
from aiofeed.ipc.schema import dtype_and_nbytes
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.runtime.buffers import Bytes, DropTracker
from aiofeed.workers.protocol import BatchFinished, FromWorker, ReleaseSlot, WorkerEnded, decode_to_worker
from aiofeed.workers.spawn import WorkerConfig, unpickle_config
from aiofeed.workers.worker import Worker, encode_finished

if TYPE_CHECKING:
    from collections.abc import Callable

Parcel: TypeAlias = tuple[bytes, dict[int, Bytes]]
"""A message, and the used part of each segment of its batch."""


class ActorLocation(NamedTuple):
    """Where an actor runs."""

    ip: str
    node: str
    pid: int


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "aiofeed": version("aiofeed")}


class FeedActor:
    """A Ray actor that runs a ``Worker``. Its methods run on Ray's event loop, the worker on its own."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._parcels: asyncio.Queue[Parcel] = asyncio.Queue()
        self._worker: _ActorWorker | None = None

    async def start(self, config: bytes, expected: dict[str, str]) -> ActorLocation:
        """Start the worker, which then sends ``WorkerReady`` or ``WorkerEnded``."""
        import ray

        loop = asyncio.get_running_loop()
        ip, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()[:8]
        location = ActorLocation(ip, node, os.getpid())

        def put(message: FromWorker, arrays: dict[int, Bytes]) -> None:
            payload, fits = encode_finished(message)
            loop.call_soon_threadsafe(self._parcels.put_nowait, (payload, arrays if fits else {}))

        try:
            check_versions(expected, location)
            worker_config = unpickle_config(config)
            self._worker = worker = _ActorWorker(worker_config, self._number, put)
            worker.loop_thread.at_death(lambda error: put(WorkerEnded(describe(error)), {}))
            worker.loop_thread.launch(import_torch=False)
            worker.loop_thread.start(worker.run)
        except BaseException as error:  # noqa: BLE001 - the user's modules and objects may raise anything when they are loaded
            failure = error
            if not isinstance(error, FeedError):
                failure = FeedError(
                    f'an actor of engine="ray" on node {ip} could not start: {format_error(error)}; every node '
                    f"needs the modules of the source, the decoder and collate_fn: "
                    f'ray.init(runtime_env={{"working_dir": "."}}) sends those of this directory'
                )
                failure.__cause__ = error
            put(WorkerEnded(describe(failure)), {})
        return location

    async def send(self, payload: bytes) -> None:
        """Process a message of the trainer."""
        if self._worker is not None:
            self._worker.loop_thread.call(self._worker.received, decode_to_worker(payload))

    async def receive(self) -> Parcel:
        """Wait for the next message to the trainer."""
        return await self._parcels.get()

    async def clock(self) -> float:
        """Return the clock of the actor's events, in seconds."""
        return time.perf_counter()

    async def stop(self) -> None:
        """Close the source and end the threads."""
        if self._worker is not None:
            self._worker.loop_thread.stop()
            await asyncio.wrap_future(self._worker.loop_thread.finished)


def check_versions(expected: dict[str, str], location: ActorLocation) -> None:
    """Raise ``FeedError`` if this node has another version of something than the trainer."""
    found = versions()
    for name, wanted in expected.items():
        if found[name] != wanted:
            raise FeedError(
                f"node {location.ip} has {name} {found[name]}, and the trainer has {name} {wanted}: install the same "
                f"version on every node"
            )


class _ActorWorker(Worker):
    """A worker whose batches Ray copies out of their slots."""

    def __init__(
        self, worker_config: WorkerConfig, number: int, put: Callable[[FromWorker, dict[int, Bytes]], None]
    ) -> None:
        super().__init__(worker_config, number)
        self._put = put
        # Slots that Ray has not copied yet.
        self._sent: DropTracker[Borrowed] = DropTracker()

    def send(self, message: FromWorker, slot: Slot | None = None) -> None:
        """Send a message to the trainer, with the memory of a slot."""
        free_dropped_slots(self._sent)
        arrays: dict[int, Bytes] = {}
        if slot is not None:
            assert isinstance(message, BatchFinished)
            used = dict.fromkeys((segment.number for segment in slot.segments), 0)
            for node in array_nodes(message.batch):
                if node.segment >= 0:
                    used[node.segment] = max(used[node.segment], node.offset + dtype_and_nbytes(node)[1])
            released = ReleaseSlot(message.serial)
            # Ray drops the owners when it has copied the segments.
            owners = [segment.owner() for segment in slot.segments]
            arrays = {
                segment.number: owner[: used[segment.number]]
                for segment, owner in zip(slot.segments, owners, strict=True)
            }
            Borrowed(lambda _: self.received(released)).watch(owners, self._sent)
        self._put(message, arrays)
