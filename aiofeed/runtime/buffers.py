"""Slots: the host memory of batches, used again and again, pinned where a device copies from it.

Two ways of coming back. A pinned slot is seen by the copier alone and is given back by it, once the copy's event has
completed. A slot that is handed to the user comes back by itself, once nothing refers to its memory: the object
watched is the ndarray that owns the memory's view, because tensors and arrays derived from it come and go while the
memory is in use.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

log = logging.getLogger("aiofeed.runtime")

# Below this, malloc is faster than the bookkeeping, and a user who keeps only the labels keeps nothing else alive.
SMALL_BYTES = 64 * 1024
_PAGE = 4096


def _anonymous(size: int) -> mmap.mmap:
    """Memory without a file, and private: Python's default would share it with forked children, both writing."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class BufferLease(Protocol):
    """Where a batch's memory comes from while it is assembled."""

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        ...

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of memory, contents undefined."""
        ...

    def give_back(self) -> None:
        """The memory is no longer read or written by anybody."""
        ...


class BufferPool(Protocol):
    """Where the memory of batches comes from."""

    def lease(self) -> BufferLease:
        """The memory of one batch."""
        ...


class HostBufferPool:
    """Pageable memory for batches that the user gets; recycled when the user has let go of it.

    Args:
        keep: free blocks kept for later batches; what comes back beyond that returns to the system.
    """

    pinned = False

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._lent: dict[int, tuple[weakref.ref[Bytes], mmap.mmap]] = {}
        # Filled by the collector, in whichever thread it runs: a C function, so that no Python code runs there.
        self._dropped: deque[weakref.ref[Bytes]] = deque()

    @property
    def lent(self) -> int:
        """Blocks that somebody still refers to."""
        with self._lock:
            self._collect()
            return len(self._lent)

    def lease(self) -> HostBufferPool:
        """The pool itself: nothing has to be given back."""
        return self

    def give_back(self) -> None:
        """Nothing to do: blocks come back when nothing refers to them."""

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of memory, contents undefined; it is the user's until nothing refers to it.

        Raises:
            MemoryError: the system has no more.
        """
        if nbytes < SMALL_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            block = self._find(nbytes) or self._map(nbytes)
            # Derived arrays keep exactly this ndarray alive: its own base is no ndarray, so numpy stops here.
            owner: Bytes = np.frombuffer(block, np.uint8, nbytes)
            reference = weakref.ref(owner, self._dropped.append)
            self._lent[id(reference)] = (reference, block)
        return owner

    def _map(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // _PAGE) * _PAGE
        try:
            return _anonymous(size)
        except OSError:
            self._free.clear()  # what is kept for later may be what is missing now
        try:
            return _anonymous(size)
        except OSError as error:
            raise MemoryError(f"no memory for {nbytes} bytes of a batch: {error.strerror}") from error

    def _find(self, nbytes: int) -> mmap.mmap | None:
        for position, block in enumerate(self._free):
            if nbytes <= len(block) <= 2 * nbytes + _PAGE:
                return self._free.pop(position)
        return None

    def _collect(self) -> None:
        while self._dropped:
            _, block = self._lent.pop(id(self._dropped.popleft()))
            self._free.append(block)
        del self._free[: max(0, len(self._free) - self._keep)]

    def clear(self) -> None:
        """Return the free blocks to the system."""
        with self._lock:
            self._collect()
            self._free.clear()

    def close(self) -> None:
        """Nobody is going to need memory any more: return the free blocks, and whatever comes back later."""
        self._keep = 0
        self.clear()


class PinnedBufferPool:
    """Page-locked memory that copies read from, given back explicitly once they have.

    Args:
        pin: the backend's allocator of page-locked bytes.
        keep: free blocks kept for later batches.
    """

    def __init__(self, pin: Callable[[int], Bytes], keep: int) -> None:
        self._pin = pin
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self._refused = False
        self.lent = 0

    def lease(self) -> PinnedBufferLease:
        """The memory of one batch."""
        return PinnedBufferLease(self)

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of page-locked memory, or of pageable memory where the machine has no more."""
        with self._lock:
            self.lent += 1
            for position, block in enumerate(self._free):
                if nbytes <= block.nbytes <= 2 * nbytes + _PAGE:
                    return self._free.pop(position)
        capacity = -(-nbytes // 512) * 512
        if not self._refused:
            try:
                return self._pin(capacity)
            except Exception as error:  # noqa: BLE001 - whatever the driver says, pageable memory is slower and right
                self._refused = True
                log.warning(
                    "memory cannot be pinned (%s): copies to the device will be slower and not overlap; "
                    "raise `ulimit -l` or the container's locked-memory limit",
                    # As text: a log record that is kept would keep the traceback, and with it the batch.
                    str(error),
                )
        return np.empty(capacity, np.uint8)

    def put(self, blocks: list[Bytes]) -> None:
        """Take blocks back."""
        with self._lock:
            self.lent -= len(blocks)
            self._free.extend(blocks)
            del self._free[: max(0, len(self._free) - self._keep)]

    @property
    def pinned(self) -> bool:
        """Whether blocks are page-locked, as far as is known."""
        return not self._refused

    def clear(self) -> None:
        """Return the free blocks to the system."""
        with self._lock:
            self._free.clear()

    def close(self) -> None:
        """Nobody is going to need memory any more: return the free blocks, and whatever comes back later."""
        self._keep = 0
        self.clear()


class PinnedBufferLease:
    """The blocks of one batch; all of them go back at once."""

    def __init__(self, memory: PinnedBufferPool) -> None:
        self._memory = memory
        self._blocks: list[Bytes] = []
        self._lock = threading.Lock()

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._memory.pinned

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of the batch's memory."""
        block = self._memory.take(nbytes)
        with self._lock:
            self._blocks.append(block)
        return block[:nbytes]

    def give_back(self) -> None:
        """Every copy from this memory has completed, or none was ever issued. Idempotent."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
        if blocks:
            self._memory.put(blocks)


def array(lease: BufferLease, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A C-contiguous array in memory of the lease, contents undefined."""
    count = 1
    for size in shape:
        count *= size
    return lease.take(count * dtype.itemsize).view(dtype).reshape(shape)
