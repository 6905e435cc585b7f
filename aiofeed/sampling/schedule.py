"""Positions within epochs, the schedule of batches from a position on, and fingerprints. Pure functions.

A position is an epoch and the number of its samples that all ranks have handed out. It does not depend on batch size,
world size or concurrency, so an epoch can be resumed with other values of these.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from aiofeed.core.types import BatchPlan
from aiofeed.sampling.order import (
    BatchRanges,
    FeistelPermutation,
    ListPermutation,
    Permutation,
    Sequential,
    Shard,
    epoch_seed,
    plans,
    shuffled,
)

# Enough to distinguish datasets, few enough to take a millisecond.
FINGERPRINT_KEYS = 1024

Shuffle: TypeAlias = bool | Literal["keyed"]


@dataclass(frozen=True)
class Position:
    """A position within an epoch.

    Args:
        epoch: The number of the epoch.
        consumed: The number of samples that all ranks have handed out, in order and without a gap.
        ahead: The numbers of further batches that were handed out, counted from ``consumed`` on; with
            ``in_order=False`` only.
    """

    epoch: int = 0
    consumed: int = 0
    ahead: frozenset[int] = frozenset()

    @property
    def at_start(self) -> bool:
        """Whether this is the start of an epoch."""
        return self.consumed == 0 and not self.ahead


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that the order of samples depends on, except the sampler.

    Args:
        length: The number of samples of the source, or of the sampler.
        batch_size: Samples per batch and rank.
        seed: Seeds shuffling and each sample's random numbers.
        shuffle: ``True`` for ``torch.randperm``, "keyed" for a permutation computed per position.
        drop_last: Drop the samples that do not fill a batch on every rank.
        pad: Give each rank the same number of samples.
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: Shuffle = False
    drop_last: bool = False
    pad: bool = True
    rank: int = 0
    world_size: int = 1

    def shard(self, consumed: int = 0) -> Shard:
        """The batches of this rank after ``consumed`` positions."""
        return Shard(
            length=self.length,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            consumed=consumed,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    def plans(self, start: Position, sampled: Permutation | None = None) -> Iterator[BatchPlan]:
        """The batches from a position to the end of its epoch; ``sampled`` are the indices of a sampler."""
        permute = self._permute(start, sampled)
        return plans(self.shard(start.consumed), permute, epoch_seed(self.seed, start.epoch), start.ahead)

    def batch_ranges(self, start: Position, sampled: Permutation | None = None) -> BatchRanges:
        """The same batches, several at once."""
        return BatchRanges(self.shard(start.consumed), self._permute(start, sampled), start.ahead)

    def _permute(self, start: Position, sampled: Permutation | None) -> Callable[[], Permutation]:
        return partial(self._permutation, start.epoch) if sampled is None else lambda: sampled

    def _permutation(self, epoch: int) -> Permutation:
        if self.shuffle == "keyed":
            return FeistelPermutation(self.length, self.seed, epoch)
        return shuffled(self.length, self.seed, epoch) if self.shuffle else Sequential()

    def position_after(self, start: Position, number: int, earlier: Set[int] | None = None) -> Position:
        """The position after batch ``number`` of an iterator that began at ``start``.

        Args:
            start: Where the iterator began.
            number: The number of the batch, counted from ``start``.
            earlier: The numbers of the batches handed out before it; ``None`` if batches are handed out in order.
        """
        done = start.ahead if earlier is None else start.ahead | earlier | {number}
        prefix = number + 1 if earlier is None else 0
        while prefix in done:
            prefix += 1
        shard = self.shard(start.consumed)
        if prefix >= shard.batches:
            return Position(start.epoch + 1)
        ahead = frozenset(batch - prefix for batch in done if batch > prefix)
        return Position(start.epoch, shard.consumed_after(prefix), ahead)

    def normalize(self, position: Position) -> Position:
        """The position, or the start of the next epoch if no batch of this one is left."""
        if position.at_start or self.shard(position.consumed).batches > len(position.ahead):
            return position
        return Position(position.epoch + 1)


def index_list(indices: Sequence[int], length: int) -> ListPermutation:
    """The indices of a sampler for a source of ``length`` samples.

    Raises:
        TypeError: One of them is not an int.
        ValueError: One of them is outside the source.
    """
    try:
        array = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    except TypeError as error:
        raise TypeError(f"a sampler must give one int per sample (batch_size= makes the batches): {error}") from None
    if array.size and (array.min() < 0 or array.max() >= length):
        wrong = int(array[(array < 0) | (array >= length)][0])
        raise ValueError(f"the sampler gave the index {wrong}, but the source has {length} samples")
    return ListPermutation(array)


def digest(permutation: ListPermutation) -> str:
    """Identifies the index list of a sampler."""
    return hashlib.sha256(permutation.indices.tobytes()).hexdigest()[:32]


def fingerprint(kind: str, length: int, key: Callable[[int], str]) -> str:
    """Identifies a source by its type, its length and up to 1,024 evenly spaced keys.

    Their common folder is left out, so that the data may be moved.
    """
    count = min(length, FINGERPRINT_KEYS)
    keys = [key(number * length // count) for number in range(count)]
    first, last = (min(keys), max(keys)) if keys else ("", "")
    common = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    root = max(first.rfind("/", 0, common), first.rfind("\\", 0, common), 0)
    lines = [kind, str(length), *[name[root:] for name in keys]]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:32]
