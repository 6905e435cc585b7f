"""Epochs that follow one another without a bubble, and batches that are handed out as they are finished."""

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

from aiofeed import Feeder, Limits, ReadError, StateError
from aiofeed.testing import SimulatedDevice

SECONDS = 10
LIMITS = Limits(prefetch_batches=2, read_concurrency=4, decode_threads=1)
"""With batches of two at most five are in flight."""


class Watched:
    """A source of n samples; sample i is i. It notes what is read and decoded; one can wait for it, and hold it up."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads: list[int] = []
        self.decoded = 0
        self.changed = threading.Condition()
        self.broken: Callable[[int, int], bool] = lambda index, times: False
        self.stuck: set[int] = set()
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

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
            self._held.append((asyncio.get_running_loop(), event))
            await event.wait()
        return b"%d" % index

    def decode(self, data: bytes) -> torch.Tensor:
        with self.changed:
            self.decoded += 1
            self.changed.notify_all()
        return torch.tensor(int(data))

    def let_go(self) -> None:
        """Let all that is held up go on."""
        self.stuck = set()
        for loop, event in self._held:
            loop.call_soon_threadsafe(event.set)
        self._held.clear()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), f"reads: {self.reads}"

    def wait_for_read(self, index: int, times: int) -> None:
        """Until sample `index` has been read for the `times`-th time: in epoch `times - 1`, counted from 0."""
        self.wait_for(lambda: self.reads.count(index) >= times)


MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(source, **options)`: a feeder of twos with five batches in flight at most, closed after the test."""
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


def settled(feeder: Feeder[Any], source: Watched) -> None:
    """Let the engine do all that it may: its loop has gone round with nothing left to start."""
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


# --- what is read ahead -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"device": SimulatedDevice}])
def test_the_next_epoch_is_begun_before_the_last_batch_is_taken(make: MakeFeeder, options: dict[str, Any]) -> None:
    """Inside epochs(n) the next is being read while this one is consumed, and nothing beyond the last of them."""
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
    settled(feeder, source)
    assert Counter(source.reads) == dict.fromkeys(range(20), 4)


def test_very_short_epochs_are_begun_several_ahead(make: MakeFeeder) -> None:
    """Inside epochs(n), as many as there is room for: a batch is a batch."""
    source = Watched(2)
    feeder = make(source)
    for epoch in feeder.epochs(9):
        iterator = iter(feeder)
        source.wait_for_read(1, times=min(epoch + 3, 9))
        assert flat(iterator) == [0, 1]
    settled(feeder, source)
    assert len(source.reads) == 18


def test_a_single_pass_reads_nothing_beyond_its_end(make: MakeFeeder) -> None:
    """Nor does epochs(1)."""
    source = Watched(6)
    feeder = make(source)
    list(feeder)
    settled(feeder, source)
    assert source.reads == list(range(6))
    other = make(source)
    for _ in other.epochs(1):
        list(other)
        settled(other, source)
    assert len(source.reads) == 12


def test_from_the_second_epoch_in_a_row_on_the_next_is_begun(make: MakeFeeder) -> None:
    """In a plain loop: whoever goes through two epochs will probably want a third."""
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
def test_an_epoch_that_was_not_finished_is_not_one_in_a_row(make: MakeFeeder, leave: str) -> None:
    """After a break, close in mid-epoch or an error it takes a finished epoch again."""
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
    settled(feeder, source)
    assert len(source.reads) == before + 20


def test_what_is_in_flight_is_bounded_across_epochs(make: MakeFeeder) -> None:
    """With the consumer at a standstill anywhere, an epoch's end included: as much is read and decoded as elsewhere."""
    most = 2 + math.ceil(4 / 2) + 1
    source = Watched(8)
    feeder = make(source)
    taken = 0
    for epoch in feeder.epochs(3):
        for _ in feeder:
            taken += 1
            left = 12 - taken
            source.wait_for(lambda: source.decoded >= 2 * (taken + min(2, left)))  # noqa: B023 - called at once
            settled(feeder, source)
            assert source.decoded == 2 * (taken + min(2, left))
            assert len(source.reads) <= 2 * (taken + most)
        assert taken == 4 * (epoch + 1)


