"""A server's ring in device memory: batches that are on a device already are put where other processes read them.

A slot is a block of device memory with the batch in it. Work on it is ordered by the device alone:

    free ── place ──> being filled ── Given ──> the readers' ── the last Read ──> free
          once the readers' events            each looks for `filled`, copies,
          are complete: copies,               records `read`, says Read
          records `filled`

A block is allocated once and exported once to each consumer. Consumers that are gone are waited for no more: all that
they could still do is read. A block that one of them may still read, because it was let go and not gone by itself, is
never filled again, and its events are kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiofeed.core.pytree import leaves, map_leaves
from aiofeed.processes.ipc.batch_codec import axes_of, extent, refusal
from aiofeed.processes.ipc.cuda_ipc import HandleError, first_line
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.schema import Leaf
from aiofeed.processes.serving.protocol import MAX_DEVICE_LETTERS, DeviceBlockHandle, Probe
from aiofeed.runtime.tensors import memory_order

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.ipc.cuda_ipc import SharedDevice, SharedEvent

log = logging.getLogger("aiofeed.processes")

_TRIAL_BYTES = 64


# Wide loads, and the grain of CUDA's allocator.
_ALIGNMENT = 512
# How bytes of each size cross; torch_dtype says what they are.
DTYPES = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


class DeviceSlot:
    """The device memory of one batch."""

    def __init__(self, ring: DeviceRing, block: DeviceBlock) -> None:
        self._ring = ring
        self.block = block

    def give_back(self) -> None:
        """Everybody has read it, or is gone."""
        self._ring.give_back(self.block)

    def discard(self) -> None:
        """Somebody may read it whom nobody hears of any more: it is not written again."""
        self._ring.abandon(self.block)


class DeviceRing:
    """Slots in device memory, made as needed. All of it runs on the server's loop, but for ``to_host``.

    Args:
        backend: the device of the served feeder.
        shared: what other processes can use of it.
        slots: how many there may be: one more than can be out, because one may still be read though its reader has
            said that it was.
    """

    def __init__(self, backend: DeviceBackend, shared: SharedDevice, slots: int) -> None:
        self._backend = backend
        self._shared = shared
        self._slots = slots
        self._stream = shared.stream()
        self._number = 0
        self._blocks: list[DeviceBlock] = []
        self._free: list[DeviceBlock] = []
        self._retired: dict[Hashable, list[int]] = {}
        self._kept: list[SharedEvent] = []
        self._trial: tuple[DeviceBlock, torch.Tensor, bytes] | None = None
        self.identity = shared.identity()[:MAX_DEVICE_LETTERS]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device and the stream that fills slots current in the server's thread, which is the server's alone.

        Batches are then handed to that stream, and what the process trains on its own streams is not waited for.
        """
        self._backend.enter_thread()
        with self._backend.use_stream(self._stream):
            yield

    def trial(self, consumer: Hashable) -> Probe:
        """A piece of memory with known content, for a consumer to try.

        Raises:
            HandleError: memory cannot be exported, or there is none.
        """
        if self._trial is None:
            import torch

            content = os.urandom(_TRIAL_BYTES)
            block = self._allocate(_TRIAL_BYTES)
            # Kept: the copy reads it when the device comes to it.
            host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            try:
                self._shared.put(block.memory, self._backend.copy(host))
                block.filled.record(self._stream)
            except RuntimeError as error:
                what = f"{_TRIAL_BYTES} bytes cannot be copied to {self._backend.name}"
                raise HandleError(f"{what}: {first_line(error)}") from error
            self._trial = block, host, content
        block, _, content = self._trial
        self._export(block, consumer)
        return Probe(self._told(block, consumer), content)

    # --- filling ---

    def room(self) -> bool:
        """Whether there is a slot that may be filled: a new one, or one whose last readers' copies are complete."""
        return len(self._blocks) < self._slots or any(map(is_read, self._free))

    def place(self, batch: Any, advice: str) -> tuple[Any, DeviceSlot] | None:
        """Queue the copy of a batch's device tensors to a slot, for which there is ``room``; ``None`` without tensors.

        Args:
            batch: on the stream of ``entered``.
            advice: for a batch that cannot be described.

        Returns:
            The batch with a ``Leaf`` in place of each of these tensors, and the slot.

        Raises:
            HandleError: there is no device memory for it.
            CollateError: it has a tensor that cannot be described.
        """
        tensors = [leaf for leaf in leaves(batch) if self._shared.holds(leaf)]
        for tensor in tensors:
            self._check(tensor, advice)
        nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        if not nbytes:
            return None
        block = self._take(nbytes)
        start = 0

        def put(value: Any) -> Any:
            nonlocal start
            if not self._shared.holds(value):
                return value
            leaf = self._put(block, start, value)
            start += aligned(value.nbytes)
            return leaf

        try:
            block.readers.clear()
            batch = map_leaves(put, batch)
            block.filled.record(self._stream)
        except BaseException:
            self.give_back(block)
            raise
        return batch, DeviceSlot(self, block)

    def _check(self, tensor: torch.Tensor, advice: str) -> None:
        import torch

        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.itemsize not in DTYPES:
            what = f"a tensor of {tensor.dtype} with layout {tensor.layout} on {self._backend.name}"
            raise refusal(what + (" that requires grad" if tensor.requires_grad else ""), "", advice)

    def _put(self, block: DeviceBlock, start: int, tensor: torch.Tensor) -> Leaf:
        order, back = memory_order(tensor.stride())
        dense = tensor.permute(order).is_contiguous() and not tensor.is_contiguous()
        flat, axes = (tensor.permute(order), list(back)) if dense else (tensor, None)
        shape, dtype = list(flat.shape), str(tensor.dtype).removeprefix("torch.")
        if flat.numel():
            target = block.memory[start : start + tensor.nbytes].view(tensor.dtype).view(shape)
            self._shared.put(target, flat)
        return Leaf("device", block.number, start, shape, DTYPES[tensor.itemsize], axes, dtype)

    def to_host(self, batch: Any) -> Any:
        """The batch with its device tensors in host memory. Blocks; for a thread of the executor."""
        self._backend.enter_thread()
        with self._backend.use_stream(self._stream):
            return map_leaves(lambda leaf: self._shared.to_host(leaf) if self._shared.holds(leaf) else leaf, batch)

    # --- readers ---

    def share(self, slot: DeviceSlot, consumer: Hashable) -> None:
        """See that a consumer can be told of a slot.

        Raises:
            HandleError: its memory cannot be exported.
        """
        if consumer not in slot.block.shared:
            self._export(slot.block, consumer)

    def introduce(self, slot: DeviceSlot, consumer: Hashable) -> tuple[int, DeviceBlockHandle | None, tuple[int, ...]]:
        """A consumer reads a slot from now on: its number, what is new to the consumer, and what it may forget."""
        block = slot.block
        block.readers.add(consumer)
        return block.number, self._told(block, consumer), tuple(self._retired.pop(consumer, ()))

    def _told(self, block: DeviceBlock, consumer: Hashable) -> DeviceBlockHandle | None:
        shared = block.shared[consumer]
        message, shared.message = shared.message, None
        return message

    def gone(self, consumer: Hashable, *, reading: bool) -> None:
        """A consumer is gone. Where it may still be ``reading``, what it copies from is not written again."""
        self._retired.pop(consumer, None)
        for block in [*self._blocks, *([self._trial[0]] if self._trial is not None else [])]:
            shared = block.shared.pop(consumer, None)
            if shared is not None and shared.message is not None:  # it never heard of the block
                self._shared.forget(shared.message.handle)
            if shared is not None and reading:
                self._kept.append(shared.read)
                block.spoiled = block.spoiled or (consumer in block.readers and not _complete(shared.read))
                if block.spoiled and block in self._free:
                    self.abandon(block)
            block.readers.discard(consumer)

    # --- blocks ---

    def give_back(self, block: DeviceBlock) -> None:
        """Everybody has said that it was read; it is filled again once their copies are complete."""
        if block.spoiled:
            self.abandon(block)
        elif block in self._blocks and block not in self._free:
            self._free.append(block)

    def retire(self, block: DeviceBlock) -> None:
        """It is not filled again; the device keeps it for as long as somebody has it open."""
        if block in self._blocks:
            self._blocks.remove(block)
            self._free = [each for each in self._free if each is not block]
            for consumer in block.shared:
                self._retired.setdefault(consumer, []).append(block.number)

    def abandon(self, block: DeviceBlock) -> None:
        """``retire`` one that may still be read, or even be opened only now: its event is kept."""
        self._kept.append(block.filled)
        self.retire(block)

    def close(self) -> None:
        """Let go of all memory; consumers keep what they have open."""
        for block in list(self._blocks):
            self.retire(block)
        self._trial = None
        self._retired.clear()
        self._kept.clear()

    def _take(self, nbytes: int) -> DeviceBlock:
        read = [block for block in self._free if is_read(block)]
        fitting = next((block for block in read if block.memory.nbytes >= nbytes), None)
        if fitting is not None:
            self._free.remove(fitting)
            return fitting
        if len(self._blocks) >= self._slots and read:
            self.retire(min(read, key=lambda each: each.memory.nbytes))
        block = self._allocate(max([nbytes, *(each.memory.nbytes for each in self._blocks)]))
        self._blocks.append(block)
        return block

    def _allocate(self, nbytes: int) -> DeviceBlock:
        try:
            memory = self._shared.allocate(nbytes)
            filled = self._shared.event()
        except RuntimeError as error:
            raise HandleError(f"{nbytes} bytes of {self._backend.name} cannot be had: {first_line(error)}") from error
        self._number += 1
        return DeviceBlock(self._number, memory, filled)

    def _export(self, block: DeviceBlock, consumer: Hashable) -> None:
        read = self._shared.event()
        filled_handle, read_handle = self._shared.export_event(block.filled), self._shared.export_event(read)
        # The last: it is counted, and what fails after it would have to take that back.
        handle = self._shared.export(block.memory)
        block.shared[consumer] = Share(read, DeviceBlockHandle(block.number, handle, filled_handle, read_handle))


