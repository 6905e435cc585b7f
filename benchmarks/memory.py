"""How long is an epoch of data that are in memory already, tensors and tokens, or of tokens in an object store?

60,000 samples of 28 x 28 with labels, shuffled, batch 64: ``Tensors`` is compared with ``DataLoader``, with indexing
per batch by a permutation, and with "memcpy of rows": ``np.take(..., out=)`` into three buffers in turn. 64 shuffled
windows of 1,024 uint16 tokens per batch and their targets, as int64, from a file in the page cache, are compared with
``np.take`` and ``DataLoader``. Windows of 2,048 tokens in four objects of 64 MiB that answer after 20 ms, shuffled
within 64 MiB, are compared with one request for each object after the other, and with one for each 4 MiB.

Targets: 15 times ``DataLoader``; for bytes 4.0 times indexing per batch, for float32 0.9 of memcpy; for tokens 0.7 of
``np.take``, and 20 times ``DataLoader`` with workers. At URLs 0.7 of a download of whole objects, 0.8 by ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import aiofeed
from benchmarks.contenders import epochs, fed, labelled, loaded
from benchmarks.figures import Figure
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.objects import DELAY_S, name, new_store, options_of, server

TITLE = "60,000 samples in memory; windows of 1,024 tokens; batch 64, shuffled"

BATCH, BLOCK = 64, 1024
OBJECTS, OBJECT_BYTES, RANGE_BYTES, WINDOW = 4, 64 << 20, 4 << 20, 2048
LOADER, LOADER_2 = "DataLoader, no workers", "DataLoader, 2 workers"
INDEXING, MEMCPY = "index per batch", "memcpy of rows"


def run(settings: Settings) -> list[Figure]:
    figures, least = [], {"least_s": settings.size(2, 0) / 10}
    for dtype in ("uint8", "float32"):
        options = {"samples": settings.size(60_000, 640), "dtype": dtype, **least}
        ways = ("aiofeed", LOADER, INDEXING, MEMCPY)
        race = interleave([Contender(way, tensors, {**options, "way": way}) for way in ways], settings)
        bars = {LOADER: 15, INDEXING: 4.0 if dtype == "uint8" else None, MEMCPY: 0.9 if dtype == "float32" else None}
        figures += [race.speed("aiofeed", other, bar, dtype) for other, bar in bars.items()]
        figures += race.rates("samples", dtype)
    path = token_file(settings)
    contenders = [Contender(*each, {"path": path, **least}) for each in (("Tokens", tokens), ("np.take", take))]
    for label, workers in ((LOADER, 0), (LOADER_2, 2)):
        contenders.append(Contender(label, slices_loader, {"path": path, "workers": workers}))
    race = interleave(contenders, settings)
    bars = {"np.take": 0.7, LOADER_2: 20, LOADER: None}
    figures += [race.speed("Tokens", other, bar, "tokens") for other, bar in bars.items()]
    figures += race.rates("windows", "tokens")
    size = settings.size(OBJECT_BYTES, 1 << 20)
    with server("--objects", str(OBJECTS), "--size", str(size), "--delay", str(DELAY_S)) as port:
        parts = {"download": size, "download by ranges": min(size, RANGE_BYTES)}
        contenders = [Contender("Tokens", at_urls, {"port": port})]
        contenders += [Contender(each, download, {"port": port, "part": parts[each]}, bound=True) for each in parts]
        race = interleave(contenders, settings)
    figures += [race.speed("Tokens", *each, "at URLs") for each in zip(parts, (0.7, 0.8), strict=True)]
    figures.append(race.cpu("Tokens", "download", None, "at URLs"))
    return [*figures, *race.rates("windows", "at URLs")]


def tensors(way: str, samples: int, dtype: str, least_s: float) -> AbstractContextManager[Measure]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    both = pixels.to(getattr(torch, dtype)), torch.randint(10, (samples,), generator=generator)
    if way == "aiofeed":
        feeder = aiofeed.Feeder(aiofeed.Tensors(*both), batch_size=BATCH, shuffle=True)
        return fed(feeder, labelled, least_s=least_s)
    if way == LOADER:
        return loaded(TensorDataset(*both), BATCH, samples_in=labelled, least_s=least_s, shuffle=True)
    return epochs(partial(indexed if way == INDEXING else copied, both), labelled, least_s=least_s)


def indexed(both: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    order = torch.randperm(len(both[0]))
    return ([each[part] for each in both] for part in order.split(BATCH))


def copied(both: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    buffers = cycle([[torch.empty_like(each[:BATCH]).numpy() for each in both] for _ in range(3)])
    for part in torch.randperm(len(both[0])).split(BATCH):
        for source, out in zip(both, next(buffers), strict=True):
            np.take(
                source.numpy(), part.numpy(), axis=0, out=out[: len(part)], mode="clip"
            )  # by default it copies twice
        yield None, part


def token_file(settings: Settings) -> str:
    """The path of a file of random tokens, which is written once."""
    settings.data.mkdir(parents=True, exist_ok=True)
    count = settings.size(20_000_000, 200_000)
    path = settings.data / f"tokens-{count}.bin"
    if not path.exists():
        np.random.default_rng(0).integers(50_257, size=count, dtype=np.uint16).tofile(path)
    return str(path)


def tokens(path: str, least_s: float) -> AbstractContextManager[Measure]:
    source = aiofeed.Tokens(path, BLOCK, targets=True)
    feeder = aiofeed.Feeder(source, batch_size=BATCH, shuffle=True, drop_last=True)
    return fed(feeder, labelled, least_s=least_s)


def at_urls(port: int) -> AbstractContextManager[Measure]:
    urls = [f"s3://bucket/{name(number)}" for number in range(OBJECTS)]
    source = aiofeed.Tokens(urls, WINDOW, options=options_of(port))
    return fed(aiofeed.Feeder(source, batch_size=BATCH, shuffle="window"))


@contextmanager
def download(port: int, part: int) -> Iterator[Measure]:
    store = new_store(options_of(port))
    size = store.head(name(0))["size"]
    reads = [(name(number), start) for number in range(OBJECTS) for start in range(0, size, part)]

    def parts() -> Iterator[Any]:
        return (store.get_range(key, start=start, length=part) for key, start in reads)

    with epochs(parts, lambda data: len(data) // (2 * WINDOW)) as measure:
        yield measure


def take(path: str, least_s: float) -> AbstractContextManager[Measure]:
    data = np.asarray(np.memmap(path, np.uint16, "r"))
    windows = data[: (len(data) - 1) // BLOCK * BLOCK].reshape(-1, BLOCK)
    following = data[1 : 1 + windows.size].reshape(-1, BLOCK)
    generator = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        order = generator.permutation(len(windows))
        for first in range(0, len(windows) // BATCH * BATCH, BATCH):
            chosen = order[first : first + BATCH]
            x, y = (np.take(each, chosen, axis=0).astype(np.int64) for each in (windows, following))
            yield torch.from_numpy(x), torch.from_numpy(y)

    return epochs(batches, labelled, least_s=least_s)


def slices_loader(path: str, workers: int = 0) -> AbstractContextManager[Measure]:
    return loaded(Slices(np.memmap(path, np.uint16, "r")), BATCH, workers, labelled, shuffle=True, drop_last=True)


class Slices:
    """A Dataset of windows, as one writes it for ``DataLoader``."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * BLOCK
        window = torch.from_numpy(self.data[start : start + BLOCK + 1].astype(np.int64))
        return window[:-1], window[1:]
