"""One epoch of a served feeder on its way to one iterator."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from aiofeed.core.statistics import EpochStats
from aiofeed.processes.serving.protocol import BatchAvailable, EpochEnded, EpochFailed, EpochStarted
from aiofeed.runtime.queue import BatchQueue, QueueItem

Word: TypeAlias = EpochStarted | BatchAvailable | EpochEnded | EpochFailed
"""What a server says of an epoch, in order."""


log = logging.getLogger("aiofeed.processes")
# Between two epochs there may be an evaluation; who takes longer hears of it, once.
IDLE_S = 10.0


class EpochFeed:
    """One epoch on its way to one iterator.

    Args:
        room: batches that may wait in memory of this process.

    Attributes:
        superseded: a newer iterator follows it, and takes over what it has not touched.
        touched: whether a batch was handed out.
        complete: whether the end of the epoch is in the handoff.
        handed_on: its batches are the next pass's.
        unread: slots that it has not read.
        words: what it was told while untouched.
        withheld: slots that it has read while untouched.
    """

    def __init__(self, room: int) -> None:
        self.queue: BatchQueue[QueueItem] = BatchQueue()
        self.counters = EpochStats()
        self.epoch = -1
        self.room = room
        self.superseded = self.touched = self.complete = self.handed_on = False
        self.words: list[Word] = []
        self.unread: set[int] = set()
        self.withheld: list[int] = []


class IteratorTracker:
    """The iterators that passes are for, which are noticed when they are dropped."""

    def __init__(self) -> None:
        self._dropped: deque[object] = deque()
        self._watched: dict[Any, EpochFeed] = {}

    def watch(self, pass_: EpochFeed, owner: object) -> None:
        """A pass is for ``owner``; from any thread."""
        # No Python code runs in the collector: the reference lands in a deque.
        self._watched[weakref.ref(owner, self._dropped.append)] = pass_

    def forget(self, pass_: EpochFeed) -> None:
        """Nobody's drop matters to a pass any more."""
        for reference in [each for each, watched in list(self._watched.items()) if watched is pass_]:
            del self._watched[reference]

    def dropped(self) -> Iterator[EpochFeed]:
        """The passes whose owners were dropped since the last time."""
        while self._dropped:
            gone = self._watched.pop(self._dropped.popleft(), None)
            if gone is not None:
                yield gone


class Idleness:
    """Says so where batches wait for an iterator that nobody begins, and other consumers behind them.

    Args:
        path: where the server is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: float | None = None

    def look(self, waiting: int) -> None:
        """Now and then, with the number of batches that wait for nobody."""
        now = time.monotonic()
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > IDLE_S:
            self._since = math.inf
            log.warning(
                "this process has ended an epoch of the server at %s and begun no other for %.0f s: %d batches wait "
                "for it, and other consumers behind them. Iterate what attach() gave, or close() it",
                self._path,
                IDLE_S,
                waiting,
            )
