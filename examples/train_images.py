"""Trains a small network on a folder of images, one sub-folder per class, and saves it.

    python examples/train_images.py PATH

PATH/cat/1.jpg, PATH/dog/2.png, ...: any format that Pillow reads. `make demo` creates such a folder, and prints it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

import aiofeed


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, stride=4, padding=3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes),
    )  # fmt: skip


def train(source: aiofeed.ImageFolder, options: argparse.Namespace) -> None:
    feeder: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(
        source,
        decode=aiofeed.DecodeImage(size=options.size),
        batch_size=options.batch_size,
        shuffle=True,
        device="auto",
    )
    # The device that "auto" selects. Without is_available(), a CUDA build returns "cuda" on any machine.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    model = network(len(source.classes)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with feeder:
        for epoch in range(options.epochs):
            loss_sum, correct = torch.zeros((), device=device), torch.zeros((), device=device)
            for images, labels in track(feeder, f"epoch {epoch + 1} of {options.epochs}"):
                logits = model(images.float() / 255)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach() * len(labels)
                correct += (logits.argmax(1) == labels).sum()
            print(f"loss {loss_sum.item() / len(source):.4f}, accuracy {correct.item() / len(source):.1%}")
            print(feeder.statistics())
    torch.save({"model": model.state_dict(), "classes": source.classes, "size": options.size}, options.checkpoint)
    print(f"saved {options.checkpoint}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", help="a folder with one sub-folder per class")
    parser.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="side of the network's input in pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("model.pt"), help="where to save (%(default)s)")
    options = parser.parse_args()
    if options.path is None:
        parser.error("PATH is missing: a folder with one sub-folder per class; `make demo` creates one")
    try:
        source = aiofeed.ImageFolder(options.path)
        train(source, options)
    except (OSError, ValueError, aiofeed.FeedError) as error:
        sys.exit(f"train_images.py: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")


if __name__ == "__main__":
    main()
