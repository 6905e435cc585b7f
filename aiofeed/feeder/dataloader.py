"""``DataLoader``: torch's ``DataLoader`` with the same batches, and copies to a device, exact resume and caches."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind

from aiofeed.core.errors import StateError
from aiofeed.core.failure_policy import Action, FailurePolicy
from aiofeed.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES, Limits
from aiofeed.core.types import Transform, public
from aiofeed.feeder.feeder import Feeder
from aiofeed.feeder.iterator import Delivery, EpochObserver, FeedIterator
from aiofeed.feeder.prefetch import Prefetch, ThreadPull
from aiofeed.processes.loader_workers import random_state as rng
from aiofeed.processes.loader_workers.fetching import dataset_state
from aiofeed.processes.loader_workers.iterators import InProcessIterator, LoaderPosition, Progress, WorkerIterator
from aiofeed.processes.loader_workers.protocol import Answer
from aiofeed.processes.loader_workers.state import VERSION, LoaderState, OrderState
from aiofeed.processes.loader_workers.workers import LoaderWorkers
from aiofeed.runtime import machine
from aiofeed.runtime.queue import ReadyBatch
from aiofeed.runtime.threads import JOIN_S
from aiofeed.sources.dataset import FromDataset

if TYPE_CHECKING:
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.devices.resolve import Device

# Batches that a feeder gets at a time from a sampler without a length.
_PART_BATCHES = 1024
T_co = TypeVar("T_co", covariant=True)


@public
class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in replacement for ``torch.utils.data.DataLoader``: the same arguments and, bit for bit, the same batches.

    It draws from the random generators as torch's does, seeds its workers alike and gives batch k to worker k modulo
    ``num_workers``. Workers hand their batches over in shared memory that is reused. Ctrl-C, ``break`` and exceptions
    leave nothing behind; an exception of the dataset names the sample. ``async for`` works as well as ``for``.

    Args:
        dataset, ..., in_order: As for ``torch.utils.data.DataLoader``.
        device: Copy the tensors of each batch to this device; with workers on a side stream, ahead of the consumer.
        transform: Called with each batch, on the device if there is one.
        on_error: ``"skip"``, ``"replace"`` or a ``FailurePolicy`` for samples that fail; see ``Feeder``.
        cache: Where samples are kept after the first epoch; see ``Feeder``.
        engine: ``"thread"`` or ``"process:N"``; see ``Feeder``.
        threads: Number of threads that call the dataset, which must be thread-safe, at the same time.
        limits: ``Limits(prefetch_batches=, device_batches=)``; see ``Feeder``.

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
        engine: str | None = None,
        threads: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        if isinstance(in_order, str):
            raise TypeError(
                f"in_order must be a bool, got {in_order!r}: a DataLoader's workers make whole batches; aiofeed.Feeder "
                f'takes in_order="samples"'
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
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
        self.device = device
        self.transform = transform
        self.on_error = on_error
        self.cache = cache
        self.engine = engine
        self.threads = threads
        self.limits = limits
        # Public attributes are arguments: Lightning and Ignite pass them to `__init__` to make a loader again.
        self._bridge: Prefetch[Any] = Prefetch(
            (),
            device,
            transform,
            (limits or Limits()).prefetch_batches or PREFETCH_BATCHES,
            (limits or Limits()).device_batches or DEVICE_BATCHES,
        )
        # Workers of a complete epoch, for the next one.
        self._spare_workers: list[LoaderWorkers] = []
        self._progress: Progress | None = None
        # The thread that receives from persistent workers.
        self._pull: weakref.ref[ThreadPull] | None = None
        self._start: OrderState | None = None
        self._loaded: LoaderState | None = None
        self._loaded_progress: Progress | None = None
        self._feeder_epochs: _FeederEpochs | None = None
        if on_error != "raise" or cache is not None or engine is not None or threads is not None:
            self._feeder_epochs = _FeederEpochs(self)

    # --- iteration ---

    def __iter__(self) -> Any:
        """Start an epoch."""
        return self._iterate(ahead=self.device is not None or self.transform is not None)

    def __aiter__(self) -> Any:
        """Start an epoch for ``async for``. Without workers the dataset runs in the caller's thread."""
        return self._iterate(ahead=True)

    def _iterate(self, *, ahead: bool) -> Any:
        iterator = self._begin()
        if isinstance(iterator, WorkerIterator):
            pins = iterator._pin_memory and self.device is None
            return self._pulled(iterator, pins=pins) if ahead or pins else iterator
        if isinstance(iterator, InProcessIterator) and ahead:
            return _CopyingIterator(iterator, self._bridge)
        return iterator

    def _begin(self) -> Any:
        loaded = self._take_loaded()
        if loaded is None or loaded.start is None:
            if loaded is not None:
                loaded.now.restore_sampler(self)
            self._start = OrderState.of(self)
            iterator = self._new_iterator(LoaderPosition() if loaded is None else loaded.position)
        else:
            # The order of the epoch follows from the generators at its start.
            now, self._start = rng.random_state(), loaded.start
            try:
                loaded.start.restore_generators(self)
                loaded.start.restore_sampler(self)
                iterator = self._new_iterator(loaded.position)
            finally:
                rng.set_random_state(now)
        self._progress = self._loaded_progress = iterator.progress
        return iterator

    def _new_iterator(self, position: LoaderPosition) -> Any:
        if self._feeder_epochs is not None:
            if self._feeder_epochs.collate_fn is not self.collate_fn:
                self._feeder_epochs = _FeederEpochs(self)
            return self._feeder_epochs.begin(self, position)
        if not self.num_workers:
            return InProcessIterator(self, position)
        self.check_worker_number_rationality()
        if not self.persistent_workers:
            return WorkerIterator(self, position)
        if self._iterator is None or self._iterator.workers.ended:  # type: ignore[attr-defined]
            self._iterator = WorkerIterator(self, position)
        else:
            if self._pull is not None and (pull := self._pull()) is not None:
                pull.stop()
                pull.join(JOIN_S)
            self._iterator.restart(self, position)  # type: ignore[attr-defined]
        return self._iterator

    def _pulled(self, iterator: WorkerIterator, *, pins: bool) -> _PulledIterator:
        def start(received: _Received) -> FeedIterator[Any]:
            def new_pull(batches: object, *arguments: Any, **options: Any) -> ThreadPull:
                pull = ThreadPull(received.batches(pins=pins), *arguments, **options)
                iterator.unwanted = pull._unwanted
                self._pull = weakref.ref(pull)
                return pull

            return self._bridge.start(new_pull, partial(_PulledObserver, received))

        return _PulledIterator(_Received(iterator), start)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned, with the state of the random generators.

        The state survives JSON and ``torch.load(weights_only=True)`` if that of a stateful dataset or sampler does.
        """
        if self._loaded is not None and self._loaded_progress is None:
            return self._loaded.packed
        epoch, progress = None, self._progress
        if progress is not None and self._start is not None and not self._is_complete(progress):
            epoch = {"start": self._start.packed, **asdict(progress.position())}
        between = progress.states_between() if progress is not None and self.persistent_workers else []
        in_process = not self.num_workers and self._dataset_kind == _DatasetKind.Map
        return {
            "version": VERSION,
            "num_workers": self.num_workers,
            "batches": self._batches(),
            **OrderState.of(self).packed,
            "dataset": dataset_state(None, self.dataset) if in_process else None,
            "workers": between,
            "epoch": epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter()``; restore the random generators of this process at once.

        Raises:
            StateError: The state is damaged, or of a loader with other batches or another number of workers.
        """
        loaded = LoaderState.parse(state)
        differences = [
            f"{name}: {theirs} in the state, {ours} here"
            for name, theirs, ours in (
                ("num_workers", loaded.num_workers, self.num_workers),
                ("batches per epoch", loaded.batches, self._batches()),
            )
            if theirs != ours
        ]
        if differences:
            raise StateError(f"the state is of another DataLoader: {'; '.join(differences)}")
        for order in (loaded.now, loaded.start):
            if order is not None:
                order.check(self)
        self._loaded, self._loaded_progress = loaded, None
        loaded.now.restore_generators(self)

    def _take_loaded(self) -> LoaderState | None:
        """A loaded state counts until a batch was returned: some frameworks call ``iter`` twice."""
        loaded, progress = self._loaded, self._loaded_progress
        if loaded is None or progress is None:
            return loaded
        if progress.finished or progress.returned > loaded.position.returned:
            self._loaded = loaded = None
        return loaded

    def _batches(self) -> int | None:
        if self._dataset_kind == _DatasetKind.Iterable:
            return None  # its length may be inaccurate
        try:
            return len(self._index_sampler)
        except TypeError:
            return None

    def _is_complete(self, progress: Progress) -> bool:
        return progress.finished or progress.returned == self._batches()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the loader as it was before its first ``iter()``, and with the state that was loaded."""
        epoch = dict.fromkeys(("_iterator", "_pull", "_progress", "_start", "_loaded_progress"))
        return {**self.__dict__, **epoch, "_spare_workers": []}


# --- batches of worker processes, received in a thread ---


class _Received:
    """The batches of a ``WorkerIterator`` that were received and not handed out yet."""

    def __init__(self, iterator: WorkerIterator) -> None:
        self.iterator = iterator
        self._progress = iterator.progress
        self._answers: deque[tuple[int, Answer]] = deque()
        self._failed: int | None = None

    def batches(self, *, pins: bool) -> Iterator[Any]:
        """Yield the batches up to the first error of the dataset; ``pins``: in pinned memory."""
        iterator = self.iterator
        while True:
            try:
                number, answer = iterator.receive()
            except StopIteration:
                return
            try:
                batch = iterator.load(number, answer)
            except Exception:
                iterator.take(answer)
                self._failed = number
                raise
            iterator.take(answer)
            self._answers.append((number, answer))
            yield pin_memory(batch, iterator._pin_memory_device) if pins else batch
            del batch

    def handing_out(self) -> None:
        """The consumer gets the next batch. Requests a further one, as torch's iterator does."""
        number, answer = self._answers.popleft()
        self.iterator.returned(number, answer)
        self.iterator.request(number)

    def continues(self) -> bool:
        """Return whether ``batches`` may be called again after an error, as torch's iterator continues after one."""
        failed, self._failed = self._failed, None
        if failed is None or self._answers or self.iterator.progress is not self._progress:
            return False
        self.iterator.request(failed)
        return True


