"""The slots of the ring: where an engine process puts a batch, and what the trainer reads it from (``ring``).

A slot is the segments of one batch, and is owned by one side at a time:

    free ── lease ──> being filled ── Filled ──> the trainer's ── Free ──> free
         engine process                  trainer: copies          engine process

The engine process writes only between ``lease`` and ``Filled``, the trainer reads only between ``Filled`` and
``Free``. Nobody but these two messages moves a slot on, so nothing has to be locked between the processes.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiofeed.processes.ipc.schema import NewSegment
from aiofeed.processes.ipc.shared_memory import GRAIN, Segment, create
from aiofeed.runtime.buffers import Bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Vector loads, and the rows of DMA engines.
_ALIGNMENT = 64
# How fast the size of an extraordinary batch is forgotten.
_DECAY = 0.95


class SlotMemory:
    """The engine process's end: shared memory for batches, made as needed and used again.

    Args:
        keep: free segments kept; those unused the longest go first.
    """

    advice = 'make collate_fn (or the decoder) return those, or use engine="thread"'

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._free: list[Segment] = []
        self._typical = 0.0
        self._unsent: dict[int, int] = {}
        self._retired: list[int] = []

    def lease(self) -> Slot:
        """The slot of one batch."""
        return Slot(self)

    def take(self, nbytes: int) -> Segment:
        """A segment of at least ``nbytes``: the smallest that is free, or a new one with room for a whole batch."""
        with self._lock:
            fitting = [segment for segment in self._free if segment.nbytes >= nbytes]
            if fitting:
                segment = min(fitting, key=lambda each: each.nbytes)
                self._free.remove(segment)
                return segment
            # The odd bytes behind the rows, targets say, find room in the same segment.
            segment, descriptor = create(next(self._numbers), max(nbytes, int(self._typical)) + GRAIN // 2)
            self._unsent[segment.number] = descriptor
            return segment

    def put_back(self, segments: Sequence[Segment], used: int) -> None:
        """The slot is free again; ``used`` bytes of it had been."""
        with self._lock:
            self._typical = max(float(used), self._typical * _DECAY)
            self._free.extend(segments)
            while len(self._free) > self._keep:
                self._retire(self._free.pop(0))

    def throw_away(self, segments: Sequence[Segment]) -> None:
        """Somebody may still read them: they are not used again."""
        with self._lock:
            for segment in segments:
                self._retire(segment)

    def _retire(self, segment: Segment) -> None:
        if (descriptor := self._unsent.pop(segment.number, None)) is None:
            self._retired.append(segment.number)
        else:
            os.close(descriptor)

    def introduce(self, segments: Sequence[Segment]) -> tuple[list[NewSegment], list[int], list[int]]:
        """Those that the trainer does not know yet, their descriptors, and the numbers it may forget."""
        with self._lock:
            new = [segment for segment in segments if segment.number in self._unsent]
            descriptors = [self._unsent.pop(segment.number) for segment in new]
            retired, self._retired = self._retired, []
        return [NewSegment(segment.number, segment.nbytes) for segment in new], descriptors, retired


class Slot:
    """The memory of one batch: a segment, and more where it turns out not to be enough."""

    pinned = False

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self.segments: list[Segment] = []
        self._next = 0
        self.used = 0

    @property
    def advice(self) -> str:
        """The way out for whoever has a batch that cannot stand in a slot."""
        return self._memory.advice

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of the slot."""
        with self._lock:
            if not self.segments or self._next + nbytes > self.segments[-1].nbytes:
                # As large as all before it: however many arrays a first batch has, its segments are few.
                self.segments.append(self._memory.take(max(nbytes, self.used)))
                self._next = 0
            start = self._next
            self._next = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
            self.used += nbytes
            return self.segments[-1].memory[start : start + nbytes]

    def locate(self, memory: NDArray[Any]) -> tuple[int, int] | None:
        """Segment and offset of a C-contiguous array; ``None`` where it lies elsewhere."""
        address = memory.__array_interface__["data"][0]
        for segment in self.segments:
            if segment.address <= address and address + memory.nbytes <= segment.address + segment.nbytes:
                return segment.number, address - segment.address
        return None

    def give_back(self, again: bool = True) -> None:
        """Nobody writes it any more, and where it may be used ``again`` nobody reads it. Idempotent."""
        with self._lock:
            segments, self.segments = self.segments, []
        if segments and again:
            self._memory.put_back(segments, self.used)
        elif segments:
            self._memory.throw_away(segments)

    def discard(self) -> None:
        """Somebody may read it of whom nothing more is heard: its memory is not written again. Idempotent."""
        self.give_back(again=False)
