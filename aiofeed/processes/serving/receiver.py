"""Batches out of the ring, on a consumer's loop: copied to memory of its own, or on their way to its device."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.devices.copier import Copier
from aiofeed.processes.ipc.batch_codec import copied, decode_batch, in_place
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.ring import INLINE_BYTES, Ring, RingLease, release_unused
from aiofeed.processes.ipc.schema import Items, Leaf, Named, Node, Table
from aiofeed.processes.serving.epoch_feed import EpochFeed, Word
from aiofeed.processes.serving.protocol import BatchAvailable
from aiofeed.runtime.buffers import BufferPool, HostBufferPool
from aiofeed.runtime.queue import ReadyBatch
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.serving.device_reader import Blocks, InSlot


class BatchReceiver:
    """The rings of one server, as one consumer has them.

    Args:
        backend: the device that copies from the ring; ``None``: batches are copied to memory of this process.
        blocks: the server's device memory; ``None`` where only host memory is shared.
        memory: for copies in host memory.
        wrap: turns a batch of ``ArrayLeaf`` into what is handed over.
        executor: copies large batches.

    Attributes:
        busy: whether a batch is being copied, so that none may be taken.
        read: called with a pass and a serial once a batch is copied, or never will be.
        took: called with a pass when a batch has left the host's queue.
        refuse: called with the error of a batch that cannot be taken.
        resume: called when ``busy`` ends.
    """

    read: Callable[[EpochFeed, int], None]
    took: Callable[[EpochFeed], None]
    refuse: Callable[[BaseException], object]
    resume: Callable[[], object]

    def __init__(
        self,
        backend: DeviceBackend | None,
        blocks: Blocks | None,
        memory: BufferPool,
        wrap: Callable[[Any], Any],
        executor: ThreadPool,
    ) -> None:
        self.busy = False
        self._ring = Ring(backend)
        self._device = backend is not None
        self._blocks = blocks
        self._memory = memory
        self._wrap = wrap
        self._executor = executor
        self._slots: dict[int, InSlot] = {}
        self._unused: deque[object] = deque()
        self._leases: dict[Any, tuple[EpochFeed, int]] = {}

    def enter_thread(self) -> None:
        """The calling thread is the loop's: where device memory is opened, looked at and closed."""
        if self._blocks is not None:
            self._blocks.backend.enter_thread()

    def copier(self, backend: DeviceBackend, transform: Callable[[Any], Any] | None) -> Copier:
        """What copies batches to the device."""
        return Copier(backend, transform) if self._blocks is None else self._blocks.copier(transform)

    def learn(self, given: BatchAvailable | None, descriptors: list[int]) -> None:
        """Map, or open, what comes with a message, and forget what it takes back.

        Raises:
            WireError: that is not what was announced.
            HandleError: device memory that cannot be opened.
        """
        self._ring.learn([] if given is None else given.segments, descriptors)
        if given is None:
            return
        self._ring.forget(given.retired)
        if self._blocks is not None:
            self._blocks.learn(given)
        elif given.block >= 0:
            raise ProtocolError("a batch in device memory, where none is open")

    def expect(self, word: Word) -> None:
        """A word waits for a pass; a batch may have to be saved before that comes."""
        if isinstance(word, BatchAvailable) and word.block >= 0 and self._blocks is not None:
            self._slots[word.serial] = self._blocks.slot(word)

    def forget(self, serial: int) -> None:
        """The server is told that a batch was read."""
        self._slots.pop(serial, None)

    def settle(self) -> None:
        """The server ends, or lets this process go: what waits in its device memory is copied.

        Raises:
            WorkerDiedError, TimeoutError: that cannot be had any more.
        """
        if self._blocks is not None:
            self._blocks.settle(list(self._slots.values()))

    def collect(self) -> None:
        """Say of what nobody copies any more that it was read; now and then."""
        while self._unused:
            self.read(*self._leases.pop(self._unused.popleft()))
        if self._blocks is not None:
            self._blocks.collect()

    def close(self) -> None:
        """Let go of the ring."""
        self._ring = Ring()
        self._slots.clear()
        if self._blocks is not None:
            self._blocks.close()
        release_unused()

    def take(self, pass_: EpochFeed, given: BatchAvailable) -> None:
        """A batch out of its slot; on its way to a device it may stay there."""
        try:
            if given.block >= 0:
                self._take_from_device(pass_, given)
                return
            if self._ring.pinned:
                self._put(pass_, given, decode_batch(given.batch, self._in_place), self._lease(pass_, given))
                return
            lease = self._memory.lease()
            copy = partial(_copy_out, self._ring, given.batch, lease, self._wrap)
            if given.nbytes > INLINE_BYTES:
                self.busy = True
                job = asyncio.get_running_loop().run_in_executor(self._executor, copy)
                job.add_done_callback(partial(self._copied, pass_, given, lease))
                return
            batch, seconds = copy()
        except (ProtocolError, MemoryError) as error:
            self.refuse(error)
            return
        self._done(pass_, given, lease, batch, seconds)

    def _take_from_device(self, pass_: EpochFeed, given: BatchAvailable) -> None:
        from aiofeed.processes.serving.device_reader import Taken

        slot, lease = self._slots[given.serial], self._lease(pass_, given)
        tree = slot.tree(given.batch, lambda leaf: copied(self._ring.view(leaf), leaf, _private))
        self._put(pass_, given, Taken(slot, tree, lease), lease)

    def _lease(self, pass_: EpochFeed, given: BatchAvailable) -> RingLease:
        lease = RingLease(asyncio.get_running_loop(), partial(self.read, pass_, given.serial))
        # One that nobody copies from is dropped.
        self._leases[weakref.ref(lease, self._unused.append)] = pass_, given.serial
        return lease

    def _copied(
        self, pass_: EpochFeed, given: BatchAvailable, lease: Any, job: asyncio.Future[tuple[Any, float]]
    ) -> None:
        self.busy = False
        if job.cancelled():
            return
        if (error := job.exception()) is not None:
            self.refuse(error)
            return
        self._done(pass_, given, lease, *job.result())
        self.resume()

    def _done(self, pass_: EpochFeed, given: BatchAvailable, lease: Any, batch: Any, seconds: float) -> None:
        pass_.counters.copy_s += seconds
        self._put(pass_, given, batch, lease if self._device else None)
        self.read(pass_, given.serial)

    def _put(self, pass_: EpochFeed, given: BatchAvailable, batch: Any, lease: Any) -> None:
        item = ReadyBatch(given.number, _rows(given.batch), batch, lease, counters=pass_.counters)
        item.release = lambda _: self.took(pass_)
        pass_.queue.put(item)

    def _in_place(self, leaf: Leaf) -> Any:
        return in_place(self._ring.view(leaf), leaf, pinned=True, lease=_private)


# What stays on the host beside a batch on a device. It keeps nothing.
_private = HostBufferPool(0)


def _copy_out(ring: Ring, node: Node, lease: Any, wrap: Callable[[Any], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    batch = wrap(decode_batch(node, lambda leaf: copied(ring.view(leaf), leaf, lease)))
    return batch, time.perf_counter() - started


def _rows(node: Node) -> int:
    """Samples of a batch: rows of its first array; 0 where it has none."""
    if isinstance(node, Leaf):
        if not node.shape:
            return 0
        return node.shape[node.axes[0] if node.axes else 0]
    if isinstance(node, Items | Table | Named):
        return next((rows for item in node.items if (rows := _rows(item))), 0)
    return 0
