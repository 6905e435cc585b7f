"""The ring of shared-memory slots: ``SlotPool`` writes batches into slots, ``Ring`` maps and reads them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from aiofeed.ipc.framing import ProtocolError, close_all
from aiofeed.ipc.schema import ArrayNode, NewSegment, dtype_and_nbytes
from aiofeed.ipc.shared_memory import GRAIN, Segment, create_segment, open_segment
from aiofeed.kernel.runtime.buffers import Bytes, DropTracker, forks, register_until_dropped

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import BaseDevice

log: logging.Logger = logging.getLogger("aiofeed.processes")

# Batches up to this size are copied on the loop: a millisecond or two, less than a thread takes to start on it while a
# training step holds the GIL. Larger ones are copied in a thread, so that the loop can process other messages.
INLINE_BYTES = 16 << 20
# Vector loads, and the rows of DMA engines.
ALIGNMENT = 64
# Per batch, how fast the size of an unusually large batch is forgotten.
_DECAY = 0.95
# In place of a descriptor that was sent to the only reader.
_SENT = -1


# --- reading ---


class Extent(NamedTuple):
    """Bytes in a segment of shared memory."""

    segment: int
    offset: int
    nbytes: int


class Ring:
    """The segments of another process, mapped here, and registered with a device once.

    Args:
        backend: The device that copies from them; ``None`` for none.
        private: Whether what this process writes there is visible to it alone.
        sealed: Whether segments must be sealed against shrinking; those of torch are not.
    """

    def __init__(self, backend: BaseDevice | None = None, *, private: bool = False, sealed: bool = True) -> None:
        self._segments: dict[int, Segment] = {}
        self._open = partial(open_segment, private=private, sealed=sealed)
        self._backend: Any = backend if backend is not None and backend.register is not None else None
        self.pinned: bool = self._backend is not None

    def map_segments(self, segments: Sequence[NewSegment], descriptors: list[int], retired: Iterable[int] = ()) -> None:
        """Map new segments, whose descriptors are removed from the list and closed, and forget retired ones.

        A segment stays mapped as long as something refers to its memory.

        Raises:
            ProtocolError: A segment is not as announced.
        """
        if len(segments) != len(descriptors):
            raise ProtocolError(f"{len(segments)} segments with {len(descriptors)} descriptors")
        for new in segments:
            if new.number in self._segments:
                raise ProtocolError(f"segment {new.number} is already mapped")
            segment = self._segments[new.number] = self._open(new.number, new.nbytes, descriptors.pop(0))
            if self.pinned:
                self._pin(segment)
        for number in retired:
            self._segments.pop(number, None)

    def _pin(self, segment: Segment) -> None:
        try:
            register_until_dropped(segment.memory, self._backend.register, self._backend.unregister)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises, pageable memory is slower and correct
            self.pinned = False
            log.warning("shared memory cannot be pinned (%s): copies to the device will be slower", str(error))

    def close(self) -> None:
        """Forget all segments."""
        self._segments.clear()

    def segment(self, number: int) -> Segment:
        """Return a segment; ``ProtocolError`` if it is unknown."""
        segment = self._segments.get(number)
        if segment is None:
            raise ProtocolError(f"the ring has no segment {number}")
        return segment

    def view(self, node: ArrayNode, memory: Bytes | None = None) -> NDArray[Any]:
        """Return the array of a node, as it lies in the ring; in ``memory``, if that is another ndarray of its segment.

        Raises:
            ProtocolError: It does not lie within its segment, or its dtype or shape is not valid.
        """
        dtype, nbytes = dtype_and_nbytes(node)
        if nbytes == 0:
            try:
                return np.empty(node.shape, dtype)
            except ValueError as error:  # NumPy multiplies the other dimensions, too
                raise ProtocolError(f"an array of shape {node.shape}: {error}") from None
        memory = self.segment(node.segment).memory if memory is None else memory
        if node.offset < 0 or node.offset + nbytes > memory.nbytes:
            raise ProtocolError(f"{nbytes} bytes at {node.offset} do not lie in segment {node.segment}")
        return memory[node.offset : node.offset + nbytes].view(dtype).reshape(node.shape)


class Borrowed:
    """A slot whose memory is used without a copy. It is freed when nothing refers to its memory any more.

    A fork of this process has the same memory and does not report when it drops it. So a slot that was borrowed at the
    time of a fork is never written again.

    Args:
        free: Called once, with whether the slot may be written again.
    """

    def __init__(self, free: Callable[[bool], object]) -> None:
        self._free = free
        self._forks = forks()
        self._left = 0

    def watch(self, owners: Collection[Bytes], tracker: DropTracker[Borrowed]) -> None:
        """Let a tracker report the drop of each ``Segment.owner``; without owners the slot is freed now."""
        self._left = len(owners)
        if not owners:
            self._free(True)
        for owner in owners:
            tracker.watch(owner, self)

    def segment_dropped(self) -> None:
        """Count an owner that the tracker has reported."""
        self._left -= 1
        if not self._left:
            self._free(self._forks == forks())


def free_dropped_slots(tracker: DropTracker[Borrowed]) -> None:
    """Free the slots whose memory was dropped."""
    for slot in tracker.collected():
        slot.segment_dropped()


class RingLease:
    """A slot that a device copies from. ``free`` is called on the loop when the copy has completed."""

    pinned = True

    def __init__(self, loop: asyncio.AbstractEventLoop, free: Callable[[], object]) -> None:
        self._loop = loop
        self._free: Callable[[], object] | None = free

    def take(self, nbytes: int) -> Bytes:
        """Never called: the batch is in the slot already."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Every copy from the slot has completed, or none was issued. For any thread. Idempotent."""
        free, self._free = self._free, None
        if free is not None:
            try:
                self._loop.call_soon_threadsafe(free)
            except RuntimeError:
                pass  # the loop is closed, and the process that owns the slot is gone


