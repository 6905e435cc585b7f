"""How many images per second do so many decode threads bring to the device?

JPEG files of 500 x 400 to 224, batches of 64, from the page cache, with nothing else to do: counted for more than a
second, once the first half second is over. One process: where more threads bring no more, the GIL is the limit.

Target: none; the figures say what a step may take before it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiofeed
from aiofeed.runtime import machine
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.images import endless
from benchmarks.gpu.setup import Setup, synchronize

TITLE = "Images per second on the device, by decode threads"

THREADS = (1, 2, 4, 8, 16)
SETTLE_S = 0.5
COUNT_S = 1.2
MOST_PER_S = 60_000
"""More than 16 threads decode: so many samples a second are there to be read."""


def run(setup: Setup) -> list[Figure]:
    batch_size = setup.size(64, 2)
    source = endless(setup, setup.size(round(MOST_PER_S * (SETTLE_S + COUNT_S)), 12))
    settle_s, count_s = (0.0, 0.0) if setup.quick else (SETTLE_S, COUNT_S)
    feeders = {
        threads: aiofeed.Feeder[Any](
            source,
            decode=aiofeed.DecodeImage(setup.size(224, 32)),
            batch_size=batch_size,
            drop_last=True,
            device=setup.device,
            limits=aiofeed.Limits(decode_threads=threads),
        )
        for threads in THREADS
        if threads <= max(1, machine.cpus())
    }

    def once(feeder: aiofeed.Feeder[Any]) -> Callable[[], Mapping[str, float]]:
        def count() -> Mapping[str, float]:
            # Each turn has threads of its own, and those of the others are gone.
            with feeder:
                batches, took_s = counted(feeder, time.perf_counter, settle_s=settle_s, count_s=count_s)
            return {"items": float(batches * batch_size), "count_s": took_s}

        return count

    samples = setup.interleave({str(threads): once(feeder) for threads, feeder in feeders.items()})
    synchronize(setup.backend)
    rates = {label: per(column(found, "items"), column(found, "count_s")) for label, found in samples.items()}
    return [
        *[
            Figure(f"images: {label} thread{'s' if label != '1' else ''}", values, "/s")
            for label, values in rates.items()
        ],
        *[Figure(f"{label} threads / 1", per(values, rates["1"])) for label, values in rates.items() if label != "1"],
    ]


def counted(
    batches: Iterable[Any], clock: Callable[[], float], *, settle_s: float, count_s: float
) -> tuple[int, float]:
    """How many come, and in how many seconds: from the first one after ``settle_s`` on, for ``count_s`` at least."""
    began = clock()
    since: float | None = None
    count, now = 0, began
    for _ in batches:
        now = clock()
        if since is not None:
            count += 1
            if now - since >= count_s:
                break
        elif now - began >= settle_s:
            since = now
    if since is None or not count:
        raise RuntimeError(f"the batches came to an end within {now - began:.1f} s")
    return count, now - since
