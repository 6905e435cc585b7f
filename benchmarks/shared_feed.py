"""How much CPU time do three trainings on one host take if one server feeds them?

JPEG files of 500 x 400 to 224 x 224, uint8, batch 64, files in the page cache, epochs after the first. One feeder in
one process; three processes attached to a server with the same feeder, each of which gets every batch; and three
processes with a ``DataLoader`` of one worker each. CPU time is the sum over all processes, per epoch.

Target: three attached trainings take at most 1.15 of the CPU time of one feed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_most, column, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.process_tree import tree_cpu_s

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TITLE = "Three trainings on one host"

SIZE = 224
BATCH = 64
TRAININGS = 3
IDLE_CPU_S = 0.01


def run(settings: Settings) -> list[Figure]:
    options = {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96)))}
    imports = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")
    alone = Contender("one feed", one_feed, options, imports)
    attached = Contender("three attached", three_attached, options, (*imports, "aiofeed:serve", "aiofeed:attach"))
    loaders = Contender("three DataLoaders", three_data_loaders, options, ("torch.utils.data", "numpy", "PIL.Image"))
    samples = interleave([alone, attached, loaders], settings)
    cpu = {label: column(rounds, "cpu_s") for label, rounds in samples.items()}
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    return [
        Figure("CPU time, three attached / one feed", per(cpu[attached.label], cpu[alone.label]), target=at_most(1.15)),
        Figure("CPU time, three DataLoaders / one feed", per(cpu[loaders.label], cpu[alone.label])),
        Figure("speed of each, three attached / three DataLoaders", per(rate[attached.label], rate[loaders.label])),
        Figure("speed of each, three attached / one feed", per(rate[attached.label], rate[alone.label])),
    ]


def new_feeder(folder: str) -> Any:
    import aiofeed

    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    return aiofeed.Feeder(aiofeed.ImageFolder(folder), decode=decode, batch_size=BATCH, shuffle=True)


def images_in(batches: Any) -> dict[str, float]:
    return {"items": float(sum(len(labels) for _, labels in batches))}


def with_prefetch(measure: Measure) -> Mapping[str, float]:
    """Measure, including the prefetch of the next epoch's batches, since this epoch's were prefetched before."""
    cpu_s, started = tree_cpu_s(), time.perf_counter()
    sample = measure()
    wall_s, last = time.perf_counter() - started, 0.0
    while (now := tree_cpu_s()) - last > IDLE_CPU_S:
        last = now
        time.sleep(0.1)
    return {**sample, "wall_s": wall_s, "cpu_s": now - cpu_s}


@contextmanager
def one_feed(folder: str) -> Iterator[Measure]:
    with new_feeder(folder) as feeder:
        images_in(feeder)
        yield lambda: with_prefetch(lambda: images_in(feeder))


@contextmanager
def three_attached(folder: str) -> Iterator[Measure]:
    import aiofeed

    with tempfile.TemporaryDirectory() as temporary, new_feeder(folder) as feeder:
        address = str(Path(temporary) / "feed")
        with aiofeed.serve(feeder, address, min_consumers=TRAININGS), trainings(train_attached, address) as measure:
            yield measure


@contextmanager
def three_data_loaders(folder: str) -> Iterator[Measure]:
    with trainings(train_loaded, folder) as measure:
        yield measure


@contextmanager
def trainings(target: Callable[[str, Connection], None], argument: str) -> Iterator[Measure]:
    """Three processes that each iterate one epoch per measurement, after a first one to warm up."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections = []
        for _ in range(TRAININGS):
            parent, child = context.Pipe()
            process = context.Process(target=target, args=(argument, child))
            process.start()
            stack.callback(process.join)
            stack.callback(parent.send, False)
            connections.append(parent)

        def measure() -> Mapping[str, float]:
            for connection in connections:
                connection.send(True)
            [items] = {connection.recv() for connection in connections}  # each has seen all images
            return {"items": items}

        measure()
        yield lambda: with_prefetch(measure)


def train_attached(address: str, connection: Connection) -> None:
    import aiofeed

    with aiofeed.attach(address) as feed:
        while connection.recv():
            connection.send(images_in(feed)["items"])


def train_loaded(folder: str, connection: Connection) -> None:
    from torch.utils.data import DataLoader

    from benchmarks.jpeg import Images

    dataset: Any = Images(files_below(folder))
    loader: Any = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    while connection.recv():
        connection.send(images_in(loader)["items"])
