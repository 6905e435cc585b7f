"""The order of a feeder over a ``Stream``: batches of items as they are read, the end of an epoch, and the state.

Each rank reads all items, and keeps those of its batches. A batch is planned when it is known whether another one
follows, so that the last batch is known as the last before it is returned. Until the stream has ended, its schedule
has a length that no stream reaches. With a plan, the schedule counts batches and not items.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from aiofeed.kernel.core.errors import FeedError, StateError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.core.validation import check_epoch, check_int_from, counted
from aiofeed.kernel.sampling.epochs import EpochEnds, EpochStart, EpochStream, Step
from aiofeed.kernel.sampling.feed_order import FeedOrder, check_shard, find_shard
from aiofeed.kernel.sampling.lister import STREAM_SAMPLES
from aiofeed.kernel.sampling.order import epoch_seed, feistel
from aiofeed.kernel.sampling.progress import EpochProgress, InOrder
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.kernel.sampling.state import json_dict, unreadable
from aiofeed.plans.length_plans import LengthPlan
from aiofeed.streams.stream_plans import PLANNERS, SAME_ITEMS, Entries, PackPlanner, PlanPoint

Shard: TypeAlias = tuple[int, int] | Literal["auto"] | None

UNKNOWN_LENGTH = 1 << 61


class ItemNumber(int):
    """The number of an item in its stream, from 0, which is its index in a batch plan; refers to the item.

    So an item lives as long as the plan of its batch, and the other items of the batch can replace it.
    """

    item: Any

    @classmethod
    def of(cls, number: int, item: Any) -> ItemNumber:
        """Return the number of an item."""
        index = cls(number)
        index.item = item
        return index


@dataclass(frozen=True, eq=False)
class ItemNumbers(Sequence[int]):
    """The numbers of items with the items: ``ItemNumber``s, which are made only if one of them is asked for.

    Args:
        numbers: The numbers of the items in their stream.
        items: The items.
    """

    numbers: Sequence[int]
    items: list[Any]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return ItemNumbers(self.numbers[at], self.items[at])
        return ItemNumber.of(self.numbers[at], self.items[at])


def items_of(indices: Sequence[int]) -> list[Any]:
    """Return the items of ``ItemNumber``s."""
    if isinstance(indices, ItemNumbers):
        return indices.items
    return [index.item for index in indices if isinstance(index, ItemNumber)]


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
class ItemBlock:
    """Consecutive items of a stream.

    Args:
        items: The items; with a plan, each with its length.
        snapshot: The state before the last item, if the iterable has a state.
        ended: Whether the iterable has ended after these items.
        error: The error of the iterable after these items.
    """

    items: list[Any] = field(default_factory=list)
    snapshot: Snapshot | None = None
    ended: bool = False
    error: Exception | None = None


Measured: TypeAlias = Callable[[int, Any], int] | None
"""Returns the length of an item with its number; ``None``: items are not measured."""
Blocks: TypeAlias = AsyncGenerator[ItemBlock, None]


class StreamItems(Protocol):
    """The items of a ``Stream``, which has these attributes."""

    shuffle_buffer: int
    sharded: bool

    def __len__(self) -> int: ...

    @property
    def length(self) -> int | None:
        """The number of items of an epoch; ``None`` if it is not known."""

    def first_item(self, item: int) -> int:
        """Return the number of the first item to read for an item in the order of the epoch."""

    def last_before(self, epoch: int, item: int, snapshots: Iterable[Snapshot]) -> Snapshot | None:
        """Return the last of some states at an item or before, if any."""

    def _read_blocks(self, epoch: int, first: int, snapshot: Snapshot | None, size: int, measure: Measured) -> Blocks:
        """The items of an epoch from one on, in blocks of ``size``; ``snapshot`` is a state at this item or before.

        With ``measure`` each item comes with its length.
        """


class StreamOrder(FeedOrder):
    """The order of a feeder over a stream.

    Args:
        base: The order without a shard; its length is not used.
        shard: See ``Feeder``.
        stream: The stream.
        plan: Forms the batches, which ``base`` then counts.

    Attributes:
        epochs: The epochs that the consumer iterates.
    """

    def __init__(self, base: Schedule, shard: Shard, stream: StreamItems, plan: LengthPlan | None = None) -> None:
        super().__init__(base, None if stream.sharded else shard)
        self.plan = plan
        if plan is not None:
            self._batch_size, self._unit = plan, "batch"
        self._own_shard: Shard = shard
        if shard is not None and shard != "auto":
            self._own_shard = check_shard(shard)
        self.stream = stream
        self._known: tuple[Sequence[Snapshot], Sequence[PlanPoint]] = (), ()
        self.epochs: StreamEpochs | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the epoch that is being read, except its states."""
        return super().__getstate__() | {"_known": self.known, "epochs": None}

    def schedule(self, length: int | None = None) -> Schedule:
        """Return the schedule of an epoch of ``length`` items, by default the length of the stream.

        Raises:
            TypeError: ``length`` is ``None``, and the stream has no length or there is a plan.
        """
        if length is None and self.plan is not None:
            raise TypeError(f"{self.plan} over {self.stream!r} has no len(): its batches follow from the items")
        return super().schedule(len(self.stream) if length is None else length)

    def may_differ(self) -> bool:
        """Return whether ranks may return different numbers of batches, as those of a sharded stream may."""
        return self.stream.sharded or super().may_differ()

    def plan_epoch(self, position: Position) -> StreamEpochs:
        """Return the epoch at ``position`` from there on."""
        schedule = self.schedule(UNKNOWN_LENGTH)
        schedule.check(position)
        return StreamEpochs(schedule, EpochStart(EpochStats(events=self.events), position), self)

    def after(self, position: Position, batches: int) -> Position:
        """The position so many batches after another one; in its epoch if the number of its batches is not known.

        Raises:
            ValueError: An epoch has no batches.
        """
        if self.stream.length is not None and self.plan is None:
            return super().after(position, batches)
        return self.schedule(UNKNOWN_LENGTH).after(position, batches)

    def normalize(self, position: Position) -> Position:
        """Return the position itself: it is not known whether anything is left of its epoch."""
        return position

    def last_point(self, position: Position, points: Iterable[PlanPoint]) -> PlanPoint:
        """Return the last of some points from which a position can be reached; without a plan the position itself."""
        if self.plan is None:
            return PlanPoint(position.epoch, position.consumed)
        before = (each for each in points if each.epoch == position.epoch and each.batches <= position.consumed)
        return max(before, key=lambda each: each.batches, default=PlanPoint(position.epoch))

    def sampler_state(self, position: Position) -> str:
        """Return the state of the iterable at a position or before, and that of a plan, as JSON.

        Raises:
            StateError: The state of the iterable is not plain.
        """
        snapshots, points = self.known
        point = self.last_point(position, points)
        found = self.stream.last_before(position.epoch, self.stream.first_item(point.first), snapshots)
        if found is not None and found.state is None:
            raise StateError(f"the state_dict of {self.stream!r} must be plain values that JSON has: {found.reason}")
        shard = self._identity() if self.stream.sharded and not position.at_start else None
        state: dict[str, Any] = {"shard": shard, "snapshot": None if found is None else asdict(found)}
        if self.plan is not None:
            if point.batches == position.consumed and not position.ahead:
                point = replace(point, lengths=())  # nothing behind it was returned
            state |= {"stream plan": repr(self.plan), "point": asdict(point)}
        return json.dumps(state)

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
            points = () if self.plan is None else (PlanPoint.loaded(**loaded["point"]),)
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable("the state of the stream", error) from error
        if shard is not None and shard != self._identity():
            raise StateError(
                f"the state is of (rank, world size) {shard}, and this is {self._identity()}: with {self.stream!r} "
                f"each rank continues from a state of its own"
            )
        if self.plan is not None and (saved := loaded.get("stream plan")) != (own := repr(self.plan)):
            raise StateError(f"the state is of another plan: {saved} in the state, {own} here")
        self._known, self.epochs = (snapshots, points), None

    @property
    def known(self) -> tuple[Sequence[Snapshot], Sequence[PlanPoint]]:
        """The known states of the iterable, and of the plan."""
        return self._known if self.epochs is None else self.epochs.known

    def _identity(self) -> tuple[int, int]:
        """Return the rank and world size of this process, although the schedule of a sharded stream has one rank."""
        if self._own_shard == "auto":
            self._own_shard = find_shard()
        return self._own_shard or (0, 1)


