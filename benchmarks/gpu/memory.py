"""How much device memory does feeding take, and does it grow?

Batches of 64 images at 224 pixels are taken and dropped; what the allocator holds after the first epoch and after ten
more, in batches. ``device_batches`` of two on their way, and one with the consumer, are three; the stream on which one
was dropped may still hold it when the next is asked for.

Target: at most 8 batches, and no more than one of the allocator's pieces (20 MB, two batches) later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiofeed
from benchmarks.figures import Figure, at_most
from benchmarks.gpu.overlap import Blank
from benchmarks.gpu.setup import Setup, reserved_bytes

TITLE = "Device memory of a feeder"


def run(setup: Setup) -> list[Figure]:
    backend = setup.backend
    before = reserved_bytes(backend)
    if before is None:
        return []
    batch_size, batches, side = setup.size(64, 2), setup.size(20, 3), setup.size(224, 16)
    images = Blank(batch_size * batches, side)
    batch_bytes = batch_size * side * side * 3
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        images, decode=images.decode, batch_size=batch_size, device=setup.device
    )

    def epoch() -> Mapping[str, float]:
        for batch in feeder:
            del batch
        return {}

    with feeder:
        setup.timed(epoch)
        first = reserved_bytes(backend) or 0
        for _ in range(10):
            setup.timed(epoch)
        last = reserved_bytes(backend) or 0
    return [
        Figure("held after the first epoch, in batches", ((first - before) / batch_bytes,), "batches", at_most(8)),
        Figure("more after ten epochs, in batches", ((last - first) / batch_bytes,), "batches", at_most(2)),
    ]
