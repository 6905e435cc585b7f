"""With engine="process", the trainer's loop is woken for a taken batch only if a worker would run out of work."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest

from aiofeed import Feeder, Limits
from aiofeed.kernel.engine.engine import Engine
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.workers.remote_assembly import RemoteAssembly
from tests.support import process_parts as parts
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions for which event loops were woken."""
    found: list[str] = []
    call = EventLoopThread.call

    def counting(loop_thread: EventLoopThread, function: Any, *args: object) -> None:
        found.append(function.__name__)
        call(loop_thread, function, *args)

    monkeypatch.setattr(EventLoopThread, "call", counting)
    return found


@pytest.mark.parametrize("engine", ["process", "process:2"])
def test_a_consumer_that_waits_for_batches_does_not_wake_the_loop(engine: str, calls: list[str]) -> None:
    """While each worker has batches to decode, a taken batch is processed with the next message of a worker."""
    limits = Limits(prefetch_batches=8)
    with Feeder(parts.Numbers(640), decode=parts.slow_number, batch_size=16, engine=engine, limits=limits) as feeder:
        assert [batch[0].item() for batch in feeder] == list(range(0, 640, 16))
    # Of 40: at the start, at the end, and whenever the machine was busy with something else.
    assert calls.count("release_taken") < 20


@pytest.mark.parametrize("engine", ["process", "process:2"])
def test_a_slow_consumer_wakes_the_loop(engine: str, calls: list[str]) -> None:
    """The workers have finished all that they may, so each batch that is taken makes room for one more."""
    with Feeder(parts.Numbers(48), decode=parts.number, batch_size=4, engine=engine) as feeder:
        seen = []
        for batch in feeder:
            seen.append(batch[0].item())
            time.sleep(0.05)
    assert seen == list(range(0, 48, 4))
    assert calls.count("release_taken") > 4


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_all_of_the_budget_is_released(prefetch: int) -> None:
    """After several epochs, of batches that woke the loop and of those that did not."""
    limits = Limits(prefetch_batches=prefetch, decode_threads=2)
    with Feeder(parts.Numbers(40), decode=parts.slow_number, batch_size=4, engine="process:2", limits=limits) as feeder:
        for _ in feeder.epochs(4):
            assert len(list(feeder)) == 10
        pipeline: Any = feeder._session.pipeline
        until(lambda: not pipeline._budget._batches and not pipeline._engine.buffer.waiting)


def test_however_many_batches_can_be_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches are taken before the loop is woken, as with many small ones."""
    busy = True
    monkeypatch.setattr(RemoteAssembly, "busy", property(lambda _: busy))
    limits = Limits(prefetch_batches=600)
    with Feeder(parts.Numbers(600), decode=parts.number, batch_size=1, engine="process", limits=limits) as feeder:
        iterator = iter(feeder)
        seen = [next(iterator).item()]
        pipeline: Any = feeder._session.pipeline
        until(lambda: len(pipeline.queue) >= 599)
        seen += [next(iterator).item() for _ in range(500)]
        busy = False
        assert seen + [batch.item() for batch in iterator] == list(range(600))
        until(lambda: not pipeline._engine.buffer.waiting)


@pytest.mark.parametrize("device", [None, "simulated"])
def test_a_deferred_item_does_not_keep_its_batch(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the size of the reservation, and neither the batch nor its memory."""
    deferred: list[Any] = []
    monkeypatch.setattr(Engine, "taken", lambda engine, item: deferred.append(item))
    with Feeder(
        parts.Numbers(4),
        decode=parts.number,
        batch_size=4,
        engine="process",
        device=None if device is None else SimulatedDevice(),
    ) as feeder:
        iterator = iter(feeder)
        batch = next(iterator)
        assert batch.tolist() == [0, 1, 2, 3]
        there = weakref.ref(batch)
        del batch
        # The copy thread and the task that has assembled the batch may still be about to drop it.
        until(lambda: there() is None and deferred)
        [item] = deferred
        assert item.batch is None
        assert item.lease is None or device is None
        assert list(iterator) == []
