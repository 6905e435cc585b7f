"""The assembly of ``in_order="samples"``: batches of whichever samples are ready, so a slow one joins a later batch.

Samples do not belong to the batch they were planned in:

1. ``read_and_decode`` reads samples and adds them to those that were read, in whichever order reads end.
2. ``permit`` forms chunks of the samples that were read. Each is a ``Batch`` of its own with a builder of its
   own, and is decoded, and its failed samples skipped or replaced, as usual.
3. ``_fill`` gives the samples of decoded chunks to the first planned batches with places left.
4. ``_assemble`` copies the samples of a full batch from their chunks, in a decode thread. Batches are delivered in
   order, so their number, their sizes and the end of an epoch are those of ``in_order=True``.

What waits is bounded: planned batches by ``Admission``, and samples that are being decoded or are decoded by
``prefetch_batches``. A slow sample uses one place of both. If no finished batch waits, each thread may decode a chunk
beyond the second limit, because slow samples may use all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.assembly import AssemblyOptions, BuilderFactory
from aiofeed.kernel.engine.batch import Batch, BatchKeys
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.decode_stage import DecodeStage, nothing_left
from aiofeed.kernel.engine.fetch.collate import (
    BatchBuilder,
    ChunkBuilder,
    DefaultCollateBuilder,
    RowBatchBuilder,
    SampleList,
)
from aiofeed.kernel.engine.fetch.fetcher import ChunkOutcome
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool
from aiofeed.kernel.sampling.epochs import EpochStart
from aiofeed.sample_order.sample_schedule import SampleSchedule, SampleTracker

# If a group of reads takes longer, samples are read one by one, so that a slow read delays no others. A task for each
# sample costs some 30 us. Groups come back if a single read takes less than the second figure.
SLOW_GROUP_S = 0.010
FAST_READ_S = 0.001


@dataclass(eq=False)
class _EpochSamples:
    """The samples of an epoch that are read, as (plan, position in it, encoded), and its batches with places left."""

    start: EpochStart
    tracker: SampleTracker
    read: deque[tuple[BatchPlan, int, Any]] = field(default_factory=deque)
    open: deque[OpenBatch] = field(default_factory=deque)


@dataclass(eq=False)
class OpenBatch:
    """A batch with places for samples.

    Args:
        batch: the batch.
        parts: chunks, each with the positions of its samples that fill the next places.
        full: set when no place is left.
    """

    batch: Batch
    parts: list[tuple[Batch, range]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def free(self) -> int:
        """Number of places left."""
        return len(self.batch.plan.indices) - sum(len(places) for _, places in self.parts)


class ChunkStage(DecodeStage):
    """Leaves the samples of a chunk in its builder."""

    def finish(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Do nothing: batches are put together of several chunks."""


