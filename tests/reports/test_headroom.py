"""Tests of ``headroom``: some batches come again, and everything else is as without."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Feeder, Limits, Tensors
from aiofeed.reports import Headroom, headroom
from benchmarks.explain import Items, Numbers, decode
from tests.support.simulated_device import SimulatedDevice

REAL = headroom.WARM_UP + headroom.KEPT


def feeder(samples: int = 40, **options: Any) -> Feeder[Any]:
    return Feeder(Numbers(samples), decode=decode, batch_size=2, **options)


def numbers(batch: Any) -> list[int]:
    return list(batch[:, 0].tolist())


def expected(repeats: int) -> list[list[int]]:
    """The batches of ``feeder()`` with repeats: those that are kept come again, after as many timed ones."""
    real = [[first, first + 1] for first in range(0, 40, 2)]
    kept = real[headroom.WARM_UP : REAL]
    at = REAL + repeats
    return [*real[:at], *(kept[number % len(kept)] for number in range(repeats)), *real[at:]]


def test_copies_come_between_the_real_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """After the timed batches the kept ones come again; then the epoch goes on. The result is printed once."""
    with feeder() as feeding:
        measured = feeding.headroom(4)
        assert "not measured" in str(measured)
        assert list(map(numbers, measured)) == expected(4)
    assert isinstance(measured, Headroom)
    assert measured.floor_s > 0 < measured.loaded_s
    assert capsys.readouterr().out == f"{measured}\n"


async def test_copies_come_in_an_asynchronous_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """``async for`` gives the batches that ``for`` does."""
    with feeder() as feeding:
        measured = feeding.headroom(4)
        assert [numbers(batch) async for batch in measured] == expected(4)
    assert capsys.readouterr().out == f"{measured}\n"


@pytest.mark.usefixtures("capsys")
def test_loading_is_the_difference() -> None:
    """Reads of 30 ms, two at a time, and a step of 5 ms: the floor is the step, and the gain what loading takes."""
    with Feeder(Numbers(24, read_s=0.03), decode=decode, batch_size=2, limits=Limits(read_concurrency=2)) as feeding:
        measured = feeding.headroom(4)
        for _ in measured:
            time.sleep(0.005)
    assert measured.loaded_s > 0.02  # batches that came during a pause of this thread take less than their 30 ms
    assert measured.floor_s < measured.loaded_s
    assert measured.gain == measured.loaded_s / measured.floor_s
    assert "times as fast" in str(measured)


@pytest.mark.usefixtures("capsys")
def test_the_state_counts_real_batches() -> None:
    """The state at any position, left there, continues with the real batches that have not come."""
    for stop in range(len(expected(4))):
        with feeder() as feeding:
            seen = []
            for batch in feeding.headroom(4):
                seen.append(numbers(batch))
                if len(seen) > stop:
                    break
            state = feeding.state_dict()
        with feeder() as resumed:
            resumed.load_state_dict(state)
            rest = list(map(numbers, resumed))
        real = [[first, first + 1] for first in range(0, 40, 2)]
        handed_out = max(real.index(batch) for batch in seen) + 1
        assert rest == (real[handed_out:] or real)


@pytest.mark.usefixtures("capsys")
def test_a_resumed_epoch_and_epochs_are_measured() -> None:
    """``headroom`` starts where ``iter`` would, and works within ``epochs``."""
    with feeder() as feeding:
        feeding.skip(3)
        assert numbers(next(iter(feeding.headroom(2)))) == [6, 7]
    with feeder() as feeding:
        for _ in feeding.epochs(2):
            assert len(list(feeding.headroom(3))) == 23
        assert feeding.epoch == 1


@pytest.mark.usefixtures("capsys")
def test_the_statistics_are_those_of_real_batches() -> None:
    """Repeated batches count neither as batches nor as time."""
    with feeder() as feeding:
        started = time.perf_counter()
        repeats_s = 0.0
        for number, _ in enumerate(feeding.headroom(4)):
            if REAL + 4 <= number < REAL + 8:
                time.sleep(0.05)
                repeats_s += 0.05
        statistics = feeding.statistics()
        assert (statistics.batches, statistics.samples) == (20, 40)
        assert statistics.wall_s <= time.perf_counter() - started - repeats_s
        assert statistics.idle_s < 0.15
        assert feeding.explain().stage != ""


@pytest.mark.usefixtures("capsys")
def test_a_step_may_change_its_batch() -> None:
    """Each repeated batch is a copy of its own: writing into it, and into the real one, changes no other."""
    with feeder() as feeding:
        seen = []
        for batch in feeding.headroom(6):
            seen.append(numbers(batch))
            batch.fill_(255)
    assert seen == expected(6)


@pytest.mark.usefixtures("capsys")
def test_copies_have_the_structure_of_batches() -> None:
    """Containers, tensors, arrays and other values are those of the batch."""
    batch = {"a": [torch.arange(3), np.arange(2)], "b": ("x", 1)}
    copy = headroom.copied(batch)
    assert copy["b"] == ("x", 1)
    assert torch.equal(copy["a"][0], batch["a"][0])
    assert copy["a"][0].data_ptr() != batch["a"][0].data_ptr()
    assert not np.shares_memory(copy["a"][1], batch["a"][1])


@pytest.mark.parametrize("samples", [2, 2 * REAL, 2 * REAL + 2, 2 * REAL + 6, 2 * REAL + 8])
def test_a_short_epoch_is_complete(samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch with fewer batches than ``headroom`` times returns its own batches and says so."""
    with feeder(samples) as feeding:
        measured = feeding.headroom(4)
        seen = list(map(numbers, measured))
    real = [[first, first + 1] for first in range(0, samples, 2)]
    assert seen[: len(real)] == real
    complete = samples == 2 * REAL + 8
    assert len(seen) == len(real) + (4 if complete else 0)
    assert ("headroom(4) needs 9 batches" in capsys.readouterr().out) == (not complete)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("latency", ["random", "late", "early"])
