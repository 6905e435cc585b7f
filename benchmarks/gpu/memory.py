"""How much device memory does feeding take, and does it grow?

Batches of 128 images at 224 pixels are taken and dropped; what the allocator holds after the first epoch and after ten
more, in batches. ``device_batches`` of two on their way, and one with the consumer, are three; the stream on which one
was dropped may still hold it when the next is asked for. Beside that the page-locked memory of the host, and what is
held where the host never waits for its device: batches that were dropped serve again once their steps have run.

The allocator takes memory in pieces of 2 MiB: a batch of 18.4 MiB counts for 1.09.

Target: at most 8 batches, and at most 2 more later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiofeed
from benchmarks.figures import Figure, at_most
from benchmarks.gpu.overlap import Blank
from benchmarks.gpu.setup import Setup, reserved_bytes

TITLE = "Device memory of a feeder"

SLOW_CYCLES = 40_000_000
"""About 20 ms of a device's time, which is much more than the host takes for a batch."""


def run(setup: Setup) -> list[Figure]:
    backend = setup.backend
    before, before_pinned = reserved_bytes(backend), pinned_bytes(setup)
    if before is None:
        return []
    batch_size, batches, side = setup.size(128, 2), setup.size(60, 3), setup.size(224, 16)
    images = Blank(batch_size * batches, side)
    batch_bytes = batch_size * side * side * 3
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        images, decode=images.decode, batch_size=batch_size, device=setup.device
    )

    def epoch(step: Callable[[], object] = lambda: None) -> Mapping[str, float]:
        for batch in feeder:
            step()
            del batch
        return {}

    def held(since: int) -> tuple[float, ...]:
        return (((reserved_bytes(backend) or 0) - since) / batch_bytes,)

    with feeder:
        setup.timed(epoch)
        found = [Figure("held after the first epoch", held(before), "batches", at_most(8))]
        first = reserved_bytes(backend) or 0
        for _ in range(10):
            setup.timed(epoch)
        found.append(Figure("more after ten epochs", held(first), "batches", at_most(2)))
        if before_pinned is not None:
            pinned = (pinned_bytes(setup) or 0) - before_pinned
            found.append(Figure("page-locked memory of the host", (pinned / batch_bytes,), "batches"))
        if setup.on_cuda:
            last = reserved_bytes(backend) or 0
            for _ in range(2):
                setup.timed(lambda: epoch(slow_kernel))
            found.append(Figure("more where the host never waits for its device", held(last), "batches"))
    return found


def slow_kernel() -> None:
    import torch

    cuda: Any = torch.cuda  # in part without types
    cuda._sleep(SLOW_CYCLES)


def pinned_bytes(setup: Setup) -> int | None:
    """Page-locked memory that torch's allocator holds; ``None`` where it does not count it."""
    import torch

    ask = getattr(torch.cuda, "host_memory_stats", None)
    stats: dict[str, int] = ask() if ask is not None and setup.on_cuda else {}
    # Until torch 2.8 what the allocator holds was "reserved", and "allocated" what it had handed out.
    return next((stats[name] for name in ("reserved_bytes.current", "allocated_bytes.current") if name in stats), None)
