"""Epochs that follow one another without a pause, and batches returned as they are finished."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiofeed import Feeder, Limits
from aiofeed.errors import ReadError, StateError
from tests.support.simulated_device import SimulatedDevice
from tests.support.states import edited_state

SECONDS = 10
LIMITS = Limits(prefetch_batches=2, read_concurrency=4, decode_threads=1)
"""At most five batches of two samples are in flight."""


class Watched:
    """A source of n samples; sample i is i. It records reads and decodes, and can block the samples in ``stuck``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads: list[int] = []
        self.decoded = 0
        self.changed = threading.Condition()
        self.broken: Callable[[int, int], bool] = lambda index, times: False
        self.stuck: set[int] = set()
        self._blocked: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        with self.changed:
            self.reads.append(index)
            times = self.reads.count(index) if self.n < 100 else 0
            self.changed.notify_all()
        if self.broken(index, times):
            raise OSError("unreadable")
        if index in self.stuck:
            event = asyncio.Event()
            self._blocked.append((asyncio.get_running_loop(), event))
            await event.wait()
        return b"%d" % index

    def decode(self, data: bytes) -> torch.Tensor:
        with self.changed:
            self.decoded += 1
            self.changed.notify_all()
        return torch.tensor(int(data))

    def unblock(self) -> None:
        """Unblock all samples."""
        self.stuck = set()
        for loop, event in self._blocked:
            loop.call_soon_threadsafe(event.set)
        self._blocked.clear()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), f"reads: {self.reads}"

    def wait_for_read(self, index: int, times: int) -> None:
        """Wait until sample `index` has been read `times` times, that is, in epoch `times - 1`."""
        self.wait_for(lambda: self.reads.count(index) >= times)


MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(source, **options)`: a feeder with batches of two, at most five in flight, closed after the test."""
    made: list[Feeder[Any]] = []

    def new(source: Watched, **options: Any) -> Feeder[Any]:
        options = {"batch_size": 2, "limits": LIMITS, "shard": None, **options}
        made.append(Feeder(source, decode=source.decode, **options))
        return made[-1]

    yield new
    for feeder in made:
        feeder.close()


def flat(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.tolist()]


def shuffled(n: int, epoch: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()


def wait_until_idle(feeder: Feeder[Any], source: Watched) -> None:
    """Wait until the engine has done all that its limits allow."""
    pipeline = feeder._session.pipeline
    assert pipeline is not None
    last = None
    for _ in range(200):
        done = threading.Event()
        pipeline.loop_thread.call(done.set)
        assert done.wait(SECONDS)
        pipeline.loop_thread.decode_pool.submit(int).result(SECONDS)
        state = (len(source.reads), source.decoded)
        if state == last:
            return
        last = state


# --- reading ahead ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"in_order": "samples"}, {"device": SimulatedDevice}])
def test_the_next_epoch_is_read_before_the_last_batch_is_taken(make: MakeFeeder, options: dict[str, Any]) -> None:
    """Inside epochs(n) the next epoch is read while this one is consumed; nothing is read beyond the last."""
    source = Watched(20)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    feeder = make(source, **options)
    for epoch in feeder.epochs(4):
        iterator = iter(feeder)
        got = [next(iterator) for _ in range(9)]
        if epoch < 3:
            source.wait_for_read(0, times=epoch + 2)
        got += iterator
        assert sorted(value for batch in got for value in batch.tolist()) == list(range(20))
    wait_until_idle(feeder, source)
    assert Counter(source.reads) == dict.fromkeys(range(20), 4)


def test_several_short_epochs_are_read_ahead(make: MakeFeeder) -> None:
    """Inside epochs(n), short epochs are read ahead as far as the limits allow."""
    source = Watched(2)
    feeder = make(source)
    for epoch in feeder.epochs(9):
        iterator = iter(feeder)
        source.wait_for_read(1, times=min(epoch + 3, 9))
        assert flat(iterator) == [0, 1]
    wait_until_idle(feeder, source)
    assert len(source.reads) == 18


def test_a_single_pass_reads_nothing_beyond_its_end(make: MakeFeeder) -> None:
    """A single iteration, or epochs(1), reads each sample once."""
    source = Watched(6)
    feeder = make(source)
    list(feeder)
    wait_until_idle(feeder, source)
    assert source.reads == list(range(6))
    other = make(source)
    for _ in other.epochs(1):
        list(other)
        wait_until_idle(other, source)
    assert len(source.reads) == 12


def test_after_a_complete_epoch_the_next_is_read_ahead(make: MakeFeeder) -> None:
    """Without epochs(n), the next epoch is read ahead once an epoch was completed before."""
    source = Watched(20)
    feeder = make(source)
    assert flat(feeder) == list(range(20))
    for epoch in (1, 2, 3):
        iterator = iter(feeder)
        got = flat(next(iterator) for _ in range(9))
        source.wait_for_read(0, times=epoch + 2)
        for batch in iterator:
            got += batch.tolist()
        assert got == list(range(20))


@pytest.mark.parametrize("leave", ["break", "close", "error"])
def test_after_an_incomplete_epoch_nothing_is_read_ahead(make: MakeFeeder, leave: str) -> None:
    """After break, close in mid-epoch or an error, the next epoch is not read ahead."""
    source = Watched(20)
    feeder = make(source)
    list(feeder)
    if leave == "error":
        source.broken = lambda index, times: index == 1
        with pytest.raises(ReadError):
            next(iter(feeder))
        source.broken = lambda index, times: False
    else:
        for _ in feeder:
            break
        if leave == "close":
            feeder.close()
    feeder.close()
    before = len(source.reads)
    assert flat(feeder) == list(range(20))
    wait_until_idle(feeder, source)
    assert len(source.reads) == before + 20


def test_what_is_in_flight_is_bounded_across_epochs(make: MakeFeeder) -> None:
    """Wherever the consumer pauses, also at the end of an epoch, the same number of batches is read and decoded."""
    most = 2 + math.ceil(4 / 2) + 1
    source = Watched(8)
    feeder = make(source)
    taken = 0
    for epoch in feeder.epochs(3):
        for _ in feeder:
            taken += 1
            left = 12 - taken
            source.wait_for(lambda: source.decoded >= 2 * (taken + min(2, left)))  # noqa: B023 - called at once
            wait_until_idle(feeder, source)
            assert source.decoded == 2 * (taken + min(2, left))
            assert len(source.reads) <= 2 * (taken + most)
        assert taken == 4 * (epoch + 1)


def test_memory_bytes_bounds_across_epochs(make: MakeFeeder) -> None:
    """If memory_bytes allows one batch, one is in flight, also across epochs."""
    source = Watched(4)
    feeder = make(source, limits=Limits(memory_bytes=1, prefetch_batches=8))
    taken = 0
    for _ in feeder.epochs(3):
        for _ in feeder:
            taken += 1
            wait_until_idle(feeder, source)
            assert len(source.reads) <= 2 * (taken + 1)
    assert taken == 6


def test_read_ahead_counts_for_its_own_epoch(make: MakeFeeder) -> None:
    """Samples read ahead count in the statistics of the epoch they belong to."""
    source = Watched(8)
    feeder = make(source)
    for epoch in feeder.epochs(3):
        for batch in feeder:
            if batch[0] == 4 and epoch < 2:
                source.wait_for_read(1, times=epoch + 2)
        wait_until_idle(feeder, source)
        seen = feeder.statistics()
        assert (seen.samples, seen.batches, seen.bytes_read) == (8, 4, 8)
        assert feeder.statistics(total=True).samples == 8 * (epoch + 1)
    assert feeder.statistics(total=True).bytes_read == 24


# --- read ahead but not wanted ----------------------------------------------------------------------------------------


def read_ahead(make: MakeFeeder, **options: Any) -> tuple[Feeder[Any], dict[str, Any]]:
    """Return a feeder at the end of epoch 1 with epoch 2 read ahead, and a state in the middle of epoch 0."""
    source = Watched(20)
    feeder = make(source, shuffle=True, **options)
    iterator = iter(feeder)
    next(iterator)
    state = feeder.state_dict()
    for _ in iterator:
        pass
    iterator = iter(feeder)
    for _ in range(9):
        next(iterator)
    source.wait_for(lambda: len(source.reads) > 40)
    next(iterator)
    assert next(iterator, None) is None
    return feeder, state


def test_the_epoch_read_ahead_comes_next(make: MakeFeeder) -> None:
    """The next iteration gives the epoch that was read ahead."""
    feeder, _ = read_ahead(make)
    assert flat(feeder) == shuffled(20, 2)


@pytest.mark.parametrize("epoch", [0, 1, 2, 3, 50])
def test_set_epoch_replaces_the_epoch_read_ahead(make: MakeFeeder, epoch: int) -> None:
    """After set_epoch the chosen epoch comes completely, then the one after it."""
    feeder, _ = read_ahead(make)
    feeder.set_epoch(epoch)
    assert flat(feeder) == shuffled(20, epoch)
    assert flat(feeder) == shuffled(20, epoch + 1)


def test_load_state_dict_replaces_the_epoch_read_ahead(make: MakeFeeder) -> None:
    """After load_state_dict the rest of the loaded epoch comes, then the one after it."""
    feeder, state = read_ahead(make)
    feeder.load_state_dict(state)
    assert flat(feeder) == shuffled(20, 0)[2:]
    assert flat(feeder) == shuffled(20, 1)


def test_close_drops_the_epoch_read_ahead(make: MakeFeeder) -> None:
    """After close the epoch starts again; none of its batches were returned."""
    feeder, _ = read_ahead(make)
    feeder.close()
    assert feeder.state_dict()["epoch"] == 2
    assert flat(feeder) == shuffled(20, 2)


def test_break_in_an_epoch_read_ahead(make: MakeFeeder) -> None:
    """After a break in an epoch that was read ahead, the following epoch is complete."""
    feeder, _ = read_ahead(make)
    for batch in feeder:
        assert batch.tolist() == shuffled(20, 2)[:2]
        break
    assert flat(feeder) == shuffled(20, 3)


def test_iter_twice_in_an_epoch_read_ahead(make: MakeFeeder) -> None:
    """An epoch that was started twice before its first batch is complete and counted once."""
    feeder, _ = read_ahead(make)
    iter(feeder)
    iter(feeder)
    assert flat(feeder) == shuffled(20, 2)
    assert feeder.epoch == 2


def test_an_error_read_ahead_is_raised_in_its_own_epoch(make: MakeFeeder) -> None:
    """This epoch ends normally; the next one raises at its first batch, and the state is its start."""
    source = Watched(8)
    source.broken = lambda index, times: index == 0 and times == 2
    feeder = make(source)
    got = []
    with pytest.raises(ReadError, match="sample 0"):
        for epoch in feeder.epochs(3):
            for batch in feeder:
                got.append((epoch, batch.tolist()))
                if epoch == 0 and len(got) == 3:
                    source.wait_for_read(0, times=2)
    assert got == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5]), (0, [6, 7])]
    state = feeder.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert [flat(feeder) for _ in feeder.epochs(3)] == [list(range(8))] * 2


# --- epochs(n) --------------------------------------------------------------------------------------------------------


def test_epochs_yields_the_numbers(make: MakeFeeder) -> None:
    """epochs(n) yields the remaining numbers below n; each epoch has the order of its number."""
    feeder = make(Watched(6), shuffle=True)
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(3)] == [(e, shuffled(6, e)) for e in range(3)]
    assert list(feeder.epochs(3)) == []
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(4)] == [(3, shuffled(6, 3))]


def test_epochs_says_that_it_goes_on_after_earlier_epochs(make: MakeFeeder, caplog: pytest.LogCaptureFixture) -> None:
    """epochs(n) after earlier epochs of the feeder logs what it yields, and what to write for n more."""
    feeder = make(Watched(6), shuffle=True)
    flat(feeder)
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(3)] == [(e, shuffled(6, e)) for e in (1, 2)]
    assert "feeder.epochs(3) yields 2 epochs" in caplog.text
    assert "write feeder.epochs(4)" in caplog.text
    caplog.clear()
    assert list(feeder.epochs(3)) == []
    assert "feeder.epochs(3) yields no epoch" in caplog.text
    assert "write feeder.epochs(6)" in caplog.text
    caplog.clear()
    feeder.set_epoch(0)
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(1)] == [(0, shuffled(6, 0))]
    assert caplog.text == ""


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("kept", [True, False])
def test_a_look_at_a_batch_does_not_count_for_epochs(
    make: MakeFeeder, caplog: pytest.LogCaptureFixture, looks: int, kept: bool
) -> None:
    """epochs(n) begins with epoch 0 if before it a batch was looked at, and no epoch chosen."""
    feeder = make(Watched(6), shuffle=True)
    for _ in range(looks):
        iterator = iter(feeder)
        next(iterator)
    if not kept:
        del iterator
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(3)] == [(e, shuffled(6, e)) for e in range(3)]
    assert caplog.text == ""


def test_a_look_counts_after_a_loaded_state(make: MakeFeeder) -> None:
    """epochs(n) goes on after the epoch of a loaded state of which a batch was returned."""
    first, feeder = make(Watched(6), shuffle=True), make(Watched(6), shuffle=True)
    list(first)
    feeder.load_state_dict(first.state_dict())
    next(iter(feeder))
    assert list(feeder.epochs(3)) == [2]


async def test_epochs_in_async_code(make: MakeFeeder) -> None:
    """epochs(n) works with `async for`."""
    feeder = make(Watched(6), shuffle=True)
    got = [[value async for batch in feeder for value in batch.tolist()] for _ in feeder.epochs(3)]
    assert got == [shuffled(6, epoch) for epoch in range(3)]
    await feeder.aclose()


def test_epochs_starts_with_the_loaded_one(make: MakeFeeder) -> None:
    """After load_state_dict, epochs(n) starts with the rest of the loaded epoch."""
    first = make(Watched(6), shuffle=True)
    list(first)
    next(iter(first))
    feeder = make(Watched(6), shuffle=True)
    feeder.load_state_dict(first.state_dict())
    got = [(epoch, flat(feeder)) for epoch in feeder.epochs(3)]
    assert got == [(1, shuffled(6, 1)[2:]), (2, shuffled(6, 2))]


def test_epochs_skips_a_loaded_one_in_which_nothing_is_left(make: MakeFeeder) -> None:
    """If nothing is left of the loaded epoch, for example with a larger batch size, epochs(n) starts with the next."""
    first = make(Watched(10), batch_size=4, drop_last=True)
    next(iter(first))
    feeder = make(Watched(10), batch_size=8, drop_last=True)
    feeder.load_state_dict(first.state_dict())
    got = []
    for epoch in feeder.epochs(3):
        assert flat(feeder) == list(range(8))
        got.append((epoch, feeder.epoch))
    assert got == [(1, 1), (2, 2)]


def test_epochs_counts_epochs_that_are_not_completed(make: MakeFeeder) -> None:
    """The numbers go up by one, whatever the loop body iterates."""
    feeder = make(Watched(20), shuffle=True)
    firsts = []
    for epoch in feeder.epochs(4):
        if epoch == 1:
            continue
        if epoch == 2:
            feeder.set_epoch(9)
        firsts.append(next(iter(feeder)).tolist())
    assert firsts == [shuffled(20, epoch)[:2] for epoch in (0, 9, 3)]


def test_after_a_break_in_epochs_nothing_is_read_ahead(make: MakeFeeder) -> None:
    """After a break in the loop over epochs(n), a single iteration reads each sample once."""
    source = Watched(20)
    feeder = make(source)
    for _ in feeder.epochs(5):
        next(iter(feeder))
        break
    feeder.close()
    before = len(source.reads)
    list(feeder)
    wait_until_idle(feeder, source)
    assert len(source.reads) == before + 20


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_epochs_takes_a_positive_int(make: MakeFeeder, n: Any, error: type[Exception]) -> None:
    """epochs() raises at the call, not at the first iteration."""
    with pytest.raises(error, match="n must be"):
        make(Watched(2)).epochs(n)


def test_a_source_without_samples_has_empty_epochs(make: MakeFeeder) -> None:
    """Each epoch of an empty source has no batches and raises no error."""
    feeder = make(Watched(0))
    assert [(epoch, list(feeder)) for epoch in feeder.epochs(3)] == [(0, []), (1, []), (2, [])]


# --- in_order=False ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", [0, 7, 18, 19])
def test_a_stuck_sample_delays_only_its_own_batch(make: MakeFeeder, stuck: int) -> None:
    """With in_order=False all other batches come first, also if the first batch is stuck."""
    source = Watched(20)
    source.stuck = {stuck}
    feeder = make(source, in_order=False)
    iterator = iter(feeder)
    got = [next(iterator).tolist() for _ in range(9)]
    its_batch = [stuck // 2 * 2, stuck // 2 * 2 + 1]
    assert sorted([*got, its_batch]) == [[i, i + 1] for i in range(0, 20, 2)]
    state = feeder.state_dict()
    number = stuck // 2
    assert state["position"] == number * 2
    assert state["handed_out"] == list(range(1, 10 - number))
    source.unblock()
    assert next(iterator).tolist() == its_batch
    assert next(iterator, None) is None
    assert feeder.state_dict()["epoch"] == 1


def test_in_order_a_stuck_sample_delays_all_later_batches(make: MakeFeeder) -> None:
    """With in_order=True the batches returned are always the first ones of the epoch."""
    source = Watched(20)
    source.stuck = {4}
    feeder = make(source)
    iterator = iter(feeder)
    assert flat(next(iterator) for _ in range(2)) == [0, 1, 2, 3]
    source.wait_for_read(5, times=1)
    wait_until_idle(feeder, source)
    assert feeder.statistics().queue_depth == 0
    source.unblock()
    assert flat(iterator) == list(range(4, 20))


@pytest.mark.parametrize("in_order", [False, True])
def test_the_remaining_set_is_exact_after_a_resume(make: MakeFeeder, in_order: bool) -> None:
    """A state saved out of order has holes; after a resume, in order or not, every remaining batch comes once."""
    source = Watched(20)
    source.stuck = {2, 11}
    # Leave room to read beside the two stuck samples.
    first = make(source, in_order=False, shuffle=True, limits=Limits(prefetch_batches=2, read_concurrency=16))
    iterator = iter(first)
    before = [next(iterator).tolist() for _ in range(8)]
    state = first.state_dict()
    source.unblock()
    second = make(Watched(20), in_order=in_order, shuffle=True)
    second.load_state_dict(state)
    assert second.state_dict()["handed_out"] == state["handed_out"]
    order = shuffled(20, 0)
    whole = [order[i : i + 2] for i in range(0, 20, 2)]
    after = []
    for batch in second:
        after.append(batch.tolist())
        if len(after) == 1:
            third = make(Watched(20), in_order=in_order, shuffle=True)
            third.load_state_dict(second.state_dict())
            assert sorted([*before, *after, *(batch.tolist() for batch in third)]) == sorted(whole)
    assert sorted(before + after) == sorted(whole)
    assert sorted(flat(second)) == list(range(20))
    assert second.epoch == 1


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"batch_size": 4}, "batch_size: 2 in the state, 4 here"),
        ({"shard": (0, 4)}, "world_size: 2 in the state, 4 here"),
        ({"shard": (1, 2)}, "rank: 0 in the state, 1 here"),
    ],
)
@pytest.mark.parametrize("holes", [False, True])
def test_another_batch_size_or_world_is_refused(
    make: MakeFeeder, here: dict[str, Any], message: str, holes: bool
) -> None:
    """States of in_order=False store batch numbers, so batch size, world size and rank must not change."""
    source = Watched(20)
    source.stuck = {0} if holes else {4, 8, 12, 16}
    first = make(source, in_order=False, shard=(0, 2))
    next(iter(first))
    source.unblock()
    options = {"in_order": False, "shard": (0, 2), **here}
    state = first.state_dict()
    assert bool(state["handed_out"]) == holes
    with pytest.raises(StateError, match=f"{message}.*in_order=False"):
        make(Watched(20), **options).load_state_dict(state)
    list(first)
    make(Watched(20), **options).load_state_dict(edited_state(state, position=0, handed_out=[]))


def test_no_batch_of_the_next_epoch_comes_before_the_end_of_this_one(make: MakeFeeder) -> None:
    """While a batch of this epoch is missing, batches of the next one are read ahead but not returned."""
    source = Watched(8)
    source.stuck = {2}
    feeder = make(source, in_order=False)
    for epoch in feeder.epochs(2):
        if epoch == 1:
            break
        iterator = iter(feeder)
        assert sorted(flat(next(iterator) for _ in range(3))) == [0, 1, 4, 5, 6, 7]
        source.wait_for_read(0, times=2)
        wait_until_idle(feeder, source)
        assert feeder.statistics().queue_depth == 0
        source.unblock()
        assert flat(iterator) == [2, 3]


# --- leaks ------------------------------------------------------------------------------------------------------------


def test_thousands_of_short_epochs_leak_nothing(make: MakeFeeder) -> None:
    """The numbers of threads and objects do not grow with the number of epochs."""
    source = Watched(2)
    feeder = make(source)
    threads, objects = set(), []
    for epoch in feeder.epochs(1500):
        assert sum(1 for _ in feeder) == 1
        if epoch % 500 == 250:
            threads |= {thread.name for thread in threading.enumerate() if thread.name.startswith("aiofeed")}
            wait_until_idle(feeder, source)
            source.reads.clear()
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[2] - objects[0] < 300
    assert len(threads) <= 4
    assert feeder.statistics(total=True).samples == 3000


@pytest.mark.parametrize("options", [{}, {"sampler": [0, 1]}])
def test_single_short_epochs_leak_nothing(make: MakeFeeder, options: dict[str, Any]) -> None:
    """Without epochs(n), the numbers of threads and objects do not grow either."""
    source = Watched(2)
    feeder = make(source, **options)
    objects = []
    for epoch in range(300):
        assert sum(1 for _ in feeder) == 1
        if epoch % 100 == 50:
            wait_until_idle(feeder, source)
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[2] - objects[0] < 300
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]) <= 8
