"""``Balanced``: a plan whose batches give each rank equal work per step; and what ``Pack`` shares with it.

An epoch has steps of equal tokens, and a step ``groups * accumulate`` batches. A step is planned when its first batch
is needed, as a function of seed, epoch and step alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heappushpop, heapreplace
from typing import Any, TypeAlias

import numpy as np

from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_callable, check_int_from, check_positive_int, counted
from aiofeed.kernel.sampling.order import BatchLists, Int64
from aiofeed.plans.length_plans import LengthPlan, Lengths, Measure, OnOversize, check_on_oversize, starts_of

Cost: TypeAlias = "Callable[[Int64], np.ndarray[Any, np.dtype[Any]]]"
"""The cost of a sample of each length: a function of an array that returns an array of its shape."""

log: logging.Logger = logging.getLogger("aiofeed.sampling")

# Costs are integers, because sums of floats differ between CPUs. The largest has 30 bits.
COST_BITS = 30
# Lengths are sorted in classes of a 1,024th of max_tokens: NumPy sorts 16 bits by radix, in a tenth of the time.
CLASSES = 1024
# The cheapest samples of a group that may be swapped, how often, and until which excess of cost; with n batches it is
# divided by n squared, because each has a smaller part in its group.
SWAPPED = np.arange(1, 9)
SWAPS = 3
TOLERANCE = 0.008


@public
class Balanced(LengthPlan):
    """A plan for ``batch_size=``: batches of up to ``max_tokens``, whose costs are equal for all ranks in each step.

    Example:
        ```python
        import aiofeed

        documents = aiofeed.Documents("tokens.bin", separator=0)
        plan = aiofeed.Balanced(documents.lengths("tokens"), max_tokens=4096, groups=2)
        feeder = aiofeed.Feeder(documents, batch_size=plan, shuffle=True, collate_fn=list)
        for batch in feeder:
            print(sum(map(len, batch)))
        ```

    The samples of a batch are concatenated, as variable-length attention takes them: its tokens are the sum of their
    lengths, without padding. An epoch is shuffled and cut into steps of equal tokens, over which samples longer than
    ``1 - fill`` of a batch are spread evenly. In a step, samples go to ``groups`` groups, the most expensive first,
    each to the group of the lowest cost so far (longest processing time first, Graham 1969), and there to the emptiest
    of ``accumulate`` batches. Batch ``m * groups + g`` of a step is batch m of group g, so that every number of ranks
    that divides ``groups`` trains on the same samples in each step.

    ``len(feeder)`` is the same in all epochs if each sample comes exactly once. If there are fewer samples than
    batches, a batch is one sample, and ``drop_last=True`` drops those of the last step if it has too few.

    Args:
        lengths: The length of each sample in tokens, an array or list of ints from 1; or a function of the index,
            called once per sample; or "measure", see ``Buckets``.
        max_tokens: The most tokens of a batch.
        cost: Returns the costs of samples of these lengths, positive numbers, from an array of lengths. Default: the
            lengths. ``lambda n: n + n * n / 12_288`` counts attention, too.
        groups: The largest number of ranks, at least 2. Other numbers of ranks must divide it.
        accumulate: The batches of a rank per step, of ``groups`` ranks.
        fill: The part of ``max_tokens`` that a batch has on average; less if long samples do not fit otherwise.
        on_oversize: What to do about a sample longer than ``max_tokens``: "error"; "skip" it; or "truncate", a batch of
            its own, for a ``collate_fn`` that cuts it.
        length: See ``Buckets``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        cost: Cost | None = None,
        groups: int = 64,
        accumulate: int = 1,
        fill: float = 0.9,
        on_oversize: OnOversize = "error",
        length: Measure | None = None,
    ) -> None:
        self.groups: int = check_int_from(2, "Balanced(groups=)", groups)
        super().__init__(lengths, length, max_tokens=max_tokens)
        self.max_tokens: int = check_positive_int("Balanced(max_tokens=)", max_tokens)
        self.cost: Cost | None = check_callable("Balanced(cost=)", cost)
        self.accumulate: int = check_positive_int("Balanced(accumulate=)", accumulate)
        if isinstance(fill, bool) or not isinstance(fill, int | float) or not 0 < fill <= 1:
            raise ValueError(f"Balanced(fill=) must be a number above 0, at most 1, got {fill!r}")
        self.fill: float = float(fill)
        self.on_oversize = check_on_oversize("Balanced", on_oversize)

    def _describe(self) -> str:
        step = f"groups={self.groups}, accumulate={self.accumulate}, fill={self.fill}"
        return f"max_tokens={self.max_tokens}, {step}, on_oversize={self.on_oversize!r}"

    def _check(self, lengths: Int64, first: int = 0) -> None:
        self._check_longest(lengths, self.max_tokens, self.on_oversize, first)
        self.sizes: Int64 = np.minimum(lengths, self.max_tokens)
        self.costs: Int64 = integer_costs("Balanced", self.cost, self.sizes)

    @property
    def typical_samples(self) -> int:
        """Samples of mean length that fill a batch."""
        return max(1, int(self.fill * self.max_tokens * len(self.sizes) / max(int(self.sizes.sum()), 1)))

    def batches(self, order: Int64, rng: np.random.Generator, *, shuffle: bool, drop_last: bool) -> BatchLists:
        """Return the batches of an epoch, of which steps are planned on demand."""
        if self.on_oversize == "skip":
            order = order[self.lengths[order] <= self.max_tokens]
        batches = self.groups * self.accumulate
        small, bounds, large = self._cut(self.sizes[order], rng if shuffle else None, batches, drop_last=drop_last)
        costs = self.costs if len(order) == len(self.costs) else self.costs[order]
        warn_of_large(self, costs, len(large) * self.groups, "accumulate", self.accumulate)
        return BalancedBatches(order, bounds, plan=self, batches=batches, small=small, large=large)

    def _cut(self, sizes: Int64, rng: np.random.Generator | None, batches: int, *, drop_last: bool) -> list[Int64]:
        """Cut an epoch into steps: step s has ``large[s]``, and ``bounds[s]`` to ``bounds[s + 1]`` of ``small``.

        Each step can be planned. Place its samples by descending size, each in any batch with room. If one of size s
        has no room, all batches have more than ``max_tokens - s`` of samples from s up. Of these, a step has no more
        than their mean over all steps and one sample; ``_steps`` makes that too few. Or the step has as many samples as
        batches.

        Returns:
            ``small``, ``bounds`` and ``large`` [steps, most]: positions in the order; -1 for none.
        """
        classes = ((sizes * CLASSES - 1) // self.max_tokens).astype(np.uint16)
        first = int((1 - self.fill) * CLASSES)
        steps = self._steps(np.bincount(classes, minlength=CLASSES), int(sizes.sum()), first, batches)
        # Long samples, sorted by size: of each `steps` of them, each step gets one.
        long = np.flatnonzero(classes >= first)
        long = long[np.argsort(CLASSES - classes[long], kind="stable")]
        large = np.full((-(-len(long) // steps), steps), -1)
        large.ravel()[: len(long)] = long
        if rng is not None:
            rng.permuted(large, axis=1, out=large)
        small = np.flatnonzero(classes < first)
        missing = np.append(0, np.cumsum(np.maximum(batches - (large >= 0).sum(0), 0)))
        if missing[-1] > len(small):
            last = len(sizes) // batches * batches if drop_last else len(sizes)
            bounds = np.append(np.arange(0, last, batches), last)
            return [np.arange(len(sizes)), bounds, np.empty((len(bounds) - 1, 0), np.int64)]
        tokens = np.where(large >= 0, sizes[large], 0).sum(0)
        targets = np.arange(1, steps + 1) * int(sizes.sum()) // steps - np.cumsum(tokens)
        bounds = np.append(0, np.searchsorted(np.cumsum(sizes[small]), targets, side="right"))
        bounds[-1] = len(small)
        # Each step has at least one sample per batch.
        bounds = np.maximum.accumulate(bounds - missing) + missing
        return [small, np.minimum(bounds, len(small) - missing[-1] + missing), np.ascontiguousarray(large.T)]

    def _steps(self, counts: Int64, tokens: int, first: int, batches: int) -> int:
        """Return the number of steps of an epoch with so many samples of each class; those from ``first`` on are long.

        In units of ``max_tokens``, with sizes rounded up to those of their classes.
        """
        steps = tokens / (self.fill * batches * self.max_tokens)
        sizes = np.arange(1, CLASSES + 1) / CLASSES
        many, much = (np.cumsum(each[::-1])[::-1][first:] for each in (counts, counts * sizes))
        largest = sizes[counts.nonzero()[0][-1:]].sum()
        room = np.where(sizes <= 0.5, batches * (1 - sizes) + sizes - largest, 0)[first:]
        # Too few samples for any batch to have two, or too few tokens.
        enough = np.minimum(many / batches, np.divide(much, room, out=np.full_like(much, np.inf), where=room > 0))
        return max(math.ceil(float(enough.max(initial=steps))), 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class BalancedBatches(BatchLists):
    """The batches of an epoch of ``Balanced``, planned step by step. Those of the step used last are kept.

    ``indices`` is the shuffled order, in which a sample has its position; ``offsets`` are those of steps in ``small``.
    """

    plan: Balanced
    batches: int
    small: Int64
    large: Int64
    _planned: dict[int, tuple[Int64, Int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of batches; a last step with too few samples has one batch for each."""
        steps = len(self.offsets) - 1
        return (steps - 1) * self.batches + min(self.batches, len(self._members(steps - 1))) if steps else 0

    def _members(self, step: int) -> Int64:
        large = self.large[step]
        return np.concatenate([self.small[self.offsets[step] : self.offsets[step + 1]], large[large >= 0]])

    def positions(self, batch: int) -> Int64:
        """Return the positions of a batch's samples in the epoch."""
        step, number = divmod(batch, self.batches)
        planned = self._planned.get(step)
        if planned is None:
            planned = self._plan(self._members(step))
            self._planned.clear()
            self._planned[step] = planned
        members, starts = planned
        found: Int64 = members[starts[number] : starts[number + 1]]
        return found

    def consumed(self, batches: int) -> Int64:
        """Return the indices of the first batches."""
        steps, rest = divmod(batches, self.batches)
        parts = [*map(self._members, range(steps)), *map(self.positions, range(batches - rest, batches))]
        consumed: Int64 = self.indices[np.concatenate([self.small[:0], *parts])]
        return consumed

    def _plan(self, members: Int64) -> tuple[Int64, Int64]:
        """Return the positions of a step's samples, batch by batch, and the start of each batch."""
        if len(members) < self.batches:
            return members, np.arange(len(members) + 1)
        plan, indices = self.plan, self.indices[members]
        costs, sizes = plan.costs[indices], plan.sizes[indices]
        numbers = assign(costs, sizes, plan.groups, plan.accumulate, plan.max_tokens)
        return members[np.argsort(numbers, kind="stable")], starts_of(np.bincount(numbers))


def assign(costs: Int64, sizes: Int64, groups: int, batches: int, most: int) -> Int64:
    """Assign samples to groups of equal costs, and to the batches of their group.

    Args:
        costs, sizes: Of each sample; at least as many samples as batches of all groups. They fit in by descending size.
        groups: The number of groups.
        batches: The batches of each group.
        most: The largest sum of the sizes of a batch.

    Returns:
        The number of each sample's batch, ``groups * batch + group``. Each batch has a sample.
    """
    # An int has the cost of a group and its number, or the size of a batch and its number: no objects per sample.
    group_bits, batch_bits = groups.bit_length(), batches.bit_length()
    group_mask, batch_mask, limit = (1 << group_bits) - 1, (1 << batch_bits) - 1, (most + 1) << batch_bits
    heap = list(range(groups))
    # The emptiest batch of each group, and a heap of its others.
    emptiest = [0] * groups
    others = [list(range(1, batches)) for _ in heap]
    order = np.argsort(-costs, kind="stable")
    # Groups without room for a sample, by the size of their emptiest batch, until a sample fits.
    full: list[tuple[int, int]] = []
    found = []
    for cost, size in zip((costs[order] << group_bits).tolist(), (sizes[order] << batch_bits).tolist(), strict=True):
        while full and full[0][0] + size < limit:
            heappush(heap, heappop(full)[1])
        group = (least := heap[0]) & group_mask
        while (filled := emptiest[group]) + size >= limit:
            heappush(full, (filled, heappop(heap)))
            if not heap:
                assert costs is not sizes, "samples always fit by descending size"
                return assign(sizes, sizes, groups * batches, 1, most)
            group = (least := heap[0]) & group_mask
        heapreplace(heap, least + cost)
        emptiest[group] = heappushpop(others[group], filled + size)
        found.append((filled & batch_mask) * groups + group)
    numbers = np.array(found, np.int64)
    _, firsts = np.unique(numbers, return_index=True)
    if len(firsts) < groups * batches:
        # From the sample on from which as many are left as batches are empty, each batch gets one.
        left = np.arange(len(numbers))
        empty = groups * batches - np.cumsum(np.isin(left, firsts))
        start = int(np.argmax(left[::-1] == empty)) + 1
        numbers[start:] = np.setdiff1d(np.arange(groups * batches), numbers[:start])
    _even_out(numbers, costs[order], sizes[order], groups, batches, most)
    assigned = np.empty_like(numbers)
    assigned[order] = numbers
    return assigned


def _even_out(numbers: Int64, costs: Int64, sizes: Int64, groups: int, batches: int, most: int) -> None:
    """Swap cheap samples of the most expensive groups with samples of the cheapest ones, one for each pair of groups.

    The samples, with their ``numbers``, are in the order of descending costs. Images with 200 to 4,000 patches, four
    batches of 16,384: the most expensive of 64 groups costs 1.0015 times the mean before, and 1.0003 after.
    """
    for _ in range(SWAPS):
        group = numbers % groups
        loads = np.bincount(group, costs, groups).astype(np.int64)
        enough = max(loads.mean() * (1 + TOLERANCE / batches**2), float(costs[0]))
        order = np.argsort(loads, kind="stable")
        pairs = min(int((loads > enough).sum()), groups // 2)
        if not pairs:
            return
        ends = starts_of(np.bincount(group, minlength=groups))
        members = np.argsort(group, kind="stable")
        sides = order[: -pairs - 1 : -1], order[:pairs]
        heavy, light = (members[np.maximum(ends[side + 1, None] - SWAPPED, ends[side, None])] for side in sides)
        tokens = np.bincount(numbers, sizes)[numbers]
        gap = (loads[sides[0]] - loads[sides[1]])[:, None]
        more = (sizes[light][:, None] - sizes[heavy][:, :, None]).reshape(pairs, -1)
        less = (costs[heavy][:, :, None] - costs[light][:, None]).reshape(pairs, -1)
        first, second = (np.repeat(heavy, len(SWAPPED), 1), np.tile(light, len(SWAPPED)))
        fits = (tokens[first] + more <= most) & (tokens[second] - more <= most)
        rest = np.where(fits, abs(2 * less - gap), gap)
        best = rest.argmin(1)[:, None]
        better = np.take_along_axis(rest, best, 1) < gap
        one, other = (np.take_along_axis(side, best, 1)[better] for side in (first, second))
        numbers[one], numbers[other] = numbers[other], numbers[one]


def warn_of_large(plan: LengthPlan, costs: Int64, shares: float, argument: str, value: int) -> None:
    """Warn if the largest cost exceeds the mean of so many shares of all, in the first epoch; name what to change."""
    share = float(costs.max() * shares / costs.sum()) if shares and not plan.examined else 0.0
    plan.examined = True
    if share > 1.02:
        words = "one part costs %.2f times as much as the mean group of a step, and ranks wait for it: pass %s=%d to %r"
        log.warning(words, share, argument, math.ceil(value * share), plan)


def integer_costs(plan: str, cost: Cost | None, lengths: Int64) -> Int64:
    """Return the costs of samples of these lengths, as integers from 1 with up to ``COST_BITS`` bits.

    Raises:
        ValueError: ``cost`` does not return one positive number per length.
    """
    costs = np.asarray(lengths if cost is None else cost(lengths))
    numbers = costs.shape == lengths.shape and costs.dtype.kind in "iuf"
    if not numbers or not (np.isfinite(costs) & (costs > 0)).all():
        raise ValueError(
            f"{plan}(cost=) must return one positive number for each of {counted(len(lengths), 'length')}, got {costs}"
        )
    # A power of two as scale is exact.
    _, bits = np.frexp(costs.max(initial=1))
    return np.maximum(np.rint(np.ldexp(costs.astype(np.float64), COST_BITS - int(bits))), 1).astype(np.int64)
