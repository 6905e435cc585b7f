"""Does ``feeder.explain()`` name the right stage, and does its advice bring the gain that it predicts?

Each feeder has one planted bottleneck. Most are waits (``time.sleep`` in the place of native code or of storage), so
that other work on the machine changes little. A plant runs for an epoch and is explained. Then the first piece of
advice that a program can take is taken. The samples per second of the epoch with it, divided by those of the epoch
before, are the gain; with a cache, those of the second epoch. Gains have no target where the prediction cannot be
exact: how threads and processes share the work afterwards is not measured.

Targets: the right stage and resource in 95 of 100 runs; a gain within 15 % of the predicted one, or not above a bound.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import aiofeed
from aiofeed import FromDataset, Stream
from benchmarks.contenders import Counted, Numbered
from benchmarks.figures import Figure, at_least, at_most, column
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "The stages that explain() names, and the gains that it predicts"

BATCH = 8
BURNERS = 8
WITHIN = 0.15


def run(settings: Settings) -> list[Figure]:
    settings = replace(settings, rounds=min(settings.rounds, 3))
    # One at a time: plants that run at the same time would take each other's cores.
    samples = {
        name: interleave([Contender(name, planted, {"name": name}, ("aiofeed:Feeder",))], settings)[name]
        for name in list(PLANTS)[: settings.size(len(PLANTS), 2)]
    }
    figures = []
    for right in ("stage", "resource"):
        named = [column(rounds, right) for rounds in samples.values()]
        shares = tuple(sum(values) / len(values) for values in zip(*named, strict=True))
        figures.append(Figure(f"right {right}, share of plants", shares, target=at_least(0.95)))
    for name, rounds in samples.items():
        runs = column(rounds, "resource")
        figures.append(Figure(f"{name}: right, share of runs", (sum(runs) / len(runs),)))
        if all(sample["predicted"] for sample in rounds):
            predicted, measured = column(rounds, "predicted"), column(rounds, "gain")
            bounds = column(rounds, "at most")
            # A bound is wrong only if more is gained.
            off = tuple(
                max(gain / expected - 1, 0.0) if bound else abs(gain / expected - 1)
                for gain, expected, bound in zip(measured, predicted, bounds, strict=True)
            )
            target = at_most(WITHIN) if PLANTS[name].exact else None
            kind = "at most" if all(bounds) else "predicted"
            figures.append(Figure(f"{name}: gain {kind}", predicted))
            figures.append(Figure(f"{name}: gain measured", measured))
            figures.append(Figure(f"{name}: gain off by", off, target=target))
    return figures


class Numbers(Numbered):
    """Numbers that are read in ``read_s``, one in ten in ``slow_s``; ``transfer_s`` of it one after the other."""

    def __init__(self, samples: int, read_s: float = 0.0, transfer_s: float = 0.0, slow_s: float = 0.0) -> None:
        super().__init__(samples)
        self._read_s, self._transfer_s, self._slow_s = read_s, transfer_s, slow_s

    async def open(self) -> None:
        self._storage = asyncio.Lock()

    async def read(self, index: int) -> bytes:
        if self._read_s:
            await asyncio.sleep(self._slow_s if self._slow_s and index % 10 == 7 else self._read_s)
        if self._transfer_s:
            async with self._storage:
                await asyncio.sleep(self._transfer_s)
        return index.to_bytes(8, "little")


class Items(Counted):
    """A ``Dataset`` that takes a while for an item."""

    def __init__(self, samples: int, seconds: float) -> None:
        super().__init__(samples)
        self._seconds = seconds

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


def decode(data: bytes, seconds: float = 0.0, nbytes: int = 8) -> Any:
    """An array of ``nbytes`` after a while, without the GIL."""
    if seconds:
        time.sleep(seconds)
    return np.full(nbytes, data[0], np.uint8)


def decode_unevenly(data: bytes) -> Any:
    """An array after 10 ms, or 100 ms for one in ten."""
    index = int.from_bytes(data, "little")
    return decode(data, 0.1 if index * 7919 % 10 == 3 else 0.01)


def decode_with_gil(data: bytes) -> Any:
    """An array after 5 ms in C code that does not release the GIL."""
    ctypes.PyDLL(None).usleep(5_000)
    return np.full(8, data[0], np.uint8)


def decode_on_processor(data: bytes) -> Any:
    """An array after some milliseconds of processor time without the GIL."""
    hashlib.sha256(bytes(4_000_000)).digest()
    return np.full(8, data[0], np.uint8)


def decode_straggler(data: bytes) -> Any:
    """An array after 2 ms, or 200 ms for one in each batch of 32."""
    return decode(data, 0.2 if int.from_bytes(data, "little") % 32 == 7 else 0.002)


class Locked:
    """Decodes under a lock."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._lock = seconds, threading.Lock()

    def __call__(self, data: bytes) -> Any:
        with self._lock:
            return decode(data, self._seconds)


