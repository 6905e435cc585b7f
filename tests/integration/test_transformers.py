"""Hugging Face Trainer: `accelerate.data_loader.DataLoader = aiofeed.DataLoader` replaces the loader, nothing else."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import aiofeed
from tests.support.framework_parts import same

SAMPLES, BATCHES, EPOCHS = 26, 7, 2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample i has the input i and the label 2 i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([2.0 * index])}


class Model(torch.nn.Module):
    """A line with dropout, which draws from the random generator at each step; `seen` lists the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(x.flatten().clone())
        output = self.linear(torch.nn.functional.dropout(x / SAMPLES, 0.1, self.training))
        return {"loss": torch.nn.functional.mse_loss(output, labels / SAMPLES), "logits": output}


@dataclass(frozen=True)
class Training:
    """What a training leaves."""

    batches: list[torch.Tensor]
    weight: torch.Tensor
    eval_loss: float
    loader: type


def train(folder: Path, workers: int, checkpoint: Path | None = None) -> Training:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.set_seed(4)
    model = Model()
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        save_strategy="steps" if checkpoint is None else "no",
        save_steps=3,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=4,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples())
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    loader = type(trainer.get_train_dataloader().base_dataloader)
    weight = model.linear.weight.detach().clone()
    return Training(model.seen, weight, trainer.evaluate()["eval_loss"], loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_with_aiofeed_equals_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Batches, final weights and evaluation equal those with torch's `DataLoader`; a run that is resumed in the first
    and in the second epoch equals the uninterrupted one."""
    expected = train(tmp_path / "torch", workers)
    assert expected.loader is torch.utils.data.DataLoader
    monkeypatch.setattr("accelerate.data_loader.DataLoader", aiofeed.DataLoader)
    whole = train(tmp_path / "aiofeed", workers)
    assert whole.loader is aiofeed.DataLoader
    assert len(whole.batches) == EPOCHS * BATCHES
    assert same(whole.batches, expected.batches)
    assert torch.equal(whole.weight, expected.weight)
    assert whole.eval_loss == expected.eval_loss
    for step in (3, 9):
        resumed = train(tmp_path / f"resumed-{step}", workers, tmp_path / "aiofeed" / f"checkpoint-{step}")
        assert same(resumed.batches, whole.batches[step:])
        assert torch.equal(resumed.weight, whole.weight)