def test_memory_bytes_bounds_across_epochs(make: MakeFeeder) -> None:
    """Where one batch is all that fits, one is in flight, of the next epoch as of this one."""
    source = Watched(4)
    feeder = make(source, limits=Limits(memory_bytes=1, prefetch_batches=8))
    taken = 0
    for _ in feeder.epochs(3):
        for _ in feeder:
            taken += 1
            settled(feeder, source)
            assert len(source.reads) <= 2 * (taken + 1)
    assert taken == 6


def test_counters_are_the_epochs_own(make: MakeFeeder) -> None:
    """What was read ahead counts for the epoch it belongs to."""
    source = Watched(8)
    feeder = make(source)
    for epoch in feeder.epochs(3):
        for batch in feeder:
            if batch[0] == 4 and epoch < 2:
                source.wait_for_read(1, times=epoch + 2)
        settled(feeder, source)
        seen = feeder.statistics()
        assert (seen.samples, seen.batches, seen.bytes_read) == (8, 4, 8)
        assert feeder.statistics(total=True).samples == 8 * (epoch + 1)
    assert feeder.statistics(total=True).bytes_read == 24


# --- what was read ahead and is not wanted ----------------------------------------------------------------------------


def begun_ahead(make: MakeFeeder, **options: Any) -> tuple[Feeder[Any], dict[str, Any]]:
    """A feeder at the end of epoch 1, epoch 2 begun; and a state in the middle of epoch 0."""
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


def test_it_is_what_comes_next(make: MakeFeeder) -> None:
    """Nothing said otherwise: the epoch that was begun."""
    feeder, _ = begun_ahead(make)
    assert flat(feeder) == shuffled(20, 2)


@pytest.mark.parametrize("epoch", [0, 1, 2, 3, 50])
def test_set_epoch_says_otherwise(make: MakeFeeder, epoch: int) -> None:
    """The epoch that was chosen, whole, then the one after it."""
    feeder, _ = begun_ahead(make)
    feeder.set_epoch(epoch)
    assert flat(feeder) == shuffled(20, epoch)
    assert flat(feeder) == shuffled(20, epoch + 1)


def test_load_state_dict_says_otherwise(make: MakeFeeder) -> None:
    """The loaded position, then the epoch after it."""
    feeder, state = begun_ahead(make)
    feeder.load_state_dict(state)
    assert flat(feeder) == shuffled(20, 0)[2:]
    assert flat(feeder) == shuffled(20, 1)


def test_close_says_otherwise(make: MakeFeeder) -> None:
    """The epoch begins anew; nothing of it was handed out."""
    feeder, _ = begun_ahead(make)
    feeder.close()
    assert feeder.state_dict()["epoch"] == 2
    assert flat(feeder) == shuffled(20, 2)


def test_break_in_the_next_epoch(make: MakeFeeder) -> None:
    """A break after its first batch, and the one after it is whole."""
    feeder, _ = begun_ahead(make)
    for batch in feeder:
        assert batch.tolist() == shuffled(20, 2)[:2]
        break
    assert flat(feeder) == shuffled(20, 3)


def test_iter_twice_in_the_next_epoch(make: MakeFeeder) -> None:
    """Begun twice before a batch is taken, it is whole and counted once."""
    feeder, _ = begun_ahead(make)
    iter(feeder)
    iter(feeder)
    assert flat(feeder) == shuffled(20, 2)
    assert feeder.epoch == 2


def test_an_error_read_ahead_is_raised_in_its_own_epoch(make: MakeFeeder) -> None:
    """This epoch ends as it should; the next raises at its first batch, and the state is its start."""
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


