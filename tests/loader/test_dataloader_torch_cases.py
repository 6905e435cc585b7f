"""Torch's own test cases of ``DataLoader``, for ``aiofeed.DataLoader``: order, arguments, iterable datasets."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from aiofeed import DataLoader
from tests.support.loader_parts import Plain, Stream, both, last_line, same

DATA = torch.randn(50, 2, 3, 5)
LABELS = torch.randperm(25).repeat(2)
PAIRS = TensorDataset(DATA, LABELS)

pytestmark = pytest.mark.filterwarnings(
    # The number of workers exceeds the number of cores of small machines.
    "ignore:This DataLoader will create:UserWarning"
)


def take(values: Any, n: int) -> list[Any]:
    return list(itertools.islice(values, n))


# --- order ---


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


class OwnIterator:
    """A batch sampler that is its own iterator and starts again at each ``iter``, like Lightning's."""

    def __iter__(self) -> OwnIterator:
        self.at = 0
        return self

    def __next__(self) -> list[int]:
        if self.at == 10:
            raise StopIteration
        self.at += 2
        return [self.at - 2, self.at - 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_is_its_own_iterator(workers: int) -> None:
    """It is asked for indices, and not restarted."""
    loader = DataLoader(PAIRS, batch_sampler=OwnIterator(), num_workers=workers)
    assert same([labels for _, labels in loader], list(LABELS[:10].reshape(5, 2)))


class Bulk(Plain):
    """Loads all samples of a batch in one call."""

    def __getitem__(self, indices: Any) -> Any:
        assert isinstance(indices, list)
        return torch.tensor(indices)


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
