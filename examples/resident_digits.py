"""Data that fit into memory, uploaded once: scikit-learn's digits, trained; then MNIST's size, timed three ways.

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


def by_hand(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[Batch]:
    """What is usually written where data are in memory: no state, no ranks."""
    order = torch.randperm(len(images))
    for first in range(0, len(images), size):
        chosen = order[first : first + size]
        yield [images[chosen], labels[chosen]]


def milliseconds(epoch: Callable[[], Iterable[Batch]]) -> float:
    """Of an epoch without a step, the best of three after the first."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in epoch():
            pass
        taken.append((time.perf_counter() - began) * 1e3)
    return min(taken[1:])


def compare(samples: int, size: int) -> None:
    images, labels = torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=size, shuffle=True)
    feeder: aiofeed.Feeder[Batch] = aiofeed.Feeder(aiofeed.Tensors(images, labels), batch_size=size, shuffle=True)
    print(f"\nan epoch of {samples} samples of 28 x 28, batch {size}, on the CPU")
    print(f"{'DataLoader':<24}{milliseconds(lambda: loader):8.1f} ms")
    print(f"{'indexed by hand':<24}{milliseconds(lambda: by_hand(images, labels, size)):8.1f} ms")
    print(f"{'Feeder(Tensors(...))':<24}{milliseconds(lambda: feeder):8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="of the digits (%(default)s)")
    parser.add_argument("--samples", type=int, default=60_000, help="of the made-up pixels (%(default)s)")
    parser.add_argument("--device", help='for the digits: "auto", "cuda" (default: the CPU)')
    options = parser.parse_args()
    print(f"test accuracy {train(options.device, options.epochs):.1%}")
    compare(options.samples, 64)


if __name__ == "__main__":
    main()
