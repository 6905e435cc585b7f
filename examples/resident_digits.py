"""Data that fit into memory: trains on scikit-learn's digits, then compares ways to batch data of MNIST's size.

    python examples/resident_digits.py           or: python examples/resident_digits.py --device auto

Needs scikit-learn. The second part uses random pixels and has no step, so it shows the cost of the batches alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiofeed

Batch = list[torch.Tensor]


def train(device: str | None, epochs: int) -> float:
    """Train a small network on 1,500 digits of 8 x 8; returns its accuracy on the other 297."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    torch.set_num_threads(1)  # the network is too small for more
    torch.manual_seed(0)
    order = torch.randperm(len(images))  # the last ones were written by other people
    images, labels = images[order], labels[order]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    training: aiofeed.Feeder[Batch] = aiofeed.Feeder(
        aiofeed.Tensors(images[:1500], labels[:1500]), batch_size=32, shuffle=True, device=device
    )
    test: aiofeed.Feeder[Batch] = aiofeed.Feeder(
        aiofeed.Tensors(images[1500:], labels[1500:]), batch_size=297, device=device
    )
    with training, test:
        model.to(next(iter(test))[0].device)
        for epoch in training.epochs(epochs):
            for x, y in training:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        [(x, y)] = test
        with torch.no_grad():
            return (model(x).argmax(1) == y).float().mean().item()


def indexed(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[Batch]:
    """Shuffled batches by indexing, as usually written for data in memory; without state and ranks."""
    order = torch.randperm(len(images), device=images.device)
    for first in range(0, len(images), size):
        indices = order[first : first + size]
        yield [images[indices], labels[indices]]


def sliced(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[Batch]:
    """Batches in order as slices, which is the least work possible."""
    for first in range(0, len(images), size):
        yield [images[first : first + size], labels[first : first + size]]


def moved(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        yield [part.to(device, non_blocking=True) for part in batch]


def milliseconds(epoch: Callable[[], Iterable[Batch]], device: torch.device) -> float:
    """Time of an epoch without steps: the best of three after the first."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in epoch():
            pass
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times[1:])


def compare(samples: int, size: int, device: torch.device) -> None:
    """Print the times of an epoch of byte images, like MNIST's."""
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(10, (samples,))
    data, on_device = TensorDataset(images, labels), device.type != "cpu"
    workers = 2 if on_device else 0
    loader = DataLoader(
        data, batch_size=size, shuffle=True, num_workers=workers, pin_memory=on_device, persistent_workers=on_device
    )
    uploaded = images.to(device), labels.to(device)
    # With alias=True unshuffled batches are slices of the data.
    feeders: list[aiofeed.Feeder[Batch]] = [
        aiofeed.Feeder(
            aiofeed.Tensors(*uploaded, alias=not shuffle), batch_size=size, shuffle=shuffle, device=device.type
        )
        for shuffle in (True, False)
    ]
    ways: dict[str, Callable[[], Iterable[Batch]]] = {
        "DataLoader": lambda: moved(loader, device) if on_device else loader,
        "indexed by hand": lambda: indexed(*uploaded, size),
        "Feeder(Tensors(...))": lambda: feeders[0],
        "sliced, no shuffle": lambda: sliced(*uploaded, size),
        "Feeder, no shuffle": lambda: feeders[1],
    }
    print(f"\nan epoch of {samples} samples of 28 x 28 bytes, batch {size}, on {device}")
    for name, epoch in ways.items():
        print(f"{name:<24}{milliseconds(epoch, device):8.2f} ms")
    for feeder in feeders:
        feeder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="epochs of the training on digits (%(default)s)")
    parser.add_argument("--samples", type=int, default=60_000, help="samples of random pixels (%(default)s)")
    parser.add_argument("--device", help='"auto", "cuda" (default: the CPU)')
    options = parser.parse_args()
    device = options.device or "cpu"
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
    print(f"test accuracy {train(options.device, options.epochs):.1%}")
    compare(options.samples, 64, torch.device(device))


if __name__ == "__main__":
    main()
