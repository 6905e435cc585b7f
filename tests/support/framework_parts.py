"""A dataset for trainers of other projects, and the comparison of what they return."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

SAMPLES = 26


class Samples(Dataset[torch.Tensor]):
    """Sample i is [i, a random number]."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
