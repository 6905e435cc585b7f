"""A dataset with `threads=1` is called by one thread, also by way of its parts and of several feeders."""

from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from aiofeed import FailurePolicy, Feeder, FeedError, FromDataset, Limits
from aiofeed.kernel.runtime.thread_pool import HostedRun
from aiofeed.kernel.sources import dataset_slots
from tests.support.waiting import until

BOUND_S = 20.0
LIMIT_S = 0.1
ANY = -1


class Base(Dataset[int]):
    """24 numbers; counts the threads inside and collects them. The first call for `slow` blocks until `released`."""

    def __init__(self, slow: int | None = None) -> None:
        self.slow = slow
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.threads: set[threading.Thread] = set()
        self.reached = threading.Event()
        self.released = threading.Event()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.threads.add(threading.current_thread())
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            if self.slow in (index, ANY) and not self.reached.is_set():
                self.reached.set()
                assert self.released.wait(BOUND_S)
            return index
        finally:
            with self.lock:
                self.inside -= 1


class Wrapper:
    """A dataset of the items of another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class SlotsWrapper(Wrapper):
    """The same without a `__dict__`."""

    __slots__ = ("dataset",)


class Joined:
    """A dataset of the items of several, by name."""

    def __init__(self, **datasets: Any) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self.datasets.values()))

    def __getitem__(self, index: int) -> Any:
        name = list(self.datasets)[index % len(self.datasets)]
        return self.datasets[name][index // len(self.datasets)]


def halves(base: Base) -> list[Any]:
    return random_split(base, [12, 12])


PARTS: dict[str, Callable[[Base], list[Any]]] = {
    "subsets": lambda base: [Subset(base, range(12)), Subset(base, range(12, 24))],
    "random_split": halves,
    "the whole and a part": lambda base: [base, Subset(base, range(12))],
    "concatenations": lambda base: [ConcatDataset([base, Base()]), ConcatDataset([Base(), base])],
    "wrappers": lambda base: [Wrapper(base), Wrapper(base)],
    "slots": lambda base: [SlotsWrapper(base), SlotsWrapper(base)],
    "names": lambda base: [Joined(a=Base(), b=base), Joined(b=base)],
    "nested": lambda base: [Subset(Wrapper(ConcatDataset([base])), range(24)), Wrapper(Subset(base, range(24)))],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_of_a_dataset_are_not_called_at_the_same_time(
    parts: Callable[[Base], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call by way of one part waits for a call by way of another; one thread makes all calls."""
    monkeypatch.setattr(dataset_slots, "LOG_AFTER_S", 0.0)
    base = Base(slow=ANY)
    monkeypatch.setattr(dataset_slots.log, "warning", lambda *_: base.released.set())
    one, other = (Feeder(part, batch_size=4) for part in parts(base))
    started = iter(one)
    assert base.reached.wait(BOUND_S)
    list(other)
    list(started)
    assert base.most == 1
    assert len(base.threads) == 1
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("threads", "limit", "warned"), [(1, 16, True), (4, 16, True), (16, 16, False), (1, None, False)]
)
def test_more_decode_threads_than_calls_of_a_dataset_are_warned(
    caplog: pytest.LogCaptureFixture, threads: int, limit: int | None, warned: bool
) -> None:
    """Limits(decode_threads=) above the threads of a Dataset logs that it has no effect, and the way out."""
    Feeder(FromDataset(list(range(8)), threads), batch_size=4, limits=Limits(decode_threads=limit)).close()
    assert ("FromDataset(dataset, threads=16)" in caplog.text) == warned


def test_one_thread_calls_a_dataset_for_its_life() -> None:
    """Across epochs, breaks, closed feeders, new feeders and parts."""
    base = Base()
    feeder = Feeder(base, batch_size=4, shuffle=True)
    for _ in feeder.epochs(2):
        assert len(list(feeder)) == 6
    for _ in range(3):
        next(iter(feeder))
    with Feeder(Subset(base, range(12)), batch_size=4) as part:
        for _ in range(2):
            for whole, some in zip(feeder, part, strict=False):
                assert len(whole) == len(some) == 4
    feeder.close()
    assert len(list(Feeder(Wrapper(base), batch_size=4, cache="host"))) == 6
    assert len(base.threads) == 1


class Rows(Dataset[int]):
    """Numbers in an SQLite database, which refuses calls from other threads than the first."""

    connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if self.connection is None:
            self.connection = sqlite3.connect(":memory:", check_same_thread=False)  # for `__del__` only
            self.thread = threading.get_ident()
        assert self.thread == threading.get_ident()
        [number] = self.connection.execute("select ?", (index,)).fetchone()
        return int(number)

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()


def test_a_connection_of_one_thread_works_in_all_epochs() -> None:
    """An SQLite connection that the first call opens serves later epochs and a feeder over a part."""
    rows = Rows()
    with Feeder(rows, batch_size=8) as feeder, Feeder(Subset(rows, range(8)), batch_size=8) as part:
        for _ in range(2):
            assert [number for batch in feeder for number in batch.tolist()] == list(range(24))
            assert [number for batch in part for number in batch.tolist()] == list(range(8))
            next(iter(feeder))


