"""Tests of the memory budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiofeed.engine.admission import MemoryBudget


def test_without_an_estimate_the_first_batch_runs_alone() -> None:
    """Without an estimate one batch is in flight, whatever the limit."""
    budget = MemoryBudget(1 << 40)
    assert budget.admits(8)
    reserved = budget.reserve(8)
    assert not budget.admits(8)
    budget.correct(reserved, 800, 8)
    assert budget.admits(8)


def test_batches_without_bytes_do_not_run_alone() -> None:
    """Numbers and strings count as no bytes; once a batch of them is complete, others may run beside each other."""
    budget = MemoryBudget(100)
    budget.correct(budget.reserve(4), 0, 4)
    assert budget.known
    assert budget.admits(4)


def test_one_batch_may_always_proceed() -> None:
    """A batch above the whole limit is admitted if nothing else is in flight."""
    budget = MemoryBudget(100, bytes_per_sample=1000)
    assert budget.admits(1)
    reserved = budget.reserve(1)
    assert not budget.admits(1)
    budget.release(reserved)
    assert budget.admits(1)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10_000)), max_size=60), st.integers(1, 20_000))
def test_all_reservations_are_released(batches: list[tuple[int, int]], limit: int) -> None:
    """However estimates are corrected, nothing is reserved after the last release."""
    budget = MemoryBudget(limit)
    reservations: list[int] = []
    for samples, actual in batches:
        while not budget.admits(samples):
            budget.release(reservations.pop(0))
        reservations.append(budget.correct(budget.reserve(samples), actual, samples))
    for reserved in reservations:
        budget.release(reserved)
    assert budget.reserved_bytes == 0


def test_encoded_bytes_count_before_the_batch_is_decoded() -> None:
    """A batch that is larger than estimated keeps other batches out as soon as its encoded size is known."""
    budget = MemoryBudget(100, bytes_per_sample=1.0)
    reserved = budget.reserve(10)
    assert budget.raise_to(reserved, 4) == 10
    assert budget.admits(10)
    reserved = budget.raise_to(reserved, 95)
    assert (reserved, budget.reserved_bytes) == (95, 95)
    assert not budget.admits(10)
    budget.release(budget.correct(reserved, 195, 10))
    assert budget.reserved_bytes == 0
