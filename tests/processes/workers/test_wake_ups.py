"""When the trainer's loop is woken for a batch that was taken, with engine="process": as seldom as nobody suffers."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest

from aiofeed import Feeder, Limits
from aiofeed.processes.workers.parent_engine import MultiprocessEngine
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.testing import SimulatedDevice
from tests.support import process_parts as parts


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loops of engines were woken for."""
    found: list[str] = []
    call = EventLoopThread.call

    def counting(loop_thread: EventLoopThread, function: Any, *args: object) -> None:
        found.append(function.__name__)
        call(loop_thread, function, *args)

    monkeypatch.setattr(EventLoopThread, "call", counting)
    return found


@pytest.mark.parametrize(("engine", "most"), [("process", 20), ("process:2", 38)])
def test_a_consumer_that_waits_for_batches_wakes_nobody(engine: str, most: int, woken: list[str]) -> None:
    """While processes decode, word of what was taken waits for the next that is finished.

    Two that finish at the same time have no batch more than the one they are at, and one of the two takes is told.
    """
    with Feeder(parts.Numbers(640), decode=parts.slow_number, batch_size=16, engine=engine) as feeder:
        assert [batch[0].item() for batch in feeder] == list(range(0, 640, 16))
    # Of 40: as it begins and ends, and where the machine was busy with something else.
    assert woken.count("release") < most


@pytest.mark.parametrize("engine", ["process", "process:2"])
def test_a_slow_consumer_is_heard_at_once(engine: str, woken: list[str]) -> None:
    """Where all that may be finished is, each batch that is taken makes room for one more."""
    with Feeder(parts.Numbers(48), decode=parts.number, batch_size=4, engine=engine) as feeder:
        seen = []
        for batch in feeder:
            seen.append(batch[0].item())
            time.sleep(0.05)
    assert seen == list(range(0, 48, 4))
    assert woken.count("release") > 4


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_nothing_is_left_in_the_budget(prefetch: int) -> None:
    """Over epochs that follow one another, what was taken is given back, told or noted."""
    limits = Limits(prefetch_batches=prefetch, decode_threads=2)
    with Feeder(parts.Numbers(40), decode=parts.slow_number, batch_size=4, engine="process:2", limits=limits) as feeder:
        for _ in feeder.epochs(4):
            assert len(list(feeder)) == 10
        pipeline: Any = feeder._session.pipeline
        deadline = time.monotonic() + 10
        while (pipeline._budget._batches or pipeline._engine._buffer.waiting) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pipeline._budget._batches == 0
        assert pipeline._engine._buffer.waiting == 0


@pytest.mark.parametrize("device", [None, "simulated"])
def test_a_batch_that_is_dropped_is_gone_before_its_word_is_heard(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits to be heard remembers how much room there is, and not the batch."""
    kept: list[Any] = []
    monkeypatch.setattr(MultiprocessEngine, "_noted_until_heard", lambda engine, item: kept.append(item) or True)
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
        # The thread that copies it may be about to say so, and the task that has assembled it about to end.
        deadline = time.monotonic() + 10
        while (there() is not None or not kept) and time.monotonic() < deadline:
            time.sleep(0.01)
        [noted] = kept
        assert noted.batch is None
        assert noted.lease is None or device is None
        assert there() is None
        assert list(iterator) == []
