"""Accelerate: a feeder works in its training loop, and its checkpoints contain the feeder's state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import DataLoader, Feeder, Stream
from tests.support.framework_parts import Samples, same

EPOCHS = 2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`accelerator(**options)` makes a new one on the CPU, as in a new process; its state is stored in classes."""
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

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # Accelerate sets it too; monkeypatch removes it
    yield new
    reset()


class Training:
    """A model, an optimizer and a feeder under an accelerator; `seen` lists the batches, each with its epoch."""

    def __init__(self, accelerator: Any, feeder: Feeder[torch.Tensor]) -> None:
        linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(linear.weight, 0.5)
        self.accelerator = accelerator
        self.feeder = feeder
        self.model, self.optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(feeder)
        self.seen: list[tuple[int, torch.Tensor]] = []

    def run(self, steps: int | None = None) -> None:
        """Train to the end, or until `steps` batches were seen."""
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
    """After `save_state` in an epoch or at its end and `load_state` into new objects, batches and weights are those of
    the uninterrupted run."""
    whole = Training(accelerator(), make_feeder())
    whole.run()
    interrupted = Training(accelerator(), make_feeder())
    interrupted.run(step)
    interrupted.accelerator.save_state(str(tmp_path))
    resumed = Training(accelerator(), make_feeder())
    resumed.accelerator.load_state(str(tmp_path))
    resumed.run()
    seen = interrupted.seen + resumed.seen
    assert [epoch for epoch, _ in seen] == [0] * 7 + [1] * 7
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(seen, whole.seen, strict=True))
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_prepare_returns_the_feeder_unchanged(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]]
) -> None:
    """`prepare` returns the feeder itself: it is no `DataLoader`, so Accelerate does not shard its batches again."""
    feeder = make_feeder()
    instance = accelerator()
    assert instance.prepare(feeder) is feeder
    model, prepared = instance.prepare(torch.nn.Linear(2, 1), feeder)
    assert prepared is feeder
    assert [model(batch).shape[0] for batch in prepared] == [4] * 6 + [2]


def test_a_stream(accelerator: Callable[..., Any], tmp_path: Path) -> None:
    """`prepare` returns a feeder over a stream unchanged; `save_state` and `load_state` resume it in an epoch."""

    def new_feeder() -> Feeder[Any]:
        return Feeder(Stream(lambda: iter(range(26))), batch_size=4)

    instance, feeder = accelerator(), new_feeder()
    assert instance.prepare(feeder) is feeder
    instance.register_for_checkpointing(feeder)
    iterator = iter(feeder)
    whole = [next(iterator).tolist() for _ in range(3)]
    instance.save_state(str(tmp_path))
    whole += [batch.tolist() for batch in iterator]
    resumed, again = accelerator(), new_feeder()
    resumed.register_for_checkpointing(again)
    resumed.load_state(str(tmp_path))
    assert [batch.tolist() for batch in again] == whole[3:]


def test_accumulation_ignores_the_end_of_a_feeders_epoch(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]]
) -> None:
    """`accumulate` detects the last batch of a prepared `DataLoader`, not of a feeder: an incomplete accumulation
    continues in the feeder's next epoch."""

    def optimizer_steps(batches: Any, instance: Any, model: torch.nn.Module) -> list[bool]:
        """For each batch, whether the optimizer would step after it."""
        steps = []
        for batch in batches:
            with instance.accumulate(model):
                instance.backward(model(batch).mean())
                steps.append(instance.sync_gradients)
        return steps

    for loader, at_the_end in (("feeder", False), ("DataLoader", True)):
        instance = accelerator(gradient_accumulation_steps=2)
        batches: Any = make_feeder() if loader == "feeder" else torch.utils.data.DataLoader(torch.zeros(26, 2), 4)
        model, batches = instance.prepare(torch.nn.Linear(2, 1), batches)
        assert optimizer_steps(batches, instance, model) == [False, True] * 3 + [at_the_end]


