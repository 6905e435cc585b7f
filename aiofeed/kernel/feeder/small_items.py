"""Decides while a ``Dataset`` is iterated which thread makes its batches. Feeders of other sources do not load it."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.feeder.pipeline import InlineBatches
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.kernel.sampling.epochs import EpochStream

# The first batches with threads, or in the consumer's thread, load modules and fill caches.
WARM_BATCHES = 16
# Fewer batches say nothing. Each look is at twice as many as the one before, up to MOST_BATCHES.
LEAST_BATCHES, MOST_BATCHES = 32, 512
# Looks in a row in which the consumer's thread was slower, until threads come back.
SLOWER_LOOKS = 2
# The consumer's thread, which may have an event loop, is not blocked for longer.
SMALL_S = 0.005
# The consumer's thread goes on with batches that would be faster with threads by less than this.
ABOUT_AS_FAST = 1.1


class SmallItems(InlineBatches):
    """Decides while a ``Dataset`` is iterated whether the consumer's thread makes the further batches.

    Threads make the first ones. The consumer's thread goes on when a step and a batch, one after the other, take less
    time than the step alone or than threads are on the processor for a batch. Then its own steps and batches are
    measured: if that is not so in two looks in a row, threads come back for good. Programs that take the processor do
    not change that: they lengthen some steps, and not the typical one.

    Attributes:
        in_consumer_thread: Whether the consumer's thread makes the further batches.
        batch_s: Seconds that a batch took with threads.
    """

    def __init__(self) -> None:
        self.in_consumer_thread: bool = False
        self.batch_s: float = 0.0
        # Seconds for which threads were on the processor for each batch.
        self._threads_s = 0.0
        self._slower = 0
        self._begin(WARM_BATCHES)

    def _begin(self, batches: float) -> None:
        """Measure after so many batches."""
        self._left, self._look = batches, LEAST_BATCHES
        # When measuring began, the processor time of the threads then, and the totals of the epoch then.
        self._since: float | None = None
        self._cpu_s = 0.0
        self._stats = self._before = EpochStats()

    def ready(self, stream: EpochStream) -> bool:
        """Return whether the consumer's thread makes the further batches."""
        return self.in_consumer_thread

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return True for threads: their stream can be cut in the next epoch, too."""
        return streams is not False or self.in_consumer_thread

    def new_pipeline(self, config: Any, running: Any) -> Any:
        """Return a pipeline that calls the ``Dataset`` in the consumer's thread, and measure it."""
        self._begin(WARM_BATCHES)
        return load_addon("dataset_pipeline", _SMALL)(config, self.batch_s)

    def changes(self, item: ReadyBatch, stats: EpochStats, pipeline: Any) -> bool:
        """Learn from a batch that is returned; return whether another pipeline is to make the rest of the epoch."""
        self._left -= 1 + item.followers
        if self._left > 0:
            return False
        if stats is not self._stats:  # of the next epoch
            self._stats, self._before = stats, EpochStats()
        cpu_s = pipeline.cpu_s
        if self._since is not None and cpu_s >= self._cpu_s:
            found = _typical_s(stats, self._before, self._since, streams=pipeline.streams)
            if found is None:
                self._left = LEAST_BATCHES
                return False
            if self._decide(*found, cpu_s - self._cpu_s, streams=pipeline.streams):
                self._begin(inf)
                return True
            self._look = min(2 * self._look, MOST_BATCHES)
        self._since, self._cpu_s, self._before, self._left = time.perf_counter(), cpu_s, replace(stats), self._look
        return False

    def _decide(self, step_s: float, batch_s: float, made: int, cpu_s: float, *, streams: bool) -> bool:
        """Decide by a typical step and batch, and the batches that were made; return whether that is a change."""
        if streams:
            self.batch_s = batch_s
            self._threads_s = cpu_s / made or step_s + batch_s  # unknown on some systems
        most_s = max(step_s, self._threads_s) * (1.0 if streams else ABOUT_AS_FAST)
        faster = batch_s < SMALL_S and step_s + batch_s < most_s
        self._slower = 0 if faster else self._slower + 1
        change = faster and _is_installed() if streams else self._slower == SLOWER_LOOKS
        self.in_consumer_thread ^= change
        makes = "The training thread makes" if self.in_consumer_thread else "Threads make"
        self.reason: str = (
            f"{makes} the batches from now on: a step takes {step_s * 1e6:.0f} us, a batch {batch_s * 1e6:.0f} us, and "
            f"with threads a batch takes {self._threads_s * 1e6:.0f} us of processor time."
        )
        return change


_SMALL = "a Dataset of small items"


def _typical_s(
    stats: EpochStats, before: EpochStats, since: float, *, streams: bool
) -> tuple[float, float, int] | None:
    """Return the seconds of a step and of a batch, by the median, and the batches made; ``None`` if they are too few.

    Without events by the mean of the epoch, less the totals ``before``.
    """
    made = ("decode", "collate") if streams else ("wait",)
    found: dict[str, list[float]] = {kind: [] for kind in ("step", *made)}
    for kind, _, began, ended, *_ in takewhile(lambda event: event[3] >= since, reversed(list(stats.events))):
        if kind in found and began >= since:
            found[kind].append(ended - began)
    steps = len(found["step"])
    if not steps and (steps := stats.batches - before.batches) >= LEAST_BATCHES:
        wall_s, stall_s = stats.wall_s - before.wall_s, stats.stall_s - before.stall_s
        decode_s = stats.decode_s + stats.collate_s - before.decode_s - before.collate_s
        return (wall_s - stall_s) / steps, (decode_s if streams else stall_s) / steps, steps
    # Threads may have made fewer batches than were returned. The consumer waits once for the batches of a window.
    batches = len(found["collate"]) if streams else steps
    if min(steps, batches) < LEAST_BATCHES // 2:
        return None
    step_s, *parts = (sorted(each)[len(each) // 2] * len(each) if each else 0.0 for each in found.values())
    return step_s / steps, sum(parts) / batches, batches


def _is_installed() -> bool:
    """Return whether the consumer's thread can make batches; threads can do it, too."""
    try:
        load_addon("dataset_pipeline", _SMALL)
    except ImportError:
        return False
    return True
