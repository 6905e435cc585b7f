"""The pipelines of a feeder: threads that stream its batches, and the decision whether the consumer makes them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.errors import add_note, as_exception
from aiofeed.kernel.core.faces import BuildsBatches, bind_decoder
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.engine.admission import Admission, MemoryBudget, bytes_per_sample
from aiofeed.kernel.engine.assembly import Assembly, AssemblyOptions
from aiofeed.kernel.engine.chunks import ChunkAssembly
from aiofeed.kernel.engine.concurrency import Tuner
from aiofeed.kernel.engine.engine import Engine
from aiofeed.kernel.engine.fetch.choose import builder_factory, new_fetcher
from aiofeed.kernel.engine.tuning.threads import GilLimit, gil_message
from aiofeed.kernel.feeder.arguments import FeederConfig
from aiofeed.kernel.feeder.delivery import LoopProducer, Producer
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.cancellation import clear_cancellation, ended_by, is_cancelled
from aiofeed.kernel.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.kernel.runtime.queue import BatchQueue, FeedFailure, ReadyBatch, drop_batches
from aiofeed.kernel.runtime.tensors import as_tensors, unchanged
from aiofeed.kernel.runtime.thread_pool import gil_wait_s
from aiofeed.kernel.sampling.epochs import EpochStream

if TYPE_CHECKING:
    from aiofeed.kernel.devices.pinned import PinnedBufferPool

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# The thread of a Dataset is probed so often and so many times: it takes the loop 0.1 ms each time.
GIL_PROBE_PAUSE_S, GIL_PROBES = 0.05, 64
# Some thread that waits takes a free GIL within this time.
GIL_FREE_S = 0.001


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
    def cpu_s(self) -> float:
        """Seconds in all for which its threads were on the processor; 0 if unknown, or if there are none."""

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
            from aiofeed.kernel.devices.pinned import PinnedBufferPool

            self._memory = PinnedBufferPool(config.backend.pin, keep * 4)
        self._opened = False
        self._budget = MemoryBudget(limits.memory_bytes, bytes_per_sample(config.decode))
        queue = self.queue
        # The feeder may keep this queue for long after `close` or `break`; drop the batches that were read ahead.
        loop_thread.at_exit(partial(drop_batches, queue))
        loop_thread.at_death(lambda error: queue.put(FeedFailure(error)))
        loop_thread.at_exit(self._memory.close)
        self._engine: Engine | None = None
        # Of the moments at which the one thread of a Dataset made a batch, those in which it held the GIL.
        self.gil_probes: int = 0
        self.gil_held: int = 0

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
            call=self.loop_thread.call,
        )
        self.loop_thread.start(partial(self._run, self._engine))
        if config.source.threads == 1 and not config.engines and machine.has_gil():
            self.loop_thread.start(self._probe_gil)

    async def _probe_gil(self) -> None:
        """Count how often the one thread of a ``Dataset`` holds the GIL while it makes a batch."""
        while self.gil_probes < GIL_PROBES:
            await asyncio.sleep(GIL_PROBE_PAUSE_S)
            if self.loop_thread.decode_pool.running:
                self.gil_held += gil_wait_s() > GIL_FREE_S
                self.gil_probes += 1

    def _assembly_of(self, stream: EpochStream) -> Callable[[Admission], Assembly]:
        config = self._config
        # The user's function makes no HostTensor; with a device, the copier takes them.
        own = config.collate_fn is not None and not isinstance(config.collate_fn, BuildsBatches)
        options = AssemblyOptions(
            fetcher=self._fetcher,
            new_builder=self._new_builder,
            wrap=unchanged if config.backend is not None or (own and self._pool is None) else as_tensors,
            memory=self._memory,
            executor=self.loop_thread.decode_pool,
            policy=config.policy,
            tuner=self.tuner,
            on_gil_limit=partial(_warn_of_gil, config) if self._pool is None else None,
            loop_delay_s=self.loop_thread.loop_delay_s,
        )
        if self._remote_assembly is not None:
            return partial(self._remote_assembly, options=options)
        if config.in_order == "samples":
            kind = load_addon("SampleAssembly", 'in_order="samples"')
            return partial(kind, options=options, schedule=stream.schedule, batch_size=config.batch_size)
        # A limit on finished batches that the user has chosen counts batches, not jobs.
        may_group = self._fetcher.limit_s is None and not config.limits.prefetch_given
        return partial(ChunkAssembly, options=options, may_group=may_group)

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
    def cpu_s(self) -> float:
        """Seconds in all for which its threads were on the processor; 0 if unknown."""
        return self.loop_thread.cpu_s()

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


class InlineBatches(ABC):
    """Decides for each epoch whether the consumer's thread makes its batches, and creates the pipeline for that.

    The store of a cache returns one in its method ``new_memory(config)``, or ``None`` if epochs have to be streamed. A
    source in memory, see ``Traits``, has an ``InlineData``.

    Attributes:
        reason: Which thread makes the batches and why, if that was measured; otherwise empty.
    """

    reason: str = ""
    planned: bool = False
    """Whether it makes batches that a plan lists; otherwise those of one size."""

    @abstractmethod
    def ready(self, stream: EpochStream) -> bool:
        """Return whether the consumer's thread can make the batches of the first epoch of a stream."""

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether the pipeline of an epoch can go on with the next one, and no other kind of pipeline is faster.

        Args:
            streams: Whether threads stream the batches of the epoch; ``None``: it is yet to begin.
        """
        return True

    @abstractmethod
    def new_pipeline(self, config: Any, running: Any) -> Any:
        """Return a ``BatchPipeline`` of the consumer's thread. It shares the data of ``running`` if possible."""

    def changes(self, item: ReadyBatch, stats: EpochStats, pipeline: Any) -> bool:
        """Learn from a batch that is returned; return whether another pipeline is to make the rest of the epoch."""
        return False