class _PulledObserver(EpochObserver):
    """Calls ``handing_out`` for each batch, in the consumer's thread."""

    def __init__(self, received: _Received, delivery: Delivery) -> None:
        super().__init__(delivery)
        self._received = received
        self._next = 0

    def handing_out(self, item: ReadyBatch) -> None:
        if item.number == self._next:
            self._next += 1
            self._received.handing_out()


class _PulledIterator:
    """Batches of worker processes that a thread receives ahead; after an error of the dataset another thread does."""

    def __init__(self, received: _Received, start: Callable[[_Received], FeedIterator[Any]]) -> None:
        self._received = received
        self._start = start
        self._feed = start(received)

    def __iter__(self) -> _PulledIterator:
        return self

    def __aiter__(self) -> _PulledIterator:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._feed)
        except StopIteration:
            if not self._received.continues():
                raise
        self._feed = self._start(self._received)
        return next(self._feed)

    def __len__(self) -> int:
        return len(self._received.iterator)

    async def __anext__(self) -> Any:
        try:
            return await anext(self._feed)
        except StopAsyncIteration:
            if not self._received.continues():
                raise
        self._feed = self._start(self._received)
        return await anext(self._feed)


# --- batches of the caller's thread ---


class _CopyingIterator:
    """Copies each batch of another iterator to the device and transforms it, in the caller's thread."""

    def __init__(self, iterator: Any, bridge: Prefetch[Any]) -> None:
        self._iterator = iterator
        self._copier, self._transform = bridge.new_copier()

    def __iter__(self) -> _CopyingIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        if self._copier is not None:
            self._copier.wait_for_caller()
            batch = self._copier.deliver(self._copier.issue(batch))
            self._copier.release()
        return batch if self._transform is None else self._transform(batch)

    def __aiter__(self) -> _CopyingIterator:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    async def __anext__(self) -> Any:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


