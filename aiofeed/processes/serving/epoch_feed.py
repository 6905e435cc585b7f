"""One epoch of a server on its way to one iterator of a consumer."""

from __future__ import annotations

from typing import TypeAlias

from aiofeed.core.statistics import EpochStats
from aiofeed.processes.serving.protocol import BatchAvailable, EpochEnded, EpochFailed, EpochStarted
from aiofeed.runtime.queue import BatchQueue, QueueItem

EpochMessage: TypeAlias = EpochStarted | BatchAvailable | EpochEnded | EpochFailed
"""The messages of a subscription, in the order in which the server sends them."""


class EpochFeed:
    """One epoch on its way to one iterator.

    Args:
        room: Batches that may wait in memory of this process.

    Attributes:
        queue: What the iterator takes, or a copy thread before it.
        counters: Statistics of the epoch.
        epoch: Its number at the server; -1 before it has started.
        superseded: Whether a newer iterator follows.
        started: Whether a batch was handed out.
        complete: Whether the end of the epoch is in the queue.
        passed_on: Whether the next feed has got its batches, because this one had not started.
        unread: Serial numbers of its batches that have not been read yet.
        messages: Those that it got before it started.
        unconfirmed: Serial numbers of batches read before it started, for which ``Read`` has not been sent.
    """

    def __init__(self, room: int) -> None:
        self.queue: BatchQueue[QueueItem] = BatchQueue()
        self.counters = EpochStats()
        self.epoch = -1
        self.room = room
        self.superseded = self.started = self.complete = self.passed_on = False
        self.unread: set[int] = set()
        self.messages: list[EpochMessage] = []
        self.unconfirmed: list[int] = []
