"""The order of samples that are drawn from several sources by weight.

Each sample of the mixture gets a window of places. The ideal mixture has drawn ``share * t`` samples of a source before
sample t, a fraction. Sample j of a source may come as soon as the ideal has begun it, and has to come before the ideal
has finished it. Of the samples that may come, the one with the earliest deadline comes. This keeps the count of every
source within one of the ideal at every place: the ideal itself fills every window, so a schedule exists (a bipartite
matching), and earliest deadline first finds it for jobs of equal length (Horn, 1974). The same holds for weights that
change.

Counts are exact integers. The order is a function of the counts at one place, so a state has those.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.validation import check_int_from
from aiofeed.kernel.sampling.lister import Lister
from aiofeed.kernel.sampling.order import (
    ComputedEpoch,
    Int64,
    Permutation,
    UInt64,
    drawn_from,
    feistel,
    feistel_each,
    mix64,
)
from aiofeed.kernel.sampling.progress import digest
from aiofeed.kernel.sampling.schedule import Position
from aiofeed.kernel.sampling.state import unreadable

# Samples that are ordered at once, and between two calls of a function that gives the weights.
BLOCK = 1024
# Weights that change are rounded to multiples of 1 / UNIT.
UNIT = 1 << 32
# Blocks of an epoch in which a deadline is looked for while weights change. Beyond them the last weights are taken to
# stay.
LOOK_AHEAD = 64
# Blocks whose samples are permuted together: the last steps of that cost as much for one block as for all of these. The
# first blocks of an epoch, for which the training waits, come in smaller groups.
GROUP = 16
# Blocks and groups whose order, and blocks whose counts are kept: between the planner and the consumer lie fewer.
KEPT_BLOCKS = 16
KEPT_GROUPS = 4
KEPT_COUNTS = 4096
NEVER = 1 << 62
# Samples of a source whose lengths are looked up at once, and those that are summed.
TOKENS_AHEAD = 64
SUMMED = 1 << 20


@dataclass(frozen=True)
class ShareBlocks:
    """The blocks of epochs of ``length`` samples; the last block of an epoch may be shorter."""

    length: int

    @property
    def per_epoch(self) -> int:
        """The blocks of an epoch."""
        return -(-self.length // BLOCK)

    def start(self, block: int) -> int:
        """Return the place where a block starts."""
        epoch, number = divmod(block, self.per_epoch)
        return epoch * self.length + number * BLOCK

    def at(self, place: int) -> int:
        """Return the block of a place."""
        epoch, position = divmod(place, self.length)
        return epoch * self.per_epoch + position // BLOCK


class ConstantShares:
    """Shares of weights that stay the same: exact fractions, so that the ideal is whole once per ``unit`` samples."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights)
        fractions = [weight / total for weight in weights]
        self.unit: int = math.lcm(*[fraction.denominator for fraction in fractions])
        self.parts: list[int] = [int(fraction * self.unit) for fraction in fractions]

    def place(self, source: int, amount: int, block: int) -> int:
        """Return the first place before which ``amount`` parts have been drawn."""
        return -(-amount // self.parts[source])

    def of_block(self, block: int) -> Sequence[int]:
        """Return the parts of each source in one sample of a block: the same for each."""
        return self.parts

    def known_before(self, place: int) -> tuple[int, list[int]]:
        """Return the last place up to ``place`` at which the ideal counts are whole numbers; and these counts."""
        times = place // self.unit
        return times * self.unit, [parts * times for parts in self.parts]

    def describe(self) -> str:
        """Identifies the weights in a state."""
        return f"{self.parts}"


class ChangingShares:
    """Shares that a function gives for each block.

    Args:
        weights: Gives the weights of the sources from the number of samples drawn before.
        blocks: The blocks.
    """

    unit = UNIT

    def __init__(self, weights: Callable[[int], Sequence[float]], blocks: ShareBlocks) -> None:
        self._weights = weights
        self._start = blocks.start
        self._per_epoch = blocks.per_epoch
        self._parts: list[list[int]] = []
        # The parts drawn before each block.
        self._before: list[list[int]] = [[0] * len(self.of_block(0))]

    def of_block(self, block: int) -> Sequence[int]:
        """The parts of each source in one sample of a block; asks for the weights of each block up to it once."""
        while len(self._parts) <= block:
            cumulative = np.cumsum(np.asarray(self._weights(self._start(len(self._parts))), np.float64))
            self._parts.append(np.diff(np.rint(cumulative / cumulative[-1] * UNIT), prepend=0).astype(int).tolist())
        return self._parts[block]

    def _drawn_before(self, block: int) -> list[int]:
        while len(self._before) <= block:
            last = len(self._before) - 1
            samples, parts = self._start(last + 1) - self._start(last), self.of_block(last)
            self._before.append([drawn + samples * part for drawn, part in zip(self._before[last], parts, strict=True)])
        return self._before[block]

    def place(self, source: int, amount: int, block: int) -> int:
        """Return the first place before which ``amount`` parts have been drawn; the block's if that is later."""
        # The weights of an epoch that has not begun are not asked for.
        stop = min(block + LOOK_AHEAD, (block // self._per_epoch + 1) * self._per_epoch)
        for number in range(block, stop):
            if self._drawn_before(number + 1)[source] >= amount:
                missing = max(amount - self._drawn_before(number)[source], 0)
                return self._start(number) + (missing and -(-missing // self.of_block(number)[source]))
        parts = self.of_block(stop - 1)[source]
        missing = amount - self._drawn_before(stop)[source]
        return self._start(stop) + -(-missing // parts) if parts else NEVER

    def known_before(self, place: int) -> tuple[int, list[int]]:
        """Return the start of the mixture, and counts of 0: the ideal counts of other places need not be whole."""
        return 0, [0] * len(self._before[0])

    def describe(self) -> str:
        """Identifies the weights in a state, as far as possible: functions cannot be compared."""
        return "a function"


Shares: TypeAlias = ConstantShares | ChangingShares
"""The samples of each source that the ideal mixture has drawn before each place, in ``unit`` parts of a sample."""


class Interleaving:
    """Which source each sample of an endless mixture is from.

    Args:
        shares: The shares of the sources.
        blocks: The blocks of an epoch.
        random_seed: Draws sources independently, with this seed, instead of evenly.
        tokens: The lengths of samples, if shares are of tokens and not of samples.
    """

    def __init__(
        self,
        shares: Shares,
        blocks: ShareBlocks,
        random_seed: int | None = None,
        tokens: TokenCounts | None = None,
    ) -> None:
        self.shares = shares
        self.tokens: TokenCounts | None = tokens
        self.blocks = blocks
        self._random_seed = random_seed
        # The planner and the consumer ask. Counts before blocks; the sources of blocks, and the samples' numbers.
        self._lock = threading.RLock()
        self._counts: dict[int, list[int]] = {}
        self._blocks: dict[int, tuple[Int64, Int64]] = {}
        self._period: Int64 | None = None

    def describe(self) -> str:
        """Return how sources are drawn, and by which weights."""
        kind = "even" if self._random_seed is None else "random"
        return f"{kind if self.tokens is None else 'tokens'}, weights {self.shares.describe()}"

    def counts(self, block: int, samples: int = 0) -> list[int]:
        """Return the samples of each source before a place: that of the block, or ``samples`` further."""
        with self._lock:
            counts = self._counts.get(block)
            if counts is None:
                counts = self._count_up_to(block)
            if not samples:
                return counts
            drawn = np.bincount(self.block(block)[0][:samples], minlength=len(counts))
            return [before + more for before, more in zip(counts, drawn.tolist(), strict=True)]

    def set_counts(self, block: int, counts: list[int]) -> None:
        """Set the counts before a block, from a state."""
        with self._lock:
            self._counts[block] = counts

    def _count_up_to(self, block: int) -> list[int]:
        start, place, counts = self.blocks.start, 0, [0] * len(self.shares.of_block(0))
        if self._random_seed is None and self.tokens is None:
            place, counts = self.shares.known_before(start(block))
        nearest = max((known for known in self._counts if known < block), default=None)
        if nearest is not None and start(nearest) > place:
            place, counts = start(nearest), list(self._counts[nearest])
        while place < start(block):
            number = self.blocks.at(place)
            self._choose(place, start(number + 1), number, counts)
            place = start(number + 1)
            self._keep(number + 1, counts)
        self._keep(block, counts)
        return self._counts[block]

    def _keep(self, block: int, counts: list[int]) -> None:
        self._counts[block] = list(counts)
        old, per_epoch = block - KEPT_COUNTS, self.blocks.per_epoch
        if old % per_epoch:
            self._counts.pop(old, None)
        if block % per_epoch == 0:  # the padding of an epoch needs its start, also if that is long ago
            self._counts.pop(block - 2 * per_epoch, None)

    def block(self, number: int) -> tuple[Int64, Int64]:
        """Return the source of each sample of a block, and the sample's number among all of that source."""
        with self._lock:
            found = self._blocks.get(number)
            if found is None:
                counts = list(self.counts(number))
                first = np.array(counts)
                sources = self._choose(self.blocks.start(number), self.blocks.start(number + 1), number, counts)
                self._keep(number + 1, counts)
                # A stable sort of a small type is ten times as fast.
                by_source = np.argsort(sources.astype(np.min_scalar_type(len(counts))), kind="stable")
                grouped, numbers = sources[by_source], np.empty_like(sources)
                of_each = np.bincount(sources, minlength=len(counts))
                numbers[by_source] = (first - np.cumsum(of_each) + of_each)[grouped] + np.arange(len(grouped))
                while len(self._blocks) >= KEPT_BLOCKS:
                    del self._blocks[next(iter(self._blocks))]
                found = self._blocks[number] = sources, numbers
            return found

    def _choose(self, first: int, stop: int, block: int, counts: list[int]) -> Int64:
        """Return the sources of the places from ``first`` to ``stop`` in a block; adds them to the counts before."""
        if self._random_seed is not None:
            cumulative = np.cumsum(self.shares.of_block(block)) / self.shares.unit
            sources = drawn_from(cumulative, self._random_seed)(np.arange(first, stop))
        elif isinstance(self.shares, ConstantShares) and self.shares.unit <= BLOCK and self.tokens is None:
            # The counts are whole at each multiple of the unit, and the sources begin again.
            unit, parts = self.shares.unit, self.shares.parts
            if self._period is None:
                self._period = self._by_deadline(0, unit, 0, [0] * len(parts))
            begun = np.bincount(self._period[: first % unit], minlength=len(parts)).tolist()
            if counts != [part * (first // unit) + more for part, more in zip(parts, begun, strict=True)]:
                return self._by_deadline(first, stop, block, counts)  # those of a state that was edited
            sources = self._period[np.arange(first, stop) % unit]
        else:
            return self._by_deadline(first, stop, block, counts)
        drawn = np.bincount(sources, minlength=len(counts)).tolist()
        counts[:] = [before + more for before, more in zip(counts, drawn, strict=True)]
        return sources

    def _by_deadline(self, first: int, stop: int, block: int, counts: list[int]) -> Int64:
        place, unit, tokens = self.shares.place, self.shares.unit, self.tokens
        # What was drawn of each source, in samples or tokens, and of all: the place, of which shares are taken.
        drawn = counts if tokens is None else [tokens.before(source, count) for source, count in enumerate(counts)]
        at, size = first if tokens is None else sum(drawn), 1
        # (first place, source) and (deadline, source) of the next sample of each source.
        waiting = [(place(source, amount * unit + 1, block) - 1, source) for source, amount in enumerate(drawn)]
        ready: list[tuple[int, int]] = []
        heapq.heapify(waiting)
        chosen = []
        for _ in range(first, stop):
            while waiting and waiting[0][0] <= at:
                source = heapq.heappop(waiting)[1]
                size = 1 if tokens is None else tokens.size(source, counts[source])
                heapq.heappush(ready, (place(source, (drawn[source] + size) * unit, block), source))
            source = heapq.heappop(ready)[1]
            chosen.append(source)
            if tokens is not None:
                size = tokens.size(source, counts[source])
                counts[source] += 1
            drawn[source] += size
            at += size
            heapq.heappush(waiting, (place(source, drawn[source] * unit + 1, block) - 1, source))
        return np.array(chosen, np.int64)


class TokenCounts:
    """The tokens of each source, in the order in which its samples are drawn.

    Args:
        lengths: The tokens of each sample, by source; at least 1.
    """

    def __init__(self, lengths: Sequence[Int64]) -> None:
        self.lengths: Sequence[Int64] = lengths
        # For each source the number of a sample, and the lengths of those from there on; and the last sum.
        self._next: dict[int, tuple[int, list[int]]] = {}
        self._sums: dict[int, tuple[int, int]] = {}
        self.drawn: Callable[[int, Int64], Int64] = lambda source, numbers: numbers % len(self.lengths[source])
        """Returns the indices in a source of samples by their numbers among all that are drawn of it."""

    def size(self, source: int, number: int) -> int:
        """Return the tokens of a sample that is drawn."""
        first, found = self._next.get(source, (0, []))
        if not first <= number < first + len(found):
            numbers = np.arange(number, number + TOKENS_AHEAD)
            first, found = number, self.lengths[source][self.drawn(source, numbers)].tolist()
            self._next[source] = first, found
        return found[number - first]

    def before(self, source: int, number: int) -> int:
        """Return the tokens of all samples of a source before one."""
        known, tokens = self._sums.get(source, (0, 0))
        if known > number:
            known, tokens = 0, 0
        for first in range(known, number, SUMMED):
            numbers = np.arange(first, min(first + SUMMED, number))
            tokens += int(self.lengths[source][self.drawn(source, numbers)].sum())
        self._sums[source] = number, tokens
        return tokens

    def forget(self) -> None:
        """Forget sums, as the order of samples changes."""
        self._next.clear()
        self._sums.clear()

    def digest(self) -> str:
        """Identifies the lengths."""
        return digest(*[f"{len(each)} {each.sum()} {each[:: -(-len(each) // 64)].tolist()}" for each in self.lengths])


@dataclass(frozen=True)
class SourceCourse:
    """Where a source is, since the mixture was changed last: its samples are numbered from the start of a pass.

    Args:
        length: The number of samples.
        number: The pass in which the change was.
        shift: Added to the count of the interleaving, gives the number of the next sample.
        earlier: The samples drawn in earlier passes.
        grown: For each time that the source became longer in this pass: the samples drawn of it, and its length before.
    """

    length: int
    number: int = 0
    shift: int = 0
    earlier: int = 0
    grown: tuple[tuple[int, ...], ...] = ()

    def changed(self, name: str, length: int, drawn: int, count: int) -> SourceCourse:
        """The course after a change of the mixture, ``drawn`` samples of the source, ``count`` in the interleaving."""
        if length < self.length:
            raise StateError(f"the source {name!r} had {self.length} samples and has {length}: it may only grow")
        passes, within = divmod(drawn - self.earlier, self.length)
        grown = () if passes else self.grown
        if within and length > self.length:
            grown += ((within, self.length),)
        return SourceCourse(length, self.number + passes, within - count, drawn - within, grown)

    def permutation(self, seed: int, number: int) -> Permutation:
        """Return the order of a pass. In the pass in which the source grew, new samples are mixed into its rest."""
        grown = self.grown if number == 0 else ()
        lengths = [*(length for _, length in grown), self.length]
        order = feistel(lengths[0], seed, self.number + number)
        for (drawn, old), length in zip(grown, lengths[1:], strict=True):
            order = _mixed_in(order, drawn, old, feistel(length - drawn, seed ^ old, self.number))
        return order


def _mixed_in(order: Permutation, drawn: int, old: int, rest: Permutation) -> Permutation:
    """A permutation of ``old`` samples of which the rest after ``drawn`` is mixed with the samples from ``old`` on."""

    def mixed(positions: Int64) -> Int64:
        moved = np.where(positions < drawn, positions, drawn + rest(np.maximum(positions - drawn, 0)))
        return np.where(moved < old, order(np.minimum(moved, old - 1)), moved)

    return mixed


class MixtureOrder(Lister):
    """The order of a feeder over a mixture: lists epochs, like ``SamplerAdapter``.

    Args:
        lengths: The number of samples of each source, by name. Indices count through the sources in this order.
        interleaving: Which source each sample is from.
        seed: Seeds the permutations of the sources.
        shuffle: Permute each source, anew each time that it starts again.
        restarts: Begin the interleaving again in each epoch, in which a source is either passed through completely or
            repeats no sample. Otherwise an epoch goes on where the one before has ended.
        max_repeats: For each source how often it may be passed through; ``None``: as often as its share needs.
        kept: The indices that are drawn, ascending, if some are left out; ``lengths`` are the numbers of these.
        bounds: The first index of each source, and the number of samples, if some are left out.
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        interleaving: Interleaving,
        seed: int,
        *,
        shuffle: bool,
        restarts: bool = False,
        max_repeats: Sequence[int | None] = (),
        kept: Int64 | None = None,
        bounds: Int64 | None = None,
    ) -> None:
        super().__init__(interleaving.blocks.length)
        self._interleaving = interleaving
        self._most = max_repeats
        self._kept = kept
        self._left_out = (
            "" if kept is None else f", {len(kept)} left of {hashlib.sha256(kept.tobytes()).hexdigest()[:32]}"
        )
        if interleaving.tokens is not None:
            interleaving.tokens.drawn = self._drawn
        self._restarts = restarts
        self._names = list(lengths)
        self._lengths: Int64 = np.array([*lengths.values()], np.int64)
        self._offsets: Int64 = np.cumsum([0, *self._lengths])
        self._bounds: Int64 = self._offsets if bounds is None else bounds
        seeds = [mix64(seed ^ int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)) for name in lengths]
        self._seeds: UInt64 = np.array(seeds, np.uint64)
        self._shuffle = shuffle
        # The indices of groups of blocks, for the batches of each. The planner and the consumer ask. Weights that
        # change, repeats and lengths are looked at for one block at a time.
        plain = isinstance(interleaving.shares, ConstantShares) and interleaving.tokens is None and not any(max_repeats)
        self._most_blocks: int = GROUP if plain else 1
        self._lock = threading.Lock()
        self._found: dict[tuple[int, int], Int64] = {}
        # In the epoch of the last change the interleaving begins. The sources, also those taken out, are in the course.
        self.changed_at: Position = Position()
        self._course = self._fresh()
        # Of tokens, counts depend on the samples before a change, too.
        self.may_change: bool = not restarts and interleaving.tokens is None

    @classmethod
    def of_state(cls, text: str, seed: int, *, shuffle: bool) -> MixtureOrder:
        """Return the order of a state, without the sources.

        Raises:
            StateError: The state has not all of it, or is damaged.
        """
        try:
            state = json.loads(text)
            known = re.fullmatch(r"(?s).*; (\w+), weights \[(.*)\], (\d+) samples(.*)\)", state["mixture"])
            if known is None or "exclude" in state or known[1] == "tokens" or " left of " in known[4]:
                raise StateError(
                    "the state does not have the whole order: weights= is a function, or there is exclude="
                )
            kind, parts, samples, restarts = known.groups()
            shares = ConstantShares([Fraction(part) for part in parts.split(",")])
            interleaving = Interleaving(shares, ShareBlocks(int(samples)), seed if kind == "random" else None)
            # After the sources come those that were taken out.
            lengths = {name: course[0] for name, course in list(state["course"][-1].items())[: len(shares.parts)]}
            order = cls(lengths, interleaving, seed, shuffle=shuffle, restarts=bool(restarts))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise StateError(f"the state is damaged: its mixture is {text!r:.200}") from error
        order.load_state(text)
        return order

    def _fresh(self) -> dict[str, SourceCourse]:
        return {name: SourceCourse(length) for name, length in zip(self._names, self._lengths.tolist(), strict=True)}

    def __str__(self) -> str:
        return f"Mixture({', '.join(self._names)})"

    def list_epoch(self, epoch: int, *, resumed: bool) -> ComputedEpoch:
        """Return the indices of an epoch, computed on demand."""
        return ComputedEpoch(len(self), lambda positions: self._indices(epoch, positions))

    def _indices(self, epoch: int, positions: Int64) -> Int64:
        found, start = np.empty_like(positions), 0
        while start < len(positions):
            first, indices = self._indices_of_group(epoch, int(positions[start]) // BLOCK)
            within = positions[start : start + len(indices)] - first * BLOCK
            outside = np.flatnonzero((within < 0) | (within >= len(indices)))
            within = within[: outside[0]] if len(outside) else within
            found[start : start + len(within)] = indices[within]
            start += len(within)
        return found

    def _indices_of_group(self, epoch: int, block: int) -> tuple[int, Int64]:
        """Return the first block of the group of a block, and the indices of the group, permuted at once."""
        size = min(1 << max(block.bit_length() - 1, 0), self._most_blocks)
        first = block - block % size
        with self._lock:
            if (found := self._found.get((epoch, first))) is None:
                while len(self._found) >= KEPT_GROUPS:
                    del self._found[next(iter(self._found))]
                found = self._found[epoch, first] = self._permuted(epoch, first, size)
            return first, found

    def _permuted(self, epoch: int, first: int, size: int) -> Int64:
        before, per_epoch = self._first_block(epoch), self._interleaving.blocks.per_epoch
        blocks = range(before + first, before + min(first + size, per_epoch))
        sources, numbers = map(np.concatenate, zip(*map(self._interleaving.block, blocks), strict=True))
        numbers = numbers + self._start(epoch)[sources]
        for source, most in enumerate(self._most):
            if most is None:
                continue
            course, drawn = self._course[self._names[source]], numbers[sources == source]
            if len(drawn) and drawn[-1] + course.shift >= (most - course.number) * course.length:
                raise ValueError(
                    f"the source {self._names[source]!r} would be passed through more often than max_repeats={most}: "
                    f"give it a smaller weight, or train for fewer samples"
                )
        found: Int64 = self._offsets[sources] + self._local(sources, numbers)
        return found if self._kept is None else self._kept[found]

    def _drawn(self, source: int, numbers: Int64) -> Int64:
        """Return the indices in a source of samples by their numbers."""
        return self._local(np.full(len(numbers), source), numbers)

    def _local(self, sources: Int64, numbers: Int64) -> Int64:
        """Return the indices in their sources of samples by their numbers in the endless list of passes."""
        courses = [self._course[name] for name in self._names]
        before, shifts = np.array([(course.number, course.shift) for course in courses]).T
        passes, local = np.divmod(numbers + shifts[sources], self._lengths[sources])
        if not self._shuffle:
            return local
        # A permutation for each pass of a source, numbered from the first one here: small numbers are sorted fast.
        begun, which = np.zeros_like(self._lengths), np.empty_like(sources)
        begun[sources[::-1]] = passes[::-1]
        each = (passes - begun[sources]) * len(courses) + sources
        order = np.argsort(each.astype(np.min_scalar_type(each.max())), kind="stable")
        firsts = np.diff(each[order], prepend=-1) != 0
        which[order] = np.cumsum(firsts) - 1
        at = sources[order[firsts]]
        epochs = passes[order[firsts]] + before[at]
        found = feistel_each(self._lengths[at], self._seeds[at], epochs, which, local)
        for source in [source for source, course in enumerate(courses) if course.grown]:
            here = np.flatnonzero((sources == source) & (passes == 0))
            found[here] = courses[source].permutation(int(self._seeds[source]), 0)(local[here])
        return found

    def _first_block(self, epoch: int) -> int:
        return 0 if self._restarts else (epoch - self.changed_at.epoch) * self._interleaving.blocks.per_epoch

    def _drawn_per_epoch(self) -> list[int]:
        """Return the samples of each source in an epoch, if every epoch restarts."""
        return self._interleaving.counts(self._interleaving.blocks.per_epoch)

    def _start(self, epoch: int) -> Int64:
        """Return where an epoch begins in the endless list of each source's passes; 0 unless every epoch restarts."""
        if not self._restarts or not epoch:
            return np.zeros_like(self._lengths)
        drawn, lengths = np.array(self._drawn_per_epoch()), self._lengths
        if not self._shuffle:
            return epoch * drawn
        # An epoch that draws each sample, or none twice, does not begin or end in the middle of two permutations: it
        # takes whole passes, the last one cut, or a pass serves as many epochs as it has samples for.
        passes, epochs = -(-drawn // lengths), np.maximum(lengths // np.maximum(drawn, 1), 1)
        found: Int64 = epoch // epochs * passes * lengths + epoch % epochs * drawn
        return found

    def count(self, indices: Int64) -> dict[str, int]:
        """Return how many of some indices are of each source."""
        sources = np.searchsorted(self._bounds, indices, side="right") - 1
        return dict(zip(self._names, np.bincount(sources, minlength=len(self._names)).tolist(), strict=True))

    def counts(self, position: Position) -> dict[str, int]:
        """Return the samples drawn from each source before a position, from the first epoch on."""
        counts = self._interleaving.counts(*self._block(position))
        if self._restarts and position.epoch:
            counts = [
                position.epoch * drawn + more for drawn, more in zip(self._drawn_per_epoch(), counts, strict=True)
            ]
        drawn = dict(zip(self._names, counts, strict=True))
        return {name: each.earlier + each.shift + drawn.get(name, 0) for name, each in self._course.items()}

    def _block(self, position: Position) -> tuple[int, int]:
        """Return the block of a position, and the samples in it before the position; padding does not count."""
        blocks = self._interleaving.blocks
        number, samples = divmod(min(position.consumed, blocks.length), BLOCK)
        if number == blocks.per_epoch:
            number, samples = number - 1, BLOCK
        return self._first_block(position.epoch) + number, samples

    def name_of(self, index: int) -> str:
        """Return the name of the source of an index."""
        return self._names[int(np.searchsorted(self._bounds, index, side="right")) - 1]

    def state(self, position: Position) -> str:
        """Return the counts at a position, at the start of its block, and after the epoch before, as JSON."""
        interleaving = self._interleaving
        block, _ = self._block(position)
        epochs = min(position.epoch, 1) if self._restarts else position.epoch - self.changed_at.epoch
        first = epochs * interleaving.blocks.per_epoch
        state = {
            "mixture": self._describe(),
            "samples": self.counts(position),
            "course": [
                *(self.changed_at.epoch, self.changed_at.consumed, position.epoch, position.consumed),
                {name: astuple(course) for name, course in self._course.items()},
            ],
            "counts": [[number, interleaving.counts(number)] for number in sorted({first, block})],
        }
        return json.dumps(state)

    def load_state(self, text: str) -> None:
        """Go on from the counts of a state.

        Raises:
            StateError: It is of another mixture, or damaged.
        """
        try:
            state = json.loads(text)
            mixture, own = state.get("mixture"), self._describe()
            # A state of an older version has no course, and is of a mixture that was not changed.
            *numbers, saved = state.get("course", (0, 0, 0, 0, {}))
            at, consumed, epoch, position = [check_int_from(0, "course", number) for number in numbers]
            course = {
                name: replace(SourceCourse(*each), grown=tuple(map(tuple, each[4]))) for name, each in saved.items()
            }
            if mixture != own:
                left_out = self._left_out in mixture and (" left of " in mixture) == bool(self._left_out)
                if not self.may_change or not course or "weights a function" in mixture + own or not left_out:
                    raise StateError(
                        f"the state is of another order: {mixture} in the state, {own} here (a mixture may change with "
                        f"until=, a number, and without a plan, a function as weights, shares of tokens and another "
                        f"exclude=)"
                    )
                self._change(course, state["samples"], Position(epoch, position))
                return
            counts = [(block, self._checked(block, before)) for block, before in state["counts"]]
            fresh = self._fresh()
            # Sources that were removed keep their course.
            if any(course.get(name, each).length != each.length for name, each in fresh.items()) or any(
                abs(each.shift) >> 62 for each in course.values()
            ):
                raise ValueError("a source of another length")
            self.changed_at, self._course = Position(at, consumed), fresh | course
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise unreadable(f"the state of the mixture, {text!r:.300},", error) from error
        self._forget()
        for block, before in counts:
            self._interleaving.set_counts(block, before)

    def _change(self, course: dict[str, SourceCourse], drawn: dict[str, int], position: Position) -> None:
        """Go on from another mixture: what was drawn of each source stays drawn."""
        if position.consumed >= len(self):
            raise StateError(f"{position.consumed} samples of the epoch are drawn, and it has {len(self)} now")
        here = self._interleaving.counts(*self._block(Position(self.changed_at.epoch, position.consumed)))
        counts, mine = dict(zip(self._names, here, strict=True)), self._fresh()
        self._course = {
            name: each.changed(name, mine.get(name, each).length, drawn.get(name, 0), counts.get(name, 0))
            for name, each in (mine | course).items()
        }
        self.changed_at = position
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._found.clear()
            if self._interleaving.tokens is not None:
                self._interleaving.tokens.forget()

    def _checked(self, block: object, counts: list[object]) -> list[int]:
        """Return the counts before a block, if they can be those."""
        found = [check_int_from(0, "counts", count) for count in counts]
        start = self._interleaving.blocks.start(check_int_from(0, "block", block))
        if len(found) != len(self._names) or sum(found) != start:
            raise ValueError(f"{len(self._names)} counts before block {block} must add up to {start}, got {found}")
        return found

    def identity(self) -> str:
        """Identifies the mixture and its changes, except a function that gives its weights."""
        changed = [(name, each) for name, each in self._course.items() if each != SourceCourse(each.length)]
        return f"{self._describe()} {(self.changed_at.epoch, self.changed_at.consumed, changed) if changed else ''}"

    def _describe(self) -> str:
        lengths = ", ".join(
            f"{name}: {length}" for name, length in zip(self._names, self._lengths.tolist(), strict=True)
        )
        epochs = " in each epoch" if self._restarts else ""
        epochs += self._left_out
        epochs += "" if self._interleaving.tokens is None else f", lengths {self._interleaving.tokens.digest()}"
        return f"Mixture({lengths}; {self._interleaving.describe()}, {len(self)} samples{epochs})"
