"""Are as many reads of slow storage in flight as allowed?

A source whose reads take 20 ms, 128 in flight, batch 64, a trivial decoder: the ideal is 6,400 reads/s, and 25,600 with
512 in flight. Compared with ``DataLoader`` with two workers, each of which waits for one read after the other.

Targets: at least 0.98 of in-flight / latency with 128, 0.93 with 512; at most 18 us of CPU time per read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, at_least, at_most, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.overlap import WaitingSource
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TITLE = "Reads of 20 ms, 128 and 512 in flight, batch 64"

READ_S = 0.020
IN_FLIGHT = 128
MORE_IN_FLIGHT = 512
BATCH = 64


def run(settings: Settings) -> list[Figure]:
    reads = settings.size(19_200, 256)
    imports = ("torch", "aiofeed:Feeder")
    feeder = Contender("aiofeed", aiofeed_feeder, {"reads": reads, "in_flight": IN_FLIGHT}, imports)
    more = Contender(
        "aiofeed, 512", aiofeed_feeder, {"reads": settings.size(4, 1) * reads, "in_flight": MORE_IN_FLIGHT}, imports
    )
    loader_options = {"reads": settings.size(2 * BATCH, 4), "batch": settings.size(BATCH, 2)}
    loader = Contender("DataLoader, 2 workers", data_loader, loader_options, ("torch.utils.data",))
    samples = interleave([feeder, more, loader], settings)
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
    ideal, more_ideal = IN_FLIGHT / READ_S, MORE_IN_FLIGHT / READ_S
    return [
        Figure("reads/s / ideal", tuple(value / ideal for value in rate["aiofeed"]), target=at_least(0.98)),
        Figure("reads/s / ideal, 512", tuple(value / more_ideal for value in rate[more.label]), target=at_least(0.93)),
        Figure("CPU per read", cpu["aiofeed"], "us", at_most(18)),
        Figure("reads/s / DataLoader, 2 workers", per(rate["aiofeed"], rate["DataLoader, 2 workers"])),
        *[Figure(f"reads: {label}", values, "/s") for label, values in rate.items()],
        *[Figure(f"CPU per read: {label}", values, "us") for label, values in cpu.items() if label != "aiofeed"],
    ]


def decode(data: bytes | bytearray) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(data, np.uint8)


@contextmanager
def aiofeed_feeder(reads: int, in_flight: int = IN_FLIGHT) -> Iterator[Measure]:
    import aiofeed

    limits = aiofeed.Limits(read_concurrency=in_flight)
    source = WaitingSource(reads, READ_S)
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(map(len, one_epoch()))}

        epoch()
        yield epoch


@contextmanager
def data_loader(reads: int, batch: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(SlowReads(reads), batch, num_workers=2, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def epoch() -> Mapping[str, float]:
        return {"items": sum(map(len, loader))}

    epoch()
    yield epoch


class SlowReads:
    """The same reads, one after the other."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        time.sleep(READ_S)
        return decode(bytearray(b"sample"))
