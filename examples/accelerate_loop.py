"""A plain training loop with Hugging Face Accelerate: stops in mid-epoch and resumes; no sample is seen twice.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import tempfile

import accelerate.data_loader
import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import aiofeed

# `prepare` makes each loader in `accelerate.data_loader`. From here on it is aiofeed's.
accelerate.data_loader.DataLoader = aiofeed.DataLoader  # type: ignore[attr-defined]

EPOCHS = 2


def train(folder: str, steps: int | None = None, resume: bool = False) -> list[int]:
    """Train to the end, or for ``steps`` and save; returns the samples seen."""
    accelerator = Accelerator(cpu=True)
    x = torch.arange(100.0).unsqueeze(1)
    loader = aiofeed.DataLoader(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, num_workers=2)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(folder)

    seen: list[int] = []
    for epoch in range(EPOCHS):  # after `load_state`, the first epoch is the rest of the one that was left
        for step, (inputs, targets) in enumerate(loader, 1):
            loss = torch.nn.functional.mse_loss(model(inputs / 100), targets / 100)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            seen += inputs.flatten().int().tolist()
            if step == steps:
                accelerator.save_state(folder)
                print(f"saved in epoch {epoch}, after {len(seen)} samples")
                return seen
    print(f"trained to the end: loss {loss.item():.4f}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = train(folder, steps=5)
        after = train(folder, resume=True)
    print(f"epoch 0, each sample once: {sorted(before + after[: 100 - len(before)]) == list(range(100))}")


if __name__ == "__main__":
    main()
