"""The soak in short: the same seed every time. `make soak` is the long form."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiofeed.runtime.queue import BatchQueue, ReadyBatch
from tests.soak.runner import KINDS, Soak

EPISODES = 70
SEED = 3


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    yield Soak(SEED, tmp_path, fatal=False)
    gc.unfreeze()


def test_episodes_of_a_seed(soak: Soak) -> None:
    """Epochs left in every way, faults underneath: nothing lost, doubled, wrong or left behind."""
    for number in range(EPISODES):
        assert soak.run(number), soak.broken
    soak.checks.check_growth()
    assert soak.tally["episodes"] == EPISODES
    # How many an epoch takes until it is over depends on how fast the machine is: hundreds, most often.
    assert soak.tally["cancellations"] > 50
    assert len([name for name in KINDS if soak.tally[f"kind: {name}"]]) >= 12


def test_an_episode_is_drawn_from_its_seed_alone(soak: Soak, tmp_path: Path) -> None:
    """Replayed by its number, an episode makes the same choices, whatever ran before."""
    for number in (5, 2, 5):
        assert soak.run(number), soak.broken
    other = Soak(SEED, tmp_path, fatal=False)
    for number in (2, 5, 5):
        assert other.run(number), other.broken
    assert {name: count for name, count in soak.tally.items() if name.startswith(("kind", "left"))} == {
        name: count for name, count in other.tally.items() if name.startswith(("kind", "left"))
    }


def test_what_is_lost_and_doubled_is_seen(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks fail where a batch is dropped on its way, comes twice, or has a wrong sample."""
    put = BatchQueue.put

    def lossy(queue: BatchQueue[object], item: object) -> None:
        if not (isinstance(item, ReadyBatch) and item.number == 1):
            put(queue, item)

    def doubling(queue: BatchQueue[object], item: object) -> None:
        again = copy.copy(item)  # before it is handed out: of a batch that was nothing is left in its item
        put(queue, item)
        if isinstance(item, ReadyBatch) and item.number == 1 and item.release is not None:
            put(queue, again)

    number = next(
        number for number in range(1000) if soak.run(number) and soak.tally["kind: epochs in a row"] and number
    )
    for wrong, kind in ((lossy, "lost"), (doubling, "doubled")):
        monkeypatch.setattr(BatchQueue, "put", wrong)
        assert not soak.run(number)
        assert soak.tally[kind] == 1, soak.broken
        soak.error = None
    monkeypatch.undo()
    assert soak.run(number)
