"""Tests of the memory budget, of the limit on reads and of decode permits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiofeed.kernel.core.failures import FailureCounter, FailurePolicy
from aiofeed.kernel.core.limits import Limits, resolve_limits
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.admission import Admission, MemoryBudget
from aiofeed.kernel.engine.batch import Batch, ReorderBuffer
from aiofeed.kernel.sampling.epochs import EpochEnds, EpochStart


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


def new_batch(number: int) -> Batch:
    return Batch(
        BatchPlan(number, [0], [0], 0), EpochStart(EpochStats()), FailureCounter(FailurePolicy(), 1), reserved=0
    )


def test_no_read_begins_while_batches_take_more_than_the_limit() -> None:
    """Batches that turn out to be larger than the limit keep further reads out; a batch that is alone goes on."""
    limits = resolve_limits(Limits(memory_bytes=100), batch_size=1, cpus=2, free_memory=0)
    budget, buffer = MemoryBudget(100, bytes_per_sample=1.0), ReorderBuffer(in_order=True, prefetch_batches=2)
    admission = Admission(limits, batch_size=1, budget=budget, buffer=buffer)
    buffer.assembling = 2
    reserved = budget.raise_to(budget.reserve(1), 101)
    assert not admission.may_read_on(1)
    buffer.assembling = 1
    assert admission.may_read_on(1)
    buffer.assembling = 2
    budget.release(reserved)
    assert admission.may_read_on(1)


@given(st.lists(st.sampled_from(["add", "end", "read", "grant", "pop", "take", "more"]), max_size=200), st.booleans())
def test_permits_are_those_of_a_search_through_all_batches(steps: list[str], in_order: bool) -> None:
    """Whatever happens, the batches that have a permit are those that a look at every entry would have chosen."""
    buffer = ReorderBuffer(in_order=in_order, prefetch_batches=2)
    model: list[Batch] = []
    number = 0
    for step in steps:
        batches = [entry for entry in buffer.entries if isinstance(entry, Batch)]
        if step == "add":
            buffer.entries.append(new_batch(number))
            buffer.assembling, number = buffer.assembling + 1, number + 1
        elif step == "end":
            buffer.entries.append(EpochEnds())
        elif step == "read" and (unread := [batch for batch in batches if batch.unread]):
            unread[number % len(unread)].unread = 0
        elif step == "grant":
            expected = buffer.prefetch_batches - buffer.permitted - buffer.waiting
            for entry in buffer.entries:
                if expected <= 0 or (isinstance(entry, EpochEnds) and not in_order):
                    break
                if isinstance(entry, Batch) and entry not in model and (in_order or not entry.unread):
                    model.append(entry)
                    expected -= 1
            buffer.grant_permits()
        elif step == "pop":
            if permitted := [batch for batch in batches if batch.decode_permit.is_set()]:
                permitted[number % len(permitted)].complete = True
            if isinstance(buffer.pop(), Batch):
                buffer.waiting += 1
        elif step == "take" and buffer.waiting:
            buffer.waiting -= 1
        elif step == "more":
            buffer.prefetch_batches = number % 7 + 1
        for batch in (entry for entry in buffer.entries if isinstance(entry, Batch)):
            assert batch.decode_permit.is_set() == (batch in model)
