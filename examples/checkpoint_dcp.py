"""torch.distributed.checkpoint saves feeder and model in one state dict.

python examples/checkpoint_dcp.py
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice

import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import TensorDataset

import aiofeed


def new_feeder() -> aiofeed.Feeder[list[torch.Tensor]]:
    return aiofeed.Feeder(TensorDataset(torch.arange(100)), batch_size=8, shuffle=True, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    model = torch.nn.Linear(1, 1)
    with tempfile.TemporaryDirectory() as folder, new_feeder() as feeder, new_feeder() as resumed:
        before = [sample for [batch] in islice(feeder, 5) for sample in batch.tolist()]
        # no_dist is for one process. With several processes, all of them save into the same folder.
        dcp.save({"model": model.state_dict(), "feeder": feeder}, checkpoint_id=folder, no_dist=True)
        print(f"saved after {len(before)} samples")

        weights = torch.nn.Linear(1, 1).state_dict()
        dcp.load({"model": weights, "feeder": resumed}, checkpoint_id=folder, no_dist=True)
        after = [sample for [batch] in resumed for sample in batch.tolist()]
    print(f"loaded: {len(after)} samples are left, each sample once: {sorted(before + after) == list(range(100))}")
    print(f"the weights equal the saved ones: {torch.equal(weights['weight'], model.weight)}")


if __name__ == "__main__":
    main()
