"""The pool of host memory for batches that the user gets; ``devices/pinned.py`` has that of memory for copies.

A buffer is used again once nothing refers to its memory: the pool watches the ndarray that owns the memory, because
tensors and arrays derived from it come and go while the memory is in use.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
BlockT = TypeVar("BlockT", mmap.mmap, "NDArray[np.uint8]")
T = TypeVar("T")

# Below this, malloc is faster than the pool, and labels that the user keeps do not keep a large block alive.
SMALL_BYTES = 64 * 1024
# So many free blocks of the user's batches stay, however large.
LEAST_KEPT = 4
_PAGE = mmap.PAGESIZE


def whole_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def anonymous(size: int) -> mmap.mmap:
    """Private anonymous memory; with Python's default, a forked child would share it with its parent."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_forks = 0


def forks() -> int:
    """How often this process has forked. A child has the memory that was in use then, and does not report its drop."""
    return _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


class DropTracker(Generic[T]):
    """Reports objects that have been garbage-collected, each by a value that was given for it.

    The collector only appends to a deque, a C function: no Python code runs in it, in whichever thread it runs.
    """

    def __init__(self) -> None:
        # By id: an ndarray, and so a weak reference to one, has no hash.
        self._watched: dict[int, tuple[weakref.ref[object], T]] = {}
        self._dropped: deque[weakref.ref[object]] = deque()

    def __len__(self) -> int:
        """Objects that have not been reported."""
        return len(self._watched)

    def watch(self, owner: object, value: T) -> None:
        """Report ``value`` once ``owner`` has been collected. For any thread."""
        reference = weakref.ref(owner, self._dropped.append)
        self._watched[id(reference)] = reference, value

    def forget(self, value: T) -> None:
        """Do not report ``value``."""
        for key in [key for key, (_, each) in list(self._watched.items()) if each is value]:
            del self._watched[key]

    def collected(self) -> Iterator[T]:
        """Yield the values of the objects that were collected since the last call. For any thread."""
        while self._dropped:
            try:
                reference = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            if (entry := self._watched.pop(id(reference), None)) is not None:
                yield entry[1]


class BufferLease(Protocol):
    """The memory of one batch while it is assembled."""

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of uninitialised memory."""

    def give_back(self) -> None:
        """Return the memory to the pool. Nothing may read or write it any more."""


class BufferPool(Protocol):
    """A pool of memory for batches."""

    def lease(self) -> BufferLease:
        """Return a lease for the memory of one batch."""


def pop_fitting(blocks: list[BlockT], nbytes: int) -> BlockT | None:
    """Remove and return a block of ``nbytes``, or of up to about twice as many; ``None`` if there is none."""
    for position, block in enumerate(blocks):
        if nbytes <= len(block) <= 2 * nbytes + _PAGE:
            return blocks.pop(position)
    return None


class HostBufferPool:
    """Pageable memory for batches that the user gets; recycled once nothing refers to it.

    Up to ``keep`` free blocks of ``most_bytes`` in all stay for later batches; further ones go back to the system.
    """

    pinned = False

    def __init__(self, keep: int, most_bytes: float = math.inf) -> None:
        self._keep = keep
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._lent: DropTracker[mmap.mmap] = DropTracker()

    def lease(self) -> HostBufferPool:
        """Return the pool itself."""
        return self

    def give_back(self) -> None:
        """Do nothing: a block is free once nothing refers to it."""

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of uninitialised memory; it is recycled once nothing refers to it.

        Raises:
            MemoryError: The system refuses the memory.
        """
        if nbytes < SMALL_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            self._collect()
            block = pop_fitting(self._free, nbytes) or self._map(nbytes)
            # Every derived array keeps this ndarray alive: numpy follows bases up to one whose own base is no ndarray.
            owner: Bytes = np.frombuffer(block, np.uint8, nbytes)
            self._lent.watch(owner, block)
        return owner

    def _map(self, nbytes: int) -> mmap.mmap:
        size = whole_pages(nbytes)
        try:
            return anonymous(size)
        except OSError:
            self._free.clear()  # the free blocks may be the memory that is missing
        try:
            return anonymous(size)
        except OSError as error:
            raise MemoryError(f"no memory for {nbytes} bytes of a batch: {error.strerror}") from error

    def _collect(self) -> None:
        self._free.extend(self._lent.collected())
        del self._free[: max(0, len(self._free) - self._keep)]
        while len(self._free) > LEAST_KEPT and sum(map(len, self._free)) > self._most_bytes:
            del self._free[0]

    def close(self) -> None:
        """Return the free blocks to the system now, and the others when they come back."""
        with self._lock:
            self._keep = 0
            self._collect()


def array(lease: BufferLease, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array in memory of the lease."""
    return lease.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
