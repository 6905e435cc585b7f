"""Which fetcher and which assembly a source, a decoder and a ``collate_fn`` come to. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import Collate, Source
from aiofeed.engine.fetch.collate import BatchBuilder, CollateBatchBuilder, RowBatchBuilder
from aiofeed.engine.fetch.dataset import DatasetFetcher
from aiofeed.engine.fetch.default_collate import DefaultCollateBuilder
from aiofeed.engine.fetch.fetcher import Fetcher
from aiofeed.engine.fetch.source import SourceFetcher, decodes_in_place
from aiofeed.runtime.buffers import BufferLease
from aiofeed.sources.dataset import FromDataset

if TYPE_CHECKING:
    from aiofeed.cache.store import SampleStore


class Kinds(NamedTuple):
    """The classes of assemblies: as they are, or made for a place of their own."""

    rows: type[RowBatchBuilder] = RowBatchBuilder
    tree: type[DefaultCollateBuilder] = DefaultCollateBuilder
    collate: type[CollateBatchBuilder] = CollateBatchBuilder


AS_THEY_ARE = Kinds()


def new_fetcher(
    source: Source[Any] | FromDataset,
    decode: Callable[..., Any] | None,
    collate_fn: Collate | None,
    *,
    length: int,
    policy: FailurePolicy,
    cache: SampleStore | None,
) -> Fetcher:
    """What reads and decodes."""
    if isinstance(source, FromDataset):
        if cache is None:
            return DatasetFetcher(source, policy)
        from aiofeed.cache.disk import DiskStore
        from aiofeed.engine.fetch.kept_items import KeptItemsFetcher
        from aiofeed.engine.fetch.shared_items import SharedItemsFetcher

        if isinstance(cache, DiskStore):
            return SharedItemsFetcher(source, policy, store=cache)
        return KeptItemsFetcher(source, policy, store=cache)
    assert decode is not None
    in_place = collate_fn is None and decodes_in_place(decode)
    make: Callable[..., Fetcher] = SourceFetcher
    if cache is not None:
        from aiofeed.cache.resident import ResidentStore
        from aiofeed.engine.fetch.cached import CachedFetcher
        from aiofeed.engine.fetch.resident import ResidentFetcher

        make = partial(ResidentFetcher if isinstance(cache, ResidentStore) else CachedFetcher, store=cache)
    return make(source, decode, in_place=in_place, length=length, policy=policy)


def new_builder(
    fetcher: Fetcher,
    decode: Callable[..., Any] | None,
    collate_fn: Collate | None,
    samples: int,
    lease: BufferLease,
    *,
    staged: bool,
    cached: bool,
    kinds: Kinds = AS_THEY_ARE,
) -> BatchBuilder:
    """Where a batch is put together.

    Args:
        fetcher: whose samples it gets.
        decode, collate_fn: of the feeder.
        samples: how many.
        lease: its memory.
        staged: whether what ``collate_fn`` makes is moved there, too.
        cached: whether ``fetcher`` keeps samples.
        kinds: of assemblies.
    """
    if collate_fn is not None:
        return kinds.collate(samples, collate_fn, lease if staged else None)
    if cached:
        from aiofeed.engine.fetch.kept_items import KeptItemsFetcher
        from aiofeed.engine.fetch.resident import ResidentFetcher

        if (
            isinstance(fetcher, ResidentFetcher | KeptItemsFetcher)
            and (held := fetcher.builder(samples, lease)) is not None
        ):
            return held
    if decodes_in_place(decode):
        return kinds.rows(decode.row, samples, lease, targets=fetcher.has_targets)  # type: ignore[union-attr]
    if cached:
        from aiofeed.engine.fetch.cached import cached_assembly

        if (alike := cached_assembly(fetcher)) is not None:
            return kinds.rows(alike[0], samples, lease, targets=fetcher.has_targets, torch_dtype=alike[1])
    return kinds.tree(samples, lease)
