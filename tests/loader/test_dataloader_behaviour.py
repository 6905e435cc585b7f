"""The guarantees of torch's DataLoader and DistributedSampler, tested on a Feeder; differences are tested, too.

`docs/compatibility.md` lists both.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from aiofeed import Feeder, Files, FromDataset, Limits
from aiofeed.errors import CollateError, ReadError

DATA = torch.arange(100 * 2 * 3, dtype=torch.float32).reshape(100, 2, 3)
LABELS = torch.arange(100) % 7
PAIRS = TensorDataset(DATA, LABELS)

MakeFeeder = Callable[..., Feeder[Any]]


@pytest.fixture
def make() -> Iterator[MakeFeeder]:
    """`make(dataset, **options)`: a feeder of the whole dataset, closed after the test."""
    made: list[Feeder[Any]] = []

    def new(dataset: Any, **options: Any) -> Feeder[Any]:
        made.append(Feeder(dataset, **{"shard": None, **options}))
        return made[-1]

    yield new
    for feeder in made:
        feeder.close()


class Items(Dataset):  # type: ignore[type-arg]
    """A dataset of the items of a list, or of the results of a function of the index."""

    def __init__(self, items: Any, n: int | None = None) -> None:
        self.items = items
        self.n = len(items) if n is None else n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.items(index) if callable(self.items) else self.items[index]


def assert_same(got: Any, wanted: Any) -> None:
    """Check that two nested batches are equal in values, types and dtypes."""
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    elif isinstance(wanted, collections.abc.Mapping):
        assert list(got) == list(wanted)
        for name in wanted:
            assert_same(got[name], wanted[name])
    elif isinstance(wanted, collections.abc.Sequence) and not isinstance(wanted, str):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, Limits(decode_threads=4, prefetch_batches=3)])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 100, 1000])
def test_unshuffled_batches_are_slices(make: MakeFeeder, batch_size: int, limits: Limits | None) -> None:
    """Batch i has samples i * batch_size onwards, with any concurrency."""
    got = list(make(FromDataset(PAIRS, threads=4), batch_size=batch_size, limits=limits))
    assert torch.equal(torch.cat([data for data, _ in got]), DATA)
    assert torch.equal(torch.cat([labels for _, labels in got]), LABELS)
    assert [len(labels) for _, labels in got[:-1]] == [batch_size] * (len(got) - 1)


@pytest.mark.parametrize("shuffle", [True, "keyed"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_shuffled_batches_have_each_sample_once_beside_its_label(
    make: MakeFeeder, shuffle: Any, batch_size: int
) -> None:
    """Shuffled batches contain each sample once, with its own label."""
    got = list(make(PAIRS, batch_size=batch_size, shuffle=shuffle))
    indices = [int(data[0, 0]) // 6 for batch, _ in got for data in batch]
    assert sorted(indices) == list(range(100)) != indices
    assert [int(label) for _, labels in got for label in labels] == [index % 7 for index in indices]


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_the_same_seed_is_the_same_order(make: MakeFeeder, shuffle: Any) -> None:
    """The order depends on seed and epoch, not on concurrency."""

    def orders(seed: int, threads: int) -> list[list[int]]:
        feeder = make(FromDataset(Items(range(100)), threads=threads), batch_size=9, shuffle=shuffle, seed=seed)
        return [torch.cat(list(feeder)).tolist() for _ in range(2)]

    one = orders(42, threads=1)
    assert orders(42, threads=3) == one
    assert one[0] != one[1]
    assert orders(50, threads=1)[0] not in one


def test_alternating_iterators_of_two_feeders(make: MakeFeeder) -> None:
    """Two feeders of one dataset can be iterated alternately and dropped in mid-epoch."""
    one, other = iter(make(PAIRS, batch_size=2)), iter(make(PAIRS, batch_size=3))
    for step in range(3):
        assert torch.equal(next(one)[0], DATA[2 * step : 2 * step + 2])
        assert torch.equal(next(other)[0], DATA[3 * step : 3 * step + 3])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_a_feeder(make: MakeFeeder, kind: type) -> None:
    """list() and tuple() of a feeder work; they call len() and iter()."""
    feeder = make(Items(range(20)), batch_size=2)
    assert_same(kind(feeder), kind(torch.tensor([i, i + 1]) for i in range(0, 20, 2)))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_slow_sample(in_order: bool) -> None:
    """With in_order=True the others wait for a slow sample; with False it comes last."""
    held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    reading = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 10

        def key(self, index: int) -> str:
            return str(index)

        async def read(self, index: int) -> bytes:
            if index == 0:
                held.append((asyncio.get_running_loop(), asyncio.Event()))
                reading.set()
                await held[0][1].wait()
            return b"%d" % index

    feeder: Feeder[Any] = Feeder(
        Slow(), decode=lambda data: torch.zeros(1) + int(data), batch_size=1, in_order=in_order, shard=None
    )
    with feeder:
        iterator = iter(feeder)
        got = [] if in_order else [int(next(iterator)) for _ in range(9)]
        assert reading.wait(10)
        held[0][0].call_soon_threadsafe(held[0][1].set)
        got += [int(batch) for batch in iterator]
    assert sorted(got) == list(range(10))
    assert got == list(range(10)) if in_order else got[-1] == 0


# --- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"batch_size": 2}, 50),
        ({"batch_size": 3}, 34),
        ({"batch_size": 3, "drop_last": True}, 33),
        ({"batch_size": 101, "drop_last": True}, 0),
        ({"batch_size": 6, "sampler": RandomSampler(range(100), replacement=True, num_samples=105)}, 18),
        ({"batch_size": 1, "sampler": RandomSampler(range(100), num_samples=105)}, 105),
        ({"batch_size": 2, "sampler": range(2, 12)}, 5),
    ],
)
def test_len_is_the_number_of_batches(make: MakeFeeder, options: dict[str, Any], wanted: int) -> None:
    """len() counts the batches of the sampler, or of the dataset, rounded by drop_last, as DataLoader does."""
    feeder = make(PAIRS, **options)
    assert len(feeder) == wanted == len(list(feeder)) == len(DataLoader(PAIRS, **options))


def test_a_dataset_that_grows_keeps_its_length(make: MakeFeeder) -> None:
    """The length is fixed when the feeder is created, because positions, ranks and states depend on it."""
    items = [torch.ones(4) for _ in range(4)]
    feeder = make(items, batch_size=1)
    items.append(torch.ones(4))
    assert len(feeder) == len(list(feeder)) == 4


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_a_plain_iterable_is_a_sampler(make: MakeFeeder) -> None:
    """sampler=range(2, 12) gives these samples in this order."""
    got = list(make(PAIRS, batch_size=2, sampler=range(2, 12)))
    assert torch.equal(torch.cat([data for data, _ in got]), DATA[2:12])


SAMPLERS: dict[str, Callable[[torch.Generator | None], Any]] = {
    "replacement": lambda g: RandomSampler(range(10), replacement=True, num_samples=25, generator=g),
    "permutation": lambda g: RandomSampler(range(10), generator=g),
    "more than there are": lambda g: RandomSampler(range(10), num_samples=25, generator=g),
    "weighted": lambda g: WeightedRandomSampler([0.1, 0.9, 0.4, 0.7, 3.0, 0.6], 5, generator=g),
    "weighted, once": lambda g: WeightedRandomSampler([0.1, 0.9, 0.4, 0.7], 4, replacement=False, generator=g),
    "subset": lambda g: SubsetRandomSampler(range(3, 9), generator=g),
}


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_torch_samplers(make: MakeFeeder, kind: str, own_generator: bool) -> None:
    """In each epoch the indices are those of the sampler alone with the same seed."""

    def sampler() -> Any:
        if own_generator:
            return SAMPLERS[kind](torch.Generator().manual_seed(42))
        torch.manual_seed(42)
        return SAMPLERS[kind](None)

    alone = sampler()
    wanted = [list(alone) for _ in range(3)]
    feeder = make(Items(range(10)), batch_size=4, sampler=sampler())
    assert [torch.cat(list(feeder)).tolist() for _ in range(3)] == wanted


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": range(3), "shuffle": True}, ValueError, "sampler= decides the order"),
        ({"batch_size": None}, TypeError, r"got None: .*aiofeed\.DataLoader\(dataset, batch_size=None\)"),
        ({"shuffle": None}, TypeError, r"got None: pass False; aiofeed\.DataLoader"),
        ({"num_workers": 2}, TypeError, r"aiofeed\.DataLoader takes it.*FromDataset\(dataset, threads=2\)"),
        ({"timeout": 3}, TypeError, "timeout"),
        ({"worker_init_fn": print}, TypeError, r"aiofeed\.DataLoader takes it.*FromDataset\(dataset, setup=function\)"),
        ({"multiprocessing_context": "spawn"}, TypeError, "no worker processes"),
        ({"persistent_workers": True}, TypeError, "as long as the feeder"),
        ({"prefetch_factor": 3}, TypeError, r"Limits\(prefetch_batches=3\)"),
        ({"generator": torch.Generator()}, TypeError, r"aiofeed\.DataLoader takes it.*seed="),
        ({"pin_memory": True}, TypeError, r"memory is pinned if.*aiofeed\.DataLoader"),
    ],
)
def test_unknown_arguments_name_the_alternative(
    make: MakeFeeder, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error for an argument of DataLoader names the alternative."""
    with pytest.raises(error, match=message):
        make(PAIRS, **{"batch_size": 2, **options})


