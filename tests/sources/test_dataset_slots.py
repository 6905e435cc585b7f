"""A `Dataset` is called by no more threads at a time than it was declared to bear, whatever was left before."""

from __future__ import annotations

import gc
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiofeed import FailurePolicy, Feeder, FeedError, FromDataset, Limits
from aiofeed.sources.dataset_slots import STUCK_S

BOUND_S = 20.0
LIMIT_S = 0.1


class Items:
    """A Dataset of 24 numbers that counts the threads inside; the first call of `slow` takes until it is let go."""

    def __init__(self, slow: int = 5) -> None:
        self.slow = slow
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.reached = threading.Event()
        self.released = threading.Event()
        self.returned = threading.Event()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            if index == self.slow and not self.reached.is_set():
                self.reached.set()
                assert self.released.wait(BOUND_S)
                self.returned.set()
            return index
        finally:
            with self.lock:
                self.inside -= 1


class ManyItems(Items):
    """The same, asked for several at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Told(logging.Handler):
    """Calls a function with each line that says that a Dataset is waited for."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.then = then
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "at a time" in record.getMessage():
            self.lines.append(record.getMessage())
            self.then()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], Told]]:
    """Waiting is told of at once, and to a function."""
    monkeypatch.setattr("aiofeed.sources.dataset_slots.TELL_S", 0.0)
    handlers: list[Told] = []

    def add(then: Callable[[], object]) -> Told:
        handlers.append(Told(then))
        logging.getLogger("aiofeed").addHandler(handlers[-1])
        return handlers[-1]

    yield add
    for handler in handlers:
        logging.getLogger("aiofeed").removeHandler(handler)


def begin(feeder: Feeder[Any], items: Items) -> None:
    """A pass that is left, its iterator dropped, while the slow call is under way."""
    iterator = iter(feeder)
    next(iterator)
    assert items.reached.wait(BOUND_S)


