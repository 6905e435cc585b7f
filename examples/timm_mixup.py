"""timm's create_loader with aiofeed: augmentation, and mixup that is turned off for the last epoch.

pip install timm torchvision && python examples/timm_mixup.py
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

import aiofeed

# timm makes its loader by this name. From here on it is aiofeed's.
torch.utils.data.DataLoader = aiofeed.DataLoader  # type: ignore[misc]

EPOCHS, MIXUP_OFF_EPOCH = 3, 2


class Pictures(Dataset[tuple[Any, int]]):
    """Random pictures. timm sets ``transform``."""

    transform: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (80, 80, 3), np.uint8)
        return self.transform(Image.fromarray(pixels)), index % 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    from timm.data import FastCollateMixup, create_loader

    loader = create_loader(
        Pictures(),
        input_size=(3, 64, 64),
        batch_size=16,
        is_training=True,
        num_workers=2,
        persistent_workers=False,  # a worker that stays keeps the collate_fn of its start
        collate_fn=FastCollateMixup(mixup_alpha=0.8, num_classes=10),
        device=torch.device("cpu"),
    )
    print(f"create_loader made an {type(loader.loader).__module__}.{type(loader.loader).__name__}")
    for epoch in range(EPOCHS):
        if epoch == MIXUP_OFF_EPOCH:
            loader.mixup_enabled = False
        shapes = [tuple(images.shape) for images, _ in loader]
        print(f"epoch {epoch}: {len(shapes)} batches of {shapes[0]}, mixup {loader.mixup_enabled}")


if __name__ == "__main__":
    main()
