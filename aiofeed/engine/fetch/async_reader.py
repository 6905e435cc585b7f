"""Reading samples of a ``Source``: many at a time, each with its time limit and its further attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiofeed.core.failure_policy import FailurePolicy, backoff_s
from aiofeed.core.types import Source
from aiofeed.runtime.cancellation import clear_cancellation, is_cancelled


@dataclass(eq=False)
class ReadResult:
    """What a chunk's reads gave.

    Args:
        samples: encoded samples, an exception in the place of one that failed.
        nbytes: their bytes.
        retries: further attempts that it took.
        waited: whether it waited for anything; otherwise ``decode`` finds the samples itself.
    """

    samples: list[Any] = field(default_factory=list)
    nbytes: int = 0
    retries: int = 0
    waited: bool = True


class AsyncReader:
    """A source's coroutines, called so that whatever they raise becomes a value; used on the loop.

    Args:
        source: what is read.
        policy: time limit and retries.
    """

    def __init__(self, source: Source[Any], policy: FailurePolicy) -> None:
        self._source = source
        self._policy = policy
        self._read_many: Callable[[Sequence[int]], Any] | None = unless_overridden(source, "read_many", ("read",))
        self._jitter = random.Random()
        # Reads that ran over and do not heed their cancellation; kept so that they are not collected in mid-air.
        self._left: set[asyncio.Future[Any]] = set()

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """The samples, errors in their places.

        Raises:
            CancelledError: the task was cancelled; also where the source kept that to itself.
        """
        got = ReadResult()
        got.samples = await self._read(indices, got)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            await clear_cancellation()
        got.nbytes = total_bytes(got.samples)
        return got

    async def _read(self, indices: Sequence[int], got: ReadResult) -> list[Any]:
        if self._read_many is not None:
            try:
                samples = list(await self._limited(self._read_many(indices)))
            except BaseException as error:  # the user's coroutine; asked one by one below, it names who failed
                if is_cancelled():
                    raise
                if isinstance(error, GeneratorExit):
                    return [error] * len(indices)  # it may be this coroutine that is closed: it must not go on
                await clear_cancellation()
            else:
                if len(samples) != len(indices):
                    wrong = f"read_many returned {len(samples)} samples for {len(indices)} indices"
                    return [ValueError(wrong)] * len(indices)
                if self._policy.retries:
                    await self._again(indices, samples, got)
                return samples
        if len(indices) == 1:
            return [await self._read_one(indices[0], got)]
        return await self._read_each(indices, got)

    async def _read_each(self, indices: Sequence[int], got: ReadResult) -> list[Any]:
        """What ``gather`` would give, for less per read: the last to end says so, instead of each."""
        if not indices:
            return []
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        samples: list[Any] = [None] * len(indices)
        left = len(indices)

        async def one(at: int, index: int) -> None:
            nonlocal left
            try:
                samples[at] = await self._read_one(index, got)
            except BaseException as error:  # noqa: BLE001 - it was cancelled: by the one below, or by the user's own hand
                samples[at] = error
            left -= 1
            if not left and not ended.done():
                ended.set_result(None)

        tasks = [loop.create_task(one(at, index)) for at, index in enumerate(indices)]
        try:
            await ended
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # none outlives the one that waits for it
            raise
        return samples

    async def _again(self, indices: Sequence[int], samples: list[Any], got: ReadResult) -> None:
        """Try again what ``read_many`` could not read but may in a moment."""
        passing = [
            at
            for at, sample in enumerate(samples)
            if isinstance(sample, BaseException) and self._policy.is_transient(sample)
        ]
        if passing:
            found = await asyncio.gather(*[self._read_one(indices[at], got, failed=samples[at]) for at in passing])
            for at, sample in zip(passing, found, strict=True):
                samples[at] = sample

    async def _read_one(self, index: int, got: ReadResult, failed: BaseException | None = None) -> Any:
        """One sample, or the last attempt's error; ``failed`` is that of an attempt that was made before."""
        attempt = 0
        while True:
            if failed is not None:
                if attempt == self._policy.retries or not self._policy.is_transient(failed):
                    return failed
                attempt += 1
                got.retries += 1
                await asyncio.sleep(backoff_s(attempt, self._jitter))
            try:
                if self._policy.read_timeout_s is None:
                    return await self._source.read(index)
                return await self._limited(self._source.read(index))
            except BaseException as error:  # the user's coroutine may raise anything; raised again by name
                if is_cancelled():
                    raise
                failed = error
                if not isinstance(error, GeneratorExit):
                    await clear_cancellation()

    async def _limited(self, reading: Any) -> Any:
        limit_s = self._policy.read_timeout_s
        if limit_s is None:
            return await reading
        task = asyncio.ensure_future(_caught(reading))
        try:
            await asyncio.wait((task,), timeout=limit_s)
            if task.done():
                data, error = task.result()
                if error is not None:
                    raise error
                return data
            raise TimeoutError(f"no answer within read_timeout_s={limit_s:g}")
        finally:
            # Also where this coroutine itself is cancelled. What blocks in a thread gives its place to another there.
            if not task.done():
                self._left.add(task)
                task.cancel()
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # seen: it was raised above, or nobody waits for it any more


async def _caught(reading: Any) -> tuple[Any, BaseException | None]:
    """What it gave, or what it raised: a task in which SystemExit is raised takes the loop down with it."""
    try:
        return await reading, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
        return None, error


def unless_overridden(source: object, name: str, others: Sequence[str]) -> Any:
    """A method that stands in for ``others``; ``None`` where a subclass has overridden one of those, but not it."""
    rank = {each: _rank(source, each) for each in (name, *others)}
    return getattr(source, name, None) if all(rank[name] <= rank[other] for other in others) else None


def _rank(source: object, name: str) -> int:
    """How far up the classes of ``source`` a method is found; last comes what ``__getattr__`` finds elsewhere."""
    if name in getattr(source, "__dict__", {}):
        return -1
    kinds = type(source).__mro__
    return next((depth for depth, kind in enumerate(kinds) if name in vars(kind)), len(kinds))


def total_bytes(samples: Sequence[Any]) -> int:
    """Bytes of encoded samples together, as far as they can be seen."""
    if set(map(type, samples)) == {bytes}:
        return sum(map(len, samples))  # nearly always, and a sixth of the time where samples are tiny
    return sum(map(nbytes, samples))


def nbytes(encoded: Any) -> int:
    """Bytes of an encoded sample, as far as they can be seen."""
    if isinstance(encoded, bytes | bytearray):
        return len(encoded)
    if isinstance(encoded, memoryview):
        return encoded.nbytes
    if isinstance(encoded, tuple | list):
        return sum(map(nbytes, encoded))
    if isinstance(encoded, dict):
        return sum(map(nbytes, encoded.values()))
    return 0
