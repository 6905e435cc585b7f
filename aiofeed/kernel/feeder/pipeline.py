"""The threads and memory that stream a feeder's batches; created here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.errors import add_note, as_exception
from aiofeed.kernel.core.faces import BuildsBatches, bind_decoder
from aiofeed.kernel.engine.admission import MemoryBudget, bytes_per_sample
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.engine import Assembly, Engine
from aiofeed.kernel.engine.fetchers import builder_factory, new_fetcher
from aiofeed.kernel.engine.tuning.gil import GilLimit, gil_message
from aiofeed.kernel.engine.tuning.tuner import Tuner
from aiofeed.kernel.feeder.arguments import FeederConfig
from aiofeed.kernel.feeder.iterator import LoopProducer, Producer
from aiofeed.kernel.runtime.buffers import HostBufferPool, PinnedBufferPool
from aiofeed.kernel.runtime.cancellation import clear_cancellation, ended_by, is_cancelled
from aiofeed.kernel.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.kernel.runtime.queue import BatchQueue, FeedFailure, drop_batches
from aiofeed.kernel.runtime.tensors import as_tensors, unchanged
from aiofeed.kernel.sampling.epochs import EpochStream

log: logging.Logger = logging.getLogger("aiofeed.feeder")


class BatchPipeline(Producer, Protocol):
    """Produces the batches of one epoch after another: a ``StreamingPipeline``, or one of data in memory.

    Attributes:
        streams: Whether threads read and decode the samples.
        tuner: Tunes the threads; ``None`` if there are none.
    """

    streams: bool
    tuner: Any

    @property
    def chunk_size(self) -> int:
        """Samples per decode job, as last chosen."""

    @property
    def inherited(self) -> bool:
        """Whether it belongs to a parent process."""

    def reusable(self) -> bool:
        """Return whether it can feed another stream."""

    def feed(self, stream: EpochStream) -> None:
        """Produce the batches of a stream; call it after ``start``."""


class StreamingPipeline(LoopProducer):
    """The threads that read, decode and collate, and their memory. One epoch after another runs on them.

    The source is opened after the previous pipeline of the feeder, ``after``, has ended.
    """

    streams = True

    def __init__(self, config: FeederConfig, after: StreamingPipeline | None = None) -> None:
        self._config = config
        limits = config.limits
        # The workers, and what gets batches of them.
        self._pool: Any = None
        self._remote_assembly: Callable[..., Assembly] | None = None
        if config.engines:
            self._pool, self._remote_assembly = load_addon("open_workers", f"engine={config.engine!r}")(config)
        if after is not None and after.inherited:
            after = None
        loop_thread = EventLoopThread(
            # More reads than by default are tried while they pay.
            read_threads=min(config.user_limits.read_concurrency or MOST_READ_THREADS, MOST_READ_THREADS),
            decode_threads=limits.decode_threads,
            after=None if after is None else after.loop_thread,
        )
        super().__init__(loop_thread, BatchQueue())
        if config.cache is not None and not (config.backend is not None and config.backend.splits):
            config.cache.attach(config.backend)
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
        self._budget = MemoryBudget(limits.memory_bytes, bytes_per_sample(config.decode))
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
        if self._pool is not None:
            limits = replace(limits, prefetch_batches=limits.prefetch_batches + self._pool.more_batches)
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
        if self._remote_assembly is not None:
            return partial(self._remote_assembly, **options)
        if config.collate_fn is not None and not isinstance(config.collate_fn, BuildsBatches):
            options["wrap"] = unchanged  # the user's function makes no HostTensor; with a device, the copier takes them
        options |= {
            "new_builder": self._new_builder,
            "policy": config.policy,
            "on_gil_limit": partial(_warn_of_gil, config),
            "loop_delay_s": self.loop_thread.loop_delay_s,
        }
        if config.in_order == "samples":
            kind = load_addon("SampleAssembly", 'in_order="samples"')
            return partial(kind, schedule=stream.schedule, batch_size=config.batch_size, **options)
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
            if not opened and self._pool is None:
                add_note(error, f"in {type(self._config.source.given).__name__}.open()")
            self.queue.put(FeedFailure(as_exception(error)))
            return False
        return True

    async def _open_source(self) -> None:
        if self._opened:
            return
        if self._pool is not None:
            self._opened = True
            self.loop_thread.at_stop(self._pool.aclose)
            await self._pool.start()  # the processes open the source
            return
        await self._config.source.open()
        self.loop_thread.at_stop(self._config.source.aclose)
        self._opened = True

    def waiting_for(self) -> tuple[Any, ...]:
        """See ``Producer.waiting_for``."""
        if self._engine is None or not self._opened:
            return (f"for {type(self._config.source.given).__name__}.open()",)
        if self._pool is not None and not self._pool.started:
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


def _new_tuner(config: FeederConfig) -> Tuner:
    """Return the tuner of the limits that the user left open. Worker processes choose threads and reads themselves."""
    limits = config.limits
    return Tuner(
        decode_threads=limits.decode_threads,
        # FromDataset(threads=) fixes the number of threads.
        threads_given=(
            config.user_limits.decode_threads is not None or config.source.threads > 0 or bool(config.engines)
        ),
        read_concurrency=limits.read_concurrency,
        reads_given=config.user_limits.read_concurrency is not None,
    )


def _warn_of_gil(config: FeederConfig, limit: GilLimit) -> None:
    from aiofeed.kernel.decoders.native_jpeg import native_decoder

    backend = None if config.decode is None else bind_decoder(config.decode).backend
    without = backend == "auto" and find_spec("simplejpeg") is None and native_decoder() is None
    log.warning(gil_message(limit, cores=config.limits.decode_threads, turbo=without or backend == "pillow"))
