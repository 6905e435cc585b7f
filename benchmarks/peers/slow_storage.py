"""Which loader keeps the most reads of slow storage in flight?

Reads of 20 ms, awaited if a loader supports it (aiofeed, SPDL), else slept in a thread (Grain, torchdata.nodes), 128 or
512 at a time, then batches of 64; ``DataLoader`` with two workers has two at a time. The ideal is in flight / latency:
6,400 and 25,600 reads a second.

Targets: aiofeed at least 0.95 of that with 128 in flight, 0.85 with 512; at most 25 microseconds of CPU per read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.figures import Figure, at_least, at_most
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.peers.contest import CaseResult, Participants, Way, race
from benchmarks.peers.work import adapter, label_of
from benchmarks.slow_reads import BATCH, READ_S, aiofeed_feeder, data_loader, decode

TITLE = "Reads of 20 ms, 128 and 512 in flight, batch 64"

IN_FLIGHT = {128: 0.95, 512: 0.85}
"""Reads in flight, and the target as a share of the ideal."""

WAYS: tuple[Way, ...] = (("spdl_threads", ""), ("grain_threads", ""), ("nodes", ""))
READS = {128: 12_800, 512: 25_600}


def run(settings: Settings, participants: Participants) -> CaseResult:
    present, absent = participants.divide(WAYS)
    contenders = []
    for count in IN_FLIGHT:
        options = {"reads": settings.size(READS[count], 256), "in_flight": count}
        contenders.append(Contender(f"aiofeed, {count}", aiofeed_feeder, options, ("torch", "aiofeed:Feeder")))
        for name, way in present:
            function, imports = PEERS[name], tuple(adapter(name).IMPORTS)
            contenders.append(Contender(f"{label_of(name, way)}, {count}", function, options, imports))
    few = {"reads": settings.size(2 * BATCH, 4), "batch": settings.size(BATCH, 2)}
    contenders.append(Contender("DataLoader, 2 workers", data_loader, few, ("torch.utils.data",)))
    outcome = race(contenders, settings, absent)
    targets: list[Figure] = []
    for count, least in IN_FLIGHT.items():
        ours, ideal = f"aiofeed, {count}", count / READ_S
        share = tuple(rate / ideal for rate in outcome.rate(ours))
        targets.append(Figure(f"reads/s / in flight by latency: {ours}", share, target=at_least(least)))
        targets.append(Figure(f"CPU per read: {ours}", outcome.cpu_us(ours), "us", at_most(25)))
        for label in outcome.peers():
            if label.endswith(f", {count}"):
                share = tuple(rate / ideal for rate in outcome.rate(label))
                targets.append(Figure(f"reads/s / in flight by latency: {label}", share))
    return CaseResult(TITLE, "reads", outcome.columns(), targets, outcome.absent)


def measure_of(reads: int, batches: Callable[[], Iterable[Any]]) -> Measure:
    """Measures one epoch, which must have ``reads`` reads."""

    def measure() -> Mapping[str, float]:
        items = sum(map(len, batches()))
        assert items == reads, f"{items} of {reads} reads"
        return {"items": items}

    return measure


@contextmanager
def spdl(reads: int, in_flight: int) -> Iterator[Measure]:
    """Its asynchronous pipe, with as many tasks as reads may be in flight."""
    import numpy as np
    import torch
    from spdl.pipeline import PipelineBuilder

    async def read(index: int) -> bytes:
        await asyncio.sleep(READ_S)
        return b"sample"

    def collate(data: list[bytes]) -> Any:
        return torch.from_numpy(np.stack([decode(each) for each in data]))

    def batches() -> Iterator[Any]:
        builder: Any = PipelineBuilder().add_source(range(reads))
        builder = builder.pipe(read, concurrency=in_flight, output_order="input").aggregate(BATCH).pipe(collate)
        pipeline: Any = builder.add_sink(2).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline

    measure = measure_of(reads, batches)
    measure()
    yield measure


def read_in_thread(index: int) -> Any:
    time.sleep(READ_S)
    return decode(b"sample")


@contextmanager
def grain(reads: int, in_flight: int) -> Iterator[Measure]:
    """Its read threads, as many as reads may be in flight, and twice as many samples read ahead."""
    import grain as package

    dataset: Any = package.MapDataset.range(reads).map(read_in_thread)
    options = package.ReadOptions(num_threads=in_flight, prefetch_buffer_size=2 * in_flight)
    batched = dataset.to_iter_dataset(options).batch(BATCH, drop_remainder=False)
    measure = measure_of(reads, lambda: batched)
    measure()
    yield measure


@contextmanager
def nodes(reads: int, in_flight: int) -> Iterator[Measure]:
    """``ParallelMapper`` in threads, as many as reads may be in flight."""
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    sampler: Any = SamplerWrapper(SequentialSampler(range(reads)))
    node: Any = ParallelMapper(sampler, read_in_thread, num_workers=in_flight, method="thread")
    node = Prefetcher(Mapper(Batcher(node, BATCH, drop_last=False), default_collate), 2)
    loader: Any = Loader(node)
    measure = measure_of(reads, lambda: loader)
    measure()
    yield measure


PEERS = {"spdl_threads": spdl, "grain_threads": grain, "nodes": nodes}
