"""Loaders on more cores than there are: their decoders sleep, without a core and without the GIL.

``usleep`` through ctypes takes the place of a decoder in C, so that 128 threads "decode" on two cores and all that is
measured is the framework. Each loader gives endless batches of tensors of [3, 32, 32].
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import functools
import logging
import math
import multiprocessing
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils.data

import aiofeed
from aiofeed.kernel.core.types import Row
from aiofeed.kernel.runtime import machine
from benchmarks.contenders import Numbered
from benchmarks.worker import Measure, tree_cpu_s

SLEEP_US, READ_US = 1280, 20_000
SAMPLES, CACHED = 4_000_000, 20_000
CONSUMERS = 8
MOST_READS = 512  # in flight: those of default limits
SIDE = 32
BARE, OURS, DEFAULT = "bare pool", "aiofeed", "aiofeed, default"
Batches = Generator[Any, None, None]

usleep = ctypes.CDLL(None).usleep


def hold_gil(us: int) -> None:
    """Run Python for so many microseconds, by count: the CPU time of a thread includes that of waiting for the GIL."""
    for _ in range(us * loops_per_us()):
        pass


@functools.cache
def loops_per_us() -> int:
    fastest = math.inf
    for _ in range(20):
        started = time.thread_time()
        for _ in range(20_000):
            pass
        fastest = min(fastest, time.thread_time() - started)
    return round(20_000 / fastest * 1e-6)


SHORT, LONG = "chunks of 0.3 ms", "chunks of 10 ms"
CHUNKS = {"chunks": SLEEP_US, "slow reads": SLEEP_US, SHORT: 300, LONG: 10_000}
"""Kinds that are decoded a chunk at a time, with the microseconds of a sample."""
KINDS: dict[str, tuple[int, int]] = {
    **{kind: (us, 0) for kind, us in CHUNKS.items()},
    "items": (SLEEP_US, 0),
    "Pillow-like": (1000, 300),
    "pure Python": (1000, 1000),
}
"""The microseconds of one sample, and those of them that hold the GIL."""


def decode_one(kind: str) -> None:
    us, held_us = KINDS[kind]
    if held_us:
        hold_gil(held_us)
    usleep(us - held_us if held_us else SLEEP_US)


def ideal(kind: str, threads: int) -> float:
    """The samples per second of as many threads without a framework, as far as the GIL and the reads allow."""
    us, held_us = KINDS[kind]
    reads = MOST_READS / READ_US if kind == "slow reads" else math.inf
    return min(threads / us, 1 / held_us if held_us else math.inf, reads) * 1e6


class Item:
    """Decodes one sample to a tensor of its own."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, data: bytes, /) -> torch.Tensor:
        decode_one(self._kind)
        return torch.empty((3, SIDE, SIDE), dtype=torch.uint8)


class Rows(Item):
    """Decodes a sample into its row, as ``DecodeImage`` with Pillow does."""

    takes_seed = False
    row = Row((SIDE, SIDE, 3), "uint8", (2, 0, 1))

    def decode_into(self, data: object, out: object, seed: int | None = None) -> None:
        decode_one(self._kind)


class Chunks(Rows):
    """Decodes a chunk in one call, as ``DecodeImage`` with the native library does."""

    def decode_many_into(self, data: Sequence[object], out: object, seeds: object = None) -> list[None]:
        usleep(CHUNKS[self._kind] * len(data))
        return [None] * len(data)


class Slow(Numbered):
    """A source whose every read takes 20 ms."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(READ_US * 1e-6)
        return b"x"


class Ready(Slow):
    """A source of samples in memory."""

    answers_at_once = True

    def read_now(self, indices: Sequence[int]) -> list[bytes]:
        return [b"x"] * len(indices)

    async def read(self, index: int) -> bytes:
        return self.read_now([index])[0]

    async def read_many(self, indices: Sequence[int]) -> list[bytes]:
        return self.read_now(indices)


_reading = threading.Semaphore(MOST_READS // 64)


def whole(kind: str, batch: int) -> torch.Tensor:
    """A batch by one thread, as the bare pool and the loaders for whole batches make it."""
    if kind == "items":
        item = Item(kind)
        return torch.stack([item(b"x") for _ in range(batch)])
    if kind == "slow reads":
        with _reading:
            usleep(READ_US)
    if kind in CHUNKS:
        usleep(CHUNKS[kind] * batch)
    else:
        for _ in range(batch):
            decode_one(kind)
    return torch.empty((batch, 3, SIDE, SIDE), dtype=torch.uint8)


def orders(batch: int) -> Iterator[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    while True:
        yield random.integers(SAMPLES, size=batch)


@contextmanager
def feeder(kind: str, threads: int, batch: int, default: bool = False, **options: Any) -> Iterator[Any]:
    """A feeder with as many decode threads, or with default limits on a machine that seems to have as many cores."""
    decode = Chunks(kind) if kind in CHUNKS else Item(kind) if kind == "items" else Rows(kind)
    options = {"source": Slow() if kind == "slow reads" else Ready(), **options}
    limits = aiofeed.Limits(decode_threads=None if default else threads)
    with (
        mock.patch.object(machine, "cpus", return_value=threads),
        aiofeed.Feeder(
            options.pop("source"), decode=decode, batch_size=batch, shuffle=True, limits=limits, **options
        ) as made,
    ):
        yield made


def feed(kind: str, threads: int, batch: int, simulated_device: bool = False, **options: Any) -> Batches:
    if simulated_device:
        from tests.support.simulated_device import SimulatedDevice

        options["device"] = SimulatedDevice(latency="early")
    with feeder(kind, threads, batch, **options) as ours:
        while True:
            yield from ours


def cached(kind: str, threads: int, batch: int) -> Batches:
    """Epochs after the first of a cache in memory."""
    with feeder(kind, threads, batch, source=Ready(CACHED), cache="host") as ours:
        for _ in ours:
            pass
        while True:
            yield from ours


def served(kind: str, threads: int, batch: int) -> Batches:
    """What one of eight consumers of a served feeder takes; the others are processes that do nothing but take."""
    logging.getLogger("aiofeed").setLevel(logging.ERROR)  # consumers pause between measurements
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, feeder(kind, threads, batch) as ours, ExitStack() as stack:
        address = f"{folder}/feed"
        others = [context.Process(target=take, args=(address,), daemon=True) for _ in range(CONSUMERS - 1)]
        for process in others:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        with aiofeed.serve(ours, address, min_consumers=CONSUMERS), aiofeed.attach(address) as attached:
            while True:
                yield from attached


def take(address: str) -> None:
    with suppress(aiofeed.FeedError), aiofeed.attach(address, wait_s=60) as feed:  # the server ends
        while True:
            for _ in feed:
                pass


def bare(kind: str, threads: int, batch: int) -> Batches:
    """A ``ThreadPoolExecutor`` of whole batches in order; for slow reads with the threads that also wait for them."""
    if kind == "slow reads":
        threads = math.ceil(threads * (1 + READ_US / (SLEEP_US * batch)))
    with ThreadPoolExecutor(threads) as pool:
        plan = orders(batch)
        queue = collections.deque(
            pool.submit(lambda indices: whole(kind, len(indices)), next(plan)) for _ in range(threads + 4)
        )
        try:
            while True:
                yield queue.popleft().result()
                queue.append(pool.submit(lambda indices: whole(kind, len(indices)), next(plan)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Dataset:
    """A ``Dataset`` of which a worker makes a whole batch in one call."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return SAMPLES // 4

    def __getitem__(self, index: int) -> None:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> torch.Tensor:
        return whole(self._kind, len(indices))


