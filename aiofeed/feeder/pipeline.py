"""The threads and memory that stream a feeder's batches; created here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.errors import add_note, as_exception
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import Members
from aiofeed.engine.admission import MemoryBudget
from aiofeed.engine.chunks import ChunkAssembly
from aiofeed.engine.engine import Assembly, Engine
from aiofeed.engine.fetchers import builder_factory, new_fetcher
from aiofeed.engine.samples import SampleAssembly
from aiofeed.engine.tuning.gil import GilLimit, gil_message
from aiofeed.engine.tuning.reads import READS_MOST
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.feeder.arguments import FeederConfig
from aiofeed.feeder.iterator import LoopProducer
from aiofeed.runtime.buffers import HostBufferPool, PinnedBufferPool
from aiofeed.runtime.cancellation import clear_cancellation, ended_by, is_cancelled
from aiofeed.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.runtime.queue import BatchQueue, FeedFailure, drop_batches
from aiofeed.runtime.tensors import as_tensors, unchanged
from aiofeed.sampling.epochs import EpochStream
from aiofeed.sampling.samples import SampleSchedule
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    from aiofeed.engine.resident.pipeline import ResidentPipeline
    from aiofeed.processes.workers.pool import WorkerPool
    from aiofeed.reports.bottleneck import FeedMeasurements

log: logging.Logger = logging.getLogger("aiofeed.feeder")


class StreamingPipeline(LoopProducer):
    """The threads that read, decode and collate, and their memory. One epoch after another runs on them.

    The source is opened after the previous pipeline of the feeder, ``after``, has ended.
    """

    def __init__(self, config: FeederConfig, after: StreamingPipeline | None = None) -> None:
        self._config = config
        limits = config.limits
        self._processes = _new_workers(config)
        if after is not None and after.inherited:
            after = None
        loop_thread = EventLoopThread(
            # More reads than by default are tried while they pay.
            read_threads=min(config.user_limits.read_concurrency or MOST_READ_THREADS, MOST_READ_THREADS),
            decode_threads=limits.decode_threads,
            after=None if after is None else after.loop_thread,
        )
        super().__init__(loop_thread, BatchQueue())
        if config.cache is not None and not hasattr(config.backend, "backends"):
            config.cache.attach(config.backend)
        assert not isinstance(config.source, Tensors)
        self._fetcher = new_fetcher(
            config.source,
            config.decode,
            config.collate_fn,
            length=config.length,
            policy=config.policy,
            cache=config.cache,
            lookahead_bytes=limits.lookahead_bytes,
        )
        loop_thread.decode_pool.host = self._fetcher.thread
        self._new_builder = builder_factory(self._fetcher, config.collate_fn, staged=config.backend is not None)
        # Go on from the tuning results of the previous pipeline. Worker processes are new and tune themselves. A fork
        # may have copied the parent's tuner in the middle of a step.
        self.tuner: Tuner = _new_tuner(config) if after is None or config.engines else after.tuner
        # Two more than batches that may wait or be decoded: a loop still has its last batch when it takes the next one.
        keep = limits.most_batches + 2 + max(config.engines - 1, 0)
        self._memory: HostBufferPool | PinnedBufferPool
        if config.backend is None:
            self._memory = HostBufferPool(keep, limits.memory_bytes)
        else:
            self._memory = PinnedBufferPool(config.backend.pin, keep * 4)
        self._opened = False
        self._budget = MemoryBudget(limits.memory_bytes, _bytes_per_sample(config))
        queue = self.queue
        # The feeder may keep this queue for long after `close` or `break`; drop the batches that were read ahead.
        loop_thread.at_exit(partial(drop_batches, queue))
        loop_thread.at_death(lambda error: queue.put(FeedFailure(error)))
        loop_thread.at_exit(self._memory.close)
        self._engine: Engine | None = None

    def feed(self, stream: EpochStream) -> None:
        """Start an engine for the epochs of a stream; call it after ``start``."""
        config = self._config
        limits = config.limits
        if self._processes is not None:
            limits = replace(limits, prefetch_batches=limits.prefetch_batches + self._processes.more_batches)
        self._engine = Engine(
            stream,
            self._assembly_of(stream),
            batch_size=config.batch_size,
            queue=self.queue,
            limits=limits,
            budget=self._budget,
            in_order=bool(config.in_order),
            policy=config.policy,
            length=config.length,
        )
        self.loop_thread.start(partial(self._run, self._engine))

    def _assembly_of(self, stream: EpochStream) -> Callable[[Engine], Assembly]:
        config = self._config
        options: dict[str, Any] = {
            "fetcher": self._fetcher,
            "wrap": as_tensors if config.backend is None else unchanged,
            "memory": self._memory,
            "executor": self.loop_thread.decode_pool,
            "tuner": self.tuner,
        }
        if self._processes is not None:
            from aiofeed.processes.workers.remote_assembly import RemoteAssembly

            return partial(RemoteAssembly, pool=self._processes, **options)
        options |= {
            "new_builder": self._new_builder,
            "policy": config.policy,
            "on_gil_limit": partial(_warn_of_gil, config),
            "late_s": self.loop_thread.late_s,
        }
        if isinstance(stream.schedule, SampleSchedule):
            return partial(SampleAssembly, schedule=stream.schedule, batch_size=config.batch_size, **options)
        # A limit on finished batches that the user has chosen counts batches, not jobs.
        may_group = self._fetcher.reads_in_jobs and self._fetcher.limit_s is None and not config.limits.prefetch_given
        return partial(ChunkAssembly, may_group=may_group, **options)

    async def _run(self, engine: Engine) -> None:
        loop_thread = self.loop_thread
        with ended_by(lambda: loop_thread.stopping):
            if not await self._open():
                return
        await engine.run()

    async def _open(self) -> bool:
        """Open the source and let a resident cache allocate its memory; return whether both succeeded."""
        opened = False
        try:
            await self._open_source()
            opened = True
            await clear_cancellation()  # open() may have suppressed our cancellation, or cancelled the task itself
            await self._fetcher.prepare(self.loop_thread.decode_pool)
        except BaseException as error:  # from the user's coroutine or the device; the consumer raises it
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if not opened and self._processes is None:
                add_note(error, f"in {type(self._config.source).__name__}.open()")
            self.queue.put(FeedFailure(as_exception(error)))
            return False
        return True

    async def _open_source(self) -> None:
        if self._opened:
            return
        if self._processes is not None:
            self._opened = True
            self.loop_thread.at_stop(self._processes.aclose)
            await self._processes.start()  # the processes open the source
            return
        members = Members.of(self._config.source)
        if members.open is not None:
            await members.open()
        if members.aclose is not None:
            self.loop_thread.at_stop(members.aclose)
        self._opened = True

    def waiting_for(self) -> tuple[Any, ...]:
        """See ``Producer.waiting_for``."""
        if self._engine is None or not self._opened:
            return (f"for {type(self._config.source).__name__}.open()",)
        if self._processes is not None and not self._processes.started:
            return ("for the workers to start: each imports the script and opens the source",)
        return self._engine.waiting_for()

    @property
    def chunk_size(self) -> int:
        """Samples per decode job, as last chosen."""
        return self._engine.assembly.chunk_size if self._engine is not None else 0

    @property
    def prefetch_batches(self) -> int:
        """Batches that may be decoded at the same time, or wait, as last chosen."""
        return (
            self._engine.buffer.prefetch_batches if self._engine is not None else self._config.limits.prefetch_batches
        )

    @property
    def bytes_per_sample(self) -> float:
        """Estimated encoded and decoded bytes of a sample; 0 if unknown."""
        return self._budget.bytes_per_sample

    @property
    def inherited(self) -> bool:
        """Whether its threads belong to a parent process."""
        return self.loop_thread.inherited

    def reusable(self) -> bool:
        """Return whether it can feed another stream."""
        return not self.loop_thread.stopping and not self.loop_thread.inherited


def measurements(
    config: FeederConfig,
    stats: EpochStats,
    pipeline: StreamingPipeline | ResidentPipeline | None,
    *,
    first_epoch: bool,
    allows: Callable[..., bool],
) -> FeedMeasurements:
    """Return the counters and settings that ``explain`` needs.

    Args:
        first_epoch: Whether no epoch before has started the threads and filled a cache.
        allows: As of ``FeedMeasurements``.
    """
    from aiofeed.reports.bottleneck import FeedMeasurements

    limits, user_limits, source = config.limits, config.user_limits, config.source
    streaming = pipeline if isinstance(pipeline, StreamingPipeline) else None
    tuner = None if streaming is None else streaming.tuner
    core_wait = 0.0
    if streaming is not None and not config.engines and (busy_s := streaming.loop_thread.decode_pool.busy_s):
        core_wait = streaming.loop_thread.decode_pool.core_wait_s() / busy_s
    return FeedMeasurements.of_run(
        stats,
        config.decode,
        threads=limits.decode_threads if tuner is None else tuner.max_running,
        reads=limits.read_concurrency if tuner is None else tuner.reading.concurrency,
        prefetch_batches=limits.prefetch_batches if streaming is None else streaming.prefetch_batches,
        prefetch_given=limits.prefetch_given,
        chunk_size=0 if pipeline is None else pipeline.chunk_size,
        memory_bytes=limits.memory_bytes,
        sample_bytes=_bytes_per_sample(config) if streaming is None else streaming.bytes_per_sample,
        length=config.length,
        reads_given=user_limits.read_concurrency is not None,
        reads_saturated=tuner is not None and tuner.reading.saturated,
        # Files on a file system need a thread for each read.
        reads_most=MOST_READ_THREADS if Members.of(source).read_now else READS_MOST,
        dataset_threads=source.threads if isinstance(source, FromDataset) else None,
        processes=config.engines,
        in_order=config.in_order if config.in_order is not True or allows(in_order=False) else "fixed",
        core_wait=core_wait,
        alone_jobs=0 if streaming is None else streaming.loop_thread.decode_pool.alone_jobs,
        alone_sample_s=0.0 if streaming is None else streaming.loop_thread.decode_pool.alone_sample_s,
        resident=pipeline is not None and streaming is None,
        threads_tuned=tuner is not None and not tuner.decoding.given,
        threads_saturated=tuner is not None and tuner.decoding.saturated,
        allows=allows,
        cached=config.cache is not None,
        first_epoch=first_epoch,
        collate_fn=config.collate_fn is not None,
        transform=config.transform is not None and config.backend is None,
        device=config.backend is not None,
        lookahead_bytes=limits.lookahead_bytes if getattr(source, "looks_ahead", False) and not config.engines else 0,
    )


def _new_workers(config: FeederConfig) -> WorkerPool[Any] | None:
    if not config.engines:
        return None
    from aiofeed.processes.workers.pool import ProcessPool
    from aiofeed.processes.workers.spawn import WorkerConfig, check_not_starting

    check_not_starting()
    limits, source = config.limits, config.source
    # Each process has its own copy of a Dataset.
    copies = config.engines if isinstance(source, FromDataset) else 1
    worker_config = WorkerConfig(
        source=source,
        decode=config.decode,
        collate_fn=config.collate_fn,
        length=config.length,
        engines=config.engines,
        read_concurrency=limits.read_concurrency * copies,
        decode_threads=limits.decode_threads * copies,
        keep=limits.most_batches + 1,
        in_order=bool(config.in_order),
        policy=config.policy,
        cache=config.cache,
        reads_given=config.user_limits.read_concurrency is not None,
        threads_given=config.user_limits.decode_threads is not None,
    )
    if config.ray is not None:
        from aiofeed.processes.actors.actor_pool import ActorPool

        return ActorPool(worker_config, config.ray)
    # All devices of one kind can copy from memory that one of them has page-locked.
    [backend, *_] = getattr(config.backend, "backends", (config.backend,))
    return ProcessPool(worker_config, backend)


def _new_tuner(config: FeederConfig) -> Tuner:
    """Return the tuner of the limits that the user left open. Worker processes choose threads and reads themselves."""
    limits = config.limits
    return Tuner(
        decode_threads=limits.decode_threads,
        # FromDataset(threads=) fixes the number of threads.
        threads_given=(
            config.user_limits.decode_threads is not None
            or isinstance(config.source, FromDataset)
            or bool(config.engines)
        ),
        read_concurrency=limits.read_concurrency,
        reads_given=config.user_limits.read_concurrency is not None,
    )


def _warn_of_gil(config: FeederConfig, limit: GilLimit) -> None:
    from aiofeed.decoders.native_jpeg import native_decoder

    backend = getattr(config.decode, "backend", None)
    without = backend == "auto" and find_spec("simplejpeg") is None and native_decoder() is None
    log.warning(gil_message(limit, cores=config.limits.decode_threads, turbo=without or backend == "pillow"))


def _bytes_per_sample(config: FeederConfig) -> float:
    """Return the bytes of a decoded sample if the decoder declares its row; otherwise 0."""
    row = getattr(config.decode, "row", None)
    if row is None:
        return 0.0
    return float(math.prod(row.shape) * np.dtype(row.dtype).itemsize)
