"""Orders that are computed from seed and epoch, position by position: draws by weight, and mixed shards."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.sampling.lister import Lister
from aiofeed.kernel.sampling.order import (
    ComputedEpoch,
    Int64,
    Permutation,
    drawn_from,
    epoch_seed,
    feistel,
    mix64,
    shuffled,
)
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.kernel.sampling.state import json_dict


class ComputedOrder(Lister, ABC):
    """An order of which a state has to identify the arguments only.

    Args:
        length: The number of samples of an epoch.
        digest: Identifies the arguments.
    """

    differs: ClassVar[str]
    """The end of an error message: the part of the order that differs if the digest of a state does."""

    def __init__(self, length: int, digest: str) -> None:
        super().__init__(length)
        self.digest: str = digest

    @abstractmethod
    def permutation(self, epoch: int) -> Permutation:
        """Return the index at each position of an epoch."""

    def list_epoch(self, epoch: int, *, resumed: bool) -> ComputedEpoch:
        """Return the indices of an epoch, computed on demand."""
        return ComputedEpoch(self._length, self.permutation(epoch))

    def identity(self) -> str:
        """Identifies the arguments."""
        return f"{self.argument} {self.digest}"

    def state(self, position: Position) -> str:
        """Return what identifies the order, as JSON."""
        return json.dumps({self.argument: self.digest})

    def load_state(self, text: str) -> None:
        """Check that a state is of the same order.

        Raises:
            StateError: It is of another one.
        """
        if json_dict(text).get(self.argument) != self.digest:
            raise StateError(f"the state was saved with {self.differs}")


class WindowOrder(ComputedOrder):
    """The order of a feeder with ``shuffle="window"``: shards in random order, mixed over a few shards at a time.

    An epoch is cut into groups of ``width`` shards of the shuffled list of shards. The samples of a group are permuted.
    Every sample comes exactly once, and each shard is read within ``width`` shards' worth of samples.

    Args:
        starts: The index of the first sample of each shard, and the number of samples.
        width: The number of shards whose samples are mixed.
        seed: Seeds the order, together with the epoch.
        dealt: Whether the shards of a group take turns: position p has a sample of shard p modulo ``width``, as far as
            they are of one size. Then each of R ranks, if ``width`` is a multiple of R, has samples of one in R shards.
    """

    argument = "shuffle"
    differs = 'other shards, whose samples shuffle="window" mixes'

    def __init__(self, starts: Sequence[int], width: int, seed: int, *, dealt: bool = False) -> None:
        self._starts = np.asarray(starts, np.int64)
        identity = f"{width} {list(starts)}{' dealt' * dealt}"
        super().__init__(int(starts[-1]), hashlib.sha256(identity.encode()).hexdigest()[:32])
        self._width = width
        self._seed = seed
        self._dealt = dealt

    def __str__(self) -> str:
        return f"{self._width} shard{'s' * (self._width != 1)}"

    def permutation(self, epoch: int) -> Permutation:
        """Return the index at each position of an epoch."""
        shards = feistel(len(self._starts) - 1, self._seed, epoch)(np.arange(len(self._starts) - 1))
        first, ends = self._starts[shards], np.cumsum(np.diff(self._starts)[shards])
        # The position where each group of shards ends.
        groups = np.append(ends[self._width - 1 : -1 : self._width], ends[-1])
        seed = epoch_seed(self._seed, epoch)

        @lru_cache(maxsize=2)
        def dealt(start: int, size: int) -> Permutation:
            """Return the permutation of a group, in a list: for each row of a table to compute it takes longer."""
            listed, first = np.arange(size), 0
            for turn in range(self._width):
                own = listed[(turn - start) % self._width :: self._width]
                number = mix64(seed ^ mix64(start + first))
                own[:] = first + shuffled(len(own), number >> 1, 0)(np.arange(len(own)))
                first += len(own)
            return listed.take

        def indices(positions: Int64) -> Int64:
            found = np.empty_like(positions)
            numbers = np.searchsorted(groups, positions, side="right")
            for group in np.unique(numbers).tolist():
                start = int(groups[group - 1]) if group else 0
                size, at = int(groups[group]) - start, np.flatnonzero(numbers == group)
                mix = dealt(start, size) if self._dealt else feistel(size, mix64(seed ^ group), 0)
                mixed = start + mix(positions[at] - start)
                shard = np.searchsorted(ends, mixed, side="right")
                found[at] = first[shard] + mixed - np.where(shard > 0, ends[shard - 1], 0)
            return found

        return indices


class WeightedOrder(ComputedOrder):
    """The order of a feeder with ``weights=``: an epoch is as many draws, with replacement, as there are samples.

    The draws are those of torch's ``WeightedRandomSampler``, but computed per position.

    Args:
        weights: One weight per sample, from 0. Samples of weight 0 never come.
        samples: The number of samples of the source.
        seed: Seeds the draws, together with the epoch.

    Raises:
        TypeError, ValueError: They are no such weights.
    """

    argument = "weights"
    differs = "other weights="

    def __init__(self, weights: Sequence[float] | np.ndarray[Any, Any], samples: int, seed: int) -> None:
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
        super().__init__(samples, hashlib.sha256(array.tobytes()).hexdigest()[:32])
        cumulative = np.cumsum(array)
        self._cumulative = cumulative / cumulative[-1:]
        self._seed = seed

    def __str__(self) -> str:
        return f"{len(self)} weight{'s' * (len(self) != 1)}"

    def permutation(self, epoch: int) -> Permutation:
        """Return the draws of an epoch."""
        return drawn_from(self._cumulative, epoch_seed(self._seed, epoch))


class ExcludingOrder(ComputedOrder):
    """The order of a feeder with ``exclude=``: that of all samples, with the gaps closed.

    Its state has the position among all samples, so that a resume may exclude others: none comes twice.

    Args:
        base: The order of all samples, if they are not of a mixture.
        exclude: Samples to leave out, by index or key.
        key: Gives the key of an index.
        mixture: The order of all samples of a mixture that has each of them once in an epoch.

    Raises:
        TypeError, ValueError: An item of ``exclude`` is neither an index nor a key.
    """

    argument = "exclude"
    differs = "other exclude="

    def __init__(self, base: Schedule, exclude: Any, key: Callable[[int], str], mixture: Lister | None = None) -> None:
        if isinstance(exclude, str) or not isinstance(exclude, Iterable):
            raise TypeError(f"exclude must be a list of indices or keys, got {exclude!r}")
        given, samples = set(exclude.tolist() if isinstance(exclude, np.ndarray) else exclude), range(base.length)
        keys = {item for item in given if isinstance(item, str)}
        found = {name: index for index in (samples if keys else ()) if (name := str(key(index))) in keys}
        wrong = [item for item in given if item not in found and item not in samples]
        if wrong:
            raise ValueError(f"exclude has {wrong[:3]}, no index or key of the {base.length} samples of the source")
        excluded = np.array(sorted({int(found.get(item, item)) for item in given}), np.int64)
        super().__init__(base.length - len(excluded), hashlib.sha256(excluded.tobytes()).hexdigest()[:32])
        self._base = base
        self.excluded: str | None = self.digest
        self.mixture: Lister | None = mixture
        self.indices: Int64 = excluded
        self._last = -1, excluded

    def __str__(self) -> str:
        return f"{len(self.indices)} sample{'s' * (len(self.indices) != 1)}"

    def _gaps(self, epoch: int) -> Int64:
        """Return the positions of the excluded samples among all, each less the number of gaps before it."""
        last = self._last
        if last[0] != epoch:
            base, found = self._base, self.indices
            if base.shuffle == "keyed" and self.mixture is None:
                found = feistel(base.length, base.seed, epoch, inverse=True)(found)
            elif base.shuffle or self.mixture is not None:
                found = np.flatnonzero(np.isin(self._all(epoch)(np.arange(base.length)), found))
            last = self._last = epoch, np.sort(found) - np.arange(len(found))
        return last[1]

    def _all(self, epoch: int) -> Permutation:
        listed: Any = None if self.mixture is None else self.mixture.list_epoch(epoch, resumed=False)
        return self._base.permutation(epoch, listed)

    def permutation(self, epoch: int) -> Permutation:
        """Return the index at each position of an epoch."""
        indices, gaps = self._all(epoch), self._gaps(epoch)
        return lambda positions: indices(positions + np.searchsorted(gaps, positions, side="right"))

    def state(self, position: Position) -> str:
        """Return what identifies the excluded samples, and the position after the last sample among all, as JSON."""
        consumed, mixture = position.consumed, self.mixture
        passed = int(np.searchsorted(self._gaps(position.epoch), consumed - 1, side="right")) if consumed else 0
        at = consumed + passed
        whole = {} if mixture is None else json.loads(mixture.state(Position(position.epoch, at)))
        return json.dumps({**whole, self.argument: self.digest, "at": at})

    def load_state(self, text: str) -> None:
        """Load the state of a mixture. A state may exclude other samples, see ``FeedOrder.resumed``."""
        if self.mixture is not None:
            self.mixture.load_state(text)

    def identity(self) -> str:
        """Identifies the excluded samples, and the mixture."""
        return super().identity() + ("" if self.mixture is None else self.mixture.identity())

    def consumed(self, epoch: int, at: int) -> int:
        """Return the position that a position among all samples has here."""
        gaps = self._gaps(epoch)
        return at - int(np.searchsorted(gaps + np.arange(len(gaps)), at))
