"""Feeders over a ``Stream``: order, ranks, ends of epochs, state, errors, and what they work with."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pickle
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import aiofeed
from aiofeed import FailurePolicy, Feeder, FeedError, Stream
from aiofeed.errors import BatchFailedError, DecodeError, ReadError, StateError
from tests.support.examples import examples
from tests.support.fork_server import ForkServer
from tests.support.interrupts import Interrupt
from tests.support.simulated_device import SimulatedDevice

Batches = list[list[int]]


def numbers(n: int, epoch: int = 0) -> Iterator[int]:
    """The items 1000 * epoch to 1000 * epoch + n - 1."""
    return iter(range(1000 * epoch, 1000 * epoch + n))


async def async_numbers(n: int, epoch: int = 0) -> AsyncIterator[int]:
    for number in numbers(n, epoch):
        yield number


def feeder(source: Any = 10, **options: Any) -> Feeder[Any]:
    """A feeder over a stream, or over the first ``source`` numbers."""
    if isinstance(source, int):
        source = Stream(functools.partial(numbers, source), shuffle_buffer=options.pop("shuffle_buffer", 0))
    return Feeder(source, **{"batch_size": 2, "shard": None, **options})


def epoch_of(source: Any, state: Any = None, **options: Any) -> Batches:
    """The batches of one epoch, from a state on."""
    with feeder(source, **options) as one:
        if state is not None:
            one.load_state_dict(state)
        return [batch.tolist() for batch in one]


def batches_of(rest: list[int], last: int, batch_size: int, world_size: int, rank: int, mode: str) -> Batches:
    """The batches of a rank of the items that are left, by the definition of the shards."""
    if mode == "drop":
        rest = rest[: len(rest) // (batch_size * world_size) * batch_size * world_size]
    elif mode == "pad":
        rest = rest + [last] * (-len(rest) % world_size)
    mine = rest[rank::world_size]
    return [mine[at : at + batch_size] for at in range(0, len(mine), batch_size)]


MODES: dict[str, dict[str, bool]] = {"pad": {}, "drop": {"drop_last": True}, "exact": {"pad": False}}


def make(n: int, shuffle_buffer: int, *, is_async: bool = False) -> Stream:
    return Stream(functools.partial(async_numbers if is_async else numbers, n), shuffle_buffer=shuffle_buffer)


# --- order, ranks and resume, by brute force --------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    n=st.integers(0, 40),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    shuffle_buffer=st.integers(0, 12),
    mode=st.sampled_from(sorted(MODES)),
    is_async=st.booleans(),
)
def test_batches_of_all_ranks(
    n: int, batch_size: int, world_size: int, shuffle_buffer: int, mode: str, is_async: bool
) -> None:
    """Rank r has the positions r, r + R, ... of one order, which permutes groups; padding repeats the last item."""
    source = make(n, shuffle_buffer, is_async=is_async)
    order = [item for [item] in epoch_of(source, batch_size=1)]
    group = max(shuffle_buffer, 1)
    for first in range(0, n, group):
        assert sorted(order[first : first + group]) == list(range(first, min(first + group, n)))
    lengths = set()
    for rank in range(world_size):
        with feeder(source, batch_size=batch_size, shard=(rank, world_size), **MODES[mode]) as one:
            found = [batch.tolist() for batch in one]
            assert found == batches_of(order, order[-1] if order else 0, batch_size, world_size, rank, mode)
            assert one.state_dict()["epoch"] == 1
        lengths.add(len(found))
    assert len(lengths) == 1 or mode == "exact"


@settings(max_examples=40)
@given(
    n=st.integers(1, 30),
    before=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    shuffle_buffer=st.integers(0, 9),
    mode=st.sampled_from(["pad", "drop"]),
    stateful=st.booleans(),
    data=st.data(),
)
def test_a_resume_at_any_position(
    n: int,
    before: tuple[int, int],
    after: tuple[int, int],
    shuffle_buffer: int,
    mode: str,
    stateful: bool,
    data: st.DataObject,
) -> None:
    """With another batch size and world size; the state is saved while a batch is returned, and survives JSON."""
    (batch_size, world_size), (new_size, new_world) = before, after

    def source() -> Stream:
        return Stream(Stateful(n), shuffle_buffer=shuffle_buffer) if stateful else make(n, shuffle_buffer)

    order = [item for [item] in epoch_of(source(), batch_size=1)]
    with feeder(source(), batch_size=batch_size, shard=(0, world_size), **MODES[mode]) as first:
        total = len(batches_of(order, 0, batch_size, world_size, 0, mode))
        count = data.draw(st.integers(0, total))
        iterator = iter(first)
        for _ in range(count):
            next(iterator)
        state = json.loads(json.dumps(first.state_dict()))
    if stateful:
        state["fingerprint"] = Stream(Stateful(n), shuffle_buffer=shuffle_buffer).fingerprint()
    consumed = count * batch_size * world_size
    for rank in range(new_world):
        found = epoch_of(source(), state, batch_size=new_size, shard=(rank, new_world), **MODES[mode])
        left = order[consumed:] if count < total or not count else []
        if left:
            assert found == batches_of(left, order[-1], new_size, new_world, rank, mode)
        else:
            assert state["epoch"] == 1


class Stateful:
    """An iterable with a state, like those of Hugging Face and torchdata; counts the items that it gives.

    ``epochs`` are those that ``set_epoch`` got, and the items of an epoch begin at 1000 times its number.
    """

    def __init__(self, n: int, plain: bool = True) -> None:
        self.n, self.plain = n, plain
        self.at = self.start = self.epoch = self.given = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        while self.at < self.n:
            self.given += 1
            self.at += 1
            yield 1000 * self.epoch + self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at} if self.plain else {"at": (self.at,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


def position_after(source: Any, batches: int, **options: Any) -> dict[str, Any]:
    """The state after some batches of an epoch."""
    with feeder(source, **options) as one:
        iterator = iter(one)
        for _ in range(batches):
            next(iterator)
        return one.state_dict()


@pytest.mark.parametrize("shuffle_buffer", [0, 6])
def test_the_state_of_the_iterable_is_used(shuffle_buffer: int) -> None:
    """No item before the batch, or before its group, is read again, and every position has its state."""
    whole = epoch_of(Stream(Stateful(40), shuffle_buffer=shuffle_buffer))
    for count in range(1, 19):
        state = position_after(Stream(Stateful(40), shuffle_buffer=shuffle_buffer), count)
        resumed = Stateful(40)
        assert epoch_of(Stream(resumed, shuffle_buffer=shuffle_buffer), state) == whole[count:]
        consumed = 2 * count
        needed = 40 - (consumed - consumed % 6 if shuffle_buffer else consumed)
        # The end of the first block has the first state.
        assert resumed.given == (needed if consumed >= max(shuffle_buffer, 2) else 40)


def test_the_state_of_an_epoch_that_was_read_ahead() -> None:
    """Later epochs have states of the iterable, too."""
    with feeder(Stream(Stateful(20))) as one:
        for epoch in one.epochs(4):
            for number, _ in enumerate(one, 1):
                saved = json.loads(one.state_dict()["sampler"])["snapshot"]
                assert number in (10, 0) or (saved["epoch"], saved["item"]) == (epoch, 2 * number)


def test_states_that_the_consumer_has_passed_are_dropped() -> None:
    """A long epoch keeps as many states of the iterable as batches are in flight."""
    with feeder(Stream(Stateful(4000))) as one:
        for _ in one:
            assert len(one._order.known[0]) < 100  # type: ignore[attr-defined]


def test_a_resume_without_a_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The line says how many items are skipped."""
    state = position_after(20, 3)
    with caplog.at_level(logging.INFO, "aiofeed.sources"):
        assert epoch_of(20, state) == epoch_of(20)[3:]
    [line] = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert "6 items are skipped, because it has no state_dict" in line


