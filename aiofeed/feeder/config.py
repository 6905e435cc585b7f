"""The configuration of a feeder: its arguments, checked against each other."""

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
    check_static,
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
    from aiofeed.devices.copier import StaticOutput
    from aiofeed.devices.resolve import Device


@dataclass(frozen=True, eq=False)
class FeederConfig:
    """The checked arguments of a feeder.

    Args:
        engines: Number of worker processes; 0: threads of this process.
        static_outputs: One per device if ``static_batches=True``; otherwise empty.
        user_limits: The limits that the user specified; ``None``: none of ``limits`` is tuned.
        passable: Shares the memory of worker processes with a server's consumers.
    """

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
    static_outputs: tuple[StaticOutput, ...] = ()
    cache: Cache | None = None
    user_limits: Limits | None = None


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
    """Check the arguments of ``Feeder`` and return its configuration. ``source`` is a result of ``adopt_source``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, or two exclude each other.
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
        user_limits=limits or Limits(),
    )
    _check_picklable(config)
    store = adopt_cache(
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
    config = replace(config, cache=store)
    if static_batches:
        known_length = None if sampled else length
        check_static(drop_last=drop_last, length=known_length, batch_size=batch_size, policy=config.policy)
        config = with_static_outputs(config)
    _check_resident(config)
    return config


def with_static_outputs(config: FeederConfig) -> FeederConfig:
    """Return the configuration with new static outputs; their tensors are created with the first batch."""
    from aiofeed.devices.copier import static_outputs_for

    backend = config.backend or CpuBackend()
    return replace(config, backend=backend, static_outputs=static_outputs_for(backend))


def _check_resident(config: FeederConfig) -> None:
    """Raise ``ValueError`` if an option excludes ``Tensors``."""
    if not isinstance(config.source, Tensors):
        return
    if isinstance(config.backend, DeviceGroup):
        raise ValueError(
            "the data of Tensors are on one device: for several devices create one feeder for each, with "
            "shard=(rank, world_size)"
        )
    if config.static_outputs:
        raise ValueError(
            "static_batches=True copies every batch, and batches of Tensors are views that need no copy: use copy_ to "
            "copy them into tensors of your own if addresses must not change"
        )
    if config.engines:
        raise ValueError('the data of Tensors are decoded already: engine="process" has no work to do')


def _check_picklable(config: FeederConfig) -> None:
    """Raise ``TypeError`` if the configuration cannot be sent to worker processes."""
    if config.engines:
        from aiofeed.processes.workers import spawn

        spawn.check_picklable(source=config.source, decode=config.decode, collate_fn=config.collate_fn)


def fingerprint_of(source: Source[Any] | FromDataset | Tensors, length: int) -> str:
    """Return the source's own ``fingerprint()``, or a hash of its type, length and keys."""
    own = getattr(source, "fingerprint", None)
    if own is not None and (found := own()) is not None:
        return str(found)
    kind = type(source.dataset) if isinstance(source, FromDataset) else type(source)
    return fingerprint(kind.__qualname__, length, lambda index: str(source.key(index)))
