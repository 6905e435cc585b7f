"""What torch's DataLoader and DistributedSampler promise, shown of a Feeder; where we promise otherwise, that.

`docs/compatibility.md` is the table of both.
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

from aiofeed import CollateError, Feeder, FromDataset, Limits, ReadError

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
    """A dataset of what a list holds, or of what a function makes of an index."""

    def __init__(self, items: Any, n: int | None = None) -> None:
        self.items = items
        self.n = len(items) if n is None else n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.items(index) if callable(self.items) else self.items[index]


def assert_same(got: Any, wanted: Any) -> None:
    """Equal in value, type and dtype, all the way down."""
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
    """Batch i is samples i * batch_size and on, whatever the concurrency."""
    got = list(make(FromDataset(PAIRS, threads=4), batch_size=batch_size, limits=limits))
    assert torch.equal(torch.cat([data for data, _ in got]), DATA)
    assert torch.equal(torch.cat([labels for _, labels in got]), LABELS)
    assert [len(labels) for _, labels in got[:-1]] == [batch_size] * (len(got) - 1)


@pytest.mark.parametrize("shuffle", [True, "keyed"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_shuffled_batches_have_each_sample_once_beside_its_label(
    make: MakeFeeder, shuffle: Any, batch_size: int
) -> None:
    """Data and labels are not parted."""
    got = list(make(PAIRS, batch_size=batch_size, shuffle=shuffle))
    indices = [int(data[0, 0]) // 6 for batch, _ in got for data in batch]
    assert sorted(indices) == list(range(100)) != indices
    assert [int(label) for _, labels in got for label in labels] == [index % 7 for index in indices]


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_the_same_seed_is_the_same_order(make: MakeFeeder, shuffle: Any) -> None:
    """With any concurrency; each epoch has another order, and another seed has others."""

    def orders(seed: int, threads: int) -> list[list[int]]:
        feeder = make(FromDataset(Items(range(100)), threads=threads), batch_size=9, shuffle=shuffle, seed=seed)
        return [torch.cat(list(feeder)).tolist() for _ in range(2)]

    one = orders(42, threads=1)
    assert orders(42, threads=3) == one
    assert one[0] != one[1]
    assert orders(50, threads=1)[0] not in one


def test_iterators_of_several_feeders_in_turns(make: MakeFeeder) -> None:
    """Two loaders over one dataset do not mix, and may be dropped in mid-epoch."""
    one, other = iter(make(PAIRS, batch_size=2)), iter(make(PAIRS, batch_size=3))
    for step in range(3):
        assert torch.equal(next(one)[0], DATA[2 * step : 2 * step + 2])
        assert torch.equal(next(other)[0], DATA[3 * step : 3 * step + 3])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_feeder_turns_into_a_list(make: MakeFeeder, kind: type) -> None:
    """list() and tuple() call len() and iter() alike."""
    feeder = make(Items(range(20)), batch_size=2)
    assert_same(kind(feeder), kind(torch.tensor([i, i + 1]) for i in range(0, 20, 2)))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_slow_sample(in_order: bool) -> None:
    """In order the others wait for it; out of order they do not, and it comes last."""
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
def test_len_is_what_comes(make: MakeFeeder, options: dict[str, Any], wanted: int) -> None:
    """By the sampler's length where there is one; floor or ceil by drop_last."""
    feeder = make(PAIRS, **options)
    assert len(feeder) == wanted == len(list(feeder)) == len(DataLoader(PAIRS, **options))


