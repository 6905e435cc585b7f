"""``HostCache``: decoded samples in the memory of this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aiofeed.cache.layout import Layout, Parts, pack
from aiofeed.cache.store import EMPTY, WRITING, SampleStore
from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import public
from aiofeed.core.validation import check_positive_int, explain_arguments

log: logging.Logger = logging.getLogger("aiofeed.cache")


@public
@explain_arguments()
@dataclass(frozen=True)
class HostCache:
    """Cache decoded samples in memory: ``cache=HostCache(8 << 30)``; ``cache="host"`` is ``HostCache()``.

    Samples are cached in the order in which they are decoded, up to the limit. If not all fit, a log line says so.
    Each feeder has a cache of its own, which survives ``close()`` and is freed with the feeder. A pickled feeder starts
    with an empty cache.

    Args:
        max_bytes: Most bytes to use; ``None``: half of the memory that is free when the first sample is cached (within
            the cgroup's limit), divided among the ranks of this host that ``LOCAL_WORLD_SIZE`` counts.
    """

    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", check_positive_int("HostCache(max_bytes=...)", self.max_bytes))


class HostStore(SampleStore):
    """Samples in one block of memory, in the order in which they were decoded.

    ``free_memory`` returns the bytes of free memory.
    """

    def __init__(self, samples: int, cache: HostCache, free_memory: Callable[[], int]) -> None:
        self._cache = cache
        self._free_memory = free_memory
        super().__init__(samples)

    def _reset(self) -> None:
        super()._reset()
        self._used = 0

    def _allocate(self, layout: Layout) -> None:
        limit = self._cache.max_bytes
        ranks = local_ranks()
        if limit is None:
            limit = self._free_memory() // (2 * ranks)
        capacity = min(self.samples, limit // layout.nbytes)
        if capacity < self.samples:
            log.warning(
                "the cache has room for %d of %d samples: all need %s, the limit is %s%s. The others are decoded in "
                "every epoch (HostCache(max_bytes=...) sets the limit, DiskCache(path) caches samples in a file)",
                capacity,
                self.samples,
                format_bytes(self.samples * layout.nbytes),
                format_bytes(limit),
                "" if self._cache.max_bytes is not None else f", half of the free memory for {ranks} rank(s)",
            )
        # Private memory: a forked child has a copy. The system provides pages as they are written.
        self._arena = np.empty((capacity, layout.nbytes), np.uint8)

    def put(self, index: int, parts: Parts) -> None:
        """Cache a copy of a sample, unless it is cached already or there is no room."""
        with self._lock:
            if self.slots[index] != EMPTY or self._used == len(self._arena):
                return
            slot = self._used
            self._used += 1
            self.slots[index] = WRITING
        self._arena[slot] = pack(parts)
        self.slots[index] = slot


def local_ranks() -> int:
    """Number of ranks that share this host's memory, as torchrun's environment says; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1