def test_a_length_per_rank_is_warned_about(
    accelerator: Callable[..., Any], make_feeder: Callable[..., Feeder[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """`len()` of a feeder for one of two ranks warns once that Accelerate calls a prepared scheduler twice per step,
    and names the way out; without ranks or without an accelerator it does not."""
    with caplog.at_level("WARNING", logger="aiofeed"):
        len(make_feeder(shard=(0, 2)))
        accelerator()
        len(make_feeder())
        assert not caplog.records
        feeder = make_feeder(shard=(0, 2))
        assert len(feeder) == len(feeder) == 4
    [record] = caplog.records
    assert "2 times per step" in record.message
    assert "step_scheduler_with_optimizer=False" in record.message
    assert "aiofeed.DataLoader" in record.message


# --- aiofeed.DataLoader -----------------------------------------------------------------------------------------------


def prepared(accelerator: Any, new_loader: Any = DataLoader, workers: int = 0) -> Any:
    """Return a loader that `prepare` has made from a new one; its order follows from the global generator."""
    torch.manual_seed(1)
    return accelerator.prepare(new_loader(Samples(), 4, shuffle=True, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_prepare_takes_a_data_loader(
    accelerator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """`prepare` makes torch's loader from an `aiofeed.DataLoader`, and aiofeed's from any loader once
    `accelerate.data_loader.DataLoader` is aiofeed's. The batches are the same, `skip_first_batches` included."""

    def epochs(loader: Any) -> list[torch.Tensor]:
        skipping = accelerate.skip_first_batches(loader, 3)
        assert type(skipping.base_dataloader) is type(loader.base_dataloader)
        return [*loader, *skipping]

    instance = accelerator()
    accelerate = pytest.importorskip("accelerate")
    expected = epochs(prepared(instance, torch.utils.data.DataLoader, workers))
    assert len(expected) == 7 + 4
    loader = prepared(instance, DataLoader, workers)
    assert type(loader.base_dataloader) is torch.utils.data.DataLoader
    assert same(epochs(loader), expected)
    monkeypatch.setattr("accelerate.data_loader.DataLoader", DataLoader)
    for new_loader in (torch.utils.data.DataLoader, DataLoader):
        loader = prepared(instance, new_loader, workers)
        assert type(loader.base_dataloader) is DataLoader
        assert same(epochs(loader), expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [1, 7, 10])
def test_a_prepared_loader_resumes_exactly(
    accelerator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, step: int
) -> None:
    """After `save_state` and `load_state` in new objects, a registered loader continues with the next batch, although
    Accelerate reads one batch ahead."""
    monkeypatch.setattr("accelerate.data_loader.DataLoader", DataLoader)

    instance = accelerator()
    loader = prepared(instance, workers=workers)
    instance.register_for_checkpointing(loader)
    whole: list[torch.Tensor] = []
    for _ in range(EPOCHS):
        for batch in loader:
            whole.append(batch.clone())
            if len(whole) == step:
                instance.save_state(str(tmp_path))

    instance = accelerator()
    loader = prepared(instance, workers=workers)
    instance.register_for_checkpointing(loader)
    instance.load_state(str(tmp_path))
    rest = [batch for _ in range(EPOCHS - step // 7) for batch in loader]
    assert same(rest, whole[step:])


@pytest.mark.parametrize(
    ("workers", "step", "registered"), [(0, 3, True), (0, 7, True), (2, 3, True), (2, 10, True), (0, 3, False)]
)
def test_a_resume_with_dropout_is_exact(
    accelerator: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    workers: int,
    step: int,
    registered: bool,
) -> None:
    """The model draws from the global generators between two batches, the first of which is made before that. Losses
    and batches after `load_state` are those of the uninterrupted run, with a dataset that draws, too."""
    monkeypatch.setattr("accelerate.data_loader.DataLoader", DataLoader)

    def train(epochs: int, *, loads: bool = False) -> list[tuple[Any, float]]:
        instance = accelerator()
        loader = prepared(instance, workers=workers)
        model = instance.prepare(
            torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
        )
        optimizer = instance.prepare(torch.optim.SGD(model.parameters(), lr=0.001))
        if registered:
            instance.register_for_checkpointing(loader)
        if loads:
            torch.manual_seed(2)
            if not registered:
                loader.load_state_dict(torch.load(tmp_path / "loader.pt"))
            instance.load_state(str(tmp_path))
        seen = []
        for _ in range(epochs):
            for batch in loader:
                loss = model(batch / 26).square().mean()
                optimizer.zero_grad()
                instance.backward(loss)
                optimizer.step()
                seen.append((batch.tolist(), loss.item()))
                if len(seen) == step and not loads:
                    torch.save(loader.state_dict(), tmp_path / "loader.pt")
                    instance.save_state(str(tmp_path))
        return seen

    whole = train(EPOCHS)
    assert train(EPOCHS - step // 7, loads=True) == whole[step:]


def test_a_state_that_the_script_loads_restores_the_generators(
    accelerator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not `load_state` loads the state of a prepared loader, nobody else restores them."""
    monkeypatch.setattr("accelerate.data_loader.DataLoader", DataLoader)
    loader = prepared(accelerator())
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state, now = loader.state_dict(), torch.get_rng_state()
    torch.rand(1)
    prepared(accelerator()).load_state_dict(state)
    drawn = torch.rand(1)
    torch.set_rng_state(now)
    assert not torch.equal(drawn, torch.rand(1))  # one batch was read ahead of the state
    first = prepared(accelerator())
    first.load_state_dict(state)
    assert torch.equal(drawn, torch.rand(1))