class LockedItems(Items):
    """A ``Dataset`` that takes a while for an item, under a lock."""

    _lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        with self._lock:
            return super().__getitem__(index)


def locked_items(samples: int) -> Any:
    """A ``Dataset`` that four threads may call, one after the other."""
    return FromDataset(LockedItems(samples, 0.004), threads=4)


class SlowSampler(Items):
    """Numbers in order, each after a while: the indices of a sampler, or batches."""

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self)))


def slow_iterable(samples: int) -> Any:
    """A ``Stream`` of numbers, each after a while."""
    return Stream(lambda: iter(SlowSampler(samples, 0.005)))


class SlowThread:
    """Decodes in 60 ms in the first thread that calls it, in 3 ms in others."""

    def __init__(self) -> None:
        self._slow: int | None = None

    def __call__(self, data: bytes) -> Any:
        if self._slow is None:
            self._slow = threading.get_ident()
        return decode(data, 0.06 if threading.get_ident() == self._slow else 0.003)


def collate(samples: list[Any], seconds: float) -> Any:
    """The samples stacked, after a while."""
    time.sleep(seconds)
    return torch.from_numpy(np.stack(samples))


def copy_to_host(batch: Any) -> None:
    """What a consumer does that reads its result after each step: wait for the device."""
    batch.to("cpu").sum().item()


