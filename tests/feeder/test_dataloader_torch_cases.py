"""The cases of torch's own tests of ``DataLoader`` that concern behaviour, for ``aiofeed.DataLoader``."""

from __future__ import annotations

import collections
import functools
import itertools
import multiprocessing
import multiprocessing.resource_tracker
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from aiofeed import DataLoader
from tests.support.loader_parts import Pair, Plain, Stream, last_line, same, same_tensors, seed_all

DATA = torch.randn(50, 2, 3, 5)
LABELS = torch.randperm(25).repeat(2)
PAIRS = TensorDataset(DATA, LABELS)

pytestmark = pytest.mark.filterwarnings(
    # The number of workers exceeds the number of cores of small machines.
    "ignore:This DataLoader will create:UserWarning"
)


def both(make: Any) -> tuple[Any, Any]:
    """What a function of the loader's class does with torch's, and with ours."""
    return _outcome(make, torch_data.DataLoader), _outcome(make, DataLoader)


def _outcome(make: Any, cls: Any) -> Any:
    seed_all(3)
    try:
        return make(cls)
    except Exception as error:
        # A traceback would keep torch's iterator alive.
        return error.with_traceback(None)


def take(values: Any, n: int) -> list[Any]:
    return list(itertools.islice(values, n))


# --- order ---


@pytest.mark.parametrize("workers", [{}, {"num_workers": 3}, {"num_workers": 2, "prefetch_factor": 3}])
@pytest.mark.parametrize("size", [{}, {"batch_size": None}, {"batch_size": 7}])
def test_sequential(size: dict[str, Any], workers: dict[str, Any]) -> None:
    """Without shuffling the batches are the samples in order."""
    batches = list(DataLoader(PAIRS, **size, **workers))
    step = size.get("batch_size", 1)
    for number, (data, label) in enumerate(batches):
        here = number if step is None else slice(number * step, (number + 1) * step)
        assert same_tensors(data, DATA[here])
        assert same_tensors(label, LABELS[here])
    assert len(batches) == len(DataLoader(PAIRS, **size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_shuffle(size: int | None, workers: int) -> None:
    """A shuffled epoch has every sample once, in torch's order."""
    loader = DataLoader(Plain(20), batch_size=size, shuffle=True, num_workers=workers)
    indices = [int(each) for batch in loader for each in np.atleast_1d(np.asarray(batch))]
    assert sorted(indices) == list(range(20))
    theirs, ours = both(lambda cls: list(cls(Plain(20), batch_size=size, shuffle=True, num_workers=workers)))
    assert same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_reproducibility(workers: int) -> None:
    """Two loaders whose generators have one seed give the same order."""

    def epoch() -> list[int]:
        generator = torch.Generator().manual_seed(42)
        return [int(each) for each in DataLoader(Plain(30), shuffle=True, num_workers=workers, generator=generator)]

    assert epoch() == epoch() != list(range(30))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "new_sampler",
    [
        lambda: RandomSampler(PAIRS, replacement=True),
        lambda: RandomSampler(PAIRS, replacement=True, num_samples=120),
        lambda: RandomSampler(PAIRS, num_samples=17),
        lambda: RandomSampler(PAIRS, generator=torch.Generator().manual_seed(4)),
        lambda: SubsetRandomSampler(range(5, 30)),
        lambda: WeightedRandomSampler([0.1 + index % 4 for index in range(50)], 31),
        lambda: SequentialSampler(PAIRS),
        lambda: [3, 1, 4, 1, 5],
        lambda: DistributedSampler(PAIRS, 3, 1, seed=5),
        lambda: DistributedSampler(PAIRS, 3, 2, shuffle=False, drop_last=True),
    ],
)
def test_samplers(new_sampler: Any, workers: int) -> None:
    """Samplers are asked once per epoch, with the draws that torch makes around them."""

    def run(cls: Any) -> Any:
        loader = cls(PAIRS, batch_size=4, sampler=new_sampler(), num_workers=workers)
        return len(loader), list(loader), list(loader), torch.rand(2)

    theirs, ours = both(run)
    assert same(ours, theirs)


@pytest.mark.parametrize("drop_last", [False, True])
def test_distributed_sampler_gives_each_rank_its_part(drop_last: bool) -> None:
    """The ranks have all samples together; those that fill up the last one are repeated, or dropped."""
    batches = []
    for rank in range(4):
        sampler = DistributedSampler(Plain(10), 4, rank, drop_last=drop_last)
        batches.append(torch.cat(list(DataLoader(Plain(10), sampler=sampler))).tolist())
    counts = collections.Counter(itertools.chain(*batches))
    assert {len(batch) for batch in batches} == {2 if drop_last else 3}
    assert sum(counts.values()) == (8 if drop_last else 12)


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_sampler(workers: int) -> None:
    """A ``batch_sampler`` decides the batches, a list of lists as well; ``batch_size`` is then ``None``."""
    for sampler in (BatchSampler(SequentialSampler(PAIRS), 4, False), [(0, 1), (2, 3, 4), (10,), (7, 7)]):
        loader = DataLoader(PAIRS, batch_sampler=sampler, num_workers=workers)
        assert loader.batch_size is None
        assert len(loader) == len(sampler)
        assert same(list(loader), [[DATA[list(part)], LABELS[list(part)]] for part in sampler])


class Bulk(Plain):
    """Loads all samples of a batch in one call."""

    def __getitem__(self, indices: Any) -> Any:
        assert isinstance(indices, list)
        return torch.tensor(indices)


class Bulks(Sampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(35).split(4)


class Getitems(Plain):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, "bulk") for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_bulk_loading(workers: int) -> None:
    """``batch_size=None`` passes a list from the sampler to ``__getitem__``; ``__getitems__`` is used if present."""
    sampler = [[3, 1], [4], [1, 5, 9]]
    batches = list(DataLoader(Bulk(35), batch_size=None, sampler=sampler, num_workers=workers))
    assert same(batches, [torch.tensor(each) for each in sampler])
    batches = list(DataLoader(Getitems(4), batch_size=2, num_workers=workers))
    assert same(batches[1], [torch.tensor([2, 3]), ("bulk", "bulk")])
    stack = StackDataset(data=DATA[:6], label=LABELS[:6])
    assert same(next(iter(DataLoader(stack, 6, num_workers=workers))), {"data": DATA[:6], "label": LABELS[:6]})


class BadGetitems(Plain):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise IndexError(f"no {indices}")


def test_an_error_of_getitems_is_raised() -> None:
    theirs, ours = both(lambda cls: list(cls(BadGetitems(4), 2, num_workers=1)))
    assert isinstance(ours, IndexError)
    assert last_line(ours) == last_line(theirs) == "IndexError: IndexError: no [0, 1]"


def test_growing_dataset() -> None:
    """The length follows that of the dataset."""
    items = [torch.ones(4) for _ in range(4)]
    sequential, shuffled = DataLoader(items), DataLoader(items, shuffle=True)  # type: ignore[arg-type]
    items.append(torch.ones(4))
    assert (len(sequential), len(shuffled), len(list(shuffled))) == (5, 5, 5)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [list, tuple])
