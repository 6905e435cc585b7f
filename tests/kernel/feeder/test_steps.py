"""``feeder.steps`` and ``feeder.skip``: batches over several epochs, and batches that are left out."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
import weakref
from typing import Any

import pytest
import torch

from aiofeed import Feeder, FeedError, TokenBudget, pad_collate
from aiofeed.errors import IteratorClosedError
from tests.support.simulated_device import SimulatedDevice
from tests.support.states import edited_state

pytestmark = pytest.mark.usefixtures("forked_workers")


class Counted:
    """30 samples, and how often each was read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        return torch.tensor(index)


def new_feeder(**options: Any) -> Feeder[Any]:
    options = {"batch_size": 4, "shuffle": True, "shard": None, **options}
    return Feeder(options.pop("source", None) or Counted(), **options)


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.fixture
def expected() -> list[list[int]]:
    """The batches of eight epochs of eight."""
    with new_feeder() as feeder:
        return [batch for _ in range(8) for batch in lists(feeder)]


@pytest.mark.parametrize("parts", [[40], [1] * 20, [8, 8, 8], [3, 8, 13, 16], [7, 1, 1, 20]])
@pytest.mark.parametrize("options", [{}, {"device": SimulatedDevice()}, {"cache": "host"}, {"engine": "process:2"}])
def test_steps_go_on_where_the_last_ones_ended(
    parts: list[int], options: dict[str, Any], expected: list[list[int]]
) -> None:
    """Over the ends of epochs, whatever the division into calls."""
    with new_feeder(**options) as feeder:
        found = [lists(feeder.steps(part)) for part in parts]
        assert [len(part) for part in found] == parts
        assert sum(found, []) == expected[: sum(parts)]


def test_steps_work_with_async_for(expected: list[list[int]]) -> None:
    """And may change between both kinds of loop."""

    async def collect(feeder: Feeder[Any], steps: int) -> list[list[int]]:
        return [batch.tolist() async for batch in feeder.steps(steps)]

    with new_feeder() as feeder:
        found = asyncio.run(collect(feeder, 11)) + lists(feeder.steps(10)) + asyncio.run(collect(feeder, 3))
        assert found == expected[:24]


def test_a_break_leaves_the_rest_for_the_next_steps(expected: list[list[int]]) -> None:
    """In the middle of an epoch, and after an exception in the loop body."""
    with new_feeder() as feeder:
        found = lists(itertools.islice(feeder.steps(100), 5))
        with pytest.raises(ZeroDivisionError):
            for batch in feeder.steps(100):
                found.append(batch.tolist())
                raise ZeroDivisionError
        found += lists(feeder.steps(10))
        assert found == expected[:16]


def test_steps_go_on_after_close(expected: list[list[int]]) -> None:
    """For a validation that needs the memory."""
    with new_feeder() as feeder:
        found = lists(feeder.steps(5))
        feeder.close()
        assert found + lists(feeder.steps(6)) == expected[:11]


def test_steps_go_on_from_a_loaded_state(expected: list[list[int]]) -> None:
    """In the middle of an epoch, whether or not steps ran before."""
    with new_feeder() as feeder:
        list(feeder.steps(11))
        state = json.loads(json.dumps(feeder.state_dict()))
        list(feeder.steps(9))
        feeder.load_state_dict(state)
        assert lists(feeder.steps(10)) == expected[11:21]
    with new_feeder() as feeder:
        feeder.load_state_dict(state)
        assert lists(feeder.steps(10)) == expected[11:21]


def test_a_loop_over_the_feeder_starts_the_next_epoch(expected: list[list[int]]) -> None:
    """And steps after it go on after that epoch."""
    with new_feeder() as feeder:
        list(feeder.steps(3))
        assert lists(feeder) == expected[8:16]
        assert lists(feeder.steps(2)) == expected[16:18]


@pytest.mark.parametrize("leave", ["break", "open", "close", "failure"])
@pytest.mark.parametrize("options", [{}, {"cache": "host"}, {"in_order": False}])
def test_steps_go_on_where_a_loop_was_left(options: dict[str, Any], leave: str) -> None:
    """Steps after an epoch that a loop has left return its rest, as a resume from the state would."""
    with new_feeder(**options) as feeder, new_feeder(**options) as resumed:
        iterator = iter(feeder)
        found = lists(itertools.islice(iterator, 3))
        if leave == "close":
            feeder.close()
        if leave == "failure":
            with pytest.raises(ZeroDivisionError):
                for batch in iterator:
                    found.append(batch.tolist())
                    raise ZeroDivisionError
        if leave != "open":
            del iterator
        resumed.load_state_dict(feeder.state_dict())
        rest = lists(feeder.steps(12))
        assert sorted(sum((found + rest)[:8], [])) == list(range(30))
        assert rest == lists(resumed.steps(12)) or "in_order" in options
        assert feeder.receipt() == resumed.receipt()


@pytest.mark.parametrize("epoch", [0, 1, 5])
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
def test_set_epoch_after_a_break_chooses_the_epoch_of_steps(
    epoch: int, close: bool, stepped: bool, expected: list[list[int]]
) -> None:
    """Of steps and of a loop alike; until then the state has the position that was reached."""
    with new_feeder() as feeder:
        for _ in feeder.steps(3) if stepped else itertools.islice(feeder, 3):
            pass
        if close:
            feeder.close()
        feeder.set_epoch(epoch)
        state = feeder.state_dict()
        assert (state["epoch"], state["position"]) == (0, 12)
        first = 3 if epoch == 0 and stepped and not close else 8 * epoch
        assert lists(feeder.steps(2)) == expected[first : first + 2]