def test_batches_on_a_device_come_again(latency: Any) -> None:
    """Copies of batches on a device have their values, however late the device runs."""
    with feeder(device=SimulatedDevice(latency=latency)) as feeding:
        assert [numbers(batch.to("cpu")) for batch in feeding.headroom(4)] == expected(4)


@pytest.mark.usefixtures("capsys")
def test_static_batches_stay_in_their_memory() -> None:
    """With ``static_batches`` every batch is in the same memory; the last real one comes again."""
    with feeder(device=SimulatedDevice(), static_batches=True, drop_last=True) as feeding:
        addresses, seen = set(), []
        for batch in feeding.headroom(4):
            addresses.add(batch.data_ptr())
            seen.append(numbers(batch.to("cpu")))
    assert len(addresses) == 1
    real = [[first, first + 1] for first in range(0, 40, 2)]
    assert seen == [*real[: REAL + 4], *[real[REAL + 3]] * 4, *real[REAL + 4 :]]


@pytest.mark.usefixtures("capsys", "forked_workers")
def test_other_engines_and_data_are_measured() -> None:
    """Worker processes, samples in any order, a skipped failure, a cache and data in memory: batches come again."""
    with feeder(engine="process") as feeding:
        assert list(map(numbers, feeding.headroom(4))) == expected(4)
    with feeder(in_order="samples") as feeding:
        assert len(list(feeding.headroom(4))) == 24
    with feeder(cache="host", on_error="skip") as feeding:
        assert list(map(numbers, feeding.headroom(4))) == expected(4)
        assert list(map(numbers, feeding.headroom(4))) == expected(4)
    with Feeder(Tensors(torch.arange(40)), batch_size=2) as feeding:
        assert len(list(feeding.headroom(4))) == 24


@pytest.mark.usefixtures("capsys")
def test_a_copy_that_fails_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory for a copy, or Ctrl-C interrupts it, the state is before the batch that did not come."""
    monkeypatch.setattr(headroom, "copied", lambda batch: 1 / 0)
    with feeder() as feeding:
        seen = []
        with pytest.raises(ZeroDivisionError):
            seen.extend(map(numbers, feeding.headroom(4)))
        assert seen == [[0, 1], [2, 3]]
        assert numbers(next(iter(feeding))) == [4, 5]


async def test_a_copy_that_fails_loses_no_batch_in_an_asynchronous_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "copied", lambda batch: 1 / 0)
    with feeder() as feeding:
        with pytest.raises(ZeroDivisionError):
            async for _ in feeding.headroom(4):
                pass
        assert numbers(next(iter(feeding))) == [4, 5]


def test_a_number_of_batches_is_checked() -> None:
    with Feeder(Items(8, 0.0), batch_size=2) as feeding:
        with pytest.raises(ValueError, match="batches"):
            feeding.headroom(0)
        with pytest.raises(TypeError, match="batches"):
            feeding.headroom(1.5)  # type: ignore[arg-type]
