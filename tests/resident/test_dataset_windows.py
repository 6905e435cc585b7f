"""A ``Dataset`` of tiny items, whose batches the consumer's thread makes after some that threads have made."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

import aiofeed
from aiofeed.kernel.core.errors import CollateError, ReadError, notes_of
from aiofeed.kernel.core.statistics import EpochStats, new_events
from aiofeed.kernel.feeder import small_items
from aiofeed.kernel.feeder.small_items import LEAST_BATCHES, SMALL_S, WARM_BATCHES, SmallItems
from aiofeed.kernel.runtime.queue import EndOfEpoch, ReadyBatch
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

    def changes(self: SmallItems, item: ReadyBatch, stats: EpochStats, pipeline: Any) -> bool:
        self.in_consumer_thread, self.batch_s = stats.batches == SAMPLES // BATCH - 1 or self.in_consumer_thread, 1e-4
        return False

    monkeypatch.setattr(SmallItems, "changes", changes)


def change_at(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[int]:
    """Have another pipeline go on as soon as possible after these batches of all epochs; returns those of them."""
    monkeypatch.setattr("aiofeed.kernel.engine.chunks.TOGETHER_MOST", 1)  # threads are few batches ahead
    returned, changed, due = [0], list[int](), list(numbers)

    def changes(self: SmallItems, item: ReadyBatch, stats: EpochStats, pipeline: Any) -> bool:
        returned[0] += 1 + item.followers
        if not due or returned[0] <= due[0] or pipeline.streams is self.in_consumer_thread:
            return False
        # Windows have one batch at first, and five when the consumer's thread makes batches again.
        self.in_consumer_thread, self.batch_s = not self.in_consumer_thread, 1e-4 if changed else 1e-3
        changed.append(due.pop(0))
        return True

    monkeypatch.setattr(SmallItems, "changes", changes)
    return changed


class Dicts(Rows):
    """A dict of tensors, numbers and texts."""

    def __getitem__(self, index: int) -> Any:
        row, number = super().__getitem__(index)
        return {"row": row, "number": number, "text": str(index)}


class Large(Rows):
    """Tensors that are copied into their rows as they arrive."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((9000,), float(super().__getitem__(index)[1]))


class Together(Rows):
    """Several items in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def plain(batch: Any) -> Any:
    """Return a batch as lists, with the types of its parts."""
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    if isinstance(batch, list):
        return [plain(part) for part in batch]
    return (str(batch.dtype), batch.tolist()) if isinstance(batch, torch.Tensor) else batch


def trace(
    dataset: Dataset[Any], epochs: int = 2, state: Any = None, take: int | None = None, **options: Any
) -> list[Any]:
    """Return the batches of some epochs, each with the state after it; of the last one ``take`` batches only."""
    found = []
    with aiofeed.Feeder(dataset, **{"batch_size": BATCH, "seed": 3, **options}) as feeder:
        if state is not None:
            feeder.load_state_dict(state)
        for epoch in range(epochs):
            for number, batch in enumerate(feeder, 1):
                found.append((plain(batch), feeder.state_dict()))
                if epoch == epochs - 1 and number == take:
                    break
        found.append(feeder.state_dict())
    return found


def in_consumer(feeder: aiofeed.Feeder[Any]) -> bool:
    return isinstance(feeder._session.pipeline, ResidentPipeline)


def ctrl_c_in_next(iterator: Iterator[Any], place: int, found: list[Any]) -> bool:
    """Append the rest of an epoch, with Ctrl-C at a place in the next call of ``next``; whether there is the place."""
    with Interrupt(place) as interrupt:
        try:
            found.append(next(iterator))
        except KeyboardInterrupt:
            interrupt.left = -1
    found += iterator
    return interrupt.left < 0


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


BATCHES = SAMPLES // BATCH


@pytest.mark.parametrize("number", range(0, BATCHES + 1, 3))
@pytest.mark.parametrize("dataset", [Rows, Dicts, Large, Together])
def test_a_change_of_threads_changes_no_batch_state_or_random_number(
    dataset: Callable[[], Rows], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any batch: to the consumer's thread, and back after any number of batches."""
    before = torch.get_rng_state()
    expected = trace(dataset(), shuffle=True, limits=THREADS)
    rows = dataset()
    changed = change_at(monkeypatch, number, number + 7)
    assert trace(rows, shuffle=True) == expected
    assert changed == [number, number + 7]
    assert len({thread == threading.get_ident() for thread in rows.threads}) == 2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number", range(BATCHES))