def test_a_state_that_is_not_plain() -> None:
    """It stops no training; saving it is an error that names the iterable."""
    with feeder(Stream(Stateful(20, plain=False))) as one:
        iterator = iter(one)
        assert one.state_dict()["position"] == 0
        next(iterator)
        with pytest.raises(StateError, match=r"Stream\(Stateful.*plain values"):
            one.state_dict()
        assert sum(1 for _ in iterator) == 9


def test_a_state_survives_torch_load(tmp_path: Path) -> None:
    """With weights_only=True."""
    state = position_after(Stream(Stateful(20)), 4)
    torch.save(state, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert loaded == state
    assert epoch_of(Stream(Stateful(20)), loaded)[0] == [8, 9]


class RefusingState(Stateful):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("at")


def test_states_that_do_not_fit() -> None:
    """Another stream, another buffer, a shorter stream, damage, and an iterable that refuses its state."""
    state = position_after(Stream(Stateful(20)), 4)
    for other in (Stream(Stateful(20), shuffle_buffer=2), make(20, 0)):
        with pytest.raises(StateError, match="fingerprint of the source"):
            epoch_of(other, state)
    with pytest.raises(StateError, match="order: a Stream in the state, shuffle= here"):
        feeder(list(range(20))).load_state_dict(state)
    for damaged in ("7", "{"):
        with pytest.raises(StateError, match="sampler must be the JSON of a dict"):
            epoch_of(Stream(Stateful(20)), {**state, "sampler": damaged})
    for damaged in ('{"shard": 3, "snapshot": null}', '{"shard": null, "snapshot": {"epoch": 0}}'):
        with pytest.raises(StateError, match="state of the stream is damaged"):
            epoch_of(Stream(Stateful(20)), {**state, "sampler": damaged})
    with pytest.raises(StateError, match="state of the stream is damaged"):
        epoch_of(Stream(Stateful(20)), {**state, "sampler": state["sampler"].replace("8", "-8", 1)})
    refusing = Stream(RefusingState(20))
    with pytest.raises(StateError, match="refuses its saved state"):
        epoch_of(refusing, {**state, "fingerprint": refusing.fingerprint()})
    with pytest.raises(StateError, match=r"item 12 of epoch 0, but .* has ended after 7 items"):
        epoch_of(7, position_after(20, 6))


def test_a_resume_where_nothing_is_left() -> None:
    """With drop_last and more ranks: an empty rest of the epoch, then the next one."""
    state = position_after(9, 3, drop_last=True)
    with feeder(9, drop_last=True, shard=(0, 4)) as one:
        one.load_state_dict(state)
        assert [[batch.tolist() for batch in one] for _ in one.epochs(2)] == [[], [[1000, 1004]]]
        one.load_state_dict(state)
        assert list(one) == []
        assert one.state_dict()["epoch"] == 1
        assert [batch.tolist() for batch in one] == [[1000, 1004]]


def test_steps_where_nothing_is_left() -> None:
    """Steps go on with the next epoch."""
    with feeder(9, drop_last=True, shard=(0, 4)) as one:
        one.load_state_dict(position_after(9, 3, drop_last=True))
        assert [batch.tolist() for batch in one.steps(1)] == [[1000, 1004]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("skipped", range(12))
def test_skip_over_the_end_of_an_epoch(skipped: int, drop_last: bool) -> None:
    """With a stream that has a length, skip() goes on with the next epoch, as with other sources."""

    def sized() -> Feeder[Any]:
        return feeder(Stream(functools.partial(numbers, 7), length=7), batch_size=3, drop_last=drop_last)

    with sized() as one:
        expected = [batch.tolist() for _ in range(8) for batch in one]
    with sized() as one:
        one.skip(skipped)
        assert [batch.tolist() for batch in one.steps(2)] == expected[skipped : skipped + 2]
        one.skip(1)
        assert next(iter(one)).tolist() == expected[skipped + 3]


def test_skip_beyond_an_end_that_is_not_known() -> None:
    """The error says that skip() needs the length."""
    with feeder(7, batch_size=3) as one, pytest.raises(StateError, match=r"after 7 items.*skip\(\).*length="):
        one.skip(3)
        list(one)


def test_out_of_order_every_item_comes_once() -> None:
    """Also after a resume with batches that were returned ahead of others."""
    gates = {0: threading.Event(), 4: threading.Event()}

    def decode(item: int) -> int:
        if item in gates:
            assert gates[item].wait(30)
        return item

    options = {"decode": decode, "in_order": False, "limits": aiofeed.Limits(decode_threads=3, prefetch_batches=4)}
    with feeder(20, **options) as one:
        iterator = iter(one)
        first = [next(iterator).tolist() for _ in range(3)]
        state = one.state_dict()
        assert state["handed_out"]
        for gate in gates.values():
            gate.set()
    with feeder(20, **options) as one:
        one.load_state_dict(state)
        rest = [batch.tolist() for batch in one]
        assert one.state_dict()["epoch"] == 1
    assert sorted(item for batch in first + rest for item in batch) == list(range(20))


def test_torchdata_nodes() -> None:
    """A Loader of torchdata resumes by its own state; a node, which is an iterator, is refused."""
    nodes = pytest.importorskip("torchdata.nodes")

    def source() -> Any:
        return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(40)), 2))

    options = {"batch_size": 3, "collate_fn": list}
    with feeder(Stream(source()), **options) as one:
        whole = [list(one) for _ in range(2)]
        assert whole[0] == whole[1]
    state = json.loads(json.dumps(position_after(Stream(source()), 3, **options)))
    assert json.loads(state["sampler"])["snapshot"]["item"] == 9
    with feeder(Stream(source()), **options) as one:
        one.load_state_dict(state)
        assert list(one) == whole[0][3:]
    with pytest.raises(TypeError, match=r"torchdata\.nodes\.Loader"):
        Stream(nodes.IterableWrapper(range(3)))