@contextmanager
def others_on_the_cores() -> Iterator[None]:
    """Processes that use the cores of this one."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@dataclass(frozen=True)
class Plant:
    """A feeder with a planted bottleneck.

    Args:
        stage, resource: what ``explain`` should name; "" for any resource.
        source: makes the source of so many samples.
        options: arguments of ``Feeder``; ``limits`` are those of ``Limits``.
        step_s, step: duration of a step, and what it does besides.
        samples: samples of an epoch.
        around: a context manager in which the epoch runs.
        exact: whether the prediction can be exact.
        loader: arguments of ``DataLoader`` that are used instead of a ``Feeder``; the source is its dataset.
        prefetch: whether the source is an iterable for ``prefetch``.
        blocks_s: how long another task blocks the event loop of the consumer at a time; 0: a consumer without a loop.
        cured: the arguments of a loader that follows advice in words, such as a faster sampler; empty: a fast iterable.
    """

    stage: str
    resource: str
    source: Callable[[int], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    step_s: float = 0.01
    step: Callable[[Any], object] | None = None
    samples: int = 160
    around: Callable[[], Any] = nullcontext
    exact: bool = True
    loader: Mapping[str, Any] | None = None
    prefetch: bool = False
    blocks_s: float = 0.0
    cured: Mapping[str, Any] | None = None


def limits_of(**limits: int) -> dict[str, int]:
    return {"decode_threads": 2, "read_concurrency": 32, **limits}


def decoded(by: Callable[[bytes], Any] = decode, limits: Mapping[str, int] | None = None, **options: Any) -> Any:
    """Arguments of a feeder with a decoder."""
    return {"decode": by, "limits": limits_of() if limits is None else limits, **options}


READING, ITEMS = partial(Numbers, read_s=0.03), partial(Items, seconds=0.004)
SLOW = {"num_workers": 1, "sampler": SlowSampler(240, 0.004)}
FAST = {"num_workers": 1, "sampler": SlowSampler(240, 0.0)}
ONE = limits_of(prefetch_batches=1)
HEAVY = decoded(collate_fn=partial(collate, seconds=0.06))
LARGE = decoded(partial(decode, seconds=0.005, nbytes=1 << 18), limits_of(memory_bytes=BATCH << 18))
PLANTS = {
    "slow storage by latency": Plant(
        "read", "storage latency", READING, decoded(limits=limits_of(read_concurrency=8)), samples=240
    ),
    "slow storage by bandwidth": Plant(
        "read", "storage bandwidth", partial(Numbers, transfer_s=0.008), decoded(), step_s=0.02
    ),
    "heavy decode": Plant(
        "decode", "blocking calls", Numbers, decoded(partial(decode, seconds=0.02)), step_s=0.02, samples=240
    ),
    "GIL-bound decode": Plant("decode", "GIL", Numbers, decoded(decode_with_gil), samples=240),
    # The resource depends on how the threads share the work.
    "one slow thread": Plant("decode", "", Numbers, decoded(SlowThread()), step_s=0.001, samples=320, exact=False),
    "one slow sample in ten": Plant(
        "decode", "uneven samples", Numbers, decoded(decode_unevenly, ONE, batch_size=2), step_s=0.001
    ),
    "one slow read in ten": Plant(
        *("read", "uneven samples", partial(Numbers, read_s=0.002, slow_s=0.3)),
        decoded(limits=ONE | {"read_concurrency": 16}, batch_size=2),
        step_s=0.001,
    ),
    "slow sampler": Plant("sampler", "the order", Numbers, decoded(sampler=SlowSampler(160, 0.004))),
    "slow iterable": Plant("read", "the iterable", slow_iterable, {"limits": {}}, step_s=0.001),
    "heavy collate": Plant("collate", "blocking calls", Numbers, HEAVY, step_s=0.02, samples=320),
    "slow step": Plant("step", "the step itself", Numbers, decoded(), step_s=0.02),
    "consumer that copies to the host": Plant(
        "step", "the step itself", Numbers, decoded(device="simulated"), step=copy_to_host
    ),
    "too little memory_bytes": Plant("decode", "memory_bytes", READING, LARGE),
    "Dataset of one thread": Plant(
        "decode", "one thread", partial(Items, seconds=0.01), {"limits": {}}, step_s=0.02, samples=240
    ),
    "cold cache": Plant(
        "decode", "cold cache", Numbers, decoded(partial(decode, seconds=0.01), cache="host"), step_s=0.02
    ),
    "cores used by other processes": Plant(
        *("decode", "other processes", Numbers, decoded(decode_on_processor)),
        step_s=0.001,
        around=others_on_the_cores,
        exact=False,
    ),
    "lock in the decoder": Plant("decode", "a lock", Numbers, decoded(Locked(0.004)), step_s=0.001, exact=False),
    "lock in the Dataset": Plant(
        "decode", "a lock", locked_items, {"limits": {}}, step_s=0.001, samples=240, exact=False
    ),
    "batches of one sample": Plant(
        "hand-over", "batch_size", Numbers, decoded(limits={}, batch_size=1), step_s=0.0, samples=2000
    ),
    "blocked event loop": Plant("step", "the event loop", Numbers, decoded(), step_s=0.0, blocks_s=0.003),
    "straggler in each batch": Plant(
        *("decode", "uneven samples", Numbers, decoded(decode_straggler, {"decode_threads": 16}, batch_size=32)),
        step_s=0.001,
        samples=640,
    ),
    "loader: slow dataset": Plant("dataset", "", ITEMS, samples=320, loader={"num_workers": 1}),
    "loader: slow dataset without workers": Plant("dataset", "", ITEMS, samples=240, loader={}),
    "loader: slow collate": Plant(
        *("collate", "", partial(Items, seconds=0.0)),
        samples=320,
        loader={"num_workers": 1, "collate_fn": partial(collate, seconds=0.04)},
    ),
    "loader: slow sampler": Plant(
        "sampler", "training thread", partial(Items, seconds=0.0), samples=240, loader=SLOW, cured=FAST
    ),
    "loader: slow step": Plant(
        "step", "the step itself", partial(Items, seconds=0.0), step_s=0.02, loader={"num_workers": 1}
    ),
    "prefetch: slow iterable": Plant(
        *("source", "one thread", partial(SlowSampler, seconds=0.02)), step_s=0.005, samples=40, prefetch=True, cured={}
    ),
}


@contextmanager
def planted(name: str) -> Iterator[Measure]:
    """Run a plant, explain it, take the advice, and run it again."""

    def measure() -> Mapping[str, float]:
        plant = PLANTS[name]
        with feeder_of(plant) as feeder, plant.around():
            found = explained(plant, feeder)
            again = None if plant.options.get("cache") is None else explained(plant, feeder)
        right = found.stage == plant.stage
        sample = {
            "stage": float(right),
            "resource": float(right and found.resource == (plant.resource or found.resource)),
            "predicted": 0.0,
            "at most": 0.0,
        }
        for advice in found.advice:
            if advice.gain is None or (again is None and (advised := take(plant, advice.text)) is None):
                continue
            sample["at most"] = float(bool(advice.at_most))
            if again is None:
                with feeder_of(advised) as feeder, advised.around():
                    if advised.options.get("cache") is not None:
                        explained(advised, feeder)
                    again = explained(advised, feeder)
            return sample | {"predicted": advice.gain, "gain": again.samples_per_s / found.samples_per_s}
        return sample | {"gain": 0.0}

    yield measure


@contextmanager
def feeder_of(plant: Plant) -> Iterator[Any]:
    from tests.support.simulated_device import SimulatedDevice

    if plant.loader is not None:
        persistent = bool(plant.loader.get("num_workers"))
        yield aiofeed.DataLoader(plant.source(plant.samples), BATCH, persistent_workers=persistent, **plant.loader)
        return
    if plant.prefetch:
        yield aiofeed.prefetch(plant.source(plant.samples))
        return

    options: dict[str, Any] = {"batch_size": BATCH, **plant.options}
    options["limits"] = aiofeed.Limits(**options["limits"])
    if options.get("device") == "simulated":
        options["device"] = SimulatedDevice()
    with aiofeed.Feeder(plant.source(plant.samples), **options) as feeder:
        yield feeder


def explained(plant: Plant, feeder: Any) -> aiofeed.reports.Explanation:
    """Run an epoch and explain it."""
    if plant.blocks_s:
        asyncio.run(beside_blocking_calls(plant, feeder))
        found: aiofeed.reports.Explanation = feeder.explain()
        return found
    for batch in feeder:
        if plant.step is not None:
            plant.step(batch)
        time.sleep(plant.step_s)
    found = feeder.explain()
    return found


async def beside_blocking_calls(plant: Plant, feeder: Any) -> None:
    """Run an epoch while another task blocks the event loop."""

    async def block() -> None:
        while True:
            await asyncio.sleep(0)
            time.sleep(plant.blocks_s)  # noqa: ASYNC251 - it is the fault that is planted

    task = asyncio.create_task(block())
    async for _ in feeder:
        pass
    task.cancel()


def take(plant: Plant, advice: str) -> Plant | None:
    """The plant with a piece of advice; ``None`` if a program cannot take it."""
    options = dict(plant.options)
    if advice.startswith("await asyncio.to_thread()"):
        return replace(plant, blocks_s=0.0)
    if plant.cured is not None:
        return (
            replace(plant, loader=plant.cured)
            if plant.loader
            else replace(plant, source=partial(SlowSampler, seconds=0.0))
        )
    if plant.loader is not None and (found := re.match(r"(num_workers|threads)=(\d+)", advice)):
        return replace(plant, loader={**plant.loader, found[1]: int(found[2])})
    if found := re.match(r"Limits\((.*?)\)", advice):
        more = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", found[1])}
        return replace(plant, options=options | {"limits": {**options["limits"], **more}})
    if found := re.match(r'(engine|in_order|cache)="([\w:]+)"', advice):
        return replace(plant, options=options | {found[1]: found[2]})
    if found := re.match(r"FromDataset\(dataset, threads=(\d+)\)", advice):
        make, threads = plant.source, int(found[1])
        return replace(plant, source=lambda samples: FromDataset(make(samples), threads=threads))
    if advice.startswith("end the other processes"):
        return replace(plant, around=nullcontext)
    return None
