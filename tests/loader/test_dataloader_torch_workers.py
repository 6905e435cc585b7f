"""Torch's own test cases of ``DataLoader``, for ``aiofeed.DataLoader``: worker processes, errors, leaving early."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.reduction
import multiprocessing.resource_tracker
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, TensorDataset, get_worker_info

from aiofeed import DataLoader
from tests.support.loader_parts import Counts, Plain, both, last_line, same, seed_all

DATA = torch.randn(50, 2, 3, 5)
LABELS = torch.randperm(25).repeat(2)
PAIRS = TensorDataset(DATA, LABELS)

pytestmark = pytest.mark.filterwarnings(
    # The number of workers exceeds the number of cores of small machines.
    "ignore:This DataLoader will create:UserWarning"
)


def take(values: Any, n: int) -> list[Any]:
    return list(itertools.islice(values, n))


# --- workers ---


def test_two_loaders_at_once() -> None:
    """The iterators of two loaders do not disturb each other."""
    one = iter(DataLoader(PAIRS, num_workers=1))
    two = iter(DataLoader(PAIRS, num_workers=2, multiprocessing_context="fork"))
    got = [next(each)[1] for each in (one, one, two, two, one, two)]
    assert torch.cat(got).tolist() == LABELS[[0, 1, 0, 1, 2, 2]].tolist()


def test_two_iterators_of_a_loader_at_once() -> None:
    theirs, ours = both(lambda cls: list(zip(*[cls(Plain(9), shuffle=True, num_workers=1)] * 2, strict=True)))
    assert len(ours) == 9
    assert same(ours, theirs)


class Asleep(Plain):
    """Its first sample takes for ever; that of a process, at least."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0 if index else 1000)
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_timeout(persistent: bool) -> None:
    """``timeout`` ends the wait for a batch with torch's message."""
    iterator = iter(DataLoader(Asleep(4), num_workers=1, timeout=0.05, persistent_workers=persistent))
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.05 seconds$"):
        next(iterator)
    for pid in [each.pid for each in iterator._workers]:
        os.kill(pid, 9)


