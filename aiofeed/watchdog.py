"""Waiting for a job with a limit on each of its samples, and giving its place to another where it runs over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiofeed.errors import FeedError
from aiofeed.executor import ABANDONED_MOST, ThreadPool
from aiofeed.guard import Guard

T = TypeVar("T")

# A limit that has just passed is looked at again no sooner: the clock of the loop is coarser than the limit's.
_LEAST_S = 0.001


async def run_within(
    limit_s: float, executor: ThreadPool, work: Callable[[], T], guard: Guard
) -> tuple[T | None, int | None]:
    """What ``work`` returned; or, where a sample ran over, the position of that sample.

    Args:
        limit_s: most seconds for one sample; waiting for a thread is not counted.
        executor: where it runs; the lane of an abandoned job goes to another.
        work: reports to ``guard``.
        guard: of this job alone.

    Raises:
        FeedError: too many jobs were abandoned and still run.
    """
    job = executor.submit(work)
    future = asyncio.wrap_future(job)
    try:
        while True:
            await asyncio.wait((future,), timeout=max(guard.left_s(limit_s), _LEAST_S))
            if future.done():
                return future.result(), None
            if (at := guard.abandon(limit_s)) is not None:
                break
    except asyncio.CancelledError:
        job.cancel()
        raise
    finally:
        if not future.done():
            future.add_done_callback(_forget)
    if not executor.abandon(job):
        raise FeedError(
            f"{ABANDONED_MOST} samples took longer than {limit_s:g} s to decode and still run: the decoder hangs, "
            f"or the limit is too low for it"
        )
    return None, at


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()  # seen: it was abandoned, and says so