# --- batches of a feeder ---


class _FeederEpochs:
    """Runs the epochs of a ``DataLoader`` on a ``Feeder``, in the order of the loader's sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if loader._dataset_kind == _DatasetKind.Iterable or loader.batch_sampler is None:
            raise ValueError(
                "on_error=, cache=, engine= and threads= need a dataset with indices, in batches: leave them out "
                "with an IterableDataset or batch_size=None"
            )
        workers = loader.num_workers if loader.threads is None else 0
        self.collate_fn = loader.collate_fn
        # The indices of the coming epoch; lists of them if a batch sampler of the user's makes the batches.
        self._listed: list[Any] = []
        self._of_one_size = type(loader.batch_sampler) is BatchSampler
        order: dict[str, Any] = {"batch_sampler": self._listed}
        if self._of_one_size:
            order = {"batch_size": loader.batch_size, "sampler": self._listed}
        self._feeder: Feeder[Any] = Feeder(
            FromDataset(loader.dataset, threads=loader.threads or 1),  # type: ignore[arg-type]
            **order,
            collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
            device=loader.device,
            transform=loader.transform,
            on_error=loader.on_error,
            cache=loader.cache,
            limits=loader.limits,
            shard=None,
            in_order=loader.in_order,
            engine=cast("Any", loader.engine or (f"process:{workers}" if workers else "thread")),
        )

    def begin(self, loader: DataLoader[Any], position: LoaderPosition) -> _FeederEpoch:
        """Start an epoch; draws from the generators as torch's iterator does."""
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        batches = itertools.islice(loader._index_sampler, position.batches, None)
        return _FeederEpoch(self._start, batches, max(loader._batches() or 0, _PART_BATCHES), Progress(position))

    def _start(self, part: list[list[int]]) -> FeedIterator[Any]:
        self._listed[:] = itertools.chain.from_iterable(part) if self._of_one_size else part
        return iter(self._feeder)


