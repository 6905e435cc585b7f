"""Distinguishes the engine's cancellation of its tasks from a cancellation that a source left behind in a task.

asyncio counts the requests to cancel a task, not their origin. A source can raise the count permanently: by a timeout
that cancels the task and does not call ``uncancel`` (async_timeout before 4.0.3), or by cancelling the task itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any


class TaskScope:
    """A ``with`` block in the body of a ``TaskGroup`` that knows whether the group's tasks are being cancelled.

    They are after the surrounding task was cancelled or an exception has left the block. Tasks created in the block
    belong to it.
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
        _scope.reset(self._token)  # avoids a reference cycle of the task; tasks created in the block have a copy
        del self._token

    @property
    def cancelled(self) -> bool:
        """Whether the tasks of the block are being cancelled."""
        return self._left_by_error or self._task.cancelling() > self._before


class EndedBy:
    """A ``with`` block in a task that counts as cancelled while ``ending()`` is true.

    Args:
        ending: Whether the creator of the task wants it to end.
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
        """Whether the task should end."""
        return self._ending()


_scope: ContextVar[TaskScope | EndedBy | None] = ContextVar("aiofeed-tasks", default=None)


def is_cancelled() -> bool:
    """Whether the running task should end. A ``CancelledError`` alone does not tell: user code may raise one."""
    if (scope := _scope.get()) is not None:
        return scope.cancelled
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
