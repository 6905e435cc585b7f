"""Segmentation: photographs with objects on them, masks with a palette, and boxes; one crop and flip for all.

    python examples/segmentation.py

Writes images, masks and a list of boxes to a temporary folder, and trains a small network on the CPU to find the class
of each pixel. The photographs are part of scikit-image.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import torch
from PIL import Image, ImageDraw
from torch import nn

import aiofeed

Boxes = dict[str, dict[str, Any]]

CLASSES = ("background", "rectangle", "ellipse", "triangle")
COLOURS = ((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0))  # of the masks, as Pascal VOC has them
BATCH_SIZE, SIZE = 16, 64


def write_data(root: Path, samples: int) -> Boxes:
    """Write ``images/000.jpg`` and ``masks/000.png``, ...; return the boxes and classes of the objects."""
    photographs = [Image.fromarray(each()) for each in (skimage.data.astronaut, skimage.data.coffee, skimage.data.cat)]
    boxes: Boxes = {}
    for folder in ("images", "masks"):
        (root / folder).mkdir()
    for number in range(samples):
        random = np.random.default_rng(number)
        photograph = photographs[number % len(photographs)]
        corner = random.integers(0, np.subtract(photograph.size, (160, 120)))
        image = photograph.crop((*corner, *np.add(corner, (160, 120))))
        mask = Image.new("P", image.size)
        mask.putpalette([value for colour in COLOURS for value in colour])
        # Later objects cover earlier ones, so they are on the two halves of the image.
        target: dict[str, Any] = {"boxes": [], "labels": []}
        for left in (4, 84):
            label = int(random.integers(1, len(CLASSES)))
            width, height = random.integers(28, 64, 2).tolist()
            x, y = left + int(random.integers(0, 72 - width)), int(random.integers(0, 120 - height))
            colour = random.integers(20, 120, 3)
            colour[label - 1] = 240
            for picture, fill in ((image, tuple(colour.tolist())), (mask, label)):
                draw_object(ImageDraw.Draw(picture), label, x, y, width, height, fill)
            target["boxes"].append([x, y, x + width, y + height])
            target["labels"].append(label)
        image.save(root / "images" / f"{number:03}.jpg", quality=90)
        mask.save(root / "masks" / f"{number:03}.png")
        boxes[f"{number:03}.jpg"] = target
    return boxes


def draw_object(draw: ImageDraw.ImageDraw, label: int, x: int, y: int, width: int, height: int, fill: Any) -> None:
    right, lower = x + width - 1, y + height - 1
    if CLASSES[label] == "triangle":
        draw.polygon([(x, lower), (right, lower), (x + width // 2, y)], fill=fill)
    else:
        (draw.ellipse if CLASSES[label] == "ellipse" else draw.rectangle)((x, y, right, lower), fill=fill)


class Segmenter(nn.Module):
    """Four times smaller and back, with a connection past the middle."""

    def __init__(self) -> None:
        super().__init__()

        def layer(before: int, after: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU())

        self.first, self.second = layer(3, 16), layer(16, 32, 2)
        self.deep = nn.Sequential(layer(32, 64, 2), layer(64, 64), layer(64, 32))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.classes = nn.Conv2d(32 + 32, len(CLASSES), 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        half = self.second(self.first(images.float() / 127.5 - 1))
        found: torch.Tensor = self.up(self.classes(torch.cat([half, self.up(self.deep(half))], 1)))
        return found


def mean_iou(found: torch.Tensor, masks: torch.Tensor) -> float:
    """Intersection over union of the objects' classes, on average."""
    classes = [((found == number), (masks == number)) for number in range(1, len(CLASSES))]
    return sum(float((a & b).sum() / (a | b).sum().clip(1)) for a, b in classes) / len(classes)


def box_fit(batch: dict[str, torch.Tensor]) -> float:
    """The share of the boxes' pixels that their class has in the mask: the same for any crop and flip."""
    inside = total = 0
    for mask, boxes, labels in zip(batch["mask"], batch["boxes"], batch["labels"], strict=True):
        for box, label in zip(boxes[labels > 0].round().int().tolist(), labels[labels > 0], strict=True):
            part = mask[box[1] : box[3], box[0] : box[2]]
            inside, total = inside + int((part == label).sum()), total + part.numel()
    return inside / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=192, help="images (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="training steps (%(default)s)")
    parser.add_argument("--report", type=int, default=30, help="steps between two lines of output (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the network is too small for more
    torch.manual_seed(0)
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        boxes = write_data(Path(folder), options.samples)
        source = aiofeed.FolderPairs(f"{folder}/images", f"{folder}/masks", boxes)
        feeder: aiofeed.Feeder[dict[str, torch.Tensor]] = aiofeed.Feeder(
            source,
            decode=aiofeed.DecodePair(aiofeed.DecodeImage(SIZE, crop="random", scale=(0.4, 1.0), flip=True)),
            batch_size=BATCH_SIZE,
            collate_fn=aiofeed.pad_collate({"labels": 0}),
            shuffle=True,
            drop_last=True,
        )
        with feeder:
            for done in range(0, options.steps, options.report):
                losses, ious, fits, started = [], [], [], time.perf_counter()
                for batch in feeder.steps(min(options.report, options.steps - done)):
                    masks = batch["mask"].long()
                    found = model(batch["image"])
                    loss = nn.functional.cross_entropy(found, masks)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    ious.append(mean_iou(found.argmax(1), masks))
                    fits.append(box_fit(batch))
                rate = BATCH_SIZE * len(losses) / (time.perf_counter() - started)
                print(
                    f"step {done + len(losses):3}, epoch {feeder.epoch}: loss {np.mean(losses):.3f}, mean IoU "
                    f"{np.mean(ious):.2f}, {np.mean(fits):.2f} of the boxes filled, {rate:.0f} images/s"
                )


if __name__ == "__main__":
    main()
