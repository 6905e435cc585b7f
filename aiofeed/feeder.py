"""The face: ``Feeder``. Iteration, epochs and what a user may ask; the mechanism is on the floors below."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from aiofeed import lifetime, machine
from aiofeed.arguments import (
    a_bool,
    a_callable,
    a_seed,
    adopt_cache,
    adopt_collate,
    adopt_decoder,
    adopt_source,
    an_engine,
    an_int,
    refuse_dataloader_arguments,
)
from aiofeed.config import Limits, ResolvedLimits, positive_int, resolve
from aiofeed.counters import Counters, FeedStatistics
from aiofeed.devices import resolve_devices
from aiofeed.failures import Failure, FailureLog
from aiofeed.host_backend import HostBackend
from aiofeed.items import Failed, Ready
from aiofeed.iterator import FeedIterator, see_end
from aiofeed.ordering import Order
from aiofeed.pipeline import Machinery, Recipe, check_resident, check_travels, machinery
from aiofeed.policy import Action, FailurePolicy, as_policy
from aiofeed.schedule import Shuffle, fingerprint
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors
from aiofeed.state import Account, Progress, SavedState
from aiofeed.static_copier import check_static, statics_for
from aiofeed.stream import Stream
from aiofeed.types import Source

if TYPE_CHECKING:
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.devices import Device
    from aiofeed.sources.dataset import MapDataset
    from aiofeed.types import Decoder

BatchT = TypeVar("BatchT")

log = logging.getLogger("aiofeed")

# How long close() waits for threads that are at a sample they cannot leave.
JOIN_S = 5.0


class Feeder(Generic[BatchT]):
    """Reads, decodes and collates the next batches, and copies them to the device, while the present one is used.

    Iterate it with ``for`` or ``async for``; each ``iter()`` is one epoch. Reading, decoding and copying run in
    threads of their own, never in the caller's event loop.

    Args:
        source: a ``Source`` (``ImageFolder``, ``Files``, your own), a torch map-style ``Dataset``, or ``Tensors``.
        decode: a ``Decoder``, ``DecodeImage(size=224)`` say; none for a ``Dataset``, whose items come decoded.
        batch_size: samples per batch.
        shuffle: another order each epoch: ``True`` for that of ``torch.randperm`` seeded with ``seed + epoch``,
            "keyed" for one that is computed per position and stores nothing.
        sampler: indices in an order of your own, listed once per epoch and not sharded again; excludes ``shuffle``.
        seed: of the order and of every sample's own random numbers.
        drop_last: leave out a last batch that is not full, and what does not fill one on every rank.
        pad: make ranks even by repeating the head of the epoch's list (by cutting, with ``drop_last``). ``False``
            gives each sample once; ranks may then differ by a batch.
        collate_fn: makes a batch of a list of samples; default: what torch's ``default_collate`` gives.
        device: ``None`` for host tensors, ``"auto"`` for the accelerator if there is one, or a device. A list of
            devices: each batch is a tuple with one part per device, split as ``scatter`` does it.
        transform: applied to each batch on the device, on the side stream (on the host: in the consumer's thread);
            with several devices, to each part on its own.
        on_error: what a sample that cannot be read or decoded does: "raise" at the ``for`` line, "skip", "replace",
            or a ``FailurePolicy``, which also has retries and time limits.
        cache: keep decoded samples: "host" in memory, ``HostCache(max_bytes)`` within a limit, ``DiskCache(path)`` in a
            file. Samples are kept as they are met; random augmentation comes after, in the first epoch too.
        limits: what may be used at most; chosen at run time by default.
        shard: "auto" asks ``torch.distributed``, then ``RANK`` and ``WORLD_SIZE``, when it is first needed, and
            keeps the answer; (rank, world_size) says it; ``None`` feeds everything to everybody.
        in_order: ``False`` hands out whichever batch is finished, so that a slow file holds up its own batch only.
        engine: "thread" reads and decodes in threads of this process; "process", or "process:4" for four of them, in
            processes of their own, which leave the GIL to the training loop. They share ``read_concurrency`` and
            ``decode_threads``, and each one beyond the first adds a batch to ``prefetch_batches``; a ``Dataset`` has
            a copy, with ``threads`` of its own, in each. Source, decoder and ``collate_fn`` are sent there by pickle,
            as they are at ``iter()``.
        static_batches: hand every batch out in the same tensors, for CUDA graphs: valid until the next ``next``, at
            fixed addresses for the feeder's life. Costs a copy within the device per batch. Needs ``drop_last=True``
            (or a length that ``batch_size`` divides) and batches that are all alike; refuses ``on_error="skip"``.

    A batch is what ``DataLoader`` would give. With ``DecodeImage`` and no ``collate_fn`` the images are uint8
    [N, 3, H, W] in channels_last memory. A batch that is kept is never overwritten, ``static_batches`` excepted.

    Raises:
        TypeError: an argument of the wrong kind, one of ``DataLoader``'s that makes no sense here, or one that cannot
            be sent to a process.
        ValueError: a value out of range, or a device that does not exist.
    """

    def __init__(
        self,
        source: Source[Any] | MapDataset[Any] | FromDataset | Tensors,
        *,
        decode: Decoder[Any, Any] | None = None,
        batch_size: int,
        shuffle: Shuffle = False,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        collate_fn: Callable[[list[Any]], BatchT] | None = None,
        device: Device | Sequence[Device] = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: Action | FailurePolicy = "raise",
        cache: Literal["host"] | HostCache | DiskCache | None = None,
        limits: Limits | None = None,
        shard: tuple[int, int] | Literal["auto"] | None = "auto",
        in_order: bool = True,
        engine: str = "thread",
        static_batches: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_dataloader_arguments(unknown)
        self._source = adopt_source(source)
        self._length = len(self._source)
        self._order = Order(
            length=self._length,
            batch_size=positive_int("batch_size", batch_size),
            shuffle=_a_shuffle(shuffle),
            seed=a_seed(seed),
            drop_last=a_bool("drop_last", drop_last),
            pad=a_bool("pad", pad),
            sampler=sampler,
            shard=shard,
        )
        self._device = device
        self._static_batches = a_bool("static_batches", static_batches)
        self._recipe = Recipe(
            source=self._source,
            decode=adopt_decoder(self._source, decode),
            batch_size=batch_size,
            collate_fn=adopt_collate(self._source, collate_fn),
            backend=resolve_devices(device),
            transform=a_callable("transform", transform),
            limits=_resolve_limits(limits, batch_size, self._source),
            in_order=a_bool("in_order", in_order),
            length=self._length,
            policy=as_policy(on_error),
            engines=an_engine(engine),
            said=limits or Limits(),
        )
        check_travels(self._recipe)
        if cache is not None:
            self._recipe = replace(
                self._recipe,
                cache=adopt_cache(
                    cache,
                    self._source,
                    self._recipe.decode,
                    engines=self._recipe.engines,
                    fingerprint=lambda: _fingerprint(self._source, self._length),
                ),
            )
        if static_batches:
            check_static(
                drop_last=drop_last,
                length=None if sampler is not None else self._length,
                batch_size=batch_size,
                policy=self._recipe.policy,
            )
            self._recipe = _with_statics(self._recipe)
        check_resident(self._recipe)
        self._failures = FailureLog(self._recipe.policy)
        self._progress = Progress()
        self._fingerprint: str | None = None
        self._past = Counters()
        self._reset()

    def _reset(self) -> None:
        self._pipeline: Machinery | None = None
        self._stream: Stream | None = None
        self._iterator: weakref.ref[FeedIterator[BatchT]] | None = None
        self._account: Account | None = None
        self._counters = Counters()
        # Epochs that were finished one after the other, and the last that `epochs` is going to ask for.
        self._in_a_row = 0
        self._bound: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A feeder travels to other processes without its threads; there it begins where this one stands."""
        kept = self.__dict__ | {"_recipe": replace(self._recipe, backend=None, statics=())}
        for name in ("_pipeline", "_stream", "_iterator", "_account", "_counters", "_in_a_row", "_bound"):
            del kept[name]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recipe = replace(self._recipe, backend=resolve_devices(self._device))
        if self._static_batches:
            self._recipe = _with_statics(self._recipe)
        self._reset()

    def __len__(self) -> int:
        """Batches per epoch of this rank; it does not change after a resume."""
        return self._order.schedule().stripe().batches

    def __iter__(self) -> FeedIterator[BatchT]:
        """Begin an epoch; an iterator that is still open is closed."""
        try:
            return self._begin()
        except BaseException:  # Ctrl-C, say: nobody gets an iterator, so what was started for it ends
            self._stop("its epoch did not begin")
            raise

    def __aiter__(self) -> FeedIterator[BatchT]:
        """Begin an epoch; an iterator that is still open is closed."""
        return iter(self)

    def __repr__(self) -> str:
        return f"Feeder({self._source!r}, batch_size={self._recipe.batch_size})"

    def _begin(self) -> FeedIterator[BatchT]:
        if not self._conclude():
            self._close_iterator("a newer iterator of the same feeder was started")
        begun = self._order.begin(self._progress.next_position())
        start = begun.start
        claimed, stream = None, self._stream
        if self._pipeline is not None and self._pipeline.reusable() and stream is not None:
            claimed = stream.claim(begun.schedule, start) if begun.permutation is None else None
        if claimed is None or stream is None:
            claimed = Counters()
            stream = Stream(begun.schedule, start, claimed, begun.permutation)
        if begun.permutation is None:
            # Before it starts: a short epoch is planned at once, and then it is too late.
            self._look_ahead(stream, start.epoch)
        if stream is not self._stream:
            self._start_stream(stream)
        assert self._pipeline is not None
        self._pipeline.delivery.begin()
        self._past.add(self._counters)
        self._counters = claimed
        self._progress.begin(start.epoch)
        self._failures.begin()
        self._account = Account(begun.schedule, start, self._recipe.in_order)
        iterator: FeedIterator[BatchT] = FeedIterator(
            self._pipeline.delivery, claimed, observer=_Pass(self, self._account)
        )
        self._iterator = weakref.ref(iterator)
        self._pipeline.watch(iterator)
        return iterator

    def _conclude(self) -> bool:
        """See the end of a pass that handed out its last batch to one who counts to ``len()`` and never asked for more.

        Whether the pass is over in good order, so that what was read ahead may be used.
        """
        account, pipeline = self._account, self._pipeline
        if account is None or pipeline is None or not account.complete or not pipeline.reusable():
            return False
        if (iterator := self._live_iterator()) is not None:
            ended = iterator.conclude()
        else:
            ended = account.ended or see_end(pipeline.delivery.handoff)
        if ended and not account.ended:
            self._ended(account)
        return ended

    def _ended(self, account: Account) -> None:
        """The end of a pass was seen."""
        account.ended = True
        self._failures.summarise(account.start.epoch, self._counters)
        # Done with: that it is dropped after its end says nothing.
        self._iterator = None
        self._in_a_row += 1

    def _start_stream(self, stream: Stream) -> None:
        old = self._pipeline
        if old is not None and old.reusable() and self._stream is not None and self._stream.drained():
            self._pipeline = old
        else:
            # Whatever was read ahead belongs to an epoch that is not wanted any more.
            if old is not None and not old.inherited:
                old.stop()
            self._pipeline = machinery(self._recipe, after=old)
            self._pipeline.watch(self)
        self._stream = stream
        self._pipeline.start(stream)

    def _look_ahead(self, stream: Stream, epoch: int) -> None:
        """Allow the next epochs to be begun while this one is consumed, where they are sure or likely to come."""
        if not stream.schedule.stripe().batches:
            return  # planning epochs without a batch waits for nothing: all of them would be, at once
        if self._bound is not None:
            stream.allow(self._bound)
        elif self._in_a_row:
            stream.allow(epoch + 1)

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or was last; before the first ``iter()``, the one it begins."""
        return self._progress.current

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` begins; without it they advance by themselves.

        A loaded position in the same epoch stays, in any other it is discarded.
        """
        self._progress.set_epoch(an_int("epoch", epoch), live=self._live_iterator() is not None)

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs that are left of ``n``, the loaded one first: iterate the feeder in each.

        From the end of one to the first batch of the next takes no longer than from batch to batch: the next is
        begun while the last batches are consumed. Nothing is read beyond the last epoch.

        Raises:
            TypeError, ValueError: ``n`` is no positive int.
        """
        last = positive_int("n", n) - 1
        return self._epochs(last)

    def _epochs(self, last: int) -> Iterator[int]:
        epoch = self._order.settle(self._progress.next_position()).epoch
        try:
            while epoch <= last:
                self._bound = last
                yield epoch
                epoch += 1
                if self._progress.next_position().epoch != epoch:
                    self.set_epoch(epoch)
        finally:
            self._bound = None

    def state_dict(self) -> dict[str, Any]:
        """Where the user stands: batches handed out count, those read ahead do not.

        Plain numbers, strings and lists: it survives JSON and ``torch.load(weights_only=True)``. Every rank's is the
        same, with ``in_order=True``. Saved once the last batch of an epoch was handed out, it is the start of the next.
        """
        return self._state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where ``state_dict`` stood, whatever the concurrency.

        World size and batch size may be others than they were: what all ranks had been handed is not seen again in
        that epoch, what they had not is.

        Raises:
            StateError: it is no state of such a feeder; the message says what differs.
        """
        saved = SavedState.from_dict(state_dict)
        saved.check(self._state())
        if saved.sampler:
            self._order.restore_sampler(saved.sampler)
        self._progress.load(saved.position)

    def _state(self) -> SavedState:
        if self._fingerprint is None:
            self._fingerprint = _fingerprint(self._source, self._length)
        position = self._progress.reported
        return SavedState(
            self._order.schedule(self._length),
            position,
            self._fingerprint,
            self._recipe.in_order,
            self._order.saved_sampler(position.epoch),
        )

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Where the time went: of the current or last epoch, or of the feeder's life with ``total=True``."""
        counters = Counters()
        if total:
            counters.add(self._past)
        counters.add(self._counters)
        limits, pipeline = self._recipe.limits, self._pipeline
        tuner = pipeline.tuner if pipeline is not None else None
        gil = tuner.decoding.gil if tuner is not None else None
        return FeedStatistics(
            **counters.totals(),  # type: ignore[arg-type]
            queue_depth=pipeline.queue_depth if pipeline is not None else 0,
            read_concurrency=limits.read_concurrency if tuner is None else tuner.reading.concurrency,
            decode_threads=limits.decode_threads if tuner is None else tuner.lanes,
            gil_us=gil.held_s * 1e6 if gil is not None else 0.0,
            chunk_size=pipeline.chunk_size if pipeline is not None else 0,
        )

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The samples that failed so far, as their batches were handed out: key, index, stage, error and epoch.

        At most the first 10,000; ``statistics(total=True).failures`` counts them all.
        """
        return self._failures.failures

    def close(self) -> None:
        """Stop the threads and wait for them, 5 s at most. Idempotent; the next ``iter()`` starts anew.

        A thread that is inside a read or a decode it cannot leave is left behind, with a log line; it holds up
        neither this call beyond that time nor the interpreter's exit.
        """
        self._close(JOIN_S)

    def _close(self, limit_s: float) -> None:
        if (pipeline := self._stop("the feeder was closed")) is not None and not pipeline.join(limit_s):
            log.warning("a read or decode did not end within %.0f s of close() and is left behind", limit_s)

    async def aclose(self) -> None:
        """``close`` for async code: never blocks the caller's event loop."""
        if (pipeline := self._stop("the feeder was closed")) is not None:
            try:
                await asyncio.wait_for(pipeline.stopped(), JOIN_S)
            except TimeoutError:
                log.warning("a read or decode did not end within %.0f s of aclose() and is left behind", JOIN_S)

    def __enter__(self) -> Feeder[BatchT]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C or sys.exit: the process is about to end, and waits no longer than it would without `with`.
        leaving = kind is not None and not issubclass(kind, Exception)
        self._close(lifetime.EXIT_S if leaving else JOIN_S)

    async def __aenter__(self) -> Feeder[BatchT]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _stop(self, reason: str) -> Machinery | None:
        self._close_iterator(reason)
        pipeline = self._pipeline
        if pipeline is None or pipeline.inherited:
            return None
        pipeline.stop()
        return pipeline

    def _close_iterator(self, reason: str) -> None:
        if (iterator := self._live_iterator()) is not None:
            iterator.close(reason)
        if self._iterator is not None and (iterator is not None or self._iterator() is None):
            self._in_a_row = 0
        self._iterator = None

    def _live_iterator(self) -> FeedIterator[BatchT] | None:
        iterator = self._iterator() if self._iterator is not None else None
        return iterator if iterator is not None and iterator.live else None


class _Pass:
    """What the feeder learns from its iterator. Keeps the feeder alive while one iterates it."""

    def __init__(self, feeder: Feeder[Any], account: Account) -> None:
        self._feeder = feeder
        self._account = account

    def handing_out(self, item: Ready) -> None:
        feeder = self._feeder
        if item.failures:
            feeder._counters.failures += feeder._failures.add(item.failures, self._account.start.epoch)
        if not self._account.began:
            feeder._progress.follow(self._account)
            feeder._order.began()
        if self._account.last_to_come and feeder._pipeline is not None:
            # The iterator may be dropped then: all it could still give is the end.
            feeder._pipeline.watch(feeder)

    def handed_out(self, item: Ready) -> None:
        self._account.handed_out(item.number)

    def failed(self, item: Failed) -> None:
        self._feeder._counters.failures += self._feeder._failures.add(item.failures, self._account.start.epoch)
        self._feeder._progress.failed(self._account)
        self._feeder._in_a_row = 0

    def ended(self) -> None:
        feeder = self._feeder
        feeder._ended(self._account)
        if feeder._pipeline is not None:
            feeder._pipeline.watch(feeder)


def _fingerprint(source: Source[Any] | FromDataset | Tensors, length: int) -> str:
    own = getattr(source, "fingerprint", None)
    if own is not None:
        return str(own())
    kind = type(source.dataset) if isinstance(source, FromDataset) else type(source)
    return fingerprint(kind.__qualname__, length, lambda index: str(source.key(index)))


def _with_statics(recipe: Recipe) -> Recipe:
    backend = recipe.backend or HostBackend()
    return replace(recipe, backend=backend, statics=statics_for(backend))


def _a_shuffle(value: object) -> Shuffle:
    if value is True or value is False or value == "keyed":
        return value
    raise TypeError(f"shuffle must be True, False or 'keyed', got {value!r}")


def _resolve_limits(limits: Limits | None, batch_size: int, source: object) -> ResolvedLimits:
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits must be aiofeed.Limits(...), got {limits!r}")
    return resolve(
        limits or Limits(),
        batch_size=batch_size,
        cpus=machine.cpus(),
        free_memory=machine.free_memory(),
        most_threads=source.threads if isinstance(source, FromDataset) else None,
    )