class SampleAssembly(ChunkAssembly):
    """Fills batches with the samples that are ready first.

    Args:
        schedule: of the epochs.
        batch_size: samples of a full batch.
    """

    stage: type[DecodeStage] = ChunkStage

    def __init__(
        self, admission: Admission, options: AssemblyOptions, *, schedule: SampleSchedule, batch_size: int
    ) -> None:
        of_chunks = partial(_new_chunk_builder, options.new_builder)
        chunk_memory = HostBufferPool(options.executor.max_threads + 1)
        super().__init__(admission, replace(options, new_builder=of_chunks, memory=chunk_memory))
        self._options = options
        self._buffer.first_alone = self._executor.isolates = False
        self._schedule = schedule
        self._batch_size = batch_size
        # The first epoch with places left, and those planned after it.
        self._epochs: deque[_EpochSamples] = deque()
        # Decoded chunks with the positions of their samples that have no place yet.
        self._ready: deque[tuple[Batch, range]] = deque()
        # Chunks and samples that are being decoded, decoded samples that are not delivered, and full batches that are
        # not delivered.
        self._chunks = self._decoding = self._decoded = self._full = 0
        self._read_s = 0.0
        self._reads_singly = False

    # --- planning and reading

    async def begin(self, batch: Batch) -> None:
        """Add the places of a batch, and start to read its samples.

        Batches are filled from samples of their epoch when those of the epochs before are full.
        """
        start, planned = batch.epoch, OpenBatch(batch)
        if not self._epochs or self._epochs[-1].start is not start:
            self._epochs.append(_EpochSamples(start, self._schedule.tracker(start.position)))
        self._epochs[-1].open.append(planned)
        self.engine.start(batch, self._assemble, planned)
        await super().begin(batch)

    def stop(self) -> None:
        """End running jobs, drop samples that were read."""
        super().stop()
        self._epochs.clear()
        self._ready.clear()

    def _choose_size(self, samples: int) -> None:
        super()._choose_size(self._batch_size)  # the jobs after the last batch of an epoch begins are not of that batch

    def samples_per_read(self) -> int:
        """Return how many samples one task reads: one if reads are slow."""
        return 1 if self._reads_singly else self.chunk_size

    async def read_and_decode(self, batch: Batch, start: int, stop: int) -> None:
        """Read samples of a batch for whichever batch of the epoch has places left."""
        started = time.perf_counter()
        read = await self._read(batch, start, stop)
        if read.waited:
            self._read_s += (time.perf_counter() - started - self._read_s) * 0.2
            self._reads_singly = self._read_s > (FAST_READ_S if self._reads_singly else SLOW_GROUP_S)
        if not batch.is_finished:  # otherwise other samples took its places, and its reservation was corrected
            batch.reserved = self._budget.raise_to(batch.reserved, batch.encoded_bytes)
        epoch = next(each for each in self._epochs if each.start is batch.epoch)
        epoch.read += [(batch.plan, at, encoded) for at, encoded in enumerate(read.samples, start)]
        self.permit()

    # --- decoding

    def permit(self) -> None:
        """Form chunks of samples that were read, and start those that may be decoded."""
        self._fill()
        while not self._admission.closed and (count := self._next_chunk()):
            epoch = self._epochs[0]
            samples = [epoch.read.popleft() for _ in range(count)]
            planned, plan = epoch.open[0].batch, samples[0][0]
            indices = [plan.indices[at] for plan, at, _ in samples]
            positions = [plan.positions[at] for plan, at, _ in samples]
            chunk = Batch(
                BatchPlan(planned.plan.number, indices, positions, plan.epoch_seed, plan.replacements),
                planned.epoch,
                planned.failure_counter,
                reserved=0,
                unread=0,
                uncounted=1,
                undecoded=1,
            )
            self._chunks += 1
            self._decoding += count
            self.engine.start(chunk, self._decode, chunk, [encoded for _, _, encoded in samples])

    def _next_chunk(self) -> int:
        """Return the samples of the next chunk; 0 if none may start, or if it is better to wait for more reads."""
        while len(self._epochs) > 1 and not self._epochs[0].open:
            self._epochs.popleft()
        # The next chunk of a thread waits for it in the pool.
        threads = self._executor.max_running
        if not self._epochs or not (read := len(self._epochs[0].read)) or self._chunks >= 2 * threads:
            return 0
        buffer = self._buffer
        used = buffer.waiting * self._batch_size + self._decoded + self._decoding
        # At least a sample that runs and the next one for each thread, beside the batch that is being filled: with 8
        # threads and batches of 2, threads are then busy for 0.88 of the time instead of 0.75.
        room = max(buffer.prefetch_batches * self._batch_size, self._batch_size + 2 * threads) - used
        if room <= 0:
            if buffer.waiting or self._ready or self._chunks >= threads:
                return 0
            room = self._batch_size
        # Fewer samples than a chunk, or than the first batch lacks, would cost more than they gain.
        lacking = self._epochs[0].open[0].free - self._decoding
        most = min(self.chunk_size, room)
        return min(read, most) if read >= min(most, lacking) else 0

    async def _decode(self, chunk: Batch, encoded: list[Any]) -> None:
        decoding = self._decode_stage.decode(chunk, 0, encoded)
        del encoded
        self._count(chunk, await decoding)

    # --- filling batches

    def finished(self, chunk: Batch) -> None:
        """Add a decoded chunk to those whose samples wait for places."""
        samples = len(chunk.plan.indices)
        self._chunks -= 1
        self._decoding -= samples
        self._decoded += samples
        self._ready.append((chunk, range(samples)))
        self.permit()

    def _fill(self) -> None:
        """Give decoded samples, also those that were skipped, to the first batches with places left."""
        while self._ready and not self._admission.closed:
            chunk, positions = self._ready.popleft()
            epoch = self._epochs[0]
            planned = epoch.open[0]
            batch = planned.batch
            if chunk.error is not None and chunk.kept is None:  # not that of a chunk of which nothing is left
                batch.error, batch.failures = chunk.error, batch.failures + chunk.failures
                self.engine.finished(batch)
                return
            if self._full + self._buffer.waiting >= self._buffer.prefetch_batches:
                self._ready.appendleft((chunk, positions))
                return
            if positions.start == 0:
                batch.failures += chunk.failures
                batch.encoded_bytes += chunk.encoded_bytes
            places = positions[: planned.free]
            planned.parts.append((chunk, places))
            if len(places) < len(positions):
                self._ready.appendleft((chunk, positions[len(places) :]))
            if not planned.free:
                epoch.open.popleft()
                self._full += 1
                filled = [part.plan.positions[at] for part, places in planned.parts for at in places]
                batch.returned_samples = epoch.tracker.add(filled)
                planned.full.set()

    async def _assemble(self, planned: OpenBatch) -> None:
        """Put a batch together when it has no places left."""
        await planned.full.wait()
        outcome = ChunkOutcome()
        await self._executor.run(self._put_together, planned, outcome)
        self._observe(planned.batch, outcome)
        self.engine.finished(planned.batch)

    def _put_together(self, planned: OpenBatch, outcome: ChunkOutcome) -> None:
        """Copy the samples of a batch from their chunks and collate them; runs in a decode thread."""
        started, cpu_started = time.perf_counter(), time.thread_time()
        batch = planned.batch
        parts = [(chunk, _remaining(chunk, places)) for chunk, places in planned.parts]
        last_failures = planned.parts[-1][0].failures
        planned.parts = []
        batch.indices = indices = [chunk.indices[at] for chunk, positions in parts for at in positions]
        if not indices:
            batch.error = nothing_left(batch.plan, last_failures[-1])
            return
        filled = replace(batch.plan, indices=indices)
        keys = BatchKeys(filled, self._fetcher)
        batch.lease = self._options.memory.lease()
        builder = self._options.new_builder(filled, batch.lease)
        builders = [chunk.builder for chunk, _ in parts]
        if isinstance(builder, RowBatchBuilder) and any(isinstance(each, SampleList) for each in builders):
            builder = DefaultCollateBuilder(len(indices), batch.lease)  # a cache has learned its layout meanwhile
        batch.builder = builder
        first = 0
        try:
            for chunk, positions in parts:
                assert isinstance(chunk.builder, ChunkBuilder)
                builder.take_over(chunk.builder, positions, first, keys)
                first += len(positions)
            batch.result = self._options.wrap(builder.finish(keys))
        except CollateError as error:
            batch.error = error
        outcome.collate_s = time.perf_counter() - started
        outcome.collate_cpu_s = time.thread_time() - cpu_started

    def delivered(self, batch: Batch) -> None:
        """Let other samples be decoded in place of those of a batch, once it is taken."""
        super().delivered(batch)
        self._full -= 1
        self._decoded -= len(batch.plan.indices)


def _new_chunk_builder(new_builder: BuilderFactory, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
    """Return a builder of a chunk, whose samples the builders of batches take over."""
    builder = new_builder(plan, lease)
    if isinstance(builder, RowBatchBuilder):
        builder.keep_targets()
        return builder
    return SampleList(len(plan.indices), copies=isinstance(builder, DefaultCollateBuilder) and not builder.may_keep)


def _remaining(chunk: Batch, positions: range) -> Sequence[int]:
    """Return the positions of the samples that were not skipped."""
    return positions if chunk.kept is None else [at for at in chunk.kept if at in positions]
