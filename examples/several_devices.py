"""One process, several devices: each batch is split into one part per device.

    python examples/several_devices.py                              all GPUs, else two "devices" on the CPU
    python examples/several_devices.py --devices cuda:0 cuda:1

The model is copied to every device, each copy works on its part of the batch, and the gradients are averaged, as in
``torch.nn.DataParallel``, but the parts are on their devices before the step. On GPUs this example uses ``replicate``,
``parallel_apply`` and ``gather``; they need CUDA, so on the CPU it does the same explicitly.

The alternative is one process per device, which torch recommends, since one Python process launches work for one GPU
faster than for eight: ``DistributedDataParallel``, and in each process a feeder with ``device="cuda"``, which gets its
rank's shard of the samples. See examples/torchrun_ddp.py. One process is simpler to start and to debug, has one copy of
the dataset's index, and suffices for models that are cheap to launch.

Use batch sizes that are a multiple of the number of devices, so that the mean over the parts equals the mean over the
batch, and ``drop_last=True``, so that every device gets samples of the last batch.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import aiofeed

SAMPLES, BATCH_SIZE = 4096, 64


def train_on_gpus(model: torch.nn.Module, feeder: aiofeed.Feeder, devices: list[str]) -> float:
    from torch.nn.parallel import gather, parallel_apply, replicate

    model = model.to(devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for parts in feeder:
        replicas = replicate(model, devices)
        outputs = parallel_apply(replicas, [(x,) for x, _ in parts])
        losses = [mse_loss(output, y).unsqueeze(0) for output, (_, y) in zip(outputs, parts, strict=True)]
        loss = gather(losses, devices[0]).mean()
        optimizer.zero_grad()
        loss.backward()  # through gather and replicate, which sum the gradients on the first device
        optimizer.step()
    return loss.item()


def train_on_cpus(model: torch.nn.Module, feeder: aiofeed.Feeder, devices: list[str]) -> float:
    replicas = [model, *(copy.deepcopy(model) for _ in devices[1:])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for parts in feeder:
        losses = [mse_loss(replica(x), y) for replica, (x, y) in zip(replicas, parts, strict=True)]
        for replica, loss in zip(replicas, losses, strict=True):
            replica.zero_grad()
            loss.backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            parameters[0].grad = torch.stack([parameter.grad for parameter in parameters]).mean(0)
        optimizer.step()
        for replica in replicas[1:]:
            replica.load_state_dict(model.state_dict())
    return torch.stack(losses).mean().item()


def main() -> None:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=gpus or ["cpu", "cpu"], help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(%(default)s)")
    options = parser.parse_args()
    devices: list[str] = options.devices
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    dataset = TensorDataset(x, x @ torch.randn(16, 1))
    feeder: aiofeed.Feeder = aiofeed.Feeder(
        dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, device=devices
    )
    model = torch.nn.Linear(16, 1)
    train = train_on_cpus if devices[0] == "cpu" else train_on_gpus
    with feeder:
        for epoch in feeder.epochs(options.epochs):
            loss = train(model, feeder, devices)
            print(f"epoch {epoch}: loss {loss:.6f} on {', '.join(devices)}")


if __name__ == "__main__":
    main()
