"""torch.distributed.checkpoint saves and loads a feeder together with the model, because it is a `Stateful`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import Feeder
from aiofeed.errors import StateError

SCRIPT = Path(__file__).with_name("train_dcp.py")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning"),
]


def test_feeder_is_stateful(make_feeder: Callable[..., Feeder[Any]]) -> None:
    """A feeder implements the `Stateful` protocols of torch and torchdata."""
    from torch.distributed.checkpoint.stateful import Stateful

    assert isinstance(make_feeder(), Stateful)
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    assert isinstance(make_feeder(), stateful.Stateful)


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 3), ({}, 7), ({}, 9), ({"shuffle": "keyed"}, 3), ({"in_order": False}, 3)]
)
def test_saved_feeder_resumes(
    make_feeder: Callable[..., Feeder[Any]], tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    """A new feeder that loads a state, saved in an epoch or at its end, delivers the rest of two epochs as an
    uninterrupted one; in one process, without a process group."""
    import torch.distributed.checkpoint as dcp

    whole = list(two_epochs(make_feeder(**options)))
    feeder = make_feeder(**options)
    before = list(islice(two_epochs(feeder), steps))
    dcp.save({"model": {"weight": torch.ones(3)}, "feeder": feeder}, checkpoint_id=tmp_path)

    again, model = make_feeder(**options), {"weight": torch.zeros(3)}
    dcp.load({"model": model, "feeder": again}, checkpoint_id=tmp_path)
    assert torch.equal(model["weight"], torch.ones(3))
    assert again.state_dict() == feeder.state_dict()
    assert sorted([*before, *two_epochs(again)]) == sorted(whole)


def two_epochs(feeder: Feeder[torch.Tensor]) -> Iterator[tuple[int, list[list[float]]]]:
    """Yield the remaining batches of two epochs as lists, each with its epoch."""
    for epoch in feeder.epochs(2):
        for batch in feeder:
            yield epoch, batch.tolist()


@pytest.mark.slow
def test_two_ranks_share_a_checkpoint(torchrun: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Two ranks save one checkpoint and load it; each continues with its own part."""
    process = torchrun(2, SCRIPT, tmp_path)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert sorted(line for line in output.splitlines() if line.startswith("rank")) == ["rank 0: equal", "rank 1: equal"]


def test_other_data_are_refused(make_feeder: Callable[..., Feeder[Any]], tmp_path: Path) -> None:
    """Loading into a feeder over other data raises a `StateError` that names the difference."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"feeder": make_feeder()}, checkpoint_id=tmp_path)
    with pytest.raises(StateError, match="length: 26 in the state, 27 here"):
        dcp.load({"feeder": make_feeder(27)}, checkpoint_id=tmp_path)
