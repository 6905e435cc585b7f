"""Accelerate's plain loop takes a feeder as it is, and keeps its state among what it saves."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiofeed import Feeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EPOCHS = 2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`accelerator(**options)` gives a new one on the CPU, as in a new process: its state is kept in classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")

    def reset() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    def new(**options: Any) -> Any:
        reset()
        return accelerate.Accelerator(cpu=True, **options)

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # It sets more of the kind; this keeps the first from staying.
    yield new
    reset()


class Training:
    """Model, optimizer and feeder under an accelerator, and the batches seen, each with its epoch."""

    def __init__(self, accelerator: Any, feeder: Feeder[torch.Tensor]) -> None:
        linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(linear.weight, 0.5)
        self.accelerator = accelerator
        self.feeder = feeder
        self.model, self.optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(feeder)
        self.seen: list[tuple[int, torch.Tensor]] = []

    def run(self, steps: int | None = None) -> None:
        """Train to the end, or for so many steps."""
        for epoch in self.feeder.epochs(EPOCHS):
            for batch in self.feeder:
                loss = self.model(batch / 26).square().mean()
                self.optimizer.zero_grad()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.seen.append((epoch, batch))
                if len(self.seen) == steps:
                    return


@pytest.mark.parametrize("step", [1, 5, 7, 10, 13])
def test_resume_is_exact(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]], tmp_path: Path, step: int
) -> None:
    """`save_state` in mid-epoch or at its end, `load_state` into new objects: the batches and weights that follow are
    those of the uninterrupted run."""
    whole = Training(accelerator(), make_feeder())
    whole.run()
    broken_off = Training(accelerator(), make_feeder())
    broken_off.run(step)
    broken_off.accelerator.save_state(str(tmp_path))
    resumed = Training(accelerator(), make_feeder())
    resumed.accelerator.load_state(str(tmp_path))
    resumed.run()
    seen = broken_off.seen + resumed.seen
    assert [epoch for epoch, _ in seen] == [0] * 7 + [1] * 7
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(seen, whole.seen, strict=True))
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_prepare_leaves_a_feeder_alone(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]]
) -> None:
    """`prepare` gives the feeder back as it was: it is no `DataLoader`, so nothing shards its batches again."""
    feeder = make_feeder()
    here = accelerator()
    assert here.prepare(feeder) is feeder
    model, prepared = here.prepare(torch.nn.Linear(2, 1), feeder)
    assert prepared is feeder
    assert [model(batch).shape[0] for batch in prepared] == [4] * 6 + [2]


def test_accumulation_does_not_see_the_end_of_an_epoch(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]]
) -> None:
    """`accumulate` knows where a prepared `DataLoader` ends, a feeder's end it does not know: an accumulation that an
    epoch's end cuts short goes on into the next epoch."""

    def stepped(batches: Any, here: Any, model: torch.nn.Module) -> list[bool]:
        """After which batches gradients would be applied."""
        found = []
        for batch in batches:
            with here.accumulate(model):
                here.backward(model(batch).mean())
                found.append(here.sync_gradients)
        return found

    for loader, at_the_end in (("feeder", False), ("DataLoader", True)):
        here = accelerator(gradient_accumulation_steps=2)
        batches: Any = make_feeder() if loader == "feeder" else torch.utils.data.DataLoader(torch.zeros(26, 2), 4)
        model, batches = here.prepare(torch.nn.Linear(2, 1), batches)
        assert stepped(batches, here, model) == [False, True] * 3 + [at_the_end]
