"""What may be in flight, batches, bytes and reads: whoever wants more waits here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiofeed.core.limits import ResolvedLimits
from aiofeed.engine.batch import ReorderBuffer

# How fast the estimate forgets a large batch; at 0.95 half of it is gone after fourteen smaller ones.
_DECAY = 0.95


class Admission:
    """Room within the limits.

    Args:
        limits: what may be in flight at first.
        batch_size: samples of a full batch.
        budget: bytes in flight.
        buffer: batches in flight.
    """

    def __init__(self, limits: ResolvedLimits, *, batch_size: int, budget: MemoryBudget, buffer: ReorderBuffer) -> None:
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


class MemoryBudget:
    """Reservations of memory against a limit. Used on the engine's loop only.

    Args:
        limit_bytes: most that may be reserved, one batch excepted.
        bytes_per_sample: first estimate; 0 where nothing is known, and then the first batch goes alone.
    """

    def __init__(self, limit_bytes: int, bytes_per_sample: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self._per_sample = bytes_per_sample
        self._holders = 0

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self._per_sample > 0.0

    def estimate(self, samples: int) -> int:
        """What a batch of ``samples`` will probably take."""
        return int(self._per_sample * samples)

    def admits(self, samples: int) -> bool:
        """Whether one more batch fits."""
        if self._holders == 0:
            return True
        if not self.known:
            return False
        return self.reserved_bytes + self.estimate(samples) <= self.limit_bytes

    def reserve(self, samples: int) -> int:
        """Take the estimate for a batch; give the returned figure to ``correct`` or ``release``."""
        taken = self.estimate(samples)
        self.reserved_bytes += taken
        self._holders += 1
        return taken

    def correct(self, taken: int, actual: int, samples: int) -> int:
        """Replace an estimate by what the batch really takes; returns the figure to release later."""
        self.reserved_bytes += actual - taken
        self._per_sample = max(actual / max(samples, 1), self._per_sample * _DECAY)
        return actual

    def at_least(self, taken: int, known: int) -> int:
        """Raise an estimate to what a batch is known to take by now; returns the figure to ``correct`` later."""
        self.reserved_bytes += max(known - taken, 0)
        return max(known, taken)

    def release(self, taken: int) -> None:
        """Give a batch's bytes back."""
        self.reserved_bytes -= taken
        self._holders -= 1
