"""Bytes in flight."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiofeed.engine.admission import MemoryBudget


def test_the_first_batch_goes_alone_where_nothing_is_known() -> None:
    """Without an estimate there is one batch in flight, whatever the limit."""
    budget = MemoryBudget(1 << 40)
    assert budget.admits(8)
    taken = budget.reserve(8)
    assert not budget.admits(8)
    budget.correct(taken, 800, 8)
    assert budget.admits(8)


def test_one_batch_may_always_proceed() -> None:
    """A batch above the whole limit goes when nothing else is in flight."""
    budget = MemoryBudget(100, bytes_per_sample=1000)
    assert budget.admits(1)
    taken = budget.reserve(1)
    assert not budget.admits(1)
    budget.release(taken)
    assert budget.admits(1)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10_000)), max_size=60), st.integers(1, 20_000))
def test_what_is_reserved_comes_back(batches: list[tuple[int, int]], limit: int) -> None:
    """However estimates were corrected, nothing is left reserved at the end."""
    budget = MemoryBudget(limit)
    held: list[int] = []
    for samples, actual in batches:
        while not budget.admits(samples):
            budget.release(held.pop(0))
        held.append(budget.correct(budget.reserve(samples), actual, samples))
    for taken in held:
        budget.release(taken)
    assert budget.reserved_bytes == 0


def test_what_was_read_counts_before_it_is_decoded() -> None:
    """A batch that turns out larger than estimated keeps others out from the moment its bytes are known."""
    budget = MemoryBudget(100, bytes_per_sample=1.0)
    taken = budget.reserve(10)
    assert budget.at_least(taken, 4) == 10
    assert budget.admits(10)
    taken = budget.at_least(taken, 95)
    assert (taken, budget.reserved_bytes) == (95, 95)
    assert not budget.admits(10)
    budget.release(budget.correct(taken, 195, 10))
    assert budget.reserved_bytes == 0
