"""The trainer's end of the ring: the segments that an engine process puts batches in, mapped here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.processes.ipc.batch_codec import empty_array, extent
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.schema import Leaf, NewSegment
from aiofeed.processes.ipc.shared_memory import GRAIN, Segment, adopt, create
from aiofeed.runtime.buffers import Bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.ipc.passing import Passable

log = logging.getLogger("aiofeed.processes")


# Registered memory that nothing refers to any more. The collector only appends here (a C function).
_unused: deque[tuple[Callable[[Bytes], object], Any]] = deque()
# Below this a batch is copied out of the ring by the loop itself: a millisecond or two, less than handing it to a
# thread and back takes while a training step holds the GIL. A larger one would keep the loop from what others say.
INLINE_BYTES = 16 << 20
# Vector loads, and the rows of DMA engines.
_ALIGNMENT = 64
# How fast the size of an extraordinary batch is forgotten.
_DECAY = 0.95


class Ring:
    """The trainer's end: the segments of one engine process, mapped, and registered with the device once.

    Args:
        backend: the device that copies from them; ``None`` for none.
        passable: is told of them.
    """

    def __init__(self, backend: DeviceBackend | None = None, passable: Passable | None = None) -> None:
        self._segments: dict[int, Segment] = {}
        self._passable = passable
        self._passed: dict[int, int] = {}
        self._register: Callable[[Bytes], object] | None = getattr(backend, "register", None)
        self._unregister: Callable[[Bytes], object] | None = getattr(backend, "unregister", None)
        self.pinned = self._register is not None

    def learn(self, segments: Sequence[NewSegment], descriptors: list[int]) -> None:
        """Map what is new; its descriptors are taken out of the list.

        Raises:
            WireError: a segment is not what was announced.
        """
        if len(segments) != len(descriptors):
            raise ProtocolError(f"{len(segments)} segments with {len(descriptors)} descriptors")
        for new in segments:
            if new.number in self._segments:
                raise ProtocolError(f"segment {new.number} is known already")
            another = None if self._passable is None else os.dup(descriptors[0])
            try:
                segment = adopt(new.number, new.nbytes, descriptors.pop(0))
            except BaseException:
                if another is not None:
                    os.close(another)
                raise
            self._segments[new.number] = segment
            if self._passable is not None and another is not None:
                self._passed[new.number] = self._passable.add(segment, another)
            if self._register is not None and self._unregister is not None:
                self._pin(segment, self._register, self._unregister)

    def _pin(
        self, segment: Segment, register: Callable[[Bytes], object], unregister: Callable[[Bytes], object]
    ) -> None:
        release_unused()
        try:
            register(segment.memory)
        except Exception as error:  # noqa: BLE001 - whatever the driver says, pageable memory is slower and right
            self.pinned, self._register = False, None
            log.warning("shared memory cannot be pinned (%s): copies to the device will be slower", str(error))
            return
        # What the finalizer holds keeps the mapping, whose address the driver knows, until it has been told.
        kept = segment.memory.base
        weakref.finalize(segment.memory, _unused.append, (unregister, kept)).atexit = False

    def forget(self, numbers: Sequence[int]) -> None:
        """Let go of segments that are not used any more."""
        for number in numbers:
            if self._passable is not None and (passed := self._passed.pop(number, None)) is not None:
                self._passable.drop(passed)
            self._segments.pop(number, None)

    def close(self) -> None:
        """Let go of all of them."""
        self.forget(list(self._segments))

    def size(self, number: int) -> int:
        """Bytes of a segment; 0 of one that is not known."""
        segment = self._segments.get(number)
        return 0 if segment is None else segment.nbytes

    def spoiled(self, number: int) -> bool:
        """Whether a segment was passed on to somebody who may still read it, though nobody hears of that any more."""
        passed = self._passed.get(number)
        return self._passable is not None and passed is not None and self._passable.spoiled(passed)

    def mapping(self, number: int) -> Any:
        """What stands behind a segment's memory, for an owner of one's own; see ``lending.py``.

        Raises:
            WireError: it is not known.
        """
        segment = self._segments.get(number)
        if segment is None:
            raise ProtocolError(f"there is no segment {number} in the ring")
        return segment.memory.base

    def view(self, leaf: Leaf, memory: Bytes | None = None) -> NDArray[Any]:
        """The array of a leaf, as it lies in the ring; of ``memory``, where that is another owner of its segment.

        Raises:
            WireError: it does not lie within its segment, or is no plain array.
        """
        dtype, nbytes = extent(leaf)
        if nbytes == 0:
            return empty_array(leaf.shape, dtype)
        segment = self._segments.get(leaf.segment)
        if segment is None or leaf.offset < 0 or leaf.offset + nbytes > segment.nbytes:
            raise ProtocolError(f"{nbytes} bytes at {leaf.offset} of segment {leaf.segment} do not lie in the ring")
        memory = segment.memory if memory is None else memory
        return memory[leaf.offset : leaf.offset + nbytes].view(dtype).reshape(leaf.shape)


def release_unused() -> None:
    """Tell devices of registered memory that is not used any more, and unmap it."""
    while True:
        try:
            unregister, mapping = _unused.popleft()
        except IndexError:
            return
        try:
            unregister(np.frombuffer(mapping, np.uint8))
        except Exception as error:  # noqa: BLE001 - the device is beyond use, and this is only tidying up
            log.debug("shared memory could not be unregistered: %s", error)


class RingLease:
    """A slot that a device copies from: given back once it has."""

    pinned = True

    def __init__(self, loop: asyncio.AbstractEventLoop, free: Callable[[], object]) -> None:
        self._loop = loop
        self._free: Callable[[], object] | None = free

    def take(self, nbytes: int) -> Bytes:
        """Nothing is put into it on this side."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Every copy from it has completed, or none was ever issued; from any thread. Idempotent."""
        free, self._free = self._free, None
        if free is not None:
            try:
                self._loop.call_soon_threadsafe(free)
            except RuntimeError:
                pass  # the loop is closed, and the process with it


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
