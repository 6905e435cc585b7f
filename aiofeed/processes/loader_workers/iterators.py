"""The iterators of ``aiofeed.DataLoader``: torch's own in the caller's thread, and one over our worker processes.

Both draw from the random generators when and as torch's iterators do, and return the same batches in the same order.
A ``LoaderPosition`` lets them start in mid-epoch.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory

from aiofeed.core.errors import IteratorClosedError
from aiofeed.processes.loader_workers.fetching import dataset_state, fetch, restore_dataset
from aiofeed.processes.loader_workers.protocol import Answer, Fetch, Restore, Resume
from aiofeed.processes.loader_workers.worker import WorkerStart
from aiofeed.processes.loader_workers.workers import LoaderWorkers

# Interval of the checks for workers whose end their channel does not show.
_WAIT_S = 5.0
# Interval of the checks whether the consumer of a thread has gone.
_OWNER_POLL_S = 0.1
# The most for `WorkerStart.most_kept`. A mapping costs a descriptor, of which a process may have 1024 on many systems;
# if fewer, a quarter of them are used.
_MOST_KEPT = 256


@dataclass(frozen=True)
class LoaderPosition:
    """Where an epoch continues.

    Args:
        batches: The batches before this number were returned, or had nothing left.
        later: Numbers of further batches that were returned, if they need not be in order.
        returned: Number of batches that were returned.
        ended: For each worker the number of the batch at which its iterable dataset ended; -1 if it has not.
        workers: For each worker the state after its last batch, see ``Restore``; ``None`` if it has none. Of an
            iterable dataset that saves no state, the one at the start of the epoch, which is then read again.
        dataset: State of the dataset without workers, if it has one.
        restarted: Whether the epoch begins with the workers of the one before. Their seed is not drawn again.
    """

    batches: int = 0
    later: Sequence[int] = ()
    returned: int = 0
    ended: Sequence[int] = ()
    workers: Sequence[list[Any] | None] = ()
    dataset: Any = None
    restarted: bool = False


class Progress:
    """Which batches of an epoch were returned. It does not refer to the iterator, which may be dropped."""

    def __init__(
        self,
        start: LoaderPosition,
        workers: int = 0,
        *,
        states: Sequence[bytes | None] = (),
        dataset: Callable[[], Any] | None = None,
        iterable: bool = False,
    ) -> None:
        self.batches: int = start.batches
        self.returned: int = start.returned
        self.finished = False
        self.restarted: bool = start.restarted
        self.ended: list[int] = list(start.ended) or [-1] * workers
        self._later = set(start.later)
        self._states = list(states)
        for number, state in enumerate(start.workers):
            if state is not None:
                self._states[number] = pickle.dumps(state)
        self._first_states = list(self._states)
        self._dataset = dataset
        self._iterable = iterable

    def add(self, batch: int, *, in_order: bool, worker: int | None = None, state: bytes | None = None) -> None:
        """A batch of a worker was returned; ``state``: the pickled state after it. Once per batch."""
        if batch < self.batches or batch in self._later:
            return
        self.returned += 1
        if worker is not None:
            self._states[worker] = state
        if in_order:
            self.batches = batch + 1
            return
        self._later.add(batch)
        while self.batches in self._later or self.batches in self.ended:
            self._later.discard(self.batches)
            self.batches += 1

    def states_between(self) -> list[Any]:
        """The state of each worker after the epoch. A new iterator of an iterable dataset begins anew."""
        states = _loaded(self._states)
        return [state and [state[0], None] for state in states] if self._iterable else states

    def position(self) -> LoaderPosition:
        """The position after the last batch that was returned."""
        states = _loaded(self._states)
        if self._iterable and not _saves_state(states):
            states = _loaded(self._first_states)
        return LoaderPosition(
            self.batches,
            sorted(self._later),
            self.returned,
            [batch if batch < self.batches else -1 for batch in self.ended],
            states,
            None if self._dataset is None else self._dataset(),
            self.restarted,
        )


def _loaded(states: Sequence[bytes | None]) -> list[Any]:
    return [None if state is None else pickle.loads(state) for state in states]


def _saves_state(states: Sequence[list[Any] | None]) -> bool:
    return any(state is not None and state[1] is not None for state in states)


def _generator_of(loader: Any) -> torch.Generator:
    generator: torch.Generator = loader.generator or torch.default_generator
    return generator


def _is_iterable(iterator: Any) -> bool:
    return bool(iterator._dataset_kind == torch_loader._DatasetKind.Iterable)


class InProcessIterator(torch_loader._SingleProcessDataLoaderIter):
    """torch's iterator for ``num_workers=0``, started at a position."""

    def __init__(self, loader: Any, position: LoaderPosition) -> None:
        super().__init__(loader)
        self.progress: Progress = Progress(LoaderPosition())
        self._batch = 0
        replay = _is_iterable(self) and position.dataset is None
        for _ in range(position.batches):
            if replay:
                self._next_data()
            else:
                self._next_index()  # type: ignore[no-untyped-call]
        if position.dataset is not None and restore_dataset(self._dataset_fetcher, self._dataset, position.dataset):
            self._dataset_fetcher = torch_loader._DatasetKind.create_fetcher(
                self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
            )
        state = functools.partial(dataset_state, self._dataset_fetcher, self._dataset)
        self.progress = Progress(position, dataset=state)
        self._batch = position.batches
        self._num_yielded = position.returned

    def _next_data(self) -> Any:
        try:
            index = next(self._sampler_iter)
            self._batch += 1
            data = fetch(self._dataset_fetcher, index)
        except StopIteration:
            self.progress.finished = True
            raise
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)
        self.progress.add(self._batch - 1, in_order=True)
        return data


