"""The trail of a run: a digest of the samples that it has seen, of which receipts are made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

from aiofeed.kernel.sampling.schedule import Position, Schedule


def digest(*parts: object) -> str:
    """Return a digest of some values, by their texts."""
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def order_digest(schedule: Schedule, in_order: bool | Literal["samples"], lister: str) -> str:
    """Identifies the order of an epoch, whose lister identifies itself.

    If ranks may return different numbers of samples, also the rank whose samples are known.
    """
    own: tuple[object, ...] = ()
    if in_order is not True or not schedule.pad:
        own = (in_order, schedule.rank, schedule.world_size, in_order is False and schedule.batch_size)
    return digest(schedule.seed, schedule.shuffle, schedule.length, lister, *own)


@dataclass(frozen=True)
class Trail:
    """What a run has seen: consecutive samples of one order and epoch, and a digest of all before.

    An interrupted run that goes on where it was has the trail of an uninterrupted one, also with another batch size or
    world size. Skipping batches, or leaving an epoch, ends a span.

    Args:
        before: The digest of earlier spans; empty if there are none.
        order: The digest of the order of this span; empty if there is no span.
        first: The position of its first sample.
        end: The position after its last sample.
    """

    before: str = ""
    order: str = ""
    first: int = 0
    end: Position = field(default_factory=Position)

    def digest(self) -> str:
        """Return the digest of all spans."""
        if not self.order:
            return self.before
        end = self.end
        return digest(self.before, self.order, end.epoch, self.first, end.consumed, sorted(end.ahead))

    def extended(self, order: str, start: Position, end: Position) -> Trail:
        """Return the trail after the samples between two positions of an epoch."""
        if start == end:
            return self
        if (self.order, self.end) == (order, start):
            return replace(self, end=end)
        return Trail(self.digest(), order, start.consumed, end)

    def at(self, position: Position) -> Trail:
        """Return the trail of a run that goes on at a position."""
        return self if self.order and self.end == position else Trail(self.digest(), "", position.consumed, position)
