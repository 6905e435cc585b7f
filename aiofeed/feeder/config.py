"""What a feeder is made of: its arguments, checked against each other and settled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aiofeed.core.failure_policy import Action, FailurePolicy, as_policy
from aiofeed.core.limits import Limits, ResolvedLimits
from aiofeed.core.types import Collate, Source, Transform
from aiofeed.core.validation import check_bool, check_callable
from aiofeed.devices.backend import CpuBackend
from aiofeed.devices.resolve import DeviceGroup, resolve_devices
from aiofeed.feeder.arguments import (
    adopt_cache,
    adopt_collate,
    adopt_decoder,
    an_engine,
    limits_for,
)
from aiofeed.sampling.schedule import fingerprint
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.tensors import Tensors

if TYPE_CHECKING:
    from aiofeed.cache.disk import DiskCache
    from aiofeed.cache.host import HostCache
    from aiofeed.cache.store import SampleStore as Cache
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.devices.resolve import Device
    from aiofeed.devices.static_copier import StaticBatch


@dataclass(frozen=True, eq=False)
class FeederConfig:
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


def new_config(
    source: Source[Any] | FromDataset | Tensors,
    *,
    length: int,
    decode: Callable[..., Any] | None,
    batch_size: int,
    drop_last: bool,
    sampled: bool,
    collate_fn: Collate | None,
    device: Device | Sequence[Device],
    transform: Transform | None,
    on_error: Action | FailurePolicy,
    cache: Literal["host", "device"] | HostCache | DiskCache | None,
    limits: Limits | None,
    in_order: bool,
    engine: str,
    static_batches: bool,
) -> FeederConfig:
    """A recipe of what a user hands over; arguments as of ``Feeder``, of which ``source`` is adopted.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or two do not go together.
    """
    static_batches = check_bool("static_batches", static_batches)
    config = FeederConfig(
        source=source,
        decode=adopt_decoder(source, decode),
        batch_size=batch_size,
        collate_fn=adopt_collate(source, collate_fn),
        backend=resolve_devices(device),
        transform=check_callable("transform", transform),
        limits=limits_for(limits, batch_size, source, an_engine(engine)),
        in_order=check_bool("in_order", in_order),
        length=length,
        policy=as_policy(on_error),
        engines=an_engine(engine),
        said=limits or Limits(),
    )
    check_travels(config)
    kept = adopt_cache(
        cache,
        source,
        config.decode,
        engines=config.engines,
        batch_size=batch_size,
        backend=config.backend,
        collate_fn=config.collate_fn,
        static_batches=static_batches,
        fingerprint=partial(fingerprint_of, source, length),
    )
    config = replace(config, cache=kept)
    if static_batches:
        config = with_statics(config, drop_last=drop_last, sampled=sampled)
    check_resident(config)
    return config


def with_statics(config: FeederConfig, *, drop_last: bool, sampled: bool) -> FeederConfig:
    """The recipe, with the tensors that every batch is to be handed out in.

    Raises:
        ValueError: its batches are not all alike.
    """
    from aiofeed.devices.static_copier import check_static

    check_static(
        drop_last=drop_last,
        length=None if sampled else config.length,
        batch_size=config.batch_size,
        policy=config.policy,
    )
    return renew_statics(config)


def renew_statics(config: FeederConfig) -> FeederConfig:
    """The same with no tensors made yet, in another process, say."""
    from aiofeed.devices.static_copier import statics_for

    backend = config.backend or CpuBackend()
    return replace(config, backend=backend, statics=statics_for(backend))


def check_resident(config: FeederConfig) -> None:
    """``ValueError`` where data that stay in memory are asked for what only batches on their way can have."""
    if not isinstance(config.source, Tensors):
        return
    if isinstance(config.backend, DeviceGroup):
        raise ValueError(
            "the data of Tensors stay on one device: for several make a feeder for each, with shard=(rank, world_size)"
        )
    if config.statics:
        raise ValueError(
            "static_batches=True copies every batch, and those of Tensors are views that cost nothing: copy_ them into "
            "tensors of your own where addresses have to stay"
        )
    if config.engines:
        raise ValueError('the data of Tensors are read and decoded already: engine="process" has nothing to do')


def check_travels(config: FeederConfig) -> None:
    """See to it that what has to be sent to a process can be; ``TypeError`` where it cannot."""
    if config.engines:
        from aiofeed.processes.workers import spawn

        spawn.check_picklable(source=config.source, decode=config.decode, collate_fn=config.collate_fn)


def fingerprint_of(source: Source[Any] | FromDataset | Tensors, length: int) -> str:
    """What tells a source from another: its own ``fingerprint()``, or one of its type, length and keys."""
    own = getattr(source, "fingerprint", None)
    if own is not None and (said := own()) is not None:
        return str(said)
    kind = type(source.dataset) if isinstance(source, FromDataset) else type(source)
    return fingerprint(kind.__qualname__, length, lambda index: str(source.key(index)))
