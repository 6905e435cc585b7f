"""What passes through a handoff: a finished batch, a failure, the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, TypeAlias

from aiofeed.core.errors import SampleError
from aiofeed.core.statistics import Counters
from aiofeed.runtime.buffers import Lease
from aiofeed.runtime.queue import Handoff


@dataclass(eq=False)
class Ready:
    """A finished batch.

    Args:
        number: its position among this rank's batches of the epoch.
        samples: how many samples it has, 0 where nobody counted.
        batch: a tree of ``ArrayLeaf``, tensors and whatever else; behind the copier, what the copier made of it.
        lease: the memory to give back once it has been copied from.
        reserved: bytes to release once it has left the queue.
        release: called with the item then, on the engine's loop.
        left_at: when it left the queue (``time.perf_counter`` seconds); the loop may hear of it later.
        note: called with the item then, in the thread that takes it; whether that is word enough, and the loop need not
            be woken for it.
        counters: of its epoch.
        failures: of samples that were skipped or replaced.
        taken: whether the producer was told that the consumer takes it.
        behind: from when to when its copy waited for the device, which had too many batches before it
            (``time.perf_counter`` seconds); ``None``: it did not.
    """

    number: int
    samples: int
    batch: Any
    lease: Lease | None = None
    reserved: int = 0
    release: Callable[[Ready], None] | None = None
    counters: Counters = field(default_factory=Counters)
    failures: tuple[SampleError, ...] = ()
    taken: bool = False
    left_at: float = 0.0
    note: Callable[[Ready], bool] | None = None
    behind: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Failed:
    """An error to raise at the consumer's line; nothing comes after it."""

    error: BaseException
    number: int | None = None
    failures: tuple[SampleError, ...] = ()


@dataclass(frozen=True, eq=False)
class Ended:
    """There are no more batches of this epoch."""


@dataclass(frozen=True, eq=False)
class Closed:
    """The iterator was closed while somebody waited at it."""


Item: TypeAlias = Ready | Failed | Ended | Closed


def release(item: Ready) -> None:
    """Say that a batch has left the queue; on the engine's loop, where no signal handler runs."""
    # A take that was interrupted and is repeated says it twice.
    said, item.release = item.release, None
    if said is not None:
        said(item)


def drop_batches(handoff: Handoff[Item]) -> None:
    """Let go of finished batches that nobody is going to take; what else is there stays."""
    others = []
    try:
        while True:
            item = handoff.get_nowait()
            if not isinstance(item, Ready):
                others.append(item)
    except Empty:
        pass
    for other in others:
        handoff.put(other)
