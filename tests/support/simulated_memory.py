"""The memory of a simulated device: a caching allocator like CUDA's that overwrites freed memory with poison."""

from __future__ import annotations

from collections import deque

import torch

from tests.support.simulated_streams import SimulatedEvent, SimulatedStream, StreamSchedule

POISON = 0xDB
"""Every byte of fresh and freed memory."""

_ROUNDING_BYTES = 512  # as CUDA's allocator, so that blocks of about the same size can replace each other


class PinnedRange:
    """A range of host memory that is registered with a device."""

    __slots__ = ("nbytes", "reads", "registered")

    def __init__(self, nbytes: int) -> None:
        self.nbytes: int = nbytes
        self.reads: int = 0  # queued copies that read from it
        self.registered: bool = True


class MemoryBlock:
    """A block of device memory. It belongs to the stream on which it was first allocated."""

    __slots__ = ("bytes", "recorded", "stream", "users")

    def __init__(self, nbytes: int, stream: SimulatedStream) -> None:
        self.stream: SimulatedStream = stream
        self.bytes: torch.Tensor = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
        self.recorded: set[SimulatedStream] = set()  # by record_stream
        self.users: int = 0  # recorded streams that have not finished with the block

    def poison(self) -> None:
        """Overwrite the contents."""
        self.bytes.fill_(POISON)


class BlockHandle:
    """One allocation. All tensors that share it refer to it; when the last one dies, it returns its block."""

    __slots__ = ("_returned", "block")

    def __init__(self, block: MemoryBlock, returned: deque[MemoryBlock]) -> None:
        self.block: MemoryBlock = block
        self._returned = returned

    def __del__(self) -> None:
        # Runs in any thread at any time. The allocator collects the block before the next call of the host.
        self._returned.append(self.block)


class Allocator:
    """Allocates blocks by stream and size; reuses the block that was freed last. Its stream poisons it."""

    def __init__(self, limit_bytes: int | None, schedule: StreamSchedule) -> None:
        self.limit_bytes = limit_bytes
        self._schedule = schedule
        self._free: dict[tuple[SimulatedStream, int], list[MemoryBlock]] = {}
        self._waiting: dict[SimulatedStream, deque[tuple[SimulatedEvent, MemoryBlock]]] = {}
        self._returned: deque[MemoryBlock] = deque()
        self.allocated_bytes: int = 0
        self.reserved_bytes: int = 0

    def allocate(self, nbytes: int, stream: SimulatedStream) -> BlockHandle:
        """Memory for work on ``stream``; it contains poison, or the previous owner's data."""
        nbytes = max(1, -(-nbytes // _ROUNDING_BYTES)) * _ROUNDING_BYTES
        self.collect()
        block = self._reuse(nbytes, stream) or self._reserve(nbytes, stream)
        self.allocated_bytes += nbytes
        return BlockHandle(block, self._returned)

    @property
    def returned(self) -> int:
        """Blocks that were returned and not collected yet."""
        return len(self._returned)

    def collect(self) -> None:
        """Free the blocks that were returned, once the streams recorded for them have finished."""
        while self._returned:
            block = self._returned.popleft()
            self.allocated_bytes -= len(block.bytes)
            others, block.recorded = block.recorded - {block.stream}, set()
            block.users = len(others)
            for stream in others:
                self._waiting.setdefault(stream, deque()).append((self._schedule.record(stream), block))
            if not others:
                self._free_block(block)
        for waiting in self._waiting.values():
            while waiting and waiting[0][0].done:
                block = waiting.popleft()[1]
                block.users -= 1
                if block.users == 0:
                    self._free_block(block)

    def _free_block(self, block: MemoryBlock) -> None:
        # Work queued on the owning stream may still use the memory, so it is poisoned after that.
        self._schedule.append(block.stream, block.poison)
        self._free.setdefault((block.stream, len(block.bytes)), []).append(block)

    def _reuse(self, nbytes: int, stream: SimulatedStream) -> MemoryBlock | None:
        blocks = self._free.get((stream, nbytes))
        return blocks.pop() if blocks else None

    def _reserve(self, nbytes: int, stream: SimulatedStream) -> MemoryBlock:
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            # As CUDA does: wait for the recorded streams, then return the cached blocks to the system.
            for waiting in self._waiting.values():
                for event, _ in waiting:
                    self._schedule.run_until(event)
            self.collect()
            if block := self._reuse(nbytes, stream):
                return block
            self.reserved_bytes -= sum(size * len(blocks) for (_, size), blocks in self._free.items())
            self._free.clear()
            if self.reserved_bytes + nbytes > self.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"simulated device out of memory: {nbytes} bytes requested, {self.allocated_bytes} of "
                    f"{self.limit_bytes} in use"
                )
        self.reserved_bytes += nbytes
        return MemoryBlock(nbytes, stream)
