"""The arguments of a feeder: each checked by itself, then against each other by ``rules.py``, then a configuration.

Each error says what was given and what to write instead.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from aiofeed import _hint_at
from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.faces import (
    BaseDevice,
    BaseSource,
    BoundDecoder,
    BuildsBatches,
    CacheStore,
    Exclusion,
    adapt_shards,
    adapt_source,
    bind_decoder,
    collate_along,
)
from aiofeed.kernel.core.failures import FailurePolicy, as_policy
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.limits import Limits, ResolvedLimits, resolve_limits
from aiofeed.kernel.core.statistics import new_events
from aiofeed.kernel.core.types import Collate, Traits, Transform, public
from aiofeed.kernel.core.validation import (
    check_bool,
    check_callable,
    check_collate_fn,
    check_positive_int,
    check_seed,
    counted,
    local_ranks,
)
from aiofeed.kernel.feeder.rules import cache_of, check
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.tensors import is_plain
from aiofeed.kernel.sampling.feed_order import FeedOrder
from aiofeed.kernel.sampling.lister import STREAM_SAMPLES, Lister, Plan
from aiofeed.kernel.sampling.progress import InOrder, check_in_order
from aiofeed.kernel.sampling.schedule import Schedule, Shuffle, check_shuffle, window_shards

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# Batches from this size on are compared with the free memory.
_CHECKED_BYTES = 8 << 20
# A source may keep its data in memory if they take less than this share (1 / SOURCE_SHARE) of ``Limits.memory_bytes``.
SOURCE_SHARE = 4


# --- the source, the decoder and the engine ---


def as_source(source: Any) -> BaseSource:
    """Return the source that an object is, ``FromDataset`` of a torch ``Dataset``, ``Stream`` of an iterable one.

    Raises:
        TypeError: It is nothing that a feeder reads.
    """
    if isinstance(source, BaseSource):
        return source
    # Sources of files do without it.
    from aiofeed.kernel.sources.dataset import FromDataset, check_parts, is_iterable_dataset, is_map_dataset

    if is_iterable_dataset(source):
        stream: BaseSource = load_addon("Stream", "an IterableDataset")(source)
        return stream
    if (adapted := adapt_source(source)) is not None:
        return adapted
    if _is_known_mistake(source) and (message := _hint_at("source", source)):
        raise TypeError(message)
    if is_map_dataset(source):
        check_parts(source)
        return adapt_shards(FromDataset(source), source)
    raise TypeError(
        f"a source has __len__, key and async read, or is a Dataset with __len__ and __getitem__; got {source!r}. For "
        f"an iterable or a generator function pass aiofeed.Stream(...)"
    )


def _check_row(decoder: BoundDecoder) -> None:
    """Raise ``TypeError`` if torch has no tensors of the dtype of a decoder's rows."""
    if decoder.row is not None and not is_plain(dtype := np.dtype(decoder.row.dtype)):
        raise TypeError(
            f"the rows of {decoder.call!r} have the dtype {dtype!s}, of which torch has no tensors: use numbers or "
            f"bools in the machine's byte order, or leave out decode_into and return something else"
        )


def _is_known_mistake(source: Any) -> bool:
    """Return whether a source may be a path, a table, a loader or a set of columns."""
    kind = type(source)  # a Dataset may delegate names to another object
    known = kind.__module__.partition(".")[0] in ("pyarrow", "polars") or kind.__name__.endswith(("Loader", "Feeder"))
    return known or hasattr(kind, "iloc") or isinstance(source, str | bytes | os.PathLike | Mapping | tuple)


def check_decoder(decode: Any, items: object) -> Callable[..., Any] | None:
    """Return ``decode`` if it is ``None`` or a decoder. ``items`` are those of a list or Dataset, for advice."""
    if decode is None:
        return None
    if isinstance(items, list | tuple) and items and isinstance(items[0], str | os.PathLike):
        raise TypeError(f"a {type(items).__name__} is used as a Dataset; for files pass aiofeed.Files(paths)")
    bound = bind_decoder(decode)
    check_callable("decode", decode, bound.keywords)
    _check_row(bound)
    return bound.call


