"""Pools of host memory for batches: reused, and pinned where a device copies from it.

There are two ways back into a pool. Only the copier uses a pinned buffer, and gives it back once the event of its copy
has completed. A buffer that the user gets is recycled once nothing refers to its memory: the pool watches the ndarray
that owns the memory, because tensors and arrays derived from it come and go while the memory is in use.

Pinned memory is a mapping that is registered with the device: its size is exact, and it goes back to the system.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
BlockT = TypeVar("BlockT", mmap.mmap, "NDArray[np.uint8]")
T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiofeed.runtime")

# Below this, malloc is faster than the pool, and labels that the user keeps do not keep a large block alive.
SMALL_BYTES = 64 * 1024
# So many free blocks of the user's batches stay, however large.
LEAST_KEPT = 4
_PAGE = mmap.PAGESIZE
# Linux, from <sys/mman.h>; Python's mmap lacks it.
_MADV_WIPEONFORK = 18


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _anonymous(size: int) -> mmap.mmap:
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


def _pop_fitting(blocks: list[BlockT], nbytes: int) -> BlockT | None:
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
            block = _pop_fitting(self._free, nbytes) or self._map(nbytes)
            # Every derived array keeps this ndarray alive: numpy follows bases up to one whose own base is no ndarray.
            owner: Bytes = np.frombuffer(block, np.uint8, nbytes)
            self._lent.watch(owner, block)
        return owner

    def _map(self, nbytes: int) -> mmap.mmap:
        size = _whole_pages(nbytes)
        try:
            return _anonymous(size)
        except OSError:
            self._free.clear()  # the free blocks may be the memory that is missing
        try:
            return _anonymous(size)
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


# Page-locked blocks that must not be freed; ``None`` until a device has failed.
_kept: list[Bytes] | None = None
# Mappings that are registered with a device, each with the function that unregisters it, until nothing refers to their
# memory. The mapping stays until the driver, which knows its address, has unregistered it.
_registered: DropTracker[tuple[Callable[[Bytes], object], mmap.mmap]] = DropTracker()
# Mappings that a driver could not unregister.
_never_unmapped: list[mmap.mmap] = []


def keep_pinned_memory() -> None:
    """Never free page-locked memory again; call it after a device has failed."""
    global _kept
    _kept = _kept or []


def register_until_dropped(
    memory: Bytes, register: Callable[[Bytes], object], unregister: Callable[[Bytes], object]
) -> None:
    """Page-lock a mapping with ``register`` until nothing refers to its memory.

    ``release_unused`` then unregisters and unmaps it. Copies from it must keep a reference until they have completed.

    Args:
        memory: Its base is the mapping.
        register: Called with the whole mapping; may raise.
        unregister: Called with the whole mapping.
    """
    release_unused()
    mapping: Any = memory.base
    register(np.frombuffer(mapping, np.uint8))
    _registered.watch(memory, (unregister, mapping))


def release_unused() -> None:
    """Unregister and unmap the registered memory that nothing refers to any more, unless a device has failed."""
    if _kept is not None:
        return
    for unregister, mapping in _registered.collected():
        try:
            unregister(np.frombuffer(mapping, np.uint8))
        except Exception as error:  # noqa: BLE001 - the device has failed; its memory goes with the process
            _never_unmapped.append(mapping)
            log.debug("pinned memory could not be unregistered: %s", error)


def pinned_mapping(nbytes: int, register: Callable[[Bytes], object], unregister: Callable[[Bytes], object]) -> Bytes:
    """New memory of ``nbytes``, in whole pages, page-locked until nothing refers to it."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    mapping = _anonymous(_whole_pages(nbytes))
    if sys.platform == "linux":
        # After a fork the parent's next write to a shared page moves that page, and the device would go on reading the
        # old one. So the pages are not shared with a child, which gets zeros. Kernels before 4.14 lack the call.
        with suppress(OSError):
            mapping.madvise(_MADV_WIPEONFORK)
    memory: Bytes = np.frombuffer(mapping, np.uint8, nbytes)
    register_until_dropped(memory, register, unregister)
    return memory


class PinnedBufferPool:
    """Page-locked memory, allocated by ``pin``, for copies to a device; given back explicitly after the copy.

    Up to ``keep`` free blocks stay for later batches; further ones go back to the system.
    """

    def __init__(self, pin: Callable[[int], Bytes], keep: int) -> None:
        self._pin = pin
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        # By id, until the pool is closed: blocks of leases, also of leases that are dropped without giving them back.
        self._leased: dict[int, Bytes] = {}
        self._closed = False
        self._refused = False

    def lease(self) -> PinnedBufferLease:
        """Return a lease for the memory of one batch."""
        return PinnedBufferLease(self)

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of page-locked memory, or of pageable memory if the system refuses to lock it."""
        with self._lock:
            block = _pop_fitting(self._free, nbytes)
        if block is None:
            block = self._allocate(nbytes)
        with self._lock:
            if _kept is not None:
                _kept.append(block)
            elif not self._closed:
                self._leased[id(block)] = block
        return block

    def _allocate(self, nbytes: int) -> Bytes:
        capacity = _whole_pages(nbytes)
        if not self._refused:
            try:
                return self._pin(capacity)
            except Exception as error:  # noqa: BLE001 - for any error of the driver, pageable memory is slower but correct
                self._refused = True
                log.warning(
                    "memory cannot be pinned (%s): copies to the device will be slower and will not overlap with "
                    "computation; raise `ulimit -l` or the container's locked-memory limit",
                    # As text: a stored log record with the exception would keep the batch alive by its traceback.
                    str(error),
                )
        return np.empty(capacity, np.uint8)

    def put(self, blocks: list[Bytes]) -> None:
        """Return blocks to the pool."""
        if _kept is not None:
            _kept.extend(blocks)
            return
        with self._lock:
            for key in map(id, blocks):
                self._leased.pop(key, None)
            self._free.extend(blocks)
            del self._free[: max(0, len(self._free) - self._keep)]
        blocks.clear()  # the caller refers to the list
        release_unused()

    @property
    def pinned(self) -> bool:
        """Whether blocks are page-locked; True until the system has refused."""
        return not self._refused

    def close(self) -> None:
        """Return the free blocks to the system now, and the others when they come back."""
        with self._lock:
            self._keep, self._closed = 0, True
            if _kept is not None:
                _kept.extend([*self._free, *self._leased.values()])
            self._free.clear()
            self._leased.clear()
        release_unused()


class PinnedBufferLease:
    """The blocks of one batch, given back together."""

    def __init__(self, memory: PinnedBufferPool) -> None:
        self._memory = memory
        self._blocks: list[Bytes] = []
        self._lock = threading.Lock()

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._memory.pinned

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of uninitialised memory."""
        block = self._memory.take(nbytes)
        with self._lock:
            self._blocks.append(block)
        return block[:nbytes]

    def give_back(self) -> None:
        """Return the blocks to the pool, after every copy from them has completed. Idempotent."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
        if blocks:
            self._memory.put(blocks)


def array(lease: BufferLease, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array in memory of the lease."""
    return lease.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