def test_a_dataset_that_grows_is_as_long_as_it_was(make: MakeFeeder) -> None:
    """len() is fixed when the feeder is made, since positions, ranks and states depend on it."""
    items = [torch.ones(4) for _ in range(4)]
    feeder = make(items, batch_size=1)
    items.append(torch.ones(4))
    assert len(feeder) == len(list(feeder)) == 4


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_a_plain_iterable_is_a_sampler(make: MakeFeeder) -> None:
    """range(2, 12): those samples, in that order."""
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
def test_torchs_samplers_give_what_they_give(make: MakeFeeder, kind: str, own_generator: bool) -> None:
    """Epoch by epoch the indices that the sampler would have given alone, seeded alike."""

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
    ("options", "error", "told"),
    [
        ({"sampler": range(3), "shuffle": True}, ValueError, "sampler= decides the order"),
        ({"batch_sampler": [[0, 1]]}, TypeError, "batch_sampler.*sampler= and batch_size="),
        ({"batch_size": None}, TypeError, "batch_size must be an int, got None"),
        ({"num_workers": 2}, TypeError, r"num_workers.*FromDataset\(dataset, threads=2\)"),
        ({"timeout": 3}, TypeError, "timeout"),
        ({"worker_init_fn": print}, TypeError, "no worker processes"),
        ({"multiprocessing_context": "spawn"}, TypeError, "no worker processes"),
        ({"persistent_workers": True}, TypeError, "as long as the feeder"),
        ({"prefetch_factor": 3}, TypeError, r"Limits\(prefetch_batches=3\)"),
        ({"generator": torch.Generator()}, TypeError, "seed="),
        ({"pin_memory": True}, TypeError, "memory is pinned if"),
    ],
)
def test_arguments_that_make_no_sense_name_ours(
    make: MakeFeeder, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    """Each refusal says what stands in the argument's place."""
    with pytest.raises(error, match=told):
        make(PAIRS, **{"batch_size": 2, **options})


# --- DistributedSampler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "world_size"), [(10, 3), (9, 3), (2, 5), (100, 7)])
def test_a_rank_reads_what_distributed_sampler_gives_it(
    make: MakeFeeder, n: int, world_size: int, drop_last: bool, shuffle: bool
) -> None:
    """Padding, cutting, and more ranks than samples included."""
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
    """Three ranks are 0, 1 and 2."""
    with pytest.raises(ValueError, match="0 <= rank < world_size"):
        make(PAIRS, batch_size=2, shard=(rank, 3))


@pytest.mark.parametrize("by", ["shard", "sampler"])
def test_dropping_repeats_nothing(make: MakeFeeder, by: str) -> None:
    """Nine samples, four ranks, batches of two: no sample twice, though the sampler had padded its list."""
    seen: list[int] = []
    for rank in range(4):
        options: dict[str, Any] = (
            {"shard": (rank, 4)} if by == "shard" else {"sampler": DistributedSampler(range(9), 4, rank)}
        )
        feeder = make(Items(range(9)), batch_size=2, drop_last=True, **options)
        seen += torch.cat(list(feeder)).tolist()
    assert len(seen) == len(set(seen)) == 8


def test_without_padding_each_sample_comes_once(make: MakeFeeder) -> None:
    """pad=False, which DistributedSampler has not: for evaluation, at the price of uneven ranks."""
    feeders = [make(Items(range(10)), batch_size=2, pad=False, shard=(rank, 4)) for rank in range(4)]
    assert sorted(int(value) for feeder in feeders for batch in feeder for value in batch) == list(range(10))
    assert [len(feeder) for feeder in feeders] == [2, 2, 1, 1]


# --- what a batch is --------------------------------------------------------------------------------------------------


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
def test_batches_are_default_collates(make: MakeFeeder, kind: str) -> None:
    """Same values, types and dtypes as DataLoader's, for every kind of sample."""
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
def test_what_does_not_fit_together_is_an_error(make: MakeFeeder, items: list[Any]) -> None:
    """Where DataLoader raises, a CollateError."""
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
    """A class of the user's own, or torch's PackedSequence."""
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
def test_torchs_datasets_go_in_as_they_are(make: MakeFeeder, dataset: Any) -> None:
    """__getitems__ and all, with DataLoader's batches."""
    for got, wanted in zip(make(dataset, batch_size=2), DataLoader(dataset, batch_size=2), strict=True):
        assert_same(got, wanted)


# --- the dataset's surroundings ---------------------------------------------------------------------------------------


def test_a_dataset_is_called_in_this_process(make: MakeFeeder) -> None:
    """There is no worker: get_worker_info() is None, and what is changed between epochs is seen."""
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


def test_the_global_generator_is_left_alone(make: MakeFeeder) -> None:
    """DataLoader draws a base seed from it in every iter(); a feeder draws nothing."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(make(PAIRS, batch_size=10, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    list(DataLoader(PAIRS, batch_size=10))
    assert not torch.equal(torch.get_rng_state(), before)


# --- errors and ends --------------------------------------------------------------------------------------------------


def test_an_error_ends_the_iterator(make: MakeFeeder) -> None:
    """DataLoader raises at each bad batch and goes on; here the first, in order, ends the epoch and names itself."""

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
    """Left at its tenth batch and dropped, an iterator's threads end without close()."""
    names = ("aiofeed-engine", "aiofeed-decode")
    before = {thread for thread in threading.enumerate() if thread.name.startswith(names)}
    iterator = iter(make(PAIRS, batch_size=2))
    for _ in range(10):
        next(iterator)
    threads = {thread for thread in threading.enumerate() if thread.name.startswith(names)} - before
    assert threads
    del iterator
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
