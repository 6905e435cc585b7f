"""One rank of test_ranks.py: trains with torch's DataLoader and with aiofeed's, and saves what each run returned.

python -m torch.distributed.run --standalone --nproc-per-node=2 train_ranks.py FOLDER FRAMEWORK ...
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from conftest import leave_group
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import aiofeed

SAMPLES = 27
EPOCHS = 2

Run = dict[str, Any]


class Samples(Dataset[torch.Tensor]):
    """Sample i is [i, a random number]."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


def plain(new_loader: type[DataLoader[Any]]) -> Run:
    """A script for torchrun that takes a first batch before it trains."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(), shuffle=True, seed=3)
    loader = new_loader(Samples(), 4, sampler=sampler, num_workers=2)
    first = next(iter(loader))
    batches = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches += list(loader)
    return {"first": first, "length": len(loader), "batches": batches}


def accelerated(new_loader: type[DataLoader[Any]]) -> Run:
    """Accelerate: a learning-rate schedule over all steps, accumulation, skipped batches and metrics."""
    import accelerate
    import accelerate.data_loader

    accelerate.data_loader.DataLoader = new_loader  # type: ignore[attr-defined]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = new_loader(Samples(), 4, shuffle=True, num_workers=2)
    steps = EPOCHS * len(loader)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps // 2)
    validation: Any = new_loader(Samples(), 4)
    model, optimizer, loader, schedule, validation = accelerator.prepare(model, optimizer, loader, schedule, validation)
    batches, rates, synchronized = [], [], []
    for epoch in range(EPOCHS):
        active = accelerator.skip_first_batches(loader, 1) if epoch == 0 else loader
        for batch in active:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch / SAMPLES).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            batches.append(batch)
            rates.append(schedule.get_last_lr()[0])
            synchronized.append(accelerator.sync_gradients)
    metrics = torch.cat([accelerator.gather_for_metrics(batch) for batch in validation])
    assert type(loader.base_dataloader) is new_loader
    if new_loader is aiofeed.DataLoader:
        with torch.random.fork_rng():
            check_resume(accelerator)
    return {
        "batches": batches,
        "rates": rates,
        "synchronized": synchronized,
        "metrics": metrics,
        "feeder rates": accelerated_feeder(),
    }


def check_resume(accelerator: Any) -> None:
    """The state of a rank restores the second epoch in a new loader of that rank."""
    loader, again = (
        accelerator.prepare(aiofeed.DataLoader(Samples(), 4, shuffle=True, num_workers=2)) for _ in range(2)
    )
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    again.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(again, rest, strict=True))


def accelerated_feeder() -> list[float]:
    """Accelerate with a feeder: the learning rates of a schedule over `len(feeder)` steps."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(aiofeed.Tensors(torch.rand(SAMPLES, 2)), batch_size=4)
    model = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(feeder))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for (batch,) in feeder:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    feeder.close()
    return rates


def lit(new_loader: type[DataLoader[Any]]) -> Run:
    """Lightning: it makes each loader again, with a DistributedSampler."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            self.batches: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.batches.append(batch.clone())
            return self.linear(batch / SAMPLES).square().mean()

        def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return batch

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, enable_checkpointing=False, **quiet
    )
    trainer.fit(module, new_loader(Samples(), 4, shuffle=True, num_workers=2))
    assert type(trainer.train_dataloader) is new_loader
    predictions: Any = trainer.predict(module, new_loader(Samples(), 4))
    assert type(trainer.predict_dataloaders) is new_loader
    return {"batches": module.batches, "predictions": predictions, "fabric": fabric(new_loader)}


def fabric(new_loader: type[DataLoader[Any]]) -> list[torch.Tensor]:
    """Fabric: `setup_dataloaders` makes the loader again, with a DistributedSampler."""
    from lightning.fabric import Fabric

    instance = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    instance.launch()
    loader: Any = instance.setup_dataloaders(new_loader(Samples(), 4, shuffle=True, num_workers=2))
    assert type(loader._dataloader) is new_loader
    return [batch for _ in range(EPOCHS) for batch in loader]


FRAMEWORKS: dict[str, Callable[[type[DataLoader[Any]]], Run]] = {
    "torchrun": plain,
    "accelerate": accelerated,
    "lightning": lit,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder for the results, a file for each framework and rank")
    parser.add_argument("frameworks", choices=FRAMEWORKS, nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for framework in options.frameworks:
        results = {}
        for name, new_loader in (("torch", DataLoader), ("aiofeed", aiofeed.DataLoader)):
            torch.manual_seed(5)
            results[name] = FRAMEWORKS[framework](new_loader)
            results[name]["random"] = torch.rand(1)
        torch.save(results, options.folder / f"{framework}-{os.environ['RANK']}.pt")
    leave_group()


if __name__ == "__main__":
    main()
