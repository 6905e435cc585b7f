"""Bars of tqdm for what takes long, or log lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from aiofeed.kernel.sampling.feed_order import find_shard

log: logging.Logger = logging.getLogger("aiofeed.sources")

LOG_EVERY_S = 5.0
# A bar appears after this time, and is drawn at most this often. A drawing takes some 0.1 ms.
BAR_AFTER_S = 0.5
BAR_EVERY_S = 0.1


def shows_progress() -> bool:
    """Whether this process shows bars: it has rank 0, and its standard error is a terminal or it is a notebook."""
    try:
        if find_shard()[0]:
            return False
    except ValueError:  # a wrong RANK, which a feeder reports if it needs it
        pass
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and "IPKernelApp" in shell.config:
        return True
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def new_bar(name: str, total: int | None, **options: Any) -> Any:
    """Return a bar of tqdm that draws in each ``update``; ``None`` if tqdm is not installed."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    # Ctrl-C within a drawing leaves the lock acquired, so that bars of other threads must have another one. The thread
    # that monitors bars would outlive them.
    new: Any = type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock()})
    return new(desc=name, total=total, mininterval=0, miniters=0, dynamic_ncols=True, **options)


class LoadProgress:
    """Shows how far a long listing or indexing is: in a bar if ``shows_progress``, otherwise in log lines.

    Args:
        name: The name of the bar.
        unit: What is counted.
        total: The count at the end; ``None`` if it is unknown.
        message: Makes the log line from the count.
    """

    def __init__(self, name: str, unit: str, total: int | None, message: Callable[[int], str]) -> None:
        self._bar: Any = None
        self._new_bar: Callable[[], Any] = lambda: new_bar(name, total, unit=f" {unit}", leave=False)
        self._message = message
        self._count = 0
        self._shown = shows_progress()
        self._due = time.monotonic() + (BAR_AFTER_S if self._shown else LOG_EVERY_S)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """Count; draw the bar or log a line if it is time."""
        self._count += count
        if time.monotonic() <= self._due:
            return
        if self._shown and self._bar is None:
            self._bar = self._new_bar()
            self._shown = self._bar is not None
        self._due = time.monotonic() + (BAR_EVERY_S if self._shown else LOG_EVERY_S)
        if self._shown:
            self._bar.update(self._count - self._bar.n)
        else:
            log.warning("%s", self._message(self._count))
