"""Hugging Face's Trainer with aiofeed: stops in mid-epoch and resumes from the checkpoint; no sample is seen twice.

python examples/transformers_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile

import accelerate.data_loader
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import aiofeed

# Trainer and Accelerate make each loader in `accelerate.data_loader`. From here on it is aiofeed's.
accelerate.data_loader.DataLoader = aiofeed.DataLoader

EPOCHS = 2


class Line(Dataset[dict[str, torch.Tensor]]):
    """y = 2 x for 100 values of x."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([2.0 * index])}


class Model(torch.nn.Module):
    """Learns y = 2 x, and records each x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.flatten().int().tolist()
        return {"loss": torch.nn.functional.mse_loss(self.linear(x / 100), labels / 100)}


def train(folder: str, resume: bool = False) -> list[int]:
    """Train for five steps and save, or resume and train to the end; returns the samples seen."""
    model = Model()
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        max_steps=-1 if resume else 5,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        save_steps=5,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Line())
    trainer.train(resume_from_checkpoint=resume)
    return model.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = train(folder)
        print(f"saved after {len(before)} samples")
        after = train(folder, resume=True)
    print(f"epoch 0, each sample once: {sorted(before + after[: 100 - len(before)]) == list(range(100))}")


if __name__ == "__main__":
    main()
