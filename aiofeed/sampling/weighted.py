"""Draws of samples by weight, with replacement: what torch's ``WeightedRandomSampler`` does, computed per position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.errors import StateError
from aiofeed.sampling.order import ComputedEpoch, drawn_from, epoch_seed
from aiofeed.sampling.schedule import Position

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WeightedOrder:
    """The order of a feeder with ``weights=``: an epoch is as many draws as there are samples.

    Args:
        weights: One weight per sample, from 0. Samples of weight 0 never come.
        samples: The number of samples of the source.
        seed: Seeds the draws, together with the epoch.

    Raises:
        TypeError, ValueError: They are no such weights.
    """

    sized = True

    def __init__(self, weights: Sequence[float] | NDArray[Any], samples: int, seed: int) -> None:
        array = _checked_weights(weights, samples)
        self._digest = hashlib.sha256(array.tobytes()).hexdigest()[:32]
        cumulative = np.cumsum(array)
        self._cumulative = cumulative / cumulative[-1] if samples else cumulative
        self._seed = seed

    def __str__(self) -> str:
        return f"{len(self)} weights"

    def __len__(self) -> int:
        """The draws of an epoch."""
        return len(self._cumulative)

    def list_epoch(self, epoch: int, *, resumed: bool) -> ComputedEpoch:
        """The draws of an epoch, computed on demand."""
        return ComputedEpoch(len(self), drawn_from(self._cumulative, epoch_seed(self._seed, epoch)))

    def repeat_last_epoch(self) -> None:
        """Does nothing: the list of an epoch is always the same."""

    def state(self, position: Position) -> str:
        """What identifies the weights, as JSON."""
        return json.dumps({"weights": self._digest})

    def load_state(self, text: str) -> None:
        """Check that a state is of the same weights.

        Raises:
            StateError: It is of others.
        """
        try:
            digest = json.loads(text).get("weights")
        except (ValueError, AttributeError) as error:
            raise StateError(f"the state is damaged: its weights are {text!r}") from error
        if digest != self._digest:
            raise StateError("the state was saved with other weights=, or with a sampler")


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
