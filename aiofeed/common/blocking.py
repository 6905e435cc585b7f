"""Runs coroutines for constructors, which may be called where an event loop runs already."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.threads import JOIN_S, POLL_INTERVAL_S

ResultT = TypeVar("ResultT")


def run_blocking(function: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Return the result of a coroutine function, run by an event loop in a thread; Ctrl-C cancels it."""
    thread = EventLoopThread(read_threads=4, decode_threads=1)
    outcome: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

    async def run() -> None:
        try:
            outcome.set_result(await function())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            outcome.set_exception(error)

    try:
        thread.launch(import_torch=False)
        thread.start(run)
        while not outcome.done():
            # In pieces: a signal that arrives just before the thread blocks does not wake it.
            concurrent.futures.wait([outcome], POLL_INTERVAL_S)
        return outcome.result()
    finally:
        thread.stop()
        thread.join(JOIN_S)
