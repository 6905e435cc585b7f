"""Limits concurrent calls into a ``Dataset`` to ``FromDataset(threads=N)``, across all feeders and iterators.

The limit holds for the datasets that a ``Subset``, a ``ConcatDataset`` or another wrapper calls: its *bases*. A call
takes its bases all at once, and calls wait in order of arrival, so two calls never hold a base that the other waits
for. With ``threads=1`` one thread makes all calls of a base, from its first call until it is collected.

A call in progress cannot be interrupted, so a call that outlives its iterator still counts. The calls of a new iterator
wait for it, in their decode threads. A call whose sample exceeds its feeder's time limit does not count any more,
although its thread may still be inside the dataset.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from types import MemberDescriptorType, TracebackType
from typing import Any

from aiofeed.core.errors import FeedError
from aiofeed.runtime import threads
from aiofeed.runtime.thread_pool import HostedRun
from aiofeed.runtime.threads import DECODE_THREAD_NAME, DaemonThread
from aiofeed.runtime.time_limits import AbandonedError, JobControl, JobDeadline
from aiofeed.sources.dataset import FromDataset

log: logging.Logger = logging.getLogger("aiofeed.sources")

# A wait that is longer than this is logged.
LOG_AFTER_S = 5.0
# A waiting thread checks the stop flag and the time limits of other calls this often.
POLL_INTERVAL_S = 0.1

_changed = threading.Condition()
# The slots in use and the slots waited for, of all datasets; changed while holding _changed.
_active: list[DatasetSlot] = []
_waiting: list[DatasetSlot] = []
# The call inside which a source is being iterated: a Dataset may iterate a feeder over another one.
_outer: weakref.WeakKeyDictionary[FromDataset, weakref.ref[DatasetSlot]] = weakref.WeakKeyDictionary()
# The threads of bases by id, with a reference that shows whether the id is still that of the base.
_threads: dict[int, tuple[weakref.ref[Any], DatasetThread]] = {}


def base_datasets(dataset: Any) -> list[Any]:
    """The datasets that a dataset leads to by attributes ``dataset`` and ``datasets``; the dataset itself if to none.

    Properties are not evaluated: one may open a file.
    """
    bases: list[Any] = []
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            inner = list(filter(_is_dataset, _parts(one)))
            waiting += inner
            if not inner:
                bases.append(one)
    return bases


def _parts(dataset: Any) -> Iterable[Any]:
    for name in ("dataset", "datasets"):
        found: Any = getattr(dataset, "__dict__", {}).get(name)
        if isinstance(getattr(type(dataset), name, None), MemberDescriptorType):  # of __slots__
            found = getattr(dataset, name)
        if type(found) is dict:
            yield from found.values()
        elif type(found) in (list, tuple):
            yield from found
        elif found is not None:
            yield found


def _is_dataset(value: Any) -> bool:
    """Whether a value is an object of its own kind with items, and not plain data that any thread may read."""
    kind = type(value)
    plain = kind.__module__ in ("builtins", "numpy", "torch")
    return not plain and hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


class DatasetCalls:
    """The calls of one source into its dataset.

    Args:
        source: The dataset and the number of threads it allows.

    Attributes:
        bases: The ids of objects that calls exclude each other from.
        thread: The thread that makes the calls; ``None``: each decode thread makes its own.
    """

    def __init__(self, source: FromDataset) -> None:
        self.source = source
        # References, so that no other object gets the same id.
        self._objects: list[Any] = base_datasets(source.dataset)
        self.thread: DatasetThread | None = None
        if source.threads == 1:
            self.thread = _thread_of(self._objects, source)
            self._objects.append(self.thread)  # different bases may have the same thread
        self.bases: frozenset[int] = frozenset(map(id, self._objects))

    def slot(self, index: int, control: JobControl) -> DatasetSlot:
        """The slot for a call whose first sample is ``index``."""
        return DatasetSlot(self, index, control)


class DatasetSlot:
    """A ``with`` block in which ``call`` may call a dataset.

    Args:
        calls: The source and its bases.
        index: The first sample that the call asks for.
        control: Ends a wait when the job is stopped, and limits the time at one sample.

    Attributes:
        index: The sample that the call is asking for; named in the log.

    Raises:
        AbandonedError: The job was stopped while it waited.
        FeedError: The call would wait for itself, because datasets iterate feeders over each other.
    """

    __slots__ = ("__weakref__", "_calls", "_control", "_source", "index", "thread")

    def __init__(self, calls: DatasetCalls, index: int, control: JobControl) -> None:
        self._calls = calls
        self._source = calls.source
        self._control = control
        self.index: int = index
        # The thread that is inside the dataset.
        self.thread: int = 0

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

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that may call the dataset, after the source's ``setup`` hook."""

        def run() -> None:
            self.thread = threading.get_ident()
            self._source.set_up()
            work()

        if self._calls.thread is None:
            run()
        else:
            self._calls.thread.call(run, self._control.deadline)

    def _wait(self) -> None:
        """Wait, while holding ``_changed``, until a slot is free and no call has waited longer."""
        log_at = time.monotonic() + LOG_AFTER_S
        while self._sharing(_waiting)[0] is not self or not self._has_free_slot():
            if self._control.stop.is_set():
                raise AbandonedError
            if _outer_of(self._source) is not None and self._is_stuck(set()):
                raise FeedError(
                    f"the datasets of {self.key!r} and of another call each iterate a feeder over the other's, and "
                    f"would wait for each other. Iterate one of the feeders before, outside __getitem__"
                )
            if time.monotonic() >= log_at and (others := self._sharing(_active)):
                log_at = math.inf
                log.warning(
                    "waiting for another iterator's call of %r: FromDataset(threads=%d) allows no further call",
                    others[0].key,
                    self._source.threads,
                )
            _changed.wait(POLL_INTERVAL_S)
            if (thread := self._calls.thread) is not None and thread.current:
                # The call that this one waits for may have been passed to this thread.
                _changed.release()
                try:
                    thread.run_passed()
                finally:
                    _changed.acquire()

    def _has_free_slot(self) -> bool:
        calls = self._sharing(_active)
        if len(calls) < self._source.threads:
            return True
        deadlines = [(slot, slot._control.deadline) for slot in calls]
        overdue = [slot for slot, deadline in deadlines if deadline is not None and deadline.abandon() is not None]
        for slot in overdue:
            _active.remove(slot)
            if slot._control.stop.is_set():  # an iterator that was not left reports its sample as an error
                log.warning("%r exceeded its time limit and is given up; its iterator was left", slot.key)
        return len(calls) - len(overdue) < self._source.threads

    def _sharing(self, slots: list[DatasetSlot]) -> list[DatasetSlot]:
        """The slots of calls that share a base with this one."""
        bases = self._calls.bases
        return [slot for slot in slots if not bases.isdisjoint(slot._calls.bases)]

    def _is_stuck(self, seen: set[DatasetSlot]) -> bool:
        """Whether this call waits for itself, by way of other calls and of feeders that datasets iterate."""
        if self in seen:
            return True
        seen.add(self)
        if self in _waiting:
            earlier = _waiting[: _waiting.index(self)]
            awaited = self._sharing(_active) + self._sharing(earlier)
        else:
            awaited = [slot for slot in _active + _waiting if _outer_of(slot._source) is self]
        return bool(awaited) and all(slot._is_stuck(seen) for slot in awaited)

    @property
    def key(self) -> str:
        """The name of the sample that the call is asking for."""
        return self._source.key(self.index)


