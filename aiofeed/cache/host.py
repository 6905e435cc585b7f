"""``HostCache``: decoded samples in the memory of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiofeed.cache.layout import UNIT, Layout
from aiofeed.cache.sample_codec import new_codec
from aiofeed.cache.store import EMPTY, PENDING, WRITING, SampleStore, record_slot, units_of
from aiofeed.kernel.core.faces import BaseCache, Exclusion
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_positive_int, explain_arguments, local_ranks
from aiofeed.kernel.runtime import machine

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.cache.cached_fetcher import CachedFetcher
    from aiofeed.kernel.engine.fetch.choose import InnerFetcher
    from aiofeed.kernel.feeder.arguments import FeederConfig

# Records lie in blocks of so many units, 16 MB. A longer record has a block of its own.
BLOCK = 1 << 18

log: logging.Logger = logging.getLogger("aiofeed.cache")


@public
@explain_arguments()
@dataclass(frozen=True)
class HostCache(BaseCache):
    """Cache decoded samples in memory: ``cache=HostCache(8 << 30)``; ``cache="host"`` is ``HostCache()``.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=4, cache=aiofeed.HostCache(8 << 30))
        for epoch in feeder.epochs(2):  # decodes in the first one only
            for images, labels in feeder:
                print(epoch, images.shape)
        ```

    Samples of any shape and structure are cached in the order in which they are decoded, up to the limit. If not all
    fit, a log line says so. Each feeder has a cache of its own, which survives ``close()`` and is freed with the
    feeder. A pickled feeder starts with an empty cache.

    Args:
        max_bytes: Most bytes to use; ``None``: half of the memory that is free when the first sample is cached (within
            the cgroup's limit), divided among the ranks of this machine as the defaults of ``Limits`` are.
    """

    max_bytes: int | None = None

    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (('engine="process"',), ("cache in host memory",), ValueError,
         'it is memory of this process: pass engine="thread", or cache=DiskCache(path), which processes share'),
    )
    # fmt: on

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that it is in host memory."""
        return {"cache in host memory": f"cache={arguments.cache!r}"}

    def check_decoder(self, decode: Callable[..., Any] | None) -> None:
        """Raise ``TypeError`` if a decoder is random and lacks separate methods for decoding and augmentation."""
        new_codec(decode)

    def open_store(self, config: FeederConfig) -> HostStore:
        """Return an empty store for the samples of a feeder."""
        self.check_decoder(config.decode)
        return HostStore(config.length, self, machine.rank_memory)

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", check_positive_int("HostCache(max_bytes=...)", self.max_bytes))


class HostStore(SampleStore):
    """Rows in one block of memory and records in several, in the order in which they were decoded.

    ``free_memory`` returns the bytes of free memory, of one rank.
    """

    def __init__(self, samples: int, cache: HostCache, free_memory: Callable[[], int]) -> None:
        self._cache = cache
        self._free_memory = free_memory
        super().__init__(samples)

    def _reset(self) -> None:
        super()._reset()
        self._limit = self._used_bytes = self._used = self._used_units = 0
        self._blocks: list[NDArray[np.uint8]] = []
        self._full_logged = False

    def new_fetcher(self, inner: InnerFetcher, decode: Callable[..., Any] | None) -> CachedFetcher:
        """Return the fetcher that uses this store."""
        from aiofeed.cache.cached_fetcher import CachedFetcher

        return CachedFetcher(inner, new_codec(decode), self)

    def _room(self) -> int:
        if not self._limit:
            limit = self._cache.max_bytes
            self._limit = self._free_memory() // 2 if limit is None else limit
        return self._limit

    def _allocate(self, layout: Layout) -> Layout:
        self._room()
        capacity = min(self.samples, self._limit // max(layout.nbytes, 1))
        # Private memory: a forked child has a copy. The system provides pages as they are written.
        self._arena = np.empty((capacity, layout.nbytes), np.uint8)
        return layout

    def _store(self, index: int, data: NDArray[np.uint8], units: int) -> None:
        with self._lock:
            if self.slots[index] not in (EMPTY, PENDING):
                return
            if self._used_bytes + self._pending_bytes + data.nbytes > self._limit:
                self._log_full()
                return
            self._used_bytes += data.nbytes
            slot = record_slot(self._take(units), units) if units else self._used
            self._used += not units
            # A pending one stays readable: the lock is held until its slot is set, by ``choose_layout``.
            self.slots[index] = WRITING if self.slots[index] == EMPTY else PENDING
        memory = self._record(slot) if units else self._arena[slot]
        memory[:] = data
        self.slots[index] = slot

    def _log_full(self) -> None:
        if self._full_logged:
            return
        self._full_logged = True
        cached = int(np.count_nonzero(self.slots >= 0))
        log.warning(
            "the cache has room for %d of %d samples: all need about %s, the limit is %s%s. The others are decoded in "
            "every epoch (HostCache(max_bytes=...) sets the limit, DiskCache(path) caches samples in a file)",
            cached,
            self.samples,
            format_bytes(self._used_bytes * self.samples // max(cached, 1)),
            format_bytes(self._limit),
            "" if self._cache.max_bytes is not None else f", half of the free memory for {local_ranks()} rank(s)",
        )

    def _take(self, units: int) -> int:
        """Return the first of so many units, all in one block."""
        if self._used_units + units > BLOCK * len(self._blocks):
            self._used_units = BLOCK * len(self._blocks)
            self._blocks.append(np.empty(max(units, BLOCK) * UNIT, np.uint8))
        self._used_units += units
        return self._used_units - units

    def _record(self, slot: int) -> NDArray[np.uint8]:
        unit, units = units_of(slot)
        start = unit % BLOCK * UNIT
        return self._blocks[unit // BLOCK][start : start + units * UNIT]
