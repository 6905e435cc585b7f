"""How much does ``engine="process"`` slow a training loop in Python, and what do three trainings on one host share?

First, a step that holds the GIL all the time while a worker process decodes JPEGs: its median time, compared with the
same step alone on one core less. Second, the time from the end of a 10 MB
batch's decoding in the other process to the waiting consumer, less the time of one copy, as two bare processes measure
it. Third, three trainings on JPEGs, batch 64: attached to a server with one feeder; beside one feeder in one process,
and three processes with a ``DataLoader`` of one worker each. CPU time is the sum over all processes.

Targets: a step at most 1.05 of the step alone; arrival at most 100 microseconds beyond the copy; three attached
trainings at most 1.15 of the CPU time of one feed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import aiofeed
from aiofeed.kernel.core.types import Row
from benchmarks.contenders import WaitingSource, labelled
from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.worker import tree_cpu_s

TITLE = 'engine="process", and three trainings on one host'

SIZE = 224
STEP_BATCH = 16
STEP_ROUNDS = 300_000
LARGE_BYTES = 10_000_000
DECODE_S = 0.015
BATCH = 64
TRAININGS = 3
IDLE_CPU_S = 0.01
OURS, ALONE = 'engine="process"', "alone"


def run(settings: Settings) -> list[Figure]:
    options = {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96)))}
    stepping = {**options, "steps": settings.size(60, 3)}
    ways = {ALONE: step_alone, OURS: step_beside}
    race = interleave([Contender(label, way, stepping) for label, way in ways.items()], settings)
    step_s = {label: race.column(label, "step_s") for label in race}
    figures = [
        Figure(f"step beside {OURS} / alone", per(step_s[OURS], step_s[ALONE]), target=at_most(1.05)),
        Figure("images beside steps", race.rate(OURS), "/s"),
    ]
    large = {"batches": settings.size(40, 3)}
    bare = "two bare processes"
    race = interleave([Contender(OURS, large_batches, large), Contender(bare, two_bare_processes, large)], settings)
    for label in race:
        late = zip(race.column(label, "late_s", 1e6), race.column(bare, "copy_s", 1e6), strict=True)
        target = at_most(100) if label == OURS else None
        what = f"arrival of 10 MB, beyond the copy: {label}"
        figures.append(Figure(what, tuple(us - copy_us for us, copy_us in late), "us", target))
    one, attached, loaders = "one feed", "three attached", "three DataLoaders"
    feeds = {one: one_feed, attached: three_attached, loaders: three_data_loaders}
    race = interleave([Contender(label, way, options) for label, way in feeds.items()], settings)
    cpu_s = {label: race.column(label, "cpu_s") for label in race}
    return [
        *figures,
        Figure(f"CPU time, {attached} / {one}", per(cpu_s[attached], cpu_s[one]), target=at_most(1.15)),
        Figure(f"CPU time, {loaders} / {one}", per(cpu_s[loaders], cpu_s[one])),
        race.speed(attached, loaders, None, attached),
        race.speed(attached, one, None, attached),
    ]


def median_step(steps: int, before: Callable[[], object] = int) -> float:
    """Median duration in seconds of a step in Python that never releases the GIL."""
    times = []
    for _ in range(steps):
        before()
        started, total = time.perf_counter(), 0
        for number in range(STEP_ROUNDS):
            total += number & 3
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@contextmanager
def step_alone(folder: str, steps: int) -> Iterator[Measure]:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(before) > 1:
        os.sched_setaffinity(0, sorted(before)[:-1])  # leave out one core, as a decoder would use it
    try:
        yield lambda: {"step_s": median_step(steps)}
    finally:
        if before:
            os.sched_setaffinity(0, before)


@contextmanager
def step_beside(folder: str, steps: int) -> Iterator[Measure]:
    feeder = new_feeder(folder, batch_size=STEP_BATCH, limits=aiofeed.Limits(decode_threads=1), engine="process")

    def endless_batches() -> Generator[Any, None, None]:
        for _ in feeder.epochs(1 << 30):
            yield from feeder

    with feeder:
        batches = endless_batches()
        for _ in range(4):
            next(batches)
        yield lambda: {"step_s": median_step(steps, lambda: next(batches)), "items": steps * STEP_BATCH}
        batches.close()


class Stamped:
    """Fills a row with 10 MB and writes the time into it last."""

    takes_seed = False

    def __init__(self) -> None:
        self.row = Row((LARGE_BYTES // 8,), "int64")

    def __call__(self, data: bytes, /) -> Any:
        out = np.empty(LARGE_BYTES // 8, np.int64)
        self.decode_into(data, out)
        return out

    def decode_into(self, data: object, out: Any, seed: int | None = None) -> None:
        out[:] = 1
        time.sleep(DECODE_S)  # so that the consumer waits for the batch
        out[0] = time.perf_counter_ns()


def lateness(batch: Any) -> float:
    """Seconds since a batch was stamped."""
    return (time.perf_counter_ns() - int(batch.flatten()[0])) / 1e9


def write_on_request(memory: Any, connection: Connection) -> None:
    """The writer of two bare processes."""
    out, decoder = np.frombuffer(memory, np.int64), Stamped()
    while connection.recv_bytes() == b"go":
        decoder.decode_into(b"", out)
        connection.send_bytes(b"done")


@contextmanager
def two_bare_processes(batches: int) -> Iterator[Measure]:
    context = multiprocessing.get_context("spawn")
    memory = context.RawArray("b", LARGE_BYTES)
    reader, writer = context.Pipe()
    process = context.Process(target=write_on_request, args=(memory, writer), daemon=True)
    process.start()
    shared = np.frombuffer(memory, np.int64)
    private = np.zeros_like(shared)

    def measure() -> Mapping[str, float]:
        late, copying = [], []
        for _ in range(batches):
            reader.send_bytes(b"go")
            reader.recv_bytes()
            started = time.perf_counter()
            np.copyto(private, shared)
            copying.append(time.perf_counter() - started)
            late.append(lateness(private))
        return {"late_s": statistics.median(late), "copy_s": statistics.median(copying)}

    measure()
    yield measure
    reader.send_bytes(b"stop")
    process.join()


@contextmanager
def large_batches(batches: int) -> Iterator[Measure]:
    limits = aiofeed.Limits(decode_threads=1, prefetch_batches=1)
    source = WaitingSource(1 << 30, 0.0)
    with aiofeed.Feeder(source, decode=Stamped(), batch_size=1, limits=limits, engine="process") as feeder:
        iterator = iter(feeder)
        for _ in range(5):
            next(iterator)
        yield lambda: {"late_s": statistics.median(lateness(next(iterator)) for _ in range(batches))}


def new_feeder(folder: str, **options: Any) -> Any:
    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    return aiofeed.Feeder(aiofeed.ImageFolder(folder), decode=decode, **options)


def images_in(batches: Any) -> dict[str, float]:
    return {"items": float(sum(map(labelled, batches)))}


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
    with new_feeder(folder, batch_size=BATCH, shuffle=True) as feeder:
        images_in(feeder)
        yield lambda: with_prefetch(lambda: images_in(feeder))


@contextmanager
def three_attached(folder: str) -> Iterator[Measure]:
    feeder = new_feeder(folder, batch_size=BATCH, shuffle=True)
    with tempfile.TemporaryDirectory() as temporary, feeder:
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
    with aiofeed.attach(address) as feed:
        while connection.recv():
            connection.send(images_in(feed)["items"])


def train_loaded(folder: str, connection: Connection) -> None:
    from benchmarks.jpeg import Images

    dataset: Any = Images(files_below(folder))
    loader: Any = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    while connection.recv():
        connection.send(images_in(loader)["items"])
