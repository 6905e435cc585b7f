"""How much device memory does feeding take, and does it grow?

The allocator's reserved memory after the first epoch and after ten more, in batches of 128 images, which are dropped;
and page-locked host memory. The allocator reserves multiples of 2 MiB, so a batch of 18.4 MiB counts as 1.09.

Target: at most 8 batches, and at most 2 more later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import aiofeed
from aiofeed.kernel.devices import pinned
from benchmarks.figures import Figure, at_most
from benchmarks.gpu.overlap import Blank
from benchmarks.gpu.setup import Setup

TITLE = "Device memory of a feeder"


def run(setup: Setup) -> list[Figure]:
    before, before_pinned = reserved_bytes(setup), pinned_bytes(setup)
    if before is None:
        return []
    batch_size, batches, side = setup.size(128, 2), setup.size(60, 3), setup.size(224, 16)
    images = Blank(batch_size * batches, side)
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        images, decode=images.decode, batch_size=batch_size, device=setup.device
    )

    def epoch() -> Mapping[str, float]:
        for batch in feeder:
            del batch
        return {}

    def in_batches(nbytes: int) -> tuple[float, ...]:
        return (nbytes / (batch_size * side * side * 3),)

    with feeder:
        setup.timed(epoch)
        first = reserved_bytes(setup) or 0
        for _ in range(10):
            setup.timed(epoch)
        later = reserved_bytes(setup) or 0
        figures = [
            Figure("reserved after the first epoch", in_batches(first - before), "batches", at_most(8)),
            Figure("more after ten epochs", in_batches(later - first), "batches", at_most(2)),
        ]
        if before_pinned is not None:
            pinned = (pinned_bytes(setup) or 0) - before_pinned
            figures.append(Figure("page-locked memory of the host", in_batches(pinned), "batches"))
    return figures


def reserved_bytes(setup: Setup) -> int | None:
    """Device memory that the allocator has reserved; ``None`` if the backend does not report it."""
    backend = setup.backend
    if backend.device.type == "cuda":
        return torch.cuda.memory_reserved(backend.device)
    return getattr(backend.given, "reserved_bytes", None)


def pinned_bytes(setup: Setup) -> int | None:
    """Page-locked memory of aiofeed and of torch's allocator; ``None`` if torch does not report its own."""
    host_memory_stats = getattr(torch.cuda, "host_memory_stats", None)
    stats: dict[str, int] = host_memory_stats() if host_memory_stats is not None and setup.on_cuda else {}
    # Until torch 2.8 reserved memory was "reserved"; since then it is "allocated".
    names = [name for name in ("reserved_bytes.current", "allocated_bytes.current") if name in stats]
    registered = sum(len(mapping) for _, (_, mapping) in list(pinned._registered._watched.values()))
    return stats[names[0]] + registered if names else None
