"""One epoch of a served feeder on its way to one iterator."""

from __future__ import annotations

from typing import TypeAlias

from aiofeed.core.statistics import Counters
from aiofeed.processes.serving.protocol import Begins, Ends, Fails, Given
from aiofeed.runtime.items import Item
from aiofeed.runtime.queue import Handoff

Word: TypeAlias = Begins | Given | Ends | Fails
"""What a server says of an epoch, in order."""


class Pass:
    """One epoch on its way to one iterator.

    Args:
        room: batches that may wait in memory of this process.

    Attributes:
        superseded: a newer iterator follows it, and takes over what it has not touched.
        touched: whether a batch was handed out.
        complete: whether the end of the epoch is in the handoff.
        handed_on: its batches are the next pass's.
        unread: slots that it has not read.
        words: what it was told while untouched.
        withheld: slots that it has read while untouched.
    """

    def __init__(self, room: int) -> None:
        self.handoff: Handoff[Item] = Handoff()
        self.counters = Counters()
        self.epoch = -1
        self.room = room
        self.superseded = self.touched = self.complete = self.handed_on = False
        self.words: list[Word] = []
        self.unread: set[int] = set()
        self.withheld: list[int] = []
