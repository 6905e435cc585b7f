"""Users' programs for `mypy --strict` (`make lint`). None of this code runs."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import torch

import aiofeed


class Store:
    """A user's source."""

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        return b""

    def target(self, index: int) -> int:
        return 0


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A Dataset."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index


class Photos(aiofeed.Feeder[list[torch.Tensor]]):
    """A feeder with a declared batch type."""

    def __init__(self, root: str, batch_size: int) -> None:
        super().__init__(aiofeed.ImageFolder(root), decode=aiofeed.DecodeImage(224), batch_size=batch_size)


def noisy(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
    """A decoder that draws random numbers."""
    return torch.rand(len(data), generator=rng)


def stacked(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A ``collate_fn``."""
    return {"x": torch.stack([x for x, _ in samples])}


async def train() -> None:
    """Without a declared batch type no annotation is needed; the batch type is the return type of ``collate_fn``."""
    folder = aiofeed.ImageFolder("train")
    feeder = aiofeed.Feeder(folder, decode=aiofeed.DecodeImage(224), batch_size=4, shuffle=True, device="auto")
    assert_type(next(iter(feeder)), list[torch.Tensor])
    for images, labels in feeder:
        print(images.shape, labels.shape)
    async with feeder:
        async for batch in feeder:
            print(batch)

    random = aiofeed.Feeder(Store(), decode=noisy, batch_size=4, cache="host")
    plain = aiofeed.Feeder(Store(), decode=lambda data: len(data), batch_size=4, engine="process:2")
    resident = aiofeed.Feeder(aiofeed.Tensors(torch.zeros(3)), batch_size=3, device=["cpu", "cpu"])
    listed = aiofeed.Feeder([1, 2, 3], batch_size=1, sampler=[0, 1])
    print(random, plain, resident, listed)
    one = aiofeed.Feeder(aiofeed.Tensors(torch.zeros(3)), batch_size=3, shuffle=True)
    assert_type(next(iter(one)), list[torch.Tensor])
    changed = aiofeed.Feeder(folder, decode=aiofeed.DecodeImage(224), batch_size=4, transform=lambda batch: batch[0])
    assert_type(next(iter(changed)), Any)
    aiofeed.Files(["a"], np.zeros(1))
    aiofeed.Files(["a"], torch.zeros(1))

    collated = aiofeed.Feeder(Rows(), batch_size=2, collate_fn=stacked)
    assert_type(next(iter(collated)), dict[str, torch.Tensor])
    assert_type(next(iter(aiofeed.prefetch(collated, device="cpu"))), dict[str, torch.Tensor])
    assert_type(next(iter(Photos("train", 4))), list[torch.Tensor])

    aiofeed.Feeder(Rows(), batch_size=2, shufle=True)  # type: ignore[call-overload]  # mypy finds the typing error
    aiofeed.Feeder(Rows(), batch_size=2, num_workers=4)  # type: ignore[call-overload]
