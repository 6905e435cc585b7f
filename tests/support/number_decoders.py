"""Decoders of a number in decimal digits to samples of several types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def tensor(data: bytes) -> torch.Tensor:
    """Return float32 [5]."""
    return torch.arange(5, dtype=torch.float32) + int(data)


def half(data: bytes) -> torch.Tensor:
    """Return bfloat16 [5]."""
    return tensor(data).to(torch.bfloat16)


def array(data: bytes) -> NDArray[Any]:
    """Return a numpy array, int16 [2, 3]."""
    return np.full((2, 3), int(data), np.int16)


def scalar(data: bytes) -> torch.Tensor:
    """Return int64 []."""
    return torch.tensor(int(data))