def test_the_thread_ends_with_its_dataset() -> None:
    """It waits for calls while the dataset exists, and ends when it is collected."""
    base = Base()
    with Feeder(base, batch_size=4) as feeder:
        list(feeder)
    [thread] = base.threads
    assert thread.is_alive()
    del base, feeder
    gc.collect()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_a_list_has_one_thread_for_the_life_of_its_source() -> None:
    """Epochs that were left use the same thread, which ends with the source, as a list has no weak references."""

    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "aiofeed-decode-dataset"}

    before, started = running(), set()
    feeder: Feeder[Any] = Feeder(list(range(24)), batch_size=4, shard=None)
    for _ in range(3):
        next(iter(feeder))
        started |= running() - before
    assert len(started) == 1
    feeder.close()
    del feeder
    gc.collect()
    for thread in started:
        thread.join(BOUND_S)
    assert not running() & started


def test_a_feeder_decodes_in_the_datasets_thread() -> None:
    """Calls need no change of thread, after a break during a slow call too, when that has returned."""
    base = Base(slow=4)
    feeder = Feeder(base, batch_size=4, limits=Limits(prefetch_batches=1))
    next(iter(feeder))
    assert base.reached.wait(BOUND_S)
    second = iter(feeder)
    base.released.set()
    list(second)
    until(lambda: len(list(feeder)) == 6 and isinstance(pool_threads(feeder)[0], HostedRun))
    assert len(pool_threads(feeder)) == 1
    feeder.close()


def pool_threads(feeder: Feeder[Any]) -> list[Any]:
    return feeder._session.pipeline.loop_thread.decode_pool._own_threads  # type: ignore[union-attr]


def test_a_stuck_call_of_another_feeder_is_given_up() -> None:
    """A call that exceeds its feeder's time limit does not stop a second feeder that decodes in the same thread."""
    base = Base()
    whole = Feeder(base, batch_size=4, limits=Limits(prefetch_batches=1))
    epoch = iter(whole)
    next(epoch)
    base.slow = 23
    part = Feeder(Subset(base, [23]), batch_size=1, on_error=FailurePolicy("raise", read_timeout_s=LIMIT_S))
    with pytest.raises(FeedError, match="no item within"):
        next(iter(part))
    base.slow = None
    assert [number for batch in epoch for number in batch.tolist()] == list(range(4, 24))
    assert not base.released.is_set()
    base.released.set()
    whole.close()
    part.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_setup_runs_once_in_each_thread_before_its_first_call(threads: int) -> None:
    """Over several epochs; in the thread that calls the dataset."""
    base, ready = Base(), []

    def setup(dataset: Base) -> None:
        assert dataset is base
        ready.append(threading.current_thread())
        assert ready[-1] not in base.threads

    with Feeder(FromDataset(base, threads, setup=setup), batch_size=4) as feeder:
        for _ in feeder.epochs(3):
            list(feeder)
        assert set(ready) >= base.threads
        assert len(ready) == len(set(ready)) <= threads


def test_an_error_of_setup_is_raised_at_the_loop() -> None:
    """As it is, with a note that names the hook."""

    def setup(dataset: Any) -> None:
        raise KeyError("no database")

    with Feeder(FromDataset(Base(), setup=setup), batch_size=4) as feeder, pytest.raises(KeyError) as raised:
        next(iter(feeder))
    assert raised.value.__notes__ == ["in FromDataset(setup=...)"]
    with pytest.raises(TypeError, match=r"FromDataset\(setup=...\)"):
        FromDataset(Base(), setup=3)  # type: ignore[arg-type]


def test_concatenations_in_different_orders_do_not_wait_for_each_other() -> None:
    """Two feeders over the same bases in opposite orders both end."""
    bases = [Base(), Base()]
    first = [Feeder(base, batch_size=4) for base in bases]  # each base has a thread of its own
    for one, other in zip(*first, strict=True):
        assert one.tolist() == other.tolist()
    feeders = [Feeder(ConcatDataset(order), batch_size=4, shuffle=True) for order in (bases, bases[::-1])]
    for _ in range(3):
        for one, other in zip(*feeders, strict=True):
            assert len(one) == len(other) == 4
    assert [base.most for base in bases] == [1, 1]
    for feeder in [*first, *feeders]:
        feeder.close()


def test_a_nested_feeder_over_another_dataset_works() -> None:
    """A dataset may iterate a feeder over a dataset that it does not share."""
    inner = Base()

    class Sums(Base):
        def __getitem__(self, index: int) -> int:
            with Feeder(Subset(inner, [index]), batch_size=1) as feeder:
                return sum(int(batch) for batch in feeder)

    with Feeder(Sums(), batch_size=4) as feeder:
        assert [number for batch in feeder for number in batch.tolist()] == list(range(24))


def test_a_feeder_over_a_part_within_a_call_is_refused() -> None:
    """The call and the part share a base, so the iteration would wait for itself."""

    class Centred(Base):
        def __getitem__(self, index: int) -> int:
            with Feeder(Subset(self, [0]), batch_size=1) as feeder:
                return int(next(iter(feeder)))

    with Feeder(Centred(), batch_size=4) as feeder, pytest.raises(FeedError, match="over itself within __getitem__"):
        next(iter(feeder))
