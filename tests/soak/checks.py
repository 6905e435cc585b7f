"""What may be left behind by an episode: nothing. All that is looked at is looked at here."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.soak.configurations import Rig, ViolationError

GONE_S = 10.0
"""How long threads may take to end; they take milliseconds, and a busy machine takes what it wants."""

HANG_S = 60.0
"""An episode that takes this long hangs; they take a tenth of a second."""

RSS_SLACK = 24 << 20
"""What malloc may keep, in bytes, between the first third of the episodes and the last."""


def feed_threads() -> list[threading.Thread]:
    """The threads of aiofeed that run now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]


def descriptors() -> int:
    """How many files are open, but for the pipe of multiprocessing's resource tracker, which stays for good."""
    tracker = resource_tracker._resource_tracker._fd is not None  # type: ignore[attr-defined]
    return len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd")) - tracker


def pending_tasks() -> list[asyncio.Task[Any]]:
    """Tasks of any loop that have not come to their end. Looks at every object there is."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task) and not thing.done()]


def wait_for_threads(limit_s: float = GONE_S) -> None:
    """Wait until no thread of aiofeed runs."""
    deadline = time.monotonic() + limit_s
    while (left := feed_threads()) and time.monotonic() < deadline:
        gc.collect()
        left[0].join(0.2)
    if left := feed_threads():
        raise ViolationError(f"threads still run: {sorted(thread.name for thread in left)}", "left behind")


class Watch(logging.Handler):
    """Everything that is said where nobody listens: log lines, unraisable errors, errors of threads.

    Args:
        allowed: what log lines may contain.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []
        self.allowed: tuple[str, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"{record.name}: {self.format(record)}")

    def __enter__(self) -> Watch:
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = lambda what: self.heard.append(f"unraisable: {what.exc_value!r} in {what.object!r}")
        threading.excepthook = lambda what: self.heard.append(f"in thread {what.thread}: {what.exc_value!r}")
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        logging.getLogger().removeHandler(self)
        sys.unraisablehook, threading.excepthook = self._hooks

    def unexpected(self) -> list[str]:
        """What was heard since the last time and is not allowed."""
        heard, self.heard = self.heard, []
        return [line for line in heard if not any(part in line for part in self.allowed)]


class Checks:
    """Looks for what an episode left behind."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        # Collections are to look at what episodes make, not at all of torch.
        gc.collect()
        gc.freeze()
        self.descriptors = descriptors()
        self.tasks = len(pending_tasks())
        self.resident: list[int] = []
        self._process = psutil.Process()

    def after(self, rigs: list[Rig], number: int) -> None:
        """Raise `ViolationError` where something is left once the episode's feeders were dropped."""
        devices = [rig.device for rig in rigs if rig.device is not None]
        sources = [rig.source for rig in rigs if hasattr(rig.source, "opened")]
        for rig in rigs:
            rig.feeder.close()
            del rig.feeder
        rigs.clear()
        wait_for_threads()
        for source in sources:
            if source.opened != source.closed:
                raise ViolationError(f"opened {source.opened} times, closed {source.closed}", "left behind")
        if descriptors() > self.descriptors or devices:
            gc.collect()
        if (now := descriptors()) > self.descriptors:
            raise ViolationError(f"{self.descriptors} descriptors before, {now} after", "left behind")
        for device in devices:
            device.synchronize()
            if device.pinned_bytes or device.allocated_bytes:
                what = f"{device.pinned_bytes} bytes pinned and {device.allocated_bytes} on the device"
                raise ViolationError(what, "left behind")
        if number % 50 == 49:
            gc.collect()
            if len(left := pending_tasks()) > self.tasks:
                raise ViolationError(f"tasks pend: {left}", "left behind")
        if heard := self.watch.unexpected():
            raise ViolationError("heard: " + "; ".join(heard), "left behind")
        self.resident.append(self._process.memory_info().rss)

    def abandon(self, rigs: list[Rig]) -> None:
        """Clear up after an episode that failed, whose traceback keeps alive what it made."""
        for rig in rigs:
            if hasattr(rig, "feeder"):
                rig.feeder.close()
        self.watch.unexpected()

    def growth(self) -> tuple[float, float]:
        """Median resident bytes in the first third of the episodes, warming up left out, and in the last."""
        measured = self.resident[len(self.resident) // 10 :]
        third = max(len(measured) // 3, 1)
        return statistics.median(measured[:third]), statistics.median(measured[-third:])

    def check_growth(self) -> None:
        """Raise `ViolationError` where resident memory grew."""
        first, last = self.growth()
        if last > first + RSS_SLACK:
            raise ViolationError(f"resident memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB", "left behind")


@contextmanager
def watchdog(replay: str, *, fatal: bool) -> Iterator[None]:
    """Turn a hang into a failure: the way to replay it and every thread's stack, then, where `fatal`, the end.

    The second watchdog needs no GIL.
    """
    over = threading.Event()

    def watch() -> None:
        if not over.wait(HANG_S):
            print(f"\nhangs for {HANG_S:.0f} s: {replay}", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            if fatal:
                os._exit(3)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    if fatal:
        faulthandler.dump_traceback_later(HANG_S + 10, exit=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if fatal:
            faulthandler.cancel_dump_traceback_later()
        thread.join()
