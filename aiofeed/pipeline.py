"""The machinery behind a feeder: threads, memory, source and an engine per pass, put together here alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from aiofeed import lifetime
from aiofeed.budget import Budget
from aiofeed.collate import Assembly, CollateAssembly, RowAssembly, TreeAssembly
from aiofeed.config import Limits, ResolvedLimits
from aiofeed.delivery import DeviceDelivery, HostDelivery, Transform
from aiofeed.devices import DeviceGroup
from aiofeed.engine import Engine
from aiofeed.errors import as_exception
from aiofeed.fetch import BytesFetcher, Fetcher, decodes_in_place
from aiofeed.fetch_cached import CachedFetcher, cached_assembly
from aiofeed.fetch_items import DatasetFetcher
from aiofeed.handoff import Handoff
from aiofeed.items import Failed, Item, drop_batches
from aiofeed.iterator import Delivery
from aiofeed.policy import FailurePolicy
from aiofeed.resident import Resident, Store
from aiofeed.runtime import Runtime
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors
from aiofeed.staging import HostMemory, Lease, PinnedMemory
from aiofeed.stream import Stream
from aiofeed.tensors import as_tensors
from aiofeed.thread_tuning import GilLimit
from aiofeed.tuning import Tuner, gil_message
from aiofeed.types import Collate, Source

if TYPE_CHECKING:
    from aiofeed.cache.store import Store as Cache
    from aiofeed.device import DeviceBackend
    from aiofeed.sharing.processes import EngineProcesses
    from aiofeed.static_copier import StaticBatch

log = logging.getLogger("aiofeed")

# Reading is waiting: on local files a few threads do; a network file system wants one per request under way.
MOST_READ_THREADS = 64


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a feeder is made of; it does not change."""

    source: Source[Any] | FromDataset | Tensors
    decode: Callable[..., Any] | None
    batch_size: int
    collate_fn: Collate | None
    backend: DeviceBackend | DeviceGroup | None
    transform: Transform | None
    limits: ResolvedLimits
    in_order: bool = True
    length: int = 0
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    engines: int = 0
    statics: tuple[StaticBatch, ...] = ()
    cache: Cache | None = None
    said: Limits | None = None


class FeedDelivery(Delivery, Protocol):
    """What stands behind a feeder's iterators, one after another."""

    def begin(self) -> None:
        """A pass begins in the calling thread."""
        ...


class Machinery(Protocol):
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

    def start(self, stream: Stream) -> None:
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


def check_resident(recipe: Recipe) -> None:
    """``ValueError`` where data that stay in memory are asked for what only batches on their way can have."""
    if not isinstance(recipe.source, Tensors):
        return
    if isinstance(recipe.backend, DeviceGroup):
        raise ValueError(
            "the data of Tensors stay on one device: for several make a feeder for each, with shard=(rank, world_size)"
        )
    if recipe.statics:
        raise ValueError(
            "static_batches=True copies every batch, and those of Tensors are views that cost nothing: copy_ them into "
            "tensors of your own where addresses have to stay"
        )
    if recipe.engines:
        raise ValueError('the data of Tensors are read and decoded already: engine="process" has nothing to do')


def machinery(recipe: Recipe, after: Machinery | None = None) -> Machinery:
    """What a recipe needs, to take the place of ``after``, which is of the same recipe."""
    if isinstance(recipe.source, Tensors):
        if isinstance(after, Resident) and not after.inherited:
            return after.successor()
        assert not isinstance(recipe.backend, DeviceGroup)
        return Resident(
            Store(
                recipe.source,
                batch_size=recipe.batch_size,
                backend=recipe.backend,
                memory_bytes=recipe.limits.memory_bytes,
            ),
            recipe.transform,
        )
    assert after is None or isinstance(after, Pipeline)
    return Pipeline(recipe, after=after)


