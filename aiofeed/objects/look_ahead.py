"""Look-ahead: reads the samples of a shard together that are in the order soon, before their batches begin.

The order is known, also a shuffled one. So the plans of the next batches are taken from it early, up to a number of
bytes ahead, and their samples are noted by shard. When the first sample of a shard is needed soon, all samples of the
shard that are noted are read by one ``read_many``, which joins their ranges. The engine gets the plans later, and
its reads wait for those.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiofeed.kernel.core.types import BatchPlan, Source
from aiofeed.kernel.sampling.epochs import Step

# The share of the look-ahead in which samples are needed soon.
SOON = 8
# The look-ahead may be this many times the bytes that the engine has received.
GROWTH = 8
# Shards that are read at the same time.
GROUPS = 128


class LookAhead:
    """Reads samples of a source ahead of the engine. To the engine's reader it is the source. Used on one loop.

    Args:
        source: Has ``shard_starts``, ``nbytes`` and ``read_many``.
        limit_bytes: The most encoded bytes of samples that are read before the engine has the plans of their batches.
    """

    def __init__(self, source: Source[Any], limit_bytes: int) -> None:
        self._source: Any = source
        self._limit_bytes = limit_bytes
        self.read: Callable[[int], Coroutine[Any, Any, Any]] = source.read
        self._upcoming = _UpcomingSamples(source)

    @contextmanager
    def reading_ahead(self, steps: Iterable[Step]) -> Iterator[Iterator[Step]]:
        """Yield an iterator over the same steps, which reads the samples of later steps until the end of the block."""
        # Not those of the last call: the next epoch's block may begin before this one ends.
        self._upcoming = upcoming = _UpcomingSamples(self._source)
        try:
            yield self._follow(iter(steps), upcoming)
        finally:
            upcoming.close()

    def _follow(self, steps: Iterator[Step], upcoming: _UpcomingSamples) -> Iterator[Step]:
        # Steps in order: first those whose samples are being read.
        soon: deque[tuple[Step, int]] = deque()
        later: deque[tuple[Step, int]] = deque()
        soon_bytes = later_bytes = given_bytes = 0
        step: Step | None
        while True:
            # The look-ahead grows with the bytes read, so that the first batch does not wait for all of it.
            limit = min(self._limit_bytes, GROWTH * given_bytes)
            while (not later or soon_bytes + later_bytes < limit) and (step := next(steps, None)) is not None:
                later.append((step, upcoming.note(step) if isinstance(step, BatchPlan) else 0))
                later_bytes += later[-1][1]
            while later and (not soon or soon_bytes < limit // SOON):
                step, nbytes = later.popleft()
                if isinstance(step, BatchPlan):
                    upcoming.read_soon(step.indices)
                soon.append((step, nbytes))
                soon_bytes += nbytes
                later_bytes -= nbytes
            if not soon:
                return
            step, nbytes = soon.popleft()
            soon_bytes -= nbytes
            given_bytes += nbytes
            yield step

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Samples that were read ahead, and others, such as replacements for failed samples, which are read now."""
        upcoming = self._upcoming
        samples = [upcoming.taken(index) for index in indices]
        if unfinished := {sample.read for sample in samples if sample.read is not None and not sample.read.done()}:
            await asyncio.wait(unfinished)  # which does not cancel them if this coroutine is cancelled
        unread = [index for index, sample in zip(indices, samples, strict=True) if sample.value is _UNREAD]
        found = iter(await self._source.read_many(unread) if unread else ())
        return [next(found) if sample.value is _UNREAD else sample.value for sample in samples]


class _UpcomingSamples:
    """The samples of the plans that one run of an engine has taken from the order early."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._starts = np.asarray(source.shard_starts)
        self.samples: dict[int, _Sample] = {}
        # For each shard the samples that will be read together.
        self._groups: dict[int, list[_Sample]] = {}
        self._turn = asyncio.Semaphore(GROUPS)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Cancel all reads."""
        for task in self._tasks:
            task.cancel()
        self.samples.clear()
        self._groups.clear()

    def note(self, plan: BatchPlan) -> int:
        """Note the samples of a plan, and return their bytes."""
        nbytes, shards = 0, np.searchsorted(self._starts, plan.indices, side="right").tolist()
        for index, shard in zip(plan.indices, shards, strict=True):
            sample = self.samples.get(index)
            if sample is None:
                sample = self.samples[index] = _Sample(index, shard)
                nbytes += self._source.nbytes(index)
                self._groups.setdefault(shard, []).append(sample)
            sample.uses += 1
        return nbytes

    def read_soon(self, indices: Sequence[int]) -> None:
        """Read the shards of samples that are not being read."""
        for index in indices:
            sample = self.samples.get(index)
            if sample is not None and sample.read is None:
                group = self._groups.pop(sample.shard)
                task = asyncio.get_running_loop().create_task(self._read_group(group))
                for each in group:
                    each.read = task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _read_group(self, group: Sequence[_Sample]) -> None:
        """Read samples of one shard. If the source raises, the engine reads them when their batch begins."""
        async with self._turn:
            indices = [sample.index for sample in group]
            try:
                values = list(await self._source.read_many(indices))
            except asyncio.CancelledError:
                raise
            except BaseException:  # noqa: BLE001 - the user's source; SystemExit in a task would end the loop
                return
        if len(values) == len(group):
            for sample, value in zip(group, values, strict=True):
                sample.value = value

    def taken(self, index: int) -> _Sample:
        """Return a sample to one plan. If its shard was not started, the sample has no value."""
        sample = self.samples.get(index)
        if sample is None or sample.read is None:
            return _Sample(index)
        sample.uses -= 1
        if not sample.uses:
            del self.samples[index]
        return sample


_UNREAD: Any = object()


@dataclass(eq=False, slots=True)
class _Sample:
    """A sample that is noted: how many plans need it, the task that reads it, and its value."""

    index: int
    shard: int = 0
    uses: int = 0
    read: asyncio.Task[None] | None = None
    value: Any = _UNREAD
