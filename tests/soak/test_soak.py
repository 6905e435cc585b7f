"""A short soak with a fixed seed. `make soak` runs a long one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiofeed.kernel.runtime.queue import BatchQueue, ReadyBatch
from tests.soak.runner import KINDS, Soak

EPISODES = 50
SEED = 3


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    yield Soak(SEED, tmp_path, fatal=False)
    gc.unfreeze()


@pytest.mark.slow
def test_episodes_of_a_seed(soak: Soak) -> None:
    """Epochs that end in every way, with and without faults, lose, double, corrupt and leak nothing."""
    for number in range(EPISODES):
        assert soak.run(number), soak.failures
    soak.checks.check_growth()
    assert soak.counts["episodes"] == EPISODES
    # The number of cancellations per epoch depends on the machine's speed: usually hundreds.
    assert soak.counts["cancellations"] > 50
    assert len([name for name in KINDS if soak.counts[f"kind: {name}"]]) >= 12


def test_an_episode_depends_only_on_its_seed(soak: Soak, tmp_path: Path) -> None:
    """An episode replayed by its number makes the same choices, independent of earlier episodes."""
    for number in (5, 2, 5):
        assert soak.run(number), soak.failures
    other = Soak(SEED, tmp_path, fatal=False)
    for number in (2, 5, 5):
        assert other.run(number), other.broken
    assert {name: count for name, count in soak.counts.items() if name.startswith(("kind", "ended"))} == {
        name: count for name, count in other.counts.items() if name.startswith(("kind", "ended"))
    }


def test_lost_and_doubled_batches_are_detected(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks fail if the queue drops a batch or delivers it twice."""
    put = BatchQueue.put

    def lossy(queue: BatchQueue[object], item: object) -> None:
        if not (isinstance(item, ReadyBatch) and item.number == 1):
            put(queue, item)

    def doubling(queue: BatchQueue[object], item: object) -> None:
        duplicate = copy.copy(item)  # before `put`: the consumer empties the item
        put(queue, item)
        if isinstance(item, ReadyBatch) and item.number == 1 and item.on_taken is not None:
            put(queue, duplicate)

    number = next(
        number for number in range(1000) if soak.run(number) and soak.counts["kind: epochs in a row"] and number
    )
    for faulty_put, kind in ((lossy, "lost"), (doubling, "doubled")):
        monkeypatch.setattr(BatchQueue, "put", faulty_put)
        assert not soak.run(number)
        assert soak.counts[kind] == 1, soak.failures
        soak.error = None
    monkeypatch.undo()
    assert soak.run(number)
