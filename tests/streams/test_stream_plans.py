"""Plans without ``lengths=``: the batches of a ``Stream``, by brute force over random configurations."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from aiofeed import Buckets, Pack, Stream, TokenBudget
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.sampling.epochs import EpochEnds
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.plans.length_plans import LengthPlan
from aiofeed.streams.stream_epochs import StreamOrder

SEED = 5


class Items:
    """An async iterable of lists of these lengths, with a state or without one."""

    def __init__(self, lengths: list[int], *, stateful: bool) -> None:
        self.lengths = lengths
        self.at = self.given = 0
        if stateful:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "resumed", state["at"])
        self.resumed = 0

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        self.at, self.resumed = self.resumed, 0
        while self.at < len(self.lengths):
            self.at += 1
            self.given += 1
            yield [self.at - 1] * self.lengths[self.at - 1]


class Case:
    """A random configuration."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 40))]
        self.window = draw.choice([1, 3, 7, 1000])
        self.buffer = draw.choice([0, 0, 4])
        self.drop_last = draw.random() < 0.3
        self.stateful = draw.random() < 0.5
        self.plan: LengthPlan = draw.choice([self.buckets, self.budget, self.pack, self.pack])(draw)
        self.items = Items(self.lengths, stateful=self.stateful)

    def buckets(self, draw: random.Random) -> Buckets:
        bounds = sorted(draw.sample(range(1, 13), draw.randint(0, 3)))
        sizes = [draw.randint(1, 4) for _ in range(len(bounds) + 1)]
        return Buckets(boundaries=bounds, batch_sizes=sizes)

    def budget(self, draw: random.Random) -> TokenBudget:
        oversize: Any = draw.choice(["skip", "truncate"])
        most = draw.choice([None, 3])
        return TokenBudget(max_tokens=draw.randint(8, 30), max_samples=most, window=self.window, on_oversize=oversize)

    def pack(self, draw: random.Random) -> Pack:
        split = draw.random() < 0.5
        oversize: Any = "error" if split else draw.choice(["skip", "truncate"])
        context, rows = draw.randint(4, 16), draw.randint(1, 3)
        options: dict[str, Any] = {"separator": draw.choice([None, 0]), "split": split, "on_oversize": oversize}
        return Pack(context=context, rows=rows, window=self.window, **options)

    def order(self, rank: int = 0, ranks: int = 1) -> StreamOrder:
        self.items = Items(self.lengths, stateful=self.stateful)
        base = Schedule(length=0, batch_size=1, seed=SEED, drop_last=self.drop_last)
        return StreamOrder(base, (rank, ranks), Stream(self.items, shuffle_buffer=self.buffer), self.plan)

    async def run(self, rank: int = 0, ranks: int = 1, saved: Any = None) -> tuple[list[Any], list[Any]]:
        """The batches of an epoch from a state on, and the state before each and at the end."""
        order = self.order(rank, ranks)
        start = Position()
        if saved is not None:
            consumed, state = json.loads(saved)
            start = Position(0, consumed)
            order.load_sampler_state(state)
        epochs = order.plan_epoch(start)
        progress = epochs.new_progress(start, True)
        batches: list[Any] = []
        states: list[Any] = []

        def save() -> None:
            at = progress.position()
            states.append(None if at.epoch else json.dumps([at.consumed, order.sampler_state(at)]))

        async with aclosing(aiter(epochs)) as steps:
            async for step in steps:
                if isinstance(step, BatchPlan):
                    save()
                    pieces = None if step.pieces is None else step.pieces.tolist()
                    batches.append((list(map(int, step.indices)), pieces))
                    progress.record(step.number)
                elif isinstance(step, EpochEnds):
                    assert step.error is None, step.error
                    break
        save()
        return batches, states


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and windows that are smaller than an epoch."""
    monkeypatch.setattr("aiofeed.streams.stream_epochs.STREAM_SAMPLES", 3)
    monkeypatch.setattr("aiofeed.streams.stream_plans.WINDOW", 20)


@pytest.mark.parametrize(
    "number", [*range(24), *(pytest.param(each, marks=pytest.mark.slow) for each in range(24, 400))]
)
async def test_every_item_once_on_any_number_of_ranks_from_any_position(number: int) -> None:
    """The batches of one rank are dealt to the others, and resumed at every position with another number of ranks."""
    case, draw = Case(number), random.Random(number)
    whole, states = await case.run()
    check_content(case, whole)
    for at, state in enumerate(states[:-1]):
        assert (await case.run(saved=state))[0] == whole[at:]
    ranks = draw.choice([2, 3])
    dealt = [await case.run(rank, ranks) for rank in range(ranks)]
    check_dealt(case, [batches for batches, _ in dealt], whole)
    for at, state in enumerate(dealt[0][1][:-1]):
        assert state == dealt[1][1][at], "the ranks have different states"
        others = draw.choice([1, 2, 4])
        resumed = [(await case.run(rank, others, state))[0] for rank in range(others)]
        check_dealt(case, resumed, whole[at * ranks :])


def check_dealt(case: Case, dealt: list[list[Any]], whole: list[Any]) -> None:
    """All ranks have the same number of batches, which are the whole; the last batch again as padding."""
    ranks = len(dealt)
    assert len({*map(len, dealt)}) == 1
    mixed = list(itertools.chain.from_iterable(zip(*dealt, strict=True)))
    steps = len(whole) // ranks if case.drop_last else -(-len(whole) // ranks)
    assert mixed == (whole + whole[-1:] * ranks)[: steps * ranks]


def check_content(case: Case, whole: list[Any]) -> None:
    """Every item, and of a document every token, is in one batch; of the plan's form."""
    plan, lengths = case.plan, case.lengths
    seen: Counter[Any] = Counter()
    for indices, pieces in whole:
        found = [lengths[index] for index in indices]
        if isinstance(plan, Pack):
            taken: set[int] = set()
            for sample, place, start, stop, length in pieces:
                assert length == found[sample]
                assert place // plan.context == (place + stop - start - 1) // plan.context
                places = set(range(place, place + stop - start))
                assert not places & taken
                taken |= places
                seen.update((indices[sample], token) for token in range(start, stop))
            assert max(taken) < plan.rows * plan.context
        else:
            seen.update(indices)
        if isinstance(plan, Buckets):
            [bucket] = {sum(bound <= length for bound in plan.boundaries) for length in found}
            assert len(indices) <= plan.batch_sizes[bucket]
            assert len(indices) == plan.batch_sizes[bucket] or not case.drop_last
        if isinstance(plan, TokenBudget):
            assert min(max(found), plan.max_tokens) * len(found) <= plan.max_tokens
            assert len(found) <= (plan.max_samples or 1000)
    assert set(seen.values()) <= {1}
    expected: set[Any] = set(range(len(lengths)))
    if isinstance(plan, TokenBudget) and plan.on_oversize == "skip":
        expected = {index for index in expected if lengths[index] <= plan.max_tokens}
    if isinstance(plan, Pack):
        sizes = [length + (plan.separator is not None) for length in lengths]
        if not plan.split:
            sizes = [
                size if size <= plan.context else plan.context * (plan.on_oversize == "truncate") for size in sizes
            ]
        expected = {(index, token) for index, size in enumerate(sizes) for token in range(size)}
    assert set(seen) <= expected
    if not case.drop_last:
        assert set(seen) == expected


