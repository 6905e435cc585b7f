"""What do order and state cost per batch, and is there a pause between epochs?

Trivial samples: a Dataset whose items are one small array, shuffled, batches of 64, one thread, and ``state_dict``
after every batch; compared with ``DataLoader`` without workers, which has no state. Then epochs of 24 batches from a
source whose reads take 10 ms, inside ``epochs(n)``: the wait for the first batch of an epoch, and the median wait for
the others. The consumer works for 12 ms per batch, a little longer than the feeder takes for one.

Target: the wait between epochs is at most 1 ms longer than between batches, for a new iterator and no read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_most, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.overlap import WaitingSource
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TITLE = "Order, state, and the pause between epochs"

BATCH = 64
READ_S = 0.010
STEP_S = 0.012
EPOCH_BATCHES = 24
EPOCHS = 6


def run(settings: Settings) -> list[Figure]:
    options = {"samples": settings.size(64_000, 640)}
    feeder = Contender("aiofeed", aiofeed_trivial, options, ("torch", "aiofeed:Feeder"))
    loader = Contender("DataLoader", data_loader_trivial, options, ("torch.utils.data", "numpy"))
    several = {"epochs": settings.size(EPOCHS, 2)}
    ours = Contender("aiofeed, epochs", aiofeed_epochs, several, ("torch", "aiofeed:Feeder"))
    loader_epochs = Contender("DataLoader, epochs", data_loader_epochs, several, ("torch.utils.data", "numpy"))
    samples = interleave([feeder, loader, ours, loader_epochs], settings)
    cost = {label: column(samples[label], "batch_s", 1e6) for label in ("aiofeed", "DataLoader")}
    return [
        Figure("time per batch / DataLoader, no workers", per(cost["aiofeed"], cost["DataLoader"])),
        Figure("time per batch, order and state: aiofeed", cost["aiofeed"], "us"),
        Figure("time per batch: DataLoader, no workers", cost["DataLoader"], "us"),
        Figure("pause between epochs", column(samples[ours.label], "pause_s", 1e3), "ms", at_most(1.0)),
        Figure("wait between epochs", column(samples[ours.label], "epochs_s", 1e3), "ms"),
        Figure("wait between batches", column(samples[ours.label], "batches_s", 1e3), "ms"),
        Figure("wait between epochs: DataLoader", column(samples[loader_epochs.label], "epochs_s", 1e3), "ms"),
    ]


@contextmanager
def aiofeed_trivial(samples: int) -> Iterator[Measure]:
    import aiofeed

    with aiofeed.Feeder(Trivial(samples), batch_size=BATCH, shuffle=True) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            started = time.perf_counter()
            for _ in one_epoch():
                feeder.state_dict()
            return {"batch_s": (time.perf_counter() - started) / len(feeder)}

        epoch()
        yield epoch


@contextmanager
def data_loader_trivial(samples: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(Trivial(samples), BATCH, shuffle=True)  # type: ignore[arg-type,var-annotated]

    def epoch() -> Mapping[str, float]:
        started = time.perf_counter()
        for _ in loader:
            pass
        return {"batch_s": (time.perf_counter() - started) / len(loader)}

    epoch()
    yield epoch


@contextmanager
def aiofeed_epochs(epochs: int) -> Iterator[Measure]:
    import numpy as np

    import aiofeed

    sample = np.zeros(16, np.uint8)

    def decode(data: bytes) -> NDArray[np.uint8]:
        return sample

    source = WaitingSource(BATCH * EPOCH_BATCHES, READ_S)

    def measure() -> Mapping[str, float]:
        with aiofeed.Feeder(source, decode=decode, batch_size=BATCH, shuffle=True) as feeder:
            return waits(feeder.epochs(epochs), feeder)

    yield measure


@contextmanager
def data_loader_epochs(epochs: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    dataset = Trivial(BATCH * EPOCH_BATCHES, READ_S / BATCH)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def measure() -> Mapping[str, float]:
        return waits(iter(range(epochs)), loader)

    measure()
    yield measure


def waits(epochs: Iterator[int], loader: Any) -> Mapping[str, float]:
    """Medians of the waits for the first batches of epochs, without the very first, and for other batches."""
    first_waits: list[float] = []
    other_waits: list[float] = []
    ended = time.perf_counter()
    for epoch in epochs:
        first = True
        for _ in loader:
            wait = time.perf_counter() - ended
            if not first:
                other_waits.append(wait)
            elif epoch:
                first_waits.append(wait)
            first = False
            time.sleep(STEP_S)
            ended = time.perf_counter()
    epochs_s, batches_s = statistics.median(first_waits), statistics.median(other_waits)
    return {"epochs_s": epochs_s, "batches_s": batches_s, "pause_s": epochs_s - batches_s}


class Trivial:
    """A Dataset of one small array; each item takes ``item_s``."""

    def __init__(self, length: int, item_s: float = 0.0) -> None:
        import numpy as np

        self._length = length
        self._item_s = item_s
        self._sample = np.zeros(16, np.float32)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._item_s:
            time.sleep(self._item_s)
        return self._sample
