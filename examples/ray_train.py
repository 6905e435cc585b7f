"""Ray Train with two workers, a shard for each, and a checkpoint that any number of workers can resume.

    python examples/ray_train.py
    python examples/ray_train.py --engine ray:1
    python examples/ray_train.py --self-test

With ``--engine ray:1`` each worker's samples are decoded by an actor, on any node of the cluster. ``--self-test`` stops
a training of two workers after five steps, and resumes it with three.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import aiofeed

SAMPLES = 300


class Numbers:
    """A source; your own is ``ImageFolder`` or ``Files``, of paths that every node can read."""

    def __len__(self) -> int:
        return SAMPLES

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        return b"%d" % index


def decode(data: bytes) -> torch.Tensor:
    """float32 [1]: the number, from 0 to 1."""
    return torch.tensor([int(data) / SAMPLES])


def train_worker(options: dict[str, Any]) -> None:
    """The function that Ray runs in each worker."""
    context = ray.train.get_context()
    # Ray Train has initialized torch.distributed, from which the feeder gets rank and world size.
    feeder: aiofeed.Feeder[torch.Tensor] = aiofeed.Feeder(
        Numbers(), decode=decode, batch_size=8, shuffle=True, engine=options["engine"]
    )
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if (checkpoint := ray.train.get_checkpoint() or options["checkpoint"]) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        feeder.load_state_dict(saved["feeder"])

    seen = 0
    with feeder:
        for step, inputs in enumerate(feeder, start=1):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), 2 * inputs).backward()
            optimizer.step()
            seen += len(inputs)
            if step == options["steps"]:
                break
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "feeder": feeder.state_dict()}
            torch.save(state, Path(folder, "state.pt"))  # the feeder's state is the same on every rank
            rank = context.get_world_rank()
            print(f"worker {rank} of {context.get_world_size()}: {seen} samples", flush=True)
            total = torch.tensor(seen)
            torch.distributed.all_reduce(total)
            saved_here = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"seen": int(total)}, checkpoint=saved_here)


def train(storage: str, workers: int, engine: str, *, steps: int = 0, checkpoint: Any = None) -> ray.train.Result:
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"engine": engine, "steps": steps, "checkpoint": checkpoint},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name=f"{workers}-workers", storage_path=storage),
    )
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="thread", help='of the feeder, such as "ray:1" (%(default)s)')
    parser.add_argument("--self-test", action="store_true", help="stop, and resume with more workers")
    options = parser.parse_args()
    if options.self_test:
        # As many CPUs as the workers and their actors reserve; none of them needs much of one.
        ray.init("local", num_cpus=8, object_store_memory=100_000_000, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        first = train(storage, 2, options.engine, steps=5 if options.self_test else 0)
        seen = first.metrics["seen"]
        if options.self_test:
            seen += train(storage, 3, options.engine, checkpoint=first.checkpoint).metrics["seen"]
            print(f"self-test: {seen} samples seen: {SAMPLES}, and {seen - SAMPLES} repeated")
    ray.shutdown()


if __name__ == "__main__":
    main()
