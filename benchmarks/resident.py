"""How long is an epoch of data that are in memory already?

60,000 samples of 28 x 28 with labels, shuffled, batch 64, epochs after the first, no step: as bytes, like MNIST, and as
float32, which moves four times as much memory. ``Tensors`` is compared with ``DataLoader`` without workers, with
indexing per batch by a permutation (``x[order[i : i + 64]]``), and with a new ``x[order]`` per epoch whose slices are
the batches.

Targets, for both: at least 15 times ``DataLoader``, and at least 4.0 times indexing per batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, at_least, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import torch

TITLE = "60,000 samples in memory, batch 64, shuffled"

BATCH = 64


def run(settings: Settings) -> list[Figure]:
    ways = {
        "aiofeed": (aiofeed_feeder, ("torch", "aiofeed:Feeder", "aiofeed:Tensors")),
        "DataLoader": (data_loader, ("torch.utils.data",)),
        "index per batch": (index_per_batch, ("torch",)),
        "fresh copy per epoch": (fresh_copy, ("torch",)),
    }
    figures = []
    for dtype in ("uint8", "float32"):
        options = {"samples": settings.size(60_000, 640), "dtype": dtype}
        contenders = [Contender(label, function, options, imports) for label, (function, imports) in ways.items()]
        samples = interleave(contenders, settings)
        wall = {label: column(rounds, "wall_s", 1e3) for label, rounds in samples.items()}
        ours = wall["aiofeed"]
        figures += [
            Figure(f"{dtype}: speed / DataLoader, no workers", per(wall["DataLoader"], ours), target=at_least(15)),
            Figure(f"{dtype}: speed / index per batch", per(wall["index per batch"], ours), target=at_least(4.0)),
            Figure(f"{dtype}: speed / fresh copy per epoch", per(wall["fresh copy per epoch"], ours)),
            *[Figure(f"{dtype} epoch: {label}", values, "ms") for label, values in wall.items()],
        ]
    return figures


def data(samples: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return pixels.to(getattr(torch, dtype)), torch.randint(10, (samples,), generator=generator)


@contextmanager
def aiofeed_feeder(samples: int, dtype: str) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Tensors(*data(samples, dtype))
    feeder: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(source, batch_size=BATCH, shuffle=True)
    with feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(labels) for _, labels in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def data_loader(samples: int, dtype: str) -> Iterator[Measure]:
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*data(samples, dtype)), BATCH, shuffle=True)

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(labels) for _, labels in loader)}

    epoch()
    yield epoch


@contextmanager
def index_per_batch(samples: int, dtype: str) -> Iterator[Measure]:
    import torch

    images, labels = data(samples, dtype)

    def epoch() -> Mapping[str, float]:
        order = torch.randperm(samples)
        parts = [order[first : first + BATCH] for first in range(0, samples, BATCH)]
        return {"items": sum(len((images[part], labels[part])[1]) for part in parts)}

    epoch()
    yield epoch


@contextmanager
def fresh_copy(samples: int, dtype: str) -> Iterator[Measure]:
    import torch

    images, labels = data(samples, dtype)

    def epoch() -> Mapping[str, float]:
        order = torch.randperm(samples)
        rows, names = images[order], labels[order]
        firsts = range(0, samples, BATCH)
        return {"items": sum(len((rows[at : at + BATCH], names[at : at + BATCH])[1]) for at in firsts)}

    epoch()
    yield epoch
