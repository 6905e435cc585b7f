"""Episodes in which something goes wrong underneath: the right error at the `for` line, then a whole epoch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiofeed import DecodeError, DeviceCopyError, ReadError
from aiofeed.testing import SimulatedDevice
from tests.soak.configurations import Rig, ViolationError
from tests.soak.episodes import Episode, whole_epoch


def failing_epoch(episode: Episode, rig: Rig, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> Any:
    """An epoch that ends with an error of one of `kinds`, in its batch's turn; the error, `None` where none came."""
    asynchronous = episode.random.random() < 0.4
    try:
        seen = asyncio.run(_all_async(rig)) if asynchronous else _all(rig)
    except kinds as error:
        episode.tally[f"raised {type(error).__name__}"] += 1
        return error
    seen.complete()
    return None


def _all(rig: Rig) -> Any:
    iterator = iter(rig.feeder)
    seen = rig.begin()
    for batch in iterator:
        seen.take(batch)
    return seen


async def _all_async(rig: Rig) -> Any:
    iterator = aiter(rig.feeder)
    seen = rig.begin()
    async for batch in iterator:
        seen.take(batch)
    return seen


def _must(error: Any, due: bool, what: str) -> None:
    if (error is not None) != due:
        raise ViolationError(f"{what}: {'no error came' if due else f'raised {error!r}'}")


def unread(episode: Episode) -> None:
    """Reads that fail are raised by name."""
    rig = episode.rig(fixed={"source": episode.random.choice(("coroutine", "many", "dataset"))})
    bad = frozenset(episode.random.sample(range(rig.configuration.length), 1))
    rig.faults.unread = bad
    due = bad <= {index for batch in rig.configuration.expected(0) for index in batch}
    error = failing_epoch(episode, rig, ReadError)
    _must(error, due, f"a read of {bad} fails")
    if error is not None and error.index not in bad:
        raise ViolationError(f"sample {error.index} was named, {bad} fails")
    del error
    rig.faults.clear()
    whole_epoch(rig)


def short(episode: Episode) -> None:
    """Truncated bytes are an error of decoding, by name."""
    rig = episode.rig(fixed={"source": episode.random.choice(("coroutine", "many"))})
    count = min(2, rig.configuration.length)
    rig.faults.short = bad = frozenset(episode.random.sample(range(rig.configuration.length), count))
    due = bool(bad & {index for batch in rig.configuration.expected(0) for index in batch})
    error = failing_epoch(episode, rig, DecodeError)
    _must(error, due, f"the bytes of {bad} are short")
    del error
    rig.faults.clear()
    whole_epoch(rig)


def open_fails(episode: Episode) -> None:
    """A source that cannot be opened is raised as it is, and tried again by the next epoch."""
    rig = episode.rig(fixed={"source": "coroutine"})
    rig.faults.open_fails = True
    for _ in range(episode.random.randint(1, 2)):
        _must(failing_epoch(episode, rig, ConnectionError), True, "open fails")
    rig.faults.clear()
    whole_epoch(rig)


def copy_fails(episode: Episode) -> None:
    """A device error in a copy is a DeviceCopyError."""
    device = SimulatedDevice(episode.random.randrange(1 << 30), copy_fails_at=episode.random.randint(1, 6))
    rig = episode.rig(device=device, fixed={"latency": "random"})
    error = failing_epoch(episode, rig, DeviceCopyError)
    del error
    while device.copies < 6:
        if failing_epoch(episode, rig, DeviceCopyError) is None and not rig.configuration.expected(0):
            return
    whole_epoch(rig)


def pin_fails(episode: Episode) -> None:
    """Memory that cannot be pinned costs one warning; pageable memory serves."""
    episode.allowed.append("memory cannot be pinned")
    rig = episode.rig(device=SimulatedDevice(pin_fails=True), fixed={"latency": "random"})
    whole_epoch(rig)
    whole_epoch(rig)


def transform_raises(episode: Episode) -> None:
    """What `transform` raises comes at the `for` line, and the feeder goes on with the next epoch."""
    calls = 0
    fails_at = episode.random.randint(1, 5)

    def transform(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ArithmeticError("no good")
        return batch

    rig = episode.rig(transform=transform)
    batches = len(rig.configuration.expected(0))
    error = failing_epoch(episode, rig, (ArithmeticError, DeviceCopyError))
    _must(error, batches >= fails_at, f"transform raises at {fails_at} of {batches} batches")
    del error
    fails_at = 0
    whole_epoch(rig)


@contextmanager
def threads_refused(names: str, times: int) -> Iterator[None]:
    """As where a limit on processes is reached: so many threads of these names cannot be started."""
    start = threading.Thread.start
    left = times

    def refuse(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith(names) and left > 0:
            left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def executor_refuses(episode: Episode) -> None:
    """A thread that cannot be started is an error, or is done without; never a hang."""
    names = episode.random.choice(("aiofeed-read", "aiofeed-decode", "aiofeed-engine", "aiofeed-copy"))
    rig = episode.rig()
    with threads_refused(names, episode.random.randint(1, 3)):
        failing_epoch(episode, rig, (RuntimeError, ReadError))
    whole_epoch(rig)


FAULTS: dict[str, Callable[[Episode], None]] = {
    "unread": unread,
    "short": short,
    "open fails": open_fails,
    "copy fails": copy_fails,
    "pin fails": pin_fails,
    "transform raises": transform_raises,
    "executor refuses": executor_refuses,
}
