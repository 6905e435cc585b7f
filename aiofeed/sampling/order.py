"""Which sample comes when: a pure function of (seed, epoch, rank, world size), index in, position out.

An epoch is one list of positions, 0 to n - 1, followed by as much of its own head as makes it even (padding). Rank r
of R takes positions r, r + R, r + 2R, ... as torch's ``DistributedSampler`` does, and cuts them into batches. A
permutation says which index stands at a position. After a resume the same formula is applied to what is left.
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

# Samples whose order is computed at once: for batches that are planned one by one, and for stretches of them.
PLANNED = 1024
STRETCHED = 1 << 14


def epoch_seed(seed: int, epoch: int) -> int:
    """What (seed, epoch) come to: 64 bits that the samples' own numbers derive from."""
    return mix64(mix64(seed & MASK64) ^ (epoch & MASK64))


def sample_seed(of_epoch: int, position: int) -> int:
    """A sample's own 63-bit number, from its epoch's and its position in the epoch's global order."""
    return mix64(of_epoch ^ mix64(position)) >> 1


class Permutation(Protocol):
    """Which index stands at a position of the epoch."""

    def __call__(self, positions: Int64) -> Int64:
        """The indices at ``positions``, each from 0 to n - 1."""
        ...


class Sequential:
    """Unshuffled: the index is the position."""

    def __call__(self, positions: Int64) -> Int64:
        """The positions themselves."""
        return positions


class ListPermutation:
    """A stored list of indices: a shuffled epoch, or what a sampler gave."""

    def __init__(self, indices: Int64) -> None:
        self.indices = indices

    def __call__(self, positions: Int64) -> Int64:
        """Look the positions up."""
        return self.indices[positions]


def shuffled(n: int, seed: int, epoch: int) -> ListPermutation:
    """``torch.randperm(n)`` from a generator seeded with ``seed + epoch``, as ``DistributedSampler`` shuffles."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return ListPermutation(torch.randperm(n, generator=generator, device="cpu").numpy())


class FeistelPermutation:
    """A permutation computed per position, nothing stored: a Feistel network, walked until it lands below n.

    Six rounds over the smallest even number of bits that holds n - 1; cycle walking (Black and Rogaway 2002) needs
    under four steps on average, since the domain is below 4 n.
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
    """One rank's part of what is left of an epoch, in batches.

    Args:
        length: samples of the epoch, n.
        batch_size: samples per batch and rank.
        rank: which part, 0 to ``world_size - 1``.
        world_size: how many parts.
        consumed: positions that were handed out before, over all ranks; 0 at the start of an epoch.
        drop_last: leave out what does not fill a batch on every rank.
        pad: make the ranks even by repeating the head of the list (or, with ``drop_last``, by cutting).
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
        """Samples left for this rank, those of a last batch that is dropped not counted."""
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
        """Batches left for this rank."""
        return -(-self.samples // self.batch_size)

    def positions(self, batch: int, count: int = 1) -> Int64:
        """Positions of the samples of ``count`` batches in the epoch's list; from ``length`` on they are padding."""
        first, last = batch * self.batch_size, min((batch + count) * self.batch_size, self.samples)
        return self.consumed + self.rank + np.arange(first, last, dtype=np.int64) * self.world_size

    def consumed_after(self, batches: int) -> int:
        """Positions handed out, over all ranks, once each rank has had ``batches`` more."""
        return min(self.consumed + min(batches * self.batch_size, self.samples) * self.world_size, self._end)

    @property
    def _end(self) -> int:
        return self.consumed + -(-max(self.length - self.consumed, 0) // self.world_size) * self.world_size


@dataclass(frozen=True, eq=False)
class PermutedOrder:
    """The order of one epoch: a permutation, begun anew behind its end.

    Args:
        length: samples of the epoch.
        permutation: which index stands where.
    """

    length: int
    permutation: Permutation

    def index_at(self, position: int) -> int:
        """The index at a position."""
        return int(self.permutation(np.array([position % self.length], dtype=np.int64))[0])


def plans(
    shard: Shard, permute: Callable[[], Permutation], of_epoch: int, skip: frozenset[int] = frozenset()
) -> Iterator[BatchPlan]:
    """The batches of a stripe, in order, computed as they are asked for; those numbered in ``skip`` are left out.

    ``permute`` is called once, with the first batch, by whoever asks for it: a list of a hundred million indices
    takes a second to shuffle, and the caller of ``iter()`` should not wait for it.
    """
    if not shard.batches:
        return
    permutation = permute()
    order = PermutedOrder(shard.length, permutation)
    size, batches = shard.batch_size, shard.batches
    # Some batches at a time: six steps of numpy's on 64 numbers cost ten times what the numbers do.
    several = max(PLANNED // size, 1)
    for first in range(0, batches, several):
        found = shard.positions(first, several)
        indices, positions = _as_list(permutation(found % shard.length)), _as_list(found)
        for number in range(first, min(first + several, batches)):
            if number not in skip:
                piece = slice((number - first) * size, (number - first + 1) * size)
                yield BatchPlan(number, indices[piece], positions[piece], of_epoch, order)


@dataclass(frozen=True, eq=False)
class BatchRange:
    """Some batches at once.

    Args:
        numbers: which ones, ascending.
        indices: of all their samples, in order; each batch has ``batch_size`` of them, an epoch's last may have fewer.
        batch_size: samples per batch.
        run: whether the indices count up one by one.
    """

    numbers: Sequence[int]
    indices: Int64
    batch_size: int
    run: bool

    def head(self, batches: int) -> BatchRange:
        """The first of them, so many at most."""
        indices = self.indices[: batches * self.batch_size]
        return BatchRange(self.numbers[:batches], indices, self.batch_size, self.run)


class BatchRanges:
    """The batches of a stripe as ``plans`` gives them, but several at once, from wherever they are asked for.

    Args:
        shard: the rank's part.
        permute: called once, when the first are asked for.
        skip: numbers that are left out.
    """

    def __init__(self, shard: Shard, permute: Callable[[], Permutation], skip: frozenset[int] = frozenset()) -> None:
        self._stripe = shard
        self._permute = permute
        self._permutation: Permutation | None = None
        self._skip = skip
        # Indices of some batches, of which stretches are slices, and which batches those are.
        self._block: Int64 = np.empty(0, np.int64)
        self._of = range(0)

    def at(self, first: int, most: int) -> BatchRange | None:
        """Up to ``most`` batches, the first of them number ``first`` or the next that is not left out."""
        shard, skip = self._stripe, self._skip
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
        # With one rank there is no padding, so that positions that follow one another are a run.
        run = isinstance(self._permutation, Sequential) and shard.world_size == 1 and isinstance(numbers, range)
        return BatchRange(numbers, indices, shard.batch_size, run)

    def _indices(self, first: int, count: int) -> Int64:
        """Of ``count`` batches from ``first`` on. A view of memory that is not written to again."""
        shard = self._stripe
        if first not in self._of or first + count > self._of.stop:
            if self._permutation is None:
                self._permutation = self._permute()
            several = max(count, STRETCHED // shard.batch_size)
            block = self._permutation(shard.positions(first, several) % shard.length)
            self._block, self._of = block, range(first, first + several)
        at = (first - self._of.start) * shard.batch_size
        return self._block[at : at + count * shard.batch_size]


def _as_list(values: Int64) -> Sequence[int]:
    listed: list[int] = values.tolist()
    return listed
