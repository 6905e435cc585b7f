"""Admission control: limits the batches, bytes and reads in flight. The engine's planner waits here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from aiofeed.kernel.core.limits import ResolvedLimits
from aiofeed.kernel.engine.batch import ReorderBuffer

# Decay of the memory estimate per batch: at 0.95 half of a large batch's effect is gone after fourteen smaller ones.
_DECAY = 0.95


class Admission:
    """The limits, and what is in use of them. Used on the engine's loop only.

    Args:
        limits: the initial limits.
        batch_size: samples of a full batch.
        budget: bytes in flight.
        buffer: batches in flight.
    """

    def __init__(self, limits: ResolvedLimits, *, batch_size: int, budget: MemoryBudget, buffer: ReorderBuffer) -> None:
        self._batch_size = batch_size
        self._budget = budget
        self._buffer = buffer
        self.limits: ResolvedLimits = limits
        # Samples that are being read.
        self.reading: int = 0
        # Whether the planner's last wait was for `read_concurrency`, not for batches or bytes.
        self.waited_for_reads = False
        # Nothing more will be delivered: nobody has to wait.
        self.closed = False
        # Set whenever there may be more room.
        self.room: asyncio.Event = asyncio.Event()

    def change(self, limits: ResolvedLimits) -> None:
        """Replace the limits."""
        self.limits = limits
        self.room.set()

    def decode_at_once(self, batches: int) -> None:
        """Let so many batches be decoded, or be finished and wait, at the same time."""
        if batches != self._buffer.prefetch_batches:
            self._buffer.prefetch_batches = batches
            self.room.set()

    def has_room(self, samples: int) -> bool:
        """Return whether a batch of ``samples`` may start."""
        if self.closed:
            return True
        if not self.batches_have_room:
            return False
        return self._budget.admits(samples) or not (self._buffer.first_alone or self._budget.known)

    @property
    def batches_have_room(self) -> bool:
        """Whether one more batch may be in flight, if its bytes may."""
        most = self._buffer.prefetch_batches + math.ceil(self.limits.read_concurrency / self._batch_size) + 1
        return self._buffer.assembling + self._buffer.waiting < most

    def may_read(self, samples: int) -> bool:
        """Return whether ``samples`` more may be read now; always if nothing is being read.

        The limit may fall below the size of a chunk while the chunk waits.
        """
        return self.closed or not self.reading or self.reading + samples <= self.limits.read_concurrency

    def may_read_on(self, samples: int) -> bool:
        """Whether the batch that has begun last may read ``samples`` more; not while others exceed the memory limit."""
        exceeded = self._budget.exceeded and self._buffer.assembling + self._buffer.waiting > 1
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


class MemoryBudget:
    """Reserves memory for batches, by an estimate of bytes per sample. Used on the engine's loop only.

    A batch's reservation goes through ``reserve``, ``raise_to`` once its encoded size is known, ``correct`` once it is
    complete, and ``release``.

    Args:
        limit_bytes: most that may be reserved; one batch may always proceed.
        bytes_per_sample: initial estimate; 0 if unknown, which makes the first batch run alone.
    """

    def __init__(self, limit_bytes: int, bytes_per_sample: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes: int = 0
        self._per_sample = bytes_per_sample
        self._batches = 0

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self._per_sample > 0.0

    @property
    def exceeded(self) -> bool:
        """Whether batches have turned out to be larger than estimated, and take more than the limit."""
        return self.reserved_bytes > self.limit_bytes

    @property
    def bytes_per_sample(self) -> float:
        """The estimate; 0 if unknown."""
        return self._per_sample

    def _estimate(self, samples: int) -> int:
        return int(self._per_sample * samples)

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
        self._per_sample = max(actual / max(samples, 1), self._per_sample * _DECAY, 1.0)
        return actual

    def release(self, reserved: int) -> None:
        """End a reservation."""
        self.reserved_bytes -= reserved
        self._batches -= 1


def bytes_per_sample(decode: Any) -> float:
    """Return the bytes of a decoded sample if the decoder declares its row; otherwise 0."""
    row = getattr(decode, "row", None)
    return 0.0 if row is None else float(math.prod(row.shape) * np.dtype(row.dtype).itemsize)
