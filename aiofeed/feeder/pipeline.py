"""The machinery behind a feeder: threads, memory, source and an engine per pass, put together here alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import as_exception
from aiofeed.devices.resolve import DeviceGroup
from aiofeed.engine.admission import MemoryBudget
from aiofeed.engine.engine import Engine
from aiofeed.engine.fetch.factory import builder_factory, new_fetcher
from aiofeed.engine.fetch.fetcher import Fetcher
from aiofeed.engine.tuning.gil import GilLimit, gil_message
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.feeder.config import FeederConfig
from aiofeed.feeder.delivery import DeviceDelivery, HostDelivery
from aiofeed.runtime import threads
from aiofeed.runtime.buffers import HostBufferPool, PinnedBufferPool
from aiofeed.runtime.cancellation import EndedBy, clear_cancellation, is_cancelled
from aiofeed.runtime.event_loop import MOST_READ_THREADS, EventLoopThread
from aiofeed.runtime.queue import BatchQueue, FeedFailure, QueueItem, drop_batches
from aiofeed.runtime.tensors import as_tensors
from aiofeed.sampling.epochs import EpochStream
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    from aiofeed.processes.workers.pool import WorkerPool

log = logging.getLogger("aiofeed.feeder")


class StreamingPipeline:
    """Threads that live from one ``iter()`` to ``close``, and what they work with. ``start`` starts them.

    Args:
        config: what to run.
        after: a pipeline that has to be gone before the source is opened again.
    """

    def __init__(self, config: FeederConfig, after: StreamingPipeline | None = None) -> None:
        self._config = config
        limits = config.limits
        self._processes = _processes(config)
        self.loop_thread: EventLoopThread = EventLoopThread(
            read_threads=min(limits.read_concurrency, MOST_READ_THREADS),
            decode_threads=limits.decode_threads,
            after=None if after is None or after.loop_thread.inherited else after.loop_thread,
        )
        _attach_cache(config)
        self._fetcher = _fetcher(config)
        self._new_builder = builder_factory(self._fetcher, config.collate_fn, staged=config.backend is not None)
        # What one pipeline has found out the next goes by. A fork may have caught a parent's in the middle of a step,
        # and new processes find out for themselves.
        known = after is not None and not after.loop_thread.inherited and not config.engines
        self.tuner: Tuner | None = after.tuner if after is not None and known else _tuner(config)
        # One more than may wait or be decoded: the consumer's.
        keep = limits.prefetch_batches + 1 + max(config.engines - 1, 0)
        self._memory: HostBufferPool | PinnedBufferPool
        if config.backend is None:
            self._memory = HostBufferPool(keep)
        else:
            self._memory = PinnedBufferPool(config.backend.pin, keep * 4)
        self._launched = self._opened = False
        self._budget = MemoryBudget(limits.memory_bytes, self._known_bytes_per_sample())
        finished: BatchQueue[QueueItem] = BatchQueue()
        self._finished = finished
        # A feeder that was left or closed may live on for long; what was read ahead does not.
        self.loop_thread.at_exit(partial(drop_batches, self._finished))
        self.loop_thread.at_death(lambda error: finished.put(FeedFailure(error)))
        self.loop_thread.at_exit(self._memory.close)
        self._engine: Engine | None = None
        try:
            self.delivery: HostDelivery | DeviceDelivery = self._deliver()
        except BaseException:  # nobody will ever hold this pipeline, to stop it
            self.loop_thread.stop()
            raise

    def start(self, stream: EpochStream) -> None:
        """Begin with a stream's epochs; the engine starts at once."""
        config = self._config
        make: Callable[..., Engine] = partial(
            Engine,
            new_builder=self._new_builder,
            tuner=self.tuner,
            on_gil_limit=partial(_tell_limit, config),
        )
        limits = config.limits
        if self._processes is not None:
            from aiofeed.processes.workers.parent_engine import MultiprocessEngine

            make = partial(MultiprocessEngine, processes=self._processes, tuner=self.tuner)
            # Each process beyond the first is to have a batch to decode while the others do.
            limits = replace(limits, prefetch_batches=limits.prefetch_batches + config.engines - 1)
        self._engine = make(
            stream,
            batch_size=config.batch_size,
            fetcher=self._fetcher,
            wrap=as_tensors if config.backend is None else _unchanged,
            memory=self._memory,
            executor=self.loop_thread.decode_pool,
            queue=self._finished,
            limits=limits,
            budget=self._budget,
            in_order=config.in_order,
            policy=config.policy,
            length=config.length,
        )
        if not self._launched:
            self._launched = True
            self.loop_thread.launch()
            self.delivery.launch()
        self.loop_thread.start(partial(self._run, self._engine))

    def _deliver(self) -> HostDelivery | DeviceDelivery:
        backend = self._config.backend
        if backend is None:
            return HostDelivery(self.loop_thread, self._finished, transform=self._config.transform)
        from aiofeed.devices.group_copier import copier_for

        return DeviceDelivery(
            self.loop_thread,
            self._finished,
            copier_for(backend, self._config.transform, self._config.statics),
            room=self._config.limits.device_batches,
        )

    async def _run(self, engine: Engine) -> None:
        loop_thread = self.loop_thread
        with EndedBy(lambda: loop_thread.stopping):
            if not await self._begin():
                return
        await engine.run()

    async def _begin(self) -> bool:
        """Open the source, and let a cache that keeps samples in place take its memory; whether both could be done."""
        opened = False
        try:
            await self._open_source()
            opened = True
            await clear_cancellation()  # open() may have swallowed that of the runtime, or left one of its own
            await self._fetcher.prepare(self.loop_thread.decode_pool)
        except BaseException as error:  # the user's coroutine, or the device; it is raised at the `for` line
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if not opened and self._processes is None:
                error.add_note(f"in {type(self._config.source).__name__}.open()")
            self._finished.put(FeedFailure(as_exception(error)))
            return False
        return True

    async def _open_source(self) -> None:
        if self._opened:
            return
        if self._processes is not None:
            self._opened = True
            self.loop_thread.at_stop(self._processes.aclose)
            await self._processes.start()  # the source is opened there
            return
        source = self._config.source
        if (opener := getattr(source, "open", None)) is not None:
            await opener()
        if (closer := getattr(source, "aclose", None)) is not None:
            self.loop_thread.at_stop(closer)
        self._opened = True

    def _known_bytes_per_sample(self) -> float:
        row = getattr(self._config.decode, "row", None)
        if row is None:
            return 0.0
        import math

        import numpy as np

        return float(math.prod(row.shape) * np.dtype(row.dtype).itemsize)

    @property
    def queue_depth(self) -> int:
        """Finished batches that wait for the consumer."""
        return len(self.delivery.queue)

    @property
    def chunk_size(self) -> int:
        """Samples per executor job, as chosen last."""
        return self._engine.chunk_size if self._engine is not None else 0

    @property
    def inherited(self) -> bool:
        """Whether its threads live in a parent process."""
        return self.loop_thread.inherited

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped; it replaces the one watched before."""
        self.loop_thread.watch(owner)

    def reusable(self) -> bool:
        """Whether another pass can run on the same threads."""
        return not self.loop_thread.stopping and not self.loop_thread.inherited

    def stop(self) -> None:
        """Signal the threads to end; never blocks."""
        self.delivery.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end, up to ``timeout_s``; whether they have."""
        if self.delivery.join(timeout_s):
            return True
        threads.unregister(self.loop_thread)
        return False

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's loop."""
        await self.delivery.stopped()


