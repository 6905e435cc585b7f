"""Does feeding slow the step?

A step of matrix products of 10 ms that reads its batch, on a batch that stays on the device, and on batches of 64
images that a feeder copies meanwhile. The host is at most two steps ahead. Times are measured between events in the
stream of the step. With ``static_batches`` the device makes one more copy in that stream.

Target: at most 1.02 times the step on a resident batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import torch

import aiofeed
from benchmarks.contenders import Numbered
from benchmarks.figures import Figure, at_most, column, per
from benchmarks.gpu.setup import Setup, drive, marker, steps_of, synchronize

TITLE = "Step with a feeder, compared with a step on a resident batch"

STEP_S = 0.010
WARM_S = 0.5
"""Time for the clocks of an idle device to rise."""


def run(setup: Setup) -> list[Figure]:
    batch_size, side = setup.size(64, 2), setup.size(224, 4)
    settle, steps = setup.size(40, 1), setup.size(100, 3)
    # Ten batches more than steps, so that the feeder still works when the clock stops.
    images = Blank((settle + steps + setup.size(10, 1)) * batch_size, side)
    step = step_of(setup)
    batch = on_device(setup, torch.full((batch_size, side, side, 3), 7, dtype=torch.uint8))

    def resident() -> Mapping[str, float]:
        return drive(marker(setup.backend), repeat(batch), step, settle=settle, steps=steps)

    options: dict[str, Any] = {"decode": images.decode, "batch_size": batch_size, "device": setup.device}
    feeder: Any = aiofeed.Feeder(images, drop_last=True, **options)
    static: Any = aiofeed.Feeder(images, drop_last=True, static_batches=True, **options)
    samples = setup.interleave(
        {
            "resident": resident,
            "feeder": steps_of(setup, feeder, step, settle=settle, steps=steps),
            "static_batches": steps_of(setup, static, step, settle=settle, steps=steps),
        }
    )
    step_s = {label: column(rounds, "step_s") for label, rounds in samples.items()}
    alone, gap = step_s["resident"], "device without work between steps"
    return [
        Figure("step with feeder / resident", per(step_s["feeder"], alone), target=at_most(1.02)),
        Figure("with static_batches / resident", per(step_s["static_batches"], alone), target=at_most(1.02)),
        Figure("step on a resident batch", column(samples["resident"], "step_s", 1e3), "ms"),
        Figure("step with feeder", column(samples["feeder"], "step_s", 1e3), "ms"),
        *[Figure(f"{gap}: {each}", column(samples[each], "gap_s", 1e6), "us") for each in ("resident", "feeder")],
        Figure("host waited for a batch, per step", column(samples["feeder"], "waited_s", 1e3), "ms"),
    ]


def step_of(setup: Setup) -> Callable[[Any], None]:
    """A step of about ``STEP_S`` that reads its batch."""
    total = on_device(setup, torch.zeros(()))
    matrix, products = matrix_of(setup, 8), 1
    if not setup.quick:
        # Few launches, so that the device does not wait for a busy host.
        for size in (8192, 4096, 2048, 1024):
            matrix = matrix_of(setup, size)
            product_s = seconds_of(setup, matrix)
            if product_s <= STEP_S / 4:
                break
        products = max(1, round(STEP_S / product_s))

    def step(batch: Any) -> None:
        multiply(matrix, products)
        total.add_(batch.sum(dtype=torch.float32))

    return step


def multiply(matrix: Any, products: int) -> Mapping[str, float]:
    result = matrix
    for _ in range(products):
        result = result @ matrix
    return {}


def matrix_of(setup: Setup, size: int) -> Any:
    """A square matrix of random numbers on the device, which computes faster on zeros.

    Scaled to a spectral radius of 1 (circular law), so that its powers neither grow nor vanish.
    """
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).div(size**0.5)
    return on_device(setup, matrix.to(torch.bfloat16 if setup.on_cuda else torch.float32))


def seconds_of(setup: Setup, matrix: Any) -> float:
    """Median duration of one product, once the device is warm."""

    def wall_s(products: int) -> float:
        return setup.timed(lambda: multiply(matrix, products))["wall_s"]

    wall_s(1)  # the library's first call
    count = max(1, round(0.05 / wall_s(1)))
    warm_s = 0.0
    while warm_s < WARM_S:
        warm_s += wall_s(count)
    return statistics.median(wall_s(count) for _ in range(5)) / count


def on_device(setup: Setup, tensor: Any) -> Any:
    """A copy on the device, which is finished."""
    copy = setup.backend.copy(tensor)
    synchronize(setup.backend)
    return copy


class Blank(Numbered):
    """A source of constant images, whose reading and decoding cost next to nothing."""

    def __init__(self, length: int, side: int) -> None:
        super().__init__(length)
        self._image = np.full((side, side, 3), 7, np.uint8)

    async def read(self, index: int) -> bytes:
        return b"image"

    def decode(self, data: bytes) -> Any:
        return self._image
