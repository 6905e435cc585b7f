"""A plain training loop with Hugging Face Accelerate: it prepares model and optimizer; the feeder needs no change.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import aiofeed

EPOCHS = 2


def train(folder: str, steps: int | None = None, resume: bool = False) -> list[int]:
    """Train to the end, or for ``steps`` and save; returns the samples seen."""
    accelerator = Accelerator(cpu=True)
    x = torch.arange(100.0).unsqueeze(1)
    # On an accelerator add device=accelerator.device. Each process gets its shard of the samples.
    feeder: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(
        TensorDataset(x, 2 * x), batch_size=8, shuffle=True, seed=0
    )
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(feeder)
    if resume:
        accelerator.load_state(folder)

    seen: list[int] = []
    step = 0
    with feeder:
        for epoch in feeder.epochs(EPOCHS):
            for inputs, targets in feeder:
                loss = torch.nn.functional.mse_loss(model(inputs / 100), targets / 100)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                seen += inputs.flatten().int().tolist()
                step += 1
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
