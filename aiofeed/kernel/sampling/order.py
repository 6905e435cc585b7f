"""The random numbers and seeds of samples, and the permutations that map positions of an epoch to indices.

All are made by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a generator with 64 bits of state, except the order of
``torch.randperm``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Int64: TypeAlias = "NDArray[np.int64]"
UInt64: TypeAlias = "NDArray[np.uint64]"

Permutation: TypeAlias = Callable[[Int64], Int64]
"""Maps positions of an epoch of n samples to indices of the source, each from 0 to n - 1."""

MASK64 = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 6


def finalize64(value: int) -> int:
    """SplitMix64's finalizer: every bit of the result depends on every bit of the 64-bit ``value``."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64(value: int) -> int:
    """Return one step of SplitMix64 from the state ``value``."""
    return finalize64((value + INCREMENT) & MASK64)


def unmix64(value: int) -> int:
    """Return the state of which ``mix64`` is ``value``."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        value ^= (value >> shift) ^ (value >> 2 * shift)
        value = value * pow(factor, -1, 1 << 64) & MASK64
    return (value - INCREMENT) & MASK64


class SplitMix64:
    """The random numbers of one sample.

    The numbers for a random crop and a flip take 4 us; ``random.Random(seed)`` takes as long before its first number.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        # Finalized, because seeds that differ by the increment would give the same stream, shifted.
        self._state = finalize64(seed & MASK64)

    def random(self) -> float:
        """Return the next number, uniform in [0, 1), 53 bits."""
        self._state = state = (self._state + INCREMENT) & MASK64
        return (finalize64(state) >> 11) * 2.0**-53


def seed_from(rng: torch.Generator | None, decoder: object) -> int:
    """Return the 64-bit seed that a random decoder draws from ``rng``; ``ValueError`` if that is ``None``."""
    if rng is None:
        raise ValueError(f"{decoder!r} is random: it needs rng, a torch.Generator")
    import torch

    return int(torch.randint(2**63 - 1, (), generator=rng, device="cpu"))


@dataclass(frozen=True, eq=False)
class BatchLists:
    """The batches of an epoch: batch k has ``indices[offsets[k]:offsets[k + 1]]``.

    ``spans``: if entries are parts of samples, (place in the batch, start, stop, length of the sample) of each, int32.
    """

    indices: Int64
    offsets: Int64
    spans: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.offsets) - 1

    def samples(self, batch: int) -> Int64:
        """Return the indices of a batch."""
        indices: Int64 = self.indices[self.positions(batch)]
        return indices

    def positions(self, batch: int) -> Int64:
        """Return the positions of a batch's samples in the epoch, from which their random numbers derive."""
        return np.arange(self.offsets[batch], self.offsets[batch + 1])

    def consumed(self, batches: int) -> Int64:
        """Return the indices of the first batches; of a sample with several parts, only its first part counts."""
        indices = self.indices[: self.offsets[batches]]
        return indices if self.spans is None else indices[self.spans[: len(indices), 1] == 0]

    def digest(self) -> str:
        """Return a digest of all batches."""
        digest = hashlib.sha256(self.indices.tobytes())
        digest.update(self.offsets.tobytes())
        if self.spans is not None:
            digest.update(self.spans.tobytes())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class ComputedEpoch:
    """The indices of an epoch in order, computed for the positions that are asked for. An ``EpochOrder``, too."""

    length: int
    permutation: Permutation

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __getitem__(self, positions: Int64) -> Int64:
        """Return the indices at some positions."""
        return self.permutation(positions)

    def index_at(self, position: int) -> int:
        """Return the index at a position; positions from ``length`` on start again at 0."""
        return int(self.permutation(np.array([position % self.length], dtype=np.int64))[0])


EpochList: TypeAlias = "Int64 | ComputedEpoch | BatchLists"
"""The indices of an epoch in order, or its batches."""


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the 64-bit seed of an epoch, from which the seeds of its samples derive."""
    return mix64(mix64(seed & MASK64) ^ (epoch & MASK64))


def sample_seed(epoch_seed: int, position: int) -> int:
    """Return the 63-bit seed of a sample, from the seed of its epoch and its position in the global order."""
    return mix64(epoch_seed ^ mix64(position)) >> 1


def sequential(positions: Int64) -> Int64:
    """Return the identity, for an unshuffled epoch."""
    return positions


def shuffled(n: int, seed: int, epoch: int) -> Permutation:
    """``torch.randperm(n)`` with a generator seeded with ``seed + epoch``, as in ``DistributedSampler``."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    indices: Int64 = torch.randperm(n, generator=generator, device="cpu").numpy()
    return indices.__getitem__


