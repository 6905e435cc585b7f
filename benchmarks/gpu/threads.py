"""How many images per second do so many decode threads bring to the device?

JPEG files of 500 x 400 to 224, batches of 256, from the page cache, with nothing else to do. One process: where more
threads bring no more, the GIL is the limit.

Target: none; the figures say what a step may take before it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiofeed
from aiofeed import machine
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.images import files
from benchmarks.gpu.setup import Setup

TITLE = "Images per second on the device, by decode threads"

THREADS = (1, 2, 4, 8, 16)


def run(setup: Setup) -> list[Figure]:
    source = aiofeed.ImageFolder(files(setup, setup.size(4096, 12)))
    allowed = [threads for threads in THREADS if threads <= max(1, machine.cpus())]
    feeders = {
        threads: aiofeed.Feeder[Any](
            source,
            decode=aiofeed.DecodeImage(setup.size(224, 32)),
            batch_size=setup.size(256, 2),
            device=setup.device,
            limits=aiofeed.Limits(decode_threads=threads),
        )
        for threads in allowed
    }

    def once(feeder: aiofeed.Feeder[Any]) -> Callable[[], Mapping[str, float]]:
        def epoch() -> Mapping[str, float]:
            # Each pass has threads of its own, and those of the others are gone.
            with feeder:
                for _ in feeder:
                    pass
            return {"items": float(len(source))}

        return epoch

    samples = setup.interleave({str(threads): once(feeder) for threads, feeder in feeders.items()})
    rates = {label: per(column(found, "items"), column(found, "wall_s")) for label, found in samples.items()}
    return [
        *[
            Figure(f"images: {label} thread{'s' if label != '1' else ''}", values, "/s")
            for label, values in rates.items()
        ],
        *[Figure(f"{label} threads / 1", per(values, rates["1"])) for label, values in rates.items() if label != "1"],
    ]
