"""`FromDataset(threads=N)` limits concurrent calls into a dataset, across feeders and iterators."""

from __future__ import annotations

import gc
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiofeed import FailurePolicy, Feeder, FeedError, FromDataset, Limits
from aiofeed.kernel.runtime.time_limits import JobControl, JobDeadline
from aiofeed.kernel.sources import dataset_slots
from aiofeed.kernel.sources.dataset_slots import DatasetCalls, DatasetSlot
from tests.support.waiting import until

BOUND_S = 20.0
LIMIT_S = 0.1


class Items:
    """A Dataset of 24 numbers that counts the threads inside; the first call for `slow` blocks until `released`."""

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
    """The same with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class WaitLog(logging.Handler):
    """Collects the log lines of calls that wait for a dataset, and calls a function with each."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.then = then
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("waiting for another iterator"):
            self.lines.append(record.getMessage())
            self.then()


@pytest.fixture
def wait_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], WaitLog]]:
    """Adds a `WaitLog`; waits are logged at once instead of after seconds."""
    monkeypatch.setattr(dataset_slots, "LOG_AFTER_S", 0.0)
    handlers: list[WaitLog] = []

    def add(then: Callable[[], object]) -> WaitLog:
        handlers.append(WaitLog(then))
        logging.getLogger("aiofeed").addHandler(handlers[-1])
        return handlers[-1]

    yield add
    for handler in handlers:
        logging.getLogger("aiofeed").removeHandler(handler)


def begin(feeder: Feeder[Any], items: Items) -> None:
    """Start an iterator and drop it while the slow call is in progress."""
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
    """The old iterator is referenced while the next one starts."""
    iterator = iter(feeder)
    next(iterator)
    assert items.reached.wait(BOUND_S)
    feeder.old = iterator  # type: ignore[attr-defined]
    return feeder


