"""Batches that the user gets as they lie in the ring, without a copy. A slot is freed when nothing refers to it.

As in ``runtime/buffers.py``, the tracked object is the ndarray that owns the view of a segment: tensors and arrays
derived from it may be dropped while others still use the memory.

A fork of the trainer has the same memory and does not report when it drops it. So a slot that was borrowed at the time
of a fork is never written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiofeed.processes.ipc.batch_codec import array_nodes, copied_leaf, leaf_of
from aiofeed.processes.ipc.ring import Ring
from aiofeed.processes.ipc.schema import ArrayNode, Node
from aiofeed.runtime.buffers import SMALL_BYTES, BufferLease, Bytes, DropTracker, forks

# Smaller parts of a segment are copied, so that a user who keeps the labels of all batches does not keep the images.
_MIN_FRACTION = 0.25


class BorrowedSlot:
    """The slot of one batch on its way to the user.

    Args:
        tracker: Reports when the user has dropped the batch.
        free: Called once, when nothing refers to the slot, with whether it may be written again.
        zero_copy: Whether arrays may stay in the slot.
    """

    def __init__(
        self, tracker: DropTracker[BorrowedSlot], ring: Ring, free: Callable[[bool], object], *, zero_copy: bool
    ) -> None:
        self._tracker = tracker
        self._ring = ring
        self._free = free
        self._zero_copy = zero_copy
        self._forks = forks()
        self._owners: dict[int, Bytes] = {}
        self._referenced = 0

    def stays(self, node: ArrayNode) -> bool:
        """Whether an array stays in the slot, or is copied; ``ProtocolError`` if it does not lie within its segment."""
        if not self._zero_copy or node.kind == "scalar" or node.segment < 0:
            return False
        nbytes = self._ring.view(node).nbytes
        return nbytes >= max(SMALL_BYTES, _MIN_FRACTION * self._ring.memory(node.segment).nbytes)

    def copied_bytes(self, batch: Node) -> int:
        """Bytes of the arrays that are copied."""
        return sum(self._ring.view(node).nbytes for node in array_nodes(batch) if not self.stays(node))

    def leaf(self, lease: BufferLease, node: ArrayNode) -> Any:
        """An array or tensor, in the slot or as a copy in memory of the lease. For any thread, before ``track``."""
        if not self.stays(node):
            return copied_leaf(self._ring.view(node), node, lease)
        owner = self._owners.get(node.segment)
        if owner is None:
            # Derived arrays keep this ndarray alive: its own base is an mmap, at which NumPy's chain of bases ends.
            segment: Any = self._ring.memory(node.segment)
            owner = self._owners[node.segment] = np.frombuffer(segment.base, np.uint8)
        return leaf_of(self._ring.view(node, owner), node)

    def track(self) -> None:
        """Free the slot when nothing refers to the leaves that were made. On the loop."""
        self._referenced = len(self._owners)
        if not self._referenced:
            self._free(True)
        for owner in self._owners.values():
            self._tracker.watch(owner, self)
        self._owners.clear()

    def segment_dropped(self) -> None:
        """Nothing refers to one of the slot's segments any more."""
        self._referenced -= 1
        if not self._referenced:
            self._free(self._forks == forks())


def free_dropped_slots(tracker: DropTracker[BorrowedSlot]) -> None:
    """Free the slots that the user has dropped. On the loop."""
    for slot in tracker.collected():
        slot.segment_dropped()
