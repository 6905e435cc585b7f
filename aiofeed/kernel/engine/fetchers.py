"""Choose the fetcher of a source, a decoder and a cache, and the builders of its batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiofeed.kernel.core.failure_policy import FailurePolicy
from aiofeed.kernel.core.types import BatchPlan, decodes_in_place, traits_of
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, CollateBatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import Fetcher
from aiofeed.kernel.runtime.buffers import BufferLease

if TYPE_CHECKING:
    from aiofeed.kernel.devices.backend import DeviceBackend
    from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher
    from aiofeed.kernel.engine.fetch.source import SourceFetcher

InnerFetcher: TypeAlias = "SourceFetcher | DatasetFetcher"
NewBuilder: TypeAlias = Callable[[BatchPlan, BufferLease], BatchBuilder]
"""Makes the builder of a planned batch, in memory of a lease."""


class CacheStore(Protocol):
    """The samples of one feeder in a cache. It is pickled for worker processes, without samples."""

    def attach(self, backend: DeviceBackend | None) -> None:
        """Set the device of the feeder's batches."""

    def free_with(self, owner: object) -> None:
        """Free device memory when ``owner`` is dropped."""

    def new_fetcher(self, inner: InnerFetcher, decode: Callable[..., Any] | None) -> Fetcher:
        """Return a fetcher that looks samples up in the cache, before ``inner`` fetches them.

        Raises:
            CacheError: The cache cannot be used.
        """


class Cache(Protocol):
    """The value of ``cache=``. Any object with one of the first two methods is a cache.

    Optional members:

    ``wrap(source)``
        Returns a source that looks encoded samples up before it reads them, or ``None`` to use ``open_store``.
    ``facts(decode)``
        Returns what holds for the cache with a decoder, by the names of the table in ``kernel/feeder/rules.py``.
    ``check_decoder(decode)``
        Raises ``TypeError`` if it cannot keep what the decoder returns.
    """

    def open_store(self, config: Any) -> CacheStore:
        """Return an empty store for the samples of a feeder, given its ``FeederConfig``.

        Raises:
            TypeError: It cannot keep what the decoder returns.
        """


def new_fetcher(
    source: Any,
    decode: Callable[..., Any] | None,
    collate_fn: Any,
    *,
    length: int,
    policy: FailurePolicy,
    cache: CacheStore | None,
    own_process: bool = False,
    lookahead_bytes: int = 0,
) -> Fetcher:
    """Return the fetcher of a feeder with these arguments.

    Args:
        source: A ``Source``, or a Dataset as a source.
        decode: Decodes a sample.
        collate_fn: The user's function, or ``None``.
        length: Length of the source when the feeder was made.
        policy: Retries, time limits, and whether the first failure ends a chunk.
        cache: Where decoded samples are kept.
        own_process: Whether it is in a worker process.
        lookahead_bytes: As in ``Limits``.

    Raises:
        CacheError: The cache cannot be used.
    """
    inner: InnerFetcher
    # Imported here: a feeder loads one of both.
    if traits_of(source).items:
        from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher

        inner = DatasetFetcher(source, policy, own_process=own_process)
    else:
        from aiofeed.kernel.engine.fetch.source import SourceFetcher

        in_place = collate_fn is None and decodes_in_place(decode)
        # Samples of a decoded cache need not be read.
        ahead = lookahead_bytes if cache is None else 0
        inner = SourceFetcher(source, decode, in_place=in_place, length=length, policy=policy, lookahead_bytes=ahead)
    return inner if cache is None else cache.new_fetcher(inner, decode)


def builder_factory(fetcher: Fetcher, collate_fn: Any, *, staged: bool) -> NewBuilder:
    """Return the function that makes the builders of a feeder's batches.

    Args:
        fetcher: The feeder's fetcher.
        collate_fn: The user's function. One with a method ``new_builder(plan, lease)`` makes the builders itself.
        staged: Whether the tensors that ``collate_fn`` returns are copied into the batch's memory.
    """
    if collate_fn is None:
        return lambda plan, lease: fetcher.new_builder(len(plan.indices), lease)
    new_builder: NewBuilder | None = getattr(collate_fn, "new_builder", None)
    if new_builder is not None:
        return new_builder
    return lambda plan, lease: CollateBatchBuilder(len(plan.indices), collate_fn, lease, staged=staged)