def dropped(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    begin(feeder, items)
    source, left = feeder._source, weakref.ref(feeder)
    del feeder
    until(lambda: (gc.collect(), left() is None)[-1])  # a thread may refer to it for a moment
    return Feeder(source, batch_size=4)  # type: ignore[arg-type]


def wrapped_anew(feeder: Feeder[Any], items: Items) -> Feeder[Any]:
    begin(feeder, items)
    feeder._session.close(0.0)
    return Feeder(FromDataset(items, threads=1), batch_size=4)


WAYS = [left_by_break, left_by_error, closed, kept, dropped, wrapped_anew]


@pytest.mark.parametrize("kind", [Items, ManyItems])
@pytest.mark.parametrize("leave", WAYS)
def test_an_iterator_waits_for_the_call_of_the_one_before(
    wait_log: Any, leave: Callable[[Feeder[Any], Items], Feeder[Any]], kind: type[Items]
) -> None:
    """However the iterator before was left, its call in progress counts, and the log names it."""
    items = kind()
    log = wait_log(items.released.set)
    feeder: Feeder[Any] = leave(Feeder(FromDataset(items, threads=1), batch_size=4), items)
    assert [batch.tolist() for batch in feeder] == [list(range(at, at + 4)) for at in range(0, 24, 4)]
    assert items.most == 1
    line = log.lines[0]  # calls of the new iterator may have to wait for each other, too
    assert ("ManyItems[4]" if kind is ManyItems else "Items[5]") in line
    assert "threads=1" in line
    feeder.close()


@pytest.mark.parametrize("cache", ["host", "device"])
def test_a_cache_keeps_to_the_limit(wait_log: Any, cache: Any) -> None:
    """The limit includes the first item, which a cache asks for to learn the layout of samples."""
    items = Items()
    log = wait_log(items.released.set)
    left_by_break(Feeder(items, batch_size=4), items)
    feeder = Feeder(items, batch_size=4, cache=cache)
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert items.most == 1
    assert log.lines
    feeder.close()


def test_waiting_does_not_count_for_the_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """A cache learns the layout of items although another call takes longer than the time limit of an item."""
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


def test_a_second_thread_goes_on_beside_a_stuck_one() -> None:
    """With `threads=2` a stuck call leaves one slot to the next iterator."""
    items = Items(slow=0)
    feeder = Feeder(FromDataset(items, threads=2), batch_size=4, limits=Limits(prefetch_batches=1))
    iterator = iter(feeder)
    assert items.reached.wait(BOUND_S)
    iterator.close()
    assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert not items.returned.is_set()
    assert items.most <= 2
    items.released.set()
    feeder.close()


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_call_that_exceeds_its_time_limit_gives_up_its_slot(action: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An iterator waits for the call of an earlier one no longer than the time limit; the log names the sample."""
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


def test_a_live_iterator_gives_up_the_slot_of_a_stuck_sample(caplog: pytest.LogCaptureFixture) -> None:
    """Its next samples follow, from another thread; the stuck one is reported as a failure and not logged here."""
    items = Items()
    on_error = FailurePolicy("skip", read_timeout_s=LIMIT_S, max_failures=1)
    feeder = Feeder(FromDataset(items, threads=1), batch_size=4, on_error=on_error)
    assert [value for batch in feeder for value in batch.tolist()] == [value for value in range(24) if value != 5]
    assert not items.returned.is_set()
    assert [failure.index for failure in feeder.failures] == [5]
    assert not any("given up" in message for message in caplog.messages)
    items.released.set()
    feeder.close()


@pytest.mark.parametrize("left", [False, True])
def test_the_log_names_a_stuck_sample_only_if_its_iterator_was_left(
    left: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If another feeder's call takes over the slot of a sample, the iterator of that sample reports it."""
    calls = DatasetCalls(FromDataset(Items()))
    control = JobControl(threading.Event(), JobDeadline(LIMIT_S / 100))
    assert control.deadline is not None
    with DatasetSlot(calls, 5, control):
        control.deadline.begin(0)
        if left:
            control.stop.set()
        with DatasetSlot(calls, 6, JobControl(threading.Event())):
            pass
    assert any("Items[5]" in message for message in caplog.messages) == left


def test_a_call_that_was_given_up_asks_for_no_further_sample() -> None:
    """When it returns at last, its thread does not call the dataset again."""
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


def test_a_waiting_iterator_can_be_closed() -> None:
    """Closing a feeder that waits for another one's call takes no longer than usual, and its thread stops waiting."""
    items = Items()
    left_by_break(Feeder(items, batch_size=4), items)
    feeder = Feeder(items, batch_size=4)
    iterator = iter(feeder)
    until(lambda: len(dataset_slots._calls) == 2)
    began = time.monotonic()
    iterator.close()
    feeder.close()
    assert time.monotonic() - began < 4.0  # close() leaves threads behind after 5 s
    until(lambda: len(dataset_slots._calls) == 1)
    items.released.set()


def test_calls_wait_in_order_of_arrival() -> None:
    """A thread that leaves and comes back at once does not overtake one that waits."""
    calls = DatasetCalls(FromDataset(Items(), threads=1))
    control = JobControl(threading.Event())
    order: list[str] = []

    def second() -> None:
        with DatasetSlot(calls, 1, control):
            order.append("second")

    thread = threading.Thread(target=second)
    with DatasetSlot(calls, 0, control):
        thread.start()
        until(lambda: len(dataset_slots._calls) == 2)
    with DatasetSlot(calls, 2, control):
        order.append("first again")
    thread.join()
    assert order == ["second", "first again"]


def test_two_feeders_of_one_dataset_never_call_it_at_the_same_time() -> None:
    """Two live iterators each get all of their batches, and never call the dataset at the same time."""
    items = Items(slow=-1)
    feeders = [Feeder(items, batch_size=4, shuffle=True, seed=seed) for seed in range(2)]
    for _ in range(3):
        for one, other in zip(*feeders, strict=True):
            assert one.shape == other.shape
    assert items.most == 1
    for feeder in feeders:
        feeder.close()


def test_two_feeders_of_one_dataset_never_wait_for_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset's thread makes a call that was passed to it before it waits for that call to end."""
    monkeypatch.setattr(dataset_slots, "POLL_INTERVAL_S", 3600.0)
    feeders = [Feeder(Items(slow=-1), batch_size=1)]
    feeders.append(Feeder(feeders[0]._source, batch_size=1))  # type: ignore[arg-type]
    for _ in range(3):
        for one, other in zip(*feeders, strict=True):
            assert one.tolist() == other.tolist()
    for feeder in feeders:
        feeder.close()


class Centred(Items):
    """Its first item iterates a feeder over all of them."""

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


def test_a_dataset_that_iterates_a_feeder_over_itself_is_refused() -> None:
    """With one thread it would wait for itself; with two it works."""
    with (
        Feeder(Centred(1), batch_size=4) as feeder,
        pytest.raises(FeedError, match=r"Centred iterates a feeder over itself within __getitem__.*threads=2"),
    ):
        next(iter(feeder))
    items = Centred(2)
    with Feeder(FromDataset(items, threads=2), batch_size=4) as feeder:
        assert [value for batch in feeder for value in batch.tolist()] == list(range(24))
    assert items.total == sum(range(24))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    """A call in progress in the parent when it forks does not count in the child."""
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