class Pipeline:
    """Threads that live from one ``iter()`` to ``close``, and what they work with. ``start`` starts them.

    Args:
        recipe: what to run.
        after: a pipeline that has to be gone before the source is opened again.
    """

    def __init__(self, recipe: Recipe, after: Pipeline | None = None) -> None:
        self._recipe = recipe
        limits = recipe.limits
        self._processes = _processes(recipe)
        self.runtime: Runtime = Runtime(
            read_threads=min(limits.read_concurrency, MOST_READ_THREADS),
            decode_threads=limits.decode_threads,
            after=None if after is None or after.runtime.inherited else after.runtime,
        )
        self._fetcher = _fetcher(recipe)
        # What one pipeline has found out the next goes by; a fork may have caught a parent's in the middle of a step.
        known = after is not None and not after.runtime.inherited
        self.tuner: Tuner | None = after.tuner if after is not None and known else _tuner(recipe)
        # One more than may wait or be decoded: the consumer's.
        keep = limits.prefetch_batches + 1 + max(recipe.engines - 1, 0)
        self._memory: HostMemory | PinnedMemory
        if recipe.backend is None:
            self._memory = HostMemory(keep)
        else:
            self._memory = PinnedMemory(recipe.backend.pin, keep * 4)
        self._launched = self._opened = False
        self._budget = Budget(limits.memory_bytes, self._known_bytes_per_sample())
        finished: Handoff[Item] = Handoff()
        self._finished = finished
        # A feeder that was left or closed may live on for long; what was read ahead does not.
        self.runtime.at_exit(partial(drop_batches, self._finished))
        self.runtime.at_death(lambda error: finished.put(Failed(error)))
        self.runtime.at_exit(self._memory.close)
        self._engine: Engine | None = None
        try:
            self.delivery: HostDelivery | DeviceDelivery = self._deliver()
        except BaseException:  # nobody will ever hold this pipeline, to stop it
            self.runtime.stop()
            raise

    def start(self, stream: Stream) -> None:
        """Begin with a stream's epochs; the engine starts at once."""
        recipe = self._recipe
        make: Callable[..., Engine] = partial(
            Engine, new_assembly=self._new_assembly, tuner=self.tuner, tell=partial(_tell_limit, recipe)
        )
        limits = recipe.limits
        if self._processes is not None:
            from aiofeed.sharing.remote import RemoteEngine

            make = partial(RemoteEngine, processes=self._processes)
            # Each process beyond the first is to have a batch to decode while the others do.
            limits = replace(limits, prefetch_batches=limits.prefetch_batches + recipe.engines - 1)
        self._engine = make(
            stream,
            batch_size=recipe.batch_size,
            fetcher=self._fetcher,
            wrap=as_tensors if recipe.backend is None else _unchanged,
            memory=self._memory,
            executor=self.runtime.decode_pool,
            handoff=self._finished,
            limits=limits,
            budget=self._budget,
            in_order=recipe.in_order,
            policy=recipe.policy,
            length=recipe.length,
        )
        if not self._launched:
            self._launched = True
            self.runtime.launch()
            self.delivery.launch()
        self.runtime.start(partial(self._run, self._engine))

    def _deliver(self) -> HostDelivery | DeviceDelivery:
        backend = self._recipe.backend
        if backend is None:
            return HostDelivery(self.runtime, self._finished, transform=self._recipe.transform)
        from aiofeed.group_copier import copier_for

        return DeviceDelivery(
            self.runtime,
            self._finished,
            copier_for(backend, self._recipe.transform, self._recipe.statics),
            room=self._recipe.limits.device_batches,
        )

    async def _run(self, engine: Engine) -> None:
        try:
            await self._open_source()
        except BaseException as error:  # the user's coroutine may raise anything; it is raised at the `for` line
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            if self._processes is None:
                error.add_note(f"in {type(self._recipe.source).__name__}.open()")
            self._finished.put(Failed(as_exception(error)))
            return
        if (task := asyncio.current_task()) is not None and task.cancelling():
            return  # open() swallowed it, and nobody would cancel the engine again
        await engine.run()

    async def _open_source(self) -> None:
        if self._opened:
            return
        if self._processes is not None:
            self._opened = True
            self.runtime.at_stop(self._processes.aclose)
            await self._processes.start()  # the source is opened there
            return
        source = self._recipe.source
        if (opener := getattr(source, "open", None)) is not None:
            await opener()
        if (closer := getattr(source, "aclose", None)) is not None:
            self.runtime.at_stop(closer)
        self._opened = True

    def _new_assembly(self, samples: int, lease: Lease) -> Assembly:
        recipe = self._recipe
        if recipe.collate_fn is not None:
            return CollateAssembly(samples, recipe.collate_fn, lease if recipe.backend is not None else None)
        if decodes_in_place(recipe.decode):
            return RowAssembly(recipe.decode.row, samples, lease, targets=self._fetcher.has_targets)  # type: ignore[union-attr]
        if (alike := cached_assembly(self._fetcher)) is not None:
            targets = self._fetcher.has_targets
            return RowAssembly(alike[0], samples, lease, targets=targets, torch_dtype=alike[1])
        return TreeAssembly(samples, lease)

    def _known_bytes_per_sample(self) -> float:
        row = getattr(self._recipe.decode, "row", None)
        if row is None:
            return 0.0
        import math

        import numpy as np

        return float(math.prod(row.shape) * np.dtype(row.dtype).itemsize)

    @property
    def queue_depth(self) -> int:
        """Finished batches that wait for the consumer."""
        return len(self.delivery.handoff)

    @property
    def chunk_size(self) -> int:
        """Samples per executor job, as chosen last."""
        return self._engine.chunk_size if self._engine is not None else 0

    @property
    def inherited(self) -> bool:
        """Whether its threads live in a parent process."""
        return self.runtime.inherited

    def watch(self, owner: object) -> None:
        """Stop when ``owner`` is dropped; it replaces the one watched before."""
        self.runtime.watch(owner)

    def reusable(self) -> bool:
        """Whether another pass can run on the same threads."""
        return not self.runtime.stopping and not self.runtime.inherited

    def stop(self) -> None:
        """Signal the threads to end; never blocks."""
        self.delivery.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end, up to ``timeout_s``; whether they have."""
        if self.delivery.join(timeout_s):
            return True
        lifetime.forget(self.runtime)
        return False

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's loop."""
        await self.delivery.stopped()