def test_a_hugging_face_dataset() -> None:
    """A Feeder takes a streaming dataset, which resumes by its own state."""
    datasets = pytest.importorskip("datasets")

    def items(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for item in range(10):
                yield {"x": 10 * shard + item}

    def source() -> Any:
        return datasets.IterableDataset.from_generator(items, gen_kwargs={"shards": [0, 1, 2, 3]})

    def values(batches: Any) -> Batches:
        return [batch["x"].tolist() for batch in batches]

    with feeder(source()) as one:
        whole = values(one)
    state = json.loads(json.dumps(position_after(source(), 7)))
    assert json.loads(state["sampler"])["snapshot"] is not None
    with feeder(source()) as one:
        one.load_state_dict(state)
        assert values(one) == whole[7:]


# --- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_async", [False, True])
def test_epochs(is_async: bool, epochs: int) -> None:
    """A function gets the number of the epoch, with and without epochs(); hundreds of them leave nothing behind."""
    with feeder(make(5, 3, is_async=is_async)) as one:
        for epoch in range(3):
            assert sorted(x for batch in one for x in batch.tolist()) == [1000 * epoch + x for x in range(5)]
        for _ in one.epochs(epochs):
            assert sum(len(batch) for batch in one) == 5
        assert one.epoch == epochs - 1
        assert len(one._session._stream._lengths) < 10  # type: ignore[union-attr]


def test_set_epoch_of_an_iterable() -> None:
    """It is called before each epoch, also before the one of a resumed state, and before one that is read ahead."""
    iterable = Stateful(6)
    with feeder(Stream(iterable)) as one:
        for _ in range(2):
            list(one)
        one.set_epoch(7)
        assert next(iter(one)).tolist() == [7000, 7001]
    epochs = list(dict.fromkeys(iterable.epochs))
    assert [epoch for epoch in epochs if epoch not in (2, 8)] == [0, 1, 7]
    assert epochs == sorted(epochs)


def test_no_order_of_the_shuffle_buffer_repeats() -> None:
    """Seeds, epochs and groups have different permutations."""
    orders = []
    for seed in (0, 1):
        with feeder(60, shuffle_buffer=20, batch_size=20, seed=seed) as one:
            for epoch in one.epochs(2):
                orders += [tuple(x - 1000 * epoch - 20 * at for x in batch.tolist()) for at, batch in enumerate(one)]
    assert len(set(orders)) == 12
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_break_and_a_new_epoch() -> None:
    """The generator that was left is closed in its thread; the next iter() starts the next epoch."""
    threads: list[int] = []

    def items(epoch: int) -> Iterator[int]:
        threads.append(threading.get_ident())
        try:
            while True:
                yield epoch
        finally:
            threads.append(threading.get_ident())

    with feeder(Stream(items)) as one:
        for epoch in range(3):
            for batch in one:
                assert batch.tolist() == [epoch, epoch]
                break
        list(zip(one, range(2), strict=False))
    assert threads[0::2] == threads[1::2]
    assert len(threads) == 8
    assert threading.get_ident() not in threads


def test_two_feeders_of_one_stream() -> None:
    """They are independent."""
    source = make(12, 4)
    with feeder(source) as one, feeder(source) as other:
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(one, other, strict=True)]
    assert pairs == [(batch, batch) for batch in epoch_of(source)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_empty_epoch_is_logged(caplog: pytest.LogCaptureFixture, drop_last: bool) -> None:
    """With the line that other sources have."""
    assert epoch_of(1 if drop_last else 0, drop_last=drop_last) == []
    reason = "1 sample does not fill a batch of 2" if drop_last else "there are no samples"
    assert [f"an epoch has no batches: {reason}" in record.getMessage() for record in caplog.records] == [True]


def test_empty_epochs_that_are_read_ahead() -> None:
    """An epoch without items is followed by one with items."""

    def items(epoch: int) -> Iterator[int]:
        yield from range(0 if epoch in (1, 2) else 3)

    with feeder(Stream(items)) as one:
        assert [[batch.tolist() for batch in one] for _ in one.epochs(5)] == [
            [[0, 1], [2]],
            [],
            [],
            [[0, 1], [2]],
            [[0, 1], [2]],
        ]


class Sized(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, length: int, given: int | None = None) -> None:
        self.length, self.given = length, length if given is None else given

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.given))


