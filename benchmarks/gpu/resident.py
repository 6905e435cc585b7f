"""What does an epoch cost over data that fit on the device?

60,000 rows of 784 floats with labels, batches of 256. ``Tensors`` is compared with ``DataLoader`` with 2 persistent
workers and ``pin_memory``; with slices of the same tensors in their order, the least work possible; and with indexing
by a permutation. Bare epochs measure the host's time; those of training take a step of a small network.

Targets: bare, at least 10 times as fast as ``DataLoader``; training, at most 1.05 of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiofeed
from benchmarks.figures import Figure, at_least, at_most, column, per
from benchmarks.gpu.overlap import on_device
from benchmarks.gpu.setup import Setup, Work

TITLE = "Epochs over data that fit on the device"

FEATURES = 784
CLASSES = 10

Epochs = Callable[[int], Iterator[Any]]
"""The batches of so many epochs."""


def run(setup: Setup) -> list[Figure]:
    length, batch_size = setup.size(60_000, 64), setup.size(256, 8)
    host = torch.rand(length, FEATURES), torch.randint(CLASSES, (length,))
    resident = [on_device(setup, tensor) for tensor in host]
    step = training_step(setup)
    ways: dict[str, Epochs] = {
        "DataLoader": loaded(setup, host, batch_size),
        "Tensors": fed(setup, resident, batch_size, shuffle=True),
        "Tensors, not shuffled": fed(setup, resident, batch_size, shuffle=False),
        "slices, not shuffled": lambda count: sliced(resident, batch_size, count),
        "indexing": lambda count: indexed(resident, batch_size, count),
    }
    many, few = setup.size(20, 1), setup.size(5, 1)
    contenders: dict[str, Work] = {}
    for label, way in ways.items():
        slow = label == "DataLoader"
        contenders[label] = epochs(way, 1 if slow else many)
        contenders[f"training: {label}"] = epochs(way, 1 if slow else few, step)
    samples = setup.interleave(contenders)
    epoch = {label: per(column(rounds, "wall_s"), column(rounds, "epochs")) for label, rounds in samples.items()}
    bare, trained, slices = epoch["Tensors"], epoch["training: Tensors"], epoch["training: slices, not shuffled"]
    ordered = per(epoch["training: Tensors, not shuffled"], slices)
    return [
        Figure("bare: DataLoader / Tensors", per(epoch["DataLoader"], bare), target=at_least(10)),
        Figure("training: Tensors / slices", per(trained, slices), target=at_most(1.05)),
        Figure("training: Tensors, not shuffled / slices", ordered, target=at_most(1.05)),
        Figure("training: DataLoader / Tensors", per(epoch["training: DataLoader"], trained)),
        Figure("bare: indexing / Tensors", per(epoch["indexing"], bare)),
        Figure("bare: Tensors / slices", per(bare, epoch["slices, not shuffled"])),
        *[
            Figure(f"epoch, {label if ':' in label else f'bare: {label}'}", tuple(1e3 * s for s in values), "ms")
            for label, values in epoch.items()
        ],
    ]


def epochs(batches: Epochs, count: int, step: Callable[[Any], None] | None = None) -> Work:
    """Work that iterates ``count`` epochs, with a step on each batch if there is one."""

    def work() -> Mapping[str, float]:
        for batch in batches(count):
            if step is not None:
                step(batch)
        return {"epochs": float(count)}

    return work


def training_step(setup: Setup) -> Callable[[Any], None]:
    """Forward, backward and SGD of a network with two hidden layers."""
    hidden = nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(256, CLASSES)).to(setup.backend.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: Any) -> None:
        rows, labels = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()

    return step


def loaded(setup: Setup, host: Any, batch_size: int) -> Epochs:
    """Batches of a DataLoader, copied as its documentation recommends."""
    backend, workers = setup.backend, setup.size(2, 0)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": setup.on_cuda}
    loader: Any = DataLoader(TensorDataset(*host), batch_size, shuffle=True, drop_last=True, **options)
    return lambda count: ([backend.copy(tensor) for tensor in batch] for _ in range(count) for batch in loader)


def fed(setup: Setup, resident: Any, batch_size: int, *, shuffle: bool) -> Epochs:
    """Batches of a feeder, inside ``epochs(n)``."""
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        aiofeed.Tensors(*resident), batch_size=batch_size, shuffle=shuffle, drop_last=True, device=setup.device
    )
    started = 0

    def batches(count: int) -> Iterator[Any]:
        nonlocal started
        started += count
        for _ in feeder.epochs(started):
            yield from feeder

    return batches


def sliced(resident: Any, batch_size: int, count: int) -> Iterator[Any]:
    for _ in range(count):
        for start in range(0, len(resident[0]) - batch_size + 1, batch_size):
            yield [tensor[start : start + batch_size] for tensor in resident]


def indexed(resident: Any, batch_size: int, count: int) -> Iterator[Any]:
    for _ in range(count):
        order = torch.randperm(len(resident[0]), device=resident[0].device)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield [tensor[order[start : start + batch_size]] for tensor in resident]
