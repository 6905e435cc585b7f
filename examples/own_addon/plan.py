"""A plan: batches of samples of similar length, for `batch_size=`."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.sampling.lister import Lister, Plan
from aiofeed.kernel.sampling.order import BatchLists, epoch_seed


class SimilarLengths(Plan):
    """Batches of `size` neighbours in the order of lengths; the batches are shuffled, anew in each epoch."""

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.by_length = np.argsort(lengths, kind="stable")
        self.size = size

    def new_lister(self, schedule: Any, samples: Lister | None) -> Lister:
        """Return the lister of a feeder; `schedule` has its `seed` and `shuffle`."""
        if samples is not None or len(self.by_length) != schedule.length:
            raise ValueError(f"SimilarLengths is a plan of all {schedule.length} samples, each once")
        return _Batches(self.by_length, self.size, schedule)


class _Batches(Lister):
    by_batches = True

    def __init__(self, by_length: np.ndarray, size: int, schedule: Any) -> None:
        self.offsets = np.append(np.arange(0, len(by_length), size), len(by_length))
        self.by_length, self.schedule, self.typical_samples = by_length, schedule, size
        super().__init__(len(self.offsets) - 1)

    def list_epoch(self, epoch: int, *, resumed: bool) -> BatchLists:
        order = np.arange(len(self))
        if self.schedule.shuffle:
            np.random.default_rng(epoch_seed(self.schedule.seed, epoch)).shuffle(order)
        batches = np.split(self.by_length, self.offsets[1:-1])
        sizes = [len(batches[number]) for number in order]
        return BatchLists(np.concatenate([batches[number] for number in order]), np.append(0, np.cumsum(sizes)))

    def identity(self) -> str:
        return f"similar lengths {self.typical_samples} {zlib.crc32(self.by_length.tobytes())}"

    def state(self, position: Any) -> str:
        return json.dumps({"plan": self.typical_samples})

    def load_state(self, text: str) -> None:
        if json.loads(text or "{}").get("plan") != self.typical_samples:
            raise StateError("the state is of another plan")