def test_len() -> None:
    """Known if the iterable has one; otherwise a TypeError that names the stream."""
    for rank in range(3):
        with feeder(Sized(10), shard=(rank, 3)) as one:
            assert len(one) == len(list(one)) == len(one) == 2
    with feeder(10) as one, pytest.raises(TypeError, match=r"Stream\(numbers.*has no len\(\)"):
        len(one)
    assert len(feeder(Stream(functools.partial(numbers, 10), length=10))) == 5
    assert len(feeder(Stream(Sized(10), length=3))) == 2


def test_an_iterable_that_is_shorter_than_its_length() -> None:
    """All its batches come, then an error with both numbers."""
    with feeder(Sized(10, given=5)) as one:
        iterator = iter(one)
        assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4]]
        with pytest.raises(FeedError, match=r"Stream\(Sized.*ended after 5 items in epoch 0, but its length is 10"):
            next(iterator)


# --- errors -----------------------------------------------------------------------------------------------------------


def broken_at(n: int, epoch: int = 0) -> Iterator[int]:
    yield from range(n)
    raise OSError("connection lost")


async def async_broken_at(n: int, epoch: int = 0) -> AsyncIterator[int]:
    for number in range(n):
        yield number
    raise OSError("connection lost")


@pytest.mark.parametrize("on_error", ["raise", FailurePolicy("skip", max_failures=5)])
@pytest.mark.parametrize("make_iterable", [broken_at, async_broken_at])
@pytest.mark.parametrize("n", [0, 3, 4, 7])
def test_an_error_of_the_iterable(make_iterable: Callable[..., Any], n: int, on_error: Any) -> None:
    """It comes after the complete batches before it, for any on_error; the state points at its batch."""
    source = Stream(functools.partial(make_iterable, n))
    with feeder(source, on_error=on_error) as one:
        iterator = iter(one)
        for number in range(n // 2):
            assert next(iterator).tolist() == [2 * number, 2 * number + 1]
        with pytest.raises(ReadError, match=rf"broken_at\[{n}\].*connection lost") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, OSError)
        assert (caught.value.index, caught.value.stage) == (n, "read")
        state = one.state_dict()
        assert (state["epoch"], state["position"]) == (0, n // 2 * 2)
        with pytest.raises(ReadError):
            list(one)


def test_an_error_of_the_function() -> None:
    """It is raised at the first batch; a result that is not iterable is named."""

    def fails() -> Iterator[int]:
        raise ValueError("no such bucket")

    with pytest.raises(ReadError, match=r"fails\[0\].*no such bucket"):
        epoch_of(Stream(fails))
    with pytest.raises(ReadError, match="must return an iterable or an async iterable, got 3"):
        epoch_of(Stream(lambda: 3))  # type: ignore[arg-type,return-value]


def decode_even(item: int) -> int:
    if item % 5 == 3:
        raise ValueError("broken")
    return item


def test_failing_samples() -> None:
    """Raised with the number of the item; skipped; or replaced by another item of the batch."""
    with pytest.raises(DecodeError, match=r"numbers\[3\]"):
        epoch_of(10, decode=decode_even)
    with feeder(10, decode=decode_even, on_error=FailurePolicy("skip", max_failures=3)) as one:
        assert [batch.tolist() for batch in one] == [[0, 1], [2], [4, 5], [6, 7], [9]]
        assert [(each.index, type(each.index), each.key) for each in one.failures] == [
            (3, int, "numbers[3]"),
            (8, int, "numbers[8]"),
        ]
        assert not hasattr(one.failures[0].error.index, "item")
    replacing = FailurePolicy("replace", max_failures=3)
    assert epoch_of(10, decode=decode_even, on_error=replacing) == [[0, 1], [2, 2], [4, 5], [6, 7], [9, 9]]
    with pytest.raises(BatchFailedError):
        epoch_of(10, decode=decode_even, on_error=replacing, batch_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "host"}, "cache='host'.*leave it out"),
        ({"engine": "process:2"}, 'engine=.process:2.*pass engine="thread"'),
        ({"on_error": "skip"}, r"max_failures=0\.01.*FailurePolicy\(\.\.\., max_failures=100\)"),
        ({"on_error": FailurePolicy(retries=2)}, "cannot be timed or repeated"),
        ({"on_error": FailurePolicy(read_timeout_s=1.0)}, "cannot be timed or repeated"),
        ({"static_batches": True}, "pass drop_last=True"),
    ],
)
def test_arguments_that_exclude_a_stream(options: dict[str, Any], message: str) -> None:
    """The message names argument, value, reason and the way out."""
    with pytest.raises(ValueError, match=message):
        feeder(10, **options)


