"""Is aiofeed as fast as a bare pool of threads on a machine with more cores than this one?

A decoder that sleeps 1.28 ms an image, without a core and without the GIL, takes the place of one in C; so two cores
show what 128 would do, as far as the framework is concerned (``benchmarks.simulated``). Batches of 64, 32 and 256 of
rows of 32 x 32, shuffled, 2 to 128 threads; aiofeed with ``Limits(decode_threads=N)`` and with default limits on a
machine that seems to have N cores. Beside it: a ``ThreadPoolExecutor`` of whole batches, SPDL, torchdata.nodes, Grain
and ``DataLoader`` with N workers, all with whole batches; one that is not installed is named so. "chunks" are decoded
in one call, "items" one by one to tensors of their own; "Pillow-like" holds the GIL for 0.3 ms of 1 ms, "pure Python"
for all of it (batches of 16); "slow reads" wait 20 ms for each sample before they decode it.

Then what else works in one thread: the copy thread (a simulated device), ``cache="host"`` after the first epoch, eight
consumers of ``serve``, the hand-over by 64 workers of ``DataLoader``, and files of 2 KB in the page cache, read by 64
threads. Last, whether the simulation tells the truth: the framework's CPU time per image with two threads, for JPEGs
of 64x64 and for a decoder that sleeps for as long.

What it leaves out: memory bandwidth, caches of the CPU, threads of one core, and cores that get in each other's way.

Targets: 0.97 of the bare pool with 16 to 64 threads, 0.9 with 128, at most 8 us of CPU time per image; the framework's
time of sleeping decoders at least 0.8 of that of real ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import simulated
from benchmarks.contenders import as_array, fed, single_epochs
from benchmarks.data import files_below, jpeg_folder, tiny_folder
from benchmarks.figures import Figure, Race, at_least, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.simulated import BARE, DEFAULT, LOADERS, OURS, ideal

TITLE = "More cores than there are: a decoder that sleeps 1.28 ms an image, images per second"

THREADS = (2, 4, 8, 16, 32, 64, 128)
LEAST_S = 0.5
LOADER_THREADS, READING = 16, 64  # more processes would only wait for the two cores
WAYS = (OURS, DEFAULT, BARE)
OTHERS = ("SPDL", "torchdata.nodes", "Grain")
PROCESSES = tuple(f"aiofeed, process:{count}" for count in (2, 4, 8))
ALONE = ("aiofeed, copy thread", "aiofeed, 8 consumers", 'aiofeed, cache="host"', "DataLoader", "aiofeed.DataLoader")


def rows(threads: int) -> Iterator[tuple[str, int, Sequence[str]]]:
    """Kind, batch size and loaders that are compared with as many threads."""
    workers = ("DataLoader",) if threads <= LOADER_THREADS else ()
    yield "chunks", 64, (*WAYS, *OTHERS, *workers, *(PROCESSES + ALONE if threads == READING else ()))
    if threads >= 16:
        yield "chunks", 32, WAYS
        yield "chunks", 256, WAYS
    if threads in (16, 64):
        yield "items", 64, (*WAYS, *OTHERS)
        yield "Pillow-like", 16, (*WAYS, *(PROCESSES if threads == READING else ()))
        yield "slow reads", 64, WAYS
    if threads == 16:
        yield "pure Python", 16, WAYS


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    for threads in THREADS if not settings.quick else (2,):
        for kind, batch, loaders in rows(threads):
            figures += row(settings, threads, kind, batch, loaders)
    return [*figures, *reading(settings), *truth(settings)]


def row(settings: Settings, threads: int, kind: str, batch: int, loaders: Sequence[str]) -> Iterator[Figure]:
    name = f"{kind}, batch {batch}, {threads} threads"
    options = {"kind": kind, "threads": threads, "batch": batch, "least_s": 0.01 if settings.quick else LEAST_S}
    present = [each for each in loaders if find_spec(LOADERS[each][2])]
    race = interleave([Contender(each, simulated.simulated, {"loader": each, **options}) for each in present], settings)
    for each in loaders:
        if each not in race:
            yield Figure(f"{name}: {each} is not installed", (0.0,), "/s")
            continue
        ours = each in (OURS, DEFAULT) and kind == "chunks" and threads >= 16
        yield Figure(f"{name}: {each}", race.rate(each), "/s")
        yield Figure(f"{name}: {each} / ideal", tuple(rate / ideal(kind, threads) for rate in race.rate(each)))
        if each != BARE:
            target = at_least(0.97 if threads < 128 else 0.9) if ours else None
            yield Figure(f"{name}: {each} / {BARE}", per(race.rate(each), race.rate(BARE)), target=target)
        yield Figure(f"{name}: CPU, {each}", race.cpu_us(each), "us", at_most(8) if ours else None)


def reading(settings: Settings) -> list[Figure]:
    """Small files in the page cache, without decoding."""
    options = {"folder": str(tiny_folder(settings.data, settings.size(20_000, 200))), "threads": READING}
    race = interleave([Contender(OURS, files, options), Contender(BARE, bare_files, options)], settings)
    name = f"files of 2 KB, {READING} threads"
    return [race.speed(OURS, BARE, None, name), *race.rates("files", name), *cpu_of(race, name)]


def cpu_of(race: Race, name: str) -> list[Figure]:
    return [Figure(f"{name}: CPU, {label}", race.cpu_us(label), "us") for label in race]


def files(folder: str, threads: int) -> Any:
    import aiofeed

    limits = aiofeed.Limits(decode_threads=threads)
    return fed(aiofeed.Feeder(aiofeed.Files(files_below(folder)), decode=as_array, batch_size=64, limits=limits))


@contextmanager
def bare_files(folder: str, threads: int) -> Iterator[Measure]:
    from concurrent.futures import ThreadPoolExecutor

    paths = [Path(path) for path in files_below(folder)]
    batches = [paths[start : start + 64] for start in range(0, len(paths), 64)]
    with ThreadPoolExecutor(threads) as pool:

        def measure() -> Mapping[str, float]:
            return {"items": sum(map(len, pool.map(lambda batch: [path.read_bytes() for path in batch], batches)))}

        measure()
        yield measure


def truth(settings: Settings) -> list[Figure]:
    """The framework's CPU time beside a real decoder, and beside one that sleeps for as long."""
    options = {"folder": str(jpeg_folder(settings.data, settings.size(6000, 24), 64, 64))}
    contenders = [Contender(name, framework, {**options, "sleep": name == "sleeping"}) for name in ("real", "sleeping")]
    race = interleave(contenders, settings)
    figures = [Figure(f"framework, JPEGs of 64x64, {each}", race.column(each, "framework_us"), "us") for each in race]
    figures += [Figure(f"images, JPEGs of 64x64, {each}", race.rate(each), "/s") for each in race]
    ratio = per(race.column("sleeping", "framework_us"), race.column("real", "framework_us"))
    return [*figures, Figure("framework: sleeping / real", ratio, target=at_least(0.8))]


