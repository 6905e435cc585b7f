"""``Pack``: rows by brute force, for any lengths, seed, epoch, rank and resume point."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from aiofeed import Pack
from aiofeed.errors import StateError
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.plans.length_plans import PlanLister
from aiofeed.plans.sequences import PackCollate
from tests.support.packed import PAD, SEPARATOR, STEP, all_tokens, document, lognormal, pieces_of, tokens_of


@st.composite
def packs(draw: st.DrawFn, **options: Any) -> Pack:
    split = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, draw(st.sampled_from([6, 30, 90]))), max_size=60))
    plan = Pack(
        lengths,
        draw(st.integers(1, 40)),
        draw(st.integers(1, 4)),
        separator=draw(st.sampled_from([None, SEPARATOR])),
        pad=PAD,
        **{
            "split": split,
            "window": draw(st.integers(1, 70)),
            "on_oversize": "error" if split else draw(st.sampled_from(["skip", "truncate"])),
            **options,
        },
    )
    plan.bind(len(lengths))
    return plan


def batch_of(pack: Pack, plan: BatchPlan, lengths: Sequence[int], kept: list[int] | None = None) -> Any:
    """The batch of a plan; documents arrive in reverse order."""
    builder = PackCollate(pack.rows, pack.context, pack.separator, pack.pad).new_builder(
        plan, HostBufferPool(0).lease()
    )
    for position in reversed(range(len(plan.indices)) if kept is None else kept):
        builder.put(position, document(plan.indices[position], lengths[plan.indices[position]]))
    return as_tensors(builder.finish([str(index) for index in plan.indices], kept))


def listed(pack: Pack, epoch: int = 0, *, shuffle: bool = True, drop_last: bool = False) -> BatchLists:
    return PlanLister(pack, 3, shuffle=shuffle, drop_last=drop_last).list_epoch(epoch, resumed=False)


def plans_of(lists: BatchLists, position: Position, world_size: int, **options: Any) -> list[BatchPlan]:
    """The plans of all ranks, step by step."""
    schedules = [
        Schedule(length=len(lists), batch_size=1, rank=r, world_size=world_size, **options) for r in range(world_size)
    ]
    each = [list(schedule.plans(position, lists)) for schedule in schedules]
    return [plan for step in zip(*each, strict=True) for plan in step]


def expected(pack: Pack) -> Counter[int]:
    lengths, separated = pack.lengths.tolist(), pack.separator is not None
    if pack.split:
        return all_tokens(lengths, separated=separated)
    found = all_tokens(lengths, separated=separated, most=pack.context)
    if pack.on_oversize == "skip":
        for index, length in enumerate(lengths):
            if length + separated > pack.context:
                found.subtract([*range(STEP * index, STEP * index + pack.context)][:length])
    return +found


@given(packs(), st.integers(0, 3), st.booleans())
def test_every_token_comes_once(pack: Pack, epoch: int, shuffle: bool) -> None:
    """In rows of ``context`` tokens; the same rows for the same epoch."""
    lists = listed(pack, epoch, shuffle=shuffle)
    plans = plans_of(lists, Position(epoch), 1)
    pieces = [pieces_of(batch_of(pack, plan, pack.lengths), pack.rows, pack.context) for plan in plans]
    assert tokens_of(itertools.chain.from_iterable(pieces)) == expected(pack)
    assert all(pieces)
    assert listed(pack, epoch, shuffle=shuffle).digest() == lists.digest()


@given(packs(), st.integers(1, 4), st.integers(1, 4), st.data(), st.booleans())
def test_ranks_and_resumes(pack: Pack, ranks: int, later: int, data: st.DataObject, shuffle: bool) -> None:
    """No token is lost or doubled by a resume with another world size, except those of batches that pad the ranks."""
    lists = listed(pack, 1, shuffle=shuffle)
    steps = data.draw(st.integers(0, -(-len(lists) // ranks)))
    consumed = Schedule(length=len(lists), batch_size=1, world_size=ranks).consumed_after(0, steps)
    position = Position(1, consumed) if steps else Position(1)
    before = plans_of(lists, Position(1), ranks)[: steps * ranks]
    after = plans_of(lists, position, later) if consumed < len(lists) else []
    both = before[: len(lists)] + after[: max(len(lists) - consumed, 0)]
    found = [pieces_of(batch_of(pack, plan, pack.lengths), pack.rows, pack.context) for plan in both]
    assert tokens_of(itertools.chain.from_iterable(found)) == expected(pack)
    for extra in after[max(len(lists) - consumed, 0) :]:
        assert extra.indices in [plan.indices for plan in plans_of(lists, Position(1), 1)]


@given(packs(), st.booleans())
def test_drop_last_leaves_no_incomplete_batch(pack: Pack, shuffle: bool) -> None:
    """With ``split`` there is no padding at all; less than a row and a batch is left out."""
    lists = listed(pack, shuffle=shuffle, drop_last=True)
    pieces = [
        pieces_of(batch_of(pack, plan, pack.lengths), pack.rows, pack.context)
        for plan in plans_of(lists, Position(), 1)
    ]
    found = tokens_of(itertools.chain.from_iterable(pieces))
    assert found <= expected(pack)
    assert len(lists) >= len(listed(pack, shuffle=shuffle)) - 1 - (pack.rows == 1)
    if pack.split:
        assert found.total() == len(lists) * pack.rows * pack.context
        assert found.total() == expected(pack).total() // (pack.rows * pack.context) * pack.rows * pack.context
    for batch in pieces:
        assert sum(map(len, batch)) > 0


@given(packs(), st.data())
def test_skipped_documents_leave_padding(pack: Pack, data: st.DataObject) -> None:
    """All other tokens stay in their places."""
    for plan in plans_of(listed(pack), Position(), 1)[:2]:
        whole = batch_of(pack, plan, pack.lengths)
        kept = sorted(data.draw(st.sets(st.sampled_from(range(len(plan.indices))), min_size=1)))
        batch = batch_of(pack, plan, pack.lengths, kept)
        pieces = pieces_of(batch, pack.rows, pack.context)
        assert plan.pieces is not None
        assert len(pieces) == sum(int(piece[0]) in kept for piece in plan.pieces)
        left = batch["document_ids"] >= 0
        assert (batch["tokens"][left] == whole["tokens"][left]).all()
        assert (batch["position_ids"][left] == whole["position_ids"][left]).all()


@given(packs(), st.data(), st.booleans())
def test_an_order_with_repetitions(pack: Pack, data: st.DataObject, shuffle: bool) -> None:
    """A document comes as often as in the order, in pieces of their own; a batch reads it once."""
    most = 80 if len(pack.lengths) else 0
    order = np.array(data.draw(st.lists(st.integers(0, max(len(pack.lengths) - 1, 0)), max_size=most)), np.int64)
    lists = pack.batches(order, np.random.default_rng(0), shuffle=shuffle, drop_last=False)
    plans = plans_of(lists, Position(), 1)
    pieces = [pieces_of(batch_of(pack, plan, pack.lengths), pack.rows, pack.context) for plan in plans]
    often = Counter(order.tolist())
    found = tokens_of(itertools.chain.from_iterable(pieces))
    once = {token: count for token, count in expected(pack).items() if token != SEPARATOR}
    assert {token: count for token, count in found.items() if token != SEPARATOR} == {
        token: often[token // STEP] for token in once if often[token // STEP]
    }
    assert all(len(set(plan.indices)) == len(plan.indices) for plan in plans)


@given(packs(split=True, on_oversize="error"))
def test_documents_are_split_only_at_the_ends_of_rows(pack: Pack) -> None:
    """And where a row of the same document is full."""
    for plan in plans_of(listed(pack), Position(), 1):
        assert plan.pieces is not None
        for _, place, start, stop, length in plan.pieces.tolist():
            end = place + stop - start
            assert start % pack.context == 0 or place % pack.context == 0
            assert stop == length + (pack.separator is not None) or end % pack.context == 0


@given(packs(split=False, on_oversize="truncate"))
def test_documents_of_a_row_come_in_the_order_of_the_epoch(pack: Pack) -> None:
    """Unshuffled, also rows: by their first documents within a window."""
    lists = listed(pack, shuffle=False)
    rows: dict[tuple[int, int], list[int]] = {}
    for batch in range(len(lists)):
        assert lists.spans is not None
        spans = lists.spans[lists.offsets[batch] : lists.offsets[batch + 1]]
        for index, span in zip(lists.samples(batch).tolist(), spans.tolist(), strict=True):
            rows.setdefault((batch, span[0] // pack.context), []).append(index)
    assert all(row == sorted(row) for row in rows.values())
    assert all({index // pack.window for index in row} == {row[0] // pack.window} for row in rows.values())
    first = [row[0] for row in rows.values()]
    assert first == sorted(first)


def test_rows_by_hand() -> None:
    """Best fit fills rows exactly; a split document continues in the next row; a long one fills rows of its own."""

    def rows(**options: Any) -> list[list[list[int]]]:
        pack = Pack([7, 4, 3, 6, 14], 10, 1, pad=PAD, **options)
        pack.bind(5)
        plans = plans_of(listed(pack, shuffle=False), Position(), 1)
        pieces = [pieces_of(batch_of(pack, plan, pack.lengths), 1, 10) for plan in plans]
        return [[[piece[0], len(piece)] for piece in row] for row in pieces]

    assert rows(split=False, on_oversize="skip") == [[[0, 7], [2000, 3]], [[1000, 4], [3000, 6]]]
    assert rows(split=False, on_oversize="truncate")[2] == [[4000, 10]]
    assert rows() == [[[0, 7], [1000, 3]], [[1003, 1], [2000, 3], [3000, 6]], [[4000, 10]], [[4010, 4]]]


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.2])
def test_little_is_wasted_without_splitting(sigma: float) -> None:
    """Less than 1 % of log-normal lengths with a mean of a quarter of the context; split, only the last row."""
    lengths = lognormal(100_000, 512, sigma)
    for split, most in ((False, 0.01), (True, 0.0005)):
        pack = Pack(lengths, 2048, split=split)
        pack.bind(len(lengths))
        assert 1 - lengths.sum() / (len(listed(pack)) * pack.rows * pack.context) < most


def test_shuffled_rows_are_well_mixed() -> None:
    """Long documents do not fill batches of their own, and each batch has documents of the whole epoch."""
    pack = Pack(np.full(400, 10_000), 500, 8)
    pack.bind(400)
    plans = plans_of(listed(pack), Position(), 1)
    assert np.mean([len(plan.indices) for plan in plans]) > 7.9
    for split in (True, False):
        pack = Pack(lognormal(20_000, 100), 400, 8, split=split)
        pack.bind(20_000)
        plans = plans_of(listed(pack), Position(), 1)
        spread = [np.ptp(plan.indices) for plan in plans[:-1]]
        assert np.mean(spread) > 0.9 * 20_000
        longest = [max(pack.lengths[plan.indices]) for plan in plans]
        assert abs(np.corrcoef(longest, np.arange(len(plans)))[0, 1]) < 0.2


def test_a_batch_reads_few_documents_twice() -> None:
    """A shuffled epoch with documents of a quarter of a row reads less than 5 % of them again."""
    pack = Pack(lognormal(20_000, 100), 400, 8)
    pack.bind(20_000)
    plans = plans_of(listed(pack), Position(), 1)
    assert sum(len(plan.indices) for plan in plans) < 1.05 * 20_000


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pack([1], 0), ValueError, r"Pack\(context=\) must be at least 1, got 0"),
        (lambda: Pack([1], 4, 0), ValueError, r"Pack\(rows=\)"),
        (lambda: Pack([1], 2**20, 2**11), ValueError, "at most 2147483647 tokens, got rows=2048 of context=1048576"),
        (lambda: Pack([1], 4, window=0), ValueError, r"Pack\(window=\)"),
        (lambda: Pack([1], 4, split=1), TypeError, r"Pack\(split=\)"),  # type: ignore[arg-type]
        (lambda: Pack([1], 4, separator="x"), TypeError, r"Pack\(separator=\) must be a number"),  # type: ignore[arg-type]
        (lambda: Pack([1], 4, pad={"a": None}), TypeError, r"Pack\(pad=\) must be a number"),  # type: ignore[dict-item]
        (lambda: Pack([1], 4, split=False, on_oversize="drop"), ValueError, r"Pack\(on_oversize=\)"),  # type: ignore[arg-type]
        (lambda: Pack([1], 4, on_oversize="skip"), ValueError, "split=True"),
        (lambda: Pack([1, 0], 4), ValueError, "at least 1, got 0 for sample 1"),
        (
            lambda: Pack([1, 5], 4, split=False).bind(2),
            ValueError,
            "document 1 has 5 tokens, more than context=4: pass",
        ),
        (
            lambda: Pack([1, 4], 4, split=False, separator=0).bind(2),
            ValueError,
            "document 1 has 5 tokens with its separator, more than context=4",
        ),
        (lambda: Pack([2**31], 4).bind(1), ValueError, "has 2147483648 tokens, more than 2147483647: make several"),
        (lambda: Pack([1], 4).bind(2), ValueError, "1 length for 2 samples"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    """The message has the argument and the value."""
    with pytest.raises(error, match=message):
        make()


def test_a_state_is_of_one_pack() -> None:
    """Every argument that changes the batches counts."""

    def lister(*arguments: Any, **options: Any) -> PlanLister:
        pack = Pack([1, 2, 3], *arguments, **options)
        pack.bind(3)
        return PlanLister(pack, 0, shuffle=True, drop_last=False)

    state = lister(4).state(0)
    lister(4, pad=7).load_state(state)
    for other in (lister(5), lister(4, 2), lister(4, separator=1), lister(4, split=False)):
        with pytest.raises(StateError, match=r"another plan: Pack\(context=4"):
            other.load_state(state)