@pytest.mark.parametrize("drop_last", [False, True])
async def test_a_bucket_that_does_not_fill(drop_last: bool) -> None:
    """Its batch ends when its first item is a window of 20 items old; with drop_last it is left out."""
    case = Case(0)
    case.lengths, case.buffer, case.drop_last = [9, *[1] * 30, 9, *[1] * 5], 0, drop_last
    case.plan = Buckets(boundaries=[5], batch_sizes=[4, 3])
    found = [indices for indices, _ in (await case.run())[0]]
    assert found.count([0]) == (not drop_last)
    assert found[:5] == [list(range(first, first + 4)) for first in range(1, 21, 4)]
    assert [index for indices in found for index in indices if case.lengths[index] == 9] == [0, 31] * (not drop_last)


async def test_the_bound_of_items_that_are_read_again() -> None:
    """A window, the items of a batch and one block are read again by an iterable with a state; the state is small."""
    lengths = [random.Random(number).randint(1, 60) for number in range(600)]
    for plan in (
        Pack(context=64, rows=4, split=False, window=50),
        Pack(context=64, rows=4),
        TokenBudget(max_tokens=400, window=50),
        Buckets(boundaries=[10, 59], batch_sizes=[8, 4, 8]),
    ):
        case = Case(0)
        case.lengths, case.plan, case.buffer, case.drop_last, case.stateful = lengths, plan, 0, False, True
        whole, states = await case.run()
        for at in range(20, len(whole) - 20, 30):
            assert len(states[at]) < 5000
            assert (await case.run(saved=states[at]))[0] == whole[at:]
            used = {index for indices, _ in whole[:at] for index in indices}
            assert case.items.given <= 600 - max(used) + 50 + 32 + 3