def backend_of(device: Any) -> BaseDevice | None:
    """Return the backend of ``device=``; host tensors need no module of ``devices/``."""
    if device is None:
        return None
    from aiofeed.kernel.devices.resolve import resolve_devices

    return resolve_devices(device)


@public
@dataclass(frozen=True)
class Processes:
    """Worker processes that read and decode: ``Feeder(engine=Processes(4))``, or in short ``engine="process:4"``.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        with aiofeed.Feeder(photos, decode=decode, batch_size=4, engine=aiofeed.Processes(2)) as feeder:
            for images, labels in feeder:
                print(images.shape)
        ```

    Args:
        number: How many.

    Raises:
        TypeError, ValueError: ``number`` is not a positive int.
    """

    number: int

    def __post_init__(self) -> None:
        check_positive_int("Processes(number=...)", self.number)


def check_engine(value: object) -> tuple[int, Any]:
    """Return the number of worker processes or actors that ``engine=`` requests, and the options of Ray.

    Raises:
        TypeError, ValueError: The value is not "thread", "process", "process:4", ``Processes``, "ray" or ``RayEngine``.
        ImportError: Ray is not installed.
    """
    expected = 'expected "thread", "process", or "process:4" for four processes; for a Ray cluster "ray" or RayEngine()'
    if value == "thread":
        return 0, None
    if isinstance(value, Processes):
        value = f"process:{value.number}"
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if isinstance(value, str) and (
        kind not in ("process", "ray") or (colon and not (number.isascii() and number.isdigit() and int(number) > 0))
    ):
        raise ValueError(f"engine={value!r}: {expected}")
    if kind != "process":
        RayEngine = load_addon("processes.RayEngine", "engine=")  # noqa: N806
        ray: Any = value if kind != "ray" else RayEngine(int(number)) if colon else RayEngine()
        if not isinstance(ray, RayEngine):
            raise TypeError(f"engine must be a str, got {value!r}; {expected}")
        if find_spec("ray") is None:
            raise ImportError(f"engine={value!r} needs Ray: pip install 'aiofeed[ray]'")
        return ray.actors, ray
    if not machine.passes_descriptors():
        raise ValueError(
            f'engine={value!r} needs Unix sockets that pass descriptors, which Windows lacks: use engine="thread"'
        )
    return int(number) if colon else 1, None


def check_batch_size(value: object) -> int:
    """Return ``value`` if it is a valid ``batch_size``."""
    if value is None:
        raise TypeError(
            "batch_size must be an int, got None: pass it, as a Feeder makes batches. aiofeed.DataLoader(dataset, "
            "batch_size=None) gives single items; aiofeed.prefetch(batches, device=...) takes batches that you made"
        )
    return check_positive_int("batch_size", value)


