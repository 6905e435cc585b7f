"""Load N + 1 while N is being worked on: loads of 1 s, steps of 0.3 s, scaled down to a tenth.

    python examples/overlap.py           or: python examples/overlap.py --scale 1

The source only sleeps, so what is printed is the order of events and nothing else. First one load at a time, the
classic picture; then four, as one would from slow storage (the very first goes alone: nobody knows yet how large
samples are).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import aiofeed

LOAD_S, STEP_S = 1.0, 0.3


class SlowSource:
    """Samples 0, 1, 2, ..., each of which takes its time to arrive."""

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
    """Print what happens with ``loads`` loads at a time, and what it took."""
    load_s, step_s = LOAD_S * scale, STEP_S * scale

    def report(event: str) -> None:
        indent = "" if event.startswith("load") else " " * 20
        # One write for each line: the loads report from another thread than the steps.
        print(f"{time.perf_counter() - began:7.3f} s   {indent}{event}\n", end="", flush=True)

    feeder: aiofeed.Feeder[list[str]] = aiofeed.Feeder(
        SlowSource(samples, load_s, report),
        decode=bytes.decode,
        batch_size=1,
        limits=aiofeed.Limits(read_concurrency=loads, prefetch_batches=loads),
    )
    began = time.perf_counter()
    with feeder:
        for batch in feeder:
            report(f"step {batch[0]} begins")
            time.sleep(step_s)
            report(f"step {batch[0]} ends")
        took = time.perf_counter() - began
    sequential, ideal = samples * (load_s + step_s), ideal_s(samples, load_s, step_s, loads)
    print(f"\nsequential {sequential:.2f} s, overlapped {took:.2f} s, ideal {ideal:.2f} s ({took / ideal:.2f} of it)\n")


def ideal_s(samples: int, load_s: float, step_s: float, loads: int) -> float:
    """When the last step ends if nothing but loads and steps takes time: loads come in rounds, steps in a row."""
    end = 0.0
    for sample in range(samples):
        loaded = (sample // loads + 1) * load_s
        end = max(end, loaded) + step_s
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--scale", type=float, default=0.1, help="of the 1 s and the 0.3 s (%(default)s)")
    options = parser.parse_args()
    if options.samples < 1 or options.scale <= 0:
        parser.error(f"--samples and --scale must be above 0, got {options.samples} and {options.scale}")
    for loads in (1, 4):
        print(f"{loads} load{'s' if loads > 1 else ''} at a time\n")
        run(options.samples, options.scale, loads)


if __name__ == "__main__":
    main()