class WorkerIterator(torch_loader._BaseDataLoaderIter):
    """Batches of worker processes, requested and returned in the order of torch's iterator.

    ``receive`` and ``load`` may run in another thread than ``request``, which draws from the sampler, and ``returned``.

    Attributes:
        workers: The processes.
        progress: The batches that were returned.
        unwanted: Whether a ``receive`` in a thread of its own is to end.
    """

    def __init__(self, loader: Any, position: LoaderPosition) -> None:
        before = _generator_of(loader).get_state() if position.restarted else None
        super().__init__(loader)
        if before is not None:
            _generator_of(loader).set_state(before)
        assert loader.prefetch_factor > 0, "prefetch_factor must be greater than 0"
        self._in_order = loader.in_order
        self._most_batches: int = loader.prefetch_factor * self._num_workers
        self.unwanted: Callable[[], bool] | None = None
        # The state of each worker after the last batch that was received.
        self._states: list[bytes | None] = [None] * self._num_workers
        self._lock, self._request_lock = threading.Lock(), threading.Lock()
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init_fn = functools.partial(torch_loader._sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        start = WorkerStart(
            self._dataset_kind,
            self._dataset,
            self._auto_collation,
            self._collate_fn,
            self._drop_last,
            int(self._base_seed),
            init_fn,
            self._num_workers,
            self._shared_seed,
            self._most_batches,
            min(_MOST_KEPT, os.sysconf("SC_OPEN_MAX") // 4),
        )
        context = loader.multiprocessing_context or torch.multiprocessing
        self._spare: list[LoaderWorkers] = loader._spare_workers
        if self._spare and self._spare[0].renew(context, start):
            self.workers: LoaderWorkers = self._spare.pop()
            self._wait_for_resumed()
        else:
            self._spare.clear()
            self.workers = LoaderWorkers(context, start)
        super()._reset(loader, first_iter=True)
        self._begin(position)

    def restart(self, loader: Any, position: LoaderPosition) -> None:
        """Start the next epoch with the same workers."""
        super()._reset(loader)
        for batch, answer in list(self._answers.items()):
            if answer.kind == "batch":
                self.workers.load(self._worker_of[batch], answer)  # and drop it, which frees its slot
            del self._answers[batch]
        self.unwanted = None
        for number in range(self._num_workers):
            self.workers.send(number, Resume(self._shared_seed))
        self._wait_for_resumed()
        self._begin(replace(position, restarted=True))

    def _wait_for_resumed(self) -> None:
        resumed = 0
        while resumed < self._num_workers:
            # Batches of an epoch that was left are received and dropped.
            number, answer = self._receive_one()
            self._drop(number, answer)
            resumed += answer.kind == "resumed"

    def _begin(self, position: LoaderPosition) -> None:
        # An iterable dataset without a state of its own is read again from the start.
        replay = _is_iterable(self) and not _saves_state(position.workers)
        start = LoaderPosition(workers=position.workers, restarted=position.restarted) if replay else position
        self._start = start
        self._num_yielded = start.returned
        # Persistent workers go on from where they were.
        self._states = self._states if position.restarted else [None] * self._num_workers
        self.progress: Progress = Progress(start, self._num_workers, states=self._states, iterable=_is_iterable(self))
        self._exhausted = False
        self._requested_after = -1
        self._more = threading.Event()
        # Numbers of the next batch to request and to return; of those between, the worker and the answer.
        self._sent = self._next = 0
        self._indices: deque[Any] = deque()
        self._worker_of: dict[int, int] = {}
        self._answers: dict[int, Answer] = {}
        self._active = [True] * self._num_workers
        self._loads = [0] * self._num_workers
        self._cycle = itertools.cycle(range(self._num_workers))
        for number, state in enumerate(start.workers):
            if state is not None:
                self._states[number] = pickle.dumps(state)
                self.workers.send(number, Restore(state))
        for _ in range(self._most_batches):
            self.request()
        self._pass_ended(wait=False)
        if replay:
            for _ in range(position.returned):
                self._next_data()
            self._num_yielded = position.returned

    def _next_data(self) -> Any:
        with self._lock:
            number, answer = self.receive()
            # Ctrl-C may interrupt each of these lines before `take`; the next call repeats them for the same batch.
            if self._requested_after != answer.batch:
                self._requested_after = answer.batch
                self.request(number)
            try:
                data = self.load(number, answer)
            except Exception:
                self.take(answer)
                raise
            self.returned(number, answer)
            self.take(answer)
            return data

    def request(self, freed: int | None = None) -> None:
        """Give the next batch of the sampler to the next worker; ``freed``: the worker of a batch that was received."""
        with self._request_lock:
            if freed is not None:
                self._loads[freed] -= 1
            number = None
            try:
                # One call to C code: Ctrl-C loses no index. islice would call iter(), which restarts a sampler of
                # Lightning.
                if not self._indices:
                    self._indices.extend(itertools.starmap(self._sampler_iter.__next__, [()]))
                if self._indices:
                    number = self._next_worker()
                if number is not None:
                    self._give(number, self._sent, self._indices[0])
                    self._sent += 1
                    self._indices.popleft()
            finally:
                self._exhausted = number is None
                self._more.set()

    def _next_worker(self) -> int | None:
        for _ in range(self._num_workers):
            number = next(self._cycle)
            if self._active[number] and (
                self._in_order or self._loads[number] < self._most_batches // sum(self._active)
            ):
                return number
        return None

    def _give(self, number: int, batch: int, index: Any) -> None:
        self._worker_of[batch] = number
        self._loads[number] += 1
        start = self._start
        if start.ended and start.ended[number] == batch:
            self._answers[batch] = Answer("end", batch)
        elif batch < start.batches or batch in start.later:
            self._answers[batch] = Answer("returned", batch)
        else:
            self.workers.send(number, Fetch(batch, index, self.workers.releases(number)))

    def receive(self) -> tuple[int, Answer]:
        """Wait for the answer of the next batch; return its worker and the answer, which ``take`` removes.

        Raises:
            StopIteration: There are no more batches. Forked workers then end, unless they are persistent.
        """
        while True:
            self._pass_ended(wait=True)
            if self._next == self._sent:
                break
            for batch, answer in self._answers.items():
                if batch == self._next or (not self._in_order and answer.kind in ("batch", "error")):
                    return self._worker_of[batch], answer
            number, answer = self._receive_one()
            if answer.batch not in self._worker_of:
                # Ctrl-C interrupted `request`, which has sent it twice.
                self._drop(number, answer)
                continue
            self._answers[answer.batch] = answer
            self.workers.confirm()
            if answer.kind == "end" and not self._in_order:
                self._end(answer.batch)
        if not self.progress.finished:
            self.progress.finished = True
            if self.workers.forked and not self._persistent_workers:
                self.workers.close()
            elif not self._persistent_workers:
                self._spare[:] = [self.workers]
        raise StopIteration

    def _pass_ended(self, *, wait: bool) -> None:
        """Advance over batches that are not returned: those before the start, and those of workers that have ended."""
        while True:
            batch = self._next
            if batch == self._sent:
                if self._exhausted or not wait:
                    return
                self._more.wait(self._wait_s())  # another thread calls `request`
                self._more.clear()
                continue
            answer, number = self._answers.get(batch), self._worker_of.get(batch)
            if answer is not None and answer.kind in ("end", "returned"):
                if answer.kind == "end":
                    self._end(batch)
                self.take(answer)
                self.request(number)
            elif number is None or (answer is None and not self._active[number]):
                self._worker_of.pop(batch, None)
                self._next += 1
            else:
                return

    def _end(self, batch: int) -> None:
        """The iterable dataset of the batch's worker has ended."""
        number = self._worker_of[batch]
        self._active[number] = False
        self.progress.ended[number] = batch

    def take(self, answer: Answer) -> None:
        """Remove an answer, so that ``receive`` returns the next one."""
        del self._answers[answer.batch]
        del self._worker_of[answer.batch]
        if answer.batch == self._next:
            self._next += 1

    def _receive_one(self) -> tuple[int, Answer]:
        while True:
            try:
                number, answer = self.workers.receive(self._timeout or self._wait_s())
            except TimeoutError:
                if self._timeout:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
                continue
            if answer.kind == "batch":
                if answer.state is None:
                    answer = answer._replace(state=self._states[number])
                self._states[number] = answer.state
            return number, answer

    def _wait_s(self) -> float:
        if self.unwanted is None:
            return _WAIT_S
        if self.unwanted():
            raise IteratorClosedError("this iterator was closed")
        return _OWNER_POLL_S

    def _drop(self, number: int, answer: Answer) -> None:
        self.workers.confirm()
        if answer.kind == "batch":
            self.workers.load(number, answer)

    def load(self, number: int, answer: Answer) -> Any:
        """Return the batch of an answer, or raise the worker's exception as torch does."""
        if answer.kind == "error":
            try:
                answer.content.reraise()
            except Exception as error:  # noqa: BLE001 - it is raised again
                # Torch's frame refers to the error: the cycle would keep the iterator and its workers.
                raise error.with_traceback(None)  # noqa: B904 - the same error
        return self.workers.load(number, answer)

    def returned(self, number: int, answer: Answer) -> None:
        """The user gets the batch of an answer."""
        self.progress.add(answer.batch, in_order=self._in_order, worker=number, state=answer.state)