class StreamEpochs(EpochStream):
    """The steps of an engine for epochs of a stream.

    Args:
        schedule, first: As for ``EpochStream``.
        order: The order that planned them.

    Attributes:
        known: States of the iterable, and of the plan, from which the consumer's position and later ones can be
            reached.
    """

    def __init__(self, schedule: Schedule, first: EpochStart, order: StreamOrder) -> None:
        super().__init__(schedule, first)
        self._order = order
        self._stream = order.stream
        # Replaced and not changed, because the consumer's thread reads it.
        self.known: tuple[Sequence[Snapshot], Sequence[PlanPoint]] = order.known
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
        """Yield the batches of an epoch and its end."""
        stream, plan, number = self._stream, self._order.plan, 0
        snapshots, points = self.known
        point, measure = self._order.last_point(start, points), None
        window = ItemWindow(self.schedule, start, stream, point.first, self.schedule.batch_size)
        if plan is not None:
            window, measure = PlanWindow(self.schedule, start, stream, plan, point), plan.measure
        snapshot = stream.last_before(start.epoch, window.read, snapshots)
        error: Exception | None = None
        reader = stream._read_blocks(start.epoch, window.read, snapshot, window.block, measure)
        async with aclosing(reader) as blocks:
            async for block in blocks:
                window.add(block)
                error = block.error
                if block.ended and error is None:
                    self._set_length(start, window.length)
                    error = _missing(stream, start, replace(self.schedule, length=window.length), window.read)
                self._add_states(block.snapshot, window)
                ready = window.ready_batches(block)
                while number < ready:
                    planned = window.plan(number)
                    if number not in start.ahead:
                        yield planned
                    number += 1
                if error is not None:
                    break
        yield EpochEnds(error)

    def _set_length(self, start: Position, length: int) -> None:
        self._lengths[start.epoch] = length
        if (progress := self._progress) is not None and progress.start.epoch == start.epoch:
            progress.shorten(length)
        self._order._warn_if_empty(replace(self.schedule, length=length))

    def _add_states(self, snapshot: Snapshot | None, window: ItemWindow) -> None:
        """Add states, and remove those that the consumer has passed."""
        assert self._progress is not None
        position, (snapshots, known) = self._progress.position(), self.known
        # Of two points after the same batch, the second one has the lengths behind it.
        points = {(each.epoch, each.batches): each for each in [*known, *window.points]}
        window.points.clear()
        last = self._order.last_point(position, points.values())
        if snapshot is not None:
            snapshots = [*snapshots, snapshot]
            first = self._stream.first_item(last.first)
            needed, here = self._stream.last_before(position.epoch, first, snapshots), (position.epoch, first)
            snapshots = [each for each in snapshots if each is needed or (each.epoch, each.item) > here]
        self.known = snapshots, [each for at, each in points.items() if at >= (last.epoch, last.batches)]


