"""DistributedDataParallel under torchrun, with a checkpoint that any number of processes can resume.

    torchrun --nproc-per-node=2 examples/torchrun_ddp.py
    python examples/torchrun_ddp.py --self-test

``--self-test`` launches torchrun for five steps with two processes, then resumes with three.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import aiofeed

SAMPLES = 300


def train(checkpoint: Path, steps: int | None) -> None:
    torch.distributed.init_process_group("gloo")
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x = torch.arange(float(SAMPLES)).unsqueeze(1)
    # The feeder gets rank and world size from torch.distributed, and feeds each process its shard.
    feeder: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(
        TensorDataset(x, 2 * x), batch_size=8, shuffle=True, seed=0
    )
    linear = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        linear.load_state_dict(saved["model"])
        feeder.load_state_dict(saved["feeder"])

    seen, step = 0, 0
    with feeder:
        for inputs, targets in feeder:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs / SAMPLES), targets / SAMPLES).backward()
            optimizer.step()
            seen += len(inputs)
            step += 1
            if rank == 0:  # the feeder's state is the same on every rank
                temporary = checkpoint.with_suffix(".part")
                torch.save({"model": linear.state_dict(), "feeder": feeder.state_dict()}, temporary)
                os.replace(temporary, checkpoint)
            if step == steps:
                break
    # One write, so that lines of several processes do not mix.
    sys.stdout.write(f"process {rank} of {processes}: {seen} samples\n")
    sys.stdout.flush()
    torch.distributed.destroy_process_group()


def self_test() -> None:
    """Five steps with two processes, then the rest of the epoch with three."""
    seen = 0
    with tempfile.TemporaryDirectory() as folder:
        for processes, arguments in ((2, ["--steps", "5"]), (3, [])):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            launch += [f"--nproc-per-node={processes}", __file__, "--checkpoint", f"{folder}/last.pt", *arguments]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            done = subprocess.run(launch, check=True, stdout=subprocess.PIPE, encoding="utf-8", env=environment)
            print(done.stdout, end="")
            seen += sum(map(int, re.findall(r": (\d+) samples", done.stdout)))
    print(f"self-test: {seen} samples seen: {SAMPLES}, and {seen - SAMPLES} repeated, so that all ranks have as many")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("torchrun_ddp.pt"), help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="stop after this number of steps (at the end of the epoch)")
    parser.add_argument(
        "--self-test", action="store_true", help="launch torchrun, stop, and resume with more processes"
    )
    options = parser.parse_args()
    if options.self_test:
        self_test()
    elif "RANK" not in os.environ:
        parser.error("run it with torchrun --nproc-per-node=2, or with --self-test")
    else:
        train(options.checkpoint, options.steps)


if __name__ == "__main__":
    main()
