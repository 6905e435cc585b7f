"""Does feeding cost the step anything?

A step of matrix products that reads its batch, on a batch that is on the device already, and on batches that a feeder
brings meanwhile. The products are as many as make a step of 10 ms. With ``static_batches`` there is one more copy on
the device, in the step's way; with ``transform`` the device normalises each batch, which is work of its own.

Target: at most 1.02 times the step on a batch that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiofeed
from benchmarks.figures import Figure, at_most, column, per
from benchmarks.gpu.setup import Setup, synchronize

TITLE = "Step with a feeder, against a step on a batch that is there"

STEP_S = 0.010


def run(setup: Setup) -> list[Figure]:
    import torch

    backend = setup.backend
    batch_size, steps, side = setup.size(64, 2), setup.size(200, 3), setup.size(224, 4)
    images = Blank(steps * batch_size, side)
    step = step_of(setup)
    there = backend.copy(kept := torch.zeros(batch_size, side, side, 3, dtype=torch.uint8))
    synchronize(backend)

    def resident() -> Mapping[str, float]:
        for _ in range(steps):
            step(there)
        return {}

    def fed(**options: Any) -> Callable[[], Mapping[str, float]]:
        feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
            images, decode=images.decode, batch_size=batch_size, drop_last=True, device=setup.device, **options
        )

        def run_once() -> Mapping[str, float]:
            for batch in feeder:
                step(batch)
            return {"stall_s": feeder.statistics().stall_s}

        feeders.append(feeder)
        return run_once

    feeders: list[aiofeed.Feeder[Any]] = []
    try:
        samples = setup.interleave(
            {
                "resident": resident,
                "feeder": fed(),
                "static_batches": fed(static_batches=True),
                "transform": fed(transform=lambda batch: batch.float().div(255)),
            }
        )
    finally:
        for feeder in feeders:
            feeder.close()
    del kept
    wall = {label: column(found, "wall_s") for label, found in samples.items()}
    return [
        Figure("step with feeder / resident", per(wall["feeder"], wall["resident"]), target=at_most(1.02)),
        Figure("with static_batches / resident", per(wall["static_batches"], wall["resident"]), target=at_most(1.02)),
        Figure("with a transform on the device / resident", per(wall["transform"], wall["resident"])),
        Figure("step on a batch that is there", column(samples["resident"], "wall_s", 1e3 / steps), "ms"),
        Figure("waited for a batch, per step", column(samples["feeder"], "stall_s", 1e3 / steps), "ms"),
    ]


def step_of(setup: Setup) -> Callable[[Any], None]:
    """A step of about ``STEP_S`` that reads its batch."""
    import torch

    backend = setup.backend
    cuda = backend.device.type == "cuda"
    size = setup.size(4096, 8)
    matrix = torch.eye(size, dtype=torch.bfloat16 if cuda else torch.float32)
    moved = backend.copy(matrix)
    total = backend.copy(zero := torch.zeros(()))
    synchronize(backend)
    del matrix, zero

    def work(batch: Any, products: int) -> None:
        result = moved
        for _ in range(products):
            result = result @ moved
        total.add_(batch.sum(dtype=torch.float32))

    products = 1
    if not setup.quick:
        nothing = torch.zeros(1, dtype=torch.uint8, device=backend.device)

        def some() -> Mapping[str, float]:
            work(nothing, 50)
            return {}

        setup.timed(some)
        products = max(1, round(STEP_S / (setup.timed(some)["wall_s"] / 50)))
    return lambda batch: work(batch, products)


class Blank:
    """Images without a file: reading and decoding cost as little as may be, so that the copies are what is left."""

    def __init__(self, length: int, side: int) -> None:
        import numpy as np

        self._length = length
        self._image = np.full((side, side, 3), 7, np.uint8)

    def __len__(self) -> int:
        return self._length

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        return b"image"

    def decode(self, data: bytes) -> Any:
        return self._image
