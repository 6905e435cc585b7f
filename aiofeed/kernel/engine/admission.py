"""Admission control: limits the batches, bytes and reads in flight. The engine's planner waits here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aiofeed.kernel.core.faces import bind_decoder
from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.engine.batch import ReorderBuffer

# Decay of the memory estimate per batch: at 0.95 half of a large batch's effect is gone after fourteen smaller ones.
_DECAY = 0.95


@dataclass(eq=False)
class Admission:
    """The limits, and what is in use of them. Used on the engine's loop only.

    Args:
        limits: the initial limits.
        batch_size: samples of a full batch.
        budget: bytes in flight.
        buffer: batches in flight.
    """

    limits: ResolvedLimits
    batch_size: int
    budget: MemoryBudget
    buffer: ReorderBuffer
    # Samples that are being read.
    reading: int = 0
    # Whether reads beyond the limit wait in the fetcher, and begin one by one when others end.
    reads_queue: bool = False
    # Whether the planner's last wait was for `read_concurrency`, not for batches or bytes.
    waited_for_reads: bool = False
    # Nothing more will be delivered: nobody has to wait.
    closed: bool = False
    # Set whenever there may be more room.
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self, limits: ResolvedLimits) -> None:
        """Replace the limits."""
        self.limits = limits
        self.room.set()

    def decode_at_once(self, batches: int) -> None:
        """Let so many batches be decoded, or be finished and wait, at the same time."""
        if batches != self.buffer.prefetch_batches:
            self.buffer.prefetch_batches = batches
            self.room.set()

    def has_room(self, samples: int) -> bool:
        """Return whether a batch of ``samples`` may start."""
        if self.closed:
            return True
        if not self.batches_have_room:
            return False
        return self.budget.admits(samples) or not (self.buffer.first_alone or self.budget.known)

    @property
    def batches_have_room(self) -> bool:
        """Whether one more batch may be in flight, if its bytes may."""
        most = self.buffer.prefetch_batches + math.ceil(self.limits.read_concurrency / self.batch_size) + 1
        return self.buffer.assembling + self.buffer.waiting < most

    @property
    def lacks_reads(self) -> bool:
        """Whether as many reads as allowed are in flight."""
        return self.waited_for_reads or (self.reads_queue and self.reading >= self.limits.read_concurrency)

    def may_read(self, samples: int) -> bool:
        """Return whether ``samples`` more may be read now; always if nothing is being read.

        The limit may fall below the size of a chunk while the chunk waits.
        """
        most = self.limits.read_concurrency
        # Half of the limit may wait, so that it is in flight also when reads of a few chunks take long.
        beyond = -(most // 2) if self.reads_queue else samples
        return self.closed or not self.reading or self.reading + beyond <= most

    def may_read_on(self, samples: int) -> bool:
        """Whether the batch that has begun last may read ``samples`` more; not while others exceed the memory limit."""
        exceeded = self.budget.exceeded and self.buffer.assembling + self.buffer.waiting > 1
        return self.closed or (not exceeded and self.may_read(samples))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true; checked whenever ``room`` is set."""
        while not condition():
            self.room.clear()
            await self.room.wait()

    @asynccontextmanager
    async def read_slot(self) -> AsyncIterator[None]:
        """Wait for, and occupy, one of the ``read_concurrency`` reads."""
        await self.until(partial(self.may_read, 1))
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1
            self.room.set()


@dataclass(eq=False)
class MemoryBudget:
    """Reserves memory for batches, by an estimate of bytes per sample. Used on the engine's loop only.

    A batch's reservation goes through ``reserve``, ``raise_to`` once its encoded size is known, ``correct`` once it is
    complete, and ``release``.

    Args:
        limit_bytes: most that may be reserved; one batch may always proceed.
        bytes_per_sample: the estimate; 0 if unknown, which makes the first batch run alone.
    """

    limit_bytes: int
    bytes_per_sample: float = 0.0
    reserved_bytes: int = 0
    _batches: int = 0

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self.bytes_per_sample > 0.0

    @property
    def exceeded(self) -> bool:
        """Whether batches have turned out to be larger than estimated, and take more than the limit."""
        return self.reserved_bytes > self.limit_bytes

    def _estimate(self, samples: int) -> int:
        return int(self.bytes_per_sample * samples)

    def admits(self, samples: int) -> bool:
        """Return whether a batch of ``samples`` fits."""
        if self._batches == 0:
            return True
        if not self.known:
            return False
        return self.reserved_bytes + self._estimate(samples) <= self.limit_bytes

    def reserve(self, samples: int) -> int:
        """Reserve the estimate for a batch; returns the reserved bytes."""
        reserved = self._estimate(samples)
        self.reserved_bytes += reserved
        self._batches += 1
        return reserved

    def raise_to(self, reserved: int, known: int) -> int:
        """Raise a reservation to the bytes that a batch is known to take; returns the reserved bytes."""
        self.reserved_bytes += max(known - reserved, 0)
        return max(known, reserved)

    def correct(self, reserved: int, actual: int, samples: int) -> int:
        """Replace a reservation by the bytes that a batch takes; updates the estimate, returns the reserved bytes."""
        self.reserved_bytes += actual - reserved
        # Numbers and strings count as no bytes; an estimate of 0 would let each batch run alone.
        self.bytes_per_sample = max(actual / max(samples, 1), self.bytes_per_sample * _DECAY, 1.0)
        return actual

    def release(self, reserved: int) -> None:
        """End a reservation."""
        self.reserved_bytes -= reserved
        self._batches -= 1


def bytes_per_sample(decode: Any) -> float:
    """Return the bytes of a decoded sample if the decoder declares its row; otherwise 0."""
    row = None if decode is None else bind_decoder(decode).row
    return 0.0 if row is None else float(math.prod(row.shape) * np.dtype(row.dtype).itemsize)
