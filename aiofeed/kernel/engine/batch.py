"""A batch in the engine, and the buffer that puts finished batches in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from aiofeed.kernel.core.errors import FeedError, SampleError
from aiofeed.kernel.core.failures import FailureCounter
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.async_reader import ReadResult
from aiofeed.kernel.engine.fetch.collate import BatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import ChunkOutcome, Fetcher
from aiofeed.kernel.runtime.buffers import BufferLease
from aiofeed.kernel.sampling.epochs import EpochEnds, EpochStart


@dataclass(eq=False)
class Batch:
    """One batch, from its plan to its delivery.

    Args:
        plan: its samples.
        epoch: its epoch.
        failure_counter: failures of its epoch.
        reserved: bytes reserved for it in the ``MemoryBudget``.
        unread: chunks that are not read; 1 before the chunks are created.
        uncounted: chunks whose outcome the event loop has not processed.
        undecoded: chunks that are not decoded; guarded by ``lock``, like ``errors``.
        encoded_bytes: size of the encoded samples.
        lease: its buffer, from the first decoded chunk on.
        builder: puts its samples together in the buffer.
        errors: (position, error) of failed samples and chunks, in the order of their occurrence.
        decode_permit: set when its chunks may be decoded.
        result: the finished batch.
        kept: positions of the samples that remain after skipping; ``None``: all.
        failures: errors of samples that were skipped or replaced, in a fixed order.
        error: raised to the consumer instead of the batch.
        is_finished: whether it may be delivered.
        returned_samples: see ``ReadyBatch``.
        under_way: chunks that are being read or decoded, by their first position: what is done, since when on the clock
            of ``perf_counter``, where the chunk ends, and the samples that are decoded.
        grouped: the batches that the same job makes after this one. The engine plans, reserves memory for, delivers
            and releases all of them as one.

    Attributes:
        indices: those of the plan, until samples are replaced, or another process or order has chosen the samples.
    """

    plan: BatchPlan
    epoch: EpochStart
    failure_counter: FailureCounter
    reserved: int
    unread: int = 1
    uncounted: int = 0
    undecoded: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    encoded_bytes: int = 0
    lease: BufferLease | None = None
    builder: BatchBuilder | None = None
    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    decode_permit: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    kept: Sequence[int] | None = None
    failures: list[SampleError] = field(default_factory=list)
    error: FeedError | None = None
    is_finished: bool = False
    returned_samples: tuple[int, int] | None = None
    under_way: dict[int, tuple[str, float, int, Sequence[Any]]] = field(default_factory=dict)
    grouped: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters: EpochStats = self.epoch.counters
        self.indices: Sequence[int] = self.plan.indices

    def count_read(self, read: ReadResult) -> None:
        """Add a read to the statistics; on the loop."""
        self.counters.bytes_read += read.nbytes
        self.counters.retries += read.retries
        self.encoded_bytes += read.nbytes

    def count_reading(self, seconds: float, samples: int, *, few_in_flight: bool) -> None:
        """Add the time that the reads of a chunk took, and whether few others were in flight when they began."""
        counters = self.counters
        counters.samples_read += samples
        counters.reading_s += seconds * samples
        counters.reading_square_s += seconds**2 * samples
        if few_in_flight:
            counters.samples_read_apart += samples
            counters.reading_apart_s += seconds * samples

    def count(self, outcome: ChunkOutcome) -> None:
        """Add a decode job to the statistics; on the loop."""
        counters = self.counters
        counters.read_s += outcome.read_s
        counters.bytes_read += outcome.nbytes
        counters.retries += outcome.retries
        counters.decode_s += outcome.decode_s
        counters.decode_cpu_s += outcome.decode_cpu_s
        counters.collate_s += outcome.collate_s
        counters.collate_cpu_s += outcome.collate_cpu_s
        counters.samples_decoded += outcome.samples
        if counters.batches:  # the first jobs import modules and fill caches
            counters.jobs += 1
            counters.jobs_s += outcome.decode_s
            counters.jobs_square_s += outcome.decode_s**2
            counters.jobs_samples += outcome.samples
        counters.samples_cached += outcome.cached
        counters.gil_probe_s += outcome.gil_probe_s
        counters.gil_probes += outcome.gil_probes
        self.encoded_bytes += outcome.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its encoded samples and of its buffer."""
        return self.encoded_bytes + (self.builder.nbytes if self.builder is not None else 0)


@dataclass(frozen=True, eq=False)
class BatchKeys(Sequence[str]):
    """The keys of a batch's samples, computed only if an error message needs them."""

    plan: BatchPlan
    fetcher: Fetcher

    def __len__(self) -> int:
        return len(self.plan.indices)

    def __getitem__(self, position: Any) -> Any:
        return self.fetcher.key(self.plan.indices[position])


@dataclass(eq=False)
class ReorderBuffer:
    """Batches in the engine in their order, with the ends of epochs between them.

    Grants decode permits, and returns batches in the order of delivery.

    Args:
        in_order: deliver batches in order; otherwise each epoch's batches as they finish.
        prefetch_batches: most batches that are being decoded, or are finished and wait for the consumer.

    Attributes:
        first_alone: the first batch runs alone until its size is known. With ``in_order=False`` the first batch may
            be slow and must not hold up the others.
    """

    in_order: bool
    prefetch_batches: int
    entries: deque[Batch | EpochEnds] = field(default_factory=deque)
    # Number of batches in `entries`, of those with a decode permit, and of those in the queue to the consumer.
    assembling: int = 0
    permitted: int = 0
    waiting: int = 0
    # So many of the first entries need no permit.
    _settled: int = 0

    def __post_init__(self) -> None:
        self.first_alone: bool = self.in_order

    def grant_permits(self, most: int | None = None) -> None:
        """Permit decoding for as many batches as may be finished and wait: ``most`` or ``prefetch_batches``.

        In order: for the first entries. Out of order: for batches that are read, of the first epoch only. A batch of
        the next epoch cannot be delivered before this epoch ends, and would take a place from one that can.
        """
        room = (most or self.prefetch_batches) - self.permitted - self.waiting
        settled = True
        for entry in islice(self.entries, self._settled, None) if room > 0 else ():
            if isinstance(entry, EpochEnds):
                # The next epoch cannot be delivered before this one ends, and would take the room of its batches.
                if not self.in_order:
                    return
            elif not entry.decode_permit.is_set():
                if self.in_order or entry.unread == 0:
                    entry.decode_permit.set()
                    self.permitted += 1
                    room -= 1
                else:
                    settled = False
            self._settled += settled
            if not room:
                return

    def pop(self) -> Batch | EpochEnds | None:
        """Remove and return the next entry to deliver: a finished batch, or an epoch's end behind its last batch."""
        if self.entries and isinstance(self.entries[0], EpochEnds):
            self._settled = max(0, self._settled - 1)
            return self.entries.popleft()
        for entry in self.entries:
            if isinstance(entry, EpochEnds):
                return None
            if entry.is_finished:
                self.entries.remove(entry)
                self._settled = max(0, self._settled - 1)
                self.assembling -= 1
                self.permitted -= 1
                return entry
            if self.in_order:
                return None
        return None
