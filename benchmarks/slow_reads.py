"""Are as many reads of slow storage in flight as allowed, and do slow samples hold up batches?

Reads take 20 ms, 128 or 512 in flight, batch 64; the ideal is in-flight / latency. Beside it asyncio alone, with as
many tasks that read one sample after the other, or a task for each read; and ``DataLoader`` with two workers. Then one
sample in ten takes ten times as long: decoding 10 ms or 100 ms, in two threads and batches of 2, with the default
look-ahead or one batch; reading 20 ms or 200 ms, 64 in flight, in batches of 32. The bound is the throughput of the
mean cost.

Targets: 0.98 of in-flight / latency with 128, 0.93 with 512; at most 15 us of CPU time per read; for
``in_order="samples"`` 0.95 of the bound, and 1.5 times ``in_order=True`` for slow reads and for slow decodes with the
short look-ahead.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import aiofeed
from benchmarks.contenders import Counted, Numbered, WaitingSource, as_array, epochs, fed, loaded
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Reads of 20 ms, 128 and 512 in flight; samples that take ten times as long"

READ_S = 0.020
IN_FLIGHT = 128
LEAST = {IN_FLIGHT: 0.98, 512: 0.93}
"""Reads in flight, and the least share of the ideal rate."""
BATCH = 64
LOADER = "DataLoader, 2 workers"

THREADS = 2
READS = 64
COST_S = {"decode": 0.010, "read": READ_S}
BOUND = {"decode": THREADS / (1.9 * COST_S["decode"]), "read": READS / (1.9 * COST_S["read"])}


def run(settings: Settings) -> list[Figure]:
    reads, few = settings.size(12_800, 256), settings.size(BATCH, 2)
    figures = []
    for in_flight, least in LEAST.items():
        options = {"reads": reads * in_flight // IN_FLIGHT, "in_flight": in_flight}
        fewer = {**options, "reads": options["reads"] // 2}
        contenders = [
            Contender("aiofeed", aiofeed_feeder, options),
            Contender("asyncio", bare_asyncio, fewer),
            Contender("asyncio, a task per read", bare_asyncio, {**fewer, "task_per_read": True}),
        ]
        if in_flight == IN_FLIGHT:
            contenders.append(Contender(LOADER, data_loader, {"reads": 2 * few, "batch": few}))
        race = interleave(contenders, settings)
        more = "" if in_flight == IN_FLIGHT else f", {in_flight}"
        for label in list(race)[:3]:
            ours, of = label == "aiofeed", more if label == "aiofeed" else f"{more}: {label}"
            ideal = share(race.rate(label), in_flight / READ_S)
            figures += [
                Figure(f"reads/s / ideal{of}", ideal, target=at_least(least) if ours else None),
                Figure(f"CPU per read{of}", race.cpu_us(label), "us", at_most(15) if ours else None),
            ]
        figures += [race.speed("aiofeed", LOADER)] if LOADER in race else []
    return [
        *figures,
        *slow_samples(settings, "decode", 2, 2, 320),
        *slow_samples(settings, "decode", 2, 1, 320),
        *slow_samples(settings, "read", 32, 2, 6_400),
    ]


def slow_samples(settings: Settings, load: str, batch: int, prefetch: int, samples: int) -> list[Figure]:
    options = {"load": load, "batch": batch, "prefetch": prefetch, "samples": settings.size(samples, 2 * batch)}
    contenders = [Contender('"samples"', uneven_feeder, {**options, "in_order": "samples"})]
    held_up = load == "read" or prefetch == 1
    if held_up:
        fewer = settings.size({"decode": 160, "read": 960}[load], 2 * batch)  # it is slower
        contenders.append(Contender("True", uneven_feeder, {**options, "samples": fewer, "in_order": True}))
    race = interleave(contenders, settings)
    name = f"slow {load}s, batch {batch}" + (", 1 ahead" if prefetch == 1 else "")
    ours = share(race.rate('"samples"'), BOUND[load])
    return [
        Figure(f'{name}: "samples" / bound', ours, target=at_least(0.95)),
        *([race.speed('"samples"', "True", 1.5, name)] if held_up else []),
    ]


def share(values: tuple[float, ...], whole: float) -> tuple[float, ...]:
    return tuple(value / whole for value in values)


def aiofeed_feeder(reads: int, in_flight: int = IN_FLIGHT) -> AbstractContextManager[Measure]:
    limits = aiofeed.Limits(read_concurrency=in_flight)
    return fed(aiofeed.Feeder(WaitingSource(reads, READ_S), decode=as_array, batch_size=BATCH, limits=limits))


@contextmanager
def bare_asyncio(reads: int, in_flight: int, task_per_read: bool = False) -> Iterator[Measure]:
    import uvloop

    async def read() -> bytes:
        await asyncio.sleep(READ_S)
        return b"sample"

    async def read_all() -> None:
        numbers, free, tasks = iter(range(reads)), asyncio.Semaphore(in_flight), set()

        async def read_some() -> None:
            for _ in numbers:
                as_array(await read())

        async def read_one() -> None:
            as_array(await read())
            free.release()

        if not task_per_read:
            await asyncio.gather(*[read_some() for _ in range(in_flight)])
            return
        for _ in numbers:
            await free.acquire()
            task = asyncio.create_task(read_one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    with epochs(lambda: [uvloop.run(read_all())], lambda _: reads) as measure:
        yield measure


def data_loader(reads: int, batch: int) -> AbstractContextManager[Measure]:
    return loaded(SlowReads(reads), batch, 2)


class SlowReads(Counted):
    """The same reads, one after the other."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)
        return as_array(bytearray(b"sample"))


class Uneven(Numbered):
    """A source and a decoder of samples of which one in ten costs ten times as much."""

    def __init__(self, samples: int, load: str) -> None:
        super().__init__(samples)
        slow = set(random.Random(0).sample(range(samples), samples // 10))
        self._costs = [10 * COST_S[load] if index in slow else COST_S[load] for index in range(samples)]
        self._load = load

    async def read(self, index: int) -> int:
        if self._load == "read":
            await asyncio.sleep(self._costs[index])
        return index

    def decode(self, index: int) -> int:
        if self._load == "decode":
            time.sleep(self._costs[index])
        return index


def uneven_feeder(load: str, batch: int, samples: int, prefetch: int, in_order: Any) -> AbstractContextManager[Measure]:
    source = Uneven(samples, load)
    limits = aiofeed.Limits(decode_threads=THREADS, read_concurrency=READS, prefetch_batches=prefetch)
    feeder = aiofeed.Feeder(source, decode=source.decode, batch_size=batch, in_order=in_order, limits=limits)
    return fed(feeder)
