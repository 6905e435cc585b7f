"""DistributedDataParallel on one host: two ranks are attached to one server, which gives each batch to one of them.

    python examples/ddp_one_host.py

The ranks receive batches in rotation. If the number of batches is a multiple of the number of ranks, all of them take
the same number of steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import aiofeed

RANKS = 2
SAMPLES = 256


def train(rank: int, folder: str, result: Connection) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    linear = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    with aiofeed.attach(f"{folder}/feed.sock") as feed:
        batches = 0
        for inputs, targets in feed:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs / SAMPLES), targets / SAMPLES).backward()
            optimizer.step()
            seen += inputs.flatten().int().tolist()
            batches += 1
    torch.distributed.destroy_process_group()
    result.send((batches, seen, linear.weight.item()))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    context = multiprocessing.get_context("spawn")
    x = torch.arange(float(SAMPLES)).unsqueeze(1)
    # The server distributes the batches, so the feeder itself is not sharded.
    feeder = aiofeed.Feeder(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, shard=None)
    with tempfile.TemporaryDirectory() as folder, feeder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        receivers, processes = [], []
        for rank in range(RANKS):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=train, args=(rank, folder, sender)))
            processes[-1].start()
            receivers.append(receiver)
        aiofeed.serve(feeder, f"{folder}/feed.sock", mode="shard", min_consumers=RANKS).run(epochs=1)
        results = [receiver.recv() for receiver in receivers]
        for process in processes:
            process.join()
    for rank, (batches, _, _) in enumerate(results):
        print(f"rank {rank}: {batches} batches")
    once = sorted(results[0][1] + results[1][1]) == list(range(SAMPLES))
    print(f"each sample once: {once}, same weights: {results[0][2] == results[1][2]}")


if __name__ == "__main__":
    main()