class Seeds(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.initial_seed(), get_worker_info().seed, get_worker_info().id  # type: ignore[union-attr]


def test_worker_seeds() -> None:
    """Worker k has torch's base seed plus k; equal generators give equal seeds."""

    def seeds() -> list[Any]:
        loader = DataLoader(Seeds(6), None, num_workers=3, generator=torch.Generator().manual_seed(42))
        return list(loader)

    first, *_ = got = seeds()
    assert got == seeds()
    assert got == [[first[0] + worker, first[0] + worker, worker] for worker in (0, 1, 2, 0, 1, 2)]
    theirs, ours = both(lambda cls: list(cls(Seeds(6), None, num_workers=3)))
    assert ours == theirs


def set_seed(worker: int) -> None:
    torch.manual_seed(12345 + worker)


def test_worker_init_fn() -> None:
    """``worker_init_fn`` is called after the seeds are set."""

    class Initial(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.initial_seed()

    batches = list(DataLoader(Initial(8), 2, num_workers=2, worker_init_fn=set_seed))
    assert torch.cat(batches).tolist() == [12345, 12345, 12346, 12346] * 2


class WorkerInfo(Plain):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        info.dataset.value = [*getattr(self, "value", []), index]
        return self.value, os.getpid(), info.id, info.num_workers, str(info).startswith("WorkerInfo(")


def test_get_worker_info() -> None:
    """``get_worker_info()`` has the id, the number of workers and the worker's copy of the dataset."""
    assert get_worker_info() is None
    batches = list(DataLoader(WorkerInfo(6), None, num_workers=2))
    pids = batches[0][1], batches[1][1]
    assert os.getpid() not in pids
    assert batches == [
        [list(range(index % 2, index + 1, 2)), pids[index % 2], index % 2, 2, True] for index in range(6)
    ]
    assert get_worker_info() is None


class Affinity(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        torch.randperm(1)
        return iter(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_affinity_of_worker_init_fn_stays() -> None:
    core = max(os.sched_getaffinity(0))
    loader = DataLoader(Affinity(), num_workers=2, worker_init_fn=lambda _: os.sched_setaffinity(0, [core]))
    assert [int(each) for each in loader] == [core, core]


class Convolution(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.nn.functional.conv1d(torch.ones(1, 1, 24000), torch.ones(1, 1, 2)), torch.get_num_threads()


def test_convolution_after_fork() -> None:
    """A worker runs torch's parallel code after the parent has, with one thread."""
    assert Convolution(1)[0][0].shape == (1, 1, 23999)
    ((result, threads),) = DataLoader(Convolution(1), None, num_workers=1)
    assert (result.shape, threads) == ((1, 1, 23999), 1)


@pytest.mark.parametrize(
    "context",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_multiprocessing_contexts(context: str) -> None:
    """A start method is given by its name or as a context."""
    for each in (context, torch.multiprocessing.get_context(context))[: 2 if context == "fork" else 1]:
        loader = DataLoader(Plain(11), 3, num_workers=2, multiprocessing_context=each)
        assert loader.multiprocessing_context.get_start_method() == context
        assert torch.cat(list(loader)).tolist() == list(range(11))


@pytest.fixture(scope="module", autouse=True)
def processes_of_multiprocessing_started() -> None:
    """Start multiprocessing's processes and the thread that workers need, which keep pipes and a socket."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    multiprocessing.reduction.ForkingPickler.dumps(torch.zeros(1))


@pytest.mark.slow
def test_a_spawned_worker_does_the_same() -> None:
    """Workers that are spawned have the same seeds and samples as forked ones."""
    from tests.support.loader_parts import Random

    def epoch(context: Any) -> list[Any]:
        seed_all(1)
        return list(DataLoader(Random(5), None, num_workers=1, multiprocessing_context=context))

    assert same(epoch("spawn"), epoch("fork"))


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        {"persistent_workers": True, "transform": abs},
        pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_a_child_process_starts_workers_of_its_own(options: dict[str, Any]) -> None:
    """After a fork a loader whose workers run can be iterated in the child, and in the parent."""
    loader = DataLoader(Plain(8), 2, num_workers=1, **options)
    expected = [batch.tolist() for batch in loader]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int([batch.tolist() for batch in loader] != expected)
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_fork_server(persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets the dataset by pickle, a tensor in it too. A new one in each epoch, unless workers are persistent.

    A new one has the folder that the script is in now, and module variables as they were imported.
    """
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": "forkserver"}
    loader = DataLoader(Counts(torch.arange(4)), 2, num_workers=1, collate_fn=list, **options)
    first, folder = [sample for batch in loader for sample in batch], os.getcwd()
    monkeypatch.chdir(tmp_path)
    second = [sample for batch in loader for sample in batch]
    assert first == [(number, number, folder) for number in range(4)]
    again = [(number, number + 4, folder) for number in range(4)]
    assert second == (again if persistent else [(number, number, str(tmp_path)) for number in range(4)])


@pytest.mark.slow
def test_an_object_that_a_spawned_worker_cannot_get() -> None:
    """A dataset that cannot be pickled names the way out, and leaves no process."""
    before = multiprocessing.active_children()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle") as raised:
        iter(DataLoader(Plain(4), num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn"))
    assert 'multiprocessing_context="fork"' in "".join(raised.value.__notes__)
    assert multiprocessing.active_children() == before


# --- errors ---


class Bad(Plain):
    """Fails for odd numbers."""

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise NotImplementedError(f"sample {index} is odd")
        return index


class Weird(Exception):
    """An exception with two arguments, which torch makes a RuntimeError."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Message(Exception):
    """An exception with a message of its own."""

    message = "none"

    def __init__(self, message: str) -> None:
        super().__init__(message)


class BadIter(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("error in __iter__")


class BadHalfway(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from range(3)
        raise OSError(5, "broken")


class Raises(Plain):
    def __init__(self, error: Any) -> None:
        super().__init__(4)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error


def bad_collate(batch: Any) -> Any:
    raise KeyError("collate")


def bad_init(worker: int) -> None:
    raise RuntimeError("error in worker_init_fn")


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (BadHalfway(), {}),
        (BadHalfway(), {"batch_size": 2}),
        (Raises(Weird(1, 2)), {}),
        (Raises(Message("text")), {}),
        (Raises(KeyError("key")), {}),
        (Raises(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")), {}),
        (Raises(FileNotFoundError(2, "no file", "name")), {}),
        (Plain(6), {"collate_fn": bad_collate}),
        (Plain([object()] * 3), {}),
        (Plain([torch.ones(2), torch.ones(3)]), {"batch_size": 2}),
        (Plain([np.array(["a", None], object)]), {}),
        (Plain([[1, 2], [1]]), {"batch_size": 2}),
        (Plain([None]), {}),
    ],
)
def test_errors_are_torchs(dataset: Any, options: dict[str, Any], workers: int) -> None:
    """Exceptions have torch's type, worker and text, and the batches before and after them are the same."""

    def run(cls: Any) -> Any:
        if isinstance(dataset, IterableDataset) and workers == 2:
            return None
        outcome: list[Any] = []
        iterator = iter(cls(dataset, num_workers=workers, **options))
        while len(outcome) < 8:
            try:
                outcome.append(next(iterator))
            except Exception as error:
                outcome.append(error)
                if isinstance(error, StopIteration):
                    break
        return outcome

    theirs, ours = both(run)
    assert same(ours, theirs)


def test_an_error_at_the_start_of_a_worker() -> None:
    """It is raised for each batch of the worker. torch raises it once, and an UnboundLocalError from then on."""
    for dataset, options, text in (
        (BadIter(), {}, "__iter__"),
        (PAIRS, {"worker_init_fn": bad_init}, "worker_init_fn"),
    ):
        theirs, ours = both(lambda cls: list(cls(dataset, num_workers=1, **options)))  # noqa: B023
        assert last_line(ours) == last_line(theirs) == f"RuntimeError: RuntimeError: error in {text}"
        iterator = iter(DataLoader(dataset, num_workers=1, **options))
        for _ in range(3):
            with pytest.raises(RuntimeError, match=f"error in {text}"):
                next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_worker_and_its_traceback(workers: int) -> None:
    with pytest.raises(NotImplementedError, match="sample 1 is odd") as raised:
        list(DataLoader(Bad(4), num_workers=workers))
    if workers:
        text = str(raised.value)
        assert text.startswith("Caught NotImplementedError in DataLoader worker process 1.\nOriginal Traceback")
        assert 'raise NotImplementedError(f"sample {index} is odd")' in text
        assert "in sample 1 of Bad" in text
    else:
        assert raised.value.__notes__ == ["in sample 1 of Bad"]


def test_a_next_after_the_end_ends_again() -> None:
    for workers in (0, 1):
        iterator = iter(DataLoader(Plain(1), num_workers=workers))
        assert len(list(iterator)) == 1
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("local")


class RaisesLocal(Plain):
    def __getitem__(self, index: int) -> Any:
        raise local_error()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this object cannot be pickled")


class OnlyThere:
    """An object that a worker pickles, and the parent cannot rebuild."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> Any:
    raise TypeError("this object cannot be rebuilt")


class UnpicklableItems(Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            return Unpicklable()
        if index == 3:
            return lambda: None
        if index == 4:
            return threading.Lock()
        if index == 5:
            return OnlyThere(), torch.ones(50_000)
        if index == 6:
            return torch.ones(3, requires_grad=True) * 2
        return index


def test_an_exception_that_cannot_be_pickled_arrives() -> None:
    """It becomes a RuntimeError with the worker's traceback. torch's workers hang."""
    with pytest.raises(RuntimeError, match=r"Local: local"):
        list(DataLoader(RaisesLocal(4), num_workers=1))


def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    """Batches that cannot be sent raise; those after them arrive. torch's workers hang."""
    iterator = iter(DataLoader(UnpicklableItems(8), None, num_workers=2, timeout=30))
    assert take(iterator, 2) == [0, 1]
    for text in ("an Unpicklable", "a function", "a lock", "rebuilt", "non-leaf tensor"):
        with pytest.raises((RuntimeError, TypeError), match=text.split(maxsplit=1)[-1]):
            next(iterator)
    assert list(iterator) == [7]


# --- leaving early ---


class HugeSampler(Sampler[Any]):
    """Its indices are larger than a pipe has room for."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(200_000)


class FirstSum(Plain):
    def __getitem__(self, index: Any) -> Any:
        return float(index.sum())


@pytest.mark.parametrize("persistent", [False, True])
def test_large_sampler_indices(persistent: bool) -> None:
    """Indices above the size of a pipe's buffer do not block the end of an iterator that was left."""
    loader = DataLoader(FirstSum(9), None, sampler=HugeSampler(), num_workers=2, persistent_workers=persistent)
    for number, each in enumerate(loader):
        assert each == 0.0
        if number == 6:
            break
    iterator = iter(loader)
    with pytest.raises(ZeroDivisionError):
        for _ in iterator:
            _ = 1 / 0


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_iterator(persistent: bool) -> None:
    """Workers end with exit status 0 when the last reference to the iterator, or the epoch, is gone."""
    for leave_early in (True, False):
        before = set(multiprocessing.active_children())
        loader = DataLoader(PAIRS, 2, num_workers=2, persistent_workers=persistent)
        iterator = iter(loader)
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        take(iterator, 10 if leave_early else 25)
        del iterator, loader
        for worker in workers:
            worker.join(30)
            assert worker.exitcode == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_exhausted_workers_end(persistent: bool) -> None:
    """Without ``persistent_workers`` they end with the epoch, although the iterator is still there."""
    before = set(multiprocessing.active_children())
    loader = DataLoader(PAIRS, 20, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    list(iterator)
    workers = set(multiprocessing.active_children()) - before
    for worker in workers:
        worker.join(0 if persistent else 30)
        assert worker.exitcode == (None if persistent else 0)
    del iterator, loader
    for worker in workers:
        worker.join(30)
