"""Is batch N+1 loaded while the step works on batch N, and how long does ``next`` wait for a batch that is ready?

Every load takes 30 ms, a read that waits or a decode that blocks its thread, and every step 30 ms, which blocks the
thread that iterates; one batch loads at a time, so 60 batches take 61 times 30 ms at best. Then the time of ``next``
with a batch of 64 samples of 12 KB in the queue, after 5 ms of torch operations or of sleep, after which the CPU caches
are cold. Last a step on the CPU in one thread (that of ``benchmarks.peers.races``), fed with 32 JPEGs of
500 x 400 to 224 x 224 by the default engine, or with one batch in memory.

Targets, sync and async: at most 1.03 times the ideal; a median of ``next`` below 50 microseconds; a step that is fed at
most 1.10 times as long as the bare one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import aiofeed
from benchmarks.contenders import WaitingSource, epochs, single_epochs
from benchmarks.data import jpeg_folder
from benchmarks.figures import Figure, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Overlap of load and step, 30 ms each; next() with a batch that is ready; a step on the CPU that is fed"

LOAD_S = STEP_S = 0.030
BATCH = 8
READY_BATCH = 64
SHAPE = (64, 64, 3)
PAUSE_S = 0.005
MOST_PAUSES = 4
SIDE = 224
LOADER = "DataLoader, 2 workers"


def run(settings: Settings) -> list[Figure]:
    batches = settings.size(60, 3)
    ideal_s = (batches + 1) * LOAD_S
    contenders = [
        Contender(f"{loop}, {what}", overlapping, {"load": load, "loop": loop, "batches": batches})
        for loop in ("for", "async for")
        for load, what in (("read", "read waits"), ("decode", "decode blocks"))
    ]
    race = interleave(contenders, settings)
    figures = [
        Figure(f"time / ideal: {label}", race.column(label, "wall_s", 1 / ideal_s), "", at_most(1.03)) for label in race
    ]
    options = {"batches": settings.size(100, 4)}
    contenders = [
        Contender(name, taking, {**options, "loop": loop}) for name, loop in (("next", "for"), ("anext", "async for"))
    ]
    race = interleave([*contenders, Contender(LOADER, taking_from_loader, options)], settings)
    for kind in ("step", "sleep"):
        for label in race:
            target = None if label == LOADER else at_most(50)
            figures.append(Figure(f"{label} after a {kind}", race.column(label, kind, 1e6), "us", target))
    options = {"folder": str(jpeg_folder(settings.data, settings.size(512, 96))), "batch": settings.size(32, 8)}
    contenders = [Contender(name, training, {**options, "is_fed": name == "fed"}) for name in ("fed", "bare")]
    race = interleave(contenders, settings)
    step_s = {label: per(race.column(label, "wall_s", 1e3), race.column(label, "items")) for label in race}
    figures.append(Figure("step that is fed / bare", per(step_s["fed"], step_s["bare"]), target=at_most(1.10)))
    return [*figures, *[Figure(f"training step, {label}", values, "ms") for label, values in step_s.items()]]


def slow_length_of(data: bytes) -> int:
    time.sleep(LOAD_S)
    return len(data)


@contextmanager
def overlapping(load: str, loop: str, batches: int) -> Iterator[Measure]:
    if load == "read":
        # As many reads as a batch has samples, so that the next batch's reads begin when this one's have ended.
        source, limits = WaitingSource(batches * BATCH, LOAD_S), aiofeed.Limits(read_concurrency=BATCH)
        feeder: aiofeed.Feeder[object] = aiofeed.Feeder(source, decode=len, batch_size=BATCH, limits=limits)
    else:
        source, limits = WaitingSource(batches, 0.0), aiofeed.Limits(decode_threads=1)
        feeder = aiofeed.Feeder(source, decode=slow_length_of, batch_size=1, limits=limits)

    # Inside `epochs` the feeder knows that this epoch is the last, and prefetches nothing of the next.
    async def async_epoch() -> None:
        async for _ in feeder:
            time.sleep(STEP_S)  # noqa: ASYNC251 - the step is meant to block

    def measure() -> Mapping[str, float]:
        for _ in feeder.epochs(feeder.epoch + 2):
            if loop == "for":
                for _ in feeder:
                    time.sleep(STEP_S)
            else:
                asyncio.run(async_epoch())
        return {"items": batches}

    with feeder:
        next(iter(feeder))  # from here on the feeder knows the size of a batch; a dropped iterator prefetches nothing
        yield measure


@contextmanager
def taking(loop: str, batches: int) -> Iterator[Measure]:
    sample = np.zeros(SHAPE, np.uint8)
    source = WaitingSource(batches * READY_BATCH, 0.0)
    with aiofeed.Feeder(source, decode=lambda data: sample, batch_size=READY_BATCH) as feeder:

        def pause_until_ready(pause: Callable[[], None]) -> bool:
            for _ in range(MOST_PAUSES):
                pause()
                if feeder.statistics().queue_depth:
                    return True
            return False

        async def async_epoch(pause: Callable[[], None]) -> list[float]:
            times, iterator = [], aiter(feeder)
            for _ in range(len(feeder)):
                ready = pause_until_ready(pause)
                started = time.perf_counter()
                batch = await anext(iterator)
                ended = time.perf_counter()
                del batch
                times += [ended - started] if ready else []
            return times

        def epoch(pause: Callable[[], None]) -> list[float]:
            if loop == "for":
                return times_of(feeder, lambda: pause_until_ready(pause))
            return asyncio.run(async_epoch(pause))

        yield after_pauses(epoch, batches)


def times_of(batches: Any, pause: Callable[[], object]) -> list[float]:
    """How long ``next`` takes after each pause that does not return False."""
    times, iterator = [], iter(batches)
    for _ in range(len(batches)):
        ready = pause()
        started = time.perf_counter()
        batch = next(iterator)
        ended = time.perf_counter()
        del batch
        times += [ended - started] if ready is not False else []
    return times


@contextmanager
def taking_from_loader(batches: int) -> Iterator[Measure]:
    dataset: Any = [np.zeros(SHAPE, np.uint8)] * batches * READY_BATCH
    loader: Any = DataLoader(dataset, READY_BATCH, num_workers=2, persistent_workers=True)
    yield after_pauses(lambda pause: times_of(loader, pause), batches)


def after_pauses(epoch: Callable[[Callable[[], None]], list[float]], batches: int) -> Measure:
    """Measures an epoch with each kind of pause; medians over the batches that were ready, at least half of them."""
    pauses = {"step": step(), "sleep": lambda: time.sleep(PAUSE_S)}

    def measure() -> Mapping[str, float]:
        measured = {kind: epoch(pause) for kind, pause in pauses.items()}
        for kind, times in measured.items():
            assert len(times) > batches / 2, f"{len(times)} of {batches} batches were ready after a {kind}"
        return {kind: statistics.median(times) for kind, times in measured.items()}

    measure()
    return measure


def step() -> Callable[[], None]:
    """About 5 ms of small torch operations in the calling thread, like those of a training step."""
    torch.set_num_threads(1)
    weights = torch.randn(128, 128) / 128**0.5

    def work() -> None:
        values = torch.randn(128, 128)
        ends = time.perf_counter() + PAUSE_S
        while time.perf_counter() < ends:
            values = torch.relu(values @ weights)

    return work


@contextmanager
def training(folder: str, batch: int, is_fed: bool) -> Iterator[Measure]:
    """Training steps; an item is a step."""
    from benchmarks.peers.races import Step

    torch.set_num_threads(1)
    source, decode = aiofeed.ImageFolder(folder), aiofeed.DecodeImage(SIDE)
    in_memory = torch.randint(256, (batch, 3, SIDE, SIDE), dtype=torch.uint8), torch.zeros(batch, dtype=torch.int64)
    with aiofeed.Feeder(source, decode=decode, batch_size=batch, shuffle=True) as feeder:
        batches = single_epochs(feeder) if is_fed else lambda: repeat(in_memory, len(feeder))
        step = Step()
        with epochs(batches, lambda batch: step(*batch) is not None) as measure:
            yield measure