def check_travels(recipe: Recipe) -> None:
    """See to it that what has to be sent to a process can be; ``TypeError`` where it cannot."""
    if recipe.engines:
        from aiofeed.sharing import travel

        travel.check_travels(source=recipe.source, decode=recipe.decode, collate_fn=recipe.collate_fn)


def _processes(recipe: Recipe) -> EngineProcesses | None:
    if not recipe.engines:
        return None
    from aiofeed.sharing.processes import EngineProcesses
    from aiofeed.sharing.travel import Cargo, check_not_starting

    check_not_starting()
    limits, source = recipe.limits, recipe.source
    cargo = Cargo(
        source=source,
        decode=recipe.decode,
        collate_fn=recipe.collate_fn,
        length=recipe.length,
        engines=recipe.engines,
        read_concurrency=limits.read_concurrency,
        # Each process has a copy of a Dataset.
        decode_threads=limits.decode_threads * (recipe.engines if isinstance(source, FromDataset) else 1),
        keep=limits.prefetch_batches + 1,
        in_order=recipe.in_order,
        policy=recipe.policy,
        cache=recipe.cache,
    )
    backend = recipe.backend
    # What one device's driver has locked, all of its kind copy from.
    return EngineProcesses(cargo, backend.backends[0] if isinstance(backend, DeviceGroup) else backend)


def _tuner(recipe: Recipe) -> Tuner | None:
    """What is left to be found out; in processes their engines go by what they are told."""
    if recipe.engines or recipe.said is None:
        return None
    limits, said = recipe.limits, recipe.said
    # Whoever said how many threads a Dataset bears knows it.
    threads_given = said.decode_threads is not None or isinstance(recipe.source, FromDataset)
    return Tuner(
        decode_threads=limits.decode_threads,
        threads_given=threads_given,
        read_concurrency=limits.read_concurrency,
        reads_given=said.read_concurrency is not None,
    )


def _tell_limit(recipe: Recipe, limit: GilLimit) -> None:
    without = getattr(recipe.decode, "backend", None) == "auto" and find_spec("simplejpeg") is None
    turbo = without or getattr(recipe.decode, "backend", None) == "pillow"
    log.warning(gil_message(limit, cores=recipe.limits.decode_threads, turbo=turbo))


def _unchanged(batch: Any) -> Any:
    """The copier takes a batch as it lies in its slot."""
    return batch


def _fetcher(recipe: Recipe) -> Fetcher:
    if isinstance(recipe.source, FromDataset):
        return DatasetFetcher(recipe.source, recipe.policy)
    assert recipe.decode is not None
    assert not isinstance(recipe.source, Tensors)
    in_place = recipe.collate_fn is None and decodes_in_place(recipe.decode)
    make = BytesFetcher if recipe.cache is None else partial(CachedFetcher, store=recipe.cache)
    return make(recipe.source, recipe.decode, in_place=in_place, length=recipe.length, policy=recipe.policy)
