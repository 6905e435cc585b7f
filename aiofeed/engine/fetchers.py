"""Choose the fetcher of a source, a decoder and a cache, and the builders of its batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import BatchPlan, Collate, Source, decodes_in_place
from aiofeed.engine.fetch.collate import BatchBuilder, CollateBatchBuilder
from aiofeed.engine.fetch.dataset import DatasetFetcher
from aiofeed.engine.fetch.fetcher import Fetcher
from aiofeed.engine.fetch.sequences import PackCollate
from aiofeed.engine.fetch.source import SourceFetcher
from aiofeed.runtime.buffers import BufferLease
from aiofeed.sources.dataset import FromDataset

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend

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
    """What ``cache=`` takes. Any object with one of the first two methods is a cache.

    Optional members:

    ``wrap(source)``
        Returns a source that looks encoded samples up before it reads them, or ``None`` to use ``open_store``.
    ``facts(decode)``
        Returns what holds for the cache with a decoder, by the names of the table in ``feeder/rules.py``.
    ``check_decoder(decode)``
        Raises ``TypeError`` if it cannot keep what the decoder returns.
    """

    def open_store(self, config: Any) -> CacheStore:
        """Return an empty store for the samples of a feeder, given its ``FeederConfig``.

        Raises:
            TypeError: It cannot keep what the decoder returns.
        """


def new_fetcher(
    source: Source[Any] | FromDataset,
    decode: Callable[..., Any] | None,
    collate_fn: Collate | PackCollate | None,
    *,
    length: int,
    policy: FailurePolicy,
    cache: CacheStore | None,
    own_process: bool = False,
    lookahead_bytes: int = 0,
) -> Fetcher:
    """The fetcher of a feeder with these arguments; ``own_process`` if it is in a worker process.

    ``lookahead_bytes`` as in ``Limits``.

    Raises:
        CacheError: The cache cannot be used.
    """
    inner: InnerFetcher
    if isinstance(source, FromDataset):
        inner = DatasetFetcher(source, policy, own_process=own_process)
    else:
        in_place = collate_fn is None and decodes_in_place(decode)
        # Samples of a decoded cache need not be read.
        ahead = lookahead_bytes if cache is None else 0
        inner = SourceFetcher(source, decode, in_place=in_place, length=length, policy=policy, lookahead_bytes=ahead)
    return inner if cache is None else cache.new_fetcher(inner, decode)


def builder_factory(fetcher: Fetcher, collate_fn: Collate | PackCollate | None, *, staged: bool) -> NewBuilder:
    """The function that makes the builders of a feeder's batches.

    Args:
        fetcher: The feeder's fetcher.
        collate_fn: The user's function, or how to pack documents.
        staged: Whether the tensors that ``collate_fn`` returns are copied into the batch's memory.
    """
    if collate_fn is None:
        return lambda plan, lease: fetcher.new_builder(len(plan.indices), lease)
    if isinstance(collate_fn, PackCollate):
        return collate_fn.new_builder
    return lambda plan, lease: CollateBatchBuilder(len(plan.indices), collate_fn, lease if staged else None)
