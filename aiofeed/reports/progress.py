"""``feeder.progress``: a progress bar with the samples per second, the waiting share and the limit of an epoch."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from aiofeed.common.progress_bar import BAR_EVERY_S, new_bar, shows_progress
from aiofeed.kernel.core.formatting import format_error

BatchT = TypeVar("BatchT")

log: logging.Logger = logging.getLogger("aiofeed.reports")

# Drawing takes at most this share of the time, also in a slow notebook.
DRAWING_SHARE = 0.02
# The share of cached samples is that of at most this many, which takes 0.1 ms.
_CACHE_SAMPLE = 100_000


class ProgressFeed(Generic[BatchT]):
    """The batches of an epoch with a progress bar, for ``for`` or ``async for``; see ``Feeder.progress``.

    Args:
        session: The session of the feeder: it begins epochs and has their statistics.
        batches: Returns the number of batches per epoch.
        name: The title of the bar.
    """

    def __init__(self, session: Any, batches: Callable[[], int], name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"progress(name) must be a str, got {name!r}")
        self._session = session
        self._batches = batches
        self._name = name

    def __len__(self) -> int:
        """Return the number of batches per epoch, as of the feeder."""
        return self._batches()

    def __iter__(self) -> Iterator[BatchT]:
        """Start an epoch, with a bar."""
        session = self._session
        iterator: Any = session.begin()
        if session.rank or not shows_progress():
            return iterator  # type: ignore[no-any-return]
        epoch, before, first, last = session.running_epoch()
        try:
            batches: int | None = self._batches()
        except TypeError:  # a stream without a length
            batches = None
        if last is not None and batches is not None:
            before += max(epoch - first, 0) * batches
            batches *= last + 1 - first
        bar = session.bar
        if not isinstance(bar, EpochBar) or bar.name != self._name:
            session.close_bar()
            session.bar = bar = EpochBar(self._name, batches, before)
        shown = _ShownEpoch(iterator.observer, session, bar, before)
        iterator.observer = shown
        session.delivery.queue.runs = False  # the bar is told of each batch
        # The iterator is dropped by `break` and by an exception in the loop.
        weakref.finalize(iterator, shown.left)
        return iterator  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[BatchT]:
        """Start an epoch, with a bar."""
        shown: Any = iter(self)
        return shown  # type: ignore[no-any-return]


class _ShownEpoch:
    """Draws the bar of an epoch as its batches are returned; passes all events on to the feeder's own observer."""

    def __init__(self, observer: Any, session: Any, bar: EpochBar, before: int) -> None:
        self._observer = observer
        self._session = session
        self._stats = session.stats
        self._bar = bar
        self._before = before
        self._due = time.perf_counter() + BAR_EVERY_S
        epoch, _, _, self._last = session.running_epoch()
        self._epoch = "" if self._last is None else f"epoch {epoch + 1} of {self._last + 1}, "
        self._ends = self._last in (None, epoch)
        self._slots: Any = getattr(session.config.cache, "slots", None)
        self._cached = self._cached_share()
        self._done = False

    def returning(self, item: Any) -> None:
        self._observer.returning(item)
        if (started := time.perf_counter()) >= self._due:
            self._draw()
            ended = time.perf_counter()
            self._due = ended + max(BAR_EVERY_S, (ended - started) / DRAWING_SHARE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def returned(self, item: Any) -> None:
        self._observer.returned(item)

    def failed(self, item: Any) -> None:
        self._observer.failed(item)
        self.left()

    def ended(self) -> None:
        self._draw()
        if self._ends:
            self._session.close_bar()
        self._done = True
        self._observer.ended()

    def left(self) -> None:
        """Close the bar, unless the epoch has ended and the bar belongs to the next one."""
        if self._session.bar is self._bar and self._session.stats is self._stats and not self._done:
            self._draw()
            self._session.close_bar()

    def _draw(self) -> None:
        if self._session.stats is not self._stats:
            return
        statistics = self._session.statistics(total=False)
        wall_s = statistics.wall_s or float("inf")
        text = f"{self._epoch}{statistics.samples / wall_s:,.0f} samples/s, waiting {statistics.stall_s / wall_s:.0%}"
        if limit := self._session.explain(ranks=False).stage:
            text += f", limit: {limit}"
        cached = self._cached_share()
        if self._cached < cached < 1:
            text += f", cache filled {cached:.0%}"
        self._bar.draw(self._before + statistics.batches, text)

    def _cached_share(self) -> float:
        """Return the share of the samples that are in the cache of this process."""
        if self._slots is None or not len(self._slots):
            return 1.0
        some = self._slots[:: -(-len(self._slots) // _CACHE_SAMPLE)]
        return float(np.count_nonzero(some >= 0)) / len(some)


class EpochBar:
    """A bar of tqdm on standard error or in a notebook; without tqdm a plain line.

    If it cannot be drawn, it is closed with a log line.
    """

    def __init__(self, name: str, total: int | None, done: int) -> None:
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._of = "" if total is None else f"/{total}"
        times = "[{elapsed}<{remaining}{postfix}]" if total is not None else "[{elapsed}{postfix}]"
        share = "{desc}: {percentage:3.0f}%|{bar}| " if total is not None else "{desc}: "
        self._bar: Any = new_bar(name, total, initial=done, bar_format=f"{share}{{n_fmt}}/{{total_fmt}} {times}")

    def draw(self, done: int, text: str) -> None:
        """Show the number of batches and a text."""
        if not self._closed:
            self._try(lambda: self._draw(done, text))

    def _draw(self, done: int, text: str) -> None:
        if self._bar is None:
            print(f"\r{self.name}: {done}{self._of} [{text}]\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Draw the bar no more."""
        if not self._closed:
            self._closed = True
            self._try(self._bar.close if self._bar is not None else lambda: print(file=sys.stderr))

    def _try(self, function: Callable[[], object]) -> None:
        if self._pid != os.getpid():
            return  # the bar belongs to the parent of this process
        try:
            function()
        except Exception as error:  # noqa: BLE001 - a terminal that is closed or full must not end the training
            self._closed = True
            log.warning("the progress of %s is not shown any more: %s", self.name, format_error(error))
