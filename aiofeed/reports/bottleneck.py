"""Finds the stage that limits training, from the counters of an epoch. Pure functions.

Each stage can process at most so many samples per second: threads, or reads in flight, divided by the time of one. The
stage with the least is the limit if samples arrive at about that rate. If they arrive more slowly although no stage is
busy, stages wait for each other: for memory, or for a slow sample.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import Any

from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.runtime import machine
from aiofeed.reports.explanation import StageTimes

# Fewer batches do not show where the time goes.
LEAST_BATCHES = 3
# The step is the limit if training waits for less than this share of the time: nothing could gain more.
KEEPS_UP = 0.05
# If loading can deliver so many times what the step takes, waits of up to this share are those for single late batches.
AHEAD = 2.0
LATE = 0.25
# A stage that reaches this part of its rate is busy.
BUSY = 0.75
# A predicted rate that is lower than this part of the measured one is wrong, or batches were loaded before.
CONSISTENT = 0.9
# Planning waits for memory, or for the iterable of a stream, for this part of the time.
WAITING = 0.3
# The time of a job goes to cores, to waiting for a core or to other waits, whichever has this part of it.
LARGE_PART = 0.3
# The variance of the times of decode jobs or reads, divided by the square of the mean. It is 2 if one in ten takes ten
# times as long.
UNEVEN = 0.5
# Reads take this many times as long if many are in flight: the bandwidth of the storage is used up.
CONGESTED = 1.7
# Faster reads come from the page cache.
SLOW_READ_S = 0.001
# Mean wait for the GIL in a probe: microseconds if it is free, a part of the switch interval of 5 ms if it is not.
GIL_WAIT_S = 0.0005
# All threads together do less than this part of what they would do if none waited for the others.
APART = 0.7
# A batch that takes less, most of it outside of all stages, has the cost of handing it on from thread to thread.
BATCH_COST_S = 0.002
# Samples that take less have mostly work of Python: more threads wait for the GIL.
TINY_S = 0.0001
# The process uses its cores up.
OWN_CORES = 0.85
# Threads that wait for cores for this part of the time keep the GIL meanwhile: then it is not the GIL that limits them.
STOLEN = 0.5

STEP, HAND_OVER, COPY, COLLATE, DECODE, READ = "step", "hand-over", "copy", "collate", "decode", "read"
FIRST, SAMPLER = "first batch", "sampler"


def all_allowed(**option: object) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, kw_only=True)
class FeedMeasurements:
    """The counters of an epoch, and the settings of its feeder.

    Args:
        stats: The counters.
        threads: Decode threads in use, of all worker processes together.
        cores: Cores available to this rank.
        reads: Samples that may be read at a time.
        prefetch_batches: Finished batches that may wait.
        prefetch_given: Whether they are a fixed number; otherwise as many as the threads need.
        chunk_size: Samples per decode job; 0 if unknown.
        memory_bytes: The limit of bytes in flight.
        sample_bytes: Encoded and decoded bytes of a sample in flight; 0 if unknown.
        length: Samples in the source.
        free_memory: Bytes of free memory for this rank.
        reads_given: Whether the user fixed the number of reads.
        reads_saturated: Whether more reads at a time were tried and brought nothing.
        reads_most: The most reads at a time that the source can use.
        dataset_threads: ``threads=`` of a ``FromDataset``; ``None`` for other sources.
        processes: Worker processes; 0 for threads.
        in_order: As of ``Feeder``; "fixed": ``True``, and no other is possible.
        measured_alone: Decode jobs that ran alone.
        alone_sample_s: Their seconds per sample, without those in which they waited for a core.
        core_wait: The share of their time in which decode threads wait for a core.
        resident: Whether the data are in memory, so that the training thread makes the batches.
        threads_tuned: Whether more threads were tried, or would be, if they decoded more.
        threads_saturated: Whether more threads were tried and decoded no more.
        allows: Whether ``Feeder`` would accept another ``in_order``, ``engine``, ``shuffle`` or ``cache``; "disk": a
            ``DiskCache``. Whether ``DataLoader`` would accept ``threads``.
        cached: Whether there is a cache.
        first_epoch: Whether threads started in this epoch.
        cold_cache: Whether a cache is being filled in this epoch.
        collate_fn, transform: Whether the user passed them.
        device: Whether batches are copied to a device.
        step_copies: Whether an accelerator is in use, but batches are not copied to it by the feeder.
        decoders: Faster ways to decode the samples, each with its predicted factor.
        lookahead_bytes: As of ``Limits``; 0 if samples are not read ahead of their batches.
        kind: "feeder", "loader", "prefetch" or "attached". The others have no samples to read, and what they have is
            called decoding here: what the dataset does for a sample, the iterable for a batch, the server for a sample.
        inline: Whether a ``DataLoader`` makes batches in the training thread.
        persistent: Whether its workers stay for the next epoch.
    """

    stats: EpochStats
    threads: int
    cores: int
    reads: int
    prefetch_batches: int = 2
    prefetch_given: bool = True
    chunk_size: int = 0
    memory_bytes: int = 0
    sample_bytes: float = 0.0
    length: int = 0
    free_memory: int = 0
    reads_given: bool = False
    reads_saturated: bool = False
    reads_most: int = 512
    dataset_threads: int | None = None
    processes: int = 0
    in_order: bool | str = True
    core_wait: float = 0.0
    measured_alone: int = 0
    alone_sample_s: float = 0.0
    resident: bool = False
    threads_tuned: bool = False
    threads_saturated: bool = False
    allows: Callable[..., bool] = all_allowed
    cached: bool = False
    first_epoch: bool = False
    cold_cache: bool = False
    collate_fn: bool = False
    transform: bool = False
    device: bool = False
    step_copies: bool = False
    decoders: tuple[tuple[str, float | None], ...] = ()
    lookahead_bytes: int = 0
    kind: str = "feeder"
    inline: bool = False
    persistent: bool = True

    @classmethod
    def of_run(cls, stats: EpochStats, decode: object, **settings: Any) -> FeedMeasurements:
        """Return the measurements of a run: add the facts of this process and machine to the settings of its feeder."""
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        measured = cls(
            stats=replace(stats, process_cpu_s=stats.process_cpu_s or time.process_time() - stats.cpu_started_s),
            cores=machine.rank_cpus(),
            free_memory=machine.rank_memory(),
            decoders=tuple(_faster_decoders(decode)) if isinstance(getattr(decode, "backend", None), str) else (),
            **settings,
        )
        return replace(
            measured,
            cold_cache=measured.cached and measured.first_epoch and 2 * stats.samples_cached < stats.samples_decoded,
            step_copies=not measured.device and cuda is not None and cuda.is_available() and cuda.is_initialized(),
        )


def _faster_decoders(decode: Any) -> Iterator[tuple[str, float | None]]:
    """Yield faster ways to decode with a ``DecodeImage``, each with the factor that is known."""
    from PIL import __version__ as pillow

    from aiofeed.kernel.decoders.native_jpeg import INSTALL, load_native_decoder

    if decode.backend in ("auto", "native") and decode.scaled and load_native_decoder()[1] is None:
        # Pillow-SIMD takes 1.5 times as long for 1024x768 to 224x224, see docs/images.md.
        yield f"build the native JPEG decoder: {INSTALL}", 1.5
    elif decode.backend in ("pillow", "turbo"):
        yield 'DecodeImage(backend="auto") chooses the fastest decoder', None
    if not decode.scaled:
        yield "DecodeImage(scaled=True) decodes large JPEGs at a smaller scale", None
    if ".post" not in pillow:
        yield "install Pillow-SIMD in place of Pillow: `python -m aiofeed doctor` shows the command", None


class Bottleneck:
    """The limit of an epoch.

    Attributes:
        rate: Samples per second, without the first batch; with it, if later ones were loaded while it was awaited.
        waiting: Share of the time in which training waits for batches, in the same time.
        start_s: Seconds of waiting for the first batch that each epoch takes.
        step_rate: Samples per second of the step alone.
        stages: The stages that took time.
        stage, resource: The limit.
        busy: Whether the stage works all the time.
        core_wait: Share of the time of decode jobs in which they wait for a core, as far as they do not compute.
        waits: Whether the threads mostly wait in decode jobs, while they have a core. More of them help only if the
            waits are not for each other, for example for a lock.
    """

    def __init__(self, measured: FeedMeasurements) -> None:
        self.measured = measured
        self.stats: EpochStats = (stats := measured.stats)
        # In the first epoch, the first batch is awaited while threads start and caches are empty.
        self.start_s: float = stats.order_s if measured.first_epoch else stats.first_stall_s
        self.wall_s: float = max(stats.wall_s - stats.first_batch_s, 1e-9)
        samples = stats.samples * (stats.batches - 1) / stats.batches
        stall_s = min(max(stats.stall_s - stats.first_stall_s, 0.0), self.wall_s)
        self.rate: float = samples / self.wall_s
        self.step_rate: float = samples / max(self.wall_s - stall_s, 1e-9)
        self.decoded: int = stats.samples_decoded or stats.samples
        self.pool_s: float = (stats.decode_s + stats.collate_s + self._inline_read_s) / self.decoded
        cpu_s = stats.decode_cpu_s + stats.collate_cpu_s + self._inline_read_s
        if measured.kind == "loader":  # a worker makes all of the first batch
            self.start_s = max(self.start_s - self.pool_s * stats.samples / stats.batches, 0.0)
        # Samples per second that the processors could decode.
        self.cores_rate: float = measured.cores * self.decoded / max(cpu_s, 1e-9)
        at_work = min(cpu_s / max(self.pool_s * self.decoded, 1e-9), 1.0)
        self.core_wait: float = min(measured.core_wait, 1.0 - at_work)
        self.waits: bool = 2 * at_work < 1.0 - self.core_wait
        self.stages: tuple[StageTimes, ...] = tuple(self._stages())
        self.possible: dict[str, float] = {stage.name: stage.samples_per_s or inf for stage in self.stages}
        # Batches that come faster than they can be loaded were loaded while the first one was awaited.
        loaded = min(self.possible.values()) * self.wall_s
        ahead = (measured.prefetch_batches + 1) * stats.samples / stats.batches
        if samples - ahead <= loaded < CONSISTENT * samples:
            self.wall_s, stall_s = max(stats.wall_s, 1e-9), stats.stall_s
            self.rate = stats.samples / self.wall_s
        self.waiting: float = stall_s / self.wall_s
        self.stage: str
        self.resource: str
        self.stage, self.resource = self._limit(stall_s)
        self.busy: bool = self.rate >= BUSY * self.possible.get(self.stage, 0.0)

    @property
    def together(self) -> float:
        """How many times as much the decode jobs do side by side as one alone, both with cores; inf if unknown."""
        stats, measured = self.stats, self.measured
        if not measured.measured_alone or not stats.jobs_s:
            return inf
        jobs_s = max((1.0 - self.core_wait) * stats.jobs_s, 1e-9)
        return self.lanes() * measured.alone_sample_s * stats.jobs_samples / jobs_s

    @property
    def _wait_for_each_other(self) -> bool:
        """Whether the decode jobs do little more side by side than one alone, whichever of them have run alone."""
        stats = self.stats
        variance = stats.jobs * stats.jobs_square_s / max(stats.jobs_s, 1e-9) ** 2 - 1
        error = sqrt(max(variance, 0.0) / max(self.measured.measured_alone, 1))
        return self.waits and (1 + error) * self.together < APART * self.lanes()

    @property
    def _inline_read_s(self) -> float:
        """Time of reads within decode jobs, if most samples are read there."""
        stats = self.stats
        return stats.read_s if 2 * stats.samples_read < stats.samples_decoded - stats.samples_cached else 0.0

    def lanes(self, threads: int | None = None, prefetch_batches: int | None = None) -> int:
        """Return how many decode jobs can run at the same time: at most those of the batches that may be decoded."""
        measured = self.measured
        threads = threads or measured.threads
        if measured.processes or measured.in_order == "samples" or not measured.prefetch_given:
            return threads
        batch = ceil(self.stats.samples / self.stats.batches)
        jobs = ceil(batch / (measured.chunk_size or batch))
        return min(threads, (prefetch_batches or measured.prefetch_batches) * jobs)

    def reads_rate(self, reads: int) -> float:
        """Return the samples per second with so many reads at a time, if each takes as long as now."""
        stats = self.stats
        if not stats.samples_read or not stats.reading_s:
            return inf
        chunk = min(self.measured.chunk_size or 1, reads)  # a chunk is read when all of it may be
        # Cached samples, and those that decode jobs read, need no read.
        samples = max(stats.samples_read, self.decoded)
        return max(reads // chunk, 1) * chunk * samples / stats.reading_s

    def with_stages(self, **changed: float) -> float:
        """Return the samples per second if these stages could process so many; "pool": all decode jobs."""
        rates = {name: rate for name, rate in self.possible.items() if name not in changed}
        if "pool" in changed:
            for name in (DECODE, COLLATE, READ) if self._inline_read_s else (DECODE, COLLATE):
                rates.pop(name, None)
        return min([self.step_rate, *rates.values(), *changed.values()])

    def _stages(self) -> Iterator[StageTimes]:
        stats, measured, decoded = self.stats, self.measured, self.decoded
        lanes = self.lanes()
        if stats.order_s > 0.01 * stats.wall_s:
            yield StageTimes(SAMPLER, stats.order_s / stats.samples, None, None, "the order")
        if stats.sampler_s > 0.01 * stats.wall_s:
            seconds = stats.sampler_s / stats.samples
            yield StageTimes(SAMPLER, seconds, None, 1 / (seconds + 1 / self.step_rate), "training thread")
        pool_rate = lanes / self.pool_s if self.pool_s else None
        if measured.inline and self.pool_s:
            pool_rate = 1 / (self.pool_s + 1 / self.step_rate)
        if seconds := self._inline_read_s / decoded:
            yield StageTimes(READ, seconds, seconds, pool_rate, self.jobs_run_into(seconds, seconds))
        elif stats.samples_read:
            seconds = stats.reading_s / stats.samples_read
            yield StageTimes(READ, seconds, None, self.reads_rate(measured.reads), self.storage())
        if stats.decode_s:
            seconds, cpu_s = stats.decode_s / decoded, stats.decode_cpu_s / decoded
            yield StageTimes(DECODE, seconds, cpu_s, pool_rate, self.jobs_run_into(seconds, cpu_s))
        if stats.collate_s:
            seconds, cpu_s = stats.collate_s / decoded, stats.collate_cpu_s / decoded
            if measured.resident:
                yield StageTimes(COLLATE, seconds, None, 1 / (seconds + 1 / self.step_rate), "training thread")
            elif stats.collate_s > 0.01 * stats.decode_s:
                # Each batch is put together by one thread.
                batches = lanes if measured.processes else min(measured.threads, measured.prefetch_batches)
                rate = min(pool_rate or inf, batches / seconds)
                yield StageTimes(COLLATE, seconds, cpu_s, rate, self.jobs_run_into(seconds, cpu_s))
        if seconds := (stats.copy_s + stats.copy_wait_s) / stats.samples:
            yield StageTimes(COPY, seconds, None, 1 / seconds, "PCIe" if measured.device else "memory bandwidth")
        if seconds := stats.hand_over_s / stats.samples:
            yield StageTimes(HAND_OVER, seconds, None, 1 / (seconds + 1 / self.step_rate), "training thread")
        yield StageTimes(STEP, 1 / self.step_rate, None, self.step_rate, "the step itself")

    def storage(self) -> str:
        """Return whether reads wait for the latency or for the bandwidth of the storage."""
        stats = self.stats
        together, apart = stats.samples_read - stats.samples_read_apart, stats.samples_read_apart
        congested = False
        if together and apart and stats.reading_s > SLOW_READ_S * stats.samples_read:
            each_s = (stats.reading_s - stats.reading_apart_s) / together
            congested = each_s > CONGESTED * stats.reading_apart_s / apart
        return "storage bandwidth" if congested or self.measured.reads_saturated else "storage latency"

    def jobs_run_into(self, seconds: float, cpu_s: float) -> str:
        """Return what decode jobs spend their time on, given the seconds and processor seconds of a sample."""
        stats, measured = self.stats, self.measured
        if measured.inline or measured.kind == "attached":
            return "training thread" if measured.inline else "the server"
        if measured.dataset_threads == 1 and not measured.processes:
            return "one thread"
        at_work = min(cpu_s / seconds, 1.0)
        core_wait = min(measured.core_wait, 1.0 - at_work)
        others = stats.process_cpu_s < OWN_CORES * measured.cores * stats.wall_s
        probe_s = stats.gil_probe_s / stats.gil_probes if stats.gil_probes else 0.0
        if measured.threads > 1 and (stats.gil_us or probe_s > GIL_WAIT_S) and not (others and core_wait > STOLEN):
            return "GIL"
        if self._wait_for_each_other:
            return "a lock"
        if others and core_wait > LARGE_PART:
            return "other processes"
        if 1.0 - at_work - core_wait > max(at_work, LARGE_PART):
            return "blocking calls"
        if measured.threads >= measured.cores:
            return "cores"
        if not measured.threads_tuned:
            return "threads"
        return "GIL" if seconds < TINY_S and machine.has_gil() else "memory bandwidth"

    @property
    def is_single(self) -> bool:
        """Whether batches have one sample."""
        return self.stats.samples <= self.stats.batches and self.measured.kind != "prefetch"

    def is_uneven(self, stage: str) -> bool:
        """Return whether the times of decode jobs or of reads vary so much that others wait for the slow ones."""
        stats = self.stats
        if stage == READ:
            slow = stats.reading_s > SLOW_READ_S * stats.samples_read
            return slow and stats.samples_read * stats.reading_square_s > (1.0 + UNEVEN) * stats.reading_s**2
        return stage == DECODE and stats.jobs * stats.jobs_square_s > (1.0 + UNEVEN) * stats.jobs_s**2

    def _limit(self, stall_s: float) -> tuple[str, str]:
        stats, measured = self.stats, self.measured
        by_name = {stage.name: stage for stage in self.stages}
        if self.start_s > max(stall_s, LATE * stats.wall_s):
            return (SAMPLER, "the order") if 2 * stats.order_s > self.start_s else (FIRST, "start-up")
        if stats.late_s > max(stall_s, WAITING * stats.wall_s):
            return STEP, "the event loop"
        if self.waiting < KEEPS_UP:
            return STEP, by_name[STEP].resource
        if 2 * stats.hand_over_s > stall_s and not measured.resident:
            return HAND_OVER, by_name[HAND_OVER].resource
        loading = [by_name[name] for name in (SAMPLER, READ, DECODE, COLLATE, COPY) if name in by_name]
        if not loading:
            return HAND_OVER, by_name[HAND_OVER].resource
        # Of stages that share their threads, the longer one is named.
        lowest = min(loading, key=lambda stage: (stage.samples_per_s or inf, -stage.time_s))
        costly = self.is_single and self.pool_s < 1.0 / self.rate < BATCH_COST_S
        if self.waiting < LATE and (lowest.samples_per_s or inf) > AHEAD * self.step_rate:
            return (HAND_OVER, "batch_size") if costly else (STEP, by_name[STEP].resource)
        if measured.cold_cache and lowest.name in (READ, DECODE):
            return lowest.name, "cold cache"
        if self.rate < BUSY * (lowest.samples_per_s or inf):
            if stats.plan_s > WAITING * stats.wall_s:
                return READ, "the iterable"
            if costly:
                return HAND_OVER, "batch_size"
            if stats.memory_wait_s > WAITING * stats.wall_s:
                return lowest.name, "memory_bytes"
            alone = lowest.resource not in ("GIL", "other processes")
            if alone and measured.in_order != "samples" and self.is_uneven(lowest.name):
                return lowest.name, "uneven samples"
        together = lowest.resource in ("GIL", "a lock")
        if lowest.name in (DECODE, COLLATE) and self.lanes() < measured.threads and not together:
            return lowest.name, "prefetch_batches"
        return lowest.name, lowest.resource
