"""A server's ring in device memory: batches on a device, in blocks that other processes read through CUDA IPC.

The device orders the work on a block:

    free ── place ──> being written ── BatchAvailable ──> readers' ── the last Read ──> free
          after the readers' `read`                each waits for `filled`,
          events: copies, records `filled`         copies, records `read`, sends Read

A block is allocated once, and exported once to each consumer. The server does not wait for consumers that are gone:
they could only have read. A block that a dropped consumer may still read is never written again, and its events are
kept.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from aiofeed.ipc.batch_codec import DEVICE_DTYPES, unsupported_value
from aiofeed.ipc.cuda_ipc import HandleError, first_line
from aiofeed.ipc.schema import ArrayNode
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.runtime.tensors import memory_order
from aiofeed.serving.messages import MAX_DEVICE_LETTERS, DeviceBlockHandle, Probe

if TYPE_CHECKING:
    from aiofeed.ipc.cuda_ipc import SharedDevice, SharedEvent
    from aiofeed.kernel.core.faces import BaseDevice, Event

_PROBE_BYTES = 64
# Wide loads, and the granularity of CUDA's allocator.
_ALIGNMENT = 512
# A larger block than the ring has is a quarter larger than its batch, and blocks are whole grains, the granularity of
# CUDA's allocations: batches that vary in size soon fit into the blocks there are.
_GRAIN_BYTES = 2 << 20
# Exports of a block to consumers that are gone at which another block replaces it. torch keeps an interprocess event
# for each export until the memory is freed, and with 1,000 of them in a process each further export waits for the
# device (CUDA_IPC_MAXIMUM_EVENTS_TO_USE in torch/csrc/CudaIPCTypes.h).
_MAX_STALE_EXPORTS = 100


@dataclass(eq=False)
class DeviceBlock:
    """A block of device memory: the memory of one batch.

    Args:
        number: Its number in messages.
        memory: uint8 [nbytes].
        filled: Complete when the content may be read.
        read: Of each consumer that it was exported to, the event that the consumer records after reading.
        exports: How often it was exported.
        unsent: The handles that consumers have not been sent yet.
        readers: Consumers whose copies of the content must complete before it is written again.
        reusable: Whether it may be written again; not if a dropped consumer may still read it.
    """

    number: int
    memory: torch.Tensor
    filled: SharedEvent
    read: dict[Hashable, SharedEvent] = field(default_factory=dict)
    exports: int = 0
    unsent: dict[Hashable, DeviceBlockHandle] = field(default_factory=dict)
    readers: set[Hashable] = field(default_factory=set)
    reusable: bool = True

    @property
    def worn(self) -> bool:
        """Whether it was exported so often that another block should replace it."""
        return self.exports - len(self.read) >= _MAX_STALE_EXPORTS

    def is_read(self) -> bool:
        """Return whether all readers' copies have completed."""
        return all(self.read[consumer].query() for consumer in self.readers)


