"""A ``Dataset`` of tiny items, whose batches the consumer's thread makes from the second epoch on."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

import aiofeed
from aiofeed.kernel.core.errors import CollateError, ReadError, notes_of
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.engine import memory
from aiofeed.kernel.engine.memory import LEAST_BATCHES, SMALL_S, SmallItems
from aiofeed.resident.pipeline import ResidentPipeline
from tests.support.interrupts import Interrupt

SAMPLES, BATCH = 100, 4
THREADS = aiofeed.Limits(prefetch_batches=2)


class Rows(Dataset[Any]):
    """Pairs of a row and a number; remembers the threads that asked, and fails at an index."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.inside = 0
        self.most_inside = 0
        self.bad: int | None = None
        self.error: type[BaseException] = ValueError

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.threads.append(threading.get_ident())
        try:
            if index == self.bad:
                raise self.error("broken")
            return torch.full((3,), float(index)), index
        finally:
            self.inside -= 1


@pytest.fixture(autouse=True)
def from_the_second_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the epochs take."""

    def ended(self: SmallItems, stats: EpochStats) -> None:
        self.in_consumer_thread, self.batch_s = True, 1e-4

    monkeypatch.setattr(SmallItems, "ended", ended)


def in_consumer(feeder: aiofeed.Feeder[Any]) -> bool:
    return isinstance(feeder._session.pipeline, ResidentPipeline)


def labels(batches: Any) -> list[list[int]]:
    return [numbers.tolist() for _, numbers in batches]


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def feeder(rows: Rows) -> Iterator[aiofeed.Feeder[Any]]:
    with aiofeed.Feeder(rows, batch_size=BATCH, shuffle=True, seed=3) as feeder:
        for _ in feeder:
            pass
        yield feeder


def test_the_consumers_thread_calls_the_dataset(feeder: aiofeed.Feeder[Any], rows: Rows) -> None:
    assert threading.get_ident() not in rows.threads
    rows.threads.clear()
    list(feeder)
    assert in_consumer(feeder)
    assert set(rows.threads) == {threading.get_ident()}


def test_epochs_are_those_of_threads(feeder: aiofeed.Feeder[Any]) -> None:
    with aiofeed.Feeder(Rows(), batch_size=BATCH, shuffle=True, seed=3, limits=THREADS) as other:
        for epoch in range(1, 4):
            other.set_epoch(epoch)
            for ours, theirs in zip(feeder, other, strict=True):
                assert type(ours) is type(theirs) is list
                for a, b in zip(ours, theirs, strict=True):
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b)
        assert in_consumer(feeder)
        assert not in_consumer(other)


async def test_async_epochs_are_the_same(feeder: aiofeed.Feeder[Any]) -> None:
    found = [batch async for batch in feeder]
    assert in_consumer(feeder)
    feeder.set_epoch(1)
    assert labels(found) == labels(feeder)


def test_a_state_resumes_exactly(feeder: aiofeed.Feeder[Any]) -> None:
    iterator = iter(feeder)
    for _ in range(7):
        next(iterator)
    state = feeder.state_dict()
    rest = labels(iterator)
    with aiofeed.Feeder(Rows(), batch_size=BATCH, shuffle=True, seed=3) as other:
        other.load_state_dict(state)
        assert labels(other) == rest
    feeder.load_state_dict(state)
    assert labels(feeder) == rest
    assert in_consumer(feeder)


def test_a_batch_is_the_users(feeder: aiofeed.Feeder[Any]) -> None:
    batches = list(feeder)
    for first, _ in batches:
        first.add_(1)
    assert sorted(first[0, 0].item() - 1 for first, _ in batches) == sorted(float(each[0]) for _, each in batches)
    assert len({first.untyped_storage().data_ptr() for first, _ in batches}) == len(batches)


def test_an_sqlite_connection_stays_in_its_thread() -> None:
    class Database(Rows):
        connection: sqlite3.Connection | None = None

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if self.connection is None:
                self.connection = sqlite3.connect(":memory:")
            (found,) = self.connection.execute("SELECT ?", (index,)).fetchone()
            return super().__getitem__(found)

    database = Database()
    with aiofeed.Feeder(database, batch_size=BATCH) as feeder:
        for _ in range(3):
            assert labels(feeder) == [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]
        assert threading.get_ident() not in database.threads


def test_an_error_names_the_sample_after_the_batches_before_it(feeder: aiofeed.Feeder[Any], rows: Rows) -> None:
    order = labels(feeder)
    feeder.set_epoch(1)
    rows.bad = order[9][2]
    found = []
    with pytest.raises(ReadError, match=rf"Rows\[{rows.bad}\].*broken") as caught:
        for batch in feeder:
            found.append(batch)  # noqa: PERF402 - the error is what matters
    assert labels(found) == order[:9]
    assert any("on_error" in note for note in notes_of(caught.value))
    assert [failure.index for failure in feeder.failures] == [rows.bad]
    assert feeder.statistics().failures == 1
    rows.bad = None
    feeder.load_state_dict(feeder.state_dict())
    assert labels(feeder) == order[9:]


def test_samples_that_do_not_fit_together_are_named(feeder: aiofeed.Feeder[Any], rows: Rows) -> None:
    def uneven(self: Rows, index: int) -> Any:
        return torch.zeros(index % 2 + 1), index

    type(rows).__getitem__, usual = uneven, Rows.__getitem__  # type: ignore[method-assign]
    try:
        with pytest.raises(CollateError, match=r"do not fit together.*Rows\["):
            list(feeder)
    finally:
        Rows.__getitem__ = usual  # type: ignore[method-assign]


def test_ctrl_c_in_the_dataset_loses_nothing(feeder: aiofeed.Feeder[Any], rows: Rows) -> None:
    order = labels(feeder)
    feeder.set_epoch(1)
    rows.bad, rows.error = order[9][2], KeyboardInterrupt
    iterator, found = iter(feeder), []
    with pytest.raises(KeyboardInterrupt):
        while True:
            found.append(next(iterator))
    rows.bad = None
    found += iterator
    assert labels(found) == order


def test_a_default_device_and_inference_mode_do_not_reach_the_dataset(feeder: aiofeed.Feeder[Any], rows: Rows) -> None:
    rows.threads.clear()
    with torch.device("meta"):
        first, _ = next(iter(feeder))
    assert first.device.type == "cpu"
    assert threading.get_ident() not in rows.threads
    with torch.inference_mode():
        first, _ = next(iter(feeder))
    assert not first.is_inference()


def test_parts_of_a_dataset_are_called_by_one_thread_at_a_time() -> None:
    rows = Rows()
    epochs = []

    def run(part: Subset[Any]) -> None:
        with aiofeed.Feeder(part, batch_size=BATCH) as feeder:
            epochs.extend([labels(feeder) for _ in range(8)])

    parts = [Subset(rows, range(half, SAMPLES, 2)) for half in range(2)]
    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(epochs) == 16
    assert rows.most_inside == 1


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "skip"},
        {"on_error": aiofeed.FailurePolicy(retries=1)},
        {"on_error": aiofeed.FailurePolicy(read_timeout_s=9.0)},
        {"collate_fn": torch.utils.data.default_collate},
        {"limits": aiofeed.Limits(prefetch_batches=3)},
        {"in_order": "samples"},
        {"cache": "host"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_that_need_threads_keep_them(options: dict[str, Any], rows: Rows) -> None:
    with aiofeed.Feeder(rows, **{"batch_size": BATCH, **options}) as feeder:
        for _ in range(2):
            for _ in feeder:
                pass
    assert threading.get_ident() not in rows.threads


def test_a_dataset_that_threads_may_call_keeps_them(rows: Rows) -> None:
    with aiofeed.Feeder(aiofeed.FromDataset(rows, threads=2), batch_size=BATCH) as feeder:
        for _ in range(2):
            for _ in feeder:
                pass
    assert threading.get_ident() not in rows.threads


def test_setup_is_called_once_in_each_thread(rows: Rows) -> None:
    threads: list[int] = []
    source = aiofeed.FromDataset(rows, setup=lambda dataset: threads.append(threading.get_ident()))
    with aiofeed.Feeder(source, batch_size=BATCH) as feeder:
        for _ in range(3):
            for _ in feeder:
                pass
    assert set(threads) == set(rows.threads)
    assert len(threads) == 2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> SmallItems:
    monkeypatch.undo()
    return SmallItems()


def epoch(batches: int = LEAST_BATCHES, wall_s: float = 1e-4, made_s: float = 9e-5, step_s: float = 1e-5) -> EpochStats:
    """Statistics of an epoch with these seconds per batch."""
    waits = (wall_s - step_s) * batches
    return EpochStats(batches=batches, wall_s=wall_s * batches, stall_s=waits, decode_s=made_s * batches)


def test_the_consumer_makes_batches_after_two_epochs_of_short_steps(small: SmallItems) -> None:
    small.ended(epoch())
    assert not small.in_consumer_thread
    small.ended(epoch())
    assert small.in_consumer_thread
    small.ended(epoch(wall_s=9e-5))
    assert small.in_consumer_thread


@pytest.mark.parametrize(
    "stats",
    [epoch(batches=LEAST_BATCHES - 1), epoch(wall_s=1.01 * SMALL_S, made_s=SMALL_S), epoch(step_s=5e-5)],
    ids=["few batches", "large batches", "steps"],
)
def test_threads_make_the_others(small: SmallItems, stats: EpochStats) -> None:
    small.ended(stats)
    small.ended(stats)
    assert not small.in_consumer_thread


def test_an_epoch_with_steps_comes_between(small: SmallItems) -> None:
    small.ended(epoch())
    small.ended(epoch(step_s=5e-5))
    small.ended(epoch())
    assert not small.in_consumer_thread


def test_threads_that_were_faster_come_back_for_good(small: SmallItems) -> None:
    small.ended(epoch())
    small.ended(epoch())
    small.ended(epoch(wall_s=2e-4))
    assert not small.in_consumer_thread
    small.ended(epoch())
    small.ended(epoch())
    assert not small.in_consumer_thread


@pytest.mark.parametrize("step", [0, 3])
def test_ctrl_c_anywhere_in_next_loses_nothing(feeder: aiofeed.Feeder[Any], step: int) -> None:
    order = labels(feeder)
    for place in range(2000):
        feeder.set_epoch(1)
        iterator = iter(feeder)
        found = [next(iterator) for _ in range(step)]
        with Interrupt(place) as interrupt:
            try:
                found.append(next(iterator))
            except KeyboardInterrupt:
                interrupt.left = -1
        found += iterator
        assert labels(found) == order, place
        if interrupt.left >= 0:
            break
    assert place > (2 if step else 10)  # the fourth batch of a window is ready


def test_threads_go_on_without_the_add_on(small: SmallItems, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, needed_by: str) -> None:
        raise ImportError(f"{needed_by} needs {name}")

    monkeypatch.setattr(memory, "load_addon", missing)
    for _ in range(3):
        small.ended(epoch())
    assert not small.in_consumer_thread
