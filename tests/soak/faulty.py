"""Episodes with faults: the `for` line raises the right error; then a complete epoch follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiofeed.errors import DecodeError, DeviceCopyError, ReadError
from tests.soak.configurations import Rig, ViolationError
from tests.soak.episodes import Episode, whole_epoch, whole_epoch_async
from tests.support.simulated_device import SimulatedDevice


def failing_epoch(episode: Episode, rig: Rig, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> Any:
    """Run an epoch; return the error of one of `kinds` that ended it, `None` after a complete epoch."""
    try:
        if episode.random.random() < 0.4:
            asyncio.run(whole_epoch_async(rig))
        else:
            whole_epoch(rig)
    except kinds as error:
        episode.counts[f"raised {type(error).__name__}"] += 1
        return error
    return None


def _check_error(error: Any, expected: bool, fault: str) -> None:
    if (error is not None) != expected:
        raise ViolationError(f"{fault}: {'no error' if expected else f'raised {error!r}'}")


def read_fails(episode: Episode) -> None:
    """A failed read raises a `ReadError` with the sample's index."""
    rig = episode.rig(fixed={"source": episode.random.choice(("coroutine", "many", "dataset"))})
    bad = frozenset(episode.random.sample(range(rig.configuration.length), 1))
    rig.faults.failing_reads = bad
    expected = bad <= {index for batch in rig.configuration.expected(0) for index in batch}
    error = failing_epoch(episode, rig, ReadError)
    _check_error(error, expected, f"the read of {bad} fails")
    if error is not None and error.index not in bad:
        raise ViolationError(f"the error names sample {error.index}, {bad} fails")
    del error
    rig.faults.clear()
    whole_epoch(rig)


def truncated(episode: Episode) -> None:
    """Truncated bytes raise a `DecodeError`."""
    rig = episode.rig(fixed={"source": episode.random.choice(("coroutine", "many"))})
    count = min(2, rig.configuration.length)
    rig.faults.truncated = bad = frozenset(episode.random.sample(range(rig.configuration.length), count))
    expected = bool(bad & {index for batch in rig.configuration.expected(0) for index in batch})
    error = failing_epoch(episode, rig, DecodeError)
    _check_error(error, expected, f"the bytes of {bad} are truncated")
    del error
    rig.faults.clear()
    whole_epoch(rig)


def open_fails(episode: Episode) -> None:
    """The `for` line raises the error of the source's `open`; the next epoch calls `open` again."""
    rig = episode.rig(fixed={"source": "coroutine"})
    rig.faults.open_fails = True
    for _ in range(episode.random.randint(1, 2)):
        _check_error(failing_epoch(episode, rig, ConnectionError), True, "open fails")
    rig.faults.clear()
    whole_epoch(rig)


def copy_fails(episode: Episode) -> None:
    """A device error in a copy raises a `DeviceCopyError`."""
    device = SimulatedDevice(episode.random.randrange(1 << 30), copy_fails_at=episode.random.randint(1, 6))
    rig = episode.rig(device=device, fixed={"latency": "random"})
    error = failing_epoch(episode, rig, DeviceCopyError)
    del error
    while device.copies < 6:
        if failing_epoch(episode, rig, DeviceCopyError) is None and not rig.configuration.expected(0):
            return
    whole_epoch(rig)


def pin_fails(episode: Episode) -> None:
    """If memory cannot be pinned, one warning is logged and batches use pageable memory."""
    episode.allowed.append("memory cannot be pinned")
    rig = episode.rig(device=SimulatedDevice(pin_fails=True), fixed={"latency": "random"})
    whole_epoch(rig)
    whole_epoch(rig)


def transform_raises(episode: Episode) -> None:
    """The `for` line raises the error of `transform`; the next epoch is complete."""
    calls = 0
    fails_at = episode.random.randint(1, 5)

    def transform(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ArithmeticError("in transform")
        return batch

    rig = episode.rig(transform=transform)
    batches = len(rig.configuration.expected(0))
    error = failing_epoch(episode, rig, (ArithmeticError, DeviceCopyError))
    _check_error(error, batches >= fails_at, f"transform raises at {fails_at} of {batches} batches")
    del error
    fails_at = 0
    whole_epoch(rig)


@contextmanager
def threads_refused(names: str, times: int) -> Iterator[None]:
    """Make the first `times` starts of threads with such names fail, as at the system's limit on threads."""
    start = threading.Thread.start
    failures_left = times

    def fail_or_start(thread: threading.Thread) -> None:
        nonlocal failures_left
        if thread.name.startswith(names) and failures_left > 0:
            failures_left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = fail_or_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def executor_refuses(episode: Episode) -> None:
    """If a thread cannot start, the epoch raises an error or runs without the thread; it does not hang."""
    names = episode.random.choice(("aiofeed-read", "aiofeed-decode", "aiofeed-engine", "aiofeed-copy"))
    rig = episode.rig()
    with threads_refused(names, episode.random.randint(1, 3)):
        failing_epoch(episode, rig, (RuntimeError, ReadError))
    whole_epoch(rig)


FAULTS: dict[str, Callable[[Episode], None]] = {
    "read fails": read_fails,
    "truncated": truncated,
    "open fails": open_fails,
    "copy fails": copy_fails,
    "pin fails": pin_fails,
    "transform raises": transform_raises,
    "executor refuses": executor_refuses,
}