class DeviceRing:
    """Blocks of device memory, allocated as needed. On the server's loop, except ``to_host``.

    Args:
        shared: The backend's memory and events for other processes.
        blocks: How many there may be: one more than may have readers, because the copies of a block's readers may
            still run after they have sent ``Read``.
    """

    def __init__(self, backend: BaseDevice, shared: SharedDevice, blocks: int) -> None:
        self._backend = backend
        self._shared = shared
        self._max_blocks = blocks
        self._stream = shared.stream()
        self._number = 0
        self._blocks: list[DeviceBlock] = []
        self._free: list[DeviceBlock] = []
        self._retired: dict[Hashable, list[int]] = {}
        self._kept_events: list[SharedEvent] = []
        self._probe: tuple[DeviceBlock, torch.Tensor, bytes] | None = None
        self.identity: str = shared.identity()[:MAX_DEVICE_LETTERS]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device and the stream that writes blocks current in the calling thread, the server's own.

        The feeder's batches are then ordered before that stream, and not before the streams of a training.
        """
        self._backend.enter_thread()
        with self._backend.use_stream(self._stream):
            yield

    def probe(self, consumer: Hashable) -> Probe:
        """Return a block with known content to try; ``HandleError`` if it cannot be allocated or exported."""
        if self._probe is not None and self._probe[0].worn:
            # Consumers that have not tried it yet may still open its events.
            self._kept_events += [self._probe[0].filled, *self._probe[0].read.values()]
            self._probe = None
        if self._probe is None:
            content = os.urandom(_PROBE_BYTES)
            block = self._allocate(_PROBE_BYTES)
            # Kept, because the device reads it later.
            host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            try:
                self._shared.put(block.memory, self._backend.copy(host))
                block.filled.record(self._stream)
            except RuntimeError as error:
                what = f"{_PROBE_BYTES} bytes cannot be copied to {self._backend.name}"
                raise HandleError(f"{what}: {first_line(error)}") from error
            self._probe = block, host, content
        block, _, content = self._probe
        self.export(block, consumer)
        return Probe(block.unsent.pop(consumer, None), content)

    # --- writing ---

    def has_room(self) -> bool:
        """Return whether a block can be written: a new one, or one whose readers' copies have completed."""
        return len(self._blocks) < self._max_blocks or any(block.is_read() for block in self._free)

    def place(self, batch: Any, advice: str) -> tuple[Any, DeviceBlock] | None:
        """Queue copies of a batch's device tensors to a block; ``None`` if it has none. There must be room.

        Args:
            batch: On the stream of ``entered``.
            advice: What to do about a batch that cannot be described.

        Returns:
            The batch with an ``ArrayNode`` in place of each of these tensors, and the block.

        Raises:
            HandleError: There is not enough device memory.
            CollateError: It has a tensor that cannot be described.
        """
        tensors = [leaf for leaf in leaves(batch) if self._shared.holds(leaf)]
        for tensor in tensors:
            self._check(tensor, advice)
        nbytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if not nbytes:
            return None
        block = self._take_block(nbytes)
        offset = 0

        def put(value: Any) -> Any:
            nonlocal offset
            if not self._shared.holds(value):
                return value
            node = self._put(block, offset, value)
            offset += _aligned(value.nbytes)
            return node

        try:
            block.readers.clear()
            batch = map_leaves(put, batch)
            block.filled.record(self._stream)
        except BaseException:
            self.give_back(block)
            raise
        return batch, block

    def _check(self, tensor: torch.Tensor, advice: str) -> None:
        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.itemsize not in DEVICE_DTYPES:
            what = f"a tensor of {tensor.dtype} with layout {tensor.layout} on {self._backend.name}"
            raise unsupported_value(what + (" that requires grad" if tensor.requires_grad else ""), "", advice)

    def _put(self, block: DeviceBlock, offset: int, tensor: torch.Tensor) -> ArrayNode:
        order, back = memory_order(tensor.stride())
        dense = tensor.permute(order).is_contiguous() and not tensor.is_contiguous()
        flat, axes = (tensor.permute(order), list(back)) if dense else (tensor, None)
        shape, dtype = list(flat.shape), str(tensor.dtype).removeprefix("torch.")
        if flat.numel():
            target = block.memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(shape)
            self._shared.put(target, flat)
        return ArrayNode("device", block.number, offset, shape, DEVICE_DTYPES[tensor.itemsize], axes, dtype)

    def to_host(self, batch: Any) -> Any:
        """Return the batch with its device tensors copied to host memory. Blocks; for a thread of the executor."""
        self._backend.enter_thread()
        with self._backend.use_stream(self._stream):
            return map_leaves(lambda leaf: self._shared.to_host(leaf) if self._shared.holds(leaf) else leaf, batch)

    # --- readers ---

    def export(self, block: DeviceBlock, consumer: Hashable) -> None:
        """Export a block to a consumer, unless that was done before; ``HandleError`` if it cannot be exported."""
        if consumer in block.read:
            return
        read = self._shared.event()
        filled_handle, read_handle = self._shared.export_event(block.filled), self._shared.export_event(read)
        # Last, because an error after it would have to take the reference back.
        handle = self._shared.export(block.memory)
        block.exports += 1
        block.unsent[consumer] = DeviceBlockHandle(block.number, handle, filled_handle, read_handle)
        block.read[consumer] = read

    def introduce(
        self, block: DeviceBlock, consumer: Hashable
    ) -> tuple[int, DeviceBlockHandle | None, tuple[int, ...]]:
        """Add a reader to a block. Returns its number, its handle if unsent, and the reader's retired blocks."""
        block.readers.add(consumer)
        return block.number, block.unsent.pop(consumer, None), tuple(self._retired.pop(consumer, ()))

    def gone(self, consumer: Hashable, *, reading: bool) -> None:
        """Forget a consumer. If it may still be ``reading``, the blocks that it copies from are not written again."""
        self._retired.pop(consumer, None)
        for block in [*self._blocks, *([self._probe[0]] if self._probe is not None else [])]:
            if (unsent := block.unsent.pop(consumer, None)) is not None:
                self._shared.forget(unsent.handle)
            if (read := block.read.pop(consumer, None)) is not None and reading:
                self._kept_events.append(read)
                if consumer in block.readers and not is_complete(read):
                    block.reusable = False
                if not block.reusable and block in self._free:
                    self.give_back(block)
            block.readers.discard(consumer)

    # --- blocks ---

    def give_back(self, block: DeviceBlock, reusable: bool = True) -> None:
        """Free a block that nobody reads; if ``reusable``, it is written again once its readers' copies complete."""
        if not (reusable and block.reusable):
            # A consumer may read the block, or even open its event, only now.
            self._kept_events.append(block.filled)
            self._retire(block)
        elif block in self._blocks and block not in self._free:
            self._free.append(block)

    def _retire(self, block: DeviceBlock) -> None:
        """Never write a block again. The device keeps the memory as long as a process has it open."""
        while block.unsent:
            self._shared.forget(block.unsent.popitem()[1].handle)
        if block in self._blocks:
            self._blocks.remove(block)
            self._free = [each for each in self._free if each is not block]
            for consumer in block.read:
                self._retired.setdefault(consumer, []).append(block.number)

    def close(self) -> None:
        """Drop all memory; consumers keep what they have open."""
        for block in list(self._blocks):
            self._retire(block)
        self._probe = None
        self._retired.clear()
        self._kept_events.clear()

    def _take_block(self, nbytes: int) -> DeviceBlock:
        largest = max((block.memory.nbytes for block in self._blocks), default=0)
        read = [block for block in self._free if block.is_read()]
        for worn in [block for block in read if block.worn]:
            read.remove(worn)
            self._retire(worn)
        fitting = next((block for block in read if block.memory.nbytes >= nbytes), None)
        if fitting is not None:
            self._free.remove(fitting)
            return fitting
        if len(self._blocks) >= self._max_blocks and read:
            self._retire(min(read, key=lambda each: each.memory.nbytes))
        if 0 < largest < nbytes:
            nbytes += nbytes // 4
        block = self._allocate(max(-(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES, largest))
        self._blocks.append(block)
        return block

    def _allocate(self, nbytes: int) -> DeviceBlock:
        try:
            memory = self._shared.allocate(nbytes)
            filled = self._shared.event()
        except RuntimeError as error:
            what = f"{nbytes} bytes cannot be allocated on {self._backend.name}"
            raise HandleError(f"{what}: {first_line(error)}") from error
        self._number += 1
        return DeviceBlock(self._number, memory, filled)


def is_complete(event: Event | SharedEvent) -> bool:
    """Return whether an event is complete; False if the device has failed."""
    try:
        return event.query()
    except RuntimeError:
        return False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
