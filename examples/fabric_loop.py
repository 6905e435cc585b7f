"""A plain loop with Lightning Fabric: stops in mid-epoch and resumes from its checkpoint; no sample is seen twice.

python examples/fabric_loop.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import TensorDataset

import aiofeed

EPOCHS = 2


def train(checkpoint: Path, steps: int | None = None) -> list[int]:
    """Train to the end, from the checkpoint if it exists, or for ``steps`` and save; returns the samples seen."""
    fabric = Fabric(accelerator="cpu", devices=1)
    x = torch.arange(100.0).unsqueeze(1)
    loader: Any = fabric.setup_dataloaders(
        aiofeed.DataLoader(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, num_workers=2)
    )
    linear = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if checkpoint.exists():
        fabric.load(checkpoint, state)

    seen: list[int] = []
    for _ in range(EPOCHS):  # after `load`, the first epoch is the rest of the one that was left
        for step, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(inputs / 100), targets / 100))
            optimizer.step()
            seen += inputs.flatten().int().tolist()
            if step == steps:
                fabric.save(checkpoint, state)
                print(f"saved after {len(seen)} samples")
                return seen
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "last.ckpt"
        before = train(checkpoint, steps=5)
        after = train(checkpoint)
    print(f"epoch 0, each sample once: {sorted(before + after[: 100 - len(before)]) == list(range(100))}")


if __name__ == "__main__":
    main()
