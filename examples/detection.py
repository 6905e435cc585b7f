"""Detection: pictures of two shapes with one to six boxes each, in batches of one shape, with padded boxes and a mask.

    python examples/detection.py

Trains a small detector on the CPU. The pictures are drawn when they are read: rectangles and ellipses on noise.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset

import aiofeed

Batch = dict[str, torch.Tensor]

CLASSES = ("rectangle", "ellipse")
LANDSCAPE, PORTRAIT = (96, 64), (64, 96)
BATCH_SIZE = 16
CELL = 8  # pixels of a cell of the detector's grid


class Pictures(Dataset[dict[str, Any]]):
    """Pictures with boxes [n, 4] as left, top, right, bottom in pixels, and a label per box."""

    def __init__(self, samples: int) -> None:
        # What the plan needs to know in advance: a real data set has the sizes in its annotations.
        landscape = np.random.default_rng(0).random(samples) < 0.6
        self.sizes = [LANDSCAPE if each else PORTRAIT for each in landscape]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random, (width, height) = np.random.default_rng(index), self.sizes[index]
        picture = Image.fromarray(random.integers(0, 96, (height, width, 3), np.uint8))
        draw, boxes, labels = ImageDraw.Draw(picture), [], []
        for _ in range(random.integers(1, 7)):
            sides = random.integers(10, 32, 2)
            corner = random.integers(0, np.subtract((width, height), sides))
            boxes.append([*corner, *(corner + sides)])
            labels.append(int(random.integers(len(CLASSES))))
            shape = draw.ellipse if labels[-1] else draw.rectangle
            shape([int(side) for side in boxes[-1]], fill=tuple(random.integers(128, 256, 3).tolist()))
        # pad_collate pads the labels, which its value names, and the parts of their length.
        return {
            "boxes": torch.tensor(np.array(boxes), dtype=torch.float32),
            "labels": torch.tensor(labels),
            "image": torch.from_numpy(np.array(picture)).permute(2, 0, 1),
        }


class Detector(nn.Module):
    """Predicts for each cell whether the centre of a box is in it, the sides of that box and its class."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(64, 1 + 4 + len(CLASSES), 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        grid: torch.Tensor = self.layers(images.float() / 127.5 - 1)
        return grid


def detection_loss(grid: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The loss over the boxes that the mask marks as real."""
    boxes, mask = batch["boxes"], batch["attention_mask"].bool()
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    column, row = (centres / CELL).long()[mask].unbind(1)
    picture = mask.nonzero()[:, 0]
    is_centre = torch.zeros_like(grid[:, 0])
    is_centre[picture, row, column] = 1
    found = grid[picture, :, row, column]
    cell = torch.stack([column, row], 1).repeat(1, 2) * CELL
    return (
        nn.functional.binary_cross_entropy_with_logits(grid[:, 0], is_centre, pos_weight=torch.tensor(10.0))
        + nn.functional.smooth_l1_loss(found[:, 1:5], (boxes[mask] - cell) / CELL)
        + nn.functional.cross_entropy(found[:, 5:], batch["labels"][mask])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=640, help="pictures of an epoch (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="training steps (%(default)s)")
    parser.add_argument("--report", type=int, default=20, help="steps between two lines of output (%(default)s)")
    options = parser.parse_args()

    pictures = Pictures(options.samples)
    # Pictures of one width have one shape, so the plan takes the widths as lengths: a bucket for each shape.
    widths = [width for width, _ in pictures.sizes]
    feeder: aiofeed.Feeder[Batch] = aiofeed.Feeder(
        aiofeed.FromDataset(pictures, threads=2),
        batch_size=aiofeed.Buckets(widths, boundaries=[LANDSCAPE[0]], batch_sizes=[BATCH_SIZE] * 2),
        collate_fn=aiofeed.pad_collate({"labels": -1}),
        shuffle=True,
        drop_last=True,
    )
    torch.set_num_threads(1)  # the network is too small for more
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with feeder:
        for done in range(0, options.steps, options.report):
            losses, shapes, started = [], set(), time.perf_counter()
            for batch in feeder.steps(min(options.report, options.steps - done)):
                loss = detection_loss(model(batch["image"]), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                height, width = batch["image"].shape[2:]
                shapes.add(f"{width}x{height}")
            rate = BATCH_SIZE * len(losses) / (time.perf_counter() - started)
            print(
                f"step {done + len(losses):3}, epoch {feeder.epoch}: loss {sum(losses) / len(losses):.3f}, "
                f"{rate:.0f} images/s, {' and '.join(sorted(shapes))}"
            )


if __name__ == "__main__":
    main()
