"""Lightning's Trainer with aiofeed: stops in mid-epoch and resumes from the checkpoint; no sample is seen twice.

python examples/lightning_resume.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

import aiofeed

EPOCHS = 2


class Line(lightning.LightningModule):
    """Learns y = 2 x, and records each x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        self.seen += x.flatten().int().tolist()
        return torch.nn.functional.mse_loss(self.linear(x / 100), y / 100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def new_loader() -> aiofeed.DataLoader[Any]:
    x = torch.arange(100.0).unsqueeze(1)
    return aiofeed.DataLoader(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, num_workers=2)


def new_trainer(folder: Path, **options: Any) -> lightning.Trainer:
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    return lightning.Trainer(accelerator="cpu", devices=1, callbacks=[save], logger=False, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
        first, loader = Line(), new_loader()
        new_trainer(Path(folder), max_steps=5, **quiet).fit(first, loader)
        print(f"stopped after step 5 of {len(loader)}: {len(first.seen)} samples seen")
        # As in a new process: a new model, trainer and loader.
        second = Line()
        new_trainer(Path(folder), max_epochs=EPOCHS, **quiet).fit(
            second, new_loader(), ckpt_path=Path(folder) / "step=5.ckpt"
        )
    rest = 100 - len(first.seen)
    once = sorted(first.seen + second.seen[:rest]) == list(range(100))
    print(f"resumed: {rest} more samples in epoch 0, {len(second.seen) - rest} in epoch 1")
    print(f"epoch 0, each sample once: {once}")


if __name__ == "__main__":
    main()
