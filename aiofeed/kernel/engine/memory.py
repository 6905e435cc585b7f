"""Data in memory, of which the consumer's thread makes batches: no threads read and decode them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.sampling.epochs import EpochStream

# An epoch with fewer batches says nothing.
LEAST_BATCHES = 32
# The consumer's thread, which may have an event loop, is not blocked for longer.
SMALL_S = 0.005
# So much longer may the steps and the batches take one after the other, because nothing is handed over: 0.3 ms.
APART = 1.1


class Memory(ABC):
    """Decides for each epoch whether its batches are made of data in memory, and makes the pipeline for that.

    The store of a cache makes one in its method ``new_memory(config)``, which returns ``None`` if epochs have to be
    streamed. A source in memory, see ``Traits``, has a ``DataMemory``.
    """

    @abstractmethod
    def ready(self, stream: EpochStream) -> bool:
        """Return whether all samples of the first epoch of a stream are in memory."""

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether the pipeline of an epoch can go on with the next one, and no other kind of pipeline is faster.

        Args:
            streams: Whether threads stream the batches of the epoch; ``None``: it is yet to begin.
        """
        return True

    @abstractmethod
    def new_pipeline(self, config: Any, running: Any) -> Any:
        """Return a pipeline, a ``BatchPipeline``. It shares the data of the ``running`` one if possible."""

    def ended(self, stats: EpochStats) -> None:  # noqa: B027 - most have nothing to learn
        """Learn from the statistics of an epoch that has ended."""


class SmallItems(Memory):
    """Decides after each epoch of a ``Dataset`` whether the consumer's thread makes the batches of the next one.

    It does so after two epochs in which steps were so short that threads could do hardly anything meanwhile, and goes
    on as long as its epochs are faster than the last one with threads.

    Attributes:
        in_consumer_thread: Whether the consumer's thread makes the batches of the next epoch.
        short: Whether steps were that short in the last epoch with threads: the next one decides, and threads then do
            not begin the one after it.
        batch_s: Seconds that a batch took in the last epoch with threads.
    """

    def __init__(self) -> None:
        self.in_consumer_thread: bool = False
        self.batch_s: float = 0.0
        self._wall_s = math.inf
        self._slower = False
        self.short: bool = False

    def ready(self, stream: EpochStream) -> bool:
        """Return whether the consumer's thread makes the batches of the next epoch."""
        return self.in_consumer_thread

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether it is decided who makes the batches of the epoch after the next."""
        if streams is None:
            return not self.short or self.in_consumer_thread
        return self.in_consumer_thread is not streams

    def new_pipeline(self, config: Any, running: Any) -> Any:
        """Return a pipeline that calls the ``Dataset`` in the consumer's thread."""
        return load_addon("dataset_pipeline", _SMALL)(config, self.batch_s)

    def ended(self, stats: EpochStats) -> None:
        """Decide by an epoch that has ended."""
        if stats.batches < LEAST_BATCHES:
            return
        wall_s = stats.wall_s / stats.batches
        if self.in_consumer_thread:
            self.in_consumer_thread = wall_s < self._wall_s
            self._slower = not self.in_consumer_thread
            return
        before, step_s = self.short, wall_s - stats.stall_s / stats.batches
        self._wall_s, self.batch_s = wall_s, (stats.decode_s + stats.collate_s) / stats.batches
        self.short = not self._slower and self.batch_s < SMALL_S and step_s + self.batch_s < APART * wall_s
        self.in_consumer_thread = before and self.short and _is_installed()


_SMALL = "a Dataset of small items"


def _is_installed() -> bool:
    """Return whether the consumer's thread can make batches; threads can do it, too."""
    try:
        load_addon("dataset_pipeline", _SMALL)
    except ImportError:
        return False
    return True