# --- writing ---

Dump: TypeAlias = Callable[[Any, "Slot"], tuple[bytes, list[Extent]]]
"""Pickles a value; puts its buffers into a slot and returns where they lie."""


class SlotPool:
    """Shared memory for batches, created as needed and reused.

    Args:
        keep: Free segments that are kept; beyond that those unused the longest are retired.
        advice: What to do about a batch that cannot be described.
        single_reader: Whether one process reads the slots, so that a descriptor need not be kept once it was sent.
        dump: Pickles values that cannot be described, for a reader that trusts this process; see ``dump_batch``.
    """

    def __init__(self, keep: int, advice: str = "", *, single_reader: bool, dump: Dump | None = None) -> None:
        self.advice = advice
        self.dump = dump
        self._keep = keep
        self._single_reader = single_reader
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._free: list[Segment] = []
        self._typical_bytes = 0.0
        # Descriptors of all segments but the retired ones.
        self._descriptors: dict[int, int] = {}

    def lease(self) -> Slot:
        """Return the slot of one batch."""
        return Slot(self)

    def take(self, nbytes: int) -> Segment:
        """Return a segment of at least ``nbytes``: the smallest free one, or a new one with room for a whole batch."""
        with self._lock:
            fitting = [segment for segment in self._free if segment.nbytes >= nbytes]
            if fitting:
                segment = min(fitting, key=lambda each: each.nbytes)
                self._free.remove(segment)
                return segment
            # Half a grain more: small arrays beside the rows, such as targets, fit into the same segment.
            nbytes = max(nbytes, int(self._typical_bytes)) + GRAIN // 2
            segment, descriptor = create_segment(next(self._numbers), nbytes)
            self._descriptors[segment.number] = descriptor
            return segment

    def adopt(self, memory: Bytes, descriptor: int) -> Segment:
        """Return a segment of memory that exists already, with its descriptor, which is closed with the pool."""
        with self._lock:
            segment = Segment(next(self._numbers), memory, memory.__array_interface__["data"][0])
            self._descriptors[segment.number] = descriptor
            return segment

    def put_back(self, segments: Sequence[Segment], used: int, *, reusable: bool) -> None:
        """Reuse the segments of a slot, of which ``used`` bytes were in use; or never, if a process may read them."""
        with self._lock:
            if not reusable:
                for segment in segments:
                    self._retire(segment)
                return
            self._typical_bytes = max(float(used), self._typical_bytes * _DECAY)
            self._free.extend(segments)
            while len(self._free) > self._keep:
                self._retire(self._free.pop(0))

    def _retire(self, segment: Segment) -> None:
        if (descriptor := self._descriptors.pop(segment.number, _SENT)) != _SENT:
            os.close(descriptor)

    def introduce(self, segments: Sequence[Segment], known: set[int]) -> tuple[list[NewSegment], list[int], list[int]]:
        """Return the segments of a slot that a reader has not mapped yet, and those that it has to unmap.

        Args:
            segments: The segments of the slot.
            known: Numbers of the segments that this reader has mapped; updated.

        Returns:
            The new segments, their descriptors (to be closed by the caller), and the numbers to unmap.

        Raises:
            OSError: No descriptors are left.
        """
        new: list[NewSegment] = []
        descriptors: list[int] = []
        with self._lock:
            retired = sorted(known - self._descriptors.keys())
            try:
                for segment in segments:
                    if segment.number not in known:
                        descriptor = self._descriptors[segment.number]
                        descriptors.append(descriptor if self._single_reader else os.dup(descriptor))
                        new.append(NewSegment(segment.number, segment.nbytes))
            except OSError:
                close_all(descriptors)
                raise
            if self._single_reader:
                self._descriptors.update((each.number, _SENT) for each in new)
        known.difference_update(retired)
        known.update(each.number for each in new)
        return new, descriptors, retired

    def close(self) -> None:
        """Close the descriptors; processes that have mapped the segments keep them."""
        with self._lock:
            self._free.clear()
            close_all(each for each in self._descriptors.values() if each != _SENT)
            self._descriptors.clear()


