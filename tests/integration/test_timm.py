"""timm with `aiofeed.DataLoader`: the batches of torch's `DataLoader`, with mixup that is turned off in a later epoch.

timm needs torchvision, which is large, so it is in no extra: the test with the package is skipped where it is missing.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import aiofeed

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

EPOCHS, MIXUP_OFF_EPOCH = 3, 2


class Pictures(Dataset[tuple[Any, int]]):
    """Twelve random pictures with labels, and the attribute `transform` of timm's datasets."""

    transform: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40, 3), np.uint8)
        picture = Image.fromarray(pixels)
        return (picture if self.transform is None else self.transform(picture)), index


class MixupCollate:
    """A collate_fn with a switch, as timm's `FastCollateMixup`: mixes each sample with its mirror in the batch."""

    def __init__(self) -> None:
        self.mixup_enabled = True

    def __call__(self, batch: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.stack([torch.from_numpy(np.array(image)).float() for image, _ in batch])
        labels = torch.tensor([label for _, label in batch])
        if self.mixup_enabled:
            ratio = float(np.random.beta(0.8, 0.8))
            images = ratio * images + (1 - ratio) * images.flip(0)
        return images, labels


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(image, image_of_other) and torch.equal(label, label_of_other)
        for (image, label), (image_of_other, label_of_other) in zip(one, other, strict=True)
    )


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_fn_is_switched_between_epochs(workers: int) -> None:
    """A change in `loader.collate_fn`, or another one, counts from the next epoch, as with torch's loader."""
    results = []
    for new_loader in (DataLoader, aiofeed.DataLoader):
        seed_all()
        loader = new_loader(Pictures(), 4, shuffle=True, num_workers=workers, collate_fn=MixupCollate())
        batches = []
        for epoch in range(EPOCHS):
            if epoch == MIXUP_OFF_EPOCH - 1:
                loader.collate_fn.mixup_enabled = False
            if epoch == MIXUP_OFF_EPOCH:
                loader.collate_fn = MixupCollate()
            batches += list(loader)
        results.append(batches)
    assert same(*results)


def test_collate_fn_is_replaced_with_the_extras_of_aiofeed() -> None:
    """Another `loader.collate_fn` counts from the next epoch with `threads=`, too."""
    loader: Any = aiofeed.DataLoader(Pictures(), 4, threads=1, collate_fn=len)
    assert list(loader) == [4, 4, 4]
    loader.collate_fn = lambda batch: [label for _, label in batch]
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
def test_create_loader(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """With `torch.utils.data.DataLoader = aiofeed.DataLoader`, timm's `create_loader` makes aiofeed's loader: the
    batches are the same with augmentation, mixup and mixup that is turned off in the last epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # RuntimeError: torchvision is made for another torch.
        data: Any = pytest.importorskip("timm.data", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    results = []
    for new_loader in (DataLoader, aiofeed.DataLoader):
        monkeypatch.setattr("torch.utils.data.DataLoader", new_loader)
        seed_all()
        loader = data.create_loader(
            Pictures(),
            (3, 32, 32),
            4,
            is_training=True,
            re_prob=0.2,
            num_workers=workers,
            collate_fn=data.FastCollateMixup(mixup_alpha=0.8, num_classes=12),
            device=torch.device("cpu"),
            persistent_workers=False,
        )
        assert type(loader.loader) is new_loader
        batches = []
        for epoch in range(EPOCHS):
            if epoch == MIXUP_OFF_EPOCH:
                loader.mixup_enabled = False
            batches += [(images.clone(), labels.clone()) for images, labels in loader]
        results.append(batches)
    assert same(*results)
