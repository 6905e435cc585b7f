"""What many contenders are made of: epochs of a feeder, of a ``DataLoader`` or of a loop; sources that cost nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.worker import Measure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    import aiofeed

BatchT = TypeVar("BatchT")


def single_epochs(feeder: aiofeed.Feeder[BatchT]) -> Callable[[], Iterator[BatchT]]:
    """A function whose every call iterates the feeder's next epoch, declared as the last one.

    So each starts with nothing prefetched, and prefetches nothing beyond its end. From the second epoch in a row on, a
    feeder prefetches batches of the next epoch: between two measurements it would do that work unmeasured.
    """
    started = 0

    def one_epoch() -> Iterator[BatchT]:
        nonlocal started
        started += 1
        for _ in feeder.epochs(started):
            yield from feeder

    return one_epoch


@contextmanager
def epochs(
    batches: Callable[[], Iterable[Any]], samples_in: Callable[[Any], int] = len, warm: int = 1, least_s: float = 0.0
) -> Iterator[Measure]:
    """Measures epochs for ``least_s``, at least one, after ``warm`` ones; ``samples_in(batch)`` counts samples."""

    def measure() -> Mapping[str, float]:
        items, until = 0, time.perf_counter() + least_s
        while not items or time.perf_counter() < until:
            items += sum(map(samples_in, batches()))
        return {"items": items}

    for _ in range(warm):
        sum(map(samples_in, batches()))
    yield measure


@contextmanager
def fed(
    feeder: aiofeed.Feeder[Any], samples_in: Callable[[Any], int] = len, warm: int = 1, least_s: float = 0.0
) -> Iterator[Measure]:
    """Measures single epochs of a feeder."""
    with feeder, epochs(single_epochs(feeder), samples_in, warm, least_s) as measure:
        yield measure


def loaded(
    dataset: Any,
    batch_size: int,
    workers: int = 0,
    samples_in: Callable[[Any], int] = len,
    least_s: float = 0.0,
    **options: Any,
) -> AbstractContextManager[Measure]:
    """Measures epochs of a ``DataLoader`` with persistent workers."""
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, batch_size, num_workers=workers, persistent_workers=workers > 0, **options)
    return epochs(lambda: loader, samples_in, least_s=least_s)


def labelled(batch: Any) -> int:
    """The number of samples of a batch whose second part are labels."""
    return len(batch[1])


def as_array(data: bytes | bytearray) -> NDArray[np.uint8]:
    """A decoder with hardly any work."""
    import numpy as np

    return np.frombuffer(data, np.uint8)


class Counted:
    """The base of a dataset of so many samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


class Numbered(Counted):
    """The base of a source whose keys are numbers."""

    def key(self, index: int) -> str:
        return str(index)


class WaitingSource(Numbered):
    """A source whose reads wait for ``wait_s``, all samples of a batch at the same time."""

    def __init__(self, length: int, wait_s: float) -> None:
        super().__init__(length)
        self._wait_s = wait_s

    async def read(self, index: int) -> bytes:
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        return b"sample"
