"""Positions within epochs, the schedule of batches from a position on, and fingerprints. Pure functions.

An epoch is the list of positions 0 to n - 1, padded with its own head to a multiple of the world size. Rank r of R
takes positions r, r + R, r + 2R, ... as torch's ``DistributedSampler`` does, and splits them into batches. A
permutation maps positions to indices. After a resume the same formula applies to the remaining positions.

A ``Position`` is an epoch and the number of its samples that all ranks have returned. It does not depend on batch
size, world size or concurrency, so an epoch can be resumed with other values of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.sampling.order import (
    BatchLists,
    ComputedEpoch,
    EpochList,
    Int64,
    Permutation,
    drawn,
    epoch_seed,
    feistel,
    sequential,
    shuffled,
)

# The number of samples whose order is computed at once. Six numpy operations on 64 numbers take ten times as long as
# the numbers themselves.
PLAN_BLOCK = 1024
# Enough to distinguish datasets, few enough to take a millisecond.
FINGERPRINT_KEYS = 1024

Shuffle: TypeAlias = bool | str
"""``shuffle=`` of ``Feeder``: True, False, or a name that ``is_shuffle`` accepts."""

Returned: TypeAlias = tuple[int, int]
"""The samples that a rank has returned with ``in_order="samples"``: the first so many, and the bits of an int for those
that follow."""

SHUFFLES = '"keyed", "replacement", "window", or "window:N" for a window of N shards, at least 1'

# The shards whose samples ``shuffle="window"`` mixes.
WINDOW_SHARDS = 16


def window_shards(shuffle: Shuffle) -> int | None:
    """Return the number of shards in "window" or "window:16"; ``None`` for another value."""
    kind, colon, number = str(shuffle).partition(":")
    if kind != "window" or (colon and not (number.isascii() and number.isdigit() and int(number) > 0)):
        return None
    return int(number) if colon else WINDOW_SHARDS


def is_shuffle(value: object) -> TypeGuard[Shuffle]:
    """Return whether ``value`` is a ``shuffle``."""
    if isinstance(value, str):
        return value in ("keyed", "replacement") or window_shards(value) is not None
    return isinstance(value, bool)


def check_shuffle(name: str, value: object) -> Shuffle:
    """Return ``value`` if it is a valid ``shuffle``."""
    if is_shuffle(value):
        return value
    hint = ": pass False; aiofeed.DataLoader takes None, too" if value is None else ""
    if isinstance(value, int):
        hint = ": True shuffles all samples, without a buffer"
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name} must be True, False, {SHUFFLES}, got {value!r}{hint}")


@dataclass(frozen=True)
class Position:
    """A position within an epoch.

    Args:
        epoch: The number of the epoch.
        consumed: The number of samples that all ranks have returned, in order and without a gap.
        ahead: What was returned besides, counted from ``consumed`` on: with ``in_order=False`` the numbers of
            batches, with ``in_order="samples"`` those of samples of this rank.
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

    In all methods ``consumed`` is the number of positions that all ranks have returned before; 0 at the start of an
    epoch.

    Args:
        length: The number of samples of the source, or of the sampler.
        batch_size: Samples per batch and rank.
        seed: Seeds shuffling and each sample's random numbers.
        shuffle: ``True`` for ``torch.randperm``, "keyed" for a permutation computed per position, "replacement" for
            independent draws. "window" needs an order that is listed.
        drop_last: Drop the samples that do not fill a batch on every rank.
        pad: Give each rank the same number of samples by repeating the head of the list, or by cutting the list with
            ``drop_last``.
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

    def samples(self, consumed: int = 0) -> int:
        """Return the remaining samples of this rank, without a last batch that is dropped."""
        return self._without_dropped(self._undropped(consumed))

    def places(self, length: int) -> int:
        """Return at how many places an epoch of this rank reads a source of ``length`` samples; ``length``: all of it.

        Samples in the order of the source are one place for each batch. Of a window, each rank gets shards of its own.
        """
        if self.world_size == 1 and self.length >= length:
            return length
        if window_shards(self.shuffle) is not None:
            return 0
        return self.samples() if self.shuffle else self.batches()

    def _undropped(self, consumed: int) -> int:
        """Return the remaining samples of this rank, with those of a last batch that is dropped."""
        left = max(self.length - consumed, 0)
        if not self.pad:
            return max(-(-(left - self.rank) // self.world_size), 0)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def _without_dropped(self, samples: int) -> int:
        return samples - samples % self.batch_size if self.drop_last else samples

    def batches(self, consumed: int = 0) -> int:
        """Return the remaining batches of this rank."""
        return -(-self.samples(consumed) // self.batch_size)

    def positions(self, consumed: int, batch: int, count: int = 1) -> Int64:
        """Return the positions of the samples of ``count`` batches; positions from ``length`` on are padding."""
        first, last = batch * self.batch_size, min((batch + count) * self.batch_size, self.samples(consumed))
        return consumed + self.rank + np.arange(first, last, dtype=np.int64) * self.world_size

    def check(self, position: Position) -> None:
        """Check that a saved position is within its epoch.

        Raises:
            StateError: It is not.
        """
        if position.consumed >= max(self.length, 1):
            raise StateError(f"the state is damaged: position {position.consumed}, but its epoch ends at {self.length}")
        if max(position.ahead, default=-1) >= (end := self._numbers_ahead(position)):
            raise StateError(
                f"the state is damaged: handed_out has {max(position.ahead)}, but {end} are left of its epoch"
            )

    def _numbers_ahead(self, start: Position) -> int:
        """Return the number of batches left; numbers in ``start.ahead`` are below it."""
        return self.batches(start.consumed)

    def batch_numbers(self, start: Position) -> int:
        """Return the number of the last batch, counted from ``start``, plus one."""
        return self.batches(start.consumed)

    def batches_ahead(self, start: Position) -> Set[int]:
        """Return the numbers of batches that were returned before ``start``."""
        return start.ahead

    def batches_left(self, start: Position) -> int:
        """Return the batches of this rank that were not returned before ``start``."""
        return self.batch_numbers(start) - len(self.batches_ahead(start))

    def positions_from(self, start: Position, batch: int, count: int = 1) -> Int64:
        """Like ``positions``, for batch numbers counted from ``start``."""
        return self.positions(start.consumed, batch, count)

    def consumed_after(self, consumed: int, batches: int) -> int:
        """Return the positions returned by all ranks, after ``batches`` more on each rank."""
        end = consumed + -(-max(self.length - consumed, 0) // self.world_size) * self.world_size
        return min(consumed + min(batches * self.batch_size, self.samples(consumed)) * self.world_size, end)

    def permutation(self, epoch: int, sampled: Int64 | ComputedEpoch | None = None) -> Permutation:
        """Return the permutation of an epoch; ``sampled`` are the indices of a sampler or a computed order."""
        if sampled is not None:
            return sampled.__getitem__
        if self.shuffle == "keyed":
            return feistel(self.length, self.seed, epoch)
        if self.shuffle == "replacement":
            return drawn(self.length, self.seed, epoch)
        return shuffled(self.length, self.seed, epoch) if self.shuffle else sequential

    def plans(self, start: Position, sampled: EpochList | None = None, first_batch: int = 0) -> Iterator[BatchPlan]:
        """Yield the batches from a position to the end of its epoch, computed on demand.

        Those before ``first_batch`` are left out, and the others keep their numbers; not for listed batches.

        The first batch computes the permutation, in the engine's thread: shuffling a list of 100 million indices takes
        a second, which the caller of ``iter()`` should not wait.
        """
        batches, size, ahead = self.batch_numbers(start), self.batch_size, self.batches_ahead(start)
        if not batches:
            return
        if isinstance(sampled, BatchLists):
            yield from self._listed_plans(start, sampled)
            return
        # Here, in the engine's thread, and not in `iter()`: a list of 100 million indices takes a second.
        permutation, seed = self.permutation(start.epoch, sampled), epoch_seed(self.seed, start.epoch)
        order = ComputedEpoch(self.length, permutation)
        several = max(PLAN_BLOCK // size, 1)
        for first in range(first_batch, batches, several):
            found = self.positions_from(start, first, several)
            indices, positions = permutation(found % self.length).tolist(), found.tolist()
            for number in range(first, min(first + several, batches)):
                if number not in ahead:
                    piece = slice((number - first) * size, (number - first + 1) * size)
                    yield BatchPlan(number, indices[piece], positions[piece], seed, order)

    def _listed_plans(self, start: Position, lists: BatchLists) -> Iterator[BatchPlan]:
        """Yield the batches of a list, of which this schedule counts each as one sample."""
        seed = epoch_seed(self.seed, start.epoch)
        samples = len(lists.indices)
        order = ComputedEpoch(samples, lists.indices.__getitem__)
        for number, position in enumerate(self.positions(start.consumed, 0, self.batches(start.consumed)).tolist()):
            if number not in start.ahead:
                repeats, batch = divmod(position, self.length)
                indices, positions, pieces = lists.samples(batch), lists.positions(batch) + repeats * samples, None
                if lists.spans is not None:
                    # A sample of which a batch has several parts is read once.
                    indices, first, sample = np.unique(indices, return_index=True, return_inverse=True)
                    pieces = np.column_stack([sample, lists.spans[lists.offsets[batch] : lists.offsets[batch + 1]]])
                    positions = positions[first]
                yield BatchPlan(number, indices.tolist(), positions.tolist(), seed, order, pieces)

    def position_after(self, start: Position, number: int, earlier: Set[int] | None = None) -> Position:
        """Return the position after batch ``number`` of an iterator that began at ``start``.

        Args:
            start: Where the iterator began.
            number: The number of the batch, counted from ``start``.
            earlier: The numbers of the batches returned before it; ``None`` if batches are returned in order.
        """
        done = start.ahead if earlier is None else start.ahead | earlier | {number}
        prefix = number + 1 if earlier is None else 0
        while prefix in done:
            prefix += 1
        if prefix >= self.batches(start.consumed):
            return Position(start.epoch + 1)
        ahead = frozenset(batch - prefix for batch in done if batch > prefix)
        return Position(start.epoch, self.consumed_after(start.consumed, prefix), ahead)

    def after(self, position: Position, batches: int) -> Position:
        """Return the position so many batches after another one in the same epoch."""
        if not batches:
            return position
        ahead = self.batches_ahead(position)
        if not ahead:
            return self.position_after(position, batches - 1)
        numbers = [number for number in range(self.batch_numbers(position)) if number not in ahead][:batches]
        return self.position_after(position, numbers[-1], frozenset(numbers))

    def normalize(self, position: Position) -> Position:
        """Return the position, or the start of the next epoch if no batch of this one is left."""
        if position.at_start or self.batches_left(position) > 0:
            return position
        return Position(position.epoch + 1)


def fingerprint(kind: str, length: int, key: Callable[[int], str]) -> str:
    """Identifies a source by its type, its length and up to 1,024 evenly spaced keys.

    Their common folder is left out, so that the data may be moved.
    """
    count = min(length, FINGERPRINT_KEYS)
    keys = [key(number * length // count) for number in range(count)]
    root = common_folder(keys)
    lines = [kind, str(length), *[name[root:] for name in keys]]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def common_folder(paths: Sequence[str]) -> int:
    """Return the number of characters of the folder that all paths have in common."""
    first, last = (min(paths), max(paths)) if paths else ("", "")
    common = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(first.rfind("/", 0, common), first.rfind("\\", 0, common), 0)
