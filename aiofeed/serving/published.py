"""The batches of a server: put into shared memory, device memory or both; freed when all readers have read them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from aiofeed.ipc.batch_codec import encode_batch
from aiofeed.ipc.cuda_ipc import HandleError
from aiofeed.ipc.framing import MAX_DESCRIPTORS, ProtocolError
from aiofeed.ipc.ring import INLINE_BYTES, Slot, SlotPool
from aiofeed.ipc.schema import Node
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.pytree import total_nbytes
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from aiofeed.serving.consumers import Consumer
from aiofeed.serving.device_memory.device_ring import DeviceBlock, DeviceRing
from aiofeed.serving.messages import MAX_REASON_LETTERS, BatchAvailable, Probe

log: logging.Logger = logging.getLogger("aiofeed.processes")

_ADVICE = "in the server's script, make collate_fn (or the decoder) return those"
# Interval of the checks for a block of device memory whose readers have queued their copies.
_POLL_S = 5e-4


@dataclass(eq=False)
class PublishedBatch:
    """One batch, the slots that it is in, and its readers.

    Args:
        nbytes: Size of its arrays and tensors.
        serial: Identifies it in messages; -1 before it is published.
        host: Its description and its slot in shared memory; ``None`` if it is not there.
        device: Its description, the slot of what stays on the host, and the block of device memory; ``None`` likewise.
        readers: Consumers that have not read it yet.
        reusable: Whether its slots may be written again when it has no readers.
    """

    nbytes: int
    serial: int = -1
    host: tuple[Node, Slot] | None = None
    device: tuple[Node, Slot, DeviceBlock] | None = None
    readers: set[Consumer] = field(default_factory=set)
    reusable: bool = True


class BatchPublisher:
    """Puts batches into slots, describes them to consumers, and frees them.

    Args:
        keep: Free segments of shared memory that are kept for later batches.
        ring: Blocks on the device of the feeder's batches; ``None`` for a feeder of host batches.
        executor: Copies large batches.

    Attributes:
        device: Name of the device of the batches; "" for host memory.
    """

    def __init__(self, keep: int, ring: DeviceRing | None, executor: ThreadPool) -> None:
        self._slots = SlotPool(keep, _ADVICE, single_reader=False)
        self._ring = ring
        self.device: str = "" if ring is None else ring.identity
        self._executor = executor
        self._serials = itertools.count()
        self._published: dict[int, PublishedBatch] = {}
        self._no_device_memory = ""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Make the stream that fills blocks current in the server's thread."""
        return contextlib.nullcontext() if self._ring is None else self._ring.entered()

    def close(self) -> None:
        """Free all memory; consumers keep what they have open."""
        self._slots.close()
        if self._ring is not None:
            self._ring.close()

    # --- readers ---

    @property
    def in_use(self) -> int:
        """Batches that have readers."""
        return len(self._published)

    def unread_by(self, consumer: Consumer) -> int:
        """Return the number of batches that a consumer has not read."""
        return sum(consumer in batch.readers for batch in self._published.values())

    def publish(self, batch: PublishedBatch, readers: Iterable[Consumer]) -> None:
        """Give a batch to its readers; it is freed when all have read it."""
        batch.serial = next(self._serials)
        batch.readers = set(readers)
        self._published[batch.serial] = batch
        self._free_if_read(batch)

    def read(self, consumer: Consumer, serial: int) -> None:
        """Note that a consumer has read a batch; ``ProtocolError`` if it is not a reader of that batch."""
        batch = self._published.get(serial)
        if batch is None or consumer not in batch.readers:
            raise ProtocolError(f"Read of batch {serial}, which the consumer does not have")
        batch.readers.discard(consumer)
        self._free_if_read(batch)

    def gone(self, consumer: Consumer, *, reading: bool) -> None:
        """Forget a consumer. If it may still be ``reading`` batches, their slots are not written again."""
        if self._ring is not None:
            self._ring.gone(consumer, reading=reading)
        for batch in list(self._published.values()):
            if consumer in batch.readers:
                batch.readers.discard(consumer)
                batch.reusable = batch.reusable and not reading
                self._free_if_read(batch)

    def _free_if_read(self, batch: PublishedBatch) -> None:
        if not batch.readers:
            del self._published[batch.serial]
            self._free(batch)

    def _free(self, batch: PublishedBatch) -> None:
        if batch.host is not None:
            batch.host[1].give_back(batch.reusable)
        if batch.device is not None:
            assert self._ring is not None
            _, slot, block = batch.device
            slot.give_back(batch.reusable)
            self._ring.give_back(block, batch.reusable)

    # --- device memory ---

    def probe(self, consumer: Consumer) -> Probe:
        """Return device memory for a consumer to try, or why there is none."""
        if self._ring is None:
            return Probe(None, refusal="the server's batches are in host memory")
        if consumer.pid in (0, os.getpid()):
            if consumer.pid:
                return Probe(None, refusal="the process that has device memory cannot open it a second time")
            return Probe(None, refusal="the server cannot see this process: one of them is in a container")
        if not self._no_device_memory:
            try:
                return self._ring.probe(consumer)
            except HandleError as error:
                self._give_up_device(str(error)[:MAX_REASON_LETTERS])
        return Probe(None, refusal=self._no_device_memory)

    def _give_up_device(self, reason: str) -> None:
        self._no_device_memory = reason
        log.warning(
            "device memory cannot be shared (%s): consumers get batches through host memory; a served feeder without "
            "device= needs fewer copies for that",
            reason,
        )

    # --- writing a batch ---

    async def write(self, value: Any, readers: Callable[[], list[Consumer]]) -> PublishedBatch:
        """Write a batch of the feeder to where its readers can read it.

        Args:
            value: The batch.
            readers: Gives its readers; called again after every wait, in which consumers may come or go.

        Raises:
            CollateError: It cannot be described.
            FeedError: There is not enough shared memory.
        """
        batch = PublishedBatch(total_nbytes(value))
        try:
            while True:
                expected = readers()
                wants_device = batch.device is None and any(each.on_device for each in expected)
                if wants_device and await self._write_to_device(batch, value):
                    continue
                for consumer in expected:
                    self._export(batch, consumer)
                if batch.host is not None or all(self._reads_on_device(batch, each) for each in expected):
                    return batch
                host = value
                if self._ring is not None:
                    to_host = partial(self._ring.to_host, value)
                    host = await asyncio.get_running_loop().run_in_executor(self._executor, to_host)
                batch.host = await self._encode(host, batch.nbytes)
        except BaseException:
            self._free(batch)
            raise

    def _reads_on_device(self, batch: PublishedBatch, consumer: Consumer) -> bool:
        return batch.device is not None and consumer.on_device

    async def _write_to_device(self, batch: PublishedBatch, value: Any) -> bool:
        """Return whether the batch is on the device now."""
        if self._ring is None or self._no_device_memory:
            return False
        while not self._ring.has_room():  # noqa: ASYNC110 - a device signals nothing to the loop
            await asyncio.sleep(_POLL_S)
        try:
            placed = self._ring.place(value, _ADVICE)
        except HandleError as error:
            self._give_up_device(str(error))
            return False
        if placed is None:
            return False
        rest, block = placed
        try:
            node, slot = await self._encode(rest, total_nbytes(rest))
        except BaseException:
            self._ring.give_back(block)
            raise
        batch.device = node, slot, block
        return True

    def _export(self, batch: PublishedBatch, consumer: Consumer) -> None:
        """Export the batch's block to a consumer on the device; if that fails, it gets host memory from now on."""
        if self._ring is None or batch.device is None or not consumer.on_device:
            return
        try:
            self._ring.export(batch.device[2], consumer)
        except HandleError as error:
            consumer.on_device = False
            log.warning("consumer %d gets batches through host memory from now on: %s", consumer.pid, error)

    async def _encode(self, value: Any, nbytes: int) -> tuple[Node, Slot]:
        """Put a batch, or a part of it, into a slot of shared memory."""
        slot = self._slots.lease()
        job: Future[Node] | None = None
        try:
            if nbytes <= INLINE_BYTES:
                node = encode_batch(value, slot)
            else:
                job = self._executor.submit(encode_batch, value, slot)
                node = await asyncio.wrap_future(job)
            if (count := len(slot.segments)) > MAX_DESCRIPTORS:
                raise FeedError(f"a batch in {count} segments; at most {MAX_DESCRIPTORS} can be sent")
        except BaseException:
            if job is None:
                slot.give_back()
            else:  # this task may be cancelled while the thread still writes into the slot
                job.add_done_callback(lambda _: slot.give_back())
            raise
        return node, slot

    def message(self, batch: PublishedBatch, consumer: Consumer, number: int) -> tuple[BatchAvailable, list[Any]]:
        """Return the message that gives a batch to a consumer, and its memory.

        Args:
            batch: Published to the consumer.
            consumer: The reader.
            number: Position of the batch in the epoch.

        Raises:
            OSError: No descriptors are left.
        """
        on_device = self._reads_on_device(batch, consumer)
        placed = batch.device if on_device else batch.host
        assert placed is not None
        node, slot = placed[:2]
        segments, memory, retired = slot.introduce(consumer.known)
        message = BatchAvailable(consumer.fed_ticket, batch.serial, number, node, batch.nbytes, segments, retired)
        if on_device:
            assert self._ring is not None
            assert batch.device is not None
            block, new_block, retired_blocks = self._ring.introduce(batch.device[2], consumer)
            message = msgspec.structs.replace(message, block=block, new_block=new_block, retired_blocks=retired_blocks)
        return message, memory