def test_builtin_collections(kind: Any, workers: int) -> None:
    """``list(loader)`` and ``tuple(loader)`` have all batches, unconverted with ``batch_size=None``."""
    for dataset in (Plain(20), Numbers(20)):
        assert kind(DataLoader(dataset, None, num_workers=workers)) == kind(range(20))
        batches = kind(DataLoader(dataset, 2, num_workers=workers))
        assert same(batches, kind(torch.tensor([index, index + 1]) for index in range(0, 20, 2)))


def test_len() -> None:
    for size, n in ((2, 25), (3, 17), (None, 50)):
        loader = DataLoader(PAIRS, batch_size=size)
        assert len(loader) == n == sum(1 for _ in loader)


# --- arguments ---

BATCHES = BatchSampler(SequentialSampler(PAIRS), 3, False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"persistent_workers": True},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"batch_size": None, "shuffle": True, "drop_last": True},
        {"multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "bad"},
        {"num_workers": 1, "multiprocessing_context": object()},
        {"sampler": SequentialSampler(PAIRS), "shuffle": True},
        {"sampler": SequentialSampler(PAIRS), "batch_sampler": BATCHES, "shuffle": 3},
        {"batch_size": 11, "batch_sampler": BATCHES},
        {"shuffle": True, "batch_sampler": BATCHES},
        {"drop_last": True, "batch_sampler": BATCHES},
        {"sampler": SequentialSampler(PAIRS), "batch_sampler": BATCHES},
        {"iterable": True, "shuffle": True},
        {"iterable": True, "shuffle": 3},
        {"iterable": True, "sampler": SequentialSampler(PAIRS)},
        {"iterable": True, "sampler": 3},
        {"iterable": True, "batch_sampler": BATCHES},
        {"iterable": True, "batch_sampler": 3},
        {"in_order": False, "num_workers": "two"},
        {"dataset": [], "shuffle": True},
        {"unknown": 1},
    ],
)
def test_invalid_arguments(arguments: dict[str, Any]) -> None:
    """The messages of invalid arguments are torch's."""

    def make(cls: Any) -> Any:
        options = dict(arguments)
        dataset = options.pop("dataset", Stream(5) if options.pop("iterable", False) else PAIRS)
        return [list(cls(dataset, **options)) for _ in range(2)]

    theirs, ours = both(make)
    assert isinstance(ours, Exception)
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))