def test_positional_arguments_are_named() -> None:
    """The error shows the call with names, and the class that takes DataLoader's order."""
    message = r"Feeder\(..., batch_size=32, shuffle=True\); aiofeed\.DataLoader takes them by position"
    with pytest.raises(TypeError, match=message):
        Feeder(PAIRS, 32, True)  # type: ignore[call-overload]


def test_a_concatenation_of_sources_is_refused() -> None:
    """Sources have no items; the error names the way out, for nested ones too."""
    source: Any = Files(["a", "b"])
    for dataset in (ConcatDataset([source, source]), ConcatDataset([PAIRS, Subset(source, [0])])):
        with pytest.raises(TypeError, match=r"items, which Files does not have: .*(aiofeed\.Files|source\.split)"):
            Feeder(dataset, batch_size=2)


# --- DistributedSampler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "world_size"), [(10, 3), (9, 3), (2, 5), (100, 7)])
def test_a_rank_reads_what_distributed_sampler_gives_it(
    make: MakeFeeder, n: int, world_size: int, drop_last: bool, shuffle: bool
) -> None:
    """Each rank gets the indices of DistributedSampler, also when padded, cut, or with more ranks than samples."""
    lengths = set()
    for rank in range(world_size):
        sampler = DistributedSampler(range(n), world_size, rank, shuffle=shuffle, drop_last=drop_last)
        feeder = make(Items(range(n)), batch_size=1, shuffle=shuffle, drop_last=drop_last, shard=(rank, world_size))
        for epoch in range(2):
            sampler.set_epoch(epoch)
            feeder.set_epoch(epoch)
            assert [batch.item() for batch in feeder] == list(sampler)
        lengths.add(len(feeder))
    assert len(lengths) == 1


