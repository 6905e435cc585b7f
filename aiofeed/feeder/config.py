"""The configuration of a feeder: its arguments, checked one by one and against each other.

Each error says what was given and what to write instead.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.errors import CacheError
from aiofeed.core.failure_policy import FailurePolicy, as_policy
from aiofeed.core.formatting import format_bytes
from aiofeed.core.limits import Limits, ResolvedLimits, resolve_limits
from aiofeed.core.types import Collate, Row, Source, Transform, decodes_in_place
from aiofeed.core.validation import check_bool, check_callable, check_positive_int, is_async_function
from aiofeed.decoders.media.clips import Clips
from aiofeed.devices.backend import CpuBackend
from aiofeed.devices.resolve import DeviceGroup
from aiofeed.engine.fetch.sequences import PackCollate
from aiofeed.feeder.ordering import a_shuffle
from aiofeed.runtime import machine
from aiofeed.sampling.listers.length_plans import LengthPlan
from aiofeed.sampling.listers.packing import Pack
from aiofeed.sampling.state import InOrder
from aiofeed.sources.arrays.tokens import Tokens
from aiofeed.sources.dataset import FromDataset, check_parts, fingerprint_of, is_iterable_dataset, is_map_dataset
from aiofeed.sources.mixture import Mixture
from aiofeed.sources.stream import Stream
from aiofeed.sources.tables.columns import collate_rows
from aiofeed.sources.tables.table import Table
from aiofeed.sources.tensors import Tensors, tensors_of

if TYPE_CHECKING:
    from aiofeed.cache.decoder_codec import SampleCodec
    from aiofeed.cache.encoded.database import EncodedCache
    from aiofeed.cache.store import SampleStore
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.devices.copier import StaticOutput
    from aiofeed.processes.actors.options import RayEngine

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# Batches from this size on are compared with the free memory.
_CHECKED_BYTES = 8 << 20


def _threads_instead(workers: object) -> str:
    if workers == 0:
        return "leave it out; reading and decoding run in threads"
    return (
        f"aiofeed.DataLoader takes it. For a Feeder, reading and decoding run in threads, limited by "
        f'Limits(decode_threads=...); engine="process:{workers}" uses that many worker processes; '
        f"pass a thread-safe Dataset as FromDataset(dataset, threads={workers})"
    )


_NO_WORKERS = "there are no worker processes"
DATALOADER_ARGUMENTS: Mapping[str, str | Callable[[Any], str]] = {
    "num_workers": _threads_instead,
    "pin_memory": "memory is pinned if device= is an accelerator; aiofeed.DataLoader takes pin_memory=",
    "pin_memory_device": "pass device=",
    "prefetch_factor": lambda n: "leave it out" if n is None else f"pass limits=Limits(prefetch_batches={n})",
    "persistent_workers": "threads live as long as the feeder",
    "worker_init_fn": (
        f"aiofeed.DataLoader takes it. For a Feeder, {_NO_WORKERS}: FromDataset(dataset, setup=function) calls "
        f"function(dataset) in each thread that will call the dataset; the decoder's `rng` gives each sample its own "
        f"random numbers"
    ),
    "multiprocessing_context": f"{_NO_WORKERS}; aiofeed.DataLoader takes it",
    "timeout": lambda s: "leave it out" if s == 0 else f"pass on_error=FailurePolicy(read_timeout_s={s})",
    "generator": "aiofeed.DataLoader takes it. For a Feeder, pass seed=",
    "dataset": "it is the first argument",
}
"""What to do instead of passing an argument of ``DataLoader`` to ``Feeder``."""
DATALOADER_POSITIONS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
DATALOADER_HINT = "aiofeed.DataLoader takes them by position, as torch's DataLoader does"


@dataclass(frozen=True, eq=False)
class FeederConfig:
    """The checked arguments of a feeder.

    Args:
        engines: Number of worker processes or actors; 0: threads of this process.
        ray: The options of ``engine="ray"``.
        static_outputs: One per device if ``static_batches=True``; otherwise empty.
        tokens_resident: Whether ``Tokens`` are kept where batches are wanted.
    """

    source: Source[Any] | FromDataset | Tensors
    length: int
    decode: Callable[..., Any] | None
    batch_size: int
    collate_fn: Collate | PackCollate | None
    backend: DeviceBackend | DeviceGroup | None
    transform: Transform | None
    policy: FailurePolicy
    limits: ResolvedLimits
    user_limits: Limits
    in_order: InOrder
    engines: int
    static_outputs: tuple[StaticOutput, ...] = ()
    cache: SampleStore | None = None
    tokens_resident: bool = False
    ray: RayEngine | None = None

    @property
    def engine(self) -> str | RayEngine:
        """The engine, as ``Feeder(engine=)`` takes it."""
        return self.ray or (f"process:{self.engines}" if self.engines else "thread")

    @property
    def engine_kind(self) -> str:
        """ "thread", "process" or "ray"."""
        return "ray" if self.ray else "process" if self.engines else "thread"


def complete_config(
    config: FeederConfig, *, cache: object, static_batches: bool, drop_last: bool, sampled: bool, listed: bool
) -> FeederConfig:
    """Check arguments of ``Feeder`` against each other; return the configuration with its cache and static outputs.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, or two exclude each other.
    """
    static_batches = check_bool("static_batches", static_batches)
    if config.in_order == "samples" and listed:
        raise ValueError(
            'in_order="samples" moves samples to other batches, and batch_sampler= or a plan decides which samples are '
            "in a batch: pass in_order=False, which hands out whole batches as they are finished"
        )
    if config.in_order == "samples" and config.engines:
        raise ValueError(
            f'in_order="samples" fills batches from samples of this process; engine="{config.engine_kind}" gets whole '
            f'batches from its workers: pass engine="thread", or in_order=False'
        )
    if isinstance(config.source, Tensors):
        _check_tensors(config, cache, static_batches, listed=listed)
    if isinstance(config.source, Tokens) and cache is not None:
        _check_tokens_on_device(config, config.source, cache, static_batches, listed=listed)
        config, cache = replace(config, tokens_resident=True), None
    elif cache is not None and getattr(getattr(config.decode, "row", None), "parts", False):
        raise TypeError(f"the rows of {config.decode!r} have parts, which no cache can keep: leave out cache=")
    if isinstance(config.source, Table):
        config = _with_table(config, cache)
    if isinstance(config.collate_fn, PackCollate):
        _check_packed(config, cache, static_batches)
    if cache is not None:
        from aiofeed.cache.encoded.database import EncodedCache

        if isinstance(cache, EncodedCache):
            config, cache = replace(config, source=_cached_source(config.source, cache)), None
    _warn_of_large_batches(config)
    if config.engines:
        from aiofeed.processes.workers import spawn

        spawn.check_picklable(
            config.engine_kind, source=config.source, decode=config.decode, collate_fn=config.collate_fn
        )
    if cache is not None:
        config = replace(config, cache=_new_store(cache, config, static_batches))
    if static_batches:
        sampled = sampled or listed or isinstance(config.source, Stream)
        _check_static(config, drop_last=drop_last and not listed, sampled=sampled)
        config = with_static_outputs(config)
    return config


def _warn_of_large_batches(config: FeederConfig) -> None:
    """Log a warning if two batches take more than the free memory, if their size is known."""
    row: Row | None = getattr(config.decode, "row", None) if decodes_in_place(config.decode) else None
    if row is None or row.parts:
        return
    nbytes = 2 * config.batch_size * math.prod(row.shape) * np.dtype(row.dtype).itemsize
    # Reading the free memory takes 0.4 ms.
    if nbytes >= _CHECKED_BYTES and nbytes > (free := machine.free_memory()):
        log.warning(
            "two batches of %d samples, one in use and the next one, take %s, and this machine or container has %s "
            "left: make batch_size= smaller, or raise the container's memory limit",
            config.batch_size,
            format_bytes(nbytes),
            format_bytes(free),
        )


def _with_table(config: FeederConfig, cache: object) -> FeederConfig:
    """Return a configuration that gathers batches of a ``Table`` whose rows are not decoded or collated one by one.

    Raises:
        TypeError: A column has no tensors, or there is a cache.
    """
    assert isinstance(config.source, Table)
    if config.decode is not None:
        return config
    if cache is not None:
        raise TypeError("cache= keeps decoded samples, and a Table without decode= is decoded already: leave it out")
    if config.collate_fn is not None or config.source.data is not None:
        return config
    return replace(config, source=config.source.in_batches(), collate_fn=collate_rows)


def with_resident_tensors(config: FeederConfig) -> FeederConfig:
    """Return a configuration that permutes the tensors of a ``TensorDataset`` in host memory, as for ``Tensors``.

    For a device they are streamed, because they may not fit there.
    """
    excluded = (config.collate_fn, config.backend, config.cache, config.engines or None)
    if not isinstance(config.source, FromDataset) or any(option is not None for option in excluded):
        return config
    tensors = tensors_of(config.source.dataset)
    return config if tensors is None else replace(config, source=tensors)


def with_static_outputs(config: FeederConfig) -> FeederConfig:
    """Return the configuration with new static outputs; their tensors are created with the first batch."""
    from aiofeed.devices.copier import StaticOutput

    backend = config.backend or CpuBackend()
    backends = backend.backends if isinstance(backend, DeviceGroup) else (backend,)
    return replace(config, backend=backend, static_outputs=tuple(map(StaticOutput, backends)))


def adopt_source(source: Any) -> Source[Any] | FromDataset | Tensors:
    """Return the source itself, ``FromDataset`` of a torch ``Dataset``, or ``Stream`` of an ``IterableDataset``."""
    if isinstance(source, FromDataset | Tensors | Stream):
        return source
    if isinstance(source, Mixture):
        return source.combined
    if is_iterable_dataset(source):
        return Stream(source)
    if isinstance(source, type):
        raise TypeError(f"a source is an object, got the class {source.__name__}; pass an instance")
    if callable(getattr(source, "read", None)) or callable(getattr(source, "read_many", None)):
        missing = [name for name in ("__len__", "key", "read") if not hasattr(source, name)]
        if missing:
            raise TypeError(f"a source needs __len__, key and async read; {type(source).__name__} lacks {missing}")
        return source  # type: ignore[no-any-return]
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fspath(source)
        raise TypeError(f"a source is an object, got the path {path!r}; did you mean aiofeed.ImageFolder({path!r})?")
    if isinstance(source, Mapping) and _has_names(source):
        raise TypeError(
            f"a feeder asks a source for samples 0, 1, ..., and this {type(source).__name__} has the keys "
            f"{list(source)[:8]}: pass one of its values, or for a dict of tensors aiofeed.Tensors(*tensors.values())"
        )
    if isinstance(source, tuple) and len(source) > 1 and _are_columns(source):
        raise TypeError(
            f"a tuple of {len(source)} tensors of {len(source[0])} rows each: pass aiofeed.Tensors(x, y, ...), or a "
            f"list if each tensor is a sample"
        )
    if type(source).__module__.partition(".")[0] in ("pyarrow", "polars"):
        raise TypeError(f"an item of a {type(source).__name__} is a column, not a row: pass aiofeed.Table(table)")
    if hasattr(type(source), "iloc"):  # on the type: a Dataset may delegate unknown attributes to a DataFrame
        raise TypeError(
            f"a pandas {type(source).__name__} is indexed by its index, not by position: pass "
            f'aiofeed.Table(frame), or aiofeed.Files(frame["path"], frame["label"])'
        )
    if is_map_dataset(source):
        check_parts(source)
        return FromDataset(source)
    if type(source).__name__ == "DataLoader" and "torch.utils.data" in sys.modules:
        raise TypeError(
            "a DataLoader yields batches, not samples: pass its dataset, or use aiofeed.prefetch(loader, device=...)"
        )
    raise TypeError(
        f"a source has __len__, key and async read, or is a Dataset with __len__ and __getitem__; got {source!r}. For "
        f"an iterable or a generator function pass aiofeed.Stream(...)"
    )


def _check_row(decode: Any) -> None:
    """Raise ``TypeError`` if torch has no tensors of the dtype of a decoder's rows."""
    dtype = np.dtype(decode.row.dtype)
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise TypeError(
            f"the rows of {decode!r} have the dtype {dtype!s}, of which torch has no tensors: use numbers or bools in "
            f"the machine's byte order, or leave out decode_into and return something else"
        )


