"""Whose cancellation it is: the engine's, which ends its tasks, or one that a source left behind in the task it ran in.

asyncio counts requests to cancel a task, not who made them. A source may raise that count for good: a time limit that
cancels the task and does not take that back (async_timeout before 4.0.3), or its own hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any


class TaskScope:
    """A ``with`` block, in the body of a ``TaskGroup``, that knows when the group's tasks are being cancelled.

    That is so once the task around it was cancelled, or an error has left the block. Tasks made inside belong to it.
    """

    def __enter__(self) -> TaskScope:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._before = task.cancelling()
        self._left_by_error = False
        self._token: Token[TaskScope | EndedBy | None] = _scope.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left_by_error = kind is not None
        _scope.reset(self._token)  # the task would refer to itself; those that were made inside have it
        del self._token

    @property
    def cancelled(self) -> bool:
        """Whether its tasks are being cancelled."""
        return self._left_by_error or self._task.cancelling() > self._before


class EndedBy:
    """A ``with`` block in a task that is cancelled only where ``ending()`` says so.

    Args:
        ending: whether whoever made the task wants its end.
    """

    def __init__(self, ending: Callable[[], bool]) -> None:
        self._ending = ending

    def __enter__(self) -> EndedBy:
        self._token: Token[TaskScope | EndedBy | None] = _scope.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._token)
        del self._token

    @property
    def cancelled(self) -> bool:
        """Whether the task is to end."""
        return self._ending()


_scope: ContextVar[TaskScope | EndedBy | None] = ContextVar("aiofeed-tasks", default=None)


def is_cancelled() -> bool:
    """Whether the running task is to end; an error of the user's may be a ``CancelledError`` as well."""
    if (scope := _scope.get()) is not None:
        return scope.cancelled
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def clear_cancellation() -> None:
    """Take back what a source did to the running task, so that it can go on.

    Raises:
        CancelledError: the task is to end.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return
    if is_cancelled():
        raise asyncio.CancelledError
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)  # where a request was not met yet, it is raised here
    except asyncio.CancelledError:
        if is_cancelled():
            raise