def test_a_sample_is_asked_for_once_however_threads_change(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads have made before the change is returned, and nothing is made twice."""
    asked: list[int] = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            asked.append(index)
            return super().__getitem__(index)

    change_at(monkeypatch, number)
    with aiofeed.Feeder(Counted(), batch_size=BATCH) as feeder:
        assert labels(feeder) == [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]
    assert asked == list(range(SAMPLES))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7, "shuffle": "keyed"},
        {"batch_size": 7, "drop_last": True, "shuffle": True, "shard": (1, 3)},
        {"batch_size": 7, "shuffle": True, "shard": (0, 3), "pad": False},
        {"sampler": list(range(0, SAMPLES, 2))},
        {"weights": [1.0 + at % 5 for at in range(SAMPLES)]},
        {"exclude": [3, 4, 50]},
        {"in_order": False},
        {"transform": lambda batch: [batch[0] + 1, batch[1]]},
        {"timeline": False},
        {"batch_size": 1, "sampler": [5, 3, 3, 1] * 20},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_change_of_threads_keeps_every_order(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the second epoch, which threads may have begun ahead, and for the rest of an epoch that is left."""
    expected = trace(Rows(), 3, take=3, limits=THREADS, **options)
    for number in (0, 1, 5, 12):
        change_at(monkeypatch, number, number + 3, number + 11)
        assert trace(Rows(), 3, take=3, **options) == expected


@pytest.mark.parametrize("number", range(0, BATCHES, 4))
def test_a_resumed_epoch_changes_threads_exactly(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after each batch resumes, on a feeder that changes threads after another batch."""
    expected = trace(Rows(), 1, shuffle=True, limits=THREADS)
    for at in (0, 6, 20, 23):
        changed = change_at(monkeypatch, number)
        found = trace(Rows(), 1, state=expected[at][1], shuffle=True)
        assert [batch for batch, _ in found[:-1]] == [batch for batch, _ in expected[at + 1 : -1]]
        assert found[-1] == expected[-1]
        assert changed == [number] * (number < BATCHES - at - 1) or number > BATCHES - at - 4


@pytest.mark.parametrize("number", [0, 5, BATCHES - 1])
async def test_async_iteration_changes_threads(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch, as ``for`` does."""
    change_at(monkeypatch, number, number + 4)
    with aiofeed.Feeder(Rows(), batch_size=BATCH) as feeder:
        found = [batch async for batch in feeder]
        assert labels(found) == [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]


def test_steps_and_endless_epochs_change_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of steps, over the borders of epochs."""
    expected = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)] * 3
    for number in (3, BATCHES - 1, BATCHES, 2 * BATCHES - 2):
        change_at(monkeypatch, number, number + 9)
        with aiofeed.Feeder(Rows(), batch_size=BATCH) as feeder:
            assert labels([*feeder.steps(30), *feeder.steps(45)]) == expected
        change_at(monkeypatch, number, number + 9)
        with aiofeed.Feeder(Rows(), batch_size=BATCH) as feeder:
            assert labels(batch for _ in feeder.epochs(3) for batch in feeder) == expected


@pytest.mark.parametrize("number", [4, 9])
def test_an_error_after_a_change_names_the_sample(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the batches before it, with the state of its batch."""
    rows = Rows()
    rows.bad = 14 * BATCH + 1
    change_at(monkeypatch, number)
    with aiofeed.Feeder(rows, batch_size=BATCH) as feeder:
        found = []
        with pytest.raises(ReadError, match=r"Rows\[57\].*broken"):
            for batch in feeder:
                found.append(batch)  # noqa: PERF402 - the error is what matters
        assert len(found) == 14
        rows.bad = None
        feeder.load_state_dict(feeder.state_dict())
        assert labels(feeder) == [list(range(at, at + BATCH)) for at in range(14 * BATCH, SAMPLES, BATCH)]


@pytest.mark.parametrize("rest", [pytest.param(rest, marks=[pytest.mark.slow] * (rest > 0)) for rest in range(16)])
def test_ctrl_c_anywhere_in_a_change_loses_nothing(rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of ``next`` goes on."""
    for place in range(rest, 8000, 16):
        change_at(monkeypatch, 2)
        with aiofeed.Feeder(Rows(), batch_size=BATCH) as feeder:
            iterator, found, queue = iter(feeder), [], feeder._session.delivery.queue  # type: ignore[union-attr]
            while not isinstance(queue.peek(), EndOfEpoch):
                found.append(next(iterator))
            reached = ctrl_c_in_next(iterator, place, found)
            assert labels(found) == [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)], place
            assert in_consumer(feeder)
        if not reached:
            break
    assert place > 50


def test_a_feeder_that_is_closed_in_a_change_gives_no_more_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another thread closes it before the pipeline that goes on exists, or after it."""
    from aiofeed.kernel.feeder.session import FeederSession

    usual = FeederSession._replace_pipeline
    for first in (True, False):
        change_at(monkeypatch, 2)
        with aiofeed.Feeder(Rows(), batch_size=BATCH) as feeder:
            iterator = iter(feeder)

            def replace(self: Any, stream: Any, first: bool = first, feeder: Any = feeder) -> None:
                closing = threading.Thread(target=feeder.close)
                if not first:
                    usual(self, stream)
                closing.start()
                closing.join(60)
                if first:
                    usual(self, stream)

            monkeypatch.setattr(FeederSession, "_replace_pipeline", replace)
            with pytest.raises(aiofeed.errors.IteratorClosedError):
                list(iterator)
            monkeypatch.setattr(FeederSession, "_replace_pipeline", usual)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> SmallItems:
    monkeypatch.undo()
    return SmallItems()


@dataclass
class Clock:
    """A pretended clock, and the processor time of pretended threads: a feeder's pipeline, as far as looks need one.

    With ``load``, another program takes the processor for 20 ms in a third of all steps and batches. Without
    ``events``, there are only the totals of the epoch.
    """

    load: bool = False
    events: bool = True
    streams: bool = True
    now: float = 0.0
    cpu_s: float = 0.0
    stats: EpochStats = field(default_factory=lambda: EpochStats(events=new_events()))

    def run(
        self,
        small: SmallItems,
        step_us: float = 10,
        batch_us: float = 90,
        threads_us: float = 130,
        batches: int = WARM_BATCHES + LEAST_BATCHES + 1,
    ) -> bool:
        """Return batches until another pipeline is to go on. Threads make them beside the steps, the consumer not.

        Returns whether the consumer's thread goes on.
        """
        for number in range(batches):
            self.streams = not small.in_consumer_thread
            late_s = 0.02 if self.load and number % 3 == 0 else 0.0
            parts = {"decode": 0.8 * batch_us, "collate": 0.2 * batch_us} if self.streams else {"wait": batch_us}
            for kind, us in (*parts.items(), ("step", step_us)):
                ended = self.now + us * 1e-6 + late_s
                if self.events:
                    self.stats.events.append((kind, "thread", self.now, ended, number, 4, 0))
                self.now = ended
            self.cpu_s += threads_us * 1e-6 * self.streams
            self.stats.batches += 1
            self.stats.wall_s = self.now
            self.stats.stall_s += batch_us * 1e-6
            self.stats.decode_s += batch_us * 1e-6 * self.streams
            if small.changes(ReadyBatch(number, 4, None), self.stats, self):  # type: ignore[arg-type]
                if small.in_consumer_thread:
                    small._begin(WARM_BATCHES)  # as its new pipeline does
                break
        return small.in_consumer_thread


@pytest.fixture(params=["quiet", "loaded", "without events"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small: SmallItems) -> Clock:
    clock = Clock(load=request.param == "loaded", events=request.param != "without events")
    monkeypatch.setattr(small_items, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_the_consumer_makes_batches_once_threads_were_seen_to_compute_longer(small: SmallItems, clock: Clock) -> None:
    """Also if other programs take the processor meanwhile: the typical step and the processor time decide."""
    assert clock.run(small)
    assert clock.stats.batches <= 50
    assert small.reason.startswith("The training thread makes the batches")
    assert "a step takes 10 us, a batch 90 us, and with threads a batch takes 130 us" in small.reason
    assert clock.run(small, batches=2000)


@pytest.mark.parametrize(
    "times",
    [
        {"batches": LEAST_BATCHES},
        {"batch_us": 1.01e6 * SMALL_S, "threads_us": 2e6 * SMALL_S},
        {"step_us": 50},
        {"step_us": 2000},
        {"batch_us": 900},
    ],
    ids=["few batches", "large batches", "steps", "long steps", "waits"],
)
def test_threads_make_the_others(small: SmallItems, clock: Clock, times: dict[str, Any]) -> None:
    assert not clock.run(small, **{"batches": 2000, **times})
    assert not small.reason or small.reason.startswith("Threads make the batches")


@pytest.mark.parametrize("times", [{"batch_us": 200}, {"step_us": 200}], ids=["slower batches", "longer steps"])
def test_threads_that_are_faster_come_back_for_good(small: SmallItems, clock: Clock, times: dict[str, Any]) -> None:
    """After two looks in a row."""
    assert clock.run(small)
    assert clock.run(small, batches=WARM_BATCHES + 2 * LEAST_BATCHES, **times)
    assert not clock.run(small, batches=3 * LEAST_BATCHES, **times)
    assert not clock.run(small, batches=2000)


def test_batches_of_short_epochs_count_together(small: SmallItems, clock: Clock) -> None:
    """Except without events, whose totals are those of an epoch."""
    for _ in range(8):
        clock.stats = EpochStats(events=clock.stats.events)
        clock.run(small, batches=10)
    assert small.in_consumer_thread is clock.events


def test_explain_says_which_thread_makes_the_batches(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds that have decided it."""
    monkeypatch.undo()
    with aiofeed.Feeder(Subset(rows, [*range(SAMPLES)] * 20), batch_size=BATCH) as feeder:
        list(feeder)
        assert re.search(r"(Threads make|thread makes) the batches .* a step takes \d+ us", feeder.explain().verdict)


@pytest.mark.parametrize("step", [0, 3])
def test_ctrl_c_anywhere_in_next_loses_nothing(feeder: aiofeed.Feeder[Any], step: int) -> None:
    order = labels(feeder)
    for place in range(2000):
        feeder.set_epoch(1)
        iterator = iter(feeder)
        found = [next(iterator) for _ in range(step)]
        reached = ctrl_c_in_next(iterator, place, found)
        assert labels(found) == order, place
        if not reached:
            break
    assert place > (2 if step else 10)  # the fourth batch of a window is ready


def test_threads_go_on_without_the_add_on(small: SmallItems, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, needed_by: str) -> None:
        raise ImportError(f"{needed_by} needs {name}")

    monkeypatch.setattr(small_items, "load_addon", missing)
    assert not clock.run(small, batches=2000)
