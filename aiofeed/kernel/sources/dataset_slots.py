"""Limits concurrent calls into a ``Dataset`` to ``FromDataset(threads=N)``, across all feeders and iterators.

The limit holds for the datasets that a ``Subset``, a ``ConcatDataset`` or another wrapper calls: its *bases*. A call
takes its bases all at once, in order of arrival, so two calls never hold a base that the other waits for. With
``threads=1`` one thread makes all calls of a base, from its first call until it is collected.

A call in progress cannot be interrupted, so a call that outlives its iterator still counts. The calls of a new iterator
wait for it, in their decode threads. A call whose sample exceeds its feeder's time limit does not count any more,
although its thread may still be inside the dataset.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import MemberDescriptorType
from typing import Any

from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime import threads
from aiofeed.kernel.runtime.thread_pool import HostedRun
from aiofeed.kernel.runtime.threads import DECODE_THREAD_NAME, DaemonThread
from aiofeed.kernel.runtime.time_limits import AbandonedError, JobControl, JobDeadline
from aiofeed.kernel.sources.dataset import FromDataset

log: logging.Logger = logging.getLogger("aiofeed.sources")

# A wait that is longer than this is logged.
LOG_AFTER_S = 5.0
# A waiting thread checks the stop flag and the time limits of other calls this often.
POLL_INTERVAL_S = 0.1

_changed = threading.Condition()
# The calls that wait or run, of all datasets, in order of arrival; changed while holding _changed.
_calls: list[DatasetSlot] = []
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
            inner = list(filter(_is_dataset, [*_parts(one, "dataset"), *_parts(one, "datasets")]))
            waiting += inner
            if not inner:
                bases.append(one)
    return bases


def _parts(dataset: Any, name: str) -> list[Any]:
    found = inspect.getattr_static(dataset, name, None)
    if isinstance(found, MemberDescriptorType):  # of __slots__
        found = getattr(dataset, name, None)
    if type(found) is dict:
        return list(found.values())
    return list(found) if type(found) in (list, tuple) else [found]


def _is_dataset(value: Any) -> bool:
    """Return whether a value is an object of its own kind with items, and not plain data that any thread may read."""
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


class DatasetSlot:
    """A ``with`` block in which ``call`` may call a dataset.

    Args:
        calls: The source and its bases.
        index: The first sample that the call asks for.
        control: Ends a wait when the job is stopped, and limits the time at one sample.

    Attributes:
        index: The sample that the call is asking for; named in the log.
        thread: The identifier of the thread that is inside the dataset; 0: none.

    Raises:
        AbandonedError: The job was stopped or given up while it waited.
    """

    __slots__ = ("_control", "calls", "index", "thread")

    def __init__(self, calls: DatasetCalls, index: int, control: JobControl) -> None:
        self.calls: DatasetCalls = calls
        self._control = control
        self.index: int = index
        self.thread: int = 0

    def __enter__(self) -> DatasetSlot:
        # All bases at once and in order of arrival, so two calls never hold a base that the other waits for.
        _calls.append(self)
        if _calls[0] is self:  # the usual case: no lock, which a signal handler could leave locked
            return self
        with _changed:
            try:
                self._wait()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the slot; may be called again."""
        if self in _calls:
            _calls.remove(self)
        if _calls:  # they may wait
            with _changed:
                _changed.notify_all()

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that may call the dataset, after the source's ``setup`` hook."""

        def run() -> None:
            self.thread = threading.get_ident()
            self.calls.source.set_up()
            work()

        if self.calls.thread is None:
            run()
        else:
            self.calls.thread.call(run, self._control.deadline)

    def _wait(self) -> None:
        """Wait, while holding ``_changed``, until fewer earlier calls than the source's threads share a base."""
        calls, log_at = self.calls, time.monotonic() + LOG_AFTER_S
        while len(earlier := self._earlier()) >= (calls.source.threads or math.inf):
            if self._control.stop.is_set():
                raise AbandonedError
            if given_up := [slot for slot in earlier if slot._is_overdue()]:
                for slot in given_up:
                    slot.__exit__()
                continue
            if time.monotonic() >= log_at:
                log_at = math.inf
                log.warning(
                    "waiting for another iterator's call of %r: FromDataset(threads=%d) allows no further call",
                    earlier[0]._key,
                    calls.source.threads,
                )
            if calls.thread is None or not calls.thread.has_passed:
                _changed.wait(POLL_INTERVAL_S)
                continue
            # The call that this one waits for has been passed to this thread.
            _changed.release()
            try:
                calls.thread.run_passed()
            finally:
                _changed.acquire()

    def _earlier(self) -> list[DatasetSlot]:
        """Return the calls that arrived before this one and share a base with it."""
        if self not in _calls:
            raise AbandonedError
        bases = self.calls.bases
        return [slot for slot in _calls[: _calls.index(self)] if not bases.isdisjoint(slot.calls.bases)]

    def _is_overdue(self) -> bool:
        """Return whether the sample exceeds its time limit. The call is given up then, which is logged."""
        deadline = self._control.deadline
        if deadline is None or deadline.abandon() is None:
            return False
        if self._control.stop.is_set():  # an iterator that was not left reports its sample as an error
            log.warning("%r exceeded its time limit and is given up; its iterator was left", self._key)
        return True

    @property
    def _key(self) -> str:
        return self.calls.source.key(self.index)


