"""Look-ahead: reads the samples of a shard together that are in the order soon, before their batches begin.

The order is known, also a shuffled one. So the plans of the next batches are taken from it early, up to a number of
bytes ahead, and their samples are noted by shard. When the first sample of a shard is needed soon, all samples of the
shard that are noted are read by one ``read_many``, which joins their ranges. The engine gets the plans later, and
its reads wait for those.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiofeed.core.types import BatchPlan, Source
from aiofeed.sampling.epochs import Step

# The share of the look-ahead in which samples are needed soon.
SOON = 4
# Shards that are read at the same time.
GROUPS = 128


class LookAhead:
    """Reads samples of a source ahead of the engine. To the engine's reader it is the source. Used on one loop.

    Args:
        source: Has ``shard_starts``, ``nbytes`` and ``read_many``.
        limit_bytes: The most encoded bytes of samples that are read, or being read, and that the engine has not taken.
    """

    def __init__(self, source: Source[Any], limit_bytes: int) -> None:
        self._source: Any = source
        self._starts = source.shard_starts  # type: ignore[attr-defined]
        self._limit_bytes = limit_bytes
        self.read = source.read
        self._announce = getattr(source, "announce", None)
        self._samples: dict[int, _Sample] = {}
        # For each shard the samples that will be read together.
        self._groups: dict[int, list[_Sample]] = {}
        self._held_bytes = self._given_bytes = 0

    @contextmanager
    def following(self, steps: Iterable[Step]) -> Iterator[Iterator[Step]]:
        """The same steps, ahead of which samples are read until the end of the block."""
        self._held_bytes = self._given_bytes = 0
        self._turn = asyncio.Semaphore(GROUPS)
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            yield self._follow(iter(steps))
        finally:
            for task in self._tasks:
                task.cancel()
            self._samples.clear()
            self._groups.clear()

    def _follow(self, steps: Iterator[Step]) -> Iterator[Step]:
        # Steps in order: first those whose samples are being read.
        soon: deque[tuple[Step, int]] = deque()
        later: deque[tuple[Step, int]] = deque()
        soon_bytes = 0
        step: Step | None
        while True:
            # The look-ahead grows with the bytes read, so that the first batch does not wait for all of it.
            limit = min(self._limit_bytes, 2 * self._given_bytes)
            while (not later or self._held_bytes < limit) and (step := next(steps, None)) is not None:
                later.append((step, self._note(step) if isinstance(step, BatchPlan) else 0))
            while later and (not soon or soon_bytes < limit // SOON):
                step, nbytes = later.popleft()
                if isinstance(step, BatchPlan):
                    self._read_soon(step.indices)
                soon.append((step, nbytes))
                soon_bytes += nbytes
            if not soon:
                return
            step, nbytes = soon.popleft()
            soon_bytes -= nbytes
            self._given_bytes += nbytes
            yield step

    def _note(self, plan: BatchPlan) -> int:
        """Note the samples of a plan, and return their bytes."""
        if self._announce is not None:
            self._announce(plan)
        before = self._held_bytes
        for index in plan.indices:
            sample = self._samples.get(index)
            if sample is None:
                sample = self._samples[index] = _Sample(index, self._source.nbytes(index))
                self._held_bytes += sample.nbytes
                shard = bisect.bisect_right(self._starts, index)
                self._groups.setdefault(shard, []).append(sample)
            sample.uses += 1
        return self._held_bytes - before

    def _read_soon(self, indices: Sequence[int]) -> None:
        """Read the shards of samples that are not being read."""
        for index in indices:
            sample = self._samples.get(index)
            if sample is not None and sample.read is None:
                group = self._groups.pop(bisect.bisect_right(self._starts, index))
                task = asyncio.get_running_loop().create_task(self._read_group(group))
                for each in group:
                    each.read = task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _read_group(self, group: Sequence[_Sample]) -> None:
        """Read samples of one shard; the error of each that cannot be read becomes its value."""
        async with self._turn:
            indices = [sample.index for sample in group]
            try:
                values = list(await self._source.read_many(indices))
                if len(values) != len(indices):
                    raise ValueError(f"read_many returned {len(values)} samples for {len(indices)} indices")
            except Exception as error:  # noqa: BLE001 - the user's source; the engine reads these samples one by one
                values = [error.with_traceback(None)] * len(group)
        for sample, value in zip(group, values, strict=True):
            sample.value = value

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Samples, which are read now if they were not noted."""
        samples = [self._samples.get(index) for index in indices]
        unknown = [index for index, sample in zip(indices, samples, strict=True) if sample is None]
        try:
            reads = {sample.read for sample in samples if sample is not None and sample.read is not None}
            found = iter(await self._source.read_many(unknown) if unknown else ())
            if unfinished := [read for read in reads if not read.done()]:
                await asyncio.wait(unfinished)  # which does not cancel them if this coroutine is cancelled
            return [next(found) if sample is None else sample.value for sample in samples]
        finally:
            for sample in samples:
                if sample is not None:
                    self._take(sample)

    def _take(self, sample: _Sample) -> None:
        sample.uses -= 1
        if not sample.uses and self._samples.pop(sample.index, None) is not None:
            self._held_bytes -= sample.nbytes


class _Sample:
    """A sample that is noted: its bytes, the reads that need it, the task that reads it, and its value."""

    __slots__ = ("index", "nbytes", "read", "uses", "value")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes
        self.uses = 0
        self.read: asyncio.Task[None] | None = None
        self.value: Any = None
