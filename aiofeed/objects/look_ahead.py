"""Look-ahead: reads the samples of a shard together that are in the order soon, before their batches begin.

The order is known, also a shuffled one. So the plans of the next batches are taken from it early, up to a number of
bytes and of batches ahead, and their samples are noted by shard. When the first sample of a shard is needed soon, all
samples of the shard that are noted are read together: by one ``read_many``, which joins their ranges, or by one
``gather_ahead``, which writes them into the arrays of their batches. The engine gets the plans later, and its reads
wait for those.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.kernel.core.types import BatchPlan, Gathered
from aiofeed.kernel.engine.fetch.fetcher import RunJob
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.sampling.epochs import EpochStart, Step
from aiofeed.objects.reader import GAP_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("aiofeed.sources")

# The share of the look-ahead in which samples are needed soon.
SOON = 8
# The look-ahead may be this many times the bytes that the engine has received.
GROWTH = 8
# So many batches are noted before the first one, which takes less than half a second; more as batches are given, up to
# one for each so many bytes of the limit: a batch that is noted takes 3 KB of objects.
BATCHES, BATCH_BYTES = 1024, 8 << 10
# A sample that is an object of Python takes at least so many bytes, however few it has in a file.
OBJECT_BYTES = 64
# Shards that are read at the same time.
GROUPS = 128
# Free blocks of memory that are kept for samples that are gathered: fresh pages cost more than what is written to them.
# The samples of a whole window are given back, and taken again, together.
SPARE = 256
# A shard that is read whole so often in an epoch is worth a line in the log.
OFTEN = 4


class LookAhead:
    """Reads samples of a source ahead of the engine. Used on one loop.

    Args:
        source: Has ``shard_starts``, ``nbytes`` and ``read_many``.
        limit_bytes: The most encoded bytes of samples that are read before the engine has the plans of their batches.

    Attributes:
        gathers: Whether the source gathers batches, see ``Gathered``.
    """

    def __init__(self, source: Any, limit_bytes: int) -> None:
        self._source = source
        self._limit_bytes = limit_bytes
        self._read_planned = source.read_planned
        self.new_gathered: Callable[..., Gathered] | None = source.new_gathered
        self.gathers: bool = self.new_gathered is not None
        self._sample_bytes = source.gathered_bytes if self.gathers else max(source.nbytes(0), OBJECT_BYTES)
        # Whether a shard is read whole, however few of its samples are wanted.
        self._whole = source.reads_whole_shards
        # Shards that one call of ``gather_several`` reads; 0: there is none, or its samples are wanted one by one.
        self.several: int = source.shards_per_read if self.gathers and source.gather_several else 0
        starts = source.shard_starts  # none if what is gathered says which shards its samples need
        self._starts: NDArray[np.int64] = np.asarray(() if starts is None else starts)
        self._shard_bytes = self._sample_bytes * len(source) / max(len(self._starts) - 1, 1)
        self._upcoming = _UpcomingSamples(self, asyncio.to_thread, 1)
        self.memory: HostBufferPool = HostBufferPool(SPARE, limit_bytes)
        self._told = False

    @contextmanager
    def reading_ahead(self, steps: Iterable[Step], run: RunJob, threads: int) -> Iterator[Iterator[Step]]:
        """Yield an iterator over the same steps, which reads the samples of later steps until the end of the block.

        ``run`` calls a function in one of so many decode threads.
        """
        # Not those of the last call: the next epoch's block may begin before this one ends.
        self._upcoming = upcoming = _UpcomingSamples(self, run, threads)
        try:
            yield self._follow(iter(steps), upcoming, threads)
        finally:
            upcoming.close()

    def _follow(self, steps: Iterator[Step], upcoming: _UpcomingSamples, threads: int) -> Iterator[Step]:
        # Steps in order: first those whose samples are being read.
        soon: deque[tuple[Step, int]] = deque()
        later: deque[tuple[Step, int]] = deque()
        soon_bytes = later_bytes = given_bytes = given = 0
        step: Step | None
        while True:
            near, limit = self._reach(upcoming, threads, given_bytes)
            most = BATCHES + min(GROWTH * given, self._limit_bytes // BATCH_BYTES)
            while not later or (soon_bytes + later_bytes < limit and len(soon) + len(later) < most):
                if (step := next(steps, None)) is None:
                    break
                upcoming.epoch += isinstance(step, EpochStart)
                later.append((step, upcoming.note(step) if isinstance(step, BatchPlan) else 0))
                later_bytes += later[-1][1]
                near, limit = self._reach(upcoming, threads, given_bytes)
            upcoming.is_full = soon_bytes + later_bytes >= limit
            while later and (not soon or (soon_bytes < near and len(soon) < most / SOON)):
                step, nbytes = later.popleft()
                if isinstance(step, BatchPlan):
                    upcoming.read_soon(step)
                elif isinstance(step, EpochStart):
                    upcoming.times.clear()
                soon.append((step, nbytes))
                soon_bytes += nbytes
                later_bytes -= nbytes
            if not soon:
                return
            step, nbytes = soon.popleft()
            soon_bytes -= nbytes
            given_bytes += nbytes
            given += 1
            yield step

    def _reach(self, upcoming: _UpcomingSamples, threads: int, given_bytes: int) -> tuple[float, float]:
        """Return the bytes of samples that are needed soon, and of all that are noted."""
        shard_bytes = self._shard_bytes
        if not self._whole:
            # It grows with the bytes read, so that the first batch does not wait for all of it. If what is gathered of
            # the noted shards is so near that reads join it, all of it is noted: what is between is read anyway.
            limit, noted_bytes = min(self._limit_bytes, GROWTH * given_bytes), len(upcoming._groups) * shard_bytes
            joins = self.gathers and limit * GAP_BYTES >= self._sample_bytes * noted_bytes
            return limit / SOON, min(self._limit_bytes, max(limit, noted_bytes)) if joins else limit
        # Of shards that are read whole, those that the threads decode now and next, and all samples of these. The last
        # ones come when as many shards are read as one plan has samples of. Large shards are read one ahead, whatever
        # the limit: otherwise they would be read again and again.
        near = self.at_once(threads) * shard_bytes
        limit = min(self._limit_bytes + 2 * shard_bytes, near + 2 * upcoming.mixed * shard_bytes)
        return min(near, max(self._limit_bytes / 2, shard_bytes)), limit

    def at_once(self, threads: int) -> int:
        """Return how many shards that are read whole are read at the same time."""
        return max(2 * threads, int(self._source.shards_at_once))

    async def read(self, indices: Sequence[int], plan: BatchPlan, start: int) -> Any:
        """Return the samples ``indices`` of a plan, of which they begin at position ``start``."""
        noted = self._upcoming.noted.get(plan)
        if noted is None:
            return await self._read(indices, plan, start)
        noted.left -= len(indices)
        if not noted.left:
            self._upcoming.noted.pop(plan, None)
        stop = start + len(indices)
        whole = len(indices) == len(noted.indices)
        shards = noted.numbers if whole or self.gathers else set(noted.shards[start:stop].tolist())
        if unfinished := [noted.reads[shard] for shard in shards if not noted.reads[shard].done()]:
            await asyncio.wait(unfinished)  # which does not cancel them if this coroutine is cancelled
        samples = noted.samples
        if isinstance(samples, Gathered):
            if noted.failed:
                return await self._read(indices, plan, start)
            if whole:
                return list(samples) if samples.errors or samples.apart else samples
            samples = noted.samples = list(samples)
        found, samples[start:stop] = samples[start:stop], [None] * len(indices)
        unread = [index for index, sample in zip(indices, found, strict=True) if sample is _UNREAD]
        read = iter(await self._source.read_many(unread) if unread else ())
        return [next(read) if sample is _UNREAD else sample for sample in found]

    async def _read(self, indices: Sequence[int], plan: BatchPlan, start: int) -> Any:
        if self._read_planned is not None:
            return await self._read_planned(indices, plan, range(start, start + len(indices)))
        return await self._source.read_many(indices)

    def tell(self) -> None:
        """Log once that shards are read again and again."""
        if not self._told:
            self._told = True
            log.warning(
                "%r: the order needs so many of its parts at a time that each is decoded several times in an epoch; "
                'shuffle="window" needs fewer, and a larger Limits(lookahead_bytes=...) than %d MiB has room for more',
                self._source,
                self._limit_bytes >> 20,
            )


class _Noted:
    """The samples of a plan that is noted, and what reads the shard of each.

    Attributes:
        epoch: Its number.
        shards: The shard of each sample.
        numbers: The shards.
        reads: By shard, the task that reads it.
        samples: The samples that were read, at their positions.
        left: So many samples are yet to be given to the engine.
        failed: Whether not all samples could be gathered.
    """

    def __init__(self, indices: NDArray[np.int64], shards: NDArray[np.int64], samples: Any, epoch: int) -> None:
        self.epoch = epoch
        self.indices = indices
        self.shards = shards
        self.samples = samples
        self.numbers: list[int] = []
        self.reads: dict[int, asyncio.Task[None]] = {}
        self.left: int = len(indices)
        self.failed: bool = False


class _UpcomingSamples:
    """The samples of the plans that one run of an engine has taken from the order early."""

    def __init__(self, ahead: LookAhead, run: RunJob, threads: int) -> None:
        self._ahead = ahead
        self._run = run
        self._source = ahead._source
        self.noted: dict[BatchPlan, _Noted] = {}
        # For each epoch and shard the samples that will be read together.
        self._groups: dict[tuple[int, int], list[_Group]] = defaultdict(list)
        self.epoch = 0
        """How many epochs have begun."""
        self.mixed = 0
        """The most shards that a plan has samples of."""
        self.is_full = False
        """Whether the bytes of samples limit what is noted, and not the number of batches."""
        self.times: Counter[int] = Counter()
        """How often a shard was read in the epoch."""
        # Of shards that are read whole, all bytes are in memory until a thread has decoded them.
        self._threads = threads
        at_once = max(2 * threads, ahead.at_once(threads) // max(ahead.several, 1))
        self._turn = asyncio.Semaphore(at_once if ahead._whole else GROUPS)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Cancel all reads."""
        for task in self._tasks:
            task.cancel()
        self.noted.clear()
        self._groups.clear()

    def note(self, plan: BatchPlan) -> int:
        """Note the samples of a plan, and return their bytes."""
        indices, source = np.asarray(plan.indices, np.int64), self._source
        new_gathered = self._ahead.new_gathered
        samples: Any = new_gathered(indices, self._ahead.memory, plan) if new_gathered else [_UNREAD] * len(indices)
        places, shards = (new_gathered and samples.shards) or (None, None)
        if shards is None:
            shards = np.searchsorted(self._ahead._starts, indices, side="right")
        noted = self.noted[plan] = _Noted(indices, shards, samples, self.epoch)
        order = np.argsort(shards, kind="stable")
        found = shards[order]
        if places is not None:
            order = places[order]
        ordered = indices[order]
        firsts = [0, *((found[1:] != found[:-1]).nonzero()[0] + 1).tolist()][: len(found)]
        noted.numbers = found[firsts].tolist()
        self.mixed = max(self.mixed, len(firsts))
        for number, (first, end) in zip(noted.numbers, pairwise([*firsts, len(order)]), strict=True):
            self._groups[self.epoch, number].append((noted, order[first:end], ordered[first:end]))
        if new_gathered:
            return int(self._ahead._sample_bytes * len(indices))
        nbytes: int = sum(map(source.nbytes, indices.tolist()))
        return max(nbytes, OBJECT_BYTES * len(indices))

    def read_soon(self, plan: BatchPlan) -> None:
        """Read the shards of samples that are not being read."""
        noted = self.noted[plan]
        numbers = [number for number in noted.numbers if number not in noted.reads]
        together = max(min(self._ahead.several, len(numbers) // self._threads), 1)
        for at in range(0, len(numbers), together):
            some = numbers[at : at + together]
            groups = {number: self._groups.pop((noted.epoch, number)) for number in some}
            task = asyncio.get_running_loop().create_task(self._read_groups(groups))
            for number, group in groups.items():
                for each, *_ in group:
                    each.reads[number] = task
                self.times[number] += 1
                if self._ahead._whole and self.times[number] == OFTEN and self.mixed > 2 and self.is_full:
                    self._ahead.tell()
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read_groups(self, groups: Mapping[int, list[_Group]]) -> None:
        """Read samples of a shard, or of several. If the source raises, the engine reads them when a batch begins."""
        async with self._turn:
            targets = {
                number: [(noted.samples, places) for noted, places, _ in group] for number, group in groups.items()
            }
            [*_, (number, group)] = groups.items()
            try:
                if self._ahead.several:
                    await self._source.gather_several(targets, self._run)
                    return
                indices = np.concatenate([some for *_, some in group])
                if self._ahead.gathers:
                    await self._source.gather_ahead(indices, targets[number], self._run, number)
                    return
                values = list(await self._source.read_many(indices.tolist()))
            except asyncio.CancelledError:
                raise
            except BaseException:  # noqa: BLE001 - the user's source; SystemExit in a task would end the loop
                for noted, *_ in chain.from_iterable(groups.values()):
                    noted.failed = True
                return
        if len(values) == len(indices):
            left = iter(values)
            for noted, places, _ in group:
                for place in places.tolist():
                    noted.samples[place] = next(left)


_UNREAD: Any = object()
# Positions in a plan that is noted, and the indices of the samples there.
_Group: TypeAlias = tuple[_Noted, "NDArray[np.int64]", "NDArray[np.int64]"]