def left_by_break(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    for _ in feeder:
        assert items.reached.wait(BOUND_S)
        break
    return feeder


def left_by_error(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    with pytest.raises(KeyError):
        for _ in feeder:
            assert items.reached.wait(BOUND_S)
            raise KeyError
    return feeder


def closed(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    begin(feeder, items)
    feeder._session.close(0.0)  # `close()` after its 5 s
    return feeder


def kept(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    """Its iterator is still there when the next begins."""
    iterator = iter(feeder)
    next(iterator)
    assert items.reached.wait(BOUND_S)
    feeder.old = iterator  # type: ignore[attr-defined]
    return feeder


def dropped(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    begin(feeder, items)
    source = feeder._source
    del feeder
    gc.collect()
    return Feeder(source, batch_size=4)  # type: ignore[arg-type]


def wrapped_anew(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    begin(feeder, items)
    feeder._session.close(0.0)
    return Feeder(FromDataset(items, threads=1), batch_size=4)


WAYS = [left_by_break, left_by_error, closed, kept, dropped, wrapped_anew]


@pytest.mark.parametrize("kind", [Items, ManyItems])
@pytest.mark.parametrize("leave", WAYS)
def test_a_pass_begins_once_the_one_that_was_left_is_out(
    told: Any, leave: Callable[[Feeder[Any], Items], Feeder[Any]], kind: type[Items]
) -> None:
    """However it was left: a call that is under way is waited for, and named where that takes long."""
    items = kind()
    told = told(items.released.set)
    feeder: Feeder[Any] = leave(Feeder(FromDataset(items, threads=1), batch_size=4), items)
    assert [batch.tolist() for batch in feeder] == [list(range(at, at + 4)) for at in range(0, 24, 4)]
    assert items.most == 1
    [line] = told.lines
    assert ("ManyItems[4]" if kind is ManyItems else "Items[5]") in line
    assert "1 thread at a time" in line
    feeder.close()


@pytest.mark.parametrize("cache", ["host", "device"])
def test_a_cache_asks_in_its_turn(told: Any, cache: Any) -> None:
    """Also where it asks for a first item, to learn what they look like."""
    items = Items()
    told = told(items.released.set)
    left_by_break(Feeder(items, batch_size=4), items)
    feeder = Feeder(items, batch_size=4, cache=cache)
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert items.most == 1
    assert told.lines
    feeder.close()


def test_a_turn_that_is_waited_for_is_no_items_time(told: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What items look like is learned although another pass is inside for longer than an item may take."""
    items = Items()
    release = threading.Timer(20 * LIMIT_S, items.released.set)
    first = Feeder(items, batch_size=8)
    iterator = iter(first)
    assert items.reached.wait(BOUND_S)
    release.start()
    with Feeder(items, batch_size=8, cache="device", on_error=FailurePolicy(read_timeout_s=LIMIT_S)) as feeder:
        assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert not any("none of the first" in message for message in caplog.messages)
    assert len(next(iterator)) == 8
    first.close()


def test_as_many_threads_as_were_declared(told: Any) -> None:
    """One that is stuck leaves the others theirs."""
    items = Items(slow=0)
    told = told(items.released.set)
    feeder = Feeder(FromDataset(items, threads=2), batch_size=4, limits=Limits(prefetch_batches=1))
    iterator = iter(feeder)
    assert items.reached.wait(BOUND_S)
    iterator.close()
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert not told.lines
    assert not items.returned.is_set()
    assert items.most <= 2
    items.released.set()
    feeder.close()


@pytest.mark.parametrize("kind", [Items, ManyItems])
def test_a_call_that_never_returns_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[Items]
) -> None:
    """Without a time limit it counts as stuck after minutes, and the way out is told."""
    monkeypatch.setattr("aiofeed.sources.dataset_slots.STUCK_S", LIMIT_S)
    items = kind()
    feeder = left_by_break(Feeder(FromDataset(items, threads=1), batch_size=4), items)
    name = "ManyItems[4]" if kind is ManyItems else "Items[5]"
    with pytest.raises(FeedError, match=rf"(?s){name.replace('[', '.')}.*1 thread at a time.*read_timeout_s"):
        next(iter(feeder))
    assert items.most == 1
    items.released.set()
    assert items.returned.wait(BOUND_S)
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert items.most == 1
    feeder.close()


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_time_limit_gives_a_call_up(action: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A pass waits for one that was left no longer than the limit on a sample; then it is given up, by name."""
    items = Items()
    on_error = FailurePolicy(action, read_timeout_s=LIMIT_S)
    feeder = Feeder(FromDataset(items, threads=1), batch_size=4, on_error=on_error)
    begin(feeder, items)
    feeder._session.stop("left")
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert not items.returned.is_set()
    assert any("Items[5]" in message and "given up" in message for message in caplog.messages)
    items.released.set()
    feeder.close()


def test_who_was_given_up_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that comes back late asks for nothing more."""
    items = Items()
    on_error = FailurePolicy(retries=3, read_timeout_s=LIMIT_S)
    feeder = Feeder(FromDataset(items, threads=1), batch_size=4, on_error=on_error)
    begin(feeder, items)
    feeder._session.stop("left")
    iterator = iter(feeder)
    next(iterator)
    items.most = 0
    items.released.set()
    assert items.returned.wait(BOUND_S)
    assert [value for batch in iterator for value in batch.tolist()] == list(range(4, 24))
    feeder.close()


def test_a_pass_that_waits_can_be_left() -> None:
    """Closing a feeder whose pass waits for another's call takes no longer than any other."""
    items = Items()
    left_by_break(Feeder(items, batch_size=4), items)
    feeder = Feeder(items, batch_size=4)
    iterator = iter(feeder)
    began = time.monotonic()
    iterator.close()
    feeder.close()
    assert time.monotonic() - began < 4.0  # of the 5 s after which threads are left behind
    items.released.set()


def test_two_feeders_of_one_dataset_take_turns() -> None:
    """Both live: each gets all of its batches, and the Dataset never sees both."""
    items = Items(slow=-1)
    feeders = [Feeder(items, batch_size=4, shuffle=True, seed=seed) for seed in range(2)]
    for _ in range(3):
        for one, other in zip(*feeders, strict=True):
            assert one.shape == other.shape
    assert items.most == 1
    for feeder in feeders:
        feeder.close()


class Clock:
    """A clock that is set, and counts who looks at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks: list[int] = []

    def perf_counter(self) -> float:
        self.looks.append(threading.get_ident())
        return self.now

    def seen_by_others(self) -> bool:
        """Wait until other threads have looked some times more."""
        before, mine, until = len(self.looks), threading.get_ident(), time.monotonic() + BOUND_S
        while sum(look != mine for look in self.looks[before:]) < 4:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True


class Centred(Items):
    """Its first item asks for all of them, through a feeder."""

    def __init__(self, threads: int) -> None:
        super().__init__(slow=-1)
        self.threads = threads
        self.total: int | None = None

    def __getitem__(self, index: int) -> int:
        if self.total is None:
            self.total = 0
            with Feeder(FromDataset(self, self.threads), batch_size=4) as feeder:
                self.total = sum(int(batch.sum()) for batch in feeder)
        return super().__getitem__(index)


def test_a_dataset_that_iterates_itself_is_told() -> None:
    """It would wait for itself; where it bears the second thread, it need not."""
    with (
        Feeder(Centred(1), batch_size=4) as feeder,
        pytest.raises(FeedError, match=r"Centred iterates a feeder over itself within __getitem__.*threads=2"),
    ):
        next(iter(feeder))
    items = Centred(2)
    with Feeder(FromDataset(items, threads=2), batch_size=4) as feeder:
        assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert items.total == sum(range(24))


def test_a_long_chunk_is_not_stuck_while_its_samples_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is waited for is at one sample after the other: each has its time, however long all of them take."""
    clock = Clock()
    monkeypatch.setattr("aiofeed.sources.dataset_slots.time", clock)
    waited_for: list[bool] = []

    class SlowItems(Items):
        def __getitem__(self, index: int) -> int:
            value = super().__getitem__(index)
            if len(waited_for) < 6:
                clock.now += STUCK_S * 0.6
                waited_for.append(clock.seen_by_others())
            return value

    items = SlowItems(slow=0)
    feeders = [Feeder(items, batch_size=6) for _ in range(2)]
    first = iter(feeders[0])
    assert items.reached.wait(BOUND_S)
    second = iter(feeders[1])
    items.released.set()
    assert next(second).tolist() == next(first).tolist() == [0, 1, 2, 3, 4, 5]
    assert waited_for == [True] * 6
    for feeder in feeders:
        feeder.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_for_nobody() -> None:
    """The thread that is inside when the parent forks is the parent's."""
    items = Items()
    feeder = left_by_break(Feeder(items, batch_size=4), items)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # pragma: no cover - in the child
        os.close(reader)
        try:
            items.inside = items.most = 0
            items.slow = -1
            got = [value for batch in feeder for value in batch.tolist()]
            os.write(writer, b"fine" if got == list(range(24)) else b"wrong")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        assert select.select([answer], [], [], BOUND_S)[0], "the child hangs"
        assert answer.read() == b"fine"
    os.waitpid(child, 0)
    items.released.set()
    feeder.close()
