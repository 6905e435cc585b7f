"""Batches that the user has as they lie in the ring; a slot is free again once nothing refers to its memory.

As in ``staging.py``, what is watched is the ndarray that owns the view of a segment: tensors and arrays derived from it
come and go while the memory is in use. The collector only appends to a deque (a C function: no Python code runs there),
which is looked at on the loop.

A fork of the trainer has the same memory, and nobody hears when it lets go: what was lent when it was made is never
written again.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from aiofeed.processes.ipc.batch_codec import as_it_is, copied, leaves_of
from aiofeed.processes.ipc.ring import Ring
from aiofeed.processes.ipc.schema import Leaf, Node
from aiofeed.runtime.buffers import SMALL_BYTES, BufferLease, Bytes

# What is less than this part of its segment is copied: a user who keeps the labels of all batches keeps them alone.
_LEAST_PART = 0.25

_forks = 0


class BorrowTracker:
    """What a feeder's user has of its rings. Used on the loop, apart from what a ``BorrowedSlot`` says."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[weakref.ref[Bytes], BorrowedSlot]] = {}
        self._dropped: deque[weakref.ref[Bytes]] = deque()

    def __len__(self) -> int:
        """Segments that somebody refers to, as far as has been seen."""
        return len(self._lent)

    def watch(self, owner: Bytes, loan: BorrowedSlot) -> None:
        """Return a part of the loan once nothing refers to ``owner``."""
        reference = weakref.ref(owner, self._dropped.append)
        self._lent[id(reference)] = reference, loan

    def collect(self) -> None:
        """Free the slots that nothing refers to any more."""
        while self._dropped:
            _, loan = self._lent.pop(id(self._dropped.popleft()))
            loan.returned()


class BorrowedSlot:
    """One slot on its way to the user. ``take`` may be called in another thread, before ``settle``.

    Args:
        lending: watches it.
        ring: where it lies.
        free: called once with whether the slot may be written again, when nothing refers to it.
        lends: whether anything may stay in the slot.
    """

    def __init__(self, lending: BorrowTracker, ring: Ring, free: Callable[[bool], object], *, lends: bool) -> None:
        self._lends = lends
        self._lending = lending
        self._ring = ring
        self._free = free
        self._forks = _forks
        self._owners: dict[int, Bytes] = {}
        self._segments: list[int] = []
        self._out = 0

    def holds(self, leaf: Leaf) -> bool:
        """Whether an array stays where it is; the others are copied."""
        if not self._lends or leaf.kind == "scalar" or leaf.segment < 0:
            return False
        nbytes = self._ring.view(leaf).nbytes
        return nbytes >= max(SMALL_BYTES, _LEAST_PART * self._ring.size(leaf.segment))

    def copied_bytes(self, batch: Node) -> int:
        """Bytes of the arrays that are copied.

        Raises:
            WireError: one does not lie within its segment.
        """
        return sum(self._ring.view(leaf).nbytes for leaf in leaves_of(batch) if not self.holds(leaf))

    def take(self, lease: BufferLease, leaf: Leaf) -> Any:
        """What stands for an array: as it lies in the slot, or a copy in memory of the lease.

        Raises:
            WireError: it does not lie within its segment.
        """
        if not self.holds(leaf):
            return copied(self._ring.view(leaf), leaf, lease)
        owner = self._owners.get(leaf.segment)
        if owner is None:
            # Derived arrays keep exactly this ndarray alive: its own base is no ndarray, so numpy stops here.
            owner = self._owners[leaf.segment] = np.frombuffer(self._ring.mapping(leaf.segment), np.uint8)
        return as_it_is(self._ring.view(leaf, owner), leaf)

    def settle(self) -> None:
        """All arrays have been asked for; what the user has is watched from now on."""
        self._segments = list(self._owners)
        self._out = len(self._segments)
        if not self._out:
            self._free(True)
        for owner in self._owners.values():
            self._lending.watch(owner, self)
        self._owners.clear()

    def returned(self) -> None:
        """Nothing refers to one of its segments any more."""
        self._out -= 1
        if not self._out:
            self._free(self._forks == _forks and not any(map(self._ring.spoiled, self._segments)))


def _forking() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking)
