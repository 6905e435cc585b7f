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
        room: batches that may wait in memory of this process.

    Attributes:
        queue: what the iterator takes, or a copy thread before it.
        counters: statistics of the epoch.
        epoch: its number at the server; -1 before it has started.
        superseded: whether a newer iterator follows.
        started: whether a batch was handed out.
        complete: whether the end of the epoch is in the queue.
        passed_on: whether the next feed has got its batches, because this one had not started.
        unread: serial numbers of its batches that have not been read yet.
        messages: those that it got before it started.
        unconfirmed: serial numbers of batches read before it started, for which ``Read`` has not been sent.
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
