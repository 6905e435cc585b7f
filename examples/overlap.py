"""Loads sample N + 1 during step N, with loads of 1 s and steps of 0.3 s, scaled to a tenth.

    python examples/overlap.py           or: python examples/overlap.py --scale 1

Prints the order of events for one load at a time, then for four, as one would use for slow storage. The source only
sleeps. The very first sample loads alone, because the size of samples is not known yet.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import aiofeed

LOAD_S, STEP_S = 1.0, 0.3


class SlowSource:
    """Samples 0, 1, 2, ..., each of which takes ``load_s`` to load."""

    def __init__(self, samples: int, load_s: float, report: Callable[[str], None]) -> None:
        self.samples, self.load_s, self.report = samples, load_s, report

    def __len__(self) -> int:
        return self.samples

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        self.report(f"load {index} begins")
        await asyncio.sleep(self.load_s)
        self.report(f"load {index} ends")
        return str(index).encode()


def run(samples: int, scale: float, loads: int) -> None:
    """Print the events with ``loads`` loads at a time, and the total time."""
    load_s, step_s = LOAD_S * scale, STEP_S * scale

    def report(event: str) -> None:
        indent = "" if event.startswith("load") else " " * 20
        # One write per line: loads and steps report from different threads.
        print(f"{time.perf_counter() - started:7.3f} s   {indent}{event}\n", end="", flush=True)

    feeder: aiofeed.Feeder[list[str]] = aiofeed.Feeder(
        SlowSource(samples, load_s, report),
        decode=bytes.decode,
        batch_size=1,
        limits=aiofeed.Limits(read_concurrency=loads, prefetch_batches=loads),
    )
    started = time.perf_counter()
    with feeder:
        for batch in feeder:
            report(f"step {batch[0]} begins")
            time.sleep(step_s)
            report(f"step {batch[0]} ends")
        overlapped = time.perf_counter() - started
    sequential, ideal = samples * (load_s + step_s), ideal_s(samples, load_s, step_s, loads)
    ratio = overlapped / ideal
    print(f"\nsequential {sequential:.2f} s, overlapped {overlapped:.2f} s, ideal {ideal:.2f} s (ratio {ratio:.2f})\n")


def ideal_s(samples: int, load_s: float, step_s: float, loads: int) -> float:
    """The end of the last step if only loads and steps take time: loads run in groups, steps one after the other."""
    end = 0.0
    for sample in range(samples):
        loaded = (sample // loads + 1) * load_s
        end = max(end, loaded) + step_s
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--scale", type=float, default=0.1, help="factor for both durations (%(default)s)")
    options = parser.parse_args()
    if options.samples < 1 or options.scale <= 0:
        parser.error(f"--samples and --scale must be above 0, got {options.samples} and {options.scale}")
    for loads in (1, 4):
        print(f"{loads} load{'s' if loads > 1 else ''} at a time\n")
        run(options.samples, options.scale, loads)


if __name__ == "__main__":
    main()
