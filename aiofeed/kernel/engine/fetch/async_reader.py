"""Reads samples of a ``Source`` on the loop: many at a time, each with its time limit and its retries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from aiofeed.kernel.core.faces import BaseSource
from aiofeed.kernel.core.failures import FailurePolicy, backoff_s
from aiofeed.kernel.core.types import Gathered
from aiofeed.kernel.engine.tuning.reads import READS_MOST
from aiofeed.kernel.runtime.cancellation import caught, clear_cancellation, ended_by, is_cancelled

ReadMany: TypeAlias = Callable[[Sequence[int]], Awaitable[Sequence[Any]]]
ReadAt: TypeAlias = Callable[[int], Awaitable[Any]]


@dataclass(eq=False)
class ReadResult:
    """The results of the reads of a chunk: encoded samples, and an exception for each that failed."""

    samples: Any = field(default_factory=list)
    nbytes: int = 0
    retries: int = 0
    # False if the decode job reads the samples itself.
    waited: bool = True
    # Of all reads together; 0 if that is not known.
    reading_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Reads:
    """The reads of a chunk: what they have in common while they are in the queue and in slots."""

    read_at: ReadAt
    result: ReadResult
    all_read: asyncio.Future[None]
    left: int
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Slots:
    """The slots of a loop, tasks that take reads from a queue, with what each reads now; and the chunks being read."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[_Reads, int]] = field(default_factory=asyncio.Queue)
    tasks: dict[asyncio.Task[None], _Reads | None] = field(default_factory=dict)
    chunks: int = 0


