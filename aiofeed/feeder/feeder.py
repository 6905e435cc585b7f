"""The face: ``Feeder``. Iteration, epochs and what a user may ask; the mechanism is on the floors below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, TypeVar

from aiofeed.core.failure_policy import Action, FailurePolicy
from aiofeed.core.failures import Failure, FailureLog
from aiofeed.core.limits import Limits
from aiofeed.core.statistics import EpochStats, FeedStatistics
from aiofeed.core.types import Source, public
from aiofeed.core.validation import check_bool, check_int, check_positive_int, check_seed
from aiofeed.devices.resolve import resolve_devices
from aiofeed.feeder.arguments import a_shuffle, adopt_source, refuse_foreign_arguments
from aiofeed.feeder.config import FeederConfig, fingerprint_of, new_config, renew_statics
from aiofeed.feeder.iterator import FeedIterator
from aiofeed.feeder.session import FeederSession
from aiofeed.runtime import threads
from aiofeed.runtime.threads import JOIN_S
from aiofeed.sampling.feed_order import FeedOrder
from aiofeed.sampling.schedule import Shuffle
from aiofeed.sampling.state import Checkpoint, SavedState
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    import typing_extensions

    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.core.types import Decoder, RandomDecoder
    from aiofeed.devices.resolve import Device
    from aiofeed.sources.dataset import MapDataset

    # Without its default `feeder = Feeder(...)` would need an annotation wherever no collate_fn says what a batch is.
    BatchT = typing_extensions.TypeVar("BatchT", default=Any)
else:
    BatchT = TypeVar("BatchT")


@public
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
            file, "device" all of them where batches are wanted: once an epoch's samples are there, its batches are
            views of a permuted buffer, as those of ``Tensors``. Samples are kept as they are met; random augmentation
            comes after, in the first epoch too ("device" has none but ``transform``). Of a ``Dataset`` the items
            are kept: what it drew for one the first time is seen in all epochs.
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
        decode: Decoder[Any, Any] | RandomDecoder[Any, Any] | None = None,
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
        cache: Literal["host", "device"] | HostCache | DiskCache | None = None,
        limits: Limits | None = None,
        shard: tuple[int, int] | Literal["auto"] | None = "auto",
        in_order: bool = True,
        engine: str = "thread",
        static_batches: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_foreign_arguments(unknown, known=Feeder.__init__.__kwdefaults__ or ())
        self._source = adopt_source(source)
        self._length = len(self._source)
        batch_size = check_positive_int("batch_size", batch_size)
        self._order = FeedOrder(
            length=self._length,
            batch_size=batch_size,
            shuffle=a_shuffle(shuffle),
            seed=check_seed(seed),
            drop_last=check_bool("drop_last", drop_last),
            pad=check_bool("pad", pad),
            sampler=sampler,
            shard=shard,
        )
        config = new_config(
            self._source,
            length=self._length,
            decode=decode,
            batch_size=batch_size,
            drop_last=drop_last,
            sampled=sampler is not None,
            collate_fn=collate_fn,
            device=device,
            transform=transform,
            on_error=on_error,
            cache=cache,
            limits=limits,
            in_order=in_order,
            engine=engine,
            static_batches=static_batches,
        )
        self._device = device
        self._progress = Checkpoint()
        self._failures = FailureLog(config.policy)
        self._past = EpochStats()
        self._fingerprint: str | None = None
        self._session = self._new_session(config)

    def _new_session(self, config: FeederConfig) -> FeederSession[BatchT]:
        return FeederSession(
            config, order=self._order, progress=self._progress, failures=self._failures, past=self._past
        )

    @property
    def _config(self) -> FeederConfig:
        return self._session.config

    def __getstate__(self) -> dict[str, Any]:
        """A feeder travels to other processes without its threads; there it begins where this one stands."""
        kept = self.__dict__.copy()
        config = kept.pop("_session").config
        return kept | {
            "config": replace(config, backend=None, statics=()),
            "static": bool(config.statics),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        config, static = state.pop("config"), state.pop("static")
        self.__dict__.update(state)
        config = replace(config, backend=resolve_devices(self._device))
        self._session = self._new_session(renew_statics(config) if static else config)

    def __len__(self) -> int:
        """Batches per epoch of this rank; it does not change after a resume."""
        return self._order.schedule().shard().batches

    def __iter__(self) -> FeedIterator[BatchT]:
        """Begin an epoch; an iterator that is still open is closed."""
        return self._session.begin()

    def __aiter__(self) -> FeedIterator[BatchT]:
        """Begin an epoch; an iterator that is still open is closed."""
        return iter(self)

    def __repr__(self) -> str:
        return f"Feeder({self._source!r}, batch_size={self._config.batch_size})"

    @property
    def batch_size(self) -> int:
        """Samples per batch; for another, make another feeder, which may load this one's state."""
        return self._config.batch_size

    @property
    def dataset(self) -> Any:
        """The ``Dataset`` or ``Source`` that samples come from; ``len(feeder.dataset)`` is how many there are."""
        return getattr(self._source, "dataset", self._source)

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or was last; before the first ``iter()``, the one it begins."""
        return self._progress.current_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` begins; without it they advance by themselves.

        A loaded position in the same epoch stays, in any other it is discarded.
        """
        self._progress.set_epoch(check_int("epoch", epoch), live=self._session.live)

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs that are left of ``n``, the loaded one first: iterate the feeder in each.

        From the end of one to the first batch of the next takes no longer than from batch to batch: the next is
        begun while the last batches are consumed. Nothing is read beyond the last epoch.

        Raises:
            TypeError, ValueError: ``n`` is no positive int.
        """
        return self._session.epochs(check_positive_int("n", n) - 1)

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
        saved.check_compatible(self._state())
        if saved.sampler:
            self._order.load_sampler_state(saved.sampler)
        self._progress.load(saved.position)

    def _state(self) -> SavedState:
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._source, self._length)
        position = self._progress.position
        schedule, sampler = self._order.schedule(self._length), self._order.sampler_state(position.epoch)
        return SavedState(schedule, position, self._fingerprint, self._config.in_order, sampler)

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Where the time went: of the current or last epoch, or of the feeder's life with ``total=True``."""
        return self._session.statistics(total)

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
        self._session.close(JOIN_S)

    async def aclose(self) -> None:
        """``close`` for async code: never blocks the caller's event loop."""
        await self._session.aclose(JOIN_S)

    def __enter__(self) -> Feeder[BatchT]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C or sys.exit: the process is about to end, and waits no longer than it would without `with`.
        leaving = kind is not None and not issubclass(kind, Exception)
        self._session.close(threads.EXIT_S if leaving else JOIN_S)

    async def __aenter__(self) -> Feeder[BatchT]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
