"""How long does the training loop wait for a batch that is ready?

The time of ``next`` with a batch in the queue: the consumer is busy until there is one, for about 5 ms. It is busy
either with torch operations in one thread, or with a sleep, after which the CPU caches are cold: code that takes 2
microseconds in a tight loop takes 50. Batches of 64 samples of 12 KB. Dropping a batch counts for the step. Compared
with ``DataLoader`` with two workers, which has had as much time to transfer its next batch.

Target: a median below 50 microseconds, sync and async.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_most, column
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.overlap import WaitingSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TITLE = "next() with a batch that is ready"

BATCH = 64
SHAPE = (64, 64, 3)
PAUSE_S = 0.005
MOST_PAUSES = 4


def run(settings: Settings) -> list[Figure]:
    options = {"batches": settings.size(150, 4)}
    imports = ("torch", "aiofeed:Feeder")
    ours = {"next": "for", "anext": "async for"}
    contenders = [Contender(label, aiofeed_feeder, {**options, "loop": loop}, imports) for label, loop in ours.items()]
    contenders.append(Contender("DataLoader, 2 workers", data_loader, options, ("torch.utils.data", "numpy")))
    samples = interleave(contenders, settings)
    figures = []
    for kind in ("step", "sleep"):
        for label, rounds in samples.items():
            target = at_most(50) if label in ours else None
            figures.append(Figure(f"{label} after a {kind}", column(rounds, f"{kind}_median_s", 1e6), "us", target))
    return figures


@contextmanager
def aiofeed_feeder(loop: str, batches: int) -> Iterator[Measure]:
    import numpy as np

    import aiofeed

    sample = np.zeros(SHAPE, np.uint8)

    def decode(data: bytes) -> NDArray[np.uint8]:
        return sample

    source = WaitingSource(batches * BATCH, 0.0)
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH) as feeder:

        def pause_until_ready(pause: Callable[[], None]) -> bool:
            for _ in range(MOST_PAUSES):
                pause()
                if feeder.statistics().queue_depth:
                    return True
            return False

        def sync_epoch(pause: Callable[[], None]) -> list[float]:
            times = []
            iterator = iter(feeder)
            for _ in range(len(feeder)):
                ready = pause_until_ready(pause)
                started = time.perf_counter()
                batch = next(iterator)
                ended = time.perf_counter()
                del batch
                if ready:
                    times.append(ended - started)
            return times

        async def async_epoch(pause: Callable[[], None]) -> list[float]:
            times = []
            iterator = aiter(feeder)
            for _ in range(len(feeder)):
                ready = pause_until_ready(pause)
                started = time.perf_counter()
                batch = await anext(iterator)
                ended = time.perf_counter()
                del batch
                if ready:
                    times.append(ended - started)
            return times

        yield measure(sync_epoch if loop == "for" else lambda pause: asyncio.run(async_epoch(pause)), batches)


@contextmanager
def data_loader(batches: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(Zeros(batches * BATCH), BATCH, num_workers=2, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def epoch(pause: Callable[[], None]) -> list[float]:
        times = []
        iterator = iter(loader)
        for _ in range(len(loader)):
            pause()
            started = time.perf_counter()
            batch = next(iterator)
            ended = time.perf_counter()
            del batch
            times.append(ended - started)
        return times

    yield measure(epoch, batches)


def measure(epoch: Callable[[Callable[[], None]], list[float]], batches: int) -> Measure:
    """Measures an epoch with each kind of pause; medians over the batches that were ready, at least half of them."""
    pauses = {"step": step(), "sleep": lambda: time.sleep(PAUSE_S)}

    def both() -> Mapping[str, float]:
        measured = {kind: epoch(pause) for kind, pause in pauses.items()}
        for kind, times in measured.items():
            assert len(times) > batches / 2, f"{len(times)} of {batches} batches were ready after a {kind}"
        return {f"{kind}_median_s": statistics.median(times) for kind, times in measured.items()}

    both()
    return both


def step() -> Callable[[], None]:
    """About 5 ms of small torch operations in the calling thread, like those of a training step."""
    import torch

    torch.set_num_threads(1)
    weights = torch.randn(128, 128) / 128**0.5

    def work() -> None:
        values = torch.randn(128, 128)
        ends = time.perf_counter() + PAUSE_S
        while time.perf_counter() < ends:
            values = torch.relu(values @ weights)

    return work


class Zeros:
    """The Dataset for ``DataLoader``."""

    def __init__(self, length: int) -> None:
        import numpy as np

        self._length = length
        self._sample = np.zeros(SHAPE, np.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample
