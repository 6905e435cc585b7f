"""Lightning with `aiofeed.DataLoader`: what a Trainer returns with torch's `DataLoader`, and exact resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import aiofeed
from tests.support.framework_parts import SAMPLES, Samples, same

BATCHES, EPOCHS = 7, 2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

WORKERS = pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["no-workers", "workers", "persistent-workers"],
)


@pytest.fixture(scope="module")
def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning")


def new_module(lightning: Any) -> Any:
    """Return a new module; `batches` and `validated` list its batches."""

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.constant_(self.linear.weight, 0.5)
            self.batches: list[torch.Tensor] = []
            self.validated: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.batches.append(batch.clone())
            return self.linear(batch / SAMPLES).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.validated.append(batch.clone())

        def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return batch.clone()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def new_trainer(lightning: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"max_epochs": EPOCHS, "enable_checkpointing": False, **quiet, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, **arguments)


@WORKERS
@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 0.5}, {"overfit_batches": 3}, {"limit_train_batches": 3}],
    ids=["plain", "val_check_interval", "overfit_batches", "limit_train_batches"],
)
def test_fit_equals_fit_with_torch(lightning: Any, workers: dict[str, Any], options: dict[str, Any]) -> None:
    """One loader for training and validation: the batches of both, the weights and the state of the random generator
    are those with torch's `DataLoader`."""
    results = []
    for new_loader in (DataLoader, aiofeed.DataLoader):
        torch.manual_seed(1)
        module, loader = new_module(lightning), new_loader(Samples(), 4, shuffle=True, **workers)
        new_trainer(lightning, num_sanity_val_steps=0, **options).fit(module, loader, loader)
        results.append((module.batches, module.validated, [module.linear.weight, torch.rand(1)]))
    assert results[0][0]
    assert results[0][1]
    assert all(map(same, *results))


@WORKERS
def test_predict_makes_the_loader_again(lightning: Any, workers: dict[str, Any]) -> None:
    """`predict` replaces the sampler: the new loader is an `aiofeed.DataLoader` with the same further arguments."""

    def add_one(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    loader: Any = aiofeed.DataLoader(Samples(), 4, drop_last=True, transform=add_one, **workers)
    trainer = new_trainer(lightning)
    predictions = trainer.predict(new_module(lightning), loader)
    assert torch.cat(predictions)[:, 0].tolist() == [float(number + 1) for number in range(SAMPLES)]
    made = trainer.predict_dataloaders
    assert type(made) is aiofeed.DataLoader
    assert made is not loader
    assert made.transform is add_one


@WORKERS
def test_resume_is_exact(lightning: Any, workers: dict[str, Any], tmp_path: Path) -> None:
    """A run that is resumed from a `ModelCheckpoint` of any kind of step equals the uninterrupted run: in the first and
    second epoch, at their ends, and after `fit` has stopped at `max_steps`."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    def train(folder: Path, checkpoint: Path | None = None, **options: Any) -> Any:
        module = new_module(lightning)
        save = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = new_trainer(lightning, enable_checkpointing=True, callbacks=[save], limit_val_batches=0, **options)
        loader: Any = aiofeed.DataLoader(Samples(), 4, shuffle=True, **workers)
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
        return module

    torch.manual_seed(1)
    whole = train(tmp_path / "whole")
    torch.manual_seed(1)
    stopped = train(tmp_path / "stopped", max_steps=3)
    assert same(stopped.batches, whole.batches[:3])
    for run, step in (("whole", 1), ("whole", 7), ("whole", 9), ("stopped", 3)):
        torch.manual_seed(99)
        rest = train(tmp_path / "rest", tmp_path / run / f"step={step}.ckpt")
        assert same(rest.batches, whole.batches[step:]), f"after step {step}"
        assert torch.equal(rest.linear.weight, whole.linear.weight)


@WORKERS
def test_fabric_resumes_exactly(lightning: Any, workers: dict[str, Any], tmp_path: Path) -> None:
    """`Fabric.save` and `Fabric.load` take a loader like a model: a new one continues with the next batch."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def new_loader(seed: int) -> Any:
        torch.manual_seed(seed)
        return fabric.setup_dataloaders(aiofeed.DataLoader(Samples(), 4, shuffle=True, **workers))

    loader = new_loader(1)
    batches: list[torch.Tensor] = []
    for _ in range(EPOCHS):
        for batch in loader:
            batches.append(batch.clone())
            if len(batches) == 9:
                fabric.save(tmp_path / "last.ckpt", {"loader": loader})
    again = new_loader(99)
    fabric.load(tmp_path / "last.ckpt", {"loader": again})
    assert same(list(again), batches[9:])
