"""Waiting for a job with a limit on each of its samples, and giving its place to another where it runs over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from aiofeed.runtime.guard import Guard
from aiofeed.runtime.thread_pool import ABANDONED_MOST, ThreadPool

T = TypeVar("T")

# A limit that has just passed is looked at again no sooner: the clock of the loop is coarser than the limit's.
_LEAST_S = 0.001


class StuckError(Exception):
    """Too many jobs were abandoned and still run."""


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
        StuckError: there are too many such jobs, or no thread is to be had for what waits.
    """
    # No asyncio future around the job: an abandoned one may end when the loop is closed, and nobody asks what it
    # raised.
    over = asyncio.Event()
    job = executor.submit(work)
    job.add_done_callback(partial(_tell, asyncio.get_running_loop(), over))
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(guard.left_s(limit_s), _LEAST_S)):
                    await over.wait()
            if job.done():
                return job.result(), None
            if (at := guard.abandon(limit_s)) is not None:
                break
    except asyncio.CancelledError:
        job.cancel()
        raise
    if not executor.abandon(job):
        raise StuckError(
            f"{ABANDONED_MOST} samples took longer than {limit_s:g} s to decode and still run: the decoder hangs, "
            f"or the limit is too low for it"
        )
    return None, at


def _tell(loop: asyncio.AbstractEventLoop, over: asyncio.Event, job: Future[T]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(over.set)