def _attach_cache(config: FeederConfig) -> None:
    """Tell the cache on which device batches are used."""
    if config.cache is not None and not isinstance(config.backend, DeviceGroup):
        config.cache.attach(config.backend)


def _processes(config: FeederConfig) -> WorkerPool | None:
    if not config.engines:
        return None
    from aiofeed.processes.workers.pool import WorkerPool
    from aiofeed.processes.workers.spawn import WorkerConfig, check_not_starting

    check_not_starting()
    limits, source = config.limits, config.source
    worker_config = WorkerConfig(
        source=source,
        decode=config.decode,
        collate_fn=config.collate_fn,
        length=config.length,
        engines=config.engines,
        read_concurrency=limits.read_concurrency,
        # Each process has a copy of a Dataset.
        decode_threads=limits.decode_threads * (config.engines if isinstance(source, FromDataset) else 1),
        keep=limits.prefetch_batches + 1,
        in_order=config.in_order,
        policy=config.policy,
        cache=config.cache,
        reads_given=_reads_given(config),
        threads_given=config.said is None or config.said.decode_threads is not None,
    )
    backend = config.backend
    # What one device's driver has locked, all of its kind copy from.
    return WorkerPool(worker_config, backend.backends[0] if isinstance(backend, DeviceGroup) else backend)


def _tuner(config: FeederConfig) -> Tuner | None:
    """What is left to be found out; engine processes do that themselves, and tell how many samples they read."""
    if config.said is None:
        return None
    limits, said = config.limits, config.said
    # Whoever said how many threads a Dataset bears knows it; those of processes stay as they are.
    threads_given = said.decode_threads is not None or isinstance(config.source, FromDataset) or bool(config.engines)
    return Tuner(
        decode_threads=limits.decode_threads,
        threads_given=threads_given,
        read_concurrency=limits.read_concurrency,
        reads_given=_reads_given(config),
    )


def _reads_given(config: FeederConfig) -> bool:
    return config.said is None or config.said.read_concurrency is not None


def _tell_limit(config: FeederConfig, limit: GilLimit) -> None:
    from aiofeed.decoders.native_jpeg import native_decoder

    backend = getattr(config.decode, "backend", None)
    without = backend == "auto" and find_spec("simplejpeg") is None and native_decoder() is None
    log.warning(gil_message(limit, cores=config.limits.decode_threads, turbo=without or backend == "pillow"))


def _unchanged(batch: Any) -> Any:
    """The copier takes a batch as it lies in its slot."""
    return batch


def _fetcher(config: FeederConfig) -> Fetcher:
    assert not isinstance(config.source, Tensors)
    return new_fetcher(
        config.source,
        config.decode,
        config.collate_fn,
        length=config.length,
        policy=config.policy,
        cache=config.cache,
    )
