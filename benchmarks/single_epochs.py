"""Epochs that are measured separately: each starts with nothing prefetched, and prefetches nothing beyond its end.

From the second epoch in a row on, a feeder prefetches batches of the next epoch. Between two measurements it would do
that work unmeasured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import aiofeed

BatchT = TypeVar("BatchT")


def single_epochs(feeder: aiofeed.Feeder[BatchT]) -> Callable[[], Iterator[BatchT]]:
    """A function whose every call iterates the feeder's next epoch, declared as the last one."""
    started = 0

    def one_epoch() -> Iterator[BatchT]:
        nonlocal started
        started += 1
        for _ in feeder.epochs(started):
            yield from feeder

    return one_epoch
