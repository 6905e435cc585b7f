"""What does an epoch cost over tensors that are on the device already?

``aiofeed.Tensors`` against indexing the same tensors by a permutation, batch by batch, which is what people write.

Target: none here; no figures where aiofeed has no ``Tensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiofeed
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.setup import Setup, synchronize

TITLE = "Epochs over tensors on the device"


def run(setup: Setup) -> list[Figure]:
    import torch

    tensors = getattr(aiofeed, "Tensors", None)
    if tensors is None:
        return []
    backend = setup.backend
    length, batch_size = setup.size(60_000, 64), setup.size(256, 8)
    host = torch.ones(length, 784), torch.zeros(length, dtype=torch.int64)
    x, y = (backend.copy(tensor) for tensor in host)
    synchronize(backend)
    del host
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        tensors(x, y), batch_size=batch_size, shuffle=True, drop_last=True, device=setup.device
    )

    def fed() -> Mapping[str, float]:
        for _ in feeder:
            pass
        return {}

    def indexed() -> Mapping[str, float]:
        order = torch.randperm(length, device=backend.device)
        for start in range(0, length - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            _ = x[chosen], y[chosen]
        return {}

    with feeder:
        samples = setup.interleave({"Tensors": fed, "indexing": indexed})
    return [
        Figure("indexing / Tensors", per(column(samples["indexing"], "wall_s"), column(samples["Tensors"], "wall_s"))),
        *[Figure(f"epoch: {label}", column(found, "wall_s", 1e3), "ms") for label, found in samples.items()],
    ]