def test_the_next_epoch_is_read_before_this_one_ends() -> None:
    """All but the last batch of the first epoch are taken, and samples of the second are read."""
    source = Counted()
    second = threading.Event()
    original = source.__getitem__

    class Watched(Counted):
        def __getitem__(self, index: int) -> torch.Tensor:
            if len(source.reads) >= 30:
                second.set()
            return original(index)

    with new_feeder(source=Watched()) as feeder:
        batches = iter(feeder.steps(10))
        list(itertools.islice(batches, 7))
        assert second.wait(10)
        assert len(list(batches)) == 3


def test_an_iterator_of_older_steps_is_closed_by_a_new_epoch() -> None:
    """As for two iterators of a feeder."""
    with new_feeder() as feeder:
        older = iter(feeder.steps(10))
        next(older)
        iter(feeder)
        with pytest.raises(IteratorClosedError):
            next(older)


def test_a_feeder_dropped_within_steps_is_freed() -> None:
    """Without the garbage collector."""
    gc.disable()
    try:
        feeder = new_feeder()
        session = weakref.ref(feeder._session)
        batches = iter(feeder.steps(10))
        next(batches)
        del batches, feeder
        assert session() is None
    finally:
        gc.enable()


def test_steps_have_a_length_and_check_it() -> None:
    """At least one."""
    with new_feeder() as feeder:
        assert len(feeder.steps(12)) == 12
        for wrong in (0, -1, True, 2.0, "3"):
            with pytest.raises((TypeError, ValueError), match="n must be"):
                feeder.steps(wrong)  # type: ignore[arg-type]


def test_steps_over_no_batches_are_an_error() -> None:
    """Instead of an endless loop."""
    with new_feeder(batch_size=100, drop_last=True) as feeder, pytest.raises(FeedError, match="no batches"):
        list(feeder.steps(1))


@pytest.mark.parametrize("skipped", [0, 1, 4, 5, 6, 20])
@pytest.mark.parametrize("options", [{}, {"sampler": range(30)}, {"drop_last": True}])
def test_skipped_batches_are_neither_read_nor_handed_out(skipped: int, options: dict[str, Any]) -> None:
    """Over the end of the epoch, too."""
    options = {"shuffle": "sampler" not in options, **options}
    with new_feeder(**options) as feeder:
        expected = lists(feeder.steps(40))
    source = Counted()
    with new_feeder(source=source, **options) as feeder:
        list(feeder.steps(3))
        feeder.close()
        source.reads.clear()
        feeder.skip(skipped)
        found = lists(feeder.steps(4))
        assert found == expected[3 + skipped :][:4]
        assert feeder.state_dict()["epoch"] == (3 + skipped + 4) // len(feeder)


def test_skip_after_a_loaded_state_counts_from_it() -> None:
    """And the state then has the new position."""
    with new_feeder() as feeder:
        expected = lists(feeder.steps(16))
    with new_feeder() as feeder:
        list(feeder.steps(2))
        state = feeder.state_dict()
        list(feeder.steps(4))
        feeder.load_state_dict(state)
        feeder.skip(3)
        assert feeder.state_dict()["position"] == 20
        assert lists(feeder) == expected[5:8]


def test_skip_out_of_order_leaves_out_batches_that_were_not_handed_out() -> None:
    """Those returned ahead of their turn are not counted."""
    with new_feeder(shuffle=False, in_order=False) as feeder:
        state = edited_state(feeder.state_dict(), position=4, handed_out=[1, 3])
        feeder.load_state_dict(state)
        feeder.skip(2)  # the batches 1 and 3 of the epoch; 2 and 4 were returned
        assert sorted(lists(feeder)) == [[20, 21, 22, 23], [24, 25, 26, 27], [28, 29]]


def test_skip_within_a_plan() -> None:
    """Batches of a plan are counted, over the end of the epoch, too."""
    lengths = [1 + index % 7 for index in range(30)]

    class Texts(Counted):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((lengths[index],), index)

    def plan() -> Feeder[Any]:
        budget = TokenBudget(lengths, 20, window=8)
        return new_feeder(source=Texts(), batch_size=budget, collate_fn=pad_collate(-1))

    with plan() as feeder:
        expected = [batch.tolist() for _ in range(3) for batch, _ in feeder]
    for skipped in (2, len(expected) // 2):
        with plan() as feeder:
            feeder.skip(skipped)
            assert [batch.tolist() for batch, _ in feeder.steps(3)] == expected[skipped : skipped + 3]


def test_skip_lists_the_epochs_of_a_sampler_as_an_iteration_does() -> None:
    """Epochs that follow from a generator's state are those of a feeder that reads all batches."""

    def sampled() -> Feeder[Any]:
        generator = torch.Generator().manual_seed(1)
        return new_feeder(shuffle=False, sampler=torch.utils.data.RandomSampler(range(30), generator=generator))

    with sampled() as feeder:
        expected = lists(feeder.steps(40))
    for read, skipped in ((0, 3), (3, 2), (3, 5), (3, 20), (8, 1), (8, 8)):
        with sampled() as feeder:
            list(feeder.steps(read)) if read else None
            feeder.skip(skipped)
            assert lists(feeder.steps(12)) == expected[read + skipped :][:12]


def test_skip_needs_a_number_and_batches() -> None:
    """Otherwise the error names the argument."""
    with new_feeder() as feeder, pytest.raises(ValueError, match="n must be"):
        feeder.skip(-1)
    with new_feeder(batch_size=100, drop_last=True) as feeder, pytest.raises(ValueError, match="no batches"):
        feeder.skip(1)
