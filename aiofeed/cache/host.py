"""Decoded samples in the memory of this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiofeed.cache.layout import Layout
from aiofeed.cache.store import COMING, NONE, SampleStore
from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import public

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("aiofeed.cache")


@public
@dataclass(frozen=True)
class HostCache:
    """Keep decoded samples in memory: ``cache=HostCache(8 << 30)``; ``cache="host"`` is ``HostCache()``.

    Samples are kept as they are met, until the limit; a log line says so where not all fit. Each feeder has a memory
    of its own, which stays through ``close()`` and goes when the feeder is dropped; a pickled feeder begins without.

    Args:
        max_bytes: at most so many; ``None``: half of the memory that is free when the first sample is kept (the
            cgroup's limit heeded), shared out among the ranks of this host where ``LOCAL_WORLD_SIZE`` says how many.
    """

    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_max_bytes("HostCache", self.max_bytes)


def check_max_bytes(kind: str, value: object) -> None:
    """``TypeError`` or ``ValueError`` where a limit is none."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{kind}(max_bytes=...) must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{kind}(max_bytes=...) must be at least 1, got {value}")


class HostStore(SampleStore):
    """Rows of one stretch of memory, given out as samples are met; memory is taken as it is filled.

    Args:
        samples: length of the source.
        cache: what the user said.
        free_memory: how much there is.
    """

    def __init__(self, samples: int, cache: HostCache, free_memory: Callable[[], int]) -> None:
        self._cache = cache
        self._free_memory = free_memory
        super().__init__(samples)

    def _blank(self) -> None:
        super()._blank()
        self._used = 0

    def _open(self, layout: Layout) -> None:
        limit = self._cache.max_bytes
        ranks = local_ranks()
        if limit is None:
            limit = self._free_memory() // (2 * ranks)
        capacity = min(self.samples, limit // layout.nbytes)
        if capacity < self.samples:
            log.warning(
                "the cache keeps %d of %d samples: all need %s, and it may have %s%s; the others are decoded in every "
                "epoch (HostCache(max_bytes=...) sets the limit, DiskCache(path) keeps samples in a file)",
                capacity,
                self.samples,
                format_bytes(self.samples * layout.nbytes),
                format_bytes(limit),
                "" if self._cache.max_bytes is not None else f", half of what is free for {ranks} rank(s) of this host",
            )
        # Private to this process: a fork has a copy. The system gives pages as they are written to.
        self._arena = np.empty((capacity, layout.nbytes), np.uint8)

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Keep a sample, where there is room and it is not kept already."""
        with self._lock:
            if self._slots[index] != NONE or self._used == len(self._arena):
                return
            slot = self._used
            self._used += 1
            self._slots[index] = COMING
        self._arena[slot] = row
        self._slots[index] = slot


def local_ranks() -> int:
    """How many ranks share this host's memory, as far as torchrun says."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1