def _complete(event: SharedEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return False  # the device is beyond use, and those who go are let go all the same


@dataclass(eq=False)
class Share:
    """What one consumer has of a block.

    Args:
        read: the event that it records.
        message: what it is still to be told.
    """

    read: SharedEvent
    message: DeviceBlockHandle | None


@dataclass(eq=False)
class DeviceBlock:
    """A block, its content's event, and who has it open.

    Args:
        number: what consumers know it by.
        memory: uint8 [nbytes].
        filled: complete once its content may be read.
        shared: what each consumer has of it.
    """

    number: int
    memory: torch.Tensor
    filled: SharedEvent
    shared: dict[Hashable, Share] = field(default_factory=dict)
    readers: set[Hashable] = field(default_factory=set)
    """Those whose copies of the last content are to be complete before the next."""
    spoiled: bool = False
    """Whether one that was let go still copies from it."""


def is_read(block: DeviceBlock) -> bool:
    """Whether its readers' copies are complete."""
    return all(block.shared[consumer].read.query() for consumer in block.readers)


def aligned(nbytes: int) -> int:
    """``nbytes``, and what is left free behind them."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Place:
    """Where a tensor lies in a slot's device memory. No dataclass: that would be taken apart with the batch.

    Args:
        leaf: described so.
        nbytes: of the slot.
    """

    __slots__ = ("_axes", "_dtype", "_leaf", "_nbytes")

    def __init__(self, leaf: Leaf, nbytes: int) -> None:
        import torch

        self._leaf = leaf
        self._axes = axes_of(leaf)
        dtype, self._nbytes = extent(leaf)
        torch_dtype: Any = getattr(torch, leaf.torch_dtype or "", None)
        if not isinstance(torch_dtype, torch.dtype) or torch_dtype.itemsize != dtype.itemsize:
            raise ProtocolError(f"torch_dtype {leaf.torch_dtype!r} for {leaf.dtype}")
        self._dtype = torch_dtype
        if leaf.offset < 0 or leaf.offset % dtype.itemsize or leaf.offset + self._nbytes > nbytes:
            raise ProtocolError(f"{self._nbytes} bytes at {leaf.offset} do not lie in a block of {nbytes}")

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in the slot's memory or in a copy of it."""
        start = self._leaf.offset
        flat = memory[start : start + self._nbytes].view(self._dtype).view(self._leaf.shape)
        return flat if self._axes is None else flat.permute(self._axes)
