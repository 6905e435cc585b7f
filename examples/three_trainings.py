"""Three trainings on the same images: one server reads and decodes each image once for three attached processes.

    python examples/three_trainings.py

Each training has its own learning rate and gets every batch. Without PATH the images are generated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import aiofeed

RATES = (0.02, 0.05, 0.1)
SIZE = 32


def train(address: str, rate: float, epochs: int, classes: int, result: Connection) -> None:
    """One of the trainings, in its own process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses, seen = [], 0
    with aiofeed.attach(address, transform=lambda batch: (batch[0].float() / 255, batch[1])) as feed:
        for _ in range(epochs):
            total, count = 0.0, 0
            for images, labels in feed:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(labels)
                count += len(labels)
            losses.append(total / count)
            seen += count
    result.send((seen, losses[0], losses[-1]))


def generate(folder: Path, per_class: int = 40) -> None:
    """Write small JPEGs in three colours."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir()
        for number in range(per_class):
            pixels = random.integers(0, 160, (48, 64, 3), dtype=np.uint8)
            pixels[..., channel] += 60
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="a folder of images, one subfolder per class")
    parser.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.path
        if folder is None:
            folder = Path(temporary) / "images"
            folder.mkdir()
            generate(folder)
        source = aiofeed.ImageFolder(folder)
        feeder = aiofeed.Feeder(source, decode=aiofeed.DecodeImage((SIZE, SIZE)), batch_size=16, shuffle=True)
        address = os.path.join(temporary, "feed.sock")
        context = multiprocessing.get_context("spawn")
        trainings = []
        for rate in RATES:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=train, args=(address, rate, options.epochs, len(source.classes), sender))
            process.start()
            trainings.append((rate, process, receiver))
        with feeder:
            # The first epoch begins when all three are attached.
            aiofeed.serve(feeder, address, min_consumers=len(RATES)).run(epochs=options.epochs)
            for rate, process, receiver in trainings:
                seen, first, last = receiver.recv()
                print(
                    f"learning rate {rate}: {seen} images, loss {first:.3f} in the first epoch, {last:.3f} in the last"
                )
                process.join()
            print(f"decoded once: {feeder.statistics(total=True).samples} images")


if __name__ == "__main__":
    main()