def test_epochs_gives_the_numbers(make: MakeFeeder) -> None:
    """From 0 to n - 1, the order of each that of its number."""
    feeder = make(Watched(6), shuffle=True)
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(3)] == [(e, shuffled(6, e)) for e in range(3)]
    assert list(feeder.epochs(3)) == []
    assert [(epoch, flat(feeder)) for epoch in feeder.epochs(4)] == [(3, shuffled(6, 3))]


async def test_epochs_in_async_code(make: MakeFeeder) -> None:
    """The same with `async for`."""
    feeder = make(Watched(6), shuffle=True)
    got = [[value async for batch in feeder for value in batch.tolist()] for _ in feeder.epochs(3)]
    assert got == [shuffled(6, epoch) for epoch in range(3)]
    await feeder.aclose()


def test_epochs_begins_with_the_loaded_one(make: MakeFeeder) -> None:
    """The rest of that epoch, then whole ones up to n."""
    first = make(Watched(6), shuffle=True)
    list(first)
    next(iter(first))
    feeder = make(Watched(6), shuffle=True)
    feeder.load_state_dict(first.state_dict())
    got = [(epoch, flat(feeder)) for epoch in feeder.epochs(3)]
    assert got == [(1, shuffled(6, 1)[2:]), (2, shuffled(6, 2))]


def test_epochs_skips_a_loaded_one_in_which_nothing_is_left(make: MakeFeeder) -> None:
    """With drop_last and a larger batch the loaded epoch may be over; the numbers are those of the epochs iterated."""
    first = make(Watched(10), batch_size=4, drop_last=True)
    next(iter(first))
    feeder = make(Watched(10), batch_size=8, drop_last=True)
    feeder.load_state_dict(first.state_dict())
    got = []
    for epoch in feeder.epochs(3):
        assert flat(feeder) == list(range(8))
        got.append((epoch, feeder.epoch))
    assert got == [(1, 1), (2, 2)]


def test_an_epoch_left_early_or_not_iterated_counts(make: MakeFeeder) -> None:
    """The loop's numbers go on by one, whatever its body does."""
    feeder = make(Watched(20), shuffle=True)
    firsts = []
    for epoch in feeder.epochs(4):
        if epoch == 1:
            continue
        if epoch == 2:
            feeder.set_epoch(9)
        firsts.append(next(iter(feeder)).tolist())
    assert firsts == [shuffled(20, epoch)[:2] for epoch in (0, 9, 3)]


def test_after_epochs_is_left_a_pass_is_a_single_one(make: MakeFeeder) -> None:
    """The loop over epochs(n) was left in its first: nothing is read ahead for the others any more."""
    source = Watched(20)
    feeder = make(source)
    for _ in feeder.epochs(5):
        next(iter(feeder))
        break
    feeder.close()
    before = len(source.reads)
    list(feeder)
    settled(feeder, source)
    assert len(source.reads) == before + 20


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_epochs_takes_a_positive_int(make: MakeFeeder, n: Any, error: type[Exception]) -> None:
    """Said at the call, not at the first iteration."""
    with pytest.raises(error, match="n must be"):
        make(Watched(2)).epochs(n)


def test_a_source_without_samples_has_empty_epochs(make: MakeFeeder) -> None:
    """No batch, no error, n times."""
    feeder = make(Watched(0))
    assert [(epoch, list(feeder)) for epoch in feeder.epochs(3)] == [(0, []), (1, []), (2, [])]


# --- as they are finished ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", [0, 7, 18, 19])
def test_a_stuck_sample_holds_up_its_own_batch_only(make: MakeFeeder, stuck: int) -> None:
    """With in_order=False all others come, the first batch being stuck included; then, let go, that one."""
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
    source.let_go()
    assert next(iterator).tolist() == its_batch
    assert next(iterator, None) is None
    assert feeder.state_dict()["epoch"] == 1


def test_in_order_a_stuck_sample_holds_up_all_after_it(make: MakeFeeder) -> None:
    """As promised: what was handed out is always the head of the epoch."""
    source = Watched(20)
    source.stuck = {4}
    feeder = make(source)
    iterator = iter(feeder)
    assert flat(next(iterator) for _ in range(2)) == [0, 1, 2, 3]
    source.wait_for_read(5, times=1)
    settled(feeder, source)
    assert feeder.statistics().queue_depth == 0
    source.let_go()
    assert flat(iterator) == list(range(4, 20))


