"""One rank of test_torchrun.py: trains under DDP, records its batches, and resumes from an existing checkpoint.

python -m torch.distributed.run --standalone --nproc-per-node=2 train_ddp.py CHECKPOINT RECORDS [--hold-at STEP ...]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from conftest import Numbers, augment, leave_group
from torch.nn.parallel import DistributedDataParallel

from aiofeed import Feeder

SAMPLES = 101
EPOCHS = 2


def write_atomically(path: Path, state: dict[str, Any]) -> None:
    """Replace the file in one step, so that a kill leaves the old or the new one."""
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    os.replace(temporary, path)


def hold(held: Path) -> None:
    """Write the process id into a file and wait until the file is removed."""
    held.with_suffix(".part").write_text(str(os.getpid()), encoding="utf-8")
    held.with_suffix(".part").replace(held)
    while held.exists():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path, help="file that rank 0 writes after every step; resumed if it exists")
    parser.add_argument(
        "records", type=Path, help="folder for the records of each launch and rank: step, epoch and batch per line"
    )
    parser.add_argument(
        "--hold-at", type=int, nargs="*", default=[], help="steps at which rank 0 waits before its checkpoint"
    )
    options = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    feeder = Feeder(Numbers(SAMPLES), decode=augment, batch_size=4, shuffle=True, seed=3)
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(linear.weight, 0.5)
    model = DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    if options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        linear.load_state_dict(state["model"])
        feeder.load_state_dict(state["feeder"])
        step = state["step"]

    launch = torch.tensor(time.time_ns())
    torch.distributed.broadcast(launch, src=0)  # the ranks of a launch have its time, and agree on it
    with feeder, open(options.records / f"{launch}-{rank}.jsonl", "w", encoding="utf-8") as records:
        for epoch in feeder.epochs(EPOCHS):
            for batch in feeder:
                step += 1
                print(json.dumps([step, epoch, batch.tolist()]), file=records, flush=True)
                optimizer.zero_grad()
                model(batch / SAMPLES).square().mean().backward()
                optimizer.step()
                if rank == 0:
                    if step in options.hold_at:
                        hold(options.records / f"held-{step}-{torch.distributed.get_world_size()}")
                    state = {"model": linear.state_dict(), "feeder": feeder.state_dict(), "step": step}
                    write_atomically(options.checkpoint, state)
    leave_group()


if __name__ == "__main__":
    main()
