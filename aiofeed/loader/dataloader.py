"""``DataLoader``: torch's ``DataLoader`` with the same batches, and copies to a device, exact resume and caches."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.failures import Action, FailureCounter, FailurePolicy
from aiofeed.kernel.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES, Limits
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import Source, Transform, public
from aiofeed.kernel.core.validation import check_collate_fn, check_returned, explain_arguments, length_of
from aiofeed.kernel.feeder.delivery import Delivery
from aiofeed.kernel.feeder.iterator import EpochObserver, FeedIterator
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.kernel.sources.dataset import FromDataset
from aiofeed.kernel.sources.subset import IndexedSource
from aiofeed.loader.prefetch import IterableProducer, Prefetch
from aiofeed.loader.run.hook import in_place_of
from aiofeed.loader.workers.batches import CLOSED, Indices, InProcessBatches, WorkerBatches
from aiofeed.loader.workers.state import LoaderPosition, LoaderState, OrderState, Progress, saved_dataset

if TYPE_CHECKING:
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.kernel.devices.resolve import Device
    from aiofeed.kernel.feeder.arguments import Processes
    from aiofeed.kernel.feeder.feeder import Feeder
    from aiofeed.reports.explanation import Explanation

# The most batches that a feeder gets at a time from a sampler, which may be endless, and those of the first part.
_PART_BATCHES = 1024
_FIRST_PART_BATCHES = 64
T_co = TypeVar("T_co", covariant=True)
_in_torch = in_place_of(torch.utils.data.DataLoader._get_iterator)
_SOURCES = "write aiofeed.Feeder(source, decode=..., batch_size=..., shuffle=...), which needs no workers"


@public
@explain_arguments({"decode": _SOURCES})
class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in replacement for ``torch.utils.data.DataLoader``: the same arguments and, bit for bit, the same batches.

    Example:
        ```python
        import torch

        import aiofeed

        dataset = torch.utils.data.TensorDataset(torch.rand(100, 8), torch.arange(100))
        loader = aiofeed.DataLoader(dataset, batch_size=10, shuffle=True, num_workers=2)
        for x, y in loader:
            print(x.shape, y)
        ```

    It draws from the random generators as torch's does, seeds its workers alike and gives batch k to worker k modulo
    ``num_workers``. Workers hand their batches over in shared memory that is reused. Ctrl-C, ``break`` and exceptions
    leave nothing behind; an exception of the dataset names the sample. ``async for`` works as well as ``for``.

    The arguments up to ``in_order`` are those of ``torch.utils.data.DataLoader``.

    Args:
        device: Copy the tensors of each batch to this device; with workers on a side stream, ahead of the consumer.
        transform: Called with each batch, on the device if there is one.
        on_error: ``"skip"``, ``"replace"`` or a ``FailurePolicy`` for samples that fail; see ``Feeder``.
        cache: Where samples are kept after the first epoch; see ``Feeder``.
        engine: ``"thread"``, ``"process:N"`` or ``Processes(N)``; see ``Feeder``.
        threads: Number of threads that call the dataset, which must be thread-safe, at the same time; ``"auto"``: it is
            chosen by measurement.
        limits: ``Limits(prefetch_batches=, device_batches=)``; see ``Feeder``.
        snapshot_every_n_steps: Without effect: a state is exact after each batch. For torchdata's
            ``StatefulDataLoader``.

    With ``on_error``, ``cache``, ``engine`` or ``threads`` the batches come from a ``Feeder``. Their order is torch's;
    random numbers that the dataset draws are not. ``num_workers=N`` then is ``engine="process:N"``.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: torch.utils.data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: torch.utils.data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: Device | Sequence[Device] = None,
        transform: Transform | None = None,
        on_error: Action | FailurePolicy = "raise",
        cache: Literal["host", "device"] | HostCache | DiskCache | None = None,
        engine: str | Processes | None = None,
        threads: int | Literal["auto"] | None = None,
        limits: Limits | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        if isinstance(in_order, str):
            raise TypeError(
                f"in_order must be a bool, got {in_order!r}: a DataLoader's workers make whole batches; aiofeed.Feeder "
                f'takes in_order="samples"'
            )
        items = getattr(type(dataset), "__getitem__", None)
        if items is IndexedSource.__getitem__ or (items is None and isinstance(dataset, Source)):
            raise TypeError(f"a DataLoader takes a Dataset, and {dataset!r} is a source: {_SOURCES}")
        if num_workers and cache == "host" and engine is None and threads is None:
            raise ValueError(
                f'cache="host" is memory of this process, which {num_workers} workers cannot use: pass '
                f"threads={num_workers} in place of num_workers=, or cache=aiofeed.DiskCache(path)"
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            check_collate_fn(collate_fn),
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if num_workers and threads is None and engine is None and not machine.passes_descriptors():
            raise ValueError(
                f"num_workers={num_workers} needs Unix sockets that pass descriptors, which Windows lacks: use "
                f"num_workers=0, threads={num_workers}, or torch.utils.data.DataLoader"
            )
        options: dict[str, Any] = {
            "device": device,
            "transform": transform,
            "on_error": on_error,
            "cache": cache,
            "engine": engine,
            "threads": threads,
            "limits": limits,
        }
        for name, value in {**options, "snapshot_every_n_steps": snapshot_every_n_steps}.items():
            # Lightning and Ignite make a loader again from its public attributes. A subclass may have its own.
            if not hasattr(type(self), name):
                self.__dict__.setdefault(name, value)
        self._aiofeed: _Epochs = _Epochs(self, **options)

    def _get_iterator(self) -> Any:
        _in_torch(self.check_worker_number_rationality)
        return LoaderIterator(self)

    def explain(self) -> Explanation:
        """Explain where the time of the current or last epoch went, as ``Feeder.explain`` does.

        It says how many workers would help, and whether threads could replace them.
        """
        return self._aiofeed.explain(self)

    def __aiter__(self) -> Any:
        """Start an epoch for ``async for``. Without workers the dataset runs in the caller's thread."""
        return iter(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned, with the state of the random generators.

        The state survives JSON and ``torch.load(weights_only=True)`` if that of a stateful dataset or sampler does.
        """
        return self._aiofeed.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter()``; restore the random generators of this process at once.

        A state of another rank restores position and order. The dataset's random numbers are then not those of a run
        without a stop, and a warning says so.

        Raises:
            StateError: The state is damaged, or of a loader with other batches or another number of workers.
        """
        self._aiofeed.load_state_dict(self, state)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the loader as it was before its first ``iter()``, and with the state that was loaded."""
        return {**self.__dict__, "_iterator": None, "_aiofeed": self._aiofeed.unused()}


class _Epochs:
    """The part of a ``DataLoader`` beyond torch's. One object, so that no attribute collides with one of a subclass."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: Any,
        transform: Transform | None,
        limits: Limits | None,
        **feeder: Any,
    ) -> None:
        limits = limits or Limits()
        self.bridge: Prefetch[Any] = Prefetch(
            (),
            device,
            transform,
            limits.prefetch_batches or PREFETCH_BATCHES,
            limits.device_batches or DEVICE_BATCHES,
        )
        self.copies: bool = device is not None
        self.ahead: bool = device is not None or transform is not None
        # Of the epoch that was started last, and the state that was loaded.
        self.progress: Progress | None = None
        self._loaded: LoaderState | None = None
        # Counters of the epoch that was started last, and the number of epochs.
        self.stats: EpochStats = EpochStats()
        self.epochs = 0
        self.feeder: _FeederEpochs | None = None
        if feeder != {"on_error": "raise", "cache": None, "engine": None, "threads": None}:
            self.feeder = _FeederEpochs(loader, device=device, transform=transform, limits=limits, **feeder)

    def explain(self, loader: DataLoader[Any]) -> Explanation:
        """Explain an epoch; see ``DataLoader.explain``."""
        if self.feeder is not None:
            return self.feeder.feeder.explain()
        stats = self.stats
        if loader.num_workers and self.ahead:
            ahead = self.bridge.stats
            stats = replace(stats, copy_s=ahead.copy_s, copy_wait_s=ahead.copy_wait_s, hand_over_s=ahead.hand_over_s)
        elif not self.copies and not loader.pin_memory:
            stats = replace(stats, copy_s=0.0, hand_over_s=stats.copy_s)
        explanation: Explanation = load_addon("explain_loader", "explain()")(
            stats,
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            prefetch_batches=loader.num_workers * loader.prefetch_factor if loader.prefetch_factor else 2,
            persistent=loader.persistent_workers or not loader.num_workers,
            device=self.copies,
            transform=self.ahead,
            first_epoch=self.epochs == 1,
            allows=lambda **_: _has_indices(loader),
        )
        return explanation

    def unused(self) -> _Epochs:
        """Return a copy for a copy of the loader."""
        other = copy.copy(self)
        other.progress, other._loaded = None, self.loaded
        return other

    # --- state ---

    @property
    def loaded(self) -> LoaderState | None:
        """The loaded state. It counts until a batch was returned: some frameworks call ``iter`` twice."""
        if self.progress is not None and self.progress.begun:
            self._loaded = None
        return self._loaded

    def state_dict(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the present state, or the loaded one before ``iter``."""
        progress = self.progress
        if progress is None and self._loaded is not None:
            return self._loaded.packed
        if progress is not None and not progress.finished:
            return LoaderState.pack(loader, progress.start, progress.position())
        position = LoaderPosition() if progress is None else progress.after()
        if self.feeder is None and not loader.num_workers:
            position = LoaderPosition(dataset=saved_dataset(loader))
        return LoaderState.pack(loader, None, position)

    def load_state_dict(self, loader: DataLoader[Any], state: dict[str, Any]) -> None:
        """Check a state, and keep it for the next ``iter``."""
        loaded = LoaderState.parse(state, loader)
        if loaded.of_this_rank and loaded.restores_generators:
            loaded.now.restore_generators(loader)
        else:
            loaded.now.restore_own_generators(loader)
        if not loaded.of_this_rank:
            loaded.without_worker_generators()
            warnings.warn(
                f"the state of this DataLoader was saved by rank {loaded.rank}: position and order are restored, "
                f"random numbers of the dataset are not. For an exact resume, save and load a state for each rank",
                stacklevel=3,
            )
        self._loaded, self.progress = loaded, None

    @contextmanager
    def starting(self, loader: DataLoader[Any]) -> Iterator[tuple[OrderState, LoaderPosition]]:
        """Set the generators to the start of the epoch, from which its order follows, while an iterator is made.

        The draws for an epoch whose start is known have been made before: the generators are set back.
        """
        loaded = self.loaded
        if loaded is None:
            yield OrderState.of(loader), LoaderPosition()
            return
        if loaded.start is None:
            loaded.now.restore_sampler(loader)
            loaded.start = OrderState.of(loader)
            yield loaded.start, loaded.position
            return
        now = OrderState.of(loader)
        loaded.start.restore(loader)
        try:
            yield loaded.start, loaded.position
        finally:
            now.restore_generators(loader)

    # --- ways of a batch ---

    def new_deliver(self) -> Callable[[Any], Any] | None:
        """Return a function that copies a batch to the device and transforms it, in the caller's thread."""
        if not self.ahead:
            return None
        copier, transform = self.bridge.new_copier()

        def deliver(batch: Any) -> Any:
            if copier is not None:
                copier.wait_for_caller()
                batch = copier.deliver(copier.issue(batch))
                copier.release()
            return batch if transform is None else check_returned("transform=", transform(batch))

        return deliver


class _PulledObserver(EpochObserver):
    """Calls ``returning`` for each batch, in the consumer's thread."""

    def __init__(self, batches: WorkerBatches, epoch: int, delivery: Delivery) -> None:
        super().__init__(delivery)
        self._batches = batches
        self._epoch = epoch
        self._next = 0

    def returning(self, item: ReadyBatch) -> None:
        if item.number == self._next:
            self._batches.returning(self._epoch)
            self._next += 1


class LoaderIterator(_BaseDataLoaderIter):
    """The iterator of every ``DataLoader``, for ``next`` and ``anext``, wherever its batches come from.

    With persistent workers the loader keeps it, and ``_reset`` starts the next epoch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._epochs = epochs = loader._aiofeed
        asked = time.perf_counter()
        self._batches: InProcessBatches | WorkerBatches | None = None
        self._feed: FeedIterator[Any] | None = None
        with epochs.starting(loader) as (start, position):
            _in_torch(super().__init__, loader)
            if self._num_workers and epochs.feeder is None:
                if position.base_seed is not None:
                    self._base_seed = position.base_seed
                    start.restore(loader)
                self._batches = WorkerBatches(self, loader)
                # What trainers touch: the processes, and queues to close, of which there are none.
                self._workers = self._batches.workers.processes
                self._index_queues: list[Any] = []
                super()._reset(loader, first_iter=True)
            self._begin(loader, start, position, asked)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        workers = self._batches if isinstance(self._batches, WorkerBatches) else None
        if self._feed is not None:
            self._feed.close(CLOSED)  # another thread may wait in it
        if self._epochs.loaded is not None or (workers is not None and not workers.workers.usable):
            LoaderIterator.__init__(self, loader)
            return
        asked = time.perf_counter()
        if workers is not None:
            workers.epoch += 1  # a thread that is in `next` gets an error then, and no batch of this epoch
        with nullcontext() if workers is None else workers.lock, self._epochs.starting(loader) as (start, position):
            super()._reset(loader, first_iter)
            if workers is not None:
                workers.restart(self._shared_seed)
                position = LoaderPosition(base_seed=int(self._base_seed))
            self._begin(loader, start, position, asked)

    def _begin(self, loader: DataLoader[Any], start: OrderState, position: LoaderPosition, asked: float) -> None:
        epochs, workers = self._epochs, self._batches
        epochs.stats = self._stats = stats = EpochStats(asked_at=asked, cpu_started_s=time.process_time())
        epochs.epochs += 1
        self._num_yielded = position.returned
        self._in_order = loader.in_order
        # If nothing is left of the epoch, `next` starts the next one.
        self._loader = loader if position.returned and _has_length(loader) else None
        self._feed = None
        if epochs.feeder is not None:
            self._feed, self._numbers = epochs.feeder.begin(loader, self._sampler_iter, position)
            self._left = len(self._numbers)
            epochs.progress = Progress(start, position)
        elif isinstance(workers, WorkerBatches):
            workers.stats = stats
            workers.begin(self._sampler_iter, start, position)
            epochs.progress = workers.progress
            if epochs.ahead or self._pin_memory:
                self._start_feed(workers)
        else:
            self._batches = InProcessBatches(self, start, position, epochs.new_deliver())
            self._batches.first_generators = None if epochs.loaded is None else epochs.loaded.first_generators
            self._batches.stats = stats
            epochs.progress = self._batches.progress
        stats.stall_s = time.perf_counter() - asked
        self._progress = epochs.progress

    def _start_feed(self, batches: WorkerBatches) -> None:
        """Receive batches ahead, in a thread that copies them to the device."""
        source, pins = weakref.proxy(batches), self._pin_memory and not self._epochs.copies

        def new_pull(_: object, *arguments: Any, **options: Any) -> IterableProducer:
            batches.pull = pull = IterableProducer(batches.received(pins=pins), *arguments, **options)
            pull.described = lambda: source.waiting_for()
            return pull

        self._feed = self._epochs.bridge.start(new_pull, partial(_PulledObserver, batches, batches.epoch))

    def _next_batch(self) -> Any:
        if self._feed is None and self._batches is not None:
            return self._batches.next()
        while self._feed is not None or self._continues():
            try:
                return next(self._feed)  # type: ignore[arg-type]
            except StopIteration:
                if not self._continues():
                    break
        raise StopIteration

    def _continues(self) -> bool:
        """Return whether the feed goes on: with the next part of the sampler, or after an error of the dataset."""
        if self._epochs.feeder is not None:
            # Batches that were left out are not taken from those that are left of the part.
            if self._left and (self._feed is None or self._left != self._feed.left_out):
                return False
            self._feed, self._numbers = self._epochs.feeder.next_part()
            self._left = len(self._numbers) or -1  # -1: the epoch is over
            return self._feed is not None
        if not isinstance(self._batches, WorkerBatches) or not self._batches.continues():
            return False
        self._start_feed(self._batches)
        return True

    def _starts_next_epoch(self) -> bool:
        """Note the end of the epoch, and start the next one if this one was resumed after its last batch."""
        loader, self._loader = self._loader, None
        resumed = not self._progress.begun
        self._progress.finished = True
        if loader is None or not resumed:
            return False
        self._reset(loader) if self._persistent_workers else LoaderIterator.__init__(self, loader)
        return True

    # Torch's __next__ calls it, and is not replaced: its warnings name the line of its caller.
    def _next_data(self) -> Any:
        asked = time.perf_counter()
        try:
            batch = self._next_batch()
        except StopIteration:
            if not self._starts_next_epoch():
                raise
            batch = self._next_batch()
        self._returned(asked)
        return batch

    def _returned(self, asked: float) -> None:
        stats, now = self._stats, time.perf_counter()
        stats.stall_s += now - asked
        stats.wall_s = now - stats.asked_at
        stats.batches += 1
        if stats.batches == 1:
            stats.first_batch_s, stats.first_stall_s = stats.wall_s, stats.stall_s
        self._loader = None
        if self._batches is None and self._feed is not None:
            self._left -= 1
            self._progress.add(self._numbers[self._feed.number], in_order=self._in_order)

    def __aiter__(self) -> LoaderIterator:
        return self

    async def __anext__(self) -> Any:
        if self._feed is None and isinstance(self._batches, WorkerBatches):
            self._start_feed(self._batches)
        if self._feed is None:
            try:
                return next(self)
            except StopIteration:
                raise StopAsyncIteration from None
        asked = time.perf_counter()
        try:
            batch = await anext(self._feed)
        except StopAsyncIteration:
            if not self._continues() and not self._starts_next_epoch():
                raise
            return await anext(self)
        self._returned(asked)
        return batch

    def _shutdown_workers(self) -> None:
        """End the workers, as trainers do."""
        if isinstance(self._batches, WorkerBatches):
            self._batches.stop_pull()
            self._batches.workers.close()


def _has_length(loader: DataLoader[Any]) -> bool:
    return loader._dataset_kind == _DatasetKind.Map or length_of(loader.dataset) is not None


def _has_indices(loader: DataLoader[Any]) -> bool:
    return loader._dataset_kind == _DatasetKind.Map and loader.batch_sampler is not None


# --- batches of a feeder ---


class _FeederEpochs:
    """Runs the epochs of a ``DataLoader`` on a ``Feeder``, in the order of the loader's sampler."""

    def __init__(self, loader: DataLoader[Any], **options: Any) -> None:
        if not _has_indices(loader):
            raise ValueError(
                "on_error=, cache=, engine= and threads= need a dataset with indices, in batches: leave them out "
                "with an IterableDataset or batch_size=None"
            )
        self._options = options
        self._make(loader)

    def _make(self, loader: DataLoader[Any]) -> None:
        from aiofeed.kernel.feeder.feeder import Feeder  # takes three quarters of the import of this module

        options = dict(self._options)
        threads, engine = options.pop("threads"), options.pop("engine")
        workers = loader.num_workers if threads is None else 0
        self._collate_fn = loader.collate_fn
        # The indices of the coming epoch; lists of them if a batch sampler of the user's makes the batches.
        self._listed: list[Any] = []
        self._of_one_size = type(loader.batch_sampler) is BatchSampler
        order: dict[str, Any] = {"batch_sampler": self._listed}
        if self._of_one_size:
            order = {"batch_size": loader.batch_size, "sampler": self._listed}
        self.feeder: Feeder[Any] = Feeder(
            FromDataset(loader.dataset, threads=1 if threads is None else threads),  # type: ignore[arg-type]
            **order,
            collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
            # Of a sampler's list each rank has its part already.
            shard=(0, getattr(loader.sampler, "num_replicas", 1)) if self._of_one_size else None,
            in_order=loader.in_order,
            engine=engine or cast("Any", f"process:{workers}" if workers else "thread"),
            **options,
        )

    def begin(
        self, loader: DataLoader[Any], indices: Iterator[Any], position: LoaderPosition
    ) -> tuple[FeedIterator[Any] | None, list[int]]:
        """Start an epoch; see ``next_part``."""
        if self._collate_fn is not loader.collate_fn:
            self._make(loader)
        self._indices = Indices(indices)
        self._first = _FIRST_PART_BATCHES if (length_of(loader) or _PART_BATCHES + 1) > _PART_BATCHES else _PART_BATCHES
        self._failures = FailureCounter(self.feeder._config.policy, len(self.feeder._config.source))
        self._failed_before, self._later, self._number = len(self.feeder.failures), position.later, position.batches
        for _ in range(self._number):
            self._indices.take()
            self._indices.taken.clear()
        if self._number and self._number == self._part_end(self._number - 1):
            # The state was saved before the next part was read: the generators have to be those of that time.
            return None, []
        return self.next_part()

    def _part_end(self, batch: int) -> int:
        """Return the end of the part with a batch. It depends on nothing else, so that a resume reads alike."""
        return min(max(self._first, 1 << batch.bit_length()), (batch // _PART_BATCHES + 1) * _PART_BATCHES)

    def next_part(self) -> tuple[FeedIterator[Any] | None, list[int]]:
        """Start an epoch of the feeder over the next batches of the sampler, which may be endless.

        Returns its iterator, ``None`` if nothing is left, and the numbers of its batches.
        """
        listing, taken, end = time.perf_counter(), self._indices.taken, self._part_end(self._number)
        # max_failures is for the epoch; the feeder counts those of a part.
        new = self.feeder.failures[self._failed_before :]
        self._failures.count(each.error for each in new)
        self._failed_before += len(new)
        if new and (error := self._failures.too_many(new[-1].error)):
            self._indices = Indices(iter(()))
            raise error
        while (known := len(taken)) < end - self._number:
            self._indices.take()
            if len(taken) == known:
                break
        part = {number: each for number, each in enumerate(taken, self._number) if number not in self._later}
        self._listed[:] = itertools.chain.from_iterable(part.values()) if self._of_one_size else part.values()
        if not part:
            if self._indices.cut:
                self._indices.end(self._number)
            return None, []
        iterator = iter(self.feeder)
        self._number += len(taken)
        taken.clear()
        iterator.add_order(listing)
        iterator.observer.resumed = bool(self._later) or next(iter(part)) > 0
        return iterator, list(part)