def unchanged(batch: torch.Tensor) -> torch.Tensor:
    return batch


def data_loader(kind: str, threads: int, batch: int, ours: bool = False) -> Batches:
    """``DataLoader`` with as many workers; ``ours``: aiofeed's."""
    warnings.filterwarnings("ignore", ".*worker processes in total")
    made: Any = aiofeed.DataLoader if ours else torch.utils.data.DataLoader
    yield from made(Dataset(kind), batch, shuffle=True, num_workers=threads, collate_fn=unchanged)


LOADERS: dict[str, tuple[Callable[..., Batches], dict[str, Any]]] = {
    OURS: (feed, {}),
    DEFAULT: (feed, {"default": True}),
    **{f"aiofeed, process:{count}": (feed, {"engine": f"process:{count}"}) for count in (4, 8)},
    "aiofeed, copy thread": (feed, {"simulated_device": True}),
    'aiofeed, cache="host"': (cached, {}),
    "aiofeed, 8 consumers": (served, {}),
    BARE: (bare, {}),
    "DataLoader": (data_loader, {}),
    "aiofeed.DataLoader": (data_loader, {"ours": True}),
}
"""By name: its batches, and options."""


@contextmanager
def simulated(loader: str, kind: str, threads: int, batch: int, least_s: float) -> Iterator[Measure]:
    """Measures whole waves of batches, one for each thread."""
    make, options = LOADERS[loader]
    wave_s = threads * batch / ideal(kind, threads)
    # Threads that want the GIL end in no order, and a batch that is late lets others arrive at once.
    waves = max(math.ceil(least_s / wave_s), 5 if KINDS[kind][1] else 1)
    wanted = threads * batch * waves
    loops_per_us()

    def measure() -> Mapping[str, float]:
        # What has been made before the measurement comes at once, and then a part of a wave.
        run(batches, 2 * threads * batch, 4 * least_s, 0.4 * least_s)
        cpu_s, started = tree_cpu_s(), time.perf_counter()
        items = run(batches, wanted, max(4 * least_s, 2 * waves * wave_s))
        return {"items": items, "wall_s": time.perf_counter() - started, "cpu_s": tree_cpu_s() - cpu_s}

    with closing(make(kind, threads, batch, **options)) as batches:
        run(batches, math.inf, 2 * least_s)
        yield measure


@contextmanager
def from_second(loader: str, kind: str, threads: int, batch: int, seconds: float) -> Iterator[Measure]:
    """Measures what a training gets from the second second on: each round has a new feeder, without a pause."""
    make, options = LOADERS[loader]
    loops_per_us()

    def measure() -> Mapping[str, float]:
        with closing(make(kind, threads, batch, **options)) as batches:
            run(batches, math.inf, seconds / 2)
            cpu_s, started = tree_cpu_s(), time.perf_counter()
            items = run(batches, math.inf, seconds)
            return {"items": items, "wall_s": time.perf_counter() - started, "cpu_s": tree_cpu_s() - cpu_s}

    yield measure


def run(batches: Iterator[Any], wanted: float, limit_s: float, least_s: float = 0) -> int:
    """Take so many samples, and for ``least_s``, but for ``limit_s`` at most; returns the number of samples."""
    count, started = 0, time.perf_counter()
    for batch in batches:
        count += len(batch)
        spent_s = time.perf_counter() - started
        if spent_s > limit_s or (count >= wanted and spent_s >= least_s):
            break
    return count