@pytest.mark.parametrize("rank", [3, -1])
def test_an_invalid_rank_is_refused(make: MakeFeeder, rank: int) -> None:
    """A rank outside 0 to world_size - 1 is refused."""
    with pytest.raises(ValueError, match="0 <= rank < world_size"):
        make(PAIRS, batch_size=2, shard=(rank, 3))


@pytest.mark.parametrize("by", ["shard", "sampler"])
def test_drop_last_repeats_no_sample(make: MakeFeeder, by: str) -> None:
    """With drop_last no sample comes twice, even if a DistributedSampler has padded its list."""
    seen: list[int] = []
    for rank in range(4):
        options: dict[str, Any] = (
            {"shard": (rank, 4)} if by == "shard" else {"sampler": DistributedSampler(range(9), 4, rank)}
        )
        feeder = make(Items(range(9)), batch_size=2, drop_last=True, **options)
        seen += torch.cat(list(feeder)).tolist()
    assert len(seen) == len(set(seen)) == 8


def test_without_padding_each_sample_comes_once(make: MakeFeeder) -> None:
    """With pad=False each sample comes once, and ranks may differ in length; DistributedSampler has no such mode."""
    feeders = [make(Items(range(10)), batch_size=2, pad=False, shard=(rank, 4)) for rank in range(4)]
    assert sorted(int(value) for feeder in feeders for batch in feeder for value in batch) == list(range(10))
    assert [len(feeder) for feeder in feeders] == [2, 2, 1, 1]


