"""Ignite's Engine: stops in mid-epoch and resumes from the state of the loader; no sample is seen twice.

python examples/ignite_engine.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch.utils.data import TensorDataset

import aiofeed


def new_loader() -> aiofeed.DataLoader[Any]:
    x = torch.arange(100.0).unsqueeze(1)
    return aiofeed.DataLoader(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, num_workers=2)


def new_engine(seen: list[int]) -> Engine:
    """Return an engine that learns y = 2 x, and records each x."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: Engine, batch: list[torch.Tensor]) -> float:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs / 100), targets / 100)
        loss.backward()
        optimizer.step()
        seen.extend(inputs.flatten().int().tolist())
        return loss.item()

    return Engine(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    states: list[dict[str, Any]] = []
    before: list[int] = []
    loader, engine = new_loader(), new_engine(before)

    @engine.on(Events.ITERATION_COMPLETED(once=5))
    def save_and_stop() -> None:
        states.append(loader.state_dict())
        engine.terminate()

    engine.run(loader, max_epochs=1)
    print(f"stopped after {len(before)} samples")

    after: list[int] = []
    loader, engine = new_loader(), new_engine(after)
    loader.load_state_dict(states[0])
    engine.run(loader, max_epochs=1, epoch_length=len(loader) - 5)
    print(f"epoch 0, each sample once: {sorted(before + after) == list(range(100))}")


if __name__ == "__main__":
    main()
