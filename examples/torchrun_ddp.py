"""DistributedDataParallel under torchrun, with a checkpoint that any number of processes can resume.

    torchrun --nproc-per-node=2 examples/torchrun_ddp.py
    python examples/torchrun_ddp.py --self-test

``--self-test`` launches torchrun for five steps with two processes, then resumes with three.

On one to three nodes that may leave and join while it runs, start this on each node, with the checkpoint on a file
system that all nodes mount. After each change torchrun starts the script again on all nodes:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=node1:29400 \\
        examples/torchrun_ddp.py --epochs 100 --checkpoint /shared/last.pt
"""

from __future__ import annotations

import argparse
import itertools
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


def train(checkpoint: Path, epochs: int, steps: int | None) -> None:
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

    seen = 0
    with feeder:
        # `epochs` yields the remaining epochs: none if the checkpoint is that of the end.
        batches = (batch for _ in feeder.epochs(epochs) for batch in feeder)
        for inputs, targets in itertools.islice(batches, steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs / SAMPLES), targets / SAMPLES).backward()
            optimizer.step()
            seen += len(inputs)
            if rank == 0:  # the feeder's state is the same on every rank
                temporary = checkpoint.with_suffix(".part")
                torch.save({"model": linear.state_dict(), "feeder": feeder.state_dict()}, temporary)
                os.replace(temporary, checkpoint)
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
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="stop after this number of steps (at the end of the last epoch)")
    parser.add_argument(
        "--self-test", action="store_true", help="launch torchrun, stop, and resume with more processes"
    )
    options = parser.parse_args()
    if options.self_test:
        self_test()
    elif "RANK" not in os.environ:
        parser.error("run it with torchrun --nproc-per-node=2, or with --self-test")
    else:
        train(options.checkpoint, options.epochs, options.steps)


if __name__ == "__main__":
    main()