class Encoded(simulated.Ready):
    """JPEGs in memory."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(len(paths))
        self._files = [Path(path).read_bytes() for path in paths]

    def read_now(self, indices: Sequence[int]) -> list[bytes]:
        return [self._files[index] for index in indices]


class Timed:
    """``DecodeImage`` with a count of its CPU time; or a decoder that sleeps for ``sleep_us`` an image in its place."""

    takes_seed = False

    def __init__(self, decode: Any, sleep_us: float) -> None:
        self.row, self._decode, self._sleep_us = decode.row, decode, sleep_us
        self.spent: list[float] = []

    def __call__(self, data: bytes, /) -> object:
        raise NotImplementedError

    def decode_into(self, data: bytes, out: Any, seed: int | None = None) -> None:
        self.decode_many_into([data], out[None])

    def decode_many_into(self, data: Sequence[bytes], out: Any, seeds: object = None) -> list[None]:
        started = time.thread_time()
        if self._sleep_us:
            simulated.usleep(int(self._sleep_us * len(data)))
        else:
            self._decode.decode_many_into(data, out, None)
        self.spent.append(time.thread_time() - started)
        return [None] * len(data)


@contextmanager
def framework(folder: str, sleep: bool) -> Iterator[Measure]:
    import numpy as np

    import aiofeed

    source, decode = Encoded(files_below(folder)), aiofeed.DecodeImage(64)
    out = np.empty((len(source), *decode.row.shape), np.uint8)
    started = time.thread_time()
    decode.decode_many_into(source.read_now(range(len(source))), out, None)
    real_us = (time.thread_time() - started) / len(source) * 1e6
    timed = Timed(decode, real_us if sleep else 0)
    limits = aiofeed.Limits(decode_threads=2)
    with aiofeed.Feeder(source, decode=timed, batch_size=64, shuffle=True, limits=limits) as feeder:
        epoch = single_epochs(feeder)

        def measure() -> Mapping[str, float]:
            timed.spent.clear()
            before = time.process_time()
            items = sum(map(len, epoch()))
            return {"items": items, "framework_us": (time.process_time() - before - sum(timed.spent)) / items * 1e6}

        measure()
        yield measure