# --- what it works with -----------------------------------------------------------------------------------------------


def test_an_iterable_dataset() -> None:
    """A Feeder takes it as it is, with and without decode=."""
    assert epoch_of(Sized(4)) == [[0, 1], [2, 3]]
    assert epoch_of(Sized(4), decode=lambda item: item * 2) == [[0, 2], [4, 6]]


def as_dicts(n: int) -> Iterator[dict[str, Any]]:
    for number in range(n):
        yield {"id": number, "text": f"line {number}"}


@pytest.mark.parametrize("shuffle_buffer", [0, 3])
def test_items_that_nothing_decodes(shuffle_buffer: int) -> None:
    """They are collated by default_collate's rules, or given to collate_fn, whose result is the batch itself."""
    stream = Stream(functools.partial(as_dicts, 7), shuffle_buffer=shuffle_buffer)
    made: list[list[dict[str, Any]]] = []

    def collate(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made.append(items)
        return items

    with feeder(stream, batch_size=3, collate_fn=collate) as one, feeder(stream, batch_size=3) as other:
        for batch, collated in zip(one, other, strict=True):
            assert any(batch is items for items in made)
            assert {key: value.tolist() if key == "id" else value for key, value in collated.items()} == {
                key: [item[key] for item in batch] for key in ("id", "text")
            }


def test_items_that_do_not_fit_together_are_named() -> None:
    """The error names the first of them; a batch of one structure may follow one of another."""
    items: list[Any] = [{"a": 1}, {"a": 2}, {"b": 1}, {"b": 2}, {"a": 3}, {"b": 4}]
    with feeder(Stream(items)) as one:
        batches = iter(one)
        assert [list(next(batches)), list(next(batches))] == [["a"], ["b"]]
        with pytest.raises(FeedError, match=r"the key 'a'.*list\[5\]"):
            next(batches)


def test_an_item_that_is_an_exception() -> None:
    """It is that sample's error, wherever it is in the batch."""
    items = [0, ValueError("lost"), 2, 3, 4, ValueError("gone")]
    with pytest.raises(ReadError, match=r"list\[1\].*lost"):
        epoch_of(Stream(items), batch_size=3)
    skipping = FailurePolicy("skip", max_failures=3)
    assert epoch_of(Stream(items), batch_size=3, on_error=skipping) == [[0, 2], [3, 4]]


def test_samples_are_decoded_in_the_decode_threads() -> None:
    """Not in the thread that reads; a decoder with `rng` gets a generator that depends on the position only."""
    names: set[str] = set()

    def decode(item: int, rng: torch.Generator) -> int:
        names.add(threading.current_thread().name)
        return int(torch.randint(1 << 40, (), generator=rng))

    whole = epoch_of(make(12, 5), decode=decode)
    assert all(name.startswith("aiofeed-decode") for name in names)
    state = position_after(make(12, 5), 2, decode=decode)
    assert epoch_of(make(12, 5), state, decode=decode) == whole[2:]


async def test_async_for() -> None:
    """It gives the same batches."""
    async with feeder(make(9, 4, is_async=True)) as one:
        assert [batch.tolist() async for batch in one] == epoch_of(make(9, 4))


def flat(batch: Any) -> list[int]:
    """The items of a batch, of its parts on several devices."""
    return [item for part in (batch if isinstance(batch, tuple) else (batch,)) for item in part.tolist()]


@pytest.mark.parametrize("options", [{"device": [SimulatedDevice(), SimulatedDevice()]}, {"static_batches": True}])
def test_the_same_batches_on_devices(options: dict[str, Any]) -> None:
    """In two epochs, split among devices, and in the same memory."""
    options = {"device": SimulatedDevice(), **options, "drop_last": True}
    with feeder(12, shuffle_buffer=5) as plain, feeder(12, shuffle_buffer=5, **options) as other:
        for epoch in other.epochs(2):
            found = [flat(batch) for batch in other]
            assert found == [batch.tolist() for batch in plain], epoch


@pytest.mark.parametrize("mode", ["broadcast", "shard"])
def test_serve(tmp_path: Path, mode: Any) -> None:
    """A consumer gets all batches; its len() is unknown, too."""
    address = tmp_path / "feed.sock"
    with feeder(9) as one, aiofeed.serve(one, address, mode=mode), aiofeed.attach(address) as consumer:
        with pytest.raises(TypeError, match="has no len"):
            len(consumer)
        for epoch in range(2):
            assert [batch.tolist() for batch in consumer] == [
                [1000 * epoch + item for item in items] for items in ([0, 1], [2, 3], [4, 5], [6, 7], [8])
            ]


def test_a_pickled_feeder() -> None:
    """The copy has the same state and goes on from it."""
    with feeder(Stream(Stateful(20))) as one:
        iterator = iter(one)
        for _ in range(3):
            next(iterator)
        copied = pickle.loads(pickle.dumps(one))
        assert copied.state_dict() == one.state_dict()
        copied.load_state_dict(one.state_dict())
        with copied:
            assert next(iter(copied)).tolist() == [6, 7]


def test_sharded() -> None:
    """The iterable has this rank's items; a state inside an epoch belongs to its rank."""

    def source(rank: int) -> Stream:
        return Stream(functools.partial(numbers, 6 + 2 * rank), sharded=True)

    assert [epoch_of(source(rank), shard=(rank, 2))[-1] for rank in range(2)] == [[4, 5], [6, 7]]
    state = position_after(source(1), 2, shard=(1, 2))
    assert epoch_of(source(1), state, shard=(1, 2)) == [[4, 5], [6, 7]]
    for shard in ((0, 2), (1, 3)):
        with pytest.raises(StateError, match=r"is of \(rank, world size\) \(1, 2\), and this is"):
            epoch_of(source(1), state, shard=shard)
    done = position_after(source(0), 3, shard=(0, 2))
    assert epoch_of(source(1), done, shard=(1, 2))[0] == [1000, 1001]


@pytest.mark.parametrize("is_async", [False, True])
def test_ctrl_c_loses_no_batch(is_async: bool) -> None:
    """At many places in iter() and next(): the state tells which batches were returned, and the rest follows."""
    whole = epoch_of(make(9, 4))
    for place in range(0, 420, 20):
        with feeder(make(9, 4, is_async=is_async)) as one:
            seen: Batches = []
            with contextlib.suppress(KeyboardInterrupt), Interrupt(place):
                for batch in one:
                    seen.append(batch.tolist())
            state = one.state_dict()
            done = len(whole) if state["epoch"] else state["position"] // 2
            assert seen == whole[: len(seen)]
            assert done - len(seen) in (0, 1)  # the interrupt may come between `next` and the loop
            one.load_state_dict(state)
            assert [batch.tolist() for batch in one] == whole[done:] or done == len(whole)


# --- an iterable that blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_close_while_next_blocks(is_async: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """close() gives up after CLOSE_S; an async iterable is cancelled at once."""
    monkeypatch.setattr("aiofeed.streams.stream.CLOSE_S", 0.05)
    release, reached, cancelled = threading.Event(), threading.Event(), threading.Event()

    def blocks() -> Iterator[int]:
        yield from range(3)
        reached.set()
        release.wait(60)
        yield 3

    async def waits() -> AsyncIterator[int]:
        import asyncio

        for number in range(3):
            yield number
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    one = feeder(Stream(waits if is_async else blocks))
    try:
        assert next(iter(one)).tolist() == [0, 1]
        assert reached.wait(30)
        started = time.monotonic()
        one.close()
        assert time.monotonic() - started < 4.0
        assert cancelled.is_set() == is_async
        assert any("is left behind" in record.getMessage() for record in caplog.records) != is_async
    finally:
        release.set()
        one.close()


def test_exit_while_next_blocks(fork_server: ForkServer) -> None:
    """The interpreter ends."""
    program = """
import time, warnings, aiofeed
warnings.simplefilter("error")
def blocks():
    yield from range(3)
    time.sleep(600)
feeder = aiofeed.Feeder(aiofeed.Stream(blocks), batch_size=2)
print(next(iter(feeder)).tolist())
"""
    done = fork_server.run(program, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")
def test_no_timer_fires_after_exit_while_next_blocks(fork_server: ForkServer) -> None:
    """An event loop that waits for the iterable is halted: its timers would crash a finalized interpreter."""
    program = """
import ctypes, sys, time, aiofeed
from aiofeed.kernel.runtime import thread_pool
thread_pool.RESIZE_INTERVAL_S = thread_pool.STARVING_INTERVAL_S = 2.0
def blocks():
    yield from range(3)
    time.sleep(600)
feeder = aiofeed.Feeder(aiofeed.Stream(blocks), batch_size=2)
print(next(iter(feeder)).tolist())
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # called with the exit status, after the interpreter was finalized
sys.exit(2)
"""
    done = fork_server.run(program, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "[0, 1]\n", "")
