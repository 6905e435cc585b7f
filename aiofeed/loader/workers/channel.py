"""The messages between ``DataLoader`` and its worker processes, and the channel for them, without an event loop.

The messages are pickled: both ends are one user's.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aiofeed.ipc.framing import Link, close_all
from aiofeed.ipc.ring import Extent
from aiofeed.ipc.schema import NewSegment

# The header has room for this much. Strings and small tensors are sent in the message itself.
_LIMIT_BYTES = (1 << 32) - 1

# --- to a worker ---


@dataclass(frozen=True)
class Fetch:
    """Fetch a batch.

    Args:
        batch: Its number in the epoch.
        index: The argument of torch's fetcher.
        releases: Slots that the parent uses no longer, each with whether it may be written again.
    """

    batch: int
    index: Any
    releases: Sequence[tuple[int, bool]] = ()


@dataclass(frozen=True)
class Resume:
    """A new epoch begins; answered after all batches before it.

    Args:
        shared_seed: The seed of data pipes.
    """

    shared_seed: int | None


@dataclass(frozen=True)
class Restore:
    """Continue from a state; answered when that is done.

    Args:
        state: That of the random generators, packed, and of the dataset; ``None`` for each that is not restored.
        replayed: Number of batches to read and drop then.
        index: The argument of torch's fetcher for them.
    """

    state: list[Any]
    replayed: int
    index: Any


# --- to the parent ---


class Answer(NamedTuple):
    """The answer of a worker.

    Args:
        kind: A "batch"; its "error"; the "end" of the worker's iterable dataset; "resumed", after ``Resume`` and
            ``Restore``.
        batch: Number of the batch; -1 if it answers another message.
        content: The pickled batch or the ``ExceptionWrapper``.
        slot: Serial number of the slot that the batch lies in.
        extents: Where the buffers of the batch lie.
        segments: Memory that is new to the parent; its descriptors follow.
        retired: Numbers of segments that will not be used again.
        state: The pickled state after the batch, error or end, see ``Restore``; ``None``: as after the answer before.
        times: Of a batch, see ``BatchTimes.taken``.
    """

    kind: Literal["batch", "error", "end", "resumed"]
    batch: int
    content: Any = None
    slot: int = -1
    extents: Sequence[Extent] = ()
    segments: Sequence[NewSegment] = ()
    retired: Sequence[int] = ()
    state: bytes | None = None
    times: tuple[float, ...] = ()


# --- the channel ---


class Channel(Link):
    """A link whose messages wait until they are taken.

    Attributes:
        messages: Received messages that were not taken, each a payload and its descriptors.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _LIMIT_BYTES)
        self.messages: deque[tuple[bytes, list[int]]] = deque()

    def collect(self) -> None:
        """Receive the messages that have arrived."""
        try:
            self.messages.extend(self.receive())
        except BaseException:  # Ctrl-C: a part of the stream may be lost
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. Idempotent."""
        super().close()
        for _, descriptors in self.messages:
            close_all(descriptors)
        self.messages.clear()


def wait(channels: Sequence[Channel], timeout_s: float) -> None:
    """Wait until a channel has received something or has ended; send what is unsent meanwhile.

    A signal handler may raise out of it: while it waits without effect, else the channel is closed.
    """
    poll = select.poll()
    found = {channel.fileno(): channel for channel in channels if not channel.ended}
    for descriptor, channel in found.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
    for descriptor, events in poll.poll(timeout_s * 1000):
        if events & select.POLLOUT:
            found[descriptor].flush()
        if events & ~select.POLLOUT:
            found[descriptor].collect()