def feistel(n: int, seed: int, epoch: int, *, inverse: bool = False) -> Permutation:
    """Return a pseudo-random permutation computed per position, without a list: a Feistel network with cycle walking.

    Six rounds over the smallest even number of bits that holds n - 1, repeated until the result is below n (cycle
    walking, Black and Rogaway 2002): under four times on average, because the domain is smaller than 4 n. With keys
    in reverse and halves exchanged it is its own inverse, which maps indices to positions.
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    epoch_key = epoch_seed(seed, epoch)
    keys = [np.uint64(mix64(epoch_key + number)) for number in range(1, _FEISTEL_ROUNDS + 1)][:: -1 if inverse else 1]

    def encrypt(value: UInt64) -> UInt64:
        left, right = (value & mask, value >> half) if inverse else (value >> half, value & mask)
        for key in keys:
            left, right = right, left ^ (_mix_array(right ^ key) & mask)
        return (right << half) | left if inverse else (left << half) | right

    def permutation(positions: Int64) -> Int64:
        found = encrypt(positions.astype(np.uint64))
        # Cycle walking: under four rounds on average, because the domain is smaller than 4 n.
        outside = np.flatnonzero(found >= n)
        while outside.size:
            found[outside] = encrypt(found[outside])
            outside = outside[found[outside] >= n]
        return found.astype(np.int64)

    return permutation


def feistel_each(n: Int64, seeds: UInt64, epochs: Int64, which: Int64, positions: Int64) -> Int64:
    """Return at each position what one of several ``feistel`` gives, each of a length, a seed and an epoch.

    ``which`` is the number of the permutation of each position.
    """
    increment, one = np.uint64(INCREMENT), np.uint64(1)
    # The bits of a float64 are exact up to 2**53 samples.
    half, size = ((np.frexp(np.maximum(n - 1, 1))[1] + 1) // 2).astype(np.uint64), n.astype(np.uint64)
    mask = (one << half) - one
    epoch_keys = _mix_array((_mix_array(seeds + increment) ^ epochs.astype(np.uint64)) + increment)
    keys = [_mix_array(epoch_keys + np.uint64(number) + increment) for number in range(1, _FEISTEL_ROUNDS + 1)]

    def encrypt(value: UInt64, which: Int64) -> UInt64:
        bits, low = half[which], mask[which]
        left, right = value >> bits, value & low
        for key in keys:
            left, right = right, left ^ (_mix_array(right ^ key[which]) & low)
        return (left << bits) | right

    found = encrypt(positions.astype(np.uint64), which)
    outside = np.flatnonzero(found >= size[which])
    while outside.size:
        found[outside] = encrypt(found[outside], which[outside])
        outside = outside[found[outside] >= size[which[outside]]]
    return found.astype(np.int64)


def drawn(n: int, seed: int, epoch: int) -> Permutation:
    """Independent draws of 0 to n - 1, computed per position; not a permutation."""
    uniform = _uniform(epoch_seed(seed, epoch))
    return lambda positions: np.minimum((uniform(positions) * n).astype(np.int64), n - 1)


def drawn_from(cumulative: NDArray[np.float64], seed: int) -> Permutation:
    """Independent draws by weight, computed per position. ``cumulative``: the sums of the weights, up to 1."""
    uniform, last = _uniform(seed), np.searchsorted(cumulative, cumulative[-1:])
    return lambda positions: np.minimum(np.searchsorted(cumulative, uniform(positions), side="right"), last)


def _uniform(seed: int) -> Callable[[Int64], NDArray[np.float64]]:
    """Random numbers in [0, 1), one for each position: number p of SplitMix64 with the seed."""
    first, increment = np.uint64(mix64(seed)), np.uint64(INCREMENT)

    def numbers(positions: Int64) -> NDArray[np.float64]:
        found = _mix_array(first + (positions.astype(np.uint64) + np.uint64(1)) * increment)
        return (found >> np.uint64(11)).astype(np.float64) * 2.0**-53

    return numbers


def _mix_array(value: UInt64) -> UInt64:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
