"""Batches that the user gets as they lie in the ring, without a copy. A slot is freed when nothing refers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiofeed.processes.ipc.batch_codec import array_nodes, copied_leaf, leaf_of
from aiofeed.processes.ipc.ring import Borrowed, Ring
from aiofeed.processes.ipc.schema import ArrayNode, Node
from aiofeed.runtime.buffers import SMALL_BYTES, BufferLease, Bytes, DropTracker

# Smaller parts of a segment are copied, so that a user who keeps the labels of all batches does not keep the images.
_MIN_FRACTION = 0.25


class BorrowedSlot(Borrowed):
    """The slot of one batch on its way to the user.

    Args:
        tracker: Reports when the user has dropped the batch.
        free: Called once, when nothing refers to the slot, with whether it may be written again.
        zero_copy: Whether arrays may stay in the slot.
    """

    def __init__(
        self, tracker: DropTracker[Borrowed], ring: Ring, free: Callable[[bool], object], *, zero_copy: bool
    ) -> None:
        super().__init__(free)
        self._tracker = tracker
        self._ring = ring
        self._zero_copy = zero_copy
        self._owners: dict[int, Bytes] = {}

    def stays(self, node: ArrayNode) -> bool:
        """Whether an array stays in the slot, or is copied; ``ProtocolError`` if it does not lie within its segment."""
        if not self._zero_copy or node.kind == "scalar" or node.segment < 0:
            return False
        nbytes = self._ring.view(node).nbytes
        return nbytes >= max(SMALL_BYTES, _MIN_FRACTION * self._ring.segment(node.segment).nbytes)

    def copied_bytes(self, batch: Node) -> int:
        """Bytes of the arrays that are copied."""
        return sum(self._ring.view(node).nbytes for node in array_nodes(batch) if not self.stays(node))

    def leaf(self, lease: BufferLease, node: ArrayNode) -> Any:
        """An array or tensor, in the slot or as a copy in memory of the lease. For any thread, before ``track``."""
        if not self.stays(node):
            return copied_leaf(self._ring.view(node), node, lease)
        owner = self._owners.get(node.segment)
        if owner is None:
            owner = self._owners[node.segment] = self._ring.segment(node.segment).owner()
        return leaf_of(self._ring.view(node, owner), node)

    def track(self) -> None:
        """Free the slot when nothing refers to the leaves that were made. On the loop."""
        self.watch(self._owners.values(), self._tracker)
        self._owners.clear()


def free_dropped_slots(tracker: DropTracker[Borrowed]) -> None:
    """Free the slots that the user has dropped."""
    for slot in tracker.collected():
        slot.segment_dropped()