@pytest.mark.parametrize("in_order", [False, True])
def test_the_remaining_set_is_exact_after_a_resume(make: MakeFeeder, in_order: bool) -> None:
    """Out of order, saved with holes: each batch comes once, bit for bit, and a feeder in order may finish it too."""
    source = Watched(20)
    source.stuck = {2, 11}
    # Room to read beside the two that are stuck.
    first = make(source, in_order=False, shuffle=True, limits=Limits(prefetch_batches=2, read_concurrency=16))
    iterator = iter(first)
    before = [next(iterator).tolist() for _ in range(8)]
    state = first.state_dict()
    source.let_go()
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
    ("here", "told"),
    [
        ({"batch_size": 4}, "batch_size: 2 in the state, 4 here"),
        ({"shard": (0, 4)}, "world_size: 2 in the state, 4 here"),
        ({"shard": (1, 2)}, "rank: 0 in the state, 1 here"),
    ],
)
@pytest.mark.parametrize("holes", [False, True])
def test_restriping_is_refused(make: MakeFeeder, here: dict[str, Any], told: str, holes: bool) -> None:
    """Batches out of order are known by number, and a number means nothing to other batches or ranks."""
    source = Watched(20)
    source.stuck = {0} if holes else {4, 8, 12, 16}
    first = make(source, in_order=False, shard=(0, 2))
    next(iter(first))
    source.let_go()
    options = {"in_order": False, "shard": (0, 2), **here}
    state = first.state_dict()
    assert bool(state["handed_out"]) == holes
    with pytest.raises(StateError, match=f"{told}.*in_order=False"):
        make(Watched(20), **options).load_state_dict(state)
    list(first)
    make(Watched(20), **options).load_state_dict({**state, "position": 0, "handed_out": []})


def test_nothing_of_the_next_epoch_before_the_end_of_this_one(make: MakeFeeder) -> None:
    """The next epoch is read ahead, but not handed out, while a batch of this one is missing."""
    source = Watched(8)
    source.stuck = {2}
    feeder = make(source, in_order=False)
    for epoch in feeder.epochs(2):
        if epoch == 1:
            break
        iterator = iter(feeder)
        assert sorted(flat(next(iterator) for _ in range(3))) == [0, 1, 4, 5, 6, 7]
        source.wait_for_read(0, times=2)
        settled(feeder, source)
        assert feeder.statistics().queue_depth == 0
        source.let_go()
        assert flat(iterator) == [2, 3]


# --- nothing is left behind -------------------------------------------------------------------------------------------


def test_thousands_of_short_epochs_leave_nothing_behind(make: MakeFeeder) -> None:
    """Neither threads nor objects grow with the number of epochs."""
    source = Watched(2)
    feeder = make(source)
    threads, objects = set(), []
    for epoch in feeder.epochs(3000):
        assert sum(1 for _ in feeder) == 1
        if epoch % 1000 == 500:
            threads |= {thread.name for thread in threading.enumerate() if thread.name.startswith("aiofeed")}
            settled(feeder, source)
            source.reads.clear()
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[2] - objects[0] < 300
    assert len(threads) <= 4
    assert feeder.statistics(total=True).samples == 6000


@pytest.mark.parametrize("options", [{}, {"sampler": [0, 1]}])
def test_plain_loops_over_short_epochs_leave_nothing_behind(make: MakeFeeder, options: dict[str, Any]) -> None:
    """The same where each epoch is asked for by itself."""
    source = Watched(2)
    feeder = make(source, **options)
    objects = []
    for epoch in range(300):
        assert sum(1 for _ in feeder) == 1
        if epoch % 100 == 50:
            settled(feeder, source)
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[2] - objects[0] < 300
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")]) <= 8
