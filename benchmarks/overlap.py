"""Is batch N+1 loaded while the step works on batch N?

Every load takes 30 ms and every step 30 ms; one batch loads at a time, so 100 batches take 101 times 30 ms at best
and 200 times without overlap. The load is a read that waits on the event loop, or a decode that blocks its thread;
the step always blocks the thread that iterates, in ``async for`` that of the caller's event loop.

The event loop's timers are late by some tenths of a millisecond, which the ideal does not include; the results give
the duration of one such read alone.

Target: at most 1.03 times the ideal, sync and async.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.figures import Figure, at_most, column
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Overlap of load and step, 30 ms each, 100 batches"

LOAD_S = STEP_S = 0.030
BATCH = 8


def run(settings: Settings) -> list[Figure]:
    batches = settings.size(100, 3)
    imports = ("torch", "aiofeed:Feeder")
    cases = {
        "for, read waits": {"load": "read", "loop": "for"},
        "for, decode blocks": {"load": "decode", "loop": "for"},
        "async for, read waits": {"load": "read", "loop": "async for"},
        "async for, decode blocks": {"load": "decode", "loop": "async for"},
    }
    contenders = [
        Contender(label, aiofeed_feeder, {**options, "batches": batches}, imports) for label, options in cases.items()
    ]
    contenders.append(Contender("DataLoader, 1 worker", data_loader, {"batches": batches}, ("torch.utils.data",)))
    samples = interleave(contenders, settings)
    ideal_s = (batches + 1) * LOAD_S
    figures = [
        Figure(
            f"time / ideal: {label}",
            column(rounds, "wall_s", 1 / ideal_s),
            target=at_most(1.03) if label in cases else None,
        )
        for label, rounds in samples.items()
    ]
    alone = column(samples["for, read waits"], "alone_s", 1e3)
    return [*figures, Figure("one read that waits, alone on its loop", alone, "ms")]


class WaitingSource:
    """A source whose reads wait for ``wait_s``, all samples of a batch at the same time."""

    def __init__(self, length: int, wait_s: float) -> None:
        self._length = length
        self._wait_s = wait_s

    def __len__(self) -> int:
        return self._length

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        return b"sample"


def length_of(data: bytes) -> int:
    return len(data)


def slow_length_of(data: bytes) -> int:
    time.sleep(LOAD_S)
    return len(data)


@contextmanager
def aiofeed_feeder(load: str, loop: str, batches: int) -> Iterator[Measure]:
    import aiofeed

    if load == "read":
        # As many reads as a batch has samples, so that the next batch's reads begin when this one's have ended.
        feeder: aiofeed.Feeder[object] = aiofeed.Feeder(
            WaitingSource(batches * BATCH, LOAD_S),
            decode=length_of,
            batch_size=BATCH,
            limits=aiofeed.Limits(read_concurrency=BATCH),
        )
    else:
        feeder = aiofeed.Feeder(
            WaitingSource(batches, 0.0),
            decode=slow_length_of,
            batch_size=1,
            limits=aiofeed.Limits(decode_threads=1),
        )

    # Inside `epochs` the feeder knows that this epoch is the last, and prefetches nothing of the next.
    def sync_epoch() -> Mapping[str, float]:
        count = 0
        for _ in feeder.epochs(feeder.epoch + 2):
            for _ in feeder:
                time.sleep(STEP_S)
                count += 1
        return {"items": count, "alone_s": alone_s}

    async def async_epoch() -> Mapping[str, float]:
        count = 0
        for _ in feeder.epochs(feeder.epoch + 2):
            async for _ in feeder:
                time.sleep(STEP_S)  # noqa: ASYNC251 - the step is meant to block
                count += 1
        return {"items": count, "alone_s": alone_s}

    alone_s = read_alone_s() if load == "read" else 0.0
    with feeder:
        next(iter(feeder))  # from here on the feeder knows the size of a batch; a dropped iterator prefetches nothing
        yield sync_epoch if loop == "for" else lambda: asyncio.run(async_epoch())


def read_alone_s(times: int = 9) -> float:
    """Median duration of the same reads on an idle event loop of the feeder's kind."""
    from aiofeed.runtime.event_loop import new_event_loop

    async def reads() -> list[float]:
        durations = []
        for _ in range(times):
            started = time.perf_counter()
            await asyncio.gather(*[asyncio.sleep(LOAD_S) for _ in range(BATCH)])
            durations.append(time.perf_counter() - started)
        return durations

    loop = new_event_loop()
    try:
        return statistics.median(loop.run_until_complete(reads()))
    finally:
        loop.close()


@contextmanager
def data_loader(batches: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(SlowDataset(batches), batch_size=1, num_workers=1, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def epoch() -> Mapping[str, float]:
        count = 0
        for _ in loader:
            time.sleep(STEP_S)
            count += 1
        return {"items": count}

    for _ in loader:
        pass
    yield epoch


class SlowDataset:
    """Items that take 30 ms."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return slow_length_of(b"sample")