def limits_for(
    limits: Limits | None, batch_size: int, source: BaseSource, engines: int, ray: Any = None
) -> ResolvedLimits:
    """Return all limits as numbers for this machine or the actors of ``ray``, and for a source.

    Raises:
        TypeError: ``limits`` is not a ``Limits``.
        ValueError: A limit that processes share is smaller than their number.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits must be aiofeed.Limits(...), got {limits!r}")
    if limits is not None and not source.threads:  # each process has its own copy of a Dataset
        for name in ("read_concurrency", "decode_threads"):
            given = getattr(limits, name)
            if given is not None and given < engines:
                kind, what = ("ray", "actors") if ray else ("process", "processes")
                raise ValueError(
                    f'Limits({name}={given}) with engine="{kind}:{engines}": the {what} share the limit, and each '
                    f'needs 1; use at least {engines}, or fewer {what}, as engine="{kind}:{given}"'
                )
    calls = source.threads * max(engines, 1)
    if calls and limits is not None and (limits.decode_threads or 0) > calls:
        log.warning(
            "Limits(decode_threads=%d) has no effect: %s allows %s at a time; if the Dataset is thread-safe, pass "
            "FromDataset(dataset, threads=%d)",
            *(limits.decode_threads, source, counted(calls, "call"), limits.decode_threads),
        )
    return resolve_limits(
        limits or Limits(),
        batch_size=batch_size,
        cpus=ray.actors * ray.cpus_per_actor if ray else machine.rank_cpus(),
        free_memory=machine.rank_memory(),
        most_threads=source.threads,
        procs=engines,
        ranks=local_ranks(),
    )


@dataclass(eq=False)
class Arguments:
    """The arguments of ``Feeder``, each valid by itself.

    Attributes:
        given_source: Whether the user passed a source, and not for example a ``Dataset``.
        adopted: The source as the feeder reads it: ``FromDataset`` of a ``Dataset``, the combined source of a
            ``Mixture``.
        traits: What kind of source it is.
        length: The number of samples of the source; 0 for a stream, whose end is not known before it is read.
        samples: Samples per batch; with a plan or a batch sampler, of a typical batch.
        plan: The plan that is the batch size, if it is one.
        engines: Number of worker processes or actors; 0: threads of this process.
        ray: The options of ``engine="ray"``.
    """

    source: Any
    decode: Callable[..., Any] | None
    batch_size: Any
    batch_sampler: Any
    shuffle: Shuffle
    sampler: Any
    weights: Any
    seed: int
    drop_last: bool
    pad: bool
    collate_fn: Collate | None
    device: Any
    transform: Transform | None
    on_error: Any
    cache: Any
    limits: Limits | None
    shard: Any
    split_sequence: Any
    exclude: Any
    in_order: InOrder
    engine: Any
    static_batches: bool
    timeline: bool
    keys: bool

    def __post_init__(self) -> None:
        self.given_source: bool = isinstance(self.source, BaseSource)
        self.source = as_source(self.source)
        self.adopted: BaseSource = self.source.adopted()
        self.decode = check_decoder(self.decode, self.adopted.given)
        self.shuffle = check_shuffle("shuffle", self.shuffle)
        self.seed = check_seed(self.seed)
        check_bool("drop_last", self.drop_last)
        check_bool("pad", self.pad)
        self.plan: Any = self.batch_size if isinstance(self.batch_size, Plan) else None
        self.samples: int = 1
        if self.batch_sampler is None and self.plan is None:
            self.samples = check_batch_size(self.batch_size)
        check_collate_fn(self.collate_fn)
        axis = 0 if self.decode is None else bind_decoder(self.decode).time_axis
        if axis:
            self.collate_fn = collate_along(self.collate_fn, axis)
        if self.plan is not None:
            self.plan.axis = axis  # it may be that of another feeder
        check_callable("transform", self.transform)
        if self.split_sequence is not None:
            sequence_part = load_addon("sequence_part", "split_sequence=")
            self.transform = sequence_part(self.split_sequence, self.transform)
        self.backend: BaseDevice | None = backend_of(self.device)
        self.on_error = as_policy(self.on_error)
        self.replica: tuple[int, int] = (0, 1)
        mesh = self.shard[1] if isinstance(self.shard, tuple) and len(self.shard) == 2 else self.shard
        if hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "get_coordinate"):
            self.shard, self.replica = load_addon("rank_in_mesh", "a mesh as shard=")("shard", self.shard)
            log.info("shard %d of %d, from the mesh", *self.shard)
        check_in_order("in_order", self.in_order)
        self.engines: int
        self.ray: Any
        self.engines, self.ray = check_engine(self.engine)
        check_bool("static_batches", self.static_batches)
        check_bool("timeline", self.timeline)
        check_bool("keys", self.keys)
        self._choose_source()

    def _choose_source(self) -> None:
        """Use ``Tensors`` in host memory and a ``Mixture`` without weights as plain samples if an option needs that."""
        listed = self.batch_sampler is not None or self.plan is not None
        split = self.static_batches or (self.backend is not None and self.backend.splits)
        if listed or split or self.engines or self.collate_fn is not None:
            self.adopted = self.adopted.as_samples()
        ordered = self.source.traits.ordered
        if ordered and not self.source.draws:
            ordered = self.sampler is self.weights is self.batch_sampler is self.exclude is None
            ordered = ordered and self.shuffle in (True, False, "keyed")
        self.traits: Traits = replace(self.adopted.traits, ordered=ordered)
        self.length: int = len(self.adopted) if self.traits.indexed else 0


# --- the order ---


def new_order(a: Arguments) -> FeedOrder:
    """Return the order of a feeder; sets ``a.samples`` to the size of a typical batch.

    Raises:
        TypeError, ValueError: The weights, the plan, the sampler or the shard do not fit.
    """
    kind = load_addon("SampleSchedule", 'in_order="samples"') if a.in_order == "samples" else Schedule
    order: Schedule = kind(
        length=a.length, batch_size=1, shuffle=a.shuffle, seed=a.seed, drop_last=a.drop_last, pad=a.pad
    )
    feed_order: FeedOrder
    if a.traits.indexed:
        lister = _new_lister(a, order)
        if lister is not None and lister.by_batches:
            a.samples = lister.typical_samples
        else:
            order = replace(order, batch_size=a.samples)
        feed_order = FeedOrder(order, a.shard, lister)
    else:
        feed_order = a.adopted.new_order(replace(order, batch_size=a.samples), a.shard, a.plan)
        a.samples = a.samples if a.plan is None else STREAM_SAMPLES
    feed_order.events = new_events(a.timeline)
    feed_order.replica = a.replica[0]
    return feed_order


def _new_lister(a: Arguments, order: Schedule) -> Lister | None:
    """Return what lists the epochs of a feeder in place of its schedule, if anything does."""
    mixture: Lister | None = None
    if a.traits.ordered or (a.exclude is not None and a.source.traits.ordered):
        mixture = a.source.order(a.seed, shuffle=bool(a.shuffle))
    lister = mixture
    if a.batch_sampler is not None:
        lister = load_addon("BatchSamplerAdapter", "batch_sampler=")(a.batch_sampler, a.length)
    elif a.sampler is not None:
        lister = load_addon("SamplerAdapter", "sampler=")(a.sampler, a.length)
    elif a.exclude is not None:
        lister = load_addon("ExcludingOrder", "exclude=")(order, a.exclude, a.adopted.key, mixture)
        if a.traits.ordered:
            lister = a.source.order(a.seed, shuffle=bool(a.shuffle), excluded=lister.indices)
    elif a.weights is not None:
        lister = load_addon("WeightedOrder", "weights=")(a.weights, a.length, a.seed)
    elif (shards := window_shards(a.shuffle)) is not None:
        starts, dealt = a.source.shard_starts, a.source.reads_whole_shards
        lister = load_addon("WindowOrder", f"shuffle={a.shuffle!r}")(starts, shards, a.seed, dealt=dealt)
    return lister if a.plan is None else a.plan.new_lister(order, lister)


# --- the configuration ---


@dataclass(frozen=True, eq=False)
class FeederConfig:
    """The checked arguments of a feeder.

    Args:
        engines: Number of worker processes or actors; 0: threads of this process.
        ray: The options of ``engine="ray"``.
        static_outputs: One per device if ``static_batches=True``; otherwise empty.
        kept_on_device: Whether the data are kept where batches are wanted.
        facts: What holds for the arguments, see ``rules.py``.
        excluded: What the source, the plan and the cache exclude.
        keys: Whether the user gets the keys of samples with each batch.
    """

    source: BaseSource
    length: int
    decode: Callable[..., Any] | None
    batch_size: int
    collate_fn: Any
    backend: BaseDevice | None
    transform: Transform | None
    policy: FailurePolicy
    limits: ResolvedLimits
    user_limits: Limits
    in_order: InOrder
    engines: int
    static_outputs: tuple[Any, ...] = ()
    cache: CacheStore | None = None
    kept_on_device: bool = False
    ray: Any = None
    facts: frozenset[str] = frozenset()
    excluded: tuple[Exclusion, ...] = ()
    keys: bool = False

    @property
    def engine(self) -> Any:
        """The engine, as ``Feeder(engine=)`` takes it."""
        return self.ray or (f"process:{self.engines}" if self.engines else "thread")


def new_config(a: Arguments) -> tuple[FeedOrder, FeederConfig]:
    """Check the arguments of a feeder against each other; return its order and its configuration.

    Raises:
        TypeError, ValueError: Two arguments exclude each other, one does not fit the source, or cannot be pickled for a
            worker.
        CacheError: The file of a cache cannot be used.
    """
    facts, excluded = check(a)
    order = new_order(a)
    source = a.adopted.for_neighbours() if "neighbours come together" in facts else a.adopted
    collate_fn: Any = a.collate_fn
    if a.plan is not None and (packs := a.plan.new_collate()) is not None:
        collate_fn = packs.for_source(a.adopted) if isinstance(packs, BuildsBatches) else packs
        source = source if a.decode else source.in_pieces()
    elif collate_fn is a.cache is a.decode is None and not source.traits.in_memory:
        source = source.in_batches()
        collate_fn = source.collate
    kept_on_device = a.cache == "device" and source.gathers_on_device
    if kept_on_device:
        source.check_room(a.backend)
    limits = limits_for(a.limits, a.samples, a.adopted, a.engines, a.ray)
    source = source.for_memory(0 if a.engines or a.cache is not None else limits.memory_bytes // SOURCE_SHARE)
    cache = None if a.cache is None or kept_on_device else cache_of(a.cache)
    if cache is not None and (wrapped := cache.wrap(source)) is not None:
        source, cache = as_source(wrapped), None
    # Processes would each have a copy, and a cache keeps the samples already.
    config = FeederConfig(
        source=source,
        length=a.length,
        decode=source.decoder if a.traits.decode == "none" else a.decode,
        batch_size=a.samples,
        collate_fn=collate_fn,
        backend=a.backend,
        transform=a.transform,
        policy=a.on_error,
        limits=limits,
        user_limits=a.limits or Limits(),
        in_order=a.in_order,
        engines=a.engines,
        ray=a.ray,
        kept_on_device=kept_on_device,
        facts=frozenset(facts),
        excluded=tuple(excluded),
        keys=a.keys,
    )
    _warn_of_large_batches(config)
    if config.engines:
        check_for_workers(config, "ray" if config.ray else "process")
    if cache is not None:
        config = replace(config, cache=cache.open_store(config))
    if a.static_batches:
        with_outputs = load_addon("with_static_outputs", "static_batches=True")
        config = with_outputs(config, 1 if a.plan is None else a.plan.shapes)
    if "a plan" not in facts and "batch_sampler=" not in facts and not a.given_source:
        config = _with_resident_tensors(config)
    return order, config


def check_for_workers(config: FeederConfig, kind: str) -> None:
    """Raise ``TypeError`` if what workers get cannot be pickled."""
    check_picklable = load_addon("check_picklable", f'engine="{kind}"')
    check_picklable(kind, source=config.source, decode=config.decode, collate_fn=config.collate_fn)


def _warn_of_large_batches(config: FeederConfig) -> None:
    """Log a warning if two batches take more than the free memory, if their size is known."""
    row = None if config.decode is None else bind_decoder(config.decode).row
    if row is None or row.parts:
        return
    nbytes = 2 * config.batch_size * math.prod(row.shape) * np.dtype(row.dtype).itemsize
    # Reading the free memory takes 0.4 ms.
    if nbytes >= _CHECKED_BYTES and nbytes > (free := machine.rank_memory()):
        log.warning(
            "two batches of %d samples, one in use and the next one, take %s, and this machine or container has %s "
            "left for this process: make batch_size= smaller, or raise the container's memory limit",
            config.batch_size,
            format_bytes(nbytes),
            format_bytes(free),
        )


def _with_resident_tensors(config: FeederConfig) -> FeederConfig:
    """Return a configuration that permutes the tensors of a ``TensorDataset`` in host memory, as for ``Tensors``.

    For a device they are streamed, because they may not fit there.
    """
    excluded = (config.collate_fn, config.backend, config.cache, config.engines or None)
    if not config.source.traits.items or any(option is not None for option in excluded):
        return config
    whole: Any = config.source.given
    while type(whole).__name__ == "Subset":
        whole = whole.dataset
    if type(whole).__name__ != "TensorDataset":
        return config
    tensors = load_addon("tensors_of", "a TensorDataset")(config.source.given)
    return config if tensors is None else replace(config, source=tensors)
