"""Limits concurrent calls into a ``Dataset`` to ``FromDataset(threads=N)``, across all feeders and iterators.

A call in progress cannot be interrupted, so a call that outlives its iterator still counts. The calls of a new iterator
wait for it, in their decode threads. Calls wait in order of arrival. A call whose sample exceeds its feeder's time
limit does not count any more, although its thread may still be inside the dataset.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from types import TracebackType

from aiofeed.core.errors import FeedError
from aiofeed.runtime.time_limits import AbandonedError, JobControl
from aiofeed.sources.dataset import FromDataset

log = logging.getLogger("aiofeed.sources")

# A wait that is longer than this is logged.
LOG_AFTER_S = 5.0
# A waiting thread checks the stop flag and the time limits of other calls this often.
POLL_INTERVAL_S = 0.1

_changed = threading.Condition()
# The slots in use and the slots waited for, of all datasets; changed while holding _changed.
_active: list[DatasetSlot] = []
_waiting: list[DatasetSlot] = []


class DatasetSlot:
    """A ``with`` block in which a decode thread may call a dataset.

    Args:
        source: The dataset and the number of threads it allows.
        index: The first sample that the call asks for.
        control: Ends a wait when the job is stopped, and limits the time at one sample.

    Attributes:
        index: The sample that the call is asking for; named in the log.

    Raises:
        AbandonedError: The job was stopped while it waited.
    """

    __slots__ = ("_control", "_source", "index", "thread")

    def __init__(self, source: FromDataset, index: int, control: JobControl) -> None:
        self._source = source
        self._control = control
        self.index = index
        self.thread = threading.get_ident()

    def __enter__(self) -> DatasetSlot:
        with _changed:
            _waiting.append(self)
            try:
                self._wait()
                _active.append(self)
            finally:
                _waiting.remove(self)
                _changed.notify_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _changed:
            if self in _active:
                _active.remove(self)
            _changed.notify_all()

    def _wait(self) -> None:
        """Wait, while holding ``_changed``, until a slot is free and no call has waited longer."""
        log_at = time.monotonic() + LOG_AFTER_S
        while self._of_dataset(_waiting)[0] is not self or not self._has_free_slot():
            if self._control.stop.is_set():
                raise AbandonedError
            if time.monotonic() >= log_at and (others := self._of_dataset(_active)):
                log_at = math.inf
                log.warning(
                    "waiting for another iterator's call of %r: FromDataset(threads=%d) allows no further call",
                    others[0].key,
                    self._source.threads,
                )
            _changed.wait(POLL_INTERVAL_S)

    def _has_free_slot(self) -> bool:
        calls = self._of_dataset(_active)
        if len(calls) < self._source.threads:
            return True
        deadlines = [(slot, slot._control.deadline) for slot in calls]
        overdue = [slot for slot, deadline in deadlines if deadline is not None and deadline.abandon() is not None]
        for slot in overdue:
            _active.remove(slot)
            if slot._control.stop is not self._control.stop:  # a live iterator reports its own sample as an error
                log.warning("%r exceeded its time limit and is given up; its iterator was left", slot.key)
        return len(calls) - len(overdue) < self._source.threads

    def _of_dataset(self, slots: list[DatasetSlot]) -> list[DatasetSlot]:
        return [slot for slot in slots if slot._source.dataset is self._source.dataset]

    @property
    def key(self) -> str:
        """The name of the sample that the call is asking for."""
        return self._source.key(self.index)


def refuse_nested_iteration(source: FromDataset) -> None:
    """Raise if the calling thread is inside the dataset that it is about to iterate, and would wait for itself.

    Raises:
        FeedError: It is, and the dataset allows one thread.
    """
    thread = threading.get_ident()
    if source.threads > 1 or not any(
        slot.thread == thread and slot._source.dataset is source.dataset for slot in tuple(_active)
    ):
        return
    raise FeedError(
        f"{type(source.dataset).__name__} iterates a feeder over itself within __getitem__ and would wait for itself, "
        f"because one thread at a time calls it. Iterate it before, or pass FromDataset(dataset, threads=2)"
    )


def _after_fork_in_child() -> None:
    """The threads in ``_active`` and ``_waiting`` exist in the parent only."""
    global _changed
    _changed = threading.Condition()
    _active.clear()
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
