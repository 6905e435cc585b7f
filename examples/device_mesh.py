"""Fully sharded data parallelism and tensor parallelism on a device mesh of 2 x 2 processes, as in torchtitan.

    python examples/device_mesh.py
    python examples/device_mesh.py --accelerate

``shard=mesh`` is all that the feeder needs: the two processes of a tensor-parallel group get the same batches. Training
stops after four steps; its checkpoint, of which each process needs the same few numbers, is resumed on a mesh of 4 x 1.
``--accelerate`` makes the meshes with Accelerate's ``ParallelismConfig``; with an ``Accelerator`` that has one, pass
``shard=accelerator.torch_device_mesh``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import aiofeed

PROCESSES = 4
SAMPLES = 128


def new_mesh(data_parallel: int, tensor_parallel: int, accelerate: bool) -> DeviceMesh:
    if accelerate:
        from accelerate.utils import ParallelismConfig

        config = ParallelismConfig(dp_shard_size=data_parallel, tp_size=tensor_parallel)
        return config.build_device_mesh("cpu")  # type: ignore[no-any-return]
    return init_device_mesh("cpu", (data_parallel, tensor_parallel), mesh_dim_names=("dp_shard", "tp"))


def train(mesh: DeviceMesh, state: dict[str, Any] | None, steps: int | None) -> tuple[list[int], dict[str, Any]]:
    """Train for ``steps`` or to the end of the epoch; returns the samples seen, and the state of the feeder."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(float(SAMPLES)).unsqueeze(1)
    seen: list[int] = []
    with aiofeed.Feeder(TensorDataset(x, 2 * x), batch_size=8, shuffle=True, shard=mesh) as feeder:
        if state is not None:
            feeder.load_state_dict(state)
        for step, (inputs, targets) in enumerate(feeder, 1):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs / SAMPLES), targets / SAMPLES).backward()
            optimizer.step()
            seen += inputs.flatten().int().tolist()
            if step == steps:
                break
        return seen, feeder.state_dict()


def run(rank: int, folder: str, accelerate: bool, result: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=PROCESSES)
    before, state = train(new_mesh(2, 2, accelerate), None, steps=4)
    after, _ = train(new_mesh(4, 1, accelerate), state, steps=None)
    torch.distributed.barrier()
    result.send((before, after))
    sys.stdout.flush()
    os._exit(0)  # torch keeps gloo's threads, which may abort the exit of the interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerate", action="store_true", help="make the meshes with Accelerate")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        receivers = []
        for rank in range(PROCESSES):
            receiver, sender = context.Pipe(duplex=False)
            context.Process(target=run, args=(rank, folder, options.accelerate, sender), daemon=True).start()
            receivers.append(receiver)
        before, after = zip(*(receiver.recv() for receiver in receivers), strict=True)
    print(f"2 x 2: the processes of a group saw the same samples: {before[0] == before[1] and before[2] == before[3]}")
    print(f"4 x 1: each sample once: {sorted(sum(after, before[0] + before[2])) == list(range(SAMPLES))}")


if __name__ == "__main__":
    main()