# --- collating --------------------------------------------------------------------------------------------------------


class Mapping(dict):  # type: ignore[type-arg]
    """A mapping of the user's own."""


class Sequence(list):  # type: ignore[type-arg]
    """A sequence of the user's own."""


class Inner(NamedTuple):
    positive: int
    negative: int


class Outer(NamedTuple):
    data: Inner
    label: str
    noise: torch.Tensor


SAMPLES: dict[str, Any] = {
    "int": lambda i: i,
    "float": lambda i: i + 0.5,
    "bool": lambda i: i % 2 == 0,
    "str": str,
    "bytes": lambda i: b"%d" % i,
    "tensor": lambda i: torch.full((2, 3), i),
    "scalar tensor": lambda i: torch.tensor(i, dtype=torch.int16),
    "array": lambda i: np.ones((2, 3, 4)) * i,
    "memmap-like view": lambda i: np.arange(12).reshape(4, 3)[:, i % 3],
    "string and number": lambda i: ("abcd"[i], i),
    "dict": lambda i: {"a_tensor": torch.full((4, 2), i), "another_dict": {"a_number": i}},
    "mapping": lambda i: Mapping(a=i, b=i + 1),
    "list": lambda i: [i, -i],
    "sequence": lambda i: Sequence([i, i + 1, i + 2]),
    "range": lambda i: range(i, i + 2),
    "named tuple": lambda i: Outer(Inner(i, -i), str(i), torch.ones(3) * i),
    "nested": lambda i: (i, [{"x": (np.float32(i), "s")}]),
    **{
        dtype.__name__: (lambda i, dtype=dtype: dtype(i))
        for dtype in (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_)
    },
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_batches_are_those_of_default_collate(make: MakeFeeder, kind: str) -> None:
    """Values, types and dtypes equal DataLoader's for every kind of sample."""
    dataset = Items(SAMPLES[kind], n=4)
    for got, wanted in zip(make(dataset, batch_size=2), DataLoader(dataset, batch_size=2), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize(
    "items",
    [
        [["X"], ["X", "X"]],
        [["X", "X"], ["X"]],
        [torch.ones(2), torch.ones(3)],
        [{"a": 1}, {"b": 1}],
        [object(), object()],
        [np.array(["a", "b"], dtype=object), np.array(["a", "b"], dtype=object)],
    ],
)
def test_samples_that_cannot_be_collated_are_an_error(make: MakeFeeder, items: list[Any]) -> None:
    """If DataLoader cannot collate samples, the feeder raises a CollateError."""
    with pytest.raises((RuntimeError, TypeError, KeyError)):
        next(iter(DataLoader(Items(items), batch_size=2)))
    with pytest.raises(CollateError):
        next(iter(make(Items(items), batch_size=2)))


class Custom:
    """A batch of the user's own."""

    def __init__(self, samples: list[tuple[torch.Tensor, int]]) -> None:
        self.data = torch.stack([data for data, _ in samples])
        self.labels = [int(label) for _, label in samples]


def test_collate_fn_may_return_anything(make: MakeFeeder) -> None:
    """collate_fn may return a user's class or torch's PackedSequence."""
    [first, *_] = make(PAIRS, batch_size=2, collate_fn=Custom)
    assert torch.equal(first.data, DATA[:2])
    assert first.labels == [0, 1]

    def packed(samples: list[tuple[torch.Tensor, int]]) -> Any:
        data = [sample for sample, _ in samples]
        return torch.nn.utils.rnn.pack_sequence(data)

    [first, *_] = make(PAIRS, batch_size=2, collate_fn=packed)
    assert isinstance(first, torch.nn.utils.rnn.PackedSequence)


@pytest.mark.parametrize(
    "dataset",
    [
        PAIRS,
        Subset(PAIRS, [5, 3, 99, 0, 3]),
        ConcatDataset([Subset(PAIRS, [1, 2]), Items([], 0), Subset(PAIRS, [7])]),
        StackDataset(x=Subset(PAIRS, range(10)), y=Items(range(10))),
        StackDataset(Items(range(5)), Items(list("abcde"))),
        random_split(PAIRS, [0.3, 0.7], generator=torch.Generator().manual_seed(0))[0],
        [3, 1, 2],
    ],
    ids=["TensorDataset", "Subset", "ConcatDataset", "StackDataset", "StackDataset of strings", "split", "list"],
)
def test_torch_datasets(make: MakeFeeder, dataset: Any) -> None:
    """torch's datasets, also those with __getitems__, give DataLoader's batches."""
    for got, wanted in zip(make(dataset, batch_size=2), DataLoader(dataset, batch_size=2), strict=True):
        assert_same(got, wanted)


# --- the dataset's environment ----------------------------------------------------------------------------------------


def test_a_dataset_is_called_in_this_process(make: MakeFeeder) -> None:
    """The dataset runs in this process: get_worker_info() is None, and changes between epochs take effect."""
    infos = []

    def item(index: int) -> int:
        infos.append(get_worker_info())
        return index + start

    start = 0
    feeder = make(Items(item, n=4), batch_size=4)
    assert next(iter(feeder)).tolist() == [0, 1, 2, 3]
    feeder.close()
    start = 10
    assert next(iter(feeder)).tolist() == [10, 11, 12, 13]
    assert set(infos) == {None}


def test_the_global_generator_does_not_change(make: MakeFeeder) -> None:
    """DataLoader draws a base seed from the global generator in every iter(); a feeder draws nothing."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(make(PAIRS, batch_size=10, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    list(DataLoader(PAIRS, batch_size=10))
    assert not torch.equal(torch.get_rng_state(), before)


# --- errors and ends --------------------------------------------------------------------------------------------------


def test_an_error_ends_the_iterator(make: MakeFeeder) -> None:
    """Unlike DataLoader, which goes on after an error, the first failing sample ends the epoch."""

    def item(index: int) -> int:
        if index in (5, 9):
            raise NotImplementedError
        return index

    iterator = iter(make(Items(item, n=12), batch_size=2))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ReadError, match=r"Items\[5\]") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert caught.value.index == 5
    assert list(iterator) == []


def test_threads_end_with_a_dropped_iterator(make: MakeFeeder) -> None:
    """When an iterator is dropped in mid-epoch, its threads end without close()."""
    names = ("aiofeed-engine", "aiofeed-decode")
    before = {thread for thread in threading.enumerate() if thread.name.startswith(names)}
    iterator = iter(make(FromDataset(Items(range(100)), threads=2), batch_size=2))
    for _ in range(10):
        next(iterator)
    threads = {thread for thread in threading.enumerate() if thread.name.startswith(names)} - before
    assert threads
    del iterator
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