def _missing(stream: StreamItems, start: Position, schedule: Schedule, items: int) -> FeedError | None:
    """Return the error of an epoch that has fewer items than the stream's length, or than were returned before."""
    length = stream.length
    if start.consumed > schedule.length:  # only with a plan: without one, the reader has found this
        problem = f"batch {start.consumed} of epoch {start.epoch}, which ends after {counted(schedule.length, 'batch')}"
        return StateError(f"the state is at {problem}: skip() must stay within the epoch, and {SAME_ITEMS}")
    if start.ahead:
        try:
            schedule.check(start)
        except StateError as error:
            return error
    if length is None or items >= length:
        return None
    return FeedError(
        f"{stream!r} ended after {counted(items, 'item')} in epoch {start.epoch}, but its length is {length}: pass "
        f"Stream(length=...) with the right number"
    )


class ItemWindow:
    """The items of a stream that are read and not in a batch yet, in the order of the epoch.

    Args:
        schedule: The schedule, whose length is not used.
        start: Where the epoch starts.
        stream: The stream.
        first: The first item that is needed.
        samples: Items of a batch of a rank.

    Attributes:
        read: The number of items of the epoch that have been read.
        length: The length of the schedule, if the stream has ended.
        points: States of a plan, until they are taken.
        block: Items to read at a time, in whole groups of ``shuffle_buffer``.
    """

    def __init__(self, schedule: Schedule, start: Position, stream: StreamItems, first: int, samples: int) -> None:
        self._schedule = schedule
        self._start = start
        self._group = stream.shuffle_buffer
        self._batch = schedule.batch_size * schedule.world_size
        self.block: int = -(-samples * schedule.world_size // max(self._group, 1)) * max(self._group, 1)
        # The positions up to `_ordered` have their items.
        self.read: int = stream.first_item(first)
        self.length: int = self.read
        self._complete = self._ordered = self.read
        self._unordered: list[Any] = []
        # The items of this rank that are not planned, and their numbers.
        self._items: list[Any] = []
        self._numbers: list[int] = []
        self._last: Any = None
        self.points: list[PlanPoint] = []
        self._seed = epoch_seed(schedule.seed, start.epoch)

    def add(self, block: ItemBlock) -> None:
        """Add the items of a block; a group is put in order when it is complete."""
        self.read = self.length = self.read + len(block.items)
        items, group = self._unordered + block.items, self._group
        usable = len(items) if block.ended or not group else len(items) // group * group
        for first in range(0, usable, group or max(usable, 1)):
            self._put_in_order(items[first : first + (group or usable)])
        self._unordered = items[usable:]

    def _put_in_order(self, items: list[Any]) -> None:
        first, count, schedule = self._ordered, len(items), self._schedule
        next_own = max(first, self._start.consumed)
        next_own += (self._start.consumed + schedule.rank - next_own) % schedule.world_size
        own, numbers = slice(next_own - first, None, schedule.world_size), self._next_numbers(count)
        if self._group:
            items = [items[number - first] for number in numbers]
        self._numbers += numbers[own]
        self._items += items[own]
        self._last = ItemNumbers([numbers[-1]], items[-1:])
        self._complete = self._ordered = first + count

    def _next_numbers(self, count: int) -> Sequence[int]:
        """Return the numbers of the next items in the order of the epoch."""
        first = self._ordered
        if not self._group:
            return range(first, first + count)
        numbers: list[int] = (first + feistel(count, self._seed, first // self._group)(np.arange(count))).tolist()
        return numbers

    def ready_batches(self, block: ItemBlock) -> int:
        """Return the number of batches of the epoch that can be planned after ``block``.

        That is, batches after which another one follows, and all at the end. Complete ones before an error.
        """
        complete = (self._complete - self._start.consumed) // self._batch
        if block.error is not None:
            return complete
        batches = replace(self._schedule, length=self.length).batches(self._start.consumed)
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
        schedule = replace(self._schedule, length=self.length)
        positions = schedule.positions(self._start.consumed, number).tolist()
        size = len(positions)
        padding = max(size - len(self._items), 0)
        indices = ItemNumbers(
            self._numbers[:size] + self._last.numbers * padding, self._items[:size] + self._last.items * padding
        )
        del self._numbers[:size], self._items[:size]
        return BatchPlan(number, indices, positions, self._seed, ReplacementsFromBatch(indices))


class PlanWindow(ItemWindow):
    """The items of a stream that are in no batch of a plan yet, and the batches that are not planned yet.

    Args:
        schedule: The schedule, which counts batches.
        plan: Forms the batches.
        point: Where the plan goes on. Batches from there to ``start`` were returned before.
        start, stream: As for ``ItemWindow``.
    """

    def __init__(
        self, schedule: Schedule, start: Position, stream: StreamItems, plan: LengthPlan, point: PlanPoint
    ) -> None:
        super().__init__(schedule, start, stream, point.first, STREAM_SAMPLES)
        planner, seed = PLANNERS.get(type(plan), PackPlanner), self._seed if stream.shuffle_buffer else None
        self._planner = planner(plan, point, schedule.drop_last, seed, self.points)
        self._complete = point.batches
        # The batches of this rank by their number.
        self._own: dict[int, Entries] = {}

    def add(self, block: ItemBlock) -> None:
        """Add the items of a block; items that are not those of a loaded state are an error of the block."""
        try:
            super().add(block)
            if block.ended:
                self._keep(self._planner.finish(self._ordered))
            self.length: int = self._complete
        except StateError as error:
            block.error = error

    def _put_in_order(self, items: Sequence[Any]) -> None:
        first = self._ordered
        for number in self._next_numbers(len(items)):
            item, length = items[number - first]
            self._ordered += 1
            self._keep(self._planner.add(self._ordered - 1, ItemNumber.of(number, item), length))

    def _keep(self, batches: list[Entries]) -> None:
        for self._last in batches:
            ahead = self._complete - self._start.consumed
            if ahead >= 0 and ahead % self._schedule.world_size == self._schedule.rank:
                self._own[self._complete] = self._last
            self._complete += 1

    def plan(self, number: int) -> BatchPlan:
        """Remove a batch. Batches after the end of the stream, which are padding, are the last one again."""
        position = self._start.consumed + self._schedule.rank + number * self._schedule.world_size
        batch, repeats = self._own.pop(position, self._last), max(position + 1 - self.length, 0)
        places = {item: place for place, item in enumerate(dict.fromkeys(entry[0] for entry in batch))}
        indices, positions = list(places), [int(item) + repeats * self.read for item in places]
        pieces = np.array([(places[item], *piece, length) for item, length, *piece in batch])
        packed = pieces if isinstance(self._planner, PackPlanner) else None
        return BatchPlan(number, indices, positions, self._seed, ReplacementsFromBatch(indices), packed)


@dataclass(frozen=True, eq=False)
class ReplacementsFromBatch:
    """Replace a failed item by another one of its batch; other items are not in memory."""

    indices: Sequence[int]

    @property
    def length(self) -> int:
        """One more than there are items, so that every other item is tried."""
        return len(self.indices) + 1

    def index_at(self, position: int) -> int:
        """Return the index at a position."""
        return self.indices[position % len(self.indices)]