def test_attributes_that_cannot_be_set() -> None:
    loader = DataLoader(PAIRS)
    for name in ("batch_size", "sampler", "batch_sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after"):
            setattr(loader, name, {})


def test_an_index_that_is_no_index() -> None:
    theirs, ours = both(lambda cls: list(cls(Plain(4), sampler=[9], num_workers=1)))
    assert last_line(ours) == last_line(theirs)


def test_the_warning_of_too_many_workers_is_torchs() -> None:
    """More workers than cores give torch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="excessive worker creation"):
            DataLoader(PAIRS, num_workers=3 + (os.cpu_count() or 1))


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
    for pid in iterator.workers.pids:
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


class Generators(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.initial_seed(), np.random.randint(1 << 30), np.random.get_state()[1][:8].tolist()


def test_numpy_seeds() -> None:
    """NumPy's generator in a worker has torch's state."""
    theirs, ours = both(lambda cls: list(cls(Generators(4), None, num_workers=2)))
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


class InstanceInit(Plain):
    def start(self, worker: int) -> None:
        self.worker = worker

    def __getitem__(self, index: int) -> Any:
        return self.worker


def test_batches_are_dealt_out_to_the_workers_in_turn() -> None:
    """Batch k is made by worker k modulo ``num_workers``."""
    dataset = InstanceInit(128)
    for size in (8, 32):
        batches = list(DataLoader(dataset, size, num_workers=3, timeout=30, worker_init_fn=dataset.start))
        assert [batch.tolist() for batch in batches] == [[number % 3] * size for number in range(128 // size)]


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
def resource_tracker_started() -> None:
    """Start multiprocessing's process that spawned workers need, which keeps a pipe."""
    multiprocessing.resource_tracker.ensure_running()


def test_a_spawned_worker_does_the_same() -> None:
    """Workers that are spawned have the same seeds and samples as forked ones."""
    from tests.support.loader_parts import Random

    def epoch(context: Any) -> list[Any]:
        seed_all(1)
        return list(DataLoader(Random(5), None, num_workers=1, multiprocessing_context=context))

    assert same(epoch("spawn"), epoch("fork"))


@pytest.mark.slow
def test_an_object_that_a_spawned_worker_cannot_get() -> None:
    """A dataset that cannot be pickled names the way out, and leaves no process."""
    before = multiprocessing.active_children()
    with pytest.raises((AttributeError, TypeError), match="pickle") as raised:
        iter(DataLoader(Plain(4), num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn"))
    assert 'multiprocessing_context="fork"' in "".join(raised.value.__notes__)
    assert multiprocessing.active_children() == before


# --- iterable datasets ---


class Numbers(IterableDataset[int]):
    """0 to n - 1 in every worker, or 0 to n[k] - 1 in worker k."""

    def __init__(self, n: Any) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n if isinstance(self.n, int) else self.n[0 if info is None else info.id]))

    def __len__(self) -> int:
        return self.n if isinstance(self.n, int) else sum(self.n)


@pytest.mark.parametrize("prefetch_factor", [2, 4])
def test_iterable_dataset_with_uneven_workers(prefetch_factor: int) -> None:
    """Workers end one by one; the others go on in torch's order."""
    dataset = Numbers([0, 4, 20])

    def run(cls: Any) -> Any:
        new = functools.partial(cls, dataset, num_workers=3, prefetch_factor=prefetch_factor)
        return list(new(batch_size=None)), list(new(batch_size=7)), list(new(batch_size=7, drop_last=True)), len(new())

    theirs, ours = both(run)
    assert same(ours, theirs)
    assert sorted(ours[0]) == sorted([*range(4), *range(20)])
    assert {tuple(each.tolist()) for each in ours[1]} == {
        tuple(range(*ends)) for ends in ((4,), (7,), (7, 14), (14, 20))
    }
    assert len(ours[2]) == 2