class DatasetThread:
    """The thread that makes the calls of one-thread datasets, until they are collected.

    Objects such as SQLite connections work in the thread that created them only, and decode threads end with their
    feeder. So this thread becomes the decode thread of a feeder while that runs, and calls the dataset without a change
    of thread. The decode threads of other feeders over the same datasets pass their calls to it.

    A call that exceeds its time limit keeps its thread, and a new thread makes the calls after it. There is no other
    call at the same time: all datasets of this thread share a slot.

    Attributes:
        jobs: Functions to call; a reference to a dataset that was collected; ``None`` to end.
        owners: References to the datasets.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.owners: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self._thread: DaemonThread | None = None
        self._hosted: HostedRun | None = None
        # The call in progress, or the one passed to this thread.
        self._call: Callable[[], None] | None = None
        threads.register(self)

    @property
    def _current(self) -> bool:
        return self._thread is not None and self._thread.current

    def host(self, run: HostedRun) -> bool:
        """Become the thread of a pool until the pool stops; return False if it is that of another pool."""
        with self._lock:
            if self._hosted is not None or self._call is not None:
                return False
            self._start()
            self._hosted = run
            self.jobs.put(partial(self._host, run))
        return True

    def _host(self, run: HostedRun) -> None:
        run.run()
        with self._lock:
            if self._hosted is run:
                self._hosted = None
        self.run_passed()  # passed to the queue of a pool that has stopped

    def call(self, work: Callable[[], None], deadline: JobDeadline | None) -> None:
        """Run ``work`` in the thread and wait for it; raise its error."""
        errors: list[BaseException] = []
        ended = threading.Lock()
        ended.acquire()

        def call() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                errors.append(error)
            with self._lock:
                if self._current:
                    self._call = None
            ended.release()

        if (stuck := self._call) is not None:  # its slot was given up
            self._replace(stuck)
        with self._lock:
            self._call = call
            if not (here := self._current):
                self._start()
                (self.jobs if self._hosted is None else self._hosted.queue).put(self.run_passed)
        if here:
            call()
        else:
            with _changed:
                _changed.notify_all()  # the thread may be waiting for a slot
            while not ended.acquire(timeout=POLL_INTERVAL_S):
                if deadline is not None and deadline.abandon() is not None:
                    self._replace(call)  # this thread waits for the call, and others go on
        if errors:
            raise errors.pop()

    def _replace(self, stuck: Callable[[], None]) -> None:
        """Leave the thread to a call that exceeds its time limit."""
        with self._lock:
            if self._call is not stuck:
                return
            hosted, self._hosted, self._thread, self._call = self._hosted, None, None, None
        if hosted is not None:
            hosted.lost()

    def run_passed(self) -> None:
        """Make the call that a decode thread has passed to this thread, if any."""
        if self._current and (call := self._call) is not None:
            call()

    @property
    def has_passed(self) -> bool:
        """Whether this is the calling thread, and a call was passed to it."""
        return self._current and self._call is not None

    def _start(self) -> None:
        if self._thread is None:
            thread = DaemonThread(self._run, f"{DECODE_THREAD_NAME}-dataset")
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        with self._lock:
            pass  # ``_start`` has set ``_thread``
        while self._current and (job := self.jobs.get()) is not None:
            job()
            del job
            if all(owner() is None for owner in self.owners):
                return

    def stop(self) -> None:
        """End the thread after its current job; never blocks."""
        self.jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the thread; return whether it has ended."""
        return self._thread is None or self._thread.join(timeout_s)


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
                # The collector calls a function in C, so it runs no Python code.
                thread.owners.append(weakref.ref(owner, thread.jobs.put))
                _threads[id(owner)] = thread.owners[-1], thread
    return thread


def check_iteration(source: FromDataset) -> None:
    """Check that the calling thread may iterate a feeder over a dataset.

    Raises:
        FeedError: The thread is inside a call of the dataset, which allows one thread: it would wait for itself.
    """
    inside = [slot for slot in tuple(_calls) if slot.thread == threading.get_ident()]
    if inside and source.threads == 1 and not inside[0].calls.bases.isdisjoint(map(id, base_datasets(source.dataset))):
        raise FeedError(
            f"{type(source.dataset).__name__} iterates a feeder over itself within __getitem__ and would wait for "
            f"itself, because one thread at a time calls it. Iterate it before, or pass FromDataset(dataset, threads=2)"
        )


def _after_fork_in_child() -> None:
    """The threads in ``_calls`` and ``_threads`` exist in the parent only."""
    global _changed
    _changed = threading.Condition()
    _calls.clear()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
