"""Trainers whose loaders get aiofeed's iterators, as under `aiofeed run`: the losses have the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import aiofeed
from aiofeed.loader.run import loaders

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

SAMPLES, EPOCHS = 26, 2


class Samples(Dataset[Any]):
    """Sample i is i with noise, which workers draw from their generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.cat([torch.tensor([float(index)]), torch.rand(1)])
        return {"x": x / SAMPLES, "labels": x[:1] / SAMPLES}


class Model(torch.nn.Module):
    """A line; `losses` has the bits of each loss of the training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(2, 1)
        self.losses: list[str] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.linear(x), labels)
        if self.training:
            self.losses.append(loss.item().hex())
        return {"loss": loss}


def optional(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def with_lightning(model: Model, folder: Path) -> None:
    """A fit with a sampler that Lightning puts in: it makes the loaders again from their arguments."""
    lightning = optional("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.seed_everything(2, workers=True, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        overfit_batches=3,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(Samples(), 4, shuffle=True, num_workers=1), DataLoader(Samples(), 4))


def with_accelerate(model: Model, folder: Path) -> None:
    """A loop over a prepared loader, whose class Accelerate has derived from torch's when it was imported."""
    accelerate = optional("accelerate")
    state = optional("accelerate.state")
    for dispatches in (False, True):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(
            cpu=True,
            dataloader_config=accelerate.DataLoaderConfiguration(
                dispatch_batches=dispatches, use_seedable_sampler=True
            ),
        )
        accelerate.utils.set_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(Samples(), 4, shuffle=True, num_workers=1, persistent_workers=True)
        )
        for _ in range(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(prepared(**batch)["loss"])
                optimizer.step()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def with_transformers(model: Model, folder: Path) -> None:
    """A Trainer with evaluation after each epoch."""
    transformers = optional("transformers")
    transformers.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        dataloader_num_workers=1,
        dataloader_pin_memory=False,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=4,
    )
    transformers.Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples()).train()


@pytest.fixture
def changed() -> Iterator[Callable[[], None]]:
    """`changed()` gives torch's loaders aiofeed's iterators; the records are those of the loaders."""

    def change() -> None:
        aiofeed.load_ipython_extension(shell)  # type: ignore[attr-defined]

    shell: Any = type("Shell", (), {"register_magic_function": lambda *_: None})()
    yield change
    aiofeed.unload_ipython_extension(shell)  # type: ignore[attr-defined]
    loaders._records.clear()


@pytest.mark.parametrize("train", [with_lightning, with_accelerate, with_transformers])
def test_losses_of_trainers(
    train: Callable[[Model, Path], None], changed: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loss is the same, bit for bit, and none of the trainer's loaders is left alone."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # Accelerate sets it too; monkeypatch removes it
    before, after = Model(), Model()
    train(before, tmp_path)
    changed()
    train(after, tmp_path)
    assert len(before.losses) >= 6
    assert after.losses == before.losses
    records = loaders._records.values()
    assert not [record.note for record in records if record.note]
    assert sum(record.batches for record in records) >= len(after.losses)
