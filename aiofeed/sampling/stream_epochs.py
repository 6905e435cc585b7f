"""The order of a feeder over a ``Stream``: batches of items as they are read, the end of an epoch, and the state.

Each rank reads all items, and keeps those of its batches. A batch is planned when it is known whether another one
follows, so that the last batch is known as the last before it is handed out. Until the stream has ended, its schedule
has a length that no stream reaches.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from aiofeed.core.errors import FeedError, StateError
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import BatchPlan
from aiofeed.core.validation import check_epoch, check_int_from
from aiofeed.sampling.epochs import EpochEnds, EpochStart, EpochStream, Step
from aiofeed.sampling.feed_order import FeedOrder, check_shard, find_shard
from aiofeed.sampling.order import epoch_seed, feistel
from aiofeed.sampling.schedule import Position, Schedule
from aiofeed.sampling.state import EpochProgress, InOrder, json_dict

UNKNOWN_LENGTH = 1 << 61


class ItemNumber(int):
    """The number of an item in its stream, from 0, which is its index in a batch plan; refers to the item.

    So an item lives as long as the plan of its batch, and the other items of the batch can replace it.
    """

    item: Any

    @classmethod
    def of(cls, number: int, item: Any) -> ItemNumber:
        """The number of an item."""
        index = cls(number)
        index.item = item
        return index


@dataclass(frozen=True)
class Snapshot:
    """The state of an iterable.

    Args:
        epoch: The epoch.
        item: The number of items that the iterable had given.
        state: The state as JSON; ``None`` if it is not plain, which ``reason`` explains.
    """

    epoch: int
    item: int
    state: str | None
    reason: str = ""

    def __post_init__(self) -> None:
        check_epoch("epoch", self.epoch)
        check_int_from(0, "item", self.item)
        if not isinstance(self.state, str | None):
            raise TypeError(f"state must be a str or None, got {self.state!r}")


@dataclass(eq=False)
class Block:
    """Consecutive items of a stream.

    Args:
        items: The items.
        snapshot: The state before the last item, if the iterable has a state.
        ended: Whether the iterable has ended after these items.
        error: The error of the iterable after these items.
    """

    items: list[Any] = field(default_factory=list)
    snapshot: Snapshot | None = None
    ended: bool = False
    error: Exception | None = None


class Items(Protocol):
    """The items of a ``Stream``, which has these attributes."""

    shuffle_buffer: int
    sharded: bool

    def __len__(self) -> int: ...

    @property
    def length(self) -> int | None:
        """The number of items of an epoch; ``None`` if it is not known."""

    def first_item(self, position: Position) -> int:
        """The number of the first item to read for a position."""

    def last_before(self, position: Position, snapshots: Iterable[Snapshot]) -> Snapshot | None:
        """The last of some states from which a position can be reached, if any."""

    def _read_blocks(self, epoch: int, first: int, snapshot: Snapshot | None, size: int) -> AsyncGenerator[Block, None]:
        """The items of an epoch from one on, in blocks of ``size``; ``snapshot`` is a state at this item or before."""


class StreamOrder(FeedOrder):
    """The order of a feeder over a stream.

    Args:
        base: The order without a shard; its length is not used.
        shard: See ``Feeder``.
        stream: The stream.

    Attributes:
        epochs: The epochs that the consumer iterates.
    """

    def __init__(self, base: Schedule, shard: tuple[int, int] | Literal["auto"] | None, stream: Items) -> None:
        super().__init__(base, None, None if stream.sharded else shard)
        self._own_shard: tuple[int, int] | Literal["auto"] | None = shard
        if shard is not None and shard != "auto":
            self._own_shard = check_shard(shard)
        self.stream = stream
        self._snapshots: Sequence[Snapshot] = ()
        self.epochs: StreamEpochs | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the epoch that is being read, except its states."""
        return super().__getstate__() | {"_snapshots": self.snapshots, "epochs": None}

    def schedule(self, length: int | None = None) -> Schedule:
        """The schedule of an epoch of ``length`` items, by default the length of the stream.

        Raises:
            TypeError: ``length`` is ``None`` and the stream has no length.
        """
        return super().schedule(len(self.stream) if length is None else length)

    def plan_epoch(self, position: Position) -> StreamEpochs:
        """The epoch at ``position`` from there on."""
        schedule = self.schedule(UNKNOWN_LENGTH)
        schedule.check(position)
        return StreamEpochs(schedule, EpochStart(EpochStats(events=self.events), position), self)

    def after(self, position: Position, batches: int) -> Position:
        """The position so many batches after another one; in its epoch if the stream has no length.

        Raises:
            ValueError: An epoch has no batches.
        """
        if self.stream.length is not None:
            return super().after(position, batches)
        return self.schedule(UNKNOWN_LENGTH).after(position, batches)

    def normalize(self, position: Position) -> Position:
        """The position itself: it is not known whether anything is left of its epoch."""
        return position

    def sampler_state(self, position: Position) -> str:
        """The state of the iterable at a position or before, as JSON.

        Raises:
            StateError: The state of the iterable is not plain.
        """
        found = self.stream.last_before(position, self.snapshots)
        if found is not None and found.state is None:
            raise StateError(f"the state_dict of {self.stream!r} must be plain values that JSON has: {found.reason}")
        shard = self._identity() if self.stream.sharded and not position.at_start else None
        return json.dumps({"shard": shard, "snapshot": None if found is None else asdict(found)})

    def load_sampler_state(self, state: str) -> None:
        """Resume the iterable from ``sampler_state``.

        Raises:
            StateError: The text is no state of a stream, or of another rank's stream.
        """
        loaded = json_dict(state)
        try:
            shard = None if loaded["shard"] is None else check_shard(loaded["shard"])
            snapshots = () if loaded["snapshot"] is None else (Snapshot(**loaded["snapshot"]),)
            if any(each.state is None for each in snapshots):
                raise ValueError("the snapshot has no state")
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"the state of the stream is damaged: sampler has {state!r:.200}: {error}") from error
        if shard is not None and shard != self._identity():
            raise StateError(
                f"the state is of (rank, world size) {shard}, and this is {self._identity()}: with {self.stream!r} "
                f"each rank continues from a state of its own"
            )
        self._snapshots, self.epochs = snapshots, None

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """The known states of the iterable."""
        return self._snapshots if self.epochs is None else self.epochs.snapshots

    def _identity(self) -> tuple[int, int]:
        """The rank and world size of this process, although the schedule of a sharded stream has one rank."""
        if self._own_shard == "auto":
            self._own_shard = find_shard()
        return self._own_shard or (0, 1)


