"""Runs coroutines for constructors, which may be called where an event loop runs already, and holds signals back."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
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


@contextmanager
def signal_held(number: int = signal.SIGINT, wanted: bool = True) -> Iterator[None]:
    """Deliver a signal at the end of the block if it is ``wanted``, in the main thread, and a function handles it.

    For blocks that fork: ``os.fork`` calls Python functions that modules have registered, and Python handles a signal
    in the first one, where the exception of the handler is printed and lost. Imports of pyarrow lose it, too.
    """
    handler = signal.getsignal(number)
    if not wanted or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    try:
        signal.signal(number, lambda *_: arrived.append(number))
        yield
    finally:
        signal.signal(number, handler)
        if arrived:
            signal.raise_signal(number)