class AsyncReader:
    """Calls a source's coroutines on the loop, with time limit and retries, and returns what they raise as values."""

    def __init__(self, source: BaseSource, policy: FailurePolicy) -> None:
        self._source = source
        self._policy = policy
        self._read_uncopied = source.uncopied_reader()
        self._read_many = None if self._read_uncopied else source.read_many
        self._jitter = random.Random()
        # Reads over their time limit that ignore cancellation; referred to here so that they are not garbage collected.
        self._abandoned: set[asyncio.Future[Any]] = set()
        # The most reads in flight if samples are read one by one; more of them wait in a queue.
        self.concurrency: int = READS_MOST
        self.queues: bool = self._read_many is None
        self._slots: _Slots | None = None

    async def read(
        self, indices: Sequence[int], read_many: ReadMany | None = None, read_at: ReadAt | None = None
    ) -> ReadResult:
        """Return the encoded samples; an exception for each that failed.

        ``read_many`` is in place of the source's, and ``read_at``, which gets a position in ``indices``, of ``read``.

        Raises:
            CancelledError: The task was cancelled, even if the source caught the cancellation.
        """
        result = ReadResult()
        read_at = read_at or (lambda at: (self._read_uncopied or self._source.read)(indices[at]))
        result.samples = await self._read(indices, result, read_many or self._read_many, read_at)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            await clear_cancellation()
        result.nbytes = total_bytes(result.samples)
        return result

    async def _read(
        self, indices: Sequence[int], result: ReadResult, read_many: ReadMany | None, read_at: ReadAt
    ) -> Any:
        if read_many is not None:
            # A GeneratorExit that this line raises is none of the user's: this coroutine is being closed.
            samples, error = await caught(self._read_together(read_many, indices))
            if error is None and isinstance(samples, list):
                if len(samples) != len(indices):
                    wrong = f"read_many returned {len(samples)} samples for {len(indices)} indices"
                    return [ValueError(wrong)] * len(indices)
                if self._policy.retries:
                    await self._retry(samples, result, read_at)
            if error is None:
                return samples
            if is_cancelled():
                raise error
            # Reading one by one finds the sample that failed.
            await clear_cancellation()
        return await self._read_each(len(indices), result, read_at)

    async def _read_together(self, read_many: ReadMany, indices: Sequence[int]) -> Any:
        found = await self._limited(read_many(indices))
        return found if isinstance(found, Gathered) else list(found)

    async def _read_each(self, count: int, result: ReadResult, read_at: ReadAt) -> Any:
        """Queue the reads, and return the results as ``gather`` does."""
        if not count:
            return []
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots.loop is not loop:
            self._slots = _Slots(loop)
        slots = self._slots
        result.samples = [None] * count
        reads = _Reads(read_at, result, loop.create_future(), count)
        for at in range(count):
            slots.queue.put_nowait((reads, at))
        slots.chunks += 1
        self._fill_slots(slots, count)
        try:
            await reads.all_read
        except asyncio.CancelledError:
            reads.cancelled = True
            if tasks := [task for task, reading in slots.tasks.items() if reading is reads]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)  # none outlives this coroutine
            raise
        finally:
            slots.chunks -= 1
            if not slots.chunks:
                self._slots = None
                for task in slots.tasks:
                    task.cancel()
        return result.samples

    def _fill_slots(self, slots: _Slots, most: int) -> None:
        for _ in range(min(most, self.concurrency - len(slots.tasks))):
            task = slots.loop.create_task(self._run_slot(slots))
            slots.tasks[task] = None
            task.add_done_callback(partial(self._slot_ended, slots))

    def _slot_ended(self, slots: _Slots, task: asyncio.Task[None]) -> None:
        del slots.tasks[task]
        if slots.chunks:
            self._fill_slots(slots, slots.queue.qsize())

    async def _run_slot(self, slots: _Slots) -> None:
        """Read one sample of the queue after another.

        The objects of many tasks that begin at once start garbage collections; a full one takes 100 ms in a process
        that has imported torch. And no read waits for the slowest one of the chunk before.
        """
        reads: _Reads | None = None
        task: Any = asyncio.current_task()
        with ended_by(lambda: reads is None or reads.cancelled):
            while len(slots.tasks) <= self.concurrency:
                slots.tasks[task] = reads = None
                reads, at = await slots.queue.get()
                if reads.cancelled:
                    continue
                slots.tasks[task], result, started = reads, reads.result, time.perf_counter()
                try:
                    result.samples[at] = await self._read_one(partial(reads.read_at, at), result)
                    if task.cancelling():
                        await clear_cancellation()
                except BaseException as error:  # noqa: BLE001 - cancelled, by the engine or the user's code
                    result.samples[at] = error.with_traceback(None)  # which refers to this frame
                result.reading_s += time.perf_counter() - started
                reads.left -= 1
                if not reads.left and not reads.all_read.done():
                    reads.all_read.set_result(None)
                if reads.cancelled or isinstance(result.samples[at], GeneratorExit):
                    return
                del result  # has samples

    async def _retry(self, samples: list[Any], result: ReadResult, read_at: ReadAt) -> None:
        """Read samples again whose error in ``read_many`` is transient."""
        failed = [
            at
            for at, sample in enumerate(samples)
            if isinstance(sample, BaseException) and self._policy.is_transient(sample)
        ]
        if failed:
            reads = [self._read_one(partial(read_at, at), result, samples[at]) for at in failed]
            for at, sample in zip(failed, await asyncio.gather(*reads), strict=True):
                samples[at] = sample

    async def _read_one(
        self, begin: Callable[[], Awaitable[Any]], result: ReadResult, failed: BaseException | None = None
    ) -> Any:
        """Return one sample, or the error of the last attempt; ``failed`` is the error of an attempt made before."""
        attempt = 0
        while True:
            if failed is not None:
                if attempt == self._policy.retries or not self._policy.is_transient(failed):
                    return failed
                attempt += 1
                result.retries += 1
                await asyncio.sleep(backoff_s(attempt, self._jitter))
            try:
                read = begin()
                return await (read if self._policy.read_timeout_s is None else self._limited(read))
            except BaseException as error:  # the user's coroutine may raise anything; it is raised again with a name
                if is_cancelled():
                    raise
                failed = error
                if not isinstance(error, GeneratorExit):
                    await clear_cancellation()

    async def _limited(self, coroutine: Any) -> Any:
        limit_s = self._policy.read_timeout_s
        if limit_s is None:
            return await coroutine
        task = asyncio.ensure_future(caught(coroutine))
        try:
            await asyncio.wait((task,), timeout=limit_s)
            if task.done():
                data, error = task.result()
                if error is not None:
                    raise error
                return data
            raise TimeoutError(f"no answer within read_timeout_s={limit_s:g}")
        finally:
            # Also if this coroutine is cancelled. A read that blocks a thread frees it for others when it is cancelled.
            if not task.done():
                self._abandoned.add(task)
                task.cancel()
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved


# Types whose bytes are counted; others, such as numbers, have none.
_SIZED = (bytes, bytearray, memoryview, tuple, list, dict)


def total_bytes(samples: Sequence[Any]) -> int:
    """Bytes of encoded samples together; objects of unknown size count as none."""
    if isinstance(samples, Gathered):
        return samples.nbytes
    kinds = set(map(type, samples))
    if kinds == {bytes}:
        return sum(map(len, samples))  # the usual case, in a sixth of the time for tiny samples
    if not any(issubclass(kind, _SIZED) for kind in kinds):
        return 0
    if kinds == {tuple} and len(set(map(len, samples))) == 1:
        return sum(map(total_bytes, zip(*samples, strict=True)))  # 256 rows of a table: in a tenth of the time
    if kinds == {dict}:
        return total_bytes([*chain.from_iterable(map(dict.values, samples))])
    return sum(map(nbytes, samples))


def nbytes(encoded: Any) -> int:
    """Bytes of an encoded sample; 0 for an object of unknown size."""
    if isinstance(encoded, bytes | bytearray):
        return len(encoded)
    if isinstance(encoded, memoryview):
        return encoded.nbytes
    if isinstance(encoded, tuple | list):
        return sum(map(nbytes, encoded))
    if isinstance(encoded, dict):
        return sum(map(nbytes, encoded.values()))
    return 0