def test_iterable_dataset_in_this_process() -> None:
    batches = list(DataLoader(Numbers(20), 7))
    assert [each.tolist() for each in batches] == [list(range(*ends)) for ends in ((7,), (7, 14), (14, 20))]
    assert len(list(DataLoader(Numbers(20), 7, drop_last=True))) == 2
    assert list(DataLoader(Numbers(20), None)) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_dataset_longer_than_its_length(workers: int) -> None:
    """More samples than ``len()`` give torch's warning, if the length was asked for."""

    class Short(Numbers):
        def __len__(self) -> int:
            return 5

    loader = DataLoader(Short(10), num_workers=workers)
    take(loader, 7)  # no warning yet
    assert len(loader) == 5
    iterator = iter(loader)
    take(iterator, 5)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"Length of IterableDataset .* was reported to be 5.*but [67] samples"):
            next(iterator)


@pytest.mark.parametrize(("size", "drop_last", "n"), [(1, True, 10), (2, False, 5), (3, False, 4), (3, True, 3)])
def test_length_of_an_iterable_dataset(size: int, drop_last: bool, n: int) -> None:
    assert len(DataLoader(Numbers(10), size, drop_last=drop_last)) == n


@pytest.mark.parametrize("workers", [0, 1])
def test_chained_iterable_datasets(workers: int) -> None:
    for chained in (Numbers(6) + Numbers(3), ChainDataset([Numbers(6), Numbers(3)])):
        assert torch.cat(list(DataLoader(chained, num_workers=workers))).tolist() == [*range(6), *range(3)]
        assert len(DataLoader(chained)) == 9
    with pytest.raises(AssertionError, match="ChainDataset only supports IterableDataset"):
        list(DataLoader(ChainDataset([Numbers(2), PAIRS]), num_workers=workers))


class Kept(IterableDataset[Any]):
    """Counts its passes in the worker."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([self.passes] * 4)


def test_epochs_of_new_and_persistent_workers() -> None:
    """New workers begin with the dataset as it is here; persistent ones keep theirs, and their generators."""
    for persistent in (False, True):
        loader = DataLoader(Kept(), 2, num_workers=2, persistent_workers=persistent)
        for epoch in range(3):
            assert {int(each) for batch in loader for each in batch} == {1 + epoch * persistent}


def test_persistent_workers_do_not_see_changes() -> None:
    """A change of the dataset after the first epoch reaches no persistent worker, but does reach new ones."""
    for persistent in (False, True):
        dataset = Plain(list(range(4)))
        loader = DataLoader(dataset, 4, num_workers=1, persistent_workers=persistent)
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        dataset.items[2] = 9
        assert next(iter(loader)).tolist() == [0, 1, 2 if persistent else 9, 3]


def pids(loader: Any) -> set[int]:
    return {int(each) for each in loader}


class Pid(Plain):
    def __getitem__(self, index: int) -> Any:
        return os.getpid()


def test_persistent_workers_are_the_same_processes() -> None:
    loader = DataLoader(Pid(6), num_workers=2, persistent_workers=True)
    first = pids(loader)
    assert pids(loader) == first
    take(loader, 1)
    assert pids(loader) == first
    fresh = DataLoader(Pid(6), num_workers=2)
    assert not pids(fresh) & pids(fresh)


# --- in_order=False ---


class Gate(Plain):
    """Sample 0 is made after all others of worker 1 were."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.opened = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        if index == 0:
            assert self.opened.wait(60)
        if index == 9:
            self.opened.set()
        return worker.id, index


class GateStream(IterableDataset[Any]):
    """Worker 1 goes on when worker 0 has ended."""

    def __init__(self) -> None:
        self.ended = torch.multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        if worker.id:
            assert self.ended.wait(60)
        for index in range(5):
            yield worker.id, index + 5 * worker.id
        self.ended.set()


