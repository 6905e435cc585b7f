"""How do the actors of ``engine="ray"`` scale, and what does a batch cost more than with ``engine="process"``?

``python -m benchmarks.ray_cluster [--actors 1 2 4 8] [--batches 60]`` starts a Ray cluster on this machine. First,
samples that take 20 ms to read and 10 ms to decode, by sleeping, with one decode thread per actor: the samples per
second of k actors. Second, batches of 1 KB to 16 MB that take no time to decode, with one worker: the time per batch,
from which follow the times per batch and per MB.

Target: k actors give at least 0.9 k times the rate of one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np

from aiofeed import Feeder, Limits, RayEngine

READ_S = 0.020
DECODE_S = 0.010
BATCH = 32
SIZES = (1 << 10, 1 << 20, 4 << 20, 16 << 20)


class SlowNumbers:
    """n numbers; each takes 20 ms to read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(READ_S)
        return b"%d" % index


class Instant(SlowNumbers):
    """n numbers, at once."""

    async def read(self, index: int) -> bytes:
        return b"%d" % index


def slow_decode(data: bytes) -> Any:
    time.sleep(DECODE_S)
    return np.array(int(data))


class Fill:
    """Makes an array of a size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, data: bytes) -> Any:
        return np.full(self.nbytes, int(data) % 251, np.uint8)


def rate(actors: int, batches: int) -> float:
    """Samples per second of a number of actors, after all of them have started."""
    source = SlowNumbers(BATCH * batches * actors)
    limits = Limits(read_concurrency=64 * actors, decode_threads=actors)
    with Feeder(source, decode=slow_decode, batch_size=BATCH, engine=RayEngine(actors), limits=limits) as feeder:
        warm_up(feeder, actors)
        started = time.perf_counter()
        samples = sum(len(batch) for batch in feeder)
        return samples / (time.perf_counter() - started)


def warm_up(feeder: Feeder[Any], actors: int) -> None:
    """Run epochs until every actor has made a batch of one."""
    seen: set[str] = set()
    while len(seen) < actors:
        for _ in feeder:
            pass
        seen = {lane.partition(":")[0] for _, lane, *_ in feeder._session.stats.events if lane.startswith("actor")}


def seconds_per_batch(engine: Any, nbytes: int, batches: int) -> float:
    """The mean time of batches of a number of bytes that take no time to make, in the second of two epochs."""
    with Feeder(Instant(batches), decode=Fill(nbytes), batch_size=1, engine=engine) as feeder:
        for _ in range(2):
            started = time.perf_counter()
            for batch in feeder:
                del batch
        return (time.perf_counter() - started) / batches


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, default=60, help="per actor (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (%(default)s)")
    options = parser.parse_args()
    ray.init("local", num_cpus=max(options.actors, default=1), object_store_memory=500_000_000, include_dashboard=False)
    rates = {
        actors: statistics.median(rate(actors, options.batches) for _ in range(options.rounds))
        for actors in options.actors
    }
    for actors, found in rates.items():
        ideal = actors / DECODE_S
        per_actor = found / rates[options.actors[0]] * options.actors[0] / actors
        print(
            f"{actors} actors: {found:.0f} samples/s, {found / ideal:.2f} of the ideal, {per_actor:.2f} k", flush=True
        )
    for engine in ("process", RayEngine(1)):
        milliseconds = {
            nbytes: 1e3
            * statistics.median(seconds_per_batch(engine, nbytes, options.batches) for _ in range(options.rounds))
            for nbytes in SIZES
        }
        slope, constant = np.polyfit([nbytes / 1e6 for nbytes in SIZES], list(milliseconds.values()), 1)
        name = engine if isinstance(engine, str) else "ray"
        each = ", ".join(f"{nbytes >> 10} KiB {ms:.2f}" for nbytes, ms in milliseconds.items())
        print(f"{name}: {constant:.2f} ms per batch and {slope:.2f} ms per MB ({each} ms)", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
