"""Who is inside a ``Dataset``: never more threads than it bears, whichever pass or feeder they belong to.

A call cannot be interrupted: where a pass is left, its thread is inside until the call returns. Whoever comes then
waits, in the order of coming, in its decode thread. A call that is longer at a sample than its feeder's time limit is
given up, as within a pass: it counts no more, although its thread may be inside still.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from types import TracebackType

from aiofeed.core.errors import FeedError
from aiofeed.runtime.time_limits import AbandonedError, StopFlag
from aiofeed.sources.dataset import FromDataset

log = logging.getLogger("aiofeed.sources")

# A call that is waited for longer than this is named in the log.
TELL_S = 5.0
# Without a time limit nothing says how long a call may take: ``__getitems__`` gets a batch of slow samples in one.
STUCK_S = 300.0
# How soon whoever waits sees that nobody wants what it waits for.
LOOK_S = 0.1


class _Callers:
    """Those inside one Dataset, and those that wait."""

    __slots__ = ("changed", "inside", "waiting")

    def __init__(self) -> None:
        self.changed = threading.Condition(_lock)
        self.inside: list[Call] = []
        self.waiting: deque[Call] = deque()


_lock = threading.Lock()
# By the id of a Dataset, which nothing need be stored in, while somebody is inside or waits.
_callers: dict[int, _Callers] = {}


def _forget() -> None:
    """A fork's child has none of these threads."""
    global _lock
    _lock = threading.Lock()
    _callers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def refuse_within_itself(source: FromDataset) -> None:
    """Who is about to iterate a Dataset must not be inside it, where no other thread may be: it would wait for itself.

    Raises:
        FeedError: the calling thread is inside.
    """
    if not _callers or source.threads > 1:
        return
    with _lock:
        others = _callers.get(id(source.dataset))
        inside = others is not None and any(call._thread == threading.get_ident() for call in others.inside)
    if inside:
        name = type(source.dataset).__name__
        raise FeedError(
            f"{name} iterates a feeder over itself within __getitem__, which would wait for its own end: a Dataset is "
            f"called by one thread at a time. The ways out: iterate it before, or FromDataset(dataset, threads=2)"
        )


class Call:
    """A ``with`` block in which a thread may call a Dataset.

    Args:
        source: the Dataset, and how many threads it bears.
        index: of the sample that is asked for first.
        stop: ends a wait.
        limit_s: most seconds at one sample; ``None``: as long as it takes.

    Raises:
        AbandonedError: ``stop`` was set.
        FeedError: whoever is inside is stuck.
    """

    __slots__ = ("_given_up", "_limit_s", "_noted", "_others", "_since", "_source", "_stop", "_thread", "index")

    def __init__(self, source: FromDataset, index: int, *, stop: StopFlag, limit_s: float | None) -> None:
        self._source = source
        # The sample that is asked for. Where there is no limit, nothing but this is set: a look at the clock for each
        # sample is a tenth of what a fast Dataset costs.
        self.index = self._noted = index
        self._stop = stop
        self._thread = threading.get_ident()
        self._limit_s = limit_s
        self._given_up = False
        self._since = 0.0

    def __enter__(self) -> Call:
        with _lock:
            self._come()
            admitted = self._admit()
        if not admitted:
            self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _lock:
            if not self._given_up:
                self._others.inside.remove(self)
            self._leave()

    def at(self, index: int) -> None:
        """The sample at ``index`` is asked for from now on; a call that was given up waits for its turn again.

        Raises:
            AbandonedError, FeedError: as on entering.
        """
        with _lock:
            again = self._given_up
            if again:
                self._come()
            self.index = self._noted = index
            self._since = time.perf_counter()
        if again:
            self._wait()

    def _come(self) -> None:
        self._others = _callers.setdefault(id(self._source.dataset), _Callers())
        self._others.waiting.append(self)

    def _leave(self) -> None:
        others, name = self._others, id(self._source.dataset)
        if others.waiting:
            others.changed.notify_all()
        elif not others.inside and _callers.get(name) is others:
            del _callers[name]

    def _admit(self) -> bool:
        """Whether it is inside now; under the lock."""
        others = self._others
        if others.waiting[0] is not self or len(others.inside) >= self._source.threads:
            return False
        others.waiting.popleft()
        self._given_up, self._since = False, time.perf_counter()
        others.inside.append(self)
        if others.waiting:
            others.changed.notify_all()
        return True

    def _wait(self) -> None:
        began, told = time.perf_counter(), False
        try:
            while not self._look():
                if self._stop.stopped:
                    raise AbandonedError
                # Whoever is inside may leave meanwhile; then it is about to be this one's turn, or another waits.
                for other in self._others.inside[:1]:
                    now = time.perf_counter()
                    waited_s = now - max(began, other._asked_since(now))
                    if waited_s > STUCK_S:
                        raise FeedError(
                            f"{self._told(other, now)}; it seems to be stuck. The way out: a Dataset whose calls "
                            f"return, or FailurePolicy(read_timeout_s=...), after which such a call is given up"
                        )
                    if waited_s >= TELL_S and not told:
                        told = True
                        log.warning("%s, and is waited for", self._told(other, now))
        except BaseException:
            with _lock:
                self._others.waiting.remove(self)
                self._leave()
            raise

    def _look(self) -> bool:
        """Whether it is inside now, or is after another moment."""
        with _lock:
            over = self._give_up() if self._others.waiting[0] is self else []
            admitted = self._admit() or (not over and self._others.changed.wait(LOOK_S) and self._admit())
        for other in over:
            if other._stop is not self._stop:  # a sample of the same pass has failed by name
                now = time.perf_counter()
                log.warning("%s, over its limit of %g s, and is given up", self._told(other, now), other._limit_s)
        return admitted

    def _give_up(self) -> list[Call]:
        """Count no more those inside who are over their limit, where this one could not enter otherwise."""
        inside, now = self._others.inside, time.perf_counter()
        if len(inside) < self._source.threads:
            return []
        over = [other for other in inside if other._limit_s is not None and now - other._since > other._limit_s]
        for other in over:
            other._given_up = True
            inside.remove(other)
        return over

    def _asked_since(self, now: float) -> float:
        """From when on it is known to be at its sample; of one that does not say so, whoever waits notes it."""
        if self.index != self._noted:
            self._noted, self._since = self.index, now
        return self._since

    def _told(self, other: Call, now: float) -> str:
        threads = self._source.threads
        return (
            f"{other._source.key(other.index)!r} has been asked for since {now - other._asked_since(now):.1f} s by "
            f"another pass over a Dataset that bears {threads} thread{'s' if threads > 1 else ''} at a time"
        )
