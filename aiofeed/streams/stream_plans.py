"""Plans over a stream: batches of items whose lengths are known one after the other.

A planner is a deterministic function of the sequence of lengths. Each time it has formed batches it makes a
``PlanPoint``, from which another planner goes on when it gets the items again that were in no batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.plans.length_plans import WINDOW, Buckets, LengthPlan, TokenBudget

Entry: TypeAlias = tuple[int, ...]
"""(item, length); for a piece of a document (item, length, start, stop, room in its row), later in a batch (item,
length, place, start, stop)."""
Entries: TypeAlias = list[Entry]

SAME_ITEMS = "a stream must give the same items again, and length= the same lengths"


@dataclass(frozen=True)
class PlanPoint:
    """The state of a planner when it has just formed batches.

    Args:
        epoch: The epoch.
        items: The number of items that it had got.
        batches: The number of batches that it had formed.
        waiting: The items that were in no batch: the open batches or rows.
        lengths: The lengths of the next items, up to the one that completed the next batch.
    """

    epoch: int
    items: int = 0
    batches: int = 0
    waiting: Sequence[Sequence[Entry]] = ()
    lengths: Sequence[int] = ()

    @classmethod
    def loaded(cls, **state: Any) -> PlanPoint:
        """Return the point from a saved state.

        Raises:
            TypeError, ValueError: It is damaged.
        """
        point = cls(**state)
        entries = [*chain.from_iterable(point.waiting)]
        numbers = [point.epoch, point.items, point.batches, *point.lengths, *chain.from_iterable(entries)]
        natural = all(type(number) is int and number >= 0 for number in numbers)
        if not (natural and all(point.waiting) and {2, 5}.issuperset(map(len, entries))):
            raise ValueError(f"the point of the plan is {state}")
        return point

    @property
    def first(self) -> int:
        """The first item that is needed to go on."""
        return min((entry[0] for row in self.waiting for entry in row), default=self.items)


@dataclass(eq=False)
class Planner(ABC):
    """Forms the batches of one epoch of a stream.

    Args:
        plan: The plan.
        point: Where it goes on; later the last point.
        drop_last: Leave out incomplete batches.
        seed: Seeds the order of batches that are formed together; ``None``: that of the plan.
        points: Receives the points.
    """

    plan: Any
    point: PlanPoint
    drop_last: bool
    seed: int | None
    points: list[PlanPoint] = field(default_factory=list)
    # Batches or rows that are in no batch yet.
    _open: list[Entries] = field(default_factory=list)
    # The items before the point, which are read again, and the lengths of those behind it.
    _again: dict[int, Entry] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)

    def add(self, number: int, item: int, length: int) -> list[Entries]:
        """Add an item, the next one in the order of the epoch; returns the batches that are complete with it.

        Args:
            number: The number of items before it.
            item: The number of the item in the stream.
            length: Its length.

        Raises:
            StateError: It has another length than before the resume.
        """
        if number < self.point.items:
            self._again[item] = item, length
            if number + 1 == self.point.items:
                self._open = [[self._same(*entry) for entry in row] for row in self.point.waiting]
                self._again = {}
            return []
        at, known = len(self._lengths), self.point.lengths
        self._check(item, length, known[at] if at < len(known) else length)
        self._lengths.append(length)
        return self._formed(self._add(item, length), number + 1)

    def _same(self, item: int, expected: int, *piece: int) -> Entry:
        found, length = self._again.get(item, (item, 0))
        self._check(item, length, expected)
        return (found, length, *piece)

    def _check(self, item: int, length: int, expected: int) -> None:
        if length != expected:
            raise StateError(f"item {item} has the length {length}, and {expected} in the state: {SAME_ITEMS}")

    def finish(self, items: int) -> list[Entries]:
        """Return the last batches, at the end of a stream of so many items.

        Raises:
            StateError: It had more items before the resume.
        """
        if items < self.point.items + len(self.point.lengths):
            raise StateError(f"the stream has ended after {items} items, and the state has more: {SAME_ITEMS}")
        return self._formed(self._finish(), items)

    def _formed(self, batches: list[Entries], items: int) -> list[Entries]:
        if batches:
            waiting = [[(int(item), *rest) for item, *rest in row] for row in self._open]
            before, self._lengths = replace(self.point, lengths=self._lengths), []
            self.point = PlanPoint(before.epoch, items, before.batches + len(batches), waiting)
            self.points += [before, self.point]
        return batches

    @abstractmethod
    def _add(self, item: int, length: int) -> list[Entries]: ...

    def _finish(self) -> list[Entries]:
        return [] if self.drop_last else self._open


class BucketPlanner(Planner):
    """One open batch per bucket, which ends when it is full or its first item is ``WINDOW`` items old."""

    def _add(self, item: int, length: int) -> list[Entries]:
        bucket = bisect_right(self.plan.boundaries, length)
        batch = next((each for each in self._open if bisect_right(self.plan.boundaries, each[0][1]) == bucket), None)
        if batch is None:
            self._open.append(batch := [])
        batch.append((item, length))
        full = [batch] if len(batch) == self.plan.batch_sizes[bucket] else []
        old = [each for each in self._open if item - each[0][0] >= WINDOW and each not in full]
        self._open = [each for each in self._open if each not in full + old]
        return full if self.drop_last else full + old


class BudgetPlanner(Planner):
    """Forms the batches of one window after the other."""

    def _add(self, item: int, length: int) -> list[Entries]:
        self._open.append([(item, length)])
        return self._finish() if len(self._open) == self.plan.window else []

    def _finish(self) -> list[Entries]:
        items, plan, self._open = [entry for [entry] in self._open], self.plan, []
        lengths, drop_last = [length for _, length in items], self.drop_last and len(items) < plan.window
        window = TokenBudget(lengths, plan.max_tokens, plan.max_samples, on_oversize=plan.on_oversize)
        rng = np.random.default_rng([self.seed or 0, self.point.batches])
        lists = window.batches(np.arange(len(items)), rng, shuffle=self.seed is not None, drop_last=drop_last)
        return [[items[at] for at in lists.samples(batch).tolist()] for batch in range(len(lists))]


class PackPlanner(Planner):
    """Puts a document into the first row with room for it, and forms a batch of ``rows`` rows that are full.

    Without ``split``, also of the oldest rows when the first document is ``window`` documents old.
    """

    def _add(self, item: int, length: int) -> list[Entries]:
        plan, start, size, filled = self.plan, 0, length + (self.plan.separator is not None), False
        if not plan.split and size > plan.context:
            size = 0 if plan.on_oversize == "skip" else plan.context
        while (left := min(size - start, plan.context)) > 0:
            # Of a document longer than a row, whole rows come first.
            needed = 1 if plan.split and left < plan.context else left
            row = next((row for row in self._open if row[-1][-1] >= needed), None)
            if row is None:
                self._open.append(row := [])
            room = row[-1][-1] if row else plan.context
            stop = start + min(left, room)
            row.append((item, length, start, stop, room - stop + start))
            start, filled = stop, filled or not row[-1][-1]
        if not plan.split and len(self._open) >= plan.rows and item - self._open[0][0][0] >= plan.window:
            return self._batches(self._open[: plan.rows])
        full = [row for row in self._open if not row[-1][-1]] if filled else []
        return self._batches(full[: len(full) - len(full) % plan.rows])

    def _batches(self, rows: list[Entries]) -> list[Entries]:
        self._open = [row for row in self._open if row not in rows] if rows else self._open
        context, most = self.plan.context, self.plan.rows
        return [
            [
                (item, length, (at + 1) * context - room - stop + start, start, stop)
                for at, row in enumerate(rows[first : first + most])
                for item, length, start, stop, room in row
            ]
            for first in range(0, len(rows), most)
        ]

    def _finish(self) -> list[Entries]:
        rows = [row for row in self._open if not (self.drop_last and self.plan.split and row[-1][-1])]
        return self._batches(rows[: len(rows) - len(rows) % self.plan.rows] if self.drop_last else rows)


PLANNERS: dict[type[LengthPlan], type[Planner]] = {Buckets: BucketPlanner, TokenBudget: BudgetPlanner}
