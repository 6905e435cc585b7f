"""What stands behind a feeder's epochs: data that are in memory, or batches on their way; chosen at each ``iter()``."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Protocol, cast

from aiofeed.devices.resolve import DeviceGroup
from aiofeed.engine.fetch.source import decodes_in_place
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.feeder.config import FeederConfig
from aiofeed.feeder.iterator import Delivery
from aiofeed.feeder.pipeline import StreamingPipeline
from aiofeed.sampling.epochs import EpochStream
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    from aiofeed.cache.resident import ResidentStore
    from aiofeed.core.types import Row
    from aiofeed.engine.resident.cached_data import CachedData


class FeedDelivery(Delivery, Protocol):
    """What stands behind a feeder's iterators, one after another."""

    def begin(self) -> None:
        """A pass begins in the calling thread."""
        ...


class BatchPipeline(Protocol):
    """What can stand behind a feeder: it gives the batches of a stream, from one ``iter()`` to ``close``."""

    @property
    def delivery(self) -> FeedDelivery:
        """Where its batches come out."""
        ...

    @property
    def inherited(self) -> bool:
        """Whether it belongs to a parent process."""
        ...

    @property
    def queue_depth(self) -> int:
        """Finished batches that wait for the consumer."""
        ...

    @property
    def chunk_size(self) -> int:
        """Samples per executor job, as chosen last."""
        ...

    @property
    def tuner(self) -> Tuner | None:
        """What chooses threads and reads as they go; ``None`` where nothing does."""
        ...

    def start(self, stream: EpochStream) -> None:
        """Begin to give the batches of a stream."""
        ...

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped; it replaces the one watched before."""
        ...

    def reusable(self) -> bool:
        """Whether another stream can be started."""
        ...

    def stop(self) -> None:
        """Signal the end; never blocks."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, up to ``timeout_s``; whether it has come."""
        ...

    async def stopped(self) -> None:
        """Wait for the end without blocking the caller's loop."""
        ...


def new_pipeline(config: FeederConfig, stream: EpochStream, after: BatchPipeline | None = None) -> BatchPipeline:
    """What a recipe needs for a stream, to take the place of ``after``, which is of the same recipe."""
    if config.cache is None and not isinstance(config.source, Tensors):
        return StreamingPipeline(config, after=cast("StreamingPipeline | None", after))
    from aiofeed.engine.resident.cached_data import CachedData
    from aiofeed.engine.resident.pipeline import ResidentData, ResidentPipeline

    source = _resident_source(config, stream, after)
    if source is None:
        return StreamingPipeline(
            config,
            after=after.before if isinstance(after, ResidentPipeline) else cast("StreamingPipeline | None", after),
        )
    if isinstance(after, ResidentPipeline) and not after.inherited and after.source is source:
        return after.successor()
    assert not isinstance(config.backend, DeviceGroup)
    store = ResidentData(
        source, batch_size=config.batch_size, backend=config.backend, memory_bytes=config.limits.memory_bytes
    )
    found = ResidentPipeline(store, config.transform, source.batch if isinstance(source, CachedData) else None)
    found.before = after.before if isinstance(after, ResidentPipeline) else cast("StreamingPipeline | None", after)
    return found


def serves(config: FeederConfig, running: BatchPipeline, stream: EpochStream) -> bool:
    """Whether what runs can give another stream, and nothing would give it faster."""
    if (cache := _kept_in_place(config)) is None:
        return True
    return not _holds(cache, stream) if isinstance(running, StreamingPipeline) else cache.has_all()


def tie_memory(owner: object, config: FeederConfig) -> None:
    """Let what a cache keeps on a device go with ``owner``; nothing of it waits for the collector."""
    if config.cache is None:
        return
    from aiofeed.cache.device import DeviceStore

    if isinstance(config.cache, DeviceStore):
        weakref.finalize(owner, config.cache.memory.clear).atexit = False


def goes_on(config: FeederConfig, running: BatchPipeline | None) -> bool:
    """Whether an epoch may follow in the stream of the one before; not while a cache fills, for the next is faster."""
    cache = _kept_in_place(config)
    return cache is None or (cache.has_all() and not isinstance(running, StreamingPipeline))


def _kept_in_place(config: FeederConfig) -> ResidentStore | None:
    """The cache, where it keeps samples where batches are wanted."""
    if config.cache is None:
        return None
    from aiofeed.cache.resident import ResidentStore

    return config.cache if isinstance(config.cache, ResidentStore) else None


def _resident_source(
    config: FeederConfig, stream: EpochStream, after: BatchPipeline | None
) -> Tensors | CachedData | None:
    """The data, where all that a stream asks for are in memory; those that ``after`` has, where there are no others."""
    from aiofeed.engine.resident.cached_data import CachedData
    from aiofeed.engine.resident.pipeline import ResidentPipeline

    if isinstance(config.source, Tensors):
        return config.source
    cache = _kept_in_place(config)
    if cache is None or not _holds(cache, stream):
        return None
    if (
        isinstance(after, ResidentPipeline)
        and isinstance(after.source, CachedData)
        and after.source.samples == cache.cached_samples
    ):
        return after.source
    row: Row | None = config.decode.row if decodes_in_place(config.decode) else None  # type: ignore[union-attr]
    targets = getattr(config.source, "target", None) is not None
    return CachedData(cache, None if row is None else row.axes, targets=targets)


def _holds(cache: ResidentStore, stream: EpochStream) -> bool:
    if cache.has_all():
        return True
    first = stream.first
    wanted = stream.schedule.batch_ranges(first.position, first.permutation).at(0, sys.maxsize)
    return wanted is not None and cache.has_all(wanted.indices)
