"""Do batches reach the device as fast as the bus allows?

``prefetch`` copies batches in pinned or pageable memory, which are dropped; compared with a bare loop that copies the
same pinned memory on its own stream, two copies ahead.

Target: at least 0.9 of the bare loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import aiofeed
from benchmarks.figures import Figure, at_least, column, per
from benchmarks.gpu.setup import Setup

TITLE = "Copies of batches to the device"


def run(setup: Setup) -> list[Figure]:
    backend = setup.backend
    # A third of a second at 55 GB/s, the rate of a PCIe 5 bus, so that the start of threads is negligible.
    nbytes, batches, slow_batches = setup.size(64 << 20, 1 << 12), setup.size(256, 4), setup.size(64, 4)
    in_pinned = [torch.from_numpy(backend.pin(nbytes)).fill_(1) for _ in range(3)]
    in_pageable = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(3)]

    def bare() -> Mapping[str, float]:
        side = backend.side_stream()
        ahead: list[Any] = []
        with backend.use_stream(side):
            for number in range(batches):
                backend.copy(in_pinned[number % len(in_pinned)])
                ahead.append(backend.record(side))
                if len(ahead) > 2:
                    ahead.pop(0).synchronize()
        return {"bytes": float(nbytes * batches)}

    def through(memory: list[Any], count: int) -> Mapping[str, float]:
        for _ in aiofeed.prefetch((memory[number % len(memory)] for number in range(count)), device=setup.device):
            pass
        return {"bytes": float(nbytes * count)}

    samples = setup.interleave(
        {
            "bare loop": bare,
            "prefetch": lambda: through(in_pinned, batches),
            "pageable": lambda: through(in_pageable, slow_batches),
        }
    )
    rates = {label: per(column(found, "bytes", 1e-9), column(found, "wall_s")) for label, found in samples.items()}
    bare_rate = rates["bare loop"]
    return [
        Figure("prefetch, pinned batches / bare loop", per(rates["prefetch"], bare_rate), target=at_least(0.9)),
        Figure("prefetch, pageable batches / bare loop", per(rates["pageable"], bare_rate)),
        *[Figure(f"rate: {label}", values, "GB/s") for label, values in rates.items()],
    ]
