"""Reads samples of a ``Source`` on the loop: many at a time, each with its time limit and its retries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiofeed.kernel.core.failure_policy import FailurePolicy, backoff_s
from aiofeed.kernel.core.types import Members, Source
from aiofeed.kernel.runtime.cancellation import clear_cancellation, is_cancelled


@dataclass(eq=False)
class ReadResult:
    """The results of the reads of a chunk: encoded samples, and an exception for each that failed."""

    samples: list[Any] = field(default_factory=list)
    nbytes: int = 0
    retries: int = 0
    # False if the decode job reads the samples itself.
    waited: bool = True


class AsyncReader:
    """Calls a source's coroutines on the loop, with time limit and retries, and returns what they raise as values."""

    def __init__(self, source: Source[Any], policy: FailurePolicy) -> None:
        self._source = source
        self._policy = policy
        # Of the class: a wrapper may pass on the attributes of another source.
        uncopied = getattr(type(source), "read_uncopied", None)
        self._read_many = Members.of(source).read_many if uncopied is None else partial(uncopied, source)
        self._jitter = random.Random()
        # Reads over their time limit that ignore cancellation; referred to here so that they are not garbage collected.
        self._abandoned: set[asyncio.Future[Any]] = set()

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """Return the encoded samples; an exception for each that failed.

        Raises:
            CancelledError: The task was cancelled, even if the source caught the cancellation.
        """
        result = ReadResult()
        result.samples = await self._read(indices, result)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            await clear_cancellation()
        result.nbytes = total_bytes(result.samples)
        return result

    async def _read(self, indices: Sequence[int], result: ReadResult) -> list[Any]:
        if self._read_many is not None:
            try:
                samples = list(await self._limited(self._read_many(indices)))
            except (
                BaseException
            ) as error:  # the user's coroutine; reading one by one below finds the sample that failed
                if is_cancelled():
                    raise
                if isinstance(error, GeneratorExit):
                    return [error] * len(indices)  # if this coroutine is being closed, it must not continue
                await clear_cancellation()
            else:
                if len(samples) != len(indices):
                    wrong = f"read_many returned {len(samples)} samples for {len(indices)} indices"
                    return [ValueError(wrong)] * len(indices)
                if self._policy.retries:
                    await self._retry(indices, samples, result)
                return samples
        if len(indices) == 1:
            return [await self._read_one(indices[0], result)]
        return await self._read_each(indices, result)

    async def _read_each(self, indices: Sequence[int], result: ReadResult) -> list[Any]:
        """Return the results as ``gather`` does, in 6 us per read; ``gather`` takes 8, for a callback of each task."""
        if not indices:
            return []
        loop = asyncio.get_running_loop()
        all_read = loop.create_future()
        samples: list[Any] = [None] * len(indices)
        unread = len(indices)

        async def read_at(at: int, index: int) -> None:
            nonlocal unread
            try:
                samples[at] = await self._read_one(index, result)
            except BaseException as error:  # noqa: BLE001 - the task was cancelled, below or by the user's code
                samples[at] = error
            unread -= 1
            if not unread and not all_read.done():
                all_read.set_result(None)

        tasks = [loop.create_task(read_at(at, index)) for at, index in enumerate(indices)]
        try:
            await all_read
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # none outlives this coroutine
            raise
        return samples

    async def _retry(self, indices: Sequence[int], samples: list[Any], result: ReadResult) -> None:
        """Read samples again whose error in ``read_many`` is transient."""
        failed = [
            at
            for at, sample in enumerate(samples)
            if isinstance(sample, BaseException) and self._policy.is_transient(sample)
        ]
        if failed:
            reads = [self._read_one(indices[at], result, failed=samples[at]) for at in failed]
            for at, sample in zip(failed, await asyncio.gather(*reads), strict=True):
                samples[at] = sample

    async def _read_one(self, index: int, result: ReadResult, failed: BaseException | None = None) -> Any:
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
                if self._policy.read_timeout_s is None:
                    return await self._source.read(index)
                return await self._limited(self._source.read(index))
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
        task = asyncio.ensure_future(_caught(coroutine))
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


async def _caught(coroutine: Any) -> tuple[Any, BaseException | None]:
    """Return the result or the exception, as values: SystemExit raised in a task would end the loop."""
    try:
        return await coroutine, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        return None, error


# Types whose bytes are counted; others, such as numbers, have none.
_SIZED = (bytes, bytearray, memoryview, tuple, list, dict)


def total_bytes(samples: Sequence[Any]) -> int:
    """Bytes of encoded samples together; objects of unknown size count as none."""
    kinds = set(map(type, samples))
    if kinds == {bytes}:
        return sum(map(len, samples))  # the usual case, in a sixth of the time for tiny samples
    if not any(issubclass(kind, _SIZED) for kind in kinds):
        return 0
    if kinds == {tuple} and len(set(map(len, samples))) == 1:
        return sum(map(total_bytes, zip(*samples, strict=True)))  # 256 rows of a table: in a tenth of the time
    if kinds == {dict}:
        return total_bytes([value for sample in samples for value in sample.values()])
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
