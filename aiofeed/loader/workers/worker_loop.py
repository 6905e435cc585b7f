"""The main function of a worker process. It does what torch's ``_worker_loop`` does, in the same order.

Seeds, ``get_worker_info()``, ``worker_init_fn``, fetcher, collation and errors are torch's. Batches are written to
shared memory that is reused, see ``pickling.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import random
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import signal_handling, worker
from torch.utils.data.graph_settings import apply_random_seed

from aiofeed.ipc.pickling import SlotStorage, dump_batch, move_batch
from aiofeed.ipc.ring import Slot, SlotPool
from aiofeed.loader.workers import random_state as rng
from aiofeed.loader.workers.channel import Answer, Channel, Fetch, Restore, Resume, wait
from aiofeed.loader.workers.fetching import BatchTimes, dataset_state, fetch, restore_dataset

# Interval of the checks whether the parent lives, if another process holds its end of the channel open.
_PARENT_POLL_S = 5.0


@dataclass(frozen=True, eq=False)
class WorkerStart:
    """The configuration of a worker process.

    Attributes:
        new_fetcher: Makes torch's fetcher of a dataset.
        iterable: Whether the dataset is iterable.
        most_batches: Batches of all workers in flight.
        most_kept: Batches of all workers in shared memory that the user keeps; later ones are sent through the channel.
    """

    new_fetcher: Callable[[Any], Any]
    dataset: Any
    iterable: bool
    base_seed: int
    init_fn: Any
    num_workers: int
    shared_seed: int | None
    most_batches: int
    most_kept: int


def main(sock: socket.socket, inherited: list[socket.socket], start: WorkerStart, number: int) -> None:
    """Work until the parent closes the channel.

    Args:
        inherited: Sockets of the parent, which a fork has copied; closed.
        number: Number of the worker, from 0.
    """
    for each in inherited:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, too, and decides
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    _LoaderWorker(Channel(sock), start, number).run()


class _LoaderWorker:
    def __init__(self, channel: Channel, start: WorkerStart, number: int) -> None:
        self._channel = channel
        self._start = start
        self._number = number
        self._dataset = start.dataset
        self._shared_rng = torch.Generator()
        self._fetcher: Any = None
        self._times: BatchTimes = BatchTimes()
        self._init_error: ExceptionWrapper | None = None
        self._ended = False
        self._pool = SlotPool(start.most_batches + 2, single_reader=True)
        self._most_slots = (start.most_kept + start.most_batches) // start.num_workers
        self._storage = SlotStorage()
        self._mapped: set[int] = set()
        self._serials = itertools.count()
        # Slots that the parent uses.
        self._in_use: dict[int, Slot] = {}
        self._tasks: deque[Fetch | Resume | Restore] = deque()
        self._generators: tuple[Any, ...] | None = None

    def run(self) -> None:
        self._seed()
        self._init()
        with self._storage.installed():
            while self._receive():
                task = self._tasks.popleft()
                if isinstance(task, Fetch):
                    self._fetch(task)
                elif isinstance(task, Resume):
                    self._resume(task)
                else:
                    self._restore(task)

    def _seed(self) -> None:
        start = self._start
        torch.set_num_threads(1)
        seed = start.base_seed + self._number
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(worker._generate_state(start.base_seed, self._number))
        self._seed_pipes(start.shared_seed)
        worker._worker_info = worker.WorkerInfo(
            id=self._number, num_workers=start.num_workers, seed=seed, dataset=self._dataset
        )

    def _seed_pipes(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            assert shared_seed is not None
            self._shared_rng.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, self._shared_rng)

    def _init(self) -> None:
        try:
            if self._start.init_fn is not None:
                self._start.init_fn(self._number)
            self._fetcher = self._start.new_fetcher(self._dataset)
        except Exception:  # noqa: BLE001 - the parent raises it
            self._init_error = self._wrapped_error()

    def _wrapped_error(self) -> ExceptionWrapper:
        error = ExceptionWrapper(where=f"in DataLoader worker process {self._number}")
        try:
            pickle.dumps(error)
        except Exception:  # noqa: BLE001 - a class that only this process has
            error.exc_type = RuntimeError
        return error

    def _receive(self) -> bool:
        """Wait for a task; return False when the parent has closed the channel."""
        while True:
            if self._channel.ended:
                return False
            wait([self._channel], 0.0 if self._tasks or self._channel.messages else _PARENT_POLL_S)
            while self._channel.messages:
                self._tasks.append(pickle.loads(self._channel.messages.popleft()[0]))
            if self._tasks:
                return not self._channel.ended
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                return False

    def _resume(self, task: Resume) -> None:
        self._ended = False
        self._seed_pipes(task.shared_seed)
        self._fetcher = self._start.new_fetcher(self._dataset)
        self._send(Answer("resumed", -1))

    def _restore(self, task: Restore) -> None:
        random_generators, dataset = task.state
        try:
            if dataset is not None and restore_dataset(self._fetcher, self._dataset, dataset):
                self._fetcher = self._start.new_fetcher(self._dataset)
            if random_generators is not None:
                rng.set_random_state(rng.unpack_random_state(random_generators))
        except Exception:  # noqa: BLE001 - the parent raises it
            self._send(Answer("error", -1, self._wrapped_error()))
            return
        self._storage.begin(None)
        for _ in range(task.replayed):
            try:
                fetch(self._fetcher, task.index)
            except StopIteration:
                break
            except Exception:  # noqa: BLE001 - it was raised when the batch was due
                continue
        self._send(Answer("resumed", -1))

    def _fetch(self, task: Fetch) -> None:
        for serial, reusable in task.releases:
            self._in_use.pop(serial).give_back(reusable)
        if self._ended:
            return
        if self._init_error is not None:
            self._send(Answer("error", task.batch, self._init_error))
            return
        slot = self._pool.lease()
        try:
            self._fetch_into(task, slot)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            slot.give_back(reusable=False)
            if isinstance(error, StopIteration) and self._start.iterable:
                self._ended = True
                answer = Answer("end", task.batch)
            else:
                answer = Answer("error", task.batch, self._wrapped_error())
            with contextlib.suppress(Exception):  # the dataset's error is raised, not one of its state_dict
                answer = answer._replace(state=self._new_state())
            self._send(answer)

    def _fetch_into(self, task: Fetch, slot: Slot) -> None:
        shared = len(self._in_use) < self._most_slots
        self._storage.begin(slot if shared else None)
        batch = self._times.fetch(self._fetcher, task.index)
        try:
            data, extents = dump_batch(batch, slot, shared=shared)
        except Exception as error:
            raise RuntimeError(
                f"the batch, of the type {type(batch).__name__}, cannot be sent from the worker process: "
                f"{type(error).__name__}: {error}"
            ) from error
        del batch
        if self._storage.in_use:
            # The dataset or `collate_fn` has kept a tensor of the batch, and may change it later.
            slot, kept = self._pool.lease(), slot
            extents = move_batch(extents, kept, slot)
            kept.give_back(reusable=False)
        state = self._new_state()
        segments, descriptors, retired = slot.introduce(self._mapped)
        serial = next(self._serials)
        self._in_use[serial] = slot
        times = self._times.taken()
        self._send(Answer("batch", task.batch, data, serial, extents, segments, retired, state, times), descriptors)

    def _new_state(self) -> bytes | None:
        """Return the state for ``Answer``. Most datasets draw no random numbers: comparing is cheaper than sending."""
        dataset = dataset_state(self._fetcher, self._dataset)
        generators = rng.random_state()
        if dataset is None and self._generators is not None and rng.same_random_state(generators, self._generators):
            return None
        self._generators = generators
        return pickle.dumps([rng.pack_random_state(generators), dataset])

    def _send(self, answer: Answer, descriptors: list[int] | tuple[()] = ()) -> None:
        self._channel.send(pickle.dumps(answer), descriptors)
        while self._channel.unsent and not self._channel.ended:
            wait([self._channel], _PARENT_POLL_S)