class _FeederEpoch:
    """One epoch: an epoch of the feeder for each part of the sampler, which may be endless. Counts the batches."""

    def __init__(
        self,
        start: Callable[[list[list[int]]], FeedIterator[Any]],
        sampler: Iterator[list[int]],
        part_batches: int,
        progress: Progress,
    ) -> None:
        self._start = start
        self._sampler = sampler
        self._part_batches = part_batches
        self.progress = progress
        self._part_end = progress.batches
        self._batches: Any = None
        self._next_part()

    def _next_part(self) -> None:
        """Start the feeder with the next part if all batches of the last one were returned."""
        if self.progress.batches == self._part_end:
            part = list(itertools.islice(self._sampler, self._part_batches))
            if part or self._batches is None:
                self._part_end += len(part)
                self._batches = self._start(part)

    def __iter__(self) -> _FeederEpoch:
        return self

    def __aiter__(self) -> _FeederEpoch:
        return self

    def __next__(self) -> Any:
        self._next_part()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.progress.finished = True
            raise
        self.progress.add(self.progress.batches, in_order=True)
        return batch

    async def __anext__(self) -> Any:
        self._next_part()
        try:
            batch = await anext(self._batches)
        except StopAsyncIteration:
            self.progress.finished = True
            raise
        self.progress.add(self.progress.batches, in_order=True)
        return batch
