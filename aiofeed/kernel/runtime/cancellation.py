"""Distinguishes the engine's cancellation of its tasks from a cancellation that a source left behind in a task.

asyncio counts the requests to cancel a task, not their origin. A source can raise the count permanently: by a timeout
that cancels the task and does not call ``uncancel`` (async_timeout before 4.0.3), or by cancelling the task itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Whether the running task should end, as last set by `ended_by`. Tasks created in its block have a copy.
_ending: ContextVar[Callable[[], bool] | None] = ContextVar("aiofeed-ending", default=None)


@contextmanager
def ended_by(ending: Callable[[], bool]) -> Iterator[None]:
    """Let the running task, and tasks created in the ``with`` block, count as cancelled while ``ending()`` is true."""
    token = _ending.set(ending)
    try:
        yield
    finally:
        _ending.reset(token)  # avoids a reference cycle of the task


@contextmanager
def task_scope() -> Iterator[None]:
    """A ``with`` block in the body of a ``TaskGroup``: its tasks count as cancelled when the group cancels them.

    The group does so after the surrounding task was cancelled or an exception has left the block.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    left_by_error = False
    with ended_by(lambda: left_by_error or task.cancelling() > before):
        try:
            yield
        except BaseException:
            left_by_error = True
            raise


def is_cancelled() -> bool:
    """Return whether the running task should end. A ``CancelledError`` alone does not tell: user code may raise one."""
    if (ending := _ending.get()) is not None:
        return ending()
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def clear_cancellation() -> None:
    """Undo cancellations of the running task that a source left behind, so that the task can go on.

    Raises:
        CancelledError: The task should end.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return
    if is_cancelled():
        raise asyncio.CancelledError
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)  # a pending request is raised here
    except asyncio.CancelledError:
        if is_cancelled():
            raise


async def caught(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return the result or the error of user code: SystemExit that a task raises would end the loop.

    A GeneratorExit that the ``await`` of this call raises is not one of user code: the caller is being closed.
    """
    try:
        return await awaitable, None
    except BaseException as error:  # noqa: BLE001 - for the caller to raise
        return None, error
