"""One sample in ten takes ten times as long: do slow samples hold up batches?

Decoding takes 10 ms, or 100 ms for one sample in ten, in two threads (``time.sleep`` in the place of native code, which
releases the GIL, too). Reads take 20 ms or 200 ms, 64 in flight, with a trivial decoder. The bound is the throughput
of the mean cost: 2 threads / 19 ms and 64 reads / 38 ms. ``DataLoader`` has two workers and ``in_order=False``.

Batches of 32, and slow decodes also in batches of 2, as large samples need it. The look-ahead is the default, or a
batch (``prefetch_batches=1``). In order, large batches and a long look-ahead average the costs of samples and so hide
slow decodes, but not slow reads. The end of an epoch counts, when nothing is left to start beside the slow samples.

Targets for ``in_order="samples"``: at least 0.95 of the bound; at least 1.5 times ``in_order=True`` for slow reads, and
for slow decodes with the short look-ahead.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_least, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    from collections.abc import Sequence

TITLE = "One sample in ten takes ten times as long, 2 threads"

THREADS = 2
READS = 64
DECODE_S = 0.010
READ_S = 0.020
BOUND = {"decode": THREADS / (1.9 * DECODE_S), "read": READS / (1.9 * READ_S)}
ORDERS = {'"samples"': "samples", "False": False, "True": True}


def run(settings: Settings) -> list[Figure]:
    figures = []
    for load, batch, prefetch in (("decode", 32, 2), ("decode", 2, 2), ("decode", 2, 1), ("read", 32, 2)):
        samples = settings.size({"decode": 320, "read": 9_600}[load], 2 * batch)
        options = {"load": load, "batch": batch}
        contenders = []
        for label, in_order in ORDERS.items():
            # Slower contenders get fewer samples.
            count = samples if load == "decode" or in_order == "samples" else settings.size(960, 2 * batch)
            more = {"prefetch": prefetch, "in_order": in_order, "samples": count}
            contenders.append(Contender(label, aiofeed_feeder, options | more, ("aiofeed:Feeder",)))
        count = samples if load == "decode" else 2 * batch
        contenders.append(Contender("DataLoader", data_loader, options | {"samples": count}, ("torch.utils.data",)))
        rate = {label: rates(rounds) for label, rounds in interleave(contenders, settings).items()}
        setting = f"slow {load}s, batch {batch}" + (", 1 ahead" if prefetch == 1 else "")
        ours = rate['"samples"']
        held_up = load == "read" or prefetch == 1
        figures += [
            Figure(f'{setting}: "samples" / bound', _shares(ours, load), target=at_least(0.95)),
            Figure(f'{setting}: "samples" / True', per(ours, rate["True"]), target=at_least(1.5) if held_up else None),
            *[Figure(f"{setting}: {label} / bound", _shares(rate[label], load)) for label in ("False", "True")],
            Figure(f"{setting}: DataLoader, in_order=False / bound", _shares(rate["DataLoader"], load)),
        ]
    return figures


def _shares(rate: Sequence[float], load: str) -> tuple[float, ...]:
    return tuple(value / BOUND[load] for value in rate)


class Uneven:
    """A source and a decoder, or a ``Dataset``, of samples with these costs."""

    def __init__(self, samples: int, load: str) -> None:
        slow = set(random.Random(0).sample(range(samples), samples // 10))
        unit = {"decode": DECODE_S, "read": READ_S}[load]
        self._costs = [10 * unit if index in slow else unit for index in range(samples)]
        self._load = load

    def __len__(self) -> int:
        return len(self._costs)

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> int:
        if self._load == "read":
            await asyncio.sleep(self._costs[index])
        return index

    def decode(self, index: int) -> int:
        if self._load == "decode":
            time.sleep(self._costs[index])
        return index


class UnevenItems(Uneven):
    """The same costs as items."""

    def __getitem__(self, index: int) -> int:
        time.sleep(self._costs[index])
        return index


@contextmanager
def aiofeed_feeder(load: str, batch: int, samples: int, prefetch: int, in_order: Any) -> Iterator[Measure]:
    import aiofeed

    source = Uneven(samples, load)
    limits = aiofeed.Limits(decode_threads=THREADS, read_concurrency=READS, prefetch_batches=prefetch)
    with aiofeed.Feeder(source, decode=source.decode, batch_size=batch, in_order=in_order, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(map(len, one_epoch()))}

        epoch()
        yield epoch


@contextmanager
def data_loader(load: str, batch: int, samples: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        UnevenItems(samples, load),  # type: ignore[arg-type]
        batch,
        num_workers=2,
        persistent_workers=True,
        in_order=False,
    )

    def epoch() -> Mapping[str, float]:
        return {"items": sum(map(len, loader))}

    epoch()
    yield epoch