class Slot:
    """The memory of one batch: a segment, and further ones if the first is too small."""

    pinned = False

    def __init__(self, pool: SlotPool) -> None:
        self.advice: str = pool.advice
        self.dump: Dump | None = pool.dump
        self._pool = pool
        self._lock = threading.Lock()
        self.segments: list[Segment] = []
        self._next = 0
        self.used: int = 0

    def take(self, nbytes: int) -> Bytes:
        """Return the next ``nbytes`` of the slot."""
        with self._lock:
            if not self.segments or self._next + nbytes > self.segments[-1].nbytes:
                # As large as all before it, so that a first batch of many arrays has few segments.
                self.extend(max(nbytes, self.used))
            start = self._next
            self._next = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
            self.used += nbytes
            return self.segments[-1].memory[start : start + nbytes]

    def extend(self, nbytes: int) -> None:
        """Take the next ``nbytes`` from a segment of their own."""
        self.segments.append(self._pool.take(nbytes))
        self._next = 0

    def adopt(self, memory: Bytes, descriptor: int) -> None:
        """Add memory that exists already; see ``SlotPool.adopt``. Call ``extend`` before the next ``take``."""
        self.segments.append(self._pool.adopt(memory, descriptor))

    def locate(self, memory: NDArray[Any]) -> tuple[int, int] | None:
        """Segment number and offset of a C-contiguous array; ``None`` if it is not in the slot."""
        address = memory.__array_interface__["data"][0]
        for segment in self.segments:
            if segment.address <= address and address + memory.nbytes <= segment.address + segment.nbytes:
                return segment.number, address - segment.address
        return None

    def introduce(self, known: set[int]) -> tuple[list[NewSegment], list[Any], list[int]]:
        """Return the segments that a reader has to map and unmap before it reads; see ``SlotPool.introduce``."""
        return self._pool.introduce(self.segments, known)

    def give_back(self, reusable: bool = True) -> None:
        """Free the slot; idempotent. ``reusable``: no process reads its memory any more, so it may be written again."""
        with self._lock:
            segments, self.segments = self.segments, []
        if segments:
            self._pool.put_back(segments, self.used, reusable=reusable)
