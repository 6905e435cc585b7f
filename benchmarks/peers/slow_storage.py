"""The case of slow storage, and how each peer reads in parallel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.contenders import as_array, epochs
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.contest import OURS, CaseResult, Participants, race
from benchmarks.slow_reads import BATCH, READ_S, aiofeed_feeder, data_loader

IN_FLIGHT = {128: 0.95, 512: 0.85}
"""Reads in flight, and the target as a share of the ideal."""
READS = {128: 12_800, 512: 25_600}


def slow_storage(settings: Settings, participants: Participants) -> CaseResult:
    """Which loader keeps the most reads of slow storage in flight?

    Reads of 20 ms, awaited if a loader supports it (aiofeed, SPDL), else slept in a thread (Grain, torchdata.nodes),
    128 or 512 at a time, then batches of 64; ``DataLoader`` with two workers has two at a time. The ideal is in flight
    / latency: 6,400 and 25,600 reads a second.

    Targets: aiofeed at least 0.95 of that with 128 in flight, 0.85 with 512; at most 25 microseconds of CPU per read.
    """
    present, absent = participants.divide(PEERS)
    contenders = []
    for count in IN_FLIGHT:
        options = {"reads": settings.size(READS[count], 256), "in_flight": count}
        contenders.append(Contender(f"aiofeed, {count}", aiofeed_feeder, options, ("torch", "aiofeed:Feeder")))
        contenders += [Contender(f"{name}, {count}", PEERS[name], options, ADAPTERS[name].imports) for name in present]
    few = {"reads": settings.size(2 * BATCH, 4), "batch": settings.size(BATCH, 2)}
    contenders.append(Contender("DataLoader, 2 workers", data_loader, few, ("torch.utils.data",)))
    outcome = race(contenders, settings, absent)
    targets: list[Figure] = []
    for count, least in IN_FLIGHT.items():
        for label in (f"aiofeed, {count}", *(peer for peer in outcome.peers() if peer.endswith(f", {count}"))):
            share = tuple(rate / (count / READ_S) for rate in outcome.rate(label))
            target = at_least(least) if label.startswith(OURS) else None
            targets.append(Figure(f"reads/s / in flight by latency: {label}", share, target=target))
            if target:
                targets.append(Figure(f"CPU per read: {label}", outcome.cpu_us(label), "us", at_most(25)))
    return CaseResult(
        "Reads of 20 ms, 128 and 512 in flight, batch 64", "reads", outcome.columns(), targets, outcome.absent
    )


def spdl(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """Its asynchronous pipe, with as many tasks as reads may be in flight."""
    import numpy as np
    import torch
    from spdl.pipeline import PipelineBuilder

    async def read(index: int) -> bytes:
        await asyncio.sleep(READ_S)
        return b"sample"

    def collate(data: list[bytes]) -> Any:
        return torch.from_numpy(np.stack([as_array(each) for each in data]))

    def batches() -> Iterator[Any]:
        builder: Any = PipelineBuilder().add_source(range(reads))
        builder = builder.pipe(read, concurrency=in_flight, output_order="input").aggregate(BATCH).pipe(collate)
        pipeline: Any = builder.add_sink(2).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline

    return epochs(batches)


def read_in_thread(index: int) -> Any:
    time.sleep(READ_S)
    return as_array(b"sample")


def grain(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """Its read threads, as many as reads may be in flight, and twice as many samples read ahead."""
    import grain as package

    dataset: Any = package.MapDataset.range(reads).map(read_in_thread)
    options = package.ReadOptions(num_threads=in_flight, prefetch_buffer_size=2 * in_flight)
    batched = dataset.to_iter_dataset(options).batch(BATCH, drop_remainder=False)
    return epochs(lambda: batched)


def nodes(reads: int, in_flight: int) -> AbstractContextManager[Measure]:
    """``ParallelMapper`` in threads, as many as reads may be in flight."""
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    sampler: Any = SamplerWrapper(SequentialSampler(range(reads)))
    node: Any = ParallelMapper(sampler, read_in_thread, num_workers=in_flight, method="thread")
    node = Prefetcher(Mapper(Batcher(node, BATCH, drop_last=False), default_collate), 2)
    loader: Any = Loader(node)
    return epochs(lambda: loader)


PEERS = {"SPDL": spdl, "Grain": grain, "torchdata.nodes": nodes}