def test_out_of_order() -> None:
    """With ``in_order=False`` a slow worker gets no more than its share, and the others go on."""
    batches = list(DataLoader(Gate(10), None, num_workers=2, prefetch_factor=2, in_order=False))
    # The last batch of worker 1 is under way when sample 0 is made.
    assert batches[:7] == [[1, index] for index in (1, 3, 4, 5, 6, 7, 8)]
    assert sorted(batches[7:]) == [[0, 0], [0, 2], [1, 9]]
    # In order the events would wait for each other: a later batch of worker 1 opens sample 0.
    batches = list(DataLoader(GateStream(), None, num_workers=2, in_order=False))
    assert batches == [[index // 5, index] for index in range(10)]
    assert list(DataLoader(Plain(10), None, num_workers=2)) == list(range(10))


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


class StopsEarly(Plain):
    def __getitem__(self, index: int) -> Any:
        raise StopIteration


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
        (PAIRS, {"collate_fn": bad_collate}),
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


@pytest.mark.parametrize("workers", [0, 3])
def test_iteration_goes_on_after_an_error(workers: int) -> None:
    """Each sample that fails raises once; the others follow in order."""
    iterator = iter(DataLoader(Bad(9), None, num_workers=workers))
    outcomes: list[Any] = []
    while True:
        try:
            outcomes.append(next(iterator))
        except NotImplementedError:
            outcomes.append(None)
        except StopIteration:
            break
    assert outcomes == [0, None, 2, None, 4, None, 6, None, 8]


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


# --- types ---


class Tagged(torch.Tensor):
    pass


class CustomList(list[Any]):
    pass


class CustomDict(dict[str, Any]):
    pass


class Wrapped:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = "a label"  # type: ignore[attr-defined]
    return tensor


LARGE = torch.arange(300_000.0).reshape(600, 500)


def items_of_all_types() -> dict[str, Any]:
    return {
        "float": torch.randn(3),
        "bfloat16": torch.randn(40_000).bfloat16(),
        "bool": torch.tensor([True, False]),
        "float8": torch.randn(30).to(torch.float8_e4m3fn),
        "uint16": torch.ones(3).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex128),
        "nan and minus zero": torch.tensor([float("nan"), -0.0]),
        "large": LARGE,
        "empty": torch.empty(0, 3),
        "empty with a stride": torch.empty(4, 0).T,
        "scalar": torch.tensor(3),
        "row of a large one": LARGE[3],
        "column of a large one": LARGE[:, 3],
        "block of a large one": LARGE[10:300, 7:400],
        "transposed": torch.randn(400, 90).T,
        "channels last": torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
        "expanded": torch.zeros(2000, 1).expand(2000, 500),
        "overlapping": torch.as_strided(torch.arange(3000.0), (1000, 3), (1, 1)),
        "strided": torch.as_strided(torch.arange(30000.0), (1000, 10), (20, 2)),
        "offset": torch.arange(30000.0)[5:],
        "requires_grad": torch.randn(3, requires_grad=True),
        "large, requires_grad": torch.randn(300, 300, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(300, 300)),
        "conj": torch.randn(300, 3, dtype=torch.cfloat).conj(),
        "neg": torch.randn(300, dtype=torch.cfloat).conj().imag,
        "sparse": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(3), torch.zeros(20_000)]),
        "jagged": torch.nested.nested_tensor([torch.ones(3), torch.zeros(2)], layout=torch.jagged),
        "subclass": torch.randn(3).as_subclass(Tagged),
        "large subclass": torch.randn(300, 300).as_subclass(Tagged),
        "attribute": with_attribute(torch.zeros(30_000)),
        "subclass with an attribute": with_attribute(torch.zeros(30_000).as_subclass(Tagged)),
        "packed sequence": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        "array": np.random.rand(3),
        "large array": np.random.rand(300, 300),
        "Fortran order": np.asfortranarray(np.random.rand(300, 300)),
        "not contiguous": np.random.rand(300, 300)[::2, ::3],
        "objects": np.array([1, "a", None], object),
        "strings": np.array(["ab", "c"]),
        "record": Wrapped(np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])),
        "NumPy scalar": np.float32(3),
        "date": Wrapped(np.datetime64("2020-01-01")),
        "text": "text",
        "bytes": b"ab" * 90_000,
        "bytearray": bytearray(b"ab" * 90_000),
        "None": None,
        "int": 3,
        "set": {1, 2},
        "namedtuple": Pair(torch.randn(3), "a"),
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "default": collections.defaultdict(list, a=[1]),
        "Counter": collections.Counter("abracadabra"),
        "deque": collections.deque([1, 2]),
        "custom list": CustomList([1, 2]),
        "custom dict": CustomDict(a=1),
        "object": Wrapped(torch.ones(90_000)),
        "size": torch.Size([1, 2]),
        "dtype": torch.float32,
    }


def only(batch: Any) -> Any:
    return batch[0]


