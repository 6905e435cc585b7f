"""A batch on its way: what the engine's tasks and decode threads know of it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiofeed.core.errors import FeedError, SampleError
from aiofeed.core.failures import FailureCounter
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import BatchPlan
from aiofeed.engine.fetch.async_reader import ReadResult
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.fetcher import ChunkOutcome, Fetcher
from aiofeed.runtime.buffers import BufferLease
from aiofeed.sampling.epochs import EpochEnds


@dataclass(eq=False)
class Batch:
    """One batch, from its plan to its delivery.

    Args:
        plan: what is in it.
        counters: of its epoch.
        failure_counter: of its epoch's failures.
        reserved: bytes reserved for it.
        unread: chunks that have not been read; 1 before there are any.
        unaccounted: chunks the loop has not heard the outcome of.
        undecoded: chunks that are not decoded; guarded by ``lock``, as ``errors`` is.
        encoded_bytes: of what was read.
        lease: its memory, once the first chunk is decoded.
        builder: where its samples are put.
        errors: by position, as they came.
        gate: set when it may be decoded.
        result: the finished batch.
        kept: positions of the samples that are left; ``None``: all.
        failures: of samples that were skipped or replaced, in order.
        error: raised in its turn.
        complete: whether it may leave.
    """

    plan: BatchPlan
    counters: EpochStats
    failure_counter: FailureCounter
    reserved: int
    unread: int = 1
    unaccounted: int = 0
    undecoded: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    encoded_bytes: int = 0
    lease: BufferLease | None = None
    builder: BatchBuilder | None = None
    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    kept: Sequence[int] | None = None
    failures: list[SampleError] = field(default_factory=list)
    error: FeedError | None = None
    complete: bool = False

    def count_read(self, read: ReadResult) -> None:
        """Count what was read; on the loop."""
        self.counters.bytes_read += read.nbytes
        self.counters.retries += read.retries
        self.encoded_bytes += read.nbytes

    def count(self, outcome: ChunkOutcome) -> None:
        """Count what came of a job; on the loop."""
        counters = self.counters
        counters.read_s += outcome.read_s
        counters.bytes_read += outcome.nbytes
        counters.retries += outcome.retries
        counters.decode_s += outcome.decode_s
        counters.collate_s += outcome.collate_s
        self.encoded_bytes += outcome.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that were read for it, and of its memory."""
        return self.encoded_bytes + (self.builder.nbytes if self.builder is not None else 0)


class BatchKeys(Sequence[str]):
    """The names of a batch's samples, asked for only where an error needs them."""

    def __init__(self, plan: BatchPlan, fetcher: Fetcher) -> None:
        self._plan = plan
        self._fetcher = fetcher

    def __len__(self) -> int:
        return len(self._plan.indices)

    def __getitem__(self, position: Any) -> Any:
        return self._fetcher.key(self._plan.indices[position])


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
