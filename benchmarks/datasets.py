"""Is a Feeder over a torch Dataset as fast as a DataLoader without workers?

Shuffled epochs after the second, no step, batches of 64 and of 16. 20,000 rows of 64 floats with labels, in a
``TensorDataset`` and in a part of one from ``random_split``, and 4,000 items like those of torchvision's MNIST: a
Pillow image of 28 x 28, converted to a float tensor and normalised. In this case both call the dataset in one thread.
So do they for 16,000 pairs of 64 floats and a number; the bound is a bare loop over items and ``default_collate``.

Targets: as fast as ``DataLoader`` for rows, at least 0.95 of it for images in batches of 16, and 1.05 for pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.figures import Figure, at_least, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import torch

TITLE = "Datasets in one thread, shuffled"

PAIRS = "pairs of 64 floats and a number"
KINDS = {
    "TensorDataset": (20_000, {64: 1.0, 16: 1.0}),
    "part of a TensorDataset": (20_000, {64: 1.0, 16: 1.0}),
    "images of 28 x 28": (4_000, {64: 1.0, 16: 0.95}),
    PAIRS: (16_384, {64: 1.05, 16: 1.05}),
}
"""Samples of each dataset, and the least speed by batch size."""


def run(settings: Settings) -> list[Figure]:
    figures = []
    for kind, (samples, bounds) in KINDS.items():
        for batch_size, bound in bounds.items():
            options = {"kind": kind, "samples": settings.size(samples, 320), "batch_size": batch_size}
            contenders = [
                Contender("Feeder", aiofeed_feeder, options, ("torch", "aiofeed:Feeder")),
                Contender("DataLoader", data_loader, options, ("torch.utils.data",)),
            ]
            if kind == PAIRS:
                contenders.append(Contender("bare loop", bare_loop, options, ("torch.utils.data",), bound=True))
            rounds = interleave(contenders, settings)
            wall = {label: column(found, "wall_s", 1e3) for label, found in rounds.items()}
            name = f"{kind}, batch {batch_size}"
            speed = per(wall["DataLoader"], wall["Feeder"])
            figures.append(Figure(f"{name}: speed / DataLoader, no workers", speed, target=at_least(bound)))
            if "bare loop" in wall:
                figures.append(Figure(f"{name}: speed / bare loop", per(wall["bare loop"], wall["Feeder"])))
            figures += [Figure(f"{name}, epoch: {label}", values, "ms") for label, values in wall.items()]
    return figures


class Digits:
    """Items like those of torchvision's ``MNIST`` with ``ToTensor`` and ``Normalize``, which do the same calls."""

    def __init__(self, samples: int) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (samples, 28, 28), dtype=np.uint8)
        self.targets = np.arange(samples) % 10

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch
        from PIL import Image

        image = Image.fromarray(self.data[index])
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(28, 28, 1)
        tensor = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        mean, std = torch.as_tensor([0.1307]).view(-1, 1, 1), torch.as_tensor([0.3081]).view(-1, 1, 1)
        return tensor.clone().sub_(mean).div_(std), int(self.targets[index])


class Pairs:
    """Items that take a microsecond: a row of 64 floats and a number."""

    def __init__(self, samples: int) -> None:
        import torch

        self.rows = torch.randn(samples, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 10


def dataset(kind: str, samples: int) -> Any:
    import torch
    from torch.utils.data import TensorDataset, random_split

    if kind == PAIRS:
        return Pairs(samples)

    if kind == "images of 28 x 28":
        return Digits(samples)
    whole = TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10)
    return whole if kind == "TensorDataset" else random_split(whole, [0.8, 0.2])[0]


@contextmanager
def aiofeed_feeder(kind: str, samples: int, batch_size: int) -> Iterator[Measure]:
    import aiofeed

    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(dataset(kind, samples), batch_size=batch_size, shuffle=True)
    with feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(labels) for _, labels in one_epoch())}

        epoch()
        epoch()  # from then on the consumer's thread may make the batches
        yield epoch


@contextmanager
def data_loader(kind: str, samples: int, batch_size: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset(kind, samples), batch_size, shuffle=True)

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(labels) for _, labels in loader)}

    epoch()
    yield epoch


@contextmanager
def bare_loop(kind: str, samples: int, batch_size: int) -> Iterator[Measure]:
    """The least that one thread can do: items and ``default_collate``."""
    import torch
    from torch.utils.data import default_collate

    items = dataset(kind, samples)

    def epoch() -> Mapping[str, float]:
        order, count = torch.randperm(samples).tolist(), 0
        for start in range(0, samples, batch_size):
            _, labels = default_collate([items[index] for index in order[start : start + batch_size]])
            count += len(labels)
        return {"items": count}

    epoch()
    yield epoch
