"""The order of samples as a pure function of (seed, epoch, rank, world size).

An epoch is the list of positions 0 to n - 1, padded with its own head to a multiple of the world size. Rank r of R
takes positions r, r + R, r + 2R, ... as torch's ``DistributedSampler`` does, and splits them into batches. A
permutation maps positions to indices. After a resume the same formula applies to the remaining positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from aiofeed.core.random_numbers import MASK64, mix64
from aiofeed.core.types import BatchPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64: TypeAlias = "NDArray[np.int64]"
UInt64: TypeAlias = "NDArray[np.uint64]"

# The number of samples whose order is computed at once, for single batches and for batch ranges. Six numpy operations
# on 64 numbers take ten times as long as the numbers themselves.
PLAN_BLOCK = 1024
RANGE_BLOCK = 1 << 14


def epoch_seed(seed: int, epoch: int) -> int:
    """The 64-bit seed of an epoch, from which the seeds of its samples derive."""
    return mix64(mix64(seed & MASK64) ^ (epoch & MASK64))


def sample_seed(epoch_seed: int, position: int) -> int:
    """The 63-bit seed of a sample, from the seed of its epoch and its position in the global order."""
    return mix64(epoch_seed ^ mix64(position)) >> 1


class Permutation(Protocol):
    """Maps positions of an epoch to indices of the source."""

    def __call__(self, positions: Int64) -> Int64:
        """The indices at ``positions``, each from 0 to n - 1."""
        ...


class Sequential:
    """The identity, for an unshuffled epoch."""

    def __call__(self, positions: Int64) -> Int64:
        """The positions themselves."""
        return positions


class ListPermutation:
    """A list of indices: of a shuffled epoch, or of a sampler."""

    def __init__(self, indices: Int64) -> None:
        self.indices = indices

    def __call__(self, positions: Int64) -> Int64:
        """The indices at ``positions``."""
        return self.indices[positions]


def shuffled(n: int, seed: int, epoch: int) -> ListPermutation:
    """``torch.randperm(n)`` with a generator seeded with ``seed + epoch``, as in ``DistributedSampler``."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return ListPermutation(torch.randperm(n, generator=generator, device="cpu").numpy())


