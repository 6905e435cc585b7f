"""The memory of a simulated device: a caching allocator that behaves as CUDA's, and poisons what is freed."""

from __future__ import annotations

from collections import deque

import torch

from aiofeed.testing.simulated_streams import SimulatedEvent, SimulatedStream, StreamSchedule

POISON = 0xDB
"""What fresh and freed memory reads as, byte by byte."""

_GRAIN = 512  # bytes; CUDA's allocator rounds to this, so that blocks of about the same size serve each other


class MemoryBlock:
    """A piece of device memory. Belongs to the stream on which it was first allocated."""

    __slots__ = ("bytes", "held", "stream", "users")

    def __init__(self, nbytes: int, stream: SimulatedStream) -> None:
        self.stream = stream
        self.bytes = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
        self.held: set[SimulatedStream] = set()
        self.users = 0

    def poison(self) -> None:
        """Overwrite the contents."""
        self.bytes.fill_(POISON)


class BlockHandle:
    """One allocation: the tensors that share it hold it, and it reports when the last of them is gone."""

    __slots__ = ("_dropped", "block")

    def __init__(self, block: MemoryBlock, dropped: deque[MemoryBlock]) -> None:
        self.block = block
        self._dropped = dropped

    def __del__(self) -> None:
        # Any thread, any time: the allocator looks at it before the next thing happens on the device.
        self._dropped.append(self.block)


class Allocator:
    """Blocks by stream and size; freed ones go first, the latest before the others.

    Args:
        limit_bytes: capacity of the device; ``None`` for no limit.
        schedule: where poisoning is queued, and what knows how far the streams are.
    """

    def __init__(self, limit_bytes: int | None, schedule: StreamSchedule) -> None:
        self.limit_bytes = limit_bytes
        self._schedule = schedule
        self._free: dict[tuple[SimulatedStream, int], list[MemoryBlock]] = {}
        self._waiting: dict[SimulatedStream, deque[tuple[SimulatedEvent, MemoryBlock]]] = {}
        self._dropped: deque[MemoryBlock] = deque()
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def allocate(self, nbytes: int, stream: SimulatedStream) -> BlockHandle:
        """Memory for work on ``stream``; its contents are poison, or what the last owner left."""
        nbytes = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        self.collect()
        block = self._take(nbytes, stream) or self._reserve(nbytes, stream)
        self.allocated_bytes += nbytes
        return BlockHandle(block, self._dropped)

    def collect(self) -> None:
        """Take back what was dropped, and what other streams have finished with."""
        while self._dropped:
            block = self._dropped.popleft()
            self.allocated_bytes -= len(block.bytes)
            others, block.held = block.held - {block.stream}, set()
            block.users = len(others)
            for stream in others:
                self._waiting.setdefault(stream, deque()).append((self._schedule.mark(stream), block))
            if not others:
                self._give_back(block)
        for waiting in self._waiting.values():
            while waiting and waiting[0][0].done:
                block = waiting.popleft()[1]
                block.users -= 1
                if block.users == 0:
                    self._give_back(block)

    def _give_back(self, block: MemoryBlock) -> None:
        # Work that the owning stream still has in its queue may use the memory, so the poison queues behind it.
        self._schedule.append(block.stream, block.poison)
        self._free.setdefault((block.stream, len(block.bytes)), []).append(block)

    def _take(self, nbytes: int, stream: SimulatedStream) -> MemoryBlock | None:
        blocks = self._free.get((stream, nbytes))
        return blocks.pop() if blocks else None

    def _reserve(self, nbytes: int, stream: SimulatedStream) -> MemoryBlock:
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            # As CUDA does: wait for what other streams hold, then return the cache to the system.
            for waiting in self._waiting.values():
                for mark, _ in waiting:
                    self._schedule.force(mark)
            self.collect()
            if block := self._take(nbytes, stream):
                return block
            self.reserved_bytes -= sum(size * len(blocks) for (_, size), blocks in self._free.items())
            self._free.clear()
            if self.reserved_bytes + nbytes > self.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"simulated device out of memory: {nbytes} bytes asked for, {self.allocated_bytes} of "
                    f"{self.limit_bytes} in use"
                )
        self.reserved_bytes += nbytes
        return MemoryBlock(nbytes, stream)
