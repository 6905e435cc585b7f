"""Episodes of `aiofeed.prefetch`: batches that somebody else makes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from aiofeed import prefetch
from aiofeed.testing import SimulatedDevice
from tests.soak.configurations import LATENCIES, ViolationError
from tests.soak.episodes import Episode


class Batches:
    """An iterable of numbered batches, which counts how often it was begun and ended."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.begun = self.ended = 0

    def make(self, number: int) -> dict[str, Any]:
        if number == self.fails_at:
            raise KeyError(number)
        return {"x": torch.full((3, 2000), number), "key": str(number)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        try:
            for number in range(self.count):
                yield self.make(number)
        finally:
            self.ended += 1


class AsyncBatches(Batches):
    """The same, asynchronously."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        self.begun += 1
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
    """Passes over batches of an iterable, some of them left early, some failing, the last one whole."""
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
        got = asyncio.run(_pass_async(feed, steps)) if asynchronous else _pass(feed, steps)
        wanted = batches.count if batches.fails_at is None else batches.fails_at
        if got != min(steps, wanted):
            raise ViolationError(f"{got} batches of {wanted}, {steps} asked for", "lost")
        episode.tally["passes of prefetch"] += 1
    episode.after.append(lambda: _ended(batches, device))


def _ended(batches: Batches, device: SimulatedDevice | None) -> None:
    if batches.begun != batches.ended:
        raise ViolationError(f"iterated {batches.begun} times, closed {batches.ended}", "left behind")
    if device is not None:
        gc.collect()
        device.synchronize()
        if device.pinned_bytes or device.allocated_bytes:
            what = f"{device.pinned_bytes} bytes pinned and {device.allocated_bytes} on the device"
            raise ViolationError(what, "left behind")


def _pass(feed: Any, steps: int) -> int:
    got = 0
    iterator = iter(feed)
    try:
        while got < steps:
            _check(next(iterator), got)
            got += 1
    except (StopIteration, KeyError):
        pass
    return got


async def _pass_async(feed: Any, steps: int) -> int:
    got = 0
    iterator = aiter(feed)
    try:
        while got < steps:
            _check(await anext(iterator), got)
            got += 1
    except (StopAsyncIteration, KeyError):
        return got
    if got % 2:
        await iterator.aclose()
    return got
