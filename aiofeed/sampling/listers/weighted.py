"""Draws of samples by weight, with replacement: what torch's ``WeightedRandomSampler`` does, computed per position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.sampling.listers.computed import ComputedOrder
from aiofeed.sampling.order import Permutation, drawn_from, epoch_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WeightedOrder(ComputedOrder):
    """The order of a feeder with ``weights=``: an epoch is as many draws as there are samples.

    Args:
        weights: One weight per sample, from 0. Samples of weight 0 never come.
        samples: The number of samples of the source.
        seed: Seeds the draws, together with the epoch.

    Raises:
        TypeError, ValueError: They are no such weights.
    """

    argument = "weights"
    differs = "other weights="

    def __init__(self, weights: Sequence[float] | NDArray[Any], samples: int, seed: int) -> None:
        array = _checked_weights(weights, samples)
        super().__init__(samples, hashlib.sha256(array.tobytes()).hexdigest()[:32])
        cumulative = np.cumsum(array)
        self._cumulative = cumulative / cumulative[-1:]
        self._seed = seed

    def __str__(self) -> str:
        return f"{len(self)} weights"

    def permutation(self, epoch: int) -> Permutation:
        """The draws of an epoch."""
        return drawn_from(self._cumulative, epoch_seed(self._seed, epoch))


def _checked_weights(weights: Any, samples: int) -> NDArray[np.float64]:
    try:
        array = np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"weights must be one number per sample: {error}") from None
    if array.shape != (samples,):
        raise ValueError(f"weights must be one number per sample, {samples} in all, got the shape {array.shape}")
    wrong = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if wrong.size:
        raise ValueError(f"weights must be finite and at least 0, got weights[{wrong[0]}]={array[wrong[0]]}")
    if samples and not array.any():
        raise ValueError("all weights are 0, so no sample can be drawn")
    return array