class DatasetThread:
    """The thread that makes the calls of one-thread datasets, until they are collected.

    Objects such as SQLite connections work in the thread that created them only, and decode threads end with their
    feeder. So this thread becomes the decode thread of a feeder while that runs, and calls the dataset without a change
    of thread. The decode threads of other feeders over the same datasets pass their calls to it.

    A call that exceeds its time limit keeps its thread, and a new thread makes the calls after it. There is no other
    call at the same time: all datasets of this thread share a slot.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        # Runs of thread pools; functions to call; a reference to a dataset that was collected; ``None`` to end.
        self._jobs: SimpleQueue[HostedRun | Callable[[], None] | weakref.ref[Any] | None] = SimpleQueue()
        self._owners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self._thread: DaemonThread | None = None
        self._hosted: HostedRun | None = None
        self._passed: _Call | None = None
        self._busy = False
        threads.register(self)

    def serve(self, owner: Any) -> weakref.ref[Any]:
        """Exist at least as long as ``owner``; return a reference to it."""
        # The collector calls a function in C, so it runs no Python code.
        self._owners.append(weakref.ref(owner, self._jobs.put))
        return self._owners[-1]

    @property
    def current(self) -> bool:
        """Whether this is the calling thread."""
        return self._thread is not None and self._thread.current

    def host(self, run: HostedRun) -> bool:
        """Become the thread of a pool until the pool stops; return False if it is that of another pool."""
        with self._lock:
            if self._hosted is not None or self._busy:
                return False
            self._start()
            self._hosted = run
            self._jobs.put(run)
        return True

    def call(self, work: Callable[[], None], deadline: JobDeadline | None) -> None:
        """Run ``work`` in the thread and wait for it; raise its error."""
        call = _Call(work)
        if self._busy:
            self._replace()
        with self._lock:
            here, self._busy = self.current, True
            if not here:
                self._start()
                self._passed = call
                (self._jobs if self._hosted is None else self._hosted.queue).put(self.run_passed)
        if here:
            self._run_call(call)
        else:
            with _changed:
                _changed.notify_all()  # the thread may be waiting for a slot
            while not call.ended.acquire(timeout=-1 if deadline is None else max(deadline.left_s(), POLL_INTERVAL_S)):
                if deadline is not None and deadline.abandon() is not None:
                    self._replace()
                    deadline = None  # this thread waits for the call, and others go on
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a reference cycle with the traceback

    def _replace(self) -> None:
        """Leave the thread to the call that exceeds its time limit."""
        with self._lock:
            hosted, self._hosted, self._thread, self._busy = self._hosted, None, None, False
        if hosted is not None:
            hosted.lost()

    def run_passed(self) -> None:
        """Make the call that a decode thread has passed to this thread, if any."""
        with self._lock:
            call, self._passed = (self._passed, None) if self.current else (None, None)
        if call is not None:
            self._run_call(call)

    def _run_call(self, call: _Call) -> None:
        call.run()
        with self._lock:
            if self.current:
                self._busy = False
        call.ended.release()

    def _start(self) -> None:
        if self._thread is None:
            thread = DaemonThread(self._run, f"{DECODE_THREAD_NAME}-dataset")
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        with self._lock:
            pass  # ``_start`` has set ``_thread``
        while self.current and (job := self._jobs.get()) is not None:
            if isinstance(job, HostedRun):
                job.run()
                with self._lock:
                    if self._hosted is job:
                        self._hosted = None
                self.run_passed()  # passed to the queue of a pool that has stopped
            elif not isinstance(job, weakref.ref):
                job()
            elif all(owner() is None for owner in self._owners):
                return
            del job

    def stop(self) -> None:
        """End the thread after its current job; never blocks."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the thread; return whether it has ended."""
        return self._thread is None or self._thread.join(timeout_s)


