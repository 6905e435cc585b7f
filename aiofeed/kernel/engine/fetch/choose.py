"""Choose the fetcher of a source, a decoder and a cache, and the builders of its batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aiofeed.kernel.core.faces import BaseSource, BuildsBatches, CacheStore, bind_decoder
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, CollateBatchBuilder
from aiofeed.kernel.engine.fetch.fetcher import Fetcher
from aiofeed.kernel.runtime.buffers import BufferLease

if TYPE_CHECKING:
    from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher
    from aiofeed.kernel.engine.fetch.source import SourceFetcher
    from aiofeed.kernel.sources.dataset import FromDataset

InnerFetcher: TypeAlias = "SourceFetcher | DatasetFetcher"
NewBuilder: TypeAlias = Callable[[BatchPlan, BufferLease], BatchBuilder]
"""Makes the builder of a planned batch, in memory of a lease."""


def new_fetcher(
    source: BaseSource,
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
    if source.traits.items:
        from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher

        inner = DatasetFetcher(cast("FromDataset", source), policy, own_process=own_process)
    else:
        from aiofeed.kernel.engine.fetch.source import SourceFetcher

        in_place = collate_fn is None and decode is not None and bind_decoder(decode).row is not None
        # Samples of a decoded cache need not be read.
        ahead = lookahead_bytes if cache is None else 0
        inner = SourceFetcher(source, decode, in_place=in_place, length=length, policy=policy, lookahead_bytes=ahead)
    if cache is None:
        return inner
    cached: Fetcher = cache.new_fetcher(inner, decode)
    return cached


def builder_factory(fetcher: Fetcher, collate_fn: Any, *, staged: bool) -> NewBuilder:
    """Return the function that makes the builders of a feeder's batches.

    Args:
        fetcher: The feeder's fetcher.
        collate_fn: The user's function, or an add-on's object that ``BuildsBatches``.
        staged: Whether the tensors that ``collate_fn`` returns are copied into the batch's memory.
    """
    if collate_fn is None:
        return lambda plan, lease: fetcher.new_builder(len(plan.indices), lease)
    if isinstance(collate_fn, BuildsBatches):
        return collate_fn.new_builder
    return lambda plan, lease: CollateBatchBuilder(len(plan.indices), collate_fn, lease, staged=staged)
