"""How many images per second reach the device with 1 to 16 decode threads?

JPEG files of 500 x 400 to 224, batches of 64, from the page cache, without a step; counted for more than a second,
after half a second. One process: if more threads give no more images, the GIL is the limit.

Target: none; the figures show how short a step may be without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiofeed
from aiofeed.kernel.runtime import machine
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.images import endless
from benchmarks.gpu.setup import Setup, Work, synchronize

TITLE = "Images per second on the device, by decode threads"

THREADS = (1, 2, 4, 8, 16)
SETTLE_S = 0.5
COUNT_S = 1.2
MOST_PER_S = 60_000
"""Samples per second that the source has, more than 16 threads decode."""


def run(setup: Setup) -> list[Figure]:
    batch_size = setup.size(64, 2)
    source = endless(setup, setup.size(round(MOST_PER_S * (SETTLE_S + COUNT_S)), 12))
    settle_s, count_s = (0.0, 0.0) if setup.quick else (SETTLE_S, COUNT_S)

    def rate_of(threads: int) -> Work:
        decode = aiofeed.DecodeImage(setup.size(224, 32))
        limits = aiofeed.Limits(decode_threads=threads)
        feeder: Any = aiofeed.Feeder(
            source, decode=decode, batch_size=batch_size, drop_last=True, device=setup.device, limits=limits
        )

        def work() -> Mapping[str, float]:
            # Each measurement starts its own threads; those of the others have ended.
            with feeder:
                batches, elapsed_s = counted(feeder, time.perf_counter, settle_s=settle_s, count_s=count_s)
            return {"rate": batches * batch_size / elapsed_s}

        return work

    samples = setup.interleave({str(n): rate_of(n) for n in THREADS if n <= max(1, machine.cpus())})
    synchronize(setup.backend)
    rates = {label: column(rounds, "rate") for label, rounds in samples.items()}
    return [
        *[Figure(f"images: {n} thread{'s' if n != '1' else ''}", values, "/s") for n, values in rates.items()],
        *[Figure(f"{n} threads / 1", per(values, rates["1"])) for n, values in rates.items() if n != "1"],
    ]


def counted(
    batches: Iterable[Any], clock: Callable[[], float], *, settle_s: float, count_s: float
) -> tuple[int, float]:
    """The number of batches, and seconds: from the first batch after ``settle_s``, for at least ``count_s``."""
    started = clock()
    since: float | None = None
    count, now = 0, started
    for _ in batches:
        now = clock()
        if since is not None:
            count += 1
            if now - since >= count_s:
                break
        elif now - started >= settle_s:
            since = now
    if since is None or not count:
        raise RuntimeError(f"the batches ended after {now - started:.1f} s")
    return count, now - since
