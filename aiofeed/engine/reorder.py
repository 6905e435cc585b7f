"""Batches between their admission and the consumer: whose turn it is to be decoded, and whose to leave."""

from __future__ import annotations

from collections import deque

from aiofeed.engine.batch import Batch
from aiofeed.sampling.epochs import EpochEnds


class ReorderBuffer:
    """Batches that were admitted and have not left yet, in order, with the ends of epochs between them.

    Args:
        in_order: batches leave in order; otherwise whichever of an epoch is complete.
        prefetch_batches: how many may be decoded, or finished and waiting for the consumer.
    """

    def __init__(self, *, in_order: bool, prefetch_batches: int) -> None:
        self.in_order = in_order
        self.prefetch_batches = prefetch_batches
        self.line: deque[Batch | EpochEnds] = deque()
        # Of the line: how many batches, and how many may be decoded. Then how many have left and are not yet taken.
        self.assembling = self.opened = self.waiting = 0

    def open_gates(self) -> None:
        """Let batches be decoded, as many as may be finished and waiting.

        In order: the first of the line. Otherwise those that have been read, of the first epoch alone: one of the
        next cannot be handed out before that has ended, and would keep its place from those that can.
        """
        for entry in self.line:
            if self.opened + self.waiting >= self.prefetch_batches:
                return
            if isinstance(entry, EpochEnds):
                if not self.in_order:
                    return
            elif not entry.gate.is_set() and (self.in_order or entry.unread == 0):
                entry.gate.set()
                self.opened += 1

    def pop(self) -> Batch | EpochEnds | None:
        """Take out what may leave: a complete batch whose turn it is, or the end of an epoch behind its last batch."""
        if self.line and isinstance(self.line[0], EpochEnds):
            return self.line.popleft()
        for entry in self.line:
            if isinstance(entry, EpochEnds):
                return None
            if entry.complete:
                self.line.remove(entry)
                self.assembling -= 1
                self.opened -= 1
                return entry
            if self.in_order:
                return None
        return None
