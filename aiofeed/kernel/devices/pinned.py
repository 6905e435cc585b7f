"""Page-locked memory for batches, from which a device copies.

Only the copier uses a pinned buffer, and gives it back once the event of its copy has completed. Pinned memory is a
mapping that is registered with the device: its size is exact, and it goes back to the system.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from aiofeed.kernel.runtime.buffers import Bytes, DropTracker, anonymous, pop_fitting, whole_pages

log: logging.Logger = logging.getLogger("aiofeed.devices")

# Linux, from <sys/mman.h>; Python's mmap lacks it.
_MADV_WIPEONFORK = 18

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
    mapping = anonymous(whole_pages(nbytes))
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
            block = pop_fitting(self._free, nbytes)
        if block is None:
            block = self._allocate(nbytes)
        with self._lock:
            if _kept is not None:
                _kept.append(block)
            elif not self._closed:
                self._leased[id(block)] = block
        return block

    def _allocate(self, nbytes: int) -> Bytes:
        capacity = whole_pages(nbytes)
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
