"""``Feeder``, the public class: arguments, epochs, state and statistics. ``session.py`` runs the epochs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from aiofeed import _hint_at, _load_addon
from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.failures import Action, Failure, FailureLog, FailurePolicy
from aiofeed.kernel.core.limits import Limits
from aiofeed.kernel.core.statistics import EpochStats, FeedStatistics
from aiofeed.kernel.core.types import hides_secrets, public
from aiofeed.kernel.core.validation import (
    check_bool,
    check_epoch,
    check_int_from,
    check_positive_int,
    explain_arguments,
)
from aiofeed.kernel.feeder.arguments import Arguments, FeederConfig, Processes, backend_of, log, new_config
from aiofeed.kernel.feeder.iterator import FeedIterator
from aiofeed.kernel.feeder.rules import check
from aiofeed.kernel.feeder.session import FeederSession, OpenEpoch, Steps
from aiofeed.kernel.runtime import threads
from aiofeed.kernel.runtime.threads import JOIN_S
from aiofeed.kernel.sampling.progress import Checkpoint, Trail

if TYPE_CHECKING:
    from typing import Required, TypeAlias, Unpack, overload

    import torch
    import typing_extensions
    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import IterableDataset

    from aiofeed.arrays.arrays import Arrays
    from aiofeed.cache.disk import DiskCache, EncodedCache
    from aiofeed.cache.host import HostCache
    from aiofeed.kernel.core.types import Decoder, RandomDecoder, Source
    from aiofeed.kernel.decoders.image import DecodeImage
    from aiofeed.kernel.devices.resolve import Device
    from aiofeed.kernel.sampling.lister import Plan
    from aiofeed.kernel.sampling.schedule import Shuffle
    from aiofeed.kernel.sampling.state import SavedState
    from aiofeed.kernel.sources.dataset import FromDataset, MapDataset
    from aiofeed.kernel.sources.image_folder import ImageFolder
    from aiofeed.media.clips import Clips
    from aiofeed.mixtures.mixture import Mixture
    from aiofeed.reports.explanation import Explanation
    from aiofeed.reports.headroom import Headroom
    from aiofeed.reports.progress import ProgressFeed
    from aiofeed.reports.step_samples import StepSample
    from aiofeed.reports.timeline import Timeline
    from aiofeed.resident.tensors import Tensors
    from aiofeed.streams.stream import Stream
    from aiofeed.tables.table import Table
    from aiofeed.tokens.windows import Tokens
    from aiofeed.workers.ray.cluster import RayEngine

    EncodedT = TypeVar("EncodedT")
    Encoded: TypeAlias = Source[EncodedT] | IterableDataset[EncodedT] | Mixture
    Decode: TypeAlias = Decoder[EncodedT, Any] | RandomDecoder[EncodedT, Any]
    Gathered: TypeAlias = Arrays | Tensors | Tokens | Table | Clips
    Decoded: TypeAlias = MapDataset[Any] | FromDataset | Gathered | Stream | IterableDataset[Any] | Mixture
    Shard: TypeAlias = tuple[int, int] | tuple[str | tuple[str, ...], DeviceMesh] | DeviceMesh | Literal["auto"] | None
    SequenceSplit: TypeAlias = (
        tuple[int | str, int | DeviceMesh] | tuple[int | str, int | DeviceMesh, Literal["zigzag"]]
    )
    # A literal, so that a typing error such as "processes" is a type error.
    Engine: TypeAlias = (
        Literal["thread", "process", "process:2", "process:4", "process:8", "process:16", "ray"] | Processes | RayEngine
    )

    class NoSuchArgument:
        """What an argument of another name would have to be, so that pyright names it in place of all overloads."""

    class _Options(typing_extensions.TypedDict, total=False, extra_items=NoSuchArgument):  # type: ignore[call-arg]
        """Arguments of ``Feeder`` that do not change the type of its batches."""

        batch_size: int | Plan | None
        shuffle: Shuffle
        sampler: Iterable[int] | None
        weights: Sequence[float] | torch.Tensor | NDArray[Any] | None
        batch_sampler: Iterable[Sequence[int]] | None
        seed: int
        drop_last: bool
        pad: bool
        on_error: Action | FailurePolicy
        cache: Literal["host", "device"] | HostCache | DiskCache | EncodedCache | None
        limits: Limits | None
        shard: Shard
        split_sequence: SequenceSplit | None
        exclude: Iterable[int | str] | None
        in_order: bool | Literal["samples"]
        engine: Engine
        static_batches: bool
        timeline: bool

    # Without the default, `feeder = Feeder(...)` would need an annotation if there is no collate_fn.
    BatchT = typing_extensions.TypeVar("BatchT", default=Any)

    class _OneDevice(_Options, total=False):
        """And those of batches on one device that come as they are collated."""

        device: Device
        transform: None

    class _Transformed(_Options, Generic[BatchT], total=False):
        """And those of batches on one device that a ``transform`` replaces."""

        device: Device
        collate_fn: Callable[[list[Any]], Any] | None
        transform: Required[Callable[[Any], BatchT]]

    class _Replaced(_Options, total=False):
        """And those that make another batch, of any type."""

        collate_fn: Callable[[list[Any]], Any] | None
        transform: Callable[[Any], Any] | None

    class _Devices(_Replaced, total=False):
        """And those of batches with a part for each device."""

        device: Required[Sequence[Device]]
else:
    BatchT = TypeVar("BatchT")


@public
@explain_arguments(partial(_hint_at, "arguments", ()), hint=partial(_hint_at, "positions"))
class Feeder(Generic[BatchT]):
    """Reads, decodes and collates batches ahead and copies them to a device while the training step runs.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")  # photos/<class>/<name>.jpg
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=32, shuffle=True)
        for images, labels in feeder:
            print(images.shape, labels)  # uint8 [N, 3, 224, 224], int64 [N]
        ```

    Iterate it with ``for`` or ``async for``; each ``iter()`` is one epoch. Reading, decoding and copying run in threads
    of their own, never in the caller's event loop.

    Args:
        source: A ``Source`` (``ImageFolder``, ``Files`` or your own), a torch map-style ``Dataset``, ``Tensors``,
            ``Arrays``, ``Tokens``, a ``Table``, ``Clips`` of videos, a ``Mixture`` of several sources, a ``Stream``, or
            an ``IterableDataset``, which becomes a ``Stream``.
        decode: A ``Decoder``, e.g. ``DecodeImage(size=224)``. Leave it out for a ``Dataset``, which returns decoded
            items, for ``Arrays``, ``Tokens``, ``Clips`` and a ``Table`` of numbers, and for a ``Stream`` of decoded
            items.
        batch_size: Samples per batch; or a plan that forms batches by the lengths of samples: ``Buckets``,
            ``TokenBudget``, ``Balanced`` or ``Pack``.
        batch_sampler: An iterable of lists of indices, such as torch's ``BatchSampler``, listed once per epoch. Rank r
            of R takes the batches r, r + R, ..., unless its sampler is a ``DistributedSampler``. Excludes
            ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``.
        shuffle: ``True`` shuffles each epoch as ``torch.randperm`` with seed ``seed + epoch``. "keyed" uses a
            pseudo-random permutation that is computed per position and stores no list. "replacement" draws each sample
            independently. "window" shuffles shards, and mixes the samples of 16 shards at a time ("window:32": of 32).
            A ``Mixture`` shuffles each of its sources in the way of "keyed".
        sampler: An iterable of indices, listed once per epoch and not sharded again. Excludes ``shuffle``.
        weights: One number from 0 per sample: an epoch is as many draws with replacement, in proportion to these, as
            from ``WeightedRandomSampler``, but sharded and resumed exactly. Excludes ``sampler`` and ``shuffle=True``.
        seed: Seeds shuffling and each sample's random generator. ``torch.manual_seed`` has no effect on either: pass
            another seed for another order.
        drop_last: Drop an incomplete last batch, and samples that do not fill a batch on every rank. With a plan, the
            batches that it calls incomplete, and those that not every rank would get.
        pad: Make all ranks equally long by repeating the head of the epoch's list (with ``drop_last`` by cutting).
            With ``False`` each sample is returned once, and ranks may differ by one batch.
        collate_fn: Makes a batch of a list of samples. By default batches are those of torch's ``default_collate``.
        device: ``None`` for host tensors, ``"auto"`` for the accelerator if there is one, or a device. With a list of
            devices each batch is a tuple with one part per device, split as by ``scatter``.
        transform: Called with each batch on the device, on the side stream; without a device in the consumer's thread.
            With several devices it is called with each part.
        on_error: If a sample cannot be read or decoded, "raise" the error at the ``for`` line, "skip" or "replace" the
            sample; or a ``FailurePolicy``, which also sets retries and time limits.
        cache: Cache decoded samples: "host" in memory, ``HostCache(max_bytes)`` in limited memory, ``DiskCache(path)``
            in a file, "device" where batches are wanted, on the device or on the host. With "device", once all samples
            of an epoch are cached, batches are views of a permuted buffer, as with ``Tensors``. Samples are cached as
            they are first used; ``Tokens`` are copied there before the first batch. Random augmentation runs after the
            cache, in the first epoch too; with "device" only ``transform`` can augment. For a ``Dataset`` its items are
            cached, including their random augmentation. ``EncodedCache(path, max_bytes)`` caches encoded samples of
            slow sources of bytes on a local disk.
        limits: Upper limits for resources. By default they are chosen at run time.
        shard: "auto" asks ``torch.distributed``, then ``RANK`` and ``WORLD_SIZE``, then the variables of srun and
            mpirun, when first needed, and keeps the answer. (rank, world_size) sets it. ``None`` gives all samples to
            every process. A ``DeviceMesh`` shards by its dimensions named "dp..." or "data...", and ("dp", mesh) or
            (("replicate", "shard"), mesh) by those named: ranks that differ in other dimensions only get the same
            batches.
        split_sequence: ("cp", mesh) or (rank, size): this rank gets its part of dimension 1 of all tensors
            [N, T, ...] of a batch, after ``transform``. Parts are equal and contiguous; with "zigzag" as a third item,
            rank r of R gets pieces r and 2R - 1 - r of 2R pieces.
        exclude: Samples to leave out for good: their indices, or their keys, which are then looked up among all. All
            others come in the same order, in full batches. May change at a resume, with a plan between two epochs
            only. With ``shuffle=`` True, False or "keyed".
        in_order: ``False`` returns batches as they are finished, so that a slow file delays only its own batch.
            "samples" fills each batch with whichever samples are ready, so that a slow one joins a later batch; the
            number and the sizes of batches stay. Not with ``engine="process"``, ``batch_sampler=`` and plans.
        engine: "thread" reads and decodes in threads of this process. "process", or ``Processes(4)`` for four, uses
            worker processes, which do not hold the GIL of the training loop. "process:4" is short for
            ``Processes(4)``; type checkers know it for 2, 4, 8 and 16. The processes share ``read_concurrency`` and
            ``decode_threads``; each one beyond the first adds a batch to ``prefetch_batches``. Each process has its own
            copy of a ``Dataset``, with ``threads`` of its own. Source, decoder and ``collate_fn`` are pickled at
            ``iter()``. "ray", or ``RayEngine(...)``, uses actors of a Ray cluster.
        static_batches: Return every batch in the same tensors, at fixed addresses, for CUDA graphs. A batch is valid
            until the next ``next``. Costs one copy within device memory per batch. Needs ``drop_last=True`` (or a
            length that ``batch_size`` divides) and batches of equal structure and shapes; excludes ``on_error="skip"``.
            With ``Buckets`` and ``drop_last=True`` the batches of each bucket have tensors of their own.
        timeline: Keep the latest 20,000 events for ``timeline()``.
        keys: Return ``(batch, keys)``: with each batch a list of the names of its samples, as errors show them (the
            path of a file, the member of a shard); for a ``Dataset`` and ``Tensors`` their indices. Skipped samples
            have none, replaced ones that of their replacement. With ``Pack`` the list has a list for each row.

    Batches are those that ``DataLoader`` would give. With ``DecodeImage`` and without ``collate_fn``, images are uint8
    [N, 3, H, W] in channels_last memory. A batch that the user keeps is never overwritten, except with
    ``static_batches``.

    Raises:
        TypeError: An argument has the wrong type, is an argument of ``DataLoader`` that does not apply here, or cannot
            be pickled for a worker process.
        ValueError: A value is out of range, or a device does not exist.
    """

    if TYPE_CHECKING:
        # The types of batches that are known: of image files, of ``Tensors``, of a ``transform``, of a ``collate_fn``,
        # and of several devices.

        @overload
        def __init__(
            self: Feeder[list[torch.Tensor]],
            source: ImageFolder,
            *,
            decode: DecodeImage,
            collate_fn: None = None,
            **options: Unpack[_OneDevice],
        ) -> None: ...

        @overload
        def __init__(self: Feeder[list[torch.Tensor]], source: Tensors, **options: Unpack[_OneDevice]) -> None: ...

        @overload
        def __init__(
            self,
            source: Encoded[EncodedT],
            *,
            decode: Decode[EncodedT],
            collate_fn: Callable[[list[Any]], BatchT] | None = None,
            **options: Unpack[_OneDevice],
        ) -> None: ...

        @overload
        def __init__(
            self, source: Encoded[EncodedT], *, decode: Decode[EncodedT], **options: Unpack[_Transformed[BatchT]]
        ) -> None: ...

        @overload
        def __init__(
            self: Feeder[tuple[Any, ...]],
            source: Encoded[EncodedT],
            *,
            decode: Decode[EncodedT],
            **options: Unpack[_Devices],
        ) -> None: ...

        # A string is a MapDataset, too: without `decode`, `Feeder("train/", decode=...)` is a type error.
        @overload
        def __init__(
            self,
            source: Decoded,
            *,
            decode: None = None,
            collate_fn: Callable[[list[Any]], BatchT] | None = None,
            **options: Unpack[_OneDevice],
        ) -> None: ...

        @overload
        def __init__(
            self, source: Decoded, *, decode: None = None, **options: Unpack[_Transformed[BatchT]]
        ) -> None: ...

        @overload
        def __init__(
            self: Feeder[tuple[Any, ...]], source: Decoded, *, decode: None = None, **options: Unpack[_Devices]
        ) -> None: ...

        @overload
        def __init__(
            self: Feeder[tuple[Any, list[Any]]],
            source: Encoded[Any] | Decoded,
            *,
            keys: Literal[True],
            decode: Decode[Any] | None = None,
            device: Device | Sequence[Device] = None,
            **options: Unpack[_Replaced],
        ) -> None: ...

    def __init__(
        self,
        source: Encoded[Any] | Decoded,
        *,
        decode: Decoder[Any, Any] | RandomDecoder[Any, Any] | None = None,
        batch_size: int | Plan | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        shuffle: Shuffle = False,
        sampler: Iterable[int] | None = None,
        weights: Sequence[float] | torch.Tensor | NDArray[Any] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        collate_fn: Callable[[list[Any]], BatchT] | None = None,
        device: Device | Sequence[Device] = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: Action | FailurePolicy = "raise",
        cache: Literal["host", "device"] | HostCache | DiskCache | EncodedCache | None = None,
        limits: Limits | None = None,
        shard: Shard = "auto",
        split_sequence: SequenceSplit | None = None,
        exclude: Iterable[int | str] | None = None,
        in_order: bool | Literal["samples"] = True,
        engine: Engine = "thread",
        static_batches: bool = False,
        timeline: bool = True,
        keys: bool = False,
    ) -> None:
        arguments = Arguments(
            source=source,
            decode=decode,
            batch_size=batch_size,
            batch_sampler=batch_sampler,
            shuffle=shuffle,
            sampler=sampler,
            weights=weights,
            seed=seed,
            drop_last=drop_last,
            pad=pad,
            collate_fn=collate_fn,
            device=device,
            transform=transform,
            on_error=on_error,
            cache=cache,
            limits=limits,
            shard=shard,
            split_sequence=split_sequence,
            exclude=exclude,
            in_order=in_order,
            engine=engine,
            static_batches=static_batches,
            timeline=timeline,
            keys=keys,
        )
        if (plan := arguments.plan) is not None and plan.decoded is not None:
            _load_addon("decode_first", 'lengths="decoded"')(arguments, Feeder)
        elif plan is not None and (plan.measures or (plan.streams and arguments.traits.indexed)):
            check(arguments)
            _load_addon("measure_lengths", 'lengths="measure"')(plan, arguments, Feeder)
        self._source, self._length = arguments.adopted, arguments.length
        self._order, config = new_config(arguments)
        self._device = device
        self._checkpoint = Checkpoint()
        self._failures = FailureLog(config.policy)
        self._earlier_stats = EpochStats()
        # The iterator that ``steps`` goes on with.
        self._stepping: list[OpenEpoch] = []
        self._session = self._new_session(config)

    def _new_session(self, config: FeederConfig) -> FeederSession[BatchT]:
        return FeederSession(config, self._order, self._checkpoint, self._failures, self._earlier_stats, self._source)

    @property
    def _config(self) -> FeederConfig:
        return self._session.config

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the feeder without its threads. The copy has the same ``state_dict()``, and ``iter`` starts an epoch.

        To continue within an epoch, call ``copy.load_state_dict(feeder.state_dict())``.
        """
        state = self.__dict__.copy()
        config = state.pop("_session").config
        return state | {
            "_stepping": [],
            "config": replace(config, backend=None, static_outputs=()),
            "static": config.static_outputs[0].shapes if config.static_outputs else 0,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        config, static = state.pop("config"), state.pop("static")
        self.__dict__.update(state)
        config = replace(config, backend=backend_of(self._device))
        if static:
            config = _load_addon("with_static_outputs", "static_batches=True")(config, static)
        self._session = self._new_session(config)

    def __len__(self) -> int:
        """Return the number of batches per epoch of this rank. Resuming in mid-epoch does not change it.

        Raises:
            TypeError: The source is a ``Stream`` without a length.
        """
        return self._order.batches_of_rank()

    def __iter__(self) -> FeedIterator[BatchT]:
        """Start an epoch; close the open iterator."""
        return self._session.begin()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else _hint_at("Feeder", name)
            raise AttributeError(f"'Feeder' object has no attribute {name!r}{hint}", name=name, obj=self)

        def __getitem__(self, index: object) -> Any:
            raise TypeError(
                "a Feeder is a loader, without items: next(iter(feeder)) is a batch, feeder.dataset the source"
            )

        def __next__(self) -> Any:
            raise TypeError("a Feeder is no iterator: batches = iter(feeder) begins an epoch, next(batches) is a batch")

    def __aiter__(self) -> FeedIterator[BatchT]:
        """Start an epoch; close the open iterator."""
        return iter(self)

    def __repr__(self) -> str:
        config, order = self._config, self._order.describe()
        decode = "" if config.decode is None else f"decode={config.decode!r}, "
        engine = f"device={self._device!r}, engine={config.engine!r}"
        return f"Feeder({self._source!r}, {decode}{order}, {engine}, epoch={self.epoch})"

    @property
    def batch_size(self) -> int:
        """Samples per batch; with a plan or a batch sampler, of a typical batch.

        For another batch size create a new feeder; it can load this feeder's state.
        """
        return self._config.batch_size

    @property
    def dataset(self) -> Any:
        """The ``Dataset`` or ``Source``; ``len(feeder.dataset)`` is the number of samples."""
        return self._source.given

    @property
    def epoch(self) -> int:
        """The current or last epoch; before the first ``iter()`` the epoch that it starts."""
        return self._checkpoint.current_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``. Without this call, epochs advance by themselves.

        A position loaded by ``load_state_dict`` is kept if it is in this epoch, and otherwise discarded. After a
        ``break``, ``state_dict`` keeps the position that was reached until a batch of this epoch is returned.
        """
        self._checkpoint.set_epoch(check_epoch("epoch", epoch), live=self._session.live)

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs up to ``n - 1``; iterate the feeder once for each.

        Epochs are counted from 0 over the life of the feeder and its states: a second ``epochs(3)`` yields none, and a
        log line says so. ``set_epoch(0)`` begins again. Epochs of which only one batch was looked at do not count.

        Each next epoch is read while the last batches of the one before are consumed, so there is no pause between
        epochs. Nothing is read beyond the last epoch.

        Raises:
            TypeError, ValueError: ``n`` is not a positive int.
        """
        return self._session.epochs(check_positive_int("n", n) - 1)

    def steps(self, n: int) -> Steps[BatchT]:
        """Return an iterable over the next ``n`` batches, for ``for`` or ``async for``, over as many epochs as needed.

        It goes on at the position of ``state_dict``, where earlier ``steps``, a ``break`` or a loaded state left off,
        or at the epoch of ``set_epoch``; the next epoch is read ahead, as in ``epochs``. Keep to ``steps`` for one
        training run: ``iter(feeder)`` starts a new epoch.

        Raises:
            TypeError, ValueError: ``n`` is not a positive int.
        """
        return Steps(self._session, self._stepping, check_positive_int("n", n))

    def progress(self, name: str = "train") -> ProgressFeed[BatchT]:
        """Return an iterable over the next epoch that shows a progress bar, for ``for`` or ``async for``.

        The bar shows samples per second, the share of the time that the loop waited for batches, and the stage that
        ``explain`` names as the limit. Inside ``epochs`` one bar counts all epochs. Batches, state and errors are those
        of the feeder. Silent if standard error is no terminal, except in a notebook, and on ranks above 0. The bar is
        one of tqdm, or a plain line if that is not installed.

        Args:
            name: The title of the bar.

        Raises:
            TypeError: ``name`` is no str.
        """
        kind: type[ProgressFeed[BatchT]] = _load_addon("ProgressFeed", "feeder.progress()")
        return kind(self._session, self.__len__, name)

    def skip(self, n: int) -> None:
        """Leave out the next ``n`` batches after the position of ``state_dict``, without reading them.

        For example after a spike of the loss: load the state before it and skip the batches that caused it. Takes
        effect at the next ``iter()`` or ``steps``. With a ``Stream`` that has no length, stay within its epoch.

        Raises:
            TypeError, ValueError: ``n`` is not an int from 0, or an epoch has no batches.
        """
        self._session.go_to(self._order.after(self._checkpoint.position, check_int_from(0, "n", n)))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: it counts the batches returned, not those read ahead.

        It contains plain numbers, strings and lists and survives JSON and ``torch.load(weights_only=True)``. With
        ``in_order=True`` it is the same on all ranks. After the last batch of an epoch it is the start of the next one.
        """
        return self._state().to_dict()

    @hides_secrets
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on from a state.

        World size and batch size may differ from those of the state: samples that any rank had returned do not come
        again in that epoch, all others do. In mid-epoch, ``in_order=False`` and ``pad=False`` fix both, and "samples"
        the world size; each rank then loads the state that it has saved.

        Raises:
            StateError: The state does not belong to such a feeder; the message says what differs.
        """
        from aiofeed.kernel.sampling.state import SavedState

        saved = SavedState.from_dict(state_dict)
        mine = self._state()
        if missing := saved.check_compatible(mine):
            log.warning("the state was loaded, and %s", missing)
        position = self._order.resumed(saved.position, saved.sampler)
        if saved.sampler and saved.order == mine.order:
            self._order.load_sampler_state(saved.sampler)
        # A mixture has changed: the fingerprint of the sources before it is part of the receipt.
        trail = saved.trail if saved.fingerprint == mine.fingerprint else Trail(saved.receipt)
        self._checkpoint.load(position, trail)

    def _state(self) -> SavedState:
        from aiofeed.kernel.sampling.state import SavedState

        position = self._checkpoint.position
        schedule, sampler = self._order.schedule(self._length), self._order.sampler_state(position)
        trail = self._checkpoint.trail
        return SavedState(schedule, position, self._session.fingerprint, self._config.in_order, sampler, trail)

    def receipt(self) -> str:
        """Return a hash of the samples seen: of the source's fingerprint, the order, and the positions returned.

        Two runs have it in common if they have seen the same samples, with the same seeds, in the same order on all
        ranks together, and otherwise not; interruptions, batch size and world size do not count, but samples that
        come twice do, to fill up an epoch for several ranks. ``state_dict`` has it, and ``load_state_dict`` checks it.
        It does not know which samples ``on_error`` has left out, and with ``in_order=False`` and "samples" not in which
        order they came; with these and ``pad=False`` it is that of this rank. A function that gives the weights of a
        ``Mixture`` does not count. After a state of an older version it stands for an unknown past.

        Raises:
            StateError: The source is a ``Stream``, whose items have no names.
        """
        receipt = self._state().receipt
        if not receipt:
            raise StateError(f"{self._source!r} has no receipt: the items of a stream have no names, only numbers")
        return receipt

    def samples(self, step: int, *, epoch: int = 0, rank: int | None = None) -> list[StepSample]:
        """Return the names of the samples of any step, past or future, without reading them.

        Steps are the batches of a rank, counted from 0 at the start of an epoch, on into the following ones, with this
        batch size and world size. After a run that was resumed with others, or has left out batches, pass the epoch of
        the step, and count as if that epoch had begun with them. With ``in_order=False`` and "samples" it is the batch
        that was planned.

        With ``shuffle="keyed"`` it takes milliseconds for any source; ``shuffle=True`` makes the permutation: 8 bytes a
        sample, and a second for 100 million. A plan lists each epoch up to the step.

        Args:
            step: The number of the step.
            epoch: The epoch from whose start on steps are counted.
            rank: The rank; by default this one.

        Raises:
            TypeError, ValueError: An argument is no such number, there are no batches, or the order is that of a
                ``Stream``, ``sampler=`` or ``batch_sampler=``, which is known only by listing it.
        """
        if not self._source.traits.indexed:
            raise ValueError(f"the samples of a step are not known with {self._source!r}: its items have no names")
        samples_at = _load_addon("samples_at", "feeder.samples()")
        found: list[StepSample] = samples_at(self._order, step, epoch, rank, lambda at: str(self._source.key(at)))
        return found

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Return the statistics of the current or last epoch, or with ``total=True`` of all epochs."""
        return self._session.statistics(total)

    def timeline(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        seconds: float = 10.0,
        merge: str | os.PathLike[str] | None = None,
    ) -> Timeline:
        """Write when reads, decode jobs, copies, waits and steps took place in the last seconds, and return it.

        A notebook shows the result as a picture.

        Args:
            path: ``.json`` is a trace for https://ui.perfetto.dev or chrome://tracing, with arrows that follow each
                batch; ``.html`` is a picture that zooms, ``.png`` one that does not. ``None`` writes no file.
            seconds: How far it goes back, at most to the last 20,000 events.
            merge: A trace of ``torch.profiler``, or a timeline of another process, that becomes part of the ``.json``.

        Raises:
            ValueError: ``path`` has another suffix, nothing took place, or the feeder has ``timeline=False``.
            OSError: A file cannot be read or written.
        """
        write_timeline = _load_addon("write_timeline", "feeder.timeline()")
        return write_timeline(self._order.events, path, seconds=seconds, merge=merge)  # type: ignore[no-any-return]

    def explain(self, *, ranks: bool = False) -> Explanation:
        """Explain where the time of the current or last epoch went: ``print(feeder.explain())``.

        The first line names the stage that limits training and its evidence; a table of all stages and advice with
        predicted gains follow. It only reads counters, so it may be called at any time, also within the loop.

        Args:
            ranks: Compare all ranks of ``torch.distributed``, by one all-gather; all ranks must call it.

        Raises:
            ValueError: ``ranks=True`` without an initialized ``torch.distributed``.
        """
        return self._session.explain(ranks=check_bool("ranks", ranks))  # type: ignore[no-any-return]

    def headroom(self, batches: int = 20) -> Headroom[BatchT]:
        """Return an iterable over an epoch that measures how much faster training could be without loading.

        ``for batch in feeder.headroom(): step(batch)`` is an epoch in which some batches come again: after the first
        ones, ``batches`` steps are timed, then as many with copies of earlier batches, for which nothing is loaded. The
        result is printed, and the epoch goes on. State, order and statistics are those of the epoch without the copies.

        Raises:
            TypeError, ValueError: ``batches`` is not a positive int.
        """
        kind: type[Headroom[BatchT]] = _load_addon("reports.Headroom", "feeder.headroom()")
        return kind(
            self._session.begin,
            check_positive_int("batches", batches),
            static=bool(self._config.static_outputs),
            position=lambda: self._checkpoint.position,
            go_to=self._session.go_to,
        )

    def scalars(self, prefix: str = "aiofeed/") -> dict[str, float]:
        """Return the statistics of the current or last epoch as a flat dict, for ``wandb.log`` or TensorBoard.

        Names are stable: ``aiofeed/samples_per_s``, ``aiofeed/waiting_share``, ``aiofeed/read_s`` and others.
        """
        return self.statistics().scalars(prefix)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failed samples of the batches returned so far: key, index, stage, error and epoch.

        At most the first 10,000; ``statistics(total=True).failures`` counts all.
        """
        inner = self._source.feeder
        return self._failures.failures if inner is None else inner.failures + self._failures.failures

    def close(self) -> None:
        """Stop the threads and wait up to 5 s for them to end. Idempotent; the next ``iter()`` starts new threads.

        A thread that is stuck in a read or decode is left behind, with a log line. It delays neither this call beyond
        that time nor the interpreter's exit.
        """
        self._session.close(JOIN_S)

    async def aclose(self) -> None:
        """Like ``close``, without blocking the caller's event loop."""
        await self._session.aclose(JOIN_S)

    def __enter__(self) -> Feeder[BatchT]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # On Ctrl-C or sys.exit the process is about to end; wait no longer than an exit without `with` would.
        leaving = kind is not None and not issubclass(kind, Exception)
        self._session.close(threads.EXIT_S if leaving else JOIN_S)

    async def __aenter__(self) -> Feeder[BatchT]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
