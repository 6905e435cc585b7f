"""Where the batches of ``aiofeed.DataLoader`` come from: the caller's thread, or worker processes.

Both draw from the random generators when and as torch's iterators do, and return the same batches in the same order.
A ``LoaderPosition`` lets them start in mid-epoch.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory

from aiofeed.kernel.core.errors import FeedError, IteratorClosedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.runtime import queue as long_waits
from aiofeed.loader.workers.channel import Answer, Fetch, Restore, Resume
from aiofeed.loader.workers.fetching import (
    BatchTimes,
    count_times,
    dataset_state,
    fetch,
    fetcher_factory,
    first_stateful,
    restore_dataset,
)
from aiofeed.loader.workers.random_state import random_state, set_random_state
from aiofeed.loader.workers.state import LoaderPosition, OrderState, Progress
from aiofeed.loader.workers.worker_loop import WorkerStart
from aiofeed.loader.workers.workers import LoaderWorkers

# Interval of the checks for workers whose end their channel does not show.
_WAIT_S = 5.0
# Interval of the checks whether the consumer of a thread has gone.
_OWNER_POLL_S = 0.1
# The most for `WorkerStart.most_kept`. A mapping costs a descriptor, of which a process may have 1024 on many systems;
# if fewer, a quarter of them are used.
_MOST_KEPT = 256

CLOSED = "a newer iter() of this loader has started the next epoch, with the same persistent workers"


def _is_iterable(iterator: Any) -> bool:
    return bool(iterator._dataset_kind == torch_loader._DatasetKind.Iterable)


class Indices:
    """The indices of a sampler, taken one at a time. If Ctrl-C interrupts the sampler's own code, no more are taken.

    Attributes:
        cut: Whether Ctrl-C has ended the sampler.
        taken: Those that no batch was made of.
    """

    def __init__(self, sampler: Iterator[Any]) -> None:
        self._sampler = sampler
        self.cut: bool = False
        self.taken: deque[Any] = deque()

    def take(self) -> None:
        """Take the next one, if there is one."""
        if self.cut:
            return
        known = len(self.taken)
        try:
            # One call to C code: Ctrl-C loses no index. islice would call iter(), which restarts Lightning's samplers.
            self.taken.extend(itertools.starmap(self._sampler.__next__, [()]))
        except BaseException as error:
            # A generator that an exception has left is at its end.
            ended = len(self.taken) == known and getattr(self._sampler, "gi_frame", self) is None
            inside: Any = error.__traceback__ and error.__traceback__.tb_next
            self.cut = ended and bool(inside) and not isinstance(error, Exception)
            raise

    def end(self, batch: int) -> NoReturn:
        """Raise ``StopIteration``, or ``FeedError`` if the sampler was interrupted before its end."""
        raise _interrupted("the sampler", batch) if self.cut else StopIteration


def _interrupted(what: str, batch: int) -> FeedError:
    return FeedError(
        f"{what} was interrupted at batch {batch}, which cannot be made from where it stopped. To go on with that "
        f"batch, call loader.load_state_dict(loader.state_dict()) and iterate over the loader again"
    )


class InProcessBatches:
    """The batches of a dataset that is called in the caller's thread.

    Args:
        iterator: torch's iterator, which has drawn from the generators.
        start: The states at the start of the epoch.
        position: Where the epoch continues.
        deliver: Called with each batch; returns what the consumer gets.
    """

    def __init__(
        self, iterator: Any, start: OrderState, position: LoaderPosition, deliver: Callable[[Any], Any] | None
    ) -> None:
        if iterator._timeout:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._dataset = iterator._dataset
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            torch.utils.data.graph_settings.apply_sharding(self._dataset, iterator._world_size, iterator._rank)
        self._times = BatchTimes()
        self._new_fetcher = fetcher_factory(iterator)
        self._fetcher = self._new_fetcher(self._dataset)
        # The states of the global generators in which the first batch is made, if it was before the state of these.
        self.first_generators: tuple[Any, ...] | None = None
        self.stats: EpochStats = EpochStats()
        self._iterable = _is_iterable(iterator)
        self._indices: Indices = Indices(iterator._sampler_iter)
        self._taken = self._indices.taken
        self._cut = ""  # what Ctrl-C has interrupted so that its batch cannot be made again
        # A dataset that a batch changes.
        self._changes = "the dataset" if self._iterable or first_stateful(self._dataset) is not None else ""
        self._pins = iterator._pin_memory
        self._pin_device = iterator._pin_memory_device
        self._deliver = deliver
        self._skip(iterator._sampler_iter, position, read=self._iterable and position.dataset is None)
        self._number = position.batches
        self._dataset_state = functools.partial(dataset_state, self._fetcher, self._dataset)
        self.progress: Progress = Progress(start, position, iterable=self._iterable, dataset=self._dataset_state)

    def _skip(self, indices: Iterator[Any], position: LoaderPosition, *, read: bool) -> None:
        """Leave out the batches that were returned; ``read``: an iterable dataset without a state reads them."""
        for _ in range(position.batches):
            try:
                index = next(indices)
                if read:
                    fetch(self._fetcher, index)
            except StopIteration:
                break
            except Exception:  # noqa: BLE001 - it was raised when the batch was due
                continue
        if position.dataset is not None and restore_dataset(self._fetcher, self._dataset, position.dataset):
            self._fetcher = self._new_fetcher(self._dataset)

    def next(self) -> Any:
        """Return the next batch. After a Ctrl-C in the dataset the same batch is made again, if that is possible.

        Raises:
            FeedError: It is not: Ctrl-C has interrupted ``deliver``, the sampler, or a dataset that has a state.
        """
        if self.first_generators is not None:
            now, first, self.first_generators = random_state(), self.first_generators, None
            set_random_state(first)
            try:
                return self.next()
            finally:
                set_random_state(now)
        if self.progress.making is not None and self._cut:
            owner = first_stateful(getattr(self._fetcher, "dataset_iter", None), self._dataset)
            if owner is not None and not self.progress.making:
                raise FeedError(
                    f"the dataset was interrupted at batch {self._number}, and its state is one from within that "
                    f"batch: load a state from before, or begin the epoch again, so that no sample is left out"
                )
            raise _interrupted(self._cut, self._number)
        if not self._taken:
            began = time.perf_counter()
            self._indices.take()
            self.stats.sampler_s += time.perf_counter() - began
            if not self._taken:
                self._indices.end(self._number)
        # Making a state may take long. It is needed where Ctrl-C may come in ``deliver``, after the dataset.
        self.progress.making = () if self._deliver is None else (self._dataset_state(),)
        try:
            batch = self._make(self._taken[0])
        except Exception:
            del self._taken[0]
            self._number += 1
            self.progress.making = None
            raise
        self.progress.add(self._number)
        # No call follows, so Ctrl-C cannot come between these lines.
        del self._taken[0]
        self._number += 1
        self.progress.making = None
        return batch

    def _make(self, index: Any) -> Any:
        self._cut = self._changes
        batch = self._times.fetch(self._fetcher, index)
        if times := self._times.taken():
            count_times(self.stats, times)
        if not self._pins and self._deliver is None:
            return batch
        fetched = time.perf_counter()
        if self._pins:
            batch = pin_memory(batch, self._pin_device)
        if self._deliver is not None:
            self._cut = "transform="
            try:
                batch = self._deliver(batch)
            except StopIteration as error:
                raise RuntimeError("transform= raised StopIteration") from error
        self.stats.copy_s += time.perf_counter() - fetched
        return batch


class WorkerBatches:
    """Batches of worker processes, requested and returned in the order of torch's iterator.

    With ``pull`` a thread iterates over ``received``, and the consumer calls ``returning`` for each batch: requests
    draw from the sampler, which belongs to the consumer's thread.

    Args:
        iterator: torch's iterator, which has drawn from the generators.
        loader: The ``DataLoader``.

    Attributes:
        workers: The processes.
        progress: The batches that were returned.
        pull: The ``IterableProducer`` that iterates over ``received``, if there is one.
        epoch: Counts the epochs of persistent workers, whose iterator stays the same.
        lock: Held while a batch is received for a consumer, and while an epoch begins.
    """

    def __init__(self, iterator: Any, loader: Any) -> None:
        assert loader.prefetch_factor > 0, "prefetch_factor must be greater than 0"
        self._num_workers: int = iterator._num_workers
        self._in_order = loader.in_order
        self._iterable = _is_iterable(iterator)
        self._persistent: bool = iterator._persistent_workers
        self._base_seed = int(iterator._base_seed) if self._persistent else None
        self._timeout: float = iterator._timeout
        self._pin_device = iterator._pin_memory_device
        self._most_batches: int = loader.prefetch_factor * self._num_workers
        self.pull: Any = None
        self.epoch: int = 0
        # The state of each worker after the last batch that was received.
        self._states: list[bytes | None] = [None] * self._num_workers
        self.stats: EpochStats = EpochStats()
        self._answers: dict[int, Answer] = {}
        self.lock: threading.Lock = threading.Lock()
        self._request_lock: threading.Lock = threading.Lock()
        dataset, init_fn = iterator._dataset, loader.worker_init_fn
        if isinstance(dataset, IterDataPipe | MapDataPipe):
            init_fn = functools.partial(
                torch_loader._sharding_worker_init_fn, init_fn, iterator._world_size, iterator._rank
            )
        start = WorkerStart(
            fetcher_factory(iterator),
            dataset,
            self._iterable,
            int(iterator._base_seed),
            init_fn,
            self._num_workers,
            iterator._shared_seed,
            self._most_batches,
            min(_MOST_KEPT, os.sysconf("SC_OPEN_MAX") // 4),
        )
        self.workers: LoaderWorkers = LoaderWorkers(loader.multiprocessing_context or torch.multiprocessing, start)

    def restart(self, shared_seed: int | None) -> None:
        """Let persistent workers start another epoch."""
        self.stop_pull()
        for batch, answer in list(self._answers.items()):
            if answer.kind == "batch":
                self.workers.load(self._worker_of[batch], answer)  # and drop it, which frees its slot
            del self._answers[batch]
        for number in range(self._num_workers):
            self.workers.send(number, Resume(shared_seed))
        self._wait_for_resumed(self._num_workers)

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise IteratorClosedError(CLOSED)

    def stop_pull(self) -> None:
        """Stop the thread that receives batches ahead, and wait for it."""
        if self.pull is not None:
            self.pull.stop()
            self.pull.join(_WAIT_S)
            self.pull = None

    def _wait_for_resumed(self, left: int) -> None:
        while left:
            # Batches of an epoch that was left are received and dropped.
            number, answer = self._receive_one(0)
            if answer.batch == -1 and answer.kind == "error":
                self.workers.confirm()
                self.load(number, answer)
            self._drop(number, answer)
            left -= answer.kind == "resumed"

    def begin(self, indices: Iterator[Any], start: OrderState, position: LoaderPosition) -> None:
        """Start an epoch with the indices of the sampler."""
        replays = 0
        for number, (handed, state) in enumerate(position.workers):
            # An iterable dataset without a state of its own is read again.
            replayed = handed if self._iterable and (state is None or state[1] is None) else 0
            if state is not None:
                self._states[number] = pickle.dumps(state)
            if state is not None or replayed:
                index = next(indices) if replayed else None
                self.workers.send(number, Restore(state or [None, None], replayed, index))
                replays += 1
        self._wait_for_resumed(replays)
        if not self._iterable:
            # No islice, which would call iter().
            for _ in range(position.batches):
                if next(indices, self) is self:
                    break
        self.progress: Progress = Progress(
            start, position, workers=self._states, base_seed=self._base_seed, iterable=self._iterable
        )
        self._sampler: Indices = Indices(indices)
        self._indices = self._sampler.taken
        self._exhausted = False
        self._requested_after = -1
        self._more = threading.Event()
        # Numbers of the next batch to request and to return; of those between, the worker and the answer.
        self._sent = self._next = position.batches
        self._done = set(position.later)
        self._worker_of: dict[int, int] = {}
        self._asked: dict[int, tuple[float, Any]] = {}
        self._active = [True] * self._num_workers
        self._loads = [0] * self._num_workers
        self._cycle: Iterator[int] = itertools.cycle([*range(position.turn, self._num_workers), *range(position.turn)])
        self._ready: deque[tuple[int, Answer]] = deque()
        self._failed: tuple[int, Answer] | None = None
        for _ in range(self._most_batches):
            self.request()
        self._pass_ended(wait=False)

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            IteratorClosedError: Another thread has started the next epoch meanwhile.
        """
        epoch = self.epoch
        with self.lock:
            self._check(epoch)
            number, answer = self.receive()
            self._check(epoch)
            # Ctrl-C may interrupt each of these lines before `take`; the next call repeats them for the same batch.
            if self._requested_after != answer.batch:
                self.request(number)
                self._requested_after = answer.batch
            try:
                data = self.load(number, answer)
            except Exception:
                self.progress.failed(answer.batch, number, answer.state)
                self.take(answer)
                raise
            self.progress.add(answer.batch, number, answer.state, in_order=self._in_order)
            self.take(answer)
            return data

    # --- batches received in a thread ---

    def received(self, *, pins: bool) -> Iterator[Any]:
        """Yield the batches up to the first error of the dataset; ``pins``: in pinned memory."""
        while True:
            try:
                number, answer = self.receive()
            except StopIteration:
                return
            try:
                batch = self.load(number, answer)
            except Exception:
                self.take(answer)
                self._failed = number, answer
                raise
            self.take(answer)
            self._ready.append((number, answer))
            yield pin_memory(batch, self._pin_device) if pins else batch
            del batch

    def returning(self, epoch: int) -> None:
        """Give the consumer the next batch of ``received``, and request a further one, as torch's iterator does."""
        with self.lock:
            self._check(epoch)
            number, answer = self._ready[0]
            # Ctrl-C may interrupt each of these lines; the next call repeats them.
            self.progress.add(answer.batch, number, answer.state, in_order=self._in_order)
            self.request(number)
            del self._ready[0]

    def continues(self) -> bool:
        """Return whether ``received`` may be called again after an error, as torch's iterator continues after one."""
        failed, self._failed = self._failed, None
        if failed is None or self._ready:
            return False
        number, answer = failed
        self.progress.failed(answer.batch, number, answer.state)
        self.request(number)
        return True

    # --- requests ---

    def request(self, freed: int | None = None) -> None:
        """Give the next batch of the sampler to the next worker; ``freed``: the worker of a batch that was received."""
        with self._request_lock:
            if freed is not None:
                self._loads[freed] -= 1
            number = None
            try:
                while not self._indices:
                    began = time.perf_counter()
                    self._sampler.take()
                    self.stats.sampler_s += time.perf_counter() - began
                    if self._sent in self._done and self._indices:
                        # It was returned before the state was saved.
                        self._indices.popleft()
                        self._sent += 1
                    else:
                        break
                if self._indices:
                    number = self._next_worker()
                if number is not None:
                    self._worker_of[self._sent] = number
                    self._loads[number] += 1
                    self._asked[self._sent] = time.perf_counter(), self._indices[0]
                    self.workers.send(number, Fetch(self._sent, self._indices[0], self.workers.releases(number)))
                    self._sent += 1
                    self._indices.popleft()
                self._exhausted = number is None
            finally:
                self._more.set()

    def _next_worker(self) -> int | None:
        for _ in range(self._num_workers):
            number = next(self._cycle)
            if self._active[number] and (
                self._in_order or self._loads[number] < self._most_batches // sum(self._active)
            ):
                return number
        return None

    # --- answers ---

    def receive(self) -> tuple[int, Answer]:
        """Wait for the answer of the next batch; return its worker and the answer, which ``take`` removes.

        Raises:
            StopIteration: There are no more batches. The workers then end, unless they are persistent.
        """
        while True:
            self._pass_ended(wait=True)
            if self._next == self._sent:
                break
            for batch, answer in self._answers.items():
                if batch == self._next or (not self._in_order and answer.kind in ("batch", "error")):
                    return self._worker_of[batch], answer
            number, answer = self._receive_one(self._timeout)
            if answer.batch not in self._worker_of:
                # Ctrl-C interrupted `request`, which has sent it twice.
                self._drop(number, answer)
                continue
            self._answers[answer.batch] = answer
            self.workers.confirm()
            if answer.kind == "end" and not self._in_order:
                self._active[number] = False
        if not self._persistent:
            self.workers.close()
        self._sampler.end(self._next)

    def _pass_ended(self, *, wait: bool) -> None:
        """Advance over batches that are not returned: those returned before, and those of workers that have ended."""
        while True:
            batch = self._next
            if batch == self._sent:
                if self._exhausted or not wait:
                    return
                if self.pull is None:  # Ctrl-C has interrupted `request`
                    self.request()
                    continue
                self._more.wait(self._wait_s())  # another thread calls `request`
                self._more.clear()
                continue
            answer, number = self._answers.get(batch), self._worker_of.get(batch)
            if answer is not None and answer.kind == "end":
                self._active[self._worker_of[batch]] = False
                self.take(answer)
                self.request(number)
            elif number is None or (answer is None and not self._active[number]):
                self._worker_of.pop(batch, None)
                self._next += 1
            else:
                return

    def take(self, answer: Answer) -> None:
        """Remove an answer, so that ``receive`` returns the next one."""
        del self._answers[answer.batch]
        del self._worker_of[answer.batch]
        self._asked.pop(answer.batch, None)
        if answer.batch == self._next:
            self._next += 1

    def waiting_for(self) -> tuple[Any, ...]:
        """Return the worker that makes the next batch; see ``log_long_wait``. From any thread."""
        batch = self._next
        if batch not in self._asked:
            return (f"for the sampler, or a worker that begins, before batch {batch}",)
        number, (asked, index) = self._worker_of[batch], self._asked[batch]
        pid, seconds = self.workers.processes[number].pid, time.perf_counter() - asked
        return f"for batch {batch}: worker {number} (pid {pid}) was asked for {index!r:.80} {seconds:.0f} s ago", pid

    def _receive_one(self, timeout_s: float) -> tuple[int, Answer]:
        began, logged = time.monotonic(), self.pull is not None
        while True:
            waited_s, wait_s = time.monotonic() - began, self._wait_s()
            if not logged and waited_s >= long_waits.LONG_WAIT_S:
                logged = True
                long_waits.log_long_wait(*self.waiting_for())
            try:
                number, answer = self.workers.receive(min(wait_s, timeout_s - waited_s) if timeout_s else wait_s)
            except TimeoutError:
                if timeout_s and time.monotonic() - began >= timeout_s:
                    raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds") from None
                continue
            if answer.state is None:
                answer = answer._replace(state=self._states[number])
            self._states[number] = answer.state
            if answer.times:
                count_times(self.stats, answer.times)
            return number, answer

    def _wait_s(self) -> float:
        if self.pull is None:
            return min(_WAIT_S, long_waits.LONG_WAIT_S)
        if self.pull._unwanted():
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