class FeistelPermutation:
    """A pseudo-random permutation computed per position, without a list: a Feistel network with cycle walking.

    Six rounds over the smallest even number of bits that holds n - 1, repeated until the result is below n (cycle
    walking, Black and Rogaway 2002): under four times on average, because the domain is smaller than 4 n.
    """

    _ROUNDS = 6

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n = np.uint64(n)
        self._half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        key = epoch_seed(seed, epoch)
        self._keys = [np.uint64(mix64(key + number)) for number in range(1, self._ROUNDS + 1)]

    def __call__(self, positions: Int64) -> Int64:
        """The indices at ``positions``."""
        found = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(found >= self._n)
        while outside.size:
            found[outside] = self._encrypt(found[outside])
            outside = outside[found[outside] >= self._n]
        return found.astype(np.int64)

    def _encrypt(self, value: UInt64) -> UInt64:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix_array(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix_array(value: UInt64) -> UInt64:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The remaining batches of one rank in an epoch.

    Args:
        length: The number of samples of the epoch, n.
        batch_size: Samples per batch and rank.
        rank: 0 to ``world_size - 1``.
        world_size: The number of ranks.
        consumed: The number of positions handed out before, by all ranks; 0 at the start of an epoch.
        drop_last: Drop the samples that do not fill a batch on every rank.
        pad: Give each rank the same number of samples by repeating the head of the list, or by cutting the list with
            ``drop_last``.
    """

    length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    consumed: int = 0
    drop_last: bool = False
    pad: bool = True

    @property
    def samples(self) -> int:
        """The remaining samples of this rank, without a last batch that is dropped."""
        left = max(self.length - self.consumed, 0)
        if not self.pad:
            mine = max(-(-(left - self.rank) // self.world_size), 0)
        elif self.drop_last:
            mine = left // self.world_size
        else:
            mine = -(-left // self.world_size)
        return mine - mine % self.batch_size if self.drop_last else mine

    @property
    def batches(self) -> int:
        """The remaining batches of this rank."""
        return -(-self.samples // self.batch_size)

    def positions(self, batch: int, count: int = 1) -> Int64:
        """The positions of the samples of ``count`` batches; positions from ``length`` on are padding."""
        first, last = batch * self.batch_size, min((batch + count) * self.batch_size, self.samples)
        return self.consumed + self.rank + np.arange(first, last, dtype=np.int64) * self.world_size

    def consumed_after(self, batches: int) -> int:
        """The positions handed out by all ranks, after ``batches`` more on each rank."""
        return min(self.consumed + min(batches * self.batch_size, self.samples) * self.world_size, self._end)

    @property
    def _end(self) -> int:
        return self.consumed + -(-max(self.length - self.consumed, 0) // self.world_size) * self.world_size


@dataclass(frozen=True, eq=False)
class PermutedOrder:
    """The order of one epoch; positions from ``length`` on start again at 0.

    Args:
        length: The number of samples of the epoch.
        permutation: Maps positions to indices.
    """

    length: int
    permutation: Permutation

    def index_at(self, position: int) -> int:
        """The index at a position."""
        return int(self.permutation(np.array([position % self.length], dtype=np.int64))[0])


def plans(
    shard: Shard, permute: Callable[[], Permutation], epoch_seed: int, skip: frozenset[int] = frozenset()
) -> Iterator[BatchPlan]:
    """The batches of a shard in order, computed on demand, without those whose numbers are in ``skip``.

    ``permute`` is called once, for the first batch, in the engine's thread: shuffling a list of 100 million indices
    takes a second, which the caller of ``iter()`` should not wait.
    """
    if not shard.batches:
        return
    permutation = permute()
    order = PermutedOrder(shard.length, permutation)
    size, batches = shard.batch_size, shard.batches
    several = max(PLAN_BLOCK // size, 1)
    for first in range(0, batches, several):
        found = shard.positions(first, several)
        indices, positions = _as_list(permutation(found % shard.length)), _as_list(found)
        for number in range(first, min(first + several, batches)):
            if number not in skip:
                piece = slice((number - first) * size, (number - first + 1) * size)
                yield BatchPlan(number, indices[piece], positions[piece], epoch_seed, order)


@dataclass(frozen=True, eq=False)
class BatchRange:
    """Several batches.

    Args:
        numbers: The numbers of the batches, ascending.
        indices: The indices of all their samples, ``batch_size`` per batch; the last batch of an epoch may have fewer.
        batch_size: Samples per batch.
        run: Whether the indices are consecutive.
    """

    numbers: Sequence[int]
    indices: Int64
    batch_size: int
    run: bool

    def head(self, batches: int) -> BatchRange:
        """The first batches, at most so many."""
        indices = self.indices[: batches * self.batch_size]
        return BatchRange(self.numbers[:batches], indices, self.batch_size, self.run)


class BatchRanges:
    """The same batches as from ``plans``, several at once and from any number on.

    Args:
        shard: The remaining batches of the rank.
        permute: Called once, when the first batches are requested.
        skip: The numbers of batches to leave out.
    """

    def __init__(self, shard: Shard, permute: Callable[[], Permutation], skip: frozenset[int] = frozenset()) -> None:
        self._shard = shard
        self._permute = permute
        self._permutation: Permutation | None = None
        self._skip = skip
        # The indices of a block of batches, of which ranges are slices, and the numbers of those batches.
        self._block: Int64 = np.empty(0, np.int64)
        self._block_numbers = range(0)

    def at(self, first: int, most: int) -> BatchRange | None:
        """Up to ``most`` batches from number ``first`` on; ``None`` if none is left."""
        shard, skip = self._shard, self._skip
        while first in skip:
            first += 1
        count = min(most, shard.batches - first)
        if count <= 0:
            return None
        numbers: Sequence[int] = range(first, first + count)
        if skip and not skip.isdisjoint(numbers):
            numbers = [number for number in numbers if number not in skip]
            indices = np.concatenate([self._indices(number, 1) for number in numbers])
        else:
            indices = self._indices(first, count)
        # With one rank there is no padding, so the positions are consecutive.
        run = isinstance(self._permutation, Sequential) and shard.world_size == 1 and isinstance(numbers, range)
        return BatchRange(numbers, indices, shard.batch_size, run)

    def _indices(self, first: int, count: int) -> Int64:
        """The indices of ``count`` batches from ``first`` on, as a view of memory that is never written again."""
        shard = self._shard
        if first not in self._block_numbers or first + count > self._block_numbers.stop:
            if self._permutation is None:
                self._permutation = self._permute()
            several = max(count, RANGE_BLOCK // shard.batch_size)
            block = self._permutation(shard.positions(first, several) % shard.length)
            self._block, self._block_numbers = block, range(first, first + several)
        at = (first - self._block_numbers.start) * shard.batch_size
        return self._block[at : at + count * shard.batch_size]


def _as_list(values: Int64) -> Sequence[int]:
    result: list[int] = values.tolist()
    return result