class StreamEpochs(EpochStream):
    """The steps of an engine for epochs of a stream.

    Args:
        schedule, first: As for ``EpochStream``.
        order: The order that planned them.

    Attributes:
        snapshots: States of the iterable from which the consumer's position and later ones can be reached.
    """

    def __init__(self, schedule: Schedule, first: EpochStart, order: StreamOrder) -> None:
        super().__init__(schedule, first)
        self._order = order
        self._stream = order.stream
        # Replaced and not changed, because the consumer's thread reads it.
        self.snapshots: Sequence[Snapshot] = order.snapshots
        self._lengths: dict[int, int] = {}
        self._progress: EpochProgress | None = None

    def new_progress(self, start: Position, in_order: InOrder) -> EpochProgress:
        """Count the batches of an epoch, whose end may have been read already."""
        # The engine's thread sets a length before it reads `_progress`, so that one of both threads passes it on.
        self._order.epochs = self
        progress = self._progress = super().new_progress(start, in_order)
        self._lengths.pop(start.epoch - 1, None)
        if (length := self._lengths.get(start.epoch)) is not None:
            progress.shorten(length)
        return progress

    async def __aiter__(self) -> AsyncGenerator[Step, None]:
        start: EpochStart | None = self.first
        while start is not None:
            yield start
            batches = 0
            async with aclosing(self._epoch(start.position)) as steps:
                async for step in steps:
                    yield step
                    if isinstance(step, BatchPlan):
                        batches += 1
                    elif isinstance(step, EpochEnds) and step.error is not None:
                        return
            if not batches:
                with self._lock:
                    self._permitted = self._taken  # nothing limits how many empty epochs would be read at once
            start = self.after(start)

    async def _epoch(self, start: Position) -> AsyncGenerator[Step, None]:
        """The batches of an epoch and its end."""
        stream, number = self._stream, 0
        window = ItemWindow(self.schedule, start, stream)
        snapshot = stream.last_before(start, self.snapshots)
        error: Exception | None = None
        async with aclosing(stream._read_blocks(start.epoch, window.read, snapshot, window.block)) as blocks:
            async for block in blocks:
                window.add(block)
                error = block.error
                if block.ended and error is None:
                    self._set_length(start, window.read)
                    error = _missing(stream, start, replace(self.schedule, length=window.read))
                if block.snapshot is not None:
                    self._add_snapshot(block.snapshot)
                ready = window.ready_batches(block)
                while number < ready:
                    plan = window.plan(number)
                    if number not in start.ahead:
                        yield plan
                    number += 1
        yield EpochEnds(error)

    def _set_length(self, start: Position, length: int) -> None:
        self._lengths[start.epoch] = length
        if (progress := self._progress) is not None and progress.start.epoch == start.epoch:
            progress.shorten(length)
        self._order._warn_if_empty(replace(self.schedule, length=length))

    def _add_snapshot(self, snapshot: Snapshot) -> None:
        """Add a state, and remove those that the consumer has passed."""
        assert self._progress is not None
        position, known = self._progress.position(), [*self.snapshots, snapshot]
        needed = self._stream.last_before(position, known)
        first = self._stream.first_item(position)
        self.snapshots = [each for each in known if each is needed or (each.epoch, each.item) > (position.epoch, first)]


