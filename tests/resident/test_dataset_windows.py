"""A ``Dataset`` of tiny items, whose batches the consumer's thread makes from the second epoch on."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

import aiofeed
from aiofeed.kernel.core.errors import CollateError, ReadError, notes_of
from aiofeed.kernel.core.statistics import EpochStats, new_events
from aiofeed.kernel.feeder import pipeline
from aiofeed.kernel.feeder.pipeline import LEAST_BATCHES, SMALL_S, SmallItems
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

    def ended(self: SmallItems, stats: EpochStats, pipeline: Any) -> None:
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


@dataclass
class Clock:
    """A pretended clock, and the processor time of pretended threads: a feeder's pipeline, as far as epochs need one.

    With ``load``, another program takes the processor for 20 ms in a third of all steps and batches.
    """

    load: bool = False
    streams: bool = True
    now: float = 0.0
    cpu_s: float = 0.0

    def epoch(
        self, step_us: float = 10, batch_us: float = 90, threads_us: float = 130, batches: int = LEAST_BATCHES
    ) -> EpochStats:
        """Let an epoch take place; returns its statistics. Threads make batches beside the steps, the consumer not."""
        stats = EpochStats(asked_at=self.now, batches=batches, events=new_events())
        for number in range(batches):
            late_s = 0.02 if self.load and number % 3 == 0 else 0.0
            parts = {"decode": 0.8 * batch_us, "collate": 0.2 * batch_us} if self.streams else {"wait": batch_us}
            for kind, us in (*parts.items(), ("step", step_us)):
                ended = self.now + us * 1e-6 + late_s
                stats.events.append((kind, "thread", self.now, ended, number, 4, 0))
                self.now = ended
            self.cpu_s += threads_us * 1e-6 * self.streams
        stats.wall_s = self.now - stats.asked_at
        return stats


def ended(small: SmallItems, clock: Clock, *epochs: dict[str, Any]) -> bool:
    """Let epochs end; returns whether the consumer's thread makes the next one."""
    for times in epochs:
        clock.streams = not small.in_consumer_thread
        small.ended(clock.epoch(**times), clock)  # type: ignore[arg-type]
    return small.in_consumer_thread


@pytest.fixture(params=[False, True], ids=["quiet", "loaded"])
def clock(request: pytest.FixtureRequest) -> Clock:
    return Clock(load=request.param)


def test_the_consumer_makes_batches_after_two_epochs_in_which_threads_compute_longer(
    small: SmallItems, clock: Clock
) -> None:
    """Also if other programs take the processor meanwhile: the typical step and the processor time decide."""
    assert not ended(small, clock, {})
    assert ended(small, clock, {})
    assert ended(small, clock, {}, {})
    assert small.reason.startswith("The training thread makes the batches")
    assert "a step takes 10 us, a batch 90 us, and with threads a batch takes 130 us" in small.reason


@pytest.mark.parametrize(
    "times",
    [
        {"batches": LEAST_BATCHES - 1},
        {"batch_us": 1.01e6 * SMALL_S, "threads_us": 2e6 * SMALL_S},
        {"step_us": 50},
        {"step_us": 2000},
    ],
    ids=["few batches", "large batches", "steps", "long steps"],
)
def test_threads_make_the_others(small: SmallItems, clock: Clock, times: dict[str, Any]) -> None:
    assert not ended(small, clock, times, times, times)
    assert not small.reason or small.reason.startswith("Threads make the batches")


def test_an_epoch_with_steps_comes_between(small: SmallItems, clock: Clock) -> None:
    assert not ended(small, clock, {}, {"step_us": 50}, {})


@pytest.mark.parametrize("times", [{"batch_us": 200}, {"step_us": 200}], ids=["slower batches", "longer steps"])
def test_threads_that_are_faster_come_back_for_good(small: SmallItems, clock: Clock, times: dict[str, Any]) -> None:
    assert ended(small, clock, {}, {})
    assert not ended(small, clock, times)
    assert not ended(small, clock, {}, {}, {})


def test_without_events_the_mean_decides(small: SmallItems) -> None:
    """Of ``timeline=False``."""
    clock = Clock()
    for _ in range(2):
        stats = clock.epoch()
        stats.events.clear()
        stats.stall_s, stats.decode_s = 0.95 * stats.wall_s, 0.8 * stats.wall_s
        small.ended(stats, clock)  # type: ignore[arg-type]
    assert small.in_consumer_thread


def test_explain_says_which_thread_makes_the_batches(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds that have decided it."""
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "LEAST_BATCHES", 2)
    with aiofeed.Feeder(rows, batch_size=BATCH) as feeder:
        list(feeder)
        assert re.search(r"(Threads make|thread makes) the batches .* a step takes \d+ us", feeder.explain().verdict)


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

    monkeypatch.setattr(pipeline, "load_addon", missing)
    assert not ended(small, Clock(), {}, {}, {})
