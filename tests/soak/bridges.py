"""Episodes of `aiofeed.prefetch` over foreign iterables of batches."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from aiofeed import prefetch
from tests.soak.checks import check_released
from tests.soak.configurations import LATENCIES, ViolationError
from tests.soak.episodes import Episode
from tests.support.simulated_device import SimulatedDevice


class Batches:
    """An iterable of numbered batches. It counts how many iterations started and ended."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.started = self.ended = 0

    def make(self, number: int) -> dict[str, Any]:
        if number == self.fails_at:
            raise KeyError(number)
        return {"x": torch.full((3, 2000), number), "key": str(number)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.started += 1
        try:
            for number in range(self.count):
                yield self.make(number)
        finally:
            self.ended += 1


class AsyncBatches(Batches):
    """An async iterable of the same batches."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        self.started += 1
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield self.make(number)
        finally:
            self.ended += 1


def _check(batch: Any, number: int) -> None:
    if not bool((batch["x"] == number).all()) or batch["key"] != str(number):
        raise ViolationError(f"batch {number} is {batch['key']} with {batch['x'].unique().tolist()}")


def bridge(episode: Episode) -> None:
    """Iterate over `prefetch` three times: the first two may stop early or fail, the last one is complete."""
    random = episode.random
    latency = random.choice(LATENCIES)
    device = None if latency is None else SimulatedDevice(random.randrange(1 << 30), latency=latency)
    kind = random.choice((Batches, AsyncBatches))
    batches = kind(random.randint(1, 12))
    feed = prefetch(
        batches,
        device,  # type: ignore[arg-type]
        prefetch_batches=random.choice((1, 2, 4)),
        device_batches=random.choice((1, 2)),
    )
    asynchronous = random.random() < 0.5
    for last in (False, False, True):
        batches.fails_at = random.randrange(batches.count) if not last and random.random() < 0.4 else None
        steps = batches.count + 1 if last else random.randint(0, batches.count + 1)
        received = asyncio.run(_iterate_async(feed, steps)) if asynchronous else _iterate(feed, steps)
        available = batches.count if batches.fails_at is None else batches.fails_at
        if received != min(steps, available):
            raise ViolationError(f"{received} of {available} batches received, {steps} requested", "lost")
        episode.counts["iterations of prefetch"] += 1
    episode.after.append(lambda: _check_released(batches, device))


def _check_released(batches: Batches, device: SimulatedDevice | None) -> None:
    if batches.started != batches.ended:
        raise ViolationError(f"{batches.started} iterations started, {batches.ended} ended", "leaked")
    if device is not None:
        gc.collect()
        check_released(device)


def _iterate(feed: Any, steps: int) -> int:
    received = 0
    iterator = iter(feed)
    try:
        while received < steps:
            _check(next(iterator), received)
            received += 1
    except (StopIteration, KeyError):
        pass
    return received


async def _iterate_async(feed: Any, steps: int) -> int:
    received = 0
    iterator = aiter(feed)
    try:
        while received < steps:
            _check(await anext(iterator), received)
            received += 1
    except (StopAsyncIteration, KeyError):
        return received
    if received % 2:
        await iterator.aclose()
    return received
