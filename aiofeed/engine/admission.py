"""What may be in flight, batches, bytes and reads: whoever wants more waits here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiofeed.core.limits import ResolvedLimits
from aiofeed.engine.budget import Budget
from aiofeed.engine.reorder import ReorderBuffer


class Admission:
    """Room within the limits.

    Args:
        limits: what may be in flight at first.
        batch_size: samples of a full batch.
        budget: bytes in flight.
        buffer: batches in flight.
    """

    def __init__(self, limits: ResolvedLimits, *, batch_size: int, budget: Budget, buffer: ReorderBuffer) -> None:
        self._batch_size = batch_size
        self._budget = budget
        self._buffer = buffer
        self.limits = limits
        self._most_batches = limits.batches_in_flight(batch_size)
        # Samples that are being read.
        self.reading = 0
        # Whether the plan last waited for reads to end, rather than for room.
        self.held_by_reads = False
        # Nothing more is to come: whoever waits is let go.
        self.closed = False
        # Set whenever there may be more room.
        self.room = asyncio.Event()

    def change(self, limits: ResolvedLimits) -> None:
        """From now on these limits count."""
        self.limits = limits
        self._most_batches = limits.batches_in_flight(self._batch_size)
        self.room.set()

    def has_room(self, samples: int) -> bool:
        """Whether a batch of so many samples may be begun."""
        if self.closed:
            return True
        buffer = self._buffer
        if buffer.assembling + buffer.waiting >= self._most_batches:
            return False
        # In order, the first batch goes alone until its size is known. Out of order it may be the one that is slow, and
        # must not hold up the others.
        return self._budget.admits(samples) or not (buffer.in_order or self._budget.known)

    def may_read(self, samples: int) -> bool:
        """Whether so many more may be read at a time; where none are, always.

        A chunk is cut to the limit as it is then; while it waits the limit may become less than the chunk.
        """
        return self.closed or not self.reading or self.reading + samples <= self.limits.read_concurrency

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for room."""
        while not condition():
            self.room.clear()
            await self.room.wait()

    @asynccontextmanager
    async def read_slot(self) -> AsyncIterator[None]:
        """One read more, within ``read_concurrency``."""
        await self.until(partial(self.may_read, 1))
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1
            self.room.set()
