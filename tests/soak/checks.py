"""Checks after each episode: no thread, descriptor, task, memory, open source or unexpected message is left."""

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

from aiofeed.kernel.devices.pinned import release_unused
from tests.soak.configurations import Rig, ViolationError
from tests.support.simulated_device import SimulatedDevice

THREAD_EXIT_S = 10.0
"""Time limit for the end of threads. They need milliseconds; a busy machine needs more."""

HANG_S = 60.0
"""An episode that takes this long hangs. A usual one takes 0.1 s."""

RSS_SLACK = 24 << 20
"""Growth of the resident memory, in bytes, allowed for malloc between the first and last third of the episodes."""


def feed_threads() -> list[threading.Thread]:
    """Return aiofeed's running threads that end with a feeder; the thread of a dataset ends with that."""
    running = [thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]
    return [thread for thread in running if thread.name != "aiofeed-decode-dataset"]


def descriptors() -> int:
    """Count the open descriptors, without the permanent pipe of multiprocessing's resource tracker."""
    tracker = resource_tracker._resource_tracker._fd is not None  # type: ignore[attr-defined]
    return len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd")) - tracker


def opened_files() -> list[str]:
    """Return what the descriptors of this process are, where the system says it; one may be closed meanwhile."""
    folder = Path("/proc/self/fd")
    return sorted(os.readlink(each) for each in folder.iterdir() if each.is_symlink()) if folder.is_dir() else []


def pending_tasks() -> list[asyncio.Task[Any]]:
    """Return the unfinished tasks of all loops. Goes through all objects of the garbage collector."""
    return [item for item in gc.get_objects() if issubclass(type(item), asyncio.Task) and not item.done()]


def wait_for_threads(limit_s: float = THREAD_EXIT_S) -> None:
    """Wait until no thread of aiofeed runs."""
    deadline = time.monotonic() + limit_s
    while (running := feed_threads()) and time.monotonic() < deadline:
        gc.collect()
        running[0].join(0.2)
    if running := feed_threads():
        raise ViolationError(f"threads still run: {sorted(thread.name for thread in running)}", "leaked")


def check_released(device: SimulatedDevice) -> None:
    """Check that no memory of a device is in use."""
    device.synchronize()
    release_unused()
    if device.pinned_bytes or device.allocated_bytes:
        leak = f"{device.pinned_bytes} bytes pinned and {device.allocated_bytes} on the device"
        raise ViolationError(leak, "leaked")


class ProblemLog(logging.Handler):
    """Collects warnings in the log, unraisable errors and uncaught errors of threads.

    Args:
        allowed: messages that contain one of these are expected.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.allowed: tuple[str, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.name}: {self.format(record)}")

    def __enter__(self) -> ProblemLog:
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = lambda args: self.messages.append(f"unraisable: {args.exc_value!r} in {args.object!r}")
        threading.excepthook = lambda args: self.messages.append(f"in thread {args.thread}: {args.exc_value!r}")
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        logging.getLogger().removeHandler(self)
        sys.unraisablehook, threading.excepthook = self._hooks

    def unexpected(self) -> list[str]:
        """Return the messages since the last call that are not allowed."""
        messages, self.messages = self.messages, []
        # Random limits are above what a random Dataset allows.
        allowed = (*self.allowed, "Limits(decode_threads=")
        return [line for line in messages if not any(part in line for part in allowed)]


class Checks:
    """Finds leaks after an episode."""

    def __init__(self, problems: ProblemLog) -> None:
        self.problems = problems
        # Collections go through the objects of the episodes, not through all of torch.
        gc.collect()
        gc.freeze()
        self.descriptors = descriptors()
        self.tasks = len(pending_tasks())
        self.resident: list[int] = []
        self._process = psutil.Process()

    def after(self, rigs: list[Rig], number: int) -> None:
        """Drop the episode's feeders; raise `ViolationError` if they leaked something."""
        devices = [rig.device for rig in rigs if rig.device is not None]
        sources = [rig.source for rig in rigs if hasattr(rig.source, "opened")]
        for rig in rigs:
            rig.feeder.close()
            del rig.feeder
        rigs.clear()
        wait_for_threads()
        for source in sources:
            if source.opened != source.closed:
                raise ViolationError(f"source opened {source.opened} times, closed {source.closed}", "leaked")
        if descriptors() > self.descriptors or devices:
            gc.collect()
        if (now := descriptors()) > self.descriptors:
            raise ViolationError(f"{self.descriptors} descriptors before, {now} after: {opened_files()}", "leaked")
        for device in devices:
            check_released(device)
        if number % 50 == 49:
            gc.collect()
            if len(tasks := pending_tasks()) > self.tasks:
                raise ViolationError(f"unfinished tasks: {tasks}", "leaked")
        if messages := self.problems.unexpected():
            raise ViolationError("unexpected messages: " + "; ".join(messages), "leaked")
        self.resident.append(self._process.memory_info().rss)

    def abandon(self, rigs: list[Rig]) -> None:
        """Close the feeders of a failed episode. Its traceback keeps them alive."""
        for rig in rigs:
            if hasattr(rig, "feeder"):
                rig.feeder.close()
        self.problems.unexpected()

    def growth(self) -> tuple[float, float]:
        """Return the median resident bytes of the first and the last third of the episodes, without the first tenth."""
        measured = self.resident[len(self.resident) // 10 :]
        third = max(len(measured) // 3, 1)
        return statistics.median(measured[:third]), statistics.median(measured[-third:])

    def check_growth(self) -> None:
        """Raise `ViolationError` if resident memory grew."""
        first, last = self.growth()
        if last > first + RSS_SLACK:
            raise ViolationError(f"resident memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB", "leaked")


@contextmanager
def watchdog(replay: str, *, fatal: bool) -> Iterator[None]:
    """On a hang, print the replay command and all threads' stacks; if `fatal`, end the process.

    faulthandler's timer also works while a thread holds the GIL.
    """
    ended = threading.Event()

    def wait() -> None:
        if not ended.wait(HANG_S):
            print(f"\nhangs for {HANG_S:.0f} s: {replay}", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            if fatal:
                os._exit(3)

    thread = threading.Thread(target=wait, name="watchdog", daemon=True)
    if fatal:
        faulthandler.dump_traceback_later(HANG_S + 10, exit=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        if fatal:
            faulthandler.cancel_dump_traceback_later()
        thread.join()