def _are_columns(values: tuple[Any, ...]) -> bool:
    """Return whether all values are tensors or arrays with the same number of rows."""
    rows = {value.shape[0] if getattr(value, "ndim", 0) else None for value in values}
    return len(rows) == 1 and None not in rows


def _has_names(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has no samples 0, 1, ...; a TensorDict, unlike a dict, has rows that are not keys."""
    return 0 not in mapping if isinstance(mapping, dict) else isinstance(next(iter(mapping), None), str)


def unpack_clips(source: Any, decode: Any) -> tuple[Any, Any]:
    """Return the source of ``Clips``, and their decoder; anything else as it is."""
    if not isinstance(source, Clips):
        return source, decode
    if decode is not None:
        raise TypeError("Clips decode videos themselves, so decode= makes no sense; transform= gets each batch")
    if isinstance(adopt_source(source.source), FromDataset | Tensors | Tokens):
        raise TypeError(
            f"Clips takes a source of encoded videos, such as aiofeed.Files(paths), got {source.source!r}, whose items "
            f"are decoded already"
        )
    return source.source, source.decoder


def adopt_decoder(source: Source[Any] | FromDataset | Tensors, decode: Any) -> Callable[..., Any] | None:
    """Return the decoder, or ``None`` if the source returns decoded samples."""
    if isinstance(source, Tensors):
        if decode is not None:
            raise TypeError("Tensors are decoded already, so decode= makes no sense; transform= gets each batch")
        return None
    if isinstance(source, Tokens):
        if decode is not None:
            raise TypeError("Tokens are decoded already, so decode= makes no sense; transform= gets each batch")
        return source.decoder
    if isinstance(source, Table) and decode is None:
        return None
    if isinstance(source, FromDataset):
        if decode is None:
            return None
        items, instead = source.dataset, "decode in the dataset"
        if isinstance(items, list | tuple) and items and isinstance(items[0], str | os.PathLike):
            instead = f"a {type(items).__name__} is used as a Dataset; for files pass aiofeed.Files(paths)"
        raise TypeError(f"a Dataset's items are decoded, so decode= makes no sense: {instead}")
    if decode is None:
        if isinstance(source, Stream):
            return None
        raise TypeError(
            f"{type(source).__name__} returns bytes, so decode= is needed: aiofeed.DecodeImage(size=224) for images, "
            f"or any callable bytes -> tensor (decode=lambda data: data keeps the result of read())"
        )
    if not callable(decode):
        raise TypeError(f"decode must be callable, got {decode!r}")
    if isinstance(decode, type):
        raise TypeError(f"decode must be a decoder, got the class {decode.__name__}; pass an instance")
    if is_async_function(decode):
        raise TypeError(
            f"decode must be an ordinary function, which threads call; {decode!r} is `async def`: await in the "
            f"source's `async read` instead"
        )
    if decodes_in_place(decode):
        _check_row(decode)
    return decode  # type: ignore[no-any-return]


def an_engine(value: object) -> tuple[int, RayEngine | None]:
    """Return the number of worker processes or actors that ``engine=`` requests, and the options of Ray.

    Raises:
        TypeError, ValueError: The value is not "thread", "process", of the form "process:4", "ray" or a ``RayEngine``.
        ImportError: Ray is not installed.
    """
    expected = 'expected "thread", "process", or "process:4" for four processes; for a Ray cluster "ray" or RayEngine()'
    if value == "thread":
        return 0, None
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if isinstance(value, str) and (
        kind not in ("process", "ray") or (colon and not (number.isascii() and number.isdigit() and int(number) > 0))
    ):
        raise ValueError(f"engine={value!r}: {expected}")
    if kind != "process":
        from aiofeed.processes.actors.options import RayEngine

        ray = value if kind != "ray" else RayEngine(int(number)) if colon else RayEngine()
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


def a_batch_size(value: object) -> int:
    """Return ``value`` if it is a valid ``batch_size``."""
    if value is None:
        raise TypeError(
            "batch_size must be an int, got None: a Feeder makes the batches. aiofeed.DataLoader(dataset, "
            "batch_size=None) gives single items; aiofeed.prefetch(batches, device=...) takes batches that you made"
        )
    return check_positive_int("batch_size", value)


def a_collate_fn(value: object, batch_size: object) -> Collate | PackCollate | None:
    """Return ``value`` if it is a valid ``collate_fn``; for ``Pack``, its own.

    Raises:
        TypeError, ValueError: It is no such function, or ``Pack`` excludes it.
    """
    collate_fn: Collate | None = check_callable("collate_fn", value)
    if not isinstance(batch_size, Pack):
        return collate_fn
    if collate_fn is not None:
        raise ValueError("Pack puts the batches together, so leave out collate_fn=; transform= gets each batch")
    return PackCollate(batch_size.rows, batch_size.context, batch_size.separator, batch_size.pad)


def length_of(source: Source[Any] | FromDataset | Tensors) -> int:
    """Return the number of samples of a source; 0 for a stream, whose end is not known before it is read."""
    return 0 if isinstance(source, Stream) else len(source)


def check_stream(source: object, **arguments: Any) -> None:
    """Raise ``ValueError`` if ``source`` is a ``Stream`` and one of some arguments of ``Feeder`` excludes it."""
    if not isinstance(source, Stream):
        return
    policy = as_policy(arguments["on_error"])
    unbounded = policy.action != "raise" and isinstance(policy.max_failures, float)
    number = f"FailurePolicy({policy.action!r}, max_failures=100)"
    for name, excluded, why in (
        ("shuffle", a_shuffle(arguments["shuffle"]), "has an order of its own: pass Stream(..., shuffle_buffer=N)"),
        ("sampler", arguments["sampler"] is not None, "has no indices: choose items in the iterable"),
        ("weights", arguments["weights"] is not None, "has no indices: choose items in the iterable"),
        ("batch_sampler", arguments["batch_sampler"] is not None, "has no indices: pass batch_size="),
        ("batch_size", isinstance(arguments["batch_size"], LengthPlan), "has no list of lengths: pass a number"),
        ("cache", arguments["cache"] is not None, "has no indices, by which a cache finds samples: leave it out"),
        ("in_order", arguments["in_order"] == "samples", "gives the items of a batch together: pass in_order=False"),
        ("engine", an_engine(arguments["engine"])[0], 'is read in this process: pass engine="thread"'),
        (
            "on_error",
            policy.retries or policy.read_timeout_s is not None,
            "gives each item once, so that a read cannot be timed or repeated: do that in the iterable",
        ),
        (
            "on_error",
            unbounded,
            f"has no length of which max_failures={policy.max_failures} is a fraction: pass on_error={number}",
        ),
    ):
        if excluded:
            raise ValueError(f"{name}={arguments[name]!r} is not possible with {source!r}: a stream {why}")


def limits_for(
    limits: Limits | None, batch_size: int, source: object, engines: int, ray: RayEngine | None = None
) -> ResolvedLimits:
    """Return all limits as numbers for this machine or the actors of ``ray``, and for a source.

    Raises:
        TypeError: ``limits`` is not a ``Limits``.
        ValueError: A limit that processes share is smaller than their number.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits must be aiofeed.Limits(...), got {limits!r}")
    if limits is not None and not isinstance(source, FromDataset):  # each process has its own copy of a Dataset
        for name in ("read_concurrency", "decode_threads"):
            given = getattr(limits, name)
            if given is not None and given < engines:
                kind, what = ("ray", "actors") if ray else ("process", "processes")
                raise ValueError(
                    f'Limits({name}={given}) with engine="{kind}:{engines}": the {what} share the limit, and each '
                    f'needs 1; use at least {engines}, or fewer {what}, as engine="{kind}:{given}"'
                )
    return resolve_limits(
        limits or Limits(),
        batch_size=batch_size,
        cpus=ray.actors * ray.cpus_per_actor if ray else machine.cpus(),
        free_memory=machine.free_memory(),
        most_threads=source.threads if isinstance(source, FromDataset) else None,
        engines=engines,
    )


def _check_tensors(config: FeederConfig, cache: object, static_batches: bool, *, listed: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` if an option excludes ``Tensors``."""
    if listed:
        raise ValueError(
            "batches of Tensors are views of one size: with batch_sampler= or a plan, pass "
            "torch.utils.data.TensorDataset(...) as the source"
        )
    if config.collate_fn is not None:
        raise TypeError(
            "batches of Tensors are views, not collated from samples, so collate_fn= makes no sense: pass transform=, "
            "which gets each batch, or torch.utils.data.TensorDataset(...) as the source"
        )
    if cache is not None:
        raise TypeError("cache= keeps samples in memory, and the data of Tensors are in memory already: leave it out")
    if isinstance(config.backend, DeviceGroup):
        raise ValueError(
            "the data of Tensors are on one device: for several devices create one feeder for each, with "
            "shard=(rank, world_size)"
        )
    if static_batches:
        raise ValueError(
            "static_batches=True copies every batch, and batches of Tensors are views that need no copy: use copy_ to "
            "copy them into tensors of your own if addresses must not change"
        )
    if config.engines:
        raise ValueError(f'the data of Tensors are decoded already: engine="{config.engine_kind}" has no work to do')


def _check_tokens_on_device(
    config: FeederConfig, source: Tokens, cache: object, static_batches: bool, *, listed: bool
) -> None:
    """Raise an error unless ``cache="device"`` can keep ``Tokens`` where batches are wanted."""
    if cache != "device":
        raise TypeError(
            f"cache={cache!r} keeps decoded samples, and files of tokens are decoded already: leave it out, or pass "
            f'cache="device", which keeps the tokens on the device'
        )
    for name, given in {
        "batch_sampler= or a plan": listed,
        "collate_fn=": config.collate_fn is not None,
        f'engine="{config.engine_kind}"': config.engines,
        "static_batches=True": static_batches,
        "a list of devices": isinstance(config.backend, DeviceGroup),
    }.items():
        if given:
            raise ValueError(
                f'cache="device" gathers batches of Tokens on one device, in its own memory and in one size, which '
                f"excludes {name}: leave out one of the two"
            )
    if config.backend is None and not source.in_memory:
        raise CacheError(
            f'cache="device" with device=None keeps {source!r} in host memory, and its '
            f"{format_bytes(sum(tokens.nbytes for tokens in source.arrays))} are more than half of the free "
            f"{format_bytes(machine.free_memory())}: leave out cache=, and threads gather batches ahead"
        )


def _check_packed(config: FeederConfig, cache: object, static_batches: bool) -> None:
    """Raise ``ValueError`` if an option excludes ``Pack``."""
    if config.policy.action == "replace":
        raise ValueError(
            "Pack plans the place of every token, and a replacement has another length and comes twice: pass "
            "on_error='skip', which leaves padding, or 'raise'"
        )
    if isinstance(config.backend, DeviceGroup):
        raise ValueError(
            "Pack makes one cu_seqlens for all rows of a batch, which cannot be split over devices: create one feeder "
            "for each, with shard=(rank, world_size)"
        )
    if static_batches:
        raise ValueError("static_batches=True needs tensors of one size, and cu_seqlens of Pack varies: leave it out")
    if cache == "device":
        raise ValueError('cache="device" hands out views of permuted rows, and Pack copies tokens: leave it out')


def _check_static(config: FeederConfig, *, drop_last: bool, sampled: bool) -> None:
    """Raise ``ValueError`` if ``static_batches=True`` is impossible because batches may differ in size."""
    if not drop_last and (sampled or config.length % config.batch_size):
        samples = "an unknown number of samples" if sampled else f"{config.length} samples"
        raise ValueError(
            f"static_batches=True needs batches of one size, and the last of {samples} by {config.batch_size} may be "
            f"smaller: pass drop_last=True"
        )
    if config.policy.action == "skip":
        raise ValueError(
            "static_batches=True needs batches of one size, and on_error='skip' makes them smaller: pass "
            "on_error='replace', or 'raise'"
        )


def _cached_source(source: Any, cache: EncodedCache) -> Source[Any]:
    """Return the source with a cache of its encoded samples.

    Raises:
        TypeError: The source gives no encoded samples.
        CacheError: The file is not a cache or cannot be opened.
    """
    if isinstance(source, FromDataset):
        raise TypeError(
            "EncodedCache keeps the bytes that a source reads, and the items of a Dataset are decoded: pass "
            "cache=DiskCache(path), or a source of bytes such as aiofeed.Files(paths) with decode="
        )
    from aiofeed.cache.encoded.database import check_file
    from aiofeed.cache.encoded.source import CachedSource

    check_file(cache)
    return CachedSource(source, cache)


def _new_store(cache: object, config: FeederConfig, static_batches: bool) -> SampleStore:
    """Return an empty store for decoded samples.

    Raises:
        TypeError, ValueError: ``cache`` is not a cache, or the source or another argument excludes it.
    """
    from aiofeed.cache.device import DeviceStore
    from aiofeed.cache.disk import DiskCache, DiskStore
    from aiofeed.cache.fingerprint import dataset_identity, identity
    from aiofeed.cache.host import HostCache, HostStore
    from aiofeed.cache.item_codec import new_codec
    from aiofeed.cache.resident import HostRows

    if cache == "host":
        cache = HostCache()
    if cache != "device" and not isinstance(cache, HostCache | DiskCache):
        is_path = isinstance(cache, str) and (os.sep in cache or "." in cache)
        raise TypeError(
            f'cache must be "host", "device", aiofeed.HostCache(...), aiofeed.DiskCache(path) or '
            f"aiofeed.EncodedCache(path, max_bytes), got {cache!r}"
            + (f"; did you mean aiofeed.DiskCache({cache!r})?" if is_path else "")
        )
    source, length, decode = config.source, config.length, config.decode
    codec = new_codec(decode)
    if cache == "device":
        _check_cache_on_device(config, codec, static_batches)
        if config.backend is None:
            return HostRows(length, config.batch_size, machine.free_memory)
        return DeviceStore(length, config.batch_size)
    if isinstance(cache, DiskCache):
        if decode is None:
            assert isinstance(source, FromDataset)
            named = source.fingerprint()
            return DiskStore(length, cache, named or dataset_identity(source.dataset), compare=named is None)
        return DiskStore(length, cache, fingerprint_of(source, length), identity(decode))
    if config.engines:
        raise ValueError(
            f'cache="host" is memory of this process, and engine="{config.engine_kind}" decodes in other processes: '
            f'pass cache=DiskCache(path), which they share on each machine, or engine="thread"'
        )
    assert isinstance(cache, HostCache)
    return HostStore(length, cache, machine.free_memory)


def _check_cache_on_device(config: FeederConfig, codec: SampleCodec, static_batches: bool) -> None:
    """Raise ``ValueError`` if batches cannot be views of permuted rows."""
    if codec.random:
        raise ValueError(
            f'cache="device" with decode={config.decode!r}: its random augmentation runs on the CPU, sample by sample, '
            f'which is not possible for samples on the device. Use cache="host", or augment batches in transform='
        )
    if config.collate_fn is not None:
        raise ValueError(
            'cache="device" hands out views of permuted rows, which collate_fn= cannot make: leave it out and pass '
            'transform=, which gets each batch, or use cache="host"'
        )
    if config.engines:
        raise ValueError(
            f'cache="device" is memory of this process, and engine="{config.engine_kind}" decodes in other processes: '
            f'pass engine="thread", or cache=DiskCache(path), which they share on each machine'
        )
    if isinstance(config.backend, DeviceGroup):
        raise ValueError(
            'cache="device" keeps samples on one device: for several devices create a feeder for each, with '
            'shard=(rank, world_size), or use cache="host"'
        )
    if static_batches:
        raise ValueError(
            'static_batches=True copies every batch, and with cache="device" batches are views that need no copy: use '
            'copy_ to copy them into tensors of your own if addresses must not change, or use cache="host"'
        )
