"""The configuration of a feeder: its arguments, checked against each other.

Each error says what was given and what to write instead.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.errors import CacheError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.formatting import format_bytes
from aiofeed.core.limits import Limits, ResolvedLimits
from aiofeed.core.types import Collate, Row, Source, Transform, decodes_in_place
from aiofeed.core.validation import check_bool
from aiofeed.devices.backend import CpuBackend
from aiofeed.devices.resolve import DeviceGroup
from aiofeed.engine.fetch.sequences import PackCollate
from aiofeed.feeder.arguments import an_engine, check_stream, limits_for
from aiofeed.runtime import machine
from aiofeed.sampling.state import InOrder
from aiofeed.sources.arrays.tokens import Tokens
from aiofeed.sources.dataset import FromDataset, fingerprint_of
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


@dataclass(frozen=True, eq=False)
class FeederConfig:
    """The checked arguments of a feeder.

    Args:
        engines: Number of worker processes or actors; 0: threads of this process.
        ray: The options of ``engine="ray"``.
        static_outputs: One per device if ``static_batches=True``; otherwise empty.
        user_cache: ``cache=`` as the user gave it, without an ``EncodedCache``, which is part of ``source``.
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
    user_cache: object = None
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
    config = _with_options(
        config,
        cache=cache,
        static_batches=check_bool("static_batches", static_batches),
        drop_last=drop_last,
        sampled=sampled,
        listed=listed,
    )
    _warn_of_large_batches(config)
    if config.user_cache is None or config.tokens_resident:
        return config
    return replace(config, cache=_new_store(config.user_cache, config))


def allows(config: FeederConfig, *, listed: bool, **options: Any) -> bool:
    """Return whether ``Feeder`` would accept other options beside those of a complete configuration.

    Args:
        listed: As of ``complete_config``.
        options: ``in_order``, ``engine`` or ``cache``, as of ``Feeder``. ``cache="disk"`` is a ``DiskCache``.
    """
    from aiofeed.cache.disk import DiskCache

    given = {"cache": config.user_cache, "engine": config.engine, "in_order": config.in_order, **options}
    indexed: dict[str, Any] = dict.fromkeys(("sampler", "weights", "batch_sampler", "batch_size"))
    try:
        if given["cache"] == "disk":
            given["cache"] = DiskCache("cache")
        check_stream(config.source, shuffle=False, on_error=config.policy, **indexed, **given)
        engines, ray = an_engine(given["engine"])
        limits_for(config.user_limits, config.batch_size, config.source, engines, ray)
        _with_options(
            replace(config, engines=engines, ray=ray, in_order=given["in_order"]),
            cache=given["cache"],
            static_batches=bool(config.static_outputs),
            drop_last=True,
            sampled=False,
            listed=listed,
        )
    except (TypeError, ValueError, ImportError, CacheError):  # what the checks raise
        return False
    return True


def _with_options(
    config: FeederConfig, *, cache: object, static_batches: bool, drop_last: bool, sampled: bool, listed: bool
) -> FeederConfig:
    """As ``complete_config``, without its warning and the store of ``cache``."""
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
        config, cache = replace(config, tokens_resident=True, user_cache=cache), None
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
    if config.engines:
        from aiofeed.processes.workers import spawn

        spawn.check_picklable(
            config.engine_kind, source=config.source, decode=config.decode, collate_fn=config.collate_fn
        )
    if cache is not None:
        config = replace(config, user_cache=_checked_cache(cache, config, static_batches))
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


def _checked_cache(cache: object, config: FeederConfig, static_batches: bool) -> object:
    """Return "device", or a cache of decoded samples with its settings.

    Raises:
        TypeError, ValueError: ``cache`` is not a cache, or the source or another argument excludes it.
    """
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.fingerprint import identity
    from aiofeed.cache.host import HostCache
    from aiofeed.cache.item_codec import new_codec

    if cache == "host":
        cache = HostCache()
    if cache != "device" and not isinstance(cache, HostCache | DiskCache):
        is_path = isinstance(cache, str) and (os.sep in cache or "." in cache)
        raise TypeError(
            f'cache must be "host", "device", aiofeed.HostCache(...), aiofeed.DiskCache(path) or '
            f"aiofeed.EncodedCache(path, max_bytes), got {cache!r}"
            + (f"; did you mean aiofeed.DiskCache({cache!r})?" if is_path else "")
        )
    codec = new_codec(config.decode)
    if cache == "device":
        _check_cache_on_device(config, codec, static_batches)
    elif isinstance(cache, DiskCache):
        if config.decode is not None:
            identity(config.decode)  # raises if the settings of the decoder are unknown
    elif config.engines:
        raise ValueError(
            f'cache="host" is memory of this process, and engine="{config.engine_kind}" decodes in other processes: '
            f'pass cache=DiskCache(path), which they share on each machine, or engine="thread"'
        )
    return cache


def _new_store(cache: object, config: FeederConfig) -> SampleStore:
    """Return an empty store for decoded samples."""
    from aiofeed.cache.device import DeviceStore
    from aiofeed.cache.disk import DiskCache, DiskStore
    from aiofeed.cache.fingerprint import dataset_identity, identity
    from aiofeed.cache.host import HostCache, HostStore
    from aiofeed.cache.resident import HostRows

    source, length, decode = config.source, config.length, config.decode
    if cache == "device":
        if config.backend is None:
            return HostRows(length, config.batch_size, machine.free_memory)
        return DeviceStore(length, config.batch_size)
    if isinstance(cache, DiskCache):
        if decode is None:
            assert isinstance(source, FromDataset)
            named = source.fingerprint()
            return DiskStore(length, cache, named or dataset_identity(source.dataset), compare=named is None)
        return DiskStore(length, cache, fingerprint_of(source, length), identity(decode))
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
