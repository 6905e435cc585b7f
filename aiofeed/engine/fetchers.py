"""Chooses the fetcher of a source, a decoder and a cache, and the builders of its batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

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
    from aiofeed.cache.store import SampleStore

NewBuilder: TypeAlias = Callable[[BatchPlan, BufferLease], BatchBuilder]
"""Makes the builder of a planned batch, in memory of a lease."""


def new_fetcher(
    source: Source[Any] | FromDataset,
    decode: Callable[..., Any] | None,
    collate_fn: Collate | PackCollate | None,
    *,
    length: int,
    policy: FailurePolicy,
    cache: SampleStore | None,
    own_process: bool = False,
    lookahead_bytes: int = 0,
) -> Fetcher:
    """The fetcher of a feeder with these arguments; ``own_process`` if it is in a worker process.

    ``lookahead_bytes`` as in ``Limits``.

    Raises:
        CacheError: The cache cannot be used.
    """
    inner: SourceFetcher | DatasetFetcher
    if isinstance(source, FromDataset):
        inner = DatasetFetcher(source, policy, own_process=own_process)
    else:
        in_place = collate_fn is None and decodes_in_place(decode)
        # Samples of a decoded cache need not be read.
        ahead = lookahead_bytes if cache is None else 0
        inner = SourceFetcher(source, decode, in_place=in_place, length=length, policy=policy, lookahead_bytes=ahead)
    if cache is None:
        return inner
    from aiofeed.cache.item_codec import new_codec
    from aiofeed.engine.fetch.cached import CachedFetcher

    return CachedFetcher(inner, new_codec(decode), cache)


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
