"""Does feeding slow the step?

A step of matrix products that reads its batch, on a batch that stays on the device, and on batches that a feeder copies
meanwhile: 64 images at 224 pixels, which the host generates in less than a step, so that only the copies cost. A step
has as many products as take 10 ms; the host is at most two steps ahead of the device. Times are measured between
events in the stream of the step, in the middle of an epoch. With ``static_batches`` the device makes one more copy in
the stream of the step; with ``transform`` it also normalises each batch.

Target: at most 1.02 times the step on a resident batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import aiofeed
from benchmarks.figures import Figure, at_most, column, per
from benchmarks.gpu.clock import drive, marker
from benchmarks.gpu.setup import Setup, synchronize

TITLE = "Step with a feeder, compared with a step on a resident batch"

STEP_S = 0.010
WARM_S = 0.5
"""Time for the clocks of an idle device to rise."""


def run(setup: Setup) -> list[Figure]:
    import torch

    backend = setup.backend
    batch_size, side = setup.size(64, 2), setup.size(224, 4)
    settle, steps = setup.size(40, 1), setup.size(100, 3)
    # Ten batches more than steps, so that the feeder still works when the clock stops.
    images = Blank((settle + steps + setup.size(10, 1)) * batch_size, side)
    step = step_of(setup)
    resident_batch = backend.copy(host := torch.full((batch_size, side, side, 3), 7, dtype=torch.uint8))
    synchronize(backend)
    del host

    def resident() -> Mapping[str, float]:
        return drive(marker(backend), repeat(resident_batch), step, settle=settle, steps=steps)

    def fed(**options: Any) -> Callable[[], Mapping[str, float]]:
        feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
            images, decode=images.decode, batch_size=batch_size, drop_last=True, device=setup.device, **options
        )

        def run_once() -> Mapping[str, float]:
            with feeder:
                return drive(marker(backend), iter(feeder), step, settle=settle, steps=steps)

        return run_once

    samples = setup.interleave(
        {
            "resident": resident,
            "feeder": fed(),
            "static_batches": fed(static_batches=True),
            "transform": fed(transform=lambda batch: batch.float().div(255)),
        }
    )
    step_s = {label: column(rounds, "step_s") for label, rounds in samples.items()}
    return [
        Figure("step with feeder / resident", per(step_s["feeder"], step_s["resident"]), target=at_most(1.02)),
        Figure(
            "with static_batches / resident", per(step_s["static_batches"], step_s["resident"]), target=at_most(1.02)
        ),
        Figure("with a transform on the device / resident", per(step_s["transform"], step_s["resident"])),
        Figure("step on a resident batch", column(samples["resident"], "step_s", 1e3), "ms"),
        Figure("step with feeder", column(samples["feeder"], "step_s", 1e3), "ms"),
        Figure("device without work between steps: resident", column(samples["resident"], "gap_s", 1e6), "us"),
        Figure("device without work between steps: feeder", column(samples["feeder"], "gap_s", 1e6), "us"),
        Figure("host waited for a batch, per step", column(samples["feeder"], "waited_s", 1e3), "ms"),
    ]


def step_of(setup: Setup) -> Callable[[Any], None]:
    """A step of about ``STEP_S`` that reads its batch."""
    import torch

    backend = setup.backend
    total = backend.copy(zero := torch.zeros(()))
    synchronize(backend)
    del zero

    def step(batch: Any) -> None:
        result = matrix
        for _ in range(products):
            result = result @ matrix
        total.add_(batch.sum(dtype=torch.float32))

    if setup.quick:
        matrix, products = matrix_of(setup, 8), 1
        return step
    # Few launches, so that the device does not wait for a busy host.
    for size in (8192, 4096, 2048, 1024):
        matrix = matrix_of(setup, size)
        product_s = seconds_of(setup, matrix)
        if product_s <= STEP_S / 4:
            break
    products = max(1, round(STEP_S / product_s))
    return step


def matrix_of(setup: Setup, size: int) -> Any:
    """A square matrix of random numbers on the device, which computes faster on zeros.

    Scaled to a spectral radius of 1 (circular law), so that its powers neither grow nor vanish.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=generator).div(size**0.5)
    copy = setup.backend.copy(matrix := matrix.to(torch.bfloat16 if setup.on_cuda else torch.float32))
    synchronize(setup.backend)
    del matrix
    return copy


def seconds_of(setup: Setup, matrix: Any) -> float:
    """Median duration of one product, once the device is warm."""

    def some() -> Mapping[str, float]:
        result = matrix
        for _ in range(count):
            result = result @ matrix
        return {}

    count = 1
    setup.timed(some)  # the library's first call
    count = max(1, round(0.05 / setup.timed(some)["wall_s"]))
    warm = [setup.timed(some)["wall_s"]]
    while sum(warm) < WARM_S:
        warm.append(setup.timed(some)["wall_s"])
    return statistics.median(setup.timed(some)["wall_s"] for _ in range(5)) / count


class Blank:
    """A source of constant images, whose reading and decoding cost next to nothing."""

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
