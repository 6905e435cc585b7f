"""Data that fit into memory, uploaded once: scikit-learn's digits, trained; then MNIST's size, side by side.

    python examples/resident_digits.py           or: python examples/resident_digits.py --device auto

Needs scikit-learn. The second part has made-up pixels and no step: it shows what batches themselves cost.
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
    """Train a small network on 1,500 digits of 8 x 8; the share of the other 297 that it gets right."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    torch.set_num_threads(1)  # the network is too small for more
    torch.manual_seed(0)
    order = torch.randperm(len(images))  # the last ones are in other people's hands
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
    """What is usually written where data are in memory: no state, no ranks."""
    order = torch.randperm(len(images), device=images.device)
    for first in range(0, len(images), size):
        chosen = order[first : first + size]
        yield [images[chosen], labels[chosen]]


def sliced(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[Batch]:
    """Without shuffle, the least there can be: each batch a slice."""
    for first in range(0, len(images), size):
        yield [images[first : first + size], labels[first : first + size]]


def moved(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        yield [part.to(device, non_blocking=True) for part in batch]


def milliseconds(epoch: Callable[[], Iterable[Batch]], device: torch.device) -> float:
    """Of an epoch without a step, the best of three after the first."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in epoch():
            pass
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return min(taken[1:])


def compare(samples: int, size: int, device: torch.device) -> None:
    """Batches of bytes, as MNIST has them."""
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(10, (samples,))
    data, on_device = TensorDataset(images, labels), device.type != "cpu"
    workers = 2 if on_device else 0
    loader = DataLoader(
        data, batch_size=size, shuffle=True, num_workers=workers, pin_memory=on_device, persistent_workers=on_device
    )
    there = images.to(device), labels.to(device)
    # With alias=True unshuffled batches are slices of the data themselves, as by hand.
    feeders: list[aiofeed.Feeder[Batch]] = [
        aiofeed.Feeder(aiofeed.Tensors(*there, alias=not shuffle), batch_size=size, shuffle=shuffle, device=device.type)
        for shuffle in (True, False)
    ]
    ways: dict[str, Callable[[], Iterable[Batch]]] = {
        "DataLoader": lambda: moved(loader, device) if on_device else loader,
        "indexed by hand": lambda: indexed(*there, size),
        "Feeder(Tensors(...))": lambda: feeders[0],
        "sliced, no shuffle": lambda: sliced(*there, size),
        "Feeder, no shuffle": lambda: feeders[1],
    }
    print(f"\nan epoch of {samples} samples of 28 x 28 bytes, batch {size}, on {device}")
    for name, epoch in ways.items():
        print(f"{name:<24}{milliseconds(epoch, device):8.1f} ms")
    for feeder in feeders:
        feeder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="of the digits (%(default)s)")
    parser.add_argument("--samples", type=int, default=60_000, help="of the made-up pixels (%(default)s)")
    parser.add_argument("--device", help='"auto", "cuda" (default: the CPU)')
    options = parser.parse_args()
    where = options.device or "cpu"
    if where == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        where = "cpu" if found is None else found.type
    print(f"test accuracy {train(options.device, options.epochs):.1%}")
    compare(options.samples, 64, torch.device(where))


if __name__ == "__main__":
    main()
