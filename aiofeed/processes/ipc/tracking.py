"""Which objects have been garbage-collected: how a slot is freed when nothing refers to a batch in it any more."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_forks = 0


def forks() -> int:
    """How often this process has forked. A child has the memory that was in use then, and does not report its drop."""
    return _forks


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


class DropTracker(Generic[T]):
    """Reports objects that have been garbage-collected, each by a value that was given for it.

    The collector only appends to a deque, a C function: no Python code runs in it, in whichever thread it runs.
    """

    def __init__(self) -> None:
        # By id: an ndarray, and so a weak reference to one, has no hash.
        self._watched: dict[int, tuple[weakref.ref[object], T]] = {}
        self._dropped: deque[weakref.ref[object]] = deque()

    def __len__(self) -> int:
        """Objects that have not been reported."""
        return len(self._watched)

    def watch(self, owner: object, value: T) -> None:
        """Report ``value`` once ``owner`` has been collected. For any thread."""
        reference = weakref.ref(owner, self._dropped.append)
        self._watched[id(reference)] = reference, value

    def forget(self, value: T) -> None:
        """Do not report ``value``."""
        for key in [key for key, (_, each) in list(self._watched.items()) if each is value]:
            del self._watched[key]

    def collected(self) -> Iterator[T]:
        """The values of the objects that were collected since the last call. For any thread."""
        while True:
            try:
                reference = self._dropped.popleft()
            except IndexError:
                return
            if (entry := self._watched.pop(id(reference), None)) is not None:
                yield entry[1]
