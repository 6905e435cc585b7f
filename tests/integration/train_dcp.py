"""One rank of test_dcp.py: saves a feeder together with the other ranks, loads it into a new one, and compares."""

from __future__ import annotations

import sys
from itertools import islice

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from conftest import Numbers, augment, leave_group

from aiofeed import Feeder


def new_feeder() -> Feeder[torch.Tensor]:
    return Feeder(Numbers(26), decode=augment, batch_size=4, shuffle=True, seed=3)


def main(folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    whole, feeder, again = new_feeder(), new_feeder(), new_feeder()
    with whole, feeder, again:
        expected = [batch.tolist() for batch in whole]
        seen = [batch.tolist() for batch in islice(feeder, 2)]
        dcp.save({"feeder": feeder}, checkpoint_id=folder)
        dcp.load({"feeder": again}, checkpoint_id=folder)
        seen += [batch.tolist() for batch in again]
    print(f"rank {torch.distributed.get_rank()}: {'equal' if seen == expected else 'differs'}\n", end="", flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