def as_list(batch: Any) -> Any:
    return batch


@pytest.mark.filterwarnings("ignore:.*sparse:UserWarning", "ignore:.*nested tensors:UserWarning", "ignore:Sparse")
def test_types_arrive_as_from_torch() -> None:
    """A batch of any type arrives from a worker as from torch's: type, dtype, strides, flags and bits."""
    items = items_of_all_types()
    for options in ({"batch_size": None}, {"batch_size": 2, "collate_fn": as_list}):
        theirs, ours = both(lambda cls: list(cls(Plain(list(items.values())), num_workers=1, **options)))  # noqa: B023
        names = list(items) if options["batch_size"] is None else range(len(theirs))
        for name, one, other in zip(names, theirs, ours, strict=True):
            assert same(one, other), name


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "items",
    [
        [("1", 0), ("2", 1), ("3", 2)],
        [{"a": torch.full((4, 2), index), "b": {"c": index}} for index in range(3)],
        [Pair(index, torch.ones(3)) for index in range(3)],
        [np.float16(1), np.float16(2), np.float16(3)],
        [np.int8(1), np.int8(2), np.int8(3)],
        [np.ones((2, 3)) * index for index in range(3)],
        [CustomList([1, torch.ones(2)]), CustomList([2, torch.ones(2)])],
        [CustomDict(a=1.0, b="x"), CustomDict(a=2.0, b="y")],
        [collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=3, a=4)],
        [torch.randn(2).as_subclass(Tagged) for _ in range(3)],
        [True, False],
        [1.5, 2.5],
        [b"one", b"two"],
        [torch.randn(300, 300) for _ in range(3)],
        [(torch.randn(0, 2), [[]]) for _ in range(2)],
        [torch.randn(4, 5).T for _ in range(3)],
    ],
)
def test_collation_is_torchs(items: Any, workers: int) -> None:
    """``default_collate`` gives the types, dtypes and strides that it gives in torch's loader."""
    theirs, ours = both(lambda cls: list(cls(Plain(items), 2, num_workers=workers)))
    assert same(ours, theirs)


class Aliases(Plain):
    def __getitem__(self, index: int) -> Any:
        large, small = torch.zeros(30_000), torch.zeros(8)
        return {
            "same": (large, large),
            "view": (large.view(300, 100), large),
            "part first": (torch.zeros(1), large[:3], large),
            "part last": (large, large[100:103]),
            "small": (small, small[2:4]),
        }


def test_tensors_of_a_batch_that_share_memory() -> None:
    """Tensors that share memory in the worker share it here."""
    for item in DataLoader(Aliases(2), None, num_workers=1):
        large = item["same"][0]
        large.fill_(1)
        assert item["same"][1] is large
        assert all(bool((each == 1).all()) for each in (*item["view"], *item["part last"], *item["part first"][1:]))
        item["small"][0].fill_(1)
        assert item["small"][1].tolist() == [1, 1]


def test_a_view_of_a_large_storage_does_not_send_all_of_it() -> None:
    """A row of a large table arrives with the row's memory only."""
    for row in DataLoader(Plain(list(torch.zeros(400, 50_000))), None, num_workers=1, sampler=[7, 8]):
        assert row.untyped_storage().nbytes() <= 4 * 50_000


def test_batches_can_be_written() -> None:
    """Tensors and arrays of a batch are writable; what is written stays in that batch."""
    items = [(torch.zeros(size), np.zeros(size)) for size in (3, 2000, 90_000)]
    for _, array in items:
        array.flags.writeable = False
    batches = list(DataLoader(Plain(items), 1, num_workers=1, collate_fn=only))
    for tensor, array in batches:
        tensor += 1
        array += 1
    for tensor, array in batches:
        assert (float(tensor.sum()), float(array.sum())) == (len(tensor), len(array))


# --- datapipes ---


@pytest.mark.skipif(not hasattr(torch_data, "IterDataPipe"), reason="this torch has no datapipes")
@pytest.mark.parametrize("workers", [0, 2])
def test_datapipes(workers: int) -> None:
    """A shuffled and sharded datapipe gives torch's batches in each epoch."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    def run(cls: Any) -> Any:
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        loader = cls(pipe, 3, shuffle=True, num_workers=workers, persistent_workers=bool(workers))
        return [list(loader) for _ in range(3)]

    theirs, ours = both(run)
    assert same(ours, theirs)
    assert sorted(torch.cat(ours[0]).tolist()) == list(range(20))