class _Call:
    """A function to run in another thread. ``ended`` is locked until it has returned."""

    __slots__ = ("_work", "ended", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = error


def _thread_of(bases: list[Any], source: FromDataset) -> DatasetThread:
    """The thread of the first base that has one, which becomes the thread of the others without one; or a new one."""
    with _changed:
        for key in [key for key, (base, _) in _threads.items() if base() is None]:
            del _threads[key]
        owners = [base for base in bases if type(base).__weakrefoffset__] or [source]
        known = [_threads[id(owner)][1] for owner in owners if id(owner) in _threads]
        thread = known[0] if known else DatasetThread()
        for owner in owners:
            if id(owner) not in _threads:
                _threads[id(owner)] = thread.serve(owner), thread
    return thread


def enter_iteration(source: FromDataset) -> None:
    """Note the call inside which the calling thread begins to iterate over a dataset, if any.

    Raises:
        FeedError: It is a call of the same dataset, which allows one thread: the iteration would wait for itself.
    """
    thread = threading.get_ident()
    outer = next((slot for slot in tuple(_active) if slot.thread == thread), None)
    if outer is None:
        _outer.pop(source, None)
        return
    if source.threads == 1 and not outer._calls.bases.isdisjoint(map(id, base_datasets(source.dataset))):
        raise FeedError(
            f"{type(source.dataset).__name__} iterates a feeder over itself within __getitem__ and would wait for "
            f"itself, because one thread at a time calls it. Iterate it before, or pass FromDataset(dataset, threads=2)"
        )
    _outer[source] = weakref.ref(outer)


def _outer_of(source: FromDataset) -> DatasetSlot | None:
    outer = _outer.get(source)
    return None if outer is None else outer()


def _after_fork_in_child() -> None:
    """The threads in ``_active``, ``_waiting`` and ``_threads`` exist in the parent only."""
    global _changed
    _changed = threading.Condition()
    _active.clear()
    _waiting.clear()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