def _missing(stream: Items, start: Position, schedule: Schedule) -> FeedError | None:
    """The error of an epoch that has fewer items than the stream's length, or than were handed out before."""
    length, items = stream.length, schedule.length
    if start.ahead:
        try:
            schedule.check(start)
        except StateError as error:
            return error
    if length is None or items >= length:
        return None
    return FeedError(
        f"{stream!r} ended after {items} items in epoch {start.epoch}, but its length is {length}: pass "
        f"Stream(length=...) with the right number"
    )


class ItemWindow:
    """The items of a stream that are read and not in a batch yet, in the order of the epoch.

    Args:
        schedule: The schedule, whose length is not used.
        start: Where the epoch starts.
        stream: The stream.

    Attributes:
        read: The number of items of the epoch that have been read.
        block: Items to read at a time: as many as a batch of all ranks has, in whole groups of ``shuffle_buffer``.
    """

    def __init__(self, schedule: Schedule, start: Position, stream: Items) -> None:
        self._schedule = schedule
        self._start = start
        self._group = stream.shuffle_buffer
        self._batch = schedule.batch_size * schedule.world_size
        self.block: int = -(-self._batch // max(self._group, 1)) * max(self._group, 1)
        # The positions up to `_ordered` have their items. Those of this rank are in `_own`.
        self.read: int = stream.first_item(start)
        self._ordered = self.read
        self._unordered: list[Any] = []
        self._own: dict[int, ItemNumber] = {}
        self._last: ItemNumber | None = None
        self._seed = epoch_seed(schedule.seed, start.epoch)

    def add(self, block: Block) -> None:
        """Add the items of a block; a group is put in order when it is complete."""
        self.read += len(block.items)
        items, group = self._unordered + block.items, self._group
        usable = len(items) if block.ended or not group else len(items) // group * group
        for first in range(0, usable, group or max(usable, 1)):
            self._put_in_order(items[first : first + (group or usable)])
        self._unordered = items[usable:]

    def _put_in_order(self, items: Sequence[Any]) -> None:
        first, count, schedule = self._ordered, len(items), self._schedule
        order: Sequence[int] = range(count)
        if self._group:
            order = feistel(count, self._seed, first // self._group)(np.arange(count)).tolist()
        next_own = max(first, self._start.consumed)
        next_own += (self._start.consumed + schedule.rank - next_own) % schedule.world_size
        for position in range(next_own, first + count, schedule.world_size):
            self._own[position] = ItemNumber.of(first + order[position - first], items[order[position - first]])
        self._last = ItemNumber.of(first + order[-1], items[order[-1]])
        self._ordered += count

    def ready_batches(self, block: Block) -> int:
        """The number of batches of the epoch that can be planned after ``block``.

        That is, batches after which another one follows, and all at the end. Complete ones before an error.
        """
        complete = (self._ordered - self._start.consumed) // self._batch
        if block.error is not None:
            return complete
        batches = replace(self._schedule, length=self.read).batches(self._start.consumed)
        if block.ended:
            return batches
        last = batches - 1
        while last in self._start.ahead:
            last -= 1
        return min(complete, last)

    def plan(self, number: int) -> BatchPlan:
        """Remove a batch. Positions after the end of the stream, which are padding, get the last item again.

        Not the first items, as for other sources: a resumed epoch does not have them.
        """
        schedule = replace(self._schedule, length=self.read)
        positions = schedule.positions(self._start.consumed, number).tolist()
        assert self._last is not None
        indices = [self._own.pop(position, self._last) for position in positions]
        return BatchPlan(number, indices, positions, self._seed, OwnBatch(indices))


@dataclass(frozen=True, eq=False)
class OwnBatch:
    """The order in which replacements are found: the items of the same batch, because others are not in memory."""

    indices: Sequence[int]

    @property
    def length(self) -> int:
        """One more than there are items, so that every other item is tried."""
        return len(self.indices) + 1

    def index_at(self, position: int) -> int:
        """The index at a position."""
        return self.indices[position % len(self.indices)]
