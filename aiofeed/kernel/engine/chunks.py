"""Assembles batches from chunks: reads them on the event loop, decodes them in threads.

``read_and_decode`` runs as one task per chunk: read, wait for the batch's decode permit, decode in a thread. The decode
job of the last chunk puts the batch together. If samples failed, ``_recover`` skips or replaces them, or sets the
batch's error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial

from aiofeed.kernel.engine.admission import Admission
from aiofeed.kernel.engine.assembly import Assembly, AssemblyOptions
from aiofeed.kernel.engine.batch import Batch, BatchKeys
from aiofeed.kernel.engine.decode_stage import DecodeStage
from aiofeed.kernel.engine.fetch.async_reader import ReadResult
from aiofeed.kernel.engine.fetch.fetcher import ChunkOutcome
from aiofeed.kernel.engine.tuning.jobs import samples_per_job, work_s

# Batches are made together until a job takes this long: a job costs the loop and three changes of threads, some hundred
# microseconds, however little it does.
GROUP_S = 0.008
# The batches that are made need not wait longer for a slow sample behind them.
MADE_S = 0.008
TOGETHER_MOST = 32
# Samples and chunks that a line in the log names.
NAMED = 4

log: logging.Logger = logging.getLogger("aiofeed.engine")


class ChunkAssembly(Assembly):
    """Reads and decodes the chunks of batches in this process.

    Args:
        may_group: whether one job may make several small batches, while the fetcher reads in jobs.
    """

    stage: type[DecodeStage] = DecodeStage

    def __init__(self, admission: Admission, options: AssemblyOptions, *, may_group: bool = False) -> None:
        super().__init__(admission, options)
        self._loop_delay_s = options.loop_delay_s
        self._stop = threading.Event()
        self._decode_stage = self.stage(options, self._stop, admission.read_slot)
        # Samples whose reads have begun and not ended; `Admission.reading` also counts tasks that do not run yet.
        self._reading = 0
        self._may_group = may_group
        # Whether a batch was delivered. Before, only what the first one needs should take the processor.
        self._begun = False
        # Seconds that a batch took lately.
        self._batch_s = 0.0

    def stop(self) -> None:
        """End running jobs."""
        self._stop.set()

    @property
    def busy(self) -> bool:
        """Whether decode jobs wait for a thread."""
        return self._executor.backlog > 0

    def delivered(self, batch: Batch) -> None:
        """Tune the decode threads from the first batch on, and let more batches be in flight."""
        self._begun = True
        if self._tuner is not None:
            self._tuner.decoding.warm = True

    def waiting_for(self, batch: Batch) -> tuple[str, ...]:
        """Return the samples that are being read or decoded, and since when."""
        if not (chunks := sorted(batch.under_way.items())):
            reads = f"{batch.unread} of its chunks are not read" if batch.unread else "all of it is read"
            return (f"{reads}, and none is being read or decoded: other batches use the threads or the memory",)
        now, keys = time.perf_counter(), BatchKeys(batch.plan, self._fetcher)
        parts = []
        for start, (what, since, stop, values) in chunks[:NAMED]:
            # A job replaces each value by None before it decodes it.
            first = min(start + max(sum(value is None for value in values) - 1, 0), stop - 1)
            names = ", ".join(repr(keys[at]) for at in range(first, min(stop, first + NAMED)))
            parts.append(f"{what} {names}{' and more' if stop - first > NAMED else ''} for {now - since:.0f} s")
        return ("; ".join(parts),)

    async def begin(self, batch: Batch) -> None:
        """Start to read the chunks of a batch; wait until all of them may be read."""
        if batch.grouped:
            batch.unread = 0  # the job requests the samples
        self.permit()
        if batch.grouped:
            self.engine.start(batch, self._make_together, batch)
            return
        admission, samples = self._admission, len(batch.plan.indices)
        self._choose_size(samples)
        admission.reads_queue = self._fetcher.limit_reads(admission.limits.read_concurrency)
        size = self.samples_per_read()
        self._concurrency.resize_executor()
        starts = range(0, samples, size)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: planned, %d samples in %d chunks", batch.plan.number, samples, len(starts))
        batch.unread = batch.uncounted = batch.undecoded = len(starts)
        for start in starts:
            stop = min(start + size, samples)
            if not admission.may_read_on(stop - start):
                admission.waited_for_reads = True
                await admission.until(partial(admission.may_read_on, stop - start))
            admission.reading += stop - start
            self.engine.start(batch, self.read_and_decode, batch, start, stop)

    def _choose_size(self, samples: int) -> None:
        """Choose the size of jobs for a batch of ``samples``, and how many batches are decoded at the same time."""
        limits, buffer = self._admission.limits, self._buffer
        least, most = self._fetcher.job_sizes(limits)
        if self._begun:
            self.fill_threads(most, samples, limits.prefetch_batches)
        batches = min(buffer.prefetch_batches, buffer.assembling + buffer.waiting)
        self.chunk_size: int = samples_per_job((least, most), limits.decode_threads, samples, batches)

    def samples_per_read(self) -> int:
        """Return how many samples one task reads."""
        return self.chunk_size

    # --- reading and decoding

    async def _read(self, batch: Batch, start: int, stop: int) -> ReadResult:
        """Read samples of a batch."""
        started, concurrency = time.perf_counter(), self._admission.limits.read_concurrency
        batch.under_way[start] = "reading", started, stop, ()
        self._reading += stop - start
        few_in_flight = 2 * self._reading <= concurrency
        loop_delay_s = self._loop_delay_s()
        try:
            read = await self._fetcher.read(batch.plan.indices[start:stop], batch.plan, start)
            # The chunk may have waited for others in the fetcher.
            mean_s = read.reading_s / (stop - start) or time.perf_counter() - started
            if self._tuner is not None and read.waited and not read.retries:
                self._concurrency.observe_read(self._tuner, mean_s, stop - start, read.nbytes, concurrency)
        finally:
            batch.under_way.pop(start, None)
            self._reading -= stop - start
            self._admission.reading -= stop - start
            self._admission.room.set()
        ended = time.perf_counter()
        # If the loop is late, the bytes may have been there before. That other threads hold the GIL is not the time of
        # the storage.
        seconds = max(0.0, min(mean_s, ended - started - (self._loop_delay_s() - loop_delay_s)))
        batch.counters.read_s += seconds
        batch.count_read(read)
        batch.counters.events.append(("read", "reads", started, ended, batch.plan.number, stop - start, read.nbytes))
        if read.waited:
            batch.count_reading(seconds, stop - start, few_in_flight=few_in_flight)
        if log.isEnabledFor(logging.DEBUG):
            ms = (ended - started) * 1e3
            log.debug("batch %d: read samples %d to %d in %.1f ms", batch.plan.number, start, stop - 1, ms)
        return read

    async def read_and_decode(self, batch: Batch, start: int, stop: int) -> None:
        """Read samples of a batch, wait until they may be decoded, and decode them."""
        read = await self._read(batch, start, stop)
        batch.reserved = self._budget.raise_to(batch.reserved, batch.encoded_bytes)
        batch.unread -= 1
        if not self._buffer.in_order:
            self.permit()
        # Let the planner run, create the next chunk's task, and let that start its reads: three iterations of the
        # loop. A decode thread that has work takes the GIL, and the reads would start half a millisecond later.
        idle = self._executor.running < self._executor.max_running
        for _ in range(3 if read.waited and idle else 0):
            await asyncio.sleep(0)
        if not batch.decode_permit.is_set():
            await batch.decode_permit.wait()
        decoding = self._decode_stage.decode(batch, start, read.samples)
        del read
        self._count(batch, await decoding)

    async def _make_together(self, first: Batch) -> None:
        """Make a batch and those grouped with it in one job; in another one those behind a batch with an error.

        If reads have become slow, the others are read one by one.
        """
        rest: Batch | None = first
        if not first.decode_permit.is_set():
            await first.decode_permit.wait()
        while rest is not None and not self._admission.closed:
            if not self._fetcher.reads_in_jobs:
                alone, rest = rest, self.engine.split(rest, 1) if rest.grouped else None
                await self.begin(alone)
                continue
            made: list[ChunkOutcome] = []
            batches = [rest, *rest.grouped]
            job = asyncio.wrap_future(self._executor.submit(self._decode_stage.decode_together, batches, made))
            while rest is not None and (made or not job.done()):
                await asyncio.wait([job], timeout=MADE_S)
                rest = await self._deliver_made(rest, made)
            await job

    async def _deliver_made(self, first: Batch, made: list[ChunkOutcome]) -> Batch | None:
        """Deliver as many of a group of batches as are made; returns the first of the others, if any."""
        outcomes = made[:]
        del made[: len(outcomes)]
        batches = [first, *first.grouped][: len(outcomes)]
        if not batches:
            return first
        for batch, outcome in zip(batches, outcomes, strict=True):
            self._observe(batch, outcome)
        rest = self.engine.split(first, len(batches)) if len(batches) <= len(first.grouped) else None
        if batches[-1].errors and not self._admission.closed:
            await self._decode_stage.recover(batches[-1])
        self.finished(first)
        return rest

    def _choose_group(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Choose how many batches the next job makes, by the time that one takes and its share of the memory limit."""
        seconds, cpu_s = outcome.decode_s + outcome.collate_s, outcome.decode_cpu_s + outcome.collate_cpu_s
        seconds = outcome.read_s + work_s(seconds, cpu_s, self._admission.limits.decode_threads)
        self._batch_s += (seconds - self._batch_s) * (0.2 if self._batch_s else 1.0)
        most = min(int(GROUP_S / self._batch_s), self._budget.limit_bytes // (4 * max(batch.nbytes, 1)))
        self.together: int = max(1, min(TOGETHER_MOST, 2 * self.together, most)) if self._fetcher.reads_in_jobs else 1

    def _observe(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Add a decode job to the statistics, and pass its timing to the tuner."""
        self.engine.release_taken()
        batch.count(outcome)
        if self._may_group and outcome.collate_s:
            self._choose_group(batch, outcome)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batch %d: decoded a chunk in %.1f ms", batch.plan.number, outcome.decode_s * 1e3)
        if outcome.job is not None and self._tuner is not None:
            self._concurrency.observe_job(self._tuner, outcome.job, saturated=not self._buffer.waiting)
            if (limit := self._tuner.decoding.gil) is not None:
                batch.counters.gil_us = limit.held_s * 1e6

    def _count(self, batch: Batch, outcome: ChunkOutcome) -> None:
        """Count a decoded chunk; after a batch's last chunk, recover from its errors or complete it."""
        self._observe(batch, outcome)
        batch.uncounted -= 1
        if batch.uncounted == 0:
            if batch.errors and not self._admission.closed:
                self.engine.start(batch, self._recover, batch)
            else:
                self.finished(batch)

    async def _recover(self, batch: Batch) -> None:
        await self._decode_stage.recover(batch)
        self.finished(batch)

    def finished(self, batch: Batch) -> None:
        """All chunks of a batch are decoded, and its errors are recovered from or set."""
        self.engine.finished(batch)
