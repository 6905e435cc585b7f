"""The worker processes of one ``DataLoader``, as their parent sees them."""

from __future__ import annotations

import _thread
import os
import pickle
import signal
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from aiofeed.common.blocking import signal_held
from aiofeed.ipc.framing import close_all
from aiofeed.ipc.peers import describe_exit
from aiofeed.ipc.pickling import load_batch
from aiofeed.ipc.ring import Borrowed, Ring, free_dropped_slots
from aiofeed.kernel.core.errors import IteratorClosedError, WorkerDiedError
from aiofeed.kernel.runtime.buffers import Bytes, DropTracker
from aiofeed.loader.workers.channel import Answer, Channel, wait
from aiofeed.loader.workers.worker_loop import WorkerStart, main

# A dead worker closes its channel a moment before its exit status is available.
_REAP_S = 1.0
# As torch waits for its workers.
_END_S = 5.0
# Shortest and longest interval of the checks whether they have ended.
_END_POLL_S, _LONGEST_POLL_S = 0.001, 0.02
# The parent's ends of all channels. A forked worker closes its copies.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
# The workers of iterators that were dropped, until they have ended.
_ending: list[list[Any]] = []


class _LoaderProcess:
    """One process, its channel and its shared memory."""

    def __init__(self, context: Any, start: WorkerStart, number: int) -> None:
        ours, self._theirs = socket.socketpair()
        _sockets.add(ours)
        self._forks = context.get_start_method() == "fork"
        inherited = list(_sockets) if self._forks else []
        self.process = context.Process(target=main, args=(self._theirs, inherited, start, number), daemon=True)
        self.channel = Channel(ours)
        self.ring = Ring()
        # Batches whose memory the user has dropped.
        self.tracker: DropTracker[Borrowed] = DropTracker()
        self.loaded: tuple[int, Borrowed] | None = None
        self._free: list[tuple[int, bool]] = []

    def start(self) -> None:
        """Start the process."""
        with self._theirs, signal_held(signal.SIGTERM, self._forks), signal_held(signal.SIGINT, self._forks):
            self.process.start()

    def releases(self) -> Sequence[tuple[int, bool]]:
        """Return the slots that are free since the last call; see ``Fetch``."""
        free_dropped_slots(self.tracker)
        free = tuple(self._free)
        self._free.clear()
        return free

    def borrow(self, slot: int, owners: Sequence[Bytes]) -> None:
        """Release a slot when its owners are dropped."""
        if self.loaded is not None and self.loaded[0] == slot:
            self.tracker.forget(self.loaded[1])  # an earlier call was interrupted
        free = self._free
        borrowed = Borrowed(lambda reusable: free.append((slot, reusable)))
        self.loaded = slot, borrowed
        borrowed.watch(owners, self.tracker)

    def close(self) -> None:
        self.channel.close()
        self.ring.close()


class LoaderWorkers:
    """Starts the worker processes and exchanges messages with them. Blocking, for one thread at a time.

    ``send`` may be called by another thread than ``receive``.

    Args:
        context: ``torch.multiprocessing`` or one of its contexts.
        start: What each worker starts with.
    """

    def __init__(self, context: Any, start: WorkerStart) -> None:
        self._workers: list[_LoaderProcess] = []
        self._pid = os.getpid()
        # At interpreter exit multiprocessing ends them, and modules may be gone.
        # A finalizer does not wait: a Ctrl-C in it would be lost.
        weakref.finalize(self, _end, self._workers, self._pid, waits=False).atexit = False
        # A fork has copied the list, not the processes.
        while any(each._parent_pid == self._pid and each.is_alive() for group in [*_ending] for each in group):
            time.sleep(_LONGEST_POLL_S)  # as torch, which waits for them when the iterator is dropped
        self._opened: tuple[int, Answer] | None = None
        for number in range(start.num_workers):
            try:
                self._workers.append(_LoaderProcess(context, start, number))
                self._workers[-1].start()
            except BaseException as error:
                self.close()
                if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                    error.add_note(
                        f"the dataset, collate_fn or worker_init_fn cannot be sent to a worker process, which the "
                        f'start method "{context.get_start_method()}" needs: define classes and functions at the top '
                        f'level of a module, or pass multiprocessing_context="fork", which needs no pickling (Linux), '
                        f"or num_workers=0"
                    )
                raise

    @property
    def usable(self) -> bool:
        """Whether these are workers of this process, none has ended, and Ctrl-C has interrupted no message."""
        return self._pid == os.getpid() and not any(worker.channel.ended for worker in self._workers)

    @property
    def processes(self) -> list[Any]:
        """The processes."""
        return [worker.process for worker in self._workers]

    def send(self, number: int, message: Any) -> None:
        """Send a message to a worker. Never blocks."""
        self._check_process()
        self._workers[number].channel.send(pickle.dumps(message))

    def releases(self, number: int) -> Sequence[tuple[int, bool]]:
        """Return the slots of a worker whose batches the user has dropped since the last call; see ``Fetch``."""
        return self._workers[number].releases()

    def receive(self, timeout_s: float) -> tuple[int, Answer]:
        """Return the next message, and the number of the worker that sent it; the same one until ``confirm``.

        Raises:
            TimeoutError: None arrived within ``timeout_s``.
            WorkerDiedError: A worker has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_process()
            if self._opened is not None:
                return self._opened
            for number, worker in enumerate(self._workers):
                if worker.channel.messages:
                    self._open(number, worker)
                    break
                if worker.channel.ended:
                    raise _died(worker)
            else:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                wait([worker.channel for worker in self._workers], left)

    def confirm(self) -> None:
        """Forget the message: the caller has stored it."""
        self._opened = None

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise IteratorClosedError("this iterator belongs to the parent process; call iter() in the child")

    def _open(self, number: int, worker: _LoaderProcess) -> None:
        try:
            payload, descriptors = worker.channel.messages.popleft()
            try:
                answer: Answer = pickle.loads(payload)
                if answer.segments or answer.retired:
                    worker.ring.map_segments(answer.segments, descriptors, answer.retired)
            finally:
                close_all(descriptors)
            self._opened = number, answer
        except BaseException:  # Ctrl-C: the message is lost
            worker.channel.close()
            raise

    def load(self, number: int, answer: Answer) -> Any:
        """Return the batch of an answer. Its slot is free for the worker again when nothing refers to its memory."""
        worker = self._workers[number]
        batch, owners = load_batch(answer.content, answer.extents, worker.ring)
        # The slot of a batch without memory in it is free at once, when the empty array is dropped.
        worker.borrow(answer.slot, owners or [np.empty(0, np.uint8)])
        return batch

    def close(self) -> None:
        """End the workers: each after its current batch, or by a signal if that takes more than 5 s. Idempotent."""
        _end(self._workers, self._pid, waits=True)


def _end(workers: Sequence[_LoaderProcess], pid: int, *, waits: bool) -> None:
    """Close the channels of the workers, and see that they end: ``waits`` or in a thread."""
    if pid != os.getpid():
        return
    for worker in workers:
        worker.close()
    processes = [worker.process for worker in workers if worker.process.is_alive()]
    if waits:
        _wait_for_end(processes)
    elif processes:
        _ending.append(processes)
        with suppress(RuntimeError):  # at interpreter exit there is no new thread
            # Not a threading.Thread, whose start waits.
            _thread.start_new_thread(_wait_for_end, (processes,))


def _wait_for_end(processes: list[Any]) -> None:
    # A stopped worker goes on, and ends with its channel.
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        for process in [each for each in processes if each.is_alive()]:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process.pid, number)
        deadline, pause_s = time.monotonic() + _END_S, _END_POLL_S
        # Not `join`: two threads that wait for a process at the same time get no exit status.
        while any(each.is_alive() for each in processes) and time.monotonic() < deadline:
            time.sleep(pause_s := min(1.5 * pause_s, _LONGEST_POLL_S))
    with suppress(ValueError):
        _ending.remove(processes)


def _died(worker: _LoaderProcess) -> WorkerDiedError:
    worker.process.join(_REAP_S)
    status = worker.process.exitcode
    text = f"DataLoader worker (pid(s) {worker.process.pid}) exited unexpectedly"
    if status is not None:
        text += f": it {describe_exit(status)}"
    if status == 0:
        text += "; if Ctrl-C has interrupted this iterator, call iter() again"
    return WorkerDiedError(text, status)
