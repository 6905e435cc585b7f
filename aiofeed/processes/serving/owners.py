"""Who a consumer's batches are for: iterators that may be dropped, and epochs that nobody begins."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiofeed.processes.serving.epoch_feed import Pass

log = logging.getLogger("aiofeed")

# Between two epochs there may be an evaluation; who takes longer hears of it, once.
IDLE_S = 10.0


class Owners:
    """The iterators that passes are for, which are noticed when they are dropped."""

    def __init__(self) -> None:
        self._dropped: deque[object] = deque()
        self._watched: dict[Any, Pass] = {}

    def watch(self, pass_: Pass, owner: object) -> None:
        """A pass is for ``owner``; from any thread."""
        # No Python code runs in the collector: the reference lands in a deque.
        self._watched[weakref.ref(owner, self._dropped.append)] = pass_

    def forget(self, pass_: Pass) -> None:
        """Nobody's drop matters to a pass any more."""
        for reference in [each for each, watched in list(self._watched.items()) if watched is pass_]:
            del self._watched[reference]

    def dropped(self) -> Iterator[Pass]:
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
