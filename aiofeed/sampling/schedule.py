"""Epochs, one after another: where a feeder stands, what comes next, and how that is written down. Pure.

A position is an epoch and how much of its list has been handed out, over all ranks. It says nothing of batch size,
ranks or concurrency, so it can be continued with others of each.
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

# Enough to tell data sets apart, few enough to be asked for in a millisecond.
FINGERPRINT_KEYS = 1024

Shuffle: TypeAlias = bool | Literal["keyed"]


@dataclass(frozen=True)
class Position:
    """Where an epoch stands.

    Args:
        epoch: which one.
        consumed: positions of its list that were handed out, over all ranks, in order and without a gap.
        ahead: numbers of batches beyond those that were handed out too, counted from ``consumed`` on; only where
            batches are not handed out in order.
    """

    epoch: int = 0
    consumed: int = 0
    ahead: frozenset[int] = frozenset()

    @property
    def fresh(self) -> bool:
        """Whether it is the start of an epoch."""
        return self.consumed == 0 and not self.ahead


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything the order of samples depends on, but for the sampler.

    Args:
        length: samples of the source, or of the sampler.
        batch_size: samples per batch and rank.
        seed: of order and samples.
        shuffle: ``True`` for ``torch.randperm``, "keyed" for a permutation that stores nothing.
        drop_last: leave out what does not fill a batch on every rank.
        pad: make ranks even.
        rank: which part.
        world_size: how many parts.
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
        """What is left for this rank after ``consumed`` positions."""
        return Shard(
            length=self.length,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            consumed=consumed,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    def plans(self, start: Position, listed: Permutation | None = None) -> Iterator[BatchPlan]:
        """The batches from a position to the end of its epoch; ``listed`` is what a sampler gave for it."""
        permute = self._permute(start, listed)
        return plans(self.shard(start.consumed), permute, epoch_seed(self.seed, start.epoch), start.ahead)

    def batch_ranges(self, start: Position, listed: Permutation | None = None) -> BatchRanges:
        """The same batches, to be had several at once."""
        return BatchRanges(self.shard(start.consumed), self._permute(start, listed), start.ahead)

    def _permute(self, start: Position, listed: Permutation | None) -> Callable[[], Permutation]:
        return partial(self._permutation, start.epoch) if listed is None else partial(_given, listed)

    def _permutation(self, epoch: int) -> Permutation:
        if self.shuffle == "keyed":
            return FeistelPermutation(self.length, self.seed, epoch)
        return shuffled(self.length, self.seed, epoch) if self.shuffle else Sequential()

    def after(self, start: Position, number: int, others: Set[int] | None = None) -> Position:
        """Where the epoch stands once batch ``number`` of a pass from ``start`` has been handed out.

        Args:
            start: where the pass began.
            number: the batch, counted from ``start``.
            others: the numbers handed out before it; ``None`` where the pass is in order and that goes without saying.
        """
        done = start.ahead if others is None else start.ahead | others | {number}
        prefix = number + 1 if others is None else 0
        while prefix in done:
            prefix += 1
        shard = self.shard(start.consumed)
        if prefix >= shard.batches:
            return Position(start.epoch + 1)
        ahead = frozenset(batch - prefix for batch in done if batch > prefix)
        return Position(start.epoch, shard.consumed_after(prefix), ahead)

    def begin(self, position: Position) -> Position:
        """The position itself, or the next epoch where nothing is left of this one."""
        if position.fresh or self.shard(position.consumed).batches > len(position.ahead):
            return position
        return Position(position.epoch + 1)


def _given(permutation: Permutation) -> Permutation:
    return permutation


def listed(indices: Sequence[int], length: int) -> ListPermutation:
    """A sampler's indices; ``ValueError`` where one is outside the source, ``TypeError`` where one is no index."""
    try:
        array = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    except TypeError as error:
        raise TypeError(f"a sampler gives one int per sample (batches are made by batch_size=): {error}") from None
    if array.size and (array.min() < 0 or array.max() >= length):
        wrong = int(array[(array < 0) | (array >= length)][0])
        raise ValueError(f"the sampler gave the index {wrong}, but the source has {length} samples")
    return ListPermutation(array)


def digest(permutation: ListPermutation) -> str:
    """What identifies a sampler's list."""
    return hashlib.sha256(permutation.indices.tobytes()).hexdigest()[:32]


def fingerprint(kind: str, length: int, key: Callable[[int], str]) -> str:
    """What identifies a source: its type, its length and up to 1,024 evenly spaced keys.

    The folder that all of them have in common is left out, so that data may move to another place.
    """
    count = min(length, FINGERPRINT_KEYS)
    keys = [key(number * length // count) for number in range(count)]
    first, last = (min(keys), max(keys)) if keys else ("", "")
    shared = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    root = max(first.rfind("/", 0, shared), first.rfind("\\", 0, shared), 0)
    lines = [kind, str(length), *[name[root:] for name in keys]]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:32]
