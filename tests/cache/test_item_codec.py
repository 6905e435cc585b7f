"""Caches with a ``Dataset``: its items are requested once, and batches equal those without a cache."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiofeed import DiskCache, FailurePolicy, Feeder, FromDataset, HostCache, Limits
from aiofeed.cache.sample_codec import item_layout, item_parts
from aiofeed.errors import CacheError, DeviceCopyError
from aiofeed.kernel.feeder.pipeline import StreamingPipeline
from aiofeed.resident.device_cache import HostRows
from aiofeed.resident.pipeline import ResidentPipeline
from tests.support.epochs_beside import same_after
from tests.support.examples import examples
from tests.support.number_decoders import CountedNumbers, tensor
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

LATENCIES = ("random", "late", "early")
DEVICES = pytest.mark.parametrize("kind", [None, *LATENCIES])
CACHES = pytest.mark.parametrize("cache", ["device", "host"])
ALL_CACHES = pytest.mark.parametrize("cache", ["device", "host", "disk"])

Pair = namedtuple("Pair", "image label")
MEMORY = np.arange(200, dtype=np.float32).reshape(50, 4)


def image(index: int) -> torch.Tensor:
    """A tensor that is not contiguous."""
    return (torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3) + index).permute(2, 0, 1)


def mapped(index: int) -> Any:
    """A row of a memory-mapped file."""
    file = MAPPED.joinpath("rows")
    if not file.exists():
        MEMORY.tofile(file)
    return np.memmap(file, np.float32, "c", shape=MEMORY.shape)[index], index


MAPPED = Path()

ITEMS: dict[str, Any] = {
    "tensor": lambda index: torch.arange(5) + index,
    "pair": lambda index: (image(index), index),
    "list": lambda index: [np.full((2, 3), index, np.int16), index / 3],
    "int": lambda index: index,
    "float": lambda index: float("nan") if index % 5 == 0 else index / 7,
    "namedtuple": lambda index: Pair(image(index), {"id": index, "even": index % 2 == 0}),
    "dict": lambda index: {"z": torch.tensor(index), "a": [index, (float(index), bool(index % 3))], 7: np.zeros(3)},
    "ordered": lambda index: OrderedDict(b=index, a=torch.tensor([index]), e=Pair((index,), [])),
    "scalars": lambda index: (np.float32(index), np.int8(index), np.bool_(index % 2), np.float64(index / 3)),
    "odd": lambda index: (torch.full((3,), index, dtype=torch.bfloat16), torch.full((2,), complex(index, 1))),
    "wide": lambda index: (np.full(2, complex(index, 1)), np.uint16(index), np.array(index, np.uint8)),
    "empty": lambda index: (torch.zeros(2, 0, 3), index, np.zeros(0, np.int32)),
    "mapped": mapped,
}


@pytest.fixture(autouse=True)
def _mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MAPPED", tmp_path)


def cache_of(kind: str) -> Any:
    return DiskCache(MAPPED / "items.cache") if kind == "disk" else kind


class Items:
    """A Dataset that counts requests and concurrent calls; items in ``bad`` raise."""

    def __init__(self, n: int = 22, item: str | Any = "pair", bad: frozenset[int] = frozenset()) -> None:
        self.n = n
        self.item = ITEMS[item] if isinstance(item, str) else item
        self.bad = bad
        self.reads: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.reads[index] += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            if index in self.bad:
                raise ValueError("bad")
            return self.item(index)
        finally:
            with self.lock:
                self.inside -= 1


class Many(Items):
    """The same with ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def flat(batch: Any) -> Any:
    """The contents of a batch, comparable by ``==``: types, dtypes, strides and bytes."""
    if isinstance(batch, torch.Tensor):
        there = batch.cpu()
        data = there.contiguous().view(-1).view(torch.uint8) if there.numel() else there
        return [str(there.dtype), list(batch.shape), list(batch.stride()), data.flatten().tolist()]
    if isinstance(batch, dict):
        return [type(batch).__name__, *[(name, flat(value)) for name, value in batch.items()]]
    if isinstance(batch, list | tuple):
        return [type(batch).__name__, *[flat(value) for value in batch]]
    return batch


def device_of(kind: str | None, **options: Any) -> SimulatedDevice | None:
    return None if kind is None else SimulatedDevice(latency=kind, **options)  # type: ignore[arg-type]


@DEVICES
@CACHES
@pytest.mark.parametrize("item", ITEMS)
def test_batches_equal_those_without_a_cache(kind: str | None, cache: Any, item: str) -> None:
    """They are equal in bytes, dtypes, strides, structure and order of keys; each item is requested once."""
    dataset = Items(item=item)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    plain: Feeder[Any] = Feeder(Items(item=item), device=device_of(kind), **options)
    feeder: Feeder[Any] = Feeder(dataset, cache=cache, device=device_of(kind), **options)
    with plain, feeder:
        for epoch in range(3):
            assert [flat(batch) for batch in feeder] == [flat(batch) for batch in plain]
            assert isinstance(feeder._session.pipeline, ResidentPipeline) == (epoch > 0 and cache == "device")
    assert dataset.reads == Counter(range(22))


def test_batches_are_those_of_default_collate() -> None:
    """This holds for the first epoch and for resident ones."""
    for name, item in ITEMS.items():
        with Feeder(Items(6, name), batch_size=3, cache="device") as feeder:
            expected = torch.utils.data.default_collate([item(index) for index in range(3)])
            for _ in range(2):
                assert flat(next(iter(list(feeder)))) == flat(expected), name


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    item=st.sampled_from(["a file", *(name for name in ITEMS if name != "mapped")]),
    many=st.booleans(),
    threads=st.sampled_from([1, 3]),
    shuffle=st.sampled_from([False, True, "keyed"]),
    drop_last=st.booleans(),
    pad=st.booleans(),
    rank_of=st.sampled_from([(0, 1), (0, 2), (1, 3)]),
    simulated=st.booleans(),
    cache=st.sampled_from(["device", "host", HostCache(400)]),
    stops=st.lists(st.integers(0, 12), min_size=2, max_size=6),
)
@settings(max_examples=examples(25), deadline=None)
def test_epochs_that_are_left_resumed_and_set_equal_those_without_a_cache(
    n: int,
    batch_size: int,
    item: str,
    many: bool,
    threads: int,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
    rank_of: tuple[int, int],
    simulated: bool,
    cache: Any,
    stops: list[int],
) -> None:
    """Epochs are left, resumed from a state or chosen by number, for every shard and with any items cached."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "pad": pad,
        "shard": rank_of,
        "limits": Limits(memory_bytes=200),
    }
    if item == "a file":
        source: Any = CountedNumbers(n)
        other: Any = CountedNumbers(n)
        options["decode"] = tensor
    else:
        other = (Many if many else Items)(n, item)
        source = FromDataset((Many if many else Items)(n, item), threads=threads)
    cached: Feeder[Any] = Feeder(source, cache=cache, device=SimulatedDevice() if simulated else None, **options)
    plain: Feeder[Any] = Feeder(other, **options)
    with cached, plain:
        for step, stop in enumerate(stops):
            same_after(step, stop, cached, plain, flat)


@CACHES
@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_threads_call_the_dataset_than_it_allows(cache: Any, threads: int) -> None:
    """The limit includes the calls that learn the layout."""
    dataset = Items(60)
    with Feeder(FromDataset(dataset, threads=threads), batch_size=3, cache=cache) as feeder:
        for _ in range(2):
            assert len(list(feeder)) == 20
    assert dataset.most <= threads


@DEVICES
def test_out_of_order(kind: str | None) -> None:
    """Every epoch has all samples, and a state the samples that were not returned."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "in_order": False}
    feeder: Feeder[Any] = Feeder(Items(30, "int"), cache="device", device=device_of(kind), **options)
    with feeder:
        for stop in (3, 8, 2, 5, 8):
            found = [batch for batch, _ in zip(feeder, range(stop), strict=False)]
            feeder.load_state_dict(feeder.state_dict())
            found += list(feeder) if stop < 8 else []
            seen = [int(number) for batch in found for number in batch.cpu().tolist()]
            assert len(set(seen)) == len(seen)
            assert len(seen) >= 26


@DEVICES
@pytest.mark.parametrize("many", [False, True])
def test_a_sampler_is_respected(kind: str | None, many: bool) -> None:
    """Repeats are returned, epochs are resident once all items are cached, and none is requested again."""
    order = [3, 1, 3, 5, 8, 8, 8, 2]
    dataset = (Many if many else Items)()
    feeder: Feeder[Any] = Feeder(dataset, batch_size=3, sampler=order, cache="device", device=device_of(kind))
    plain: Feeder[Any] = Feeder(Items(), batch_size=3, sampler=order)
    with feeder, plain:
        for epoch in range(3):
            assert [flat(batch) for batch in feeder] == [flat(batch) for batch in plain]
            assert isinstance(feeder._session.pipeline, ResidentPipeline) == (epoch > 0)
        before = Counter(dataset.reads)
        list(feeder)
        assert dataset.reads == before


@DEVICES
def test_a_rank_streams_items_that_are_new_to_it(kind: str | None) -> None:
    """Over several epochs each rank requests every item once."""
    dataset = Items(40)
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "shard": (1, 2)}
    cached: Feeder[Any] = Feeder(dataset, cache="device", device=device_of(kind), **options)
    plain: Feeder[Any] = Feeder(Items(40), **options)
    with cached, plain:
        for _ in range(12):
            assert [flat(batch) for batch in cached] == [flat(batch) for batch in plain]
        assert isinstance(cached._session.pipeline, ResidentPipeline)
    assert dataset.reads - Counter([0]) == Counter(range(1, 40)) + (
        Counter([0]) if dataset.reads[0] == 2 else Counter()
    )


@pytest.mark.parametrize("kind", [None, "random"])
@CACHES
@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("decode_timeout_s", [None, 30.0])
@pytest.mark.parametrize("many", [False, True])
def test_samples_that_fail(
    kind: str | None, cache: Any, action: Any, decode_timeout_s: float | None, many: bool
) -> None:
    """They fail in every epoch as without a cache, and the others are requested once."""
    policy = FailurePolicy(action, max_failures=20, decode_timeout_s=decode_timeout_s)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "on_error": policy}
    bad = frozenset({0, 7, 11})
    dataset = (Many if many else Items)(22, bad=bad)
    cached: Feeder[Any] = Feeder(dataset, cache=cache, device=device_of(kind), **options)
    plain: Feeder[Any] = Feeder(Items(22, bad=bad), **options)
    with cached, plain:
        first: dict[int, int] = {}
        for _ in range(4):
            assert [flat(batch) for batch in cached] == [flat(batch) for batch in plain]
            assert cached.statistics().failures == plain.statistics().failures
            good = {index: reads for index, reads in dataset.reads.items() if index not in bad}
            # An item that replaces another may be requested for its own batch at the same time.
            first = first or good
            assert good == first
        assert {failure.index for failure in cached.failures} == bad


@ALL_CACHES
def test_an_item_that_takes_too_long(cache: str) -> None:
    """It fails as without a cache, although its thread still runs, and the others are cached."""
    late = threading.Event()

    def item(index: int) -> int:
        if index == 0 and not late.wait(20):
            raise AssertionError
        return index

    policy = FailurePolicy("skip", decode_timeout_s=0.05, max_failures=20)
    with Feeder(Items(9, item), batch_size=3, cache=cache_of(cache), on_error=policy) as feeder:
        found = [batch.tolist() for batch in feeder]
        late.set()
    assert found[0] == [1, 2]
    assert found[2] == [6, 7, 8]
    assert {failure.index for failure in feeder.failures} == {0}


@DEVICES
def test_if_the_first_items_all_fail_an_epoch_runs_without_the_cache(
    kind: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout stays unknown, a log line says so, and the next epoch fills the cache."""
    dataset = Items(22, bad=frozenset(range(9)))
    feeder: Feeder[Any] = Feeder(
        dataset,
        batch_size=4,
        cache="device",
        on_error=FailurePolicy("replace", max_failures=20),
        device=device_of(kind),
    )
    with feeder, caplog.at_level(logging.WARNING, "aiofeed"):
        list(feeder)
        assert "first 8 samples" in caplog.text
        dataset.bad = frozenset()
        plain = [flat(batch) for batch in Feeder(Items(22), batch_size=4)]
        for _ in range(3):
            assert [flat(batch) for batch in feeder] == plain
        assert isinstance(feeder._session.pipeline, ResidentPipeline)


@DEVICES
def test_transform_gets_the_same_batches_as_when_streaming(kind: str | None) -> None:
    """The cached items are the Dataset's."""
    options: dict[str, Any] = {"batch_size": 4, "transform": lambda batch: [batch[0] * 2, batch[1]]}
    cached: Feeder[Any] = Feeder(Items(), cache="device", device=device_of(kind), **options)
    with cached, Feeder(Items(), device=device_of(kind), **options) as plain:
        for _ in range(3):
            assert [flat(batch) for batch in cached] == [flat(batch) for batch in plain]


@DEVICES
@ALL_CACHES
def test_writing_into_a_batch_changes_nothing_else(kind: str | None, cache: Any) -> None:
    """Other batches and later epochs stay the same, and batches stay over epochs."""
    feeder: Feeder[Any] = Feeder(Items(), batch_size=4, shuffle=True, cache=cache_of(cache), device=device_of(kind))
    plain: Feeder[Any] = Feeder(Items(), batch_size=4, shuffle=True)
    with feeder, plain:
        batches = []
        for _ in range(4):
            for (x, y), expected in zip(feeder, plain, strict=True):
                assert flat([x, y]) == flat(expected)
                batches.append((x.clone(), x, y))
                y.fill_(99)
        assert all(flat(copy) == flat(x) for copy, x, _ in batches)


@DEVICES
@ALL_CACHES
def test_a_dataset_may_reuse_the_memory_of_its_items(kind: str | None, cache: Any) -> None:
    """Cached items do not change when it does."""
    memory = np.zeros(3)

    def item(index: int) -> np.ndarray:
        memory[:] = index
        return memory

    order = [5, 4, 3, 2, 1, 0]
    feeder: Feeder[Any] = Feeder(
        Items(6, item), batch_size=2, sampler=order, cache=cache_of(cache), device=device_of(kind)
    )
    with feeder:
        for _ in range(3):
            assert [row[0] for batch in feeder for row in batch.cpu().tolist()] == order


@DEVICES
@ALL_CACHES
def test_random_items_stay_those_of_the_first_epoch(kind: str | None, cache: Any) -> None:
    """All epochs have the items that the first one drew."""

    def item(index: int) -> torch.Tensor:
        return torch.rand(3)

    feeder: Feeder[Any] = Feeder(Items(9, item), batch_size=2, cache=cache_of(cache), device=device_of(kind))
    with feeder:
        first = [flat(batch) for batch in feeder]
        for _ in range(3):
            assert [flat(batch) for batch in feeder] == first


@DEVICES
@ALL_CACHES
@pytest.mark.parametrize("threads", [1, 3])
def test_repeated_random_items_are_not_mixed(kind: str | None, cache: Any, threads: int) -> None:
    """If an item is made twice at the same time, all parts of one are cached; with one thread those of the first."""

    def item(index: int) -> Any:
        drawn = torch.rand(4)
        return drawn, {"same": drawn.clone()}, index

    order = [5, 5, 3, 5, 1, 3, 3, 1, 1, 1, 2, 5, 5, 0, 0, 0]
    source = FromDataset(Items(9, item), threads=threads)
    feeder: Feeder[Any] = Feeder(source, batch_size=4, sampler=order, cache=cache_of(cache), device=device_of(kind))
    first: dict[int, tuple[float, ...]] = {}
    with feeder:
        for epoch in range(4):
            seen: dict[int, set[tuple[float, ...]]] = {}
            for drawn, other, indices in feeder:
                assert flat(drawn) == flat(other["same"])
                for index, row in zip(indices.cpu().tolist(), drawn.cpu().tolist(), strict=True):
                    first.setdefault(index, tuple(row))
                    seen.setdefault(index, set()).add(tuple(row))
            assert not epoch or all(len(rows) == 1 for rows in seen.values())
            assert not epoch or threads > 1 or seen == {index: {row} for index, row in first.items()}


def test_an_item_that_two_threads_cache_is_not_mixed() -> None:
    """A second ``put`` during the first changes nothing."""
    store = HostRows(2, 1, lambda: 1 << 20)
    layout = item_layout((1, 2))
    store.open(layout)
    one, other = (item_parts(item, layout) for item in ((1, 1), (2, 2)))

    class Interrupted(list[Any]):
        def __iter__(self) -> Any:
            yield self[0]
            store.put(0, other, layout)
            yield self[1]

    store.put(0, Interrupted(one), layout)
    assert store.has(np.array([0])).all()
    assert [part.item() for part in store.parts(0)] == [1, 1]


@pytest.mark.parametrize("at", range(1, 14))
def test_a_copy_that_fails(at: int) -> None:
    """Samples that are on the device in part are not cached, and the next epoch is right."""
    backend = SimulatedDevice(copy_fails_at=at)
    plain = [flat(batch) for batch in Feeder(Items(item="dict"), batch_size=4)]
    with Feeder(Items(item="dict"), batch_size=4, cache="device", device=backend) as feeder:
        with pytest.raises(DeviceCopyError, match="simulated device error"):
            list(feeder)
        for _ in range(3):
            assert [flat(batch) for batch in feeder] == plain
        assert isinstance(feeder._session.pipeline, ResidentPipeline)


# An item, one that differs from it, and the error message for the second.
UNLIKE: list[tuple[Any, Any, str]] = [
    (
        torch.zeros(3),
        torch.zeros(2),
        r"item is tensor float32 \[2\], and that of the others is tensor float32 \[3\]",
    ),
    (torch.zeros(3), torch.zeros(3).double(), r"tensor float64 \[3\].*tensor float32 \[3\]"),
    (torch.zeros(3), np.zeros(3, np.float32), r"array float32 \[3\].*tensor float32 \[3\]"),
    (torch.zeros(3), torch.zeros(3, requires_grad=True), r"\(requires grad\)"),
    ((1, 2), (1, 2.5), r"item\[1\] is a float, 2\.5, and that of the others is int"),
    ((1, 2), (1, True), r"item\[1\] is a bool, True.*int"),
    ((1, 2), (1, 2, 3), "item is a tuple of 3, .* a tuple of 2"),
    ((1, 2), [1, 2], "item is a list of 2, .* a tuple of 2"),
    (Pair(1, 2), (1, 2), "item is a tuple of 2, .* a Pair of 2"),
    ({"a": 1, "b": 2}, {"a": 1, "c": 2}, r"keys \['a', 'c'\].*keys \['a', 'b'\]"),
    ({"a": 1, "b": 2}, {"b": 1, "a": 2, "c": 3}, r"keys \['b', 'a', 'c'\].*keys \['a', 'b'\]"),
    (OrderedDict(a=1, b=2), OrderedDict(b=1, a=2), r"keys \['b', 'a'\].*keys \['a', 'b'\]"),
    ({"a": [1, (2, 3)]}, {"a": [1, (2, "x" * 99)]}, r"item\['a'\]\[1\]\[1\] is a str, 'x{39}\.\.\., .* int"),
    ((1, 2), (1, 2**70), r"item\[1\] is a int, 1180.*too"),
    ((1, 2), (1, None), r"item\[1\] is None"),
]


def reordered(index: int) -> dict[str, Any]:
    """Nested dicts whose order of keys depends on the index."""
    entries = [("image", image(index)), ("label", index), ("meta", {"id": index, "x": index / 3})]
    at = index % 3
    item = dict(entries[at:] + entries[:at])
    item["meta"] = dict(list(item["meta"].items())[:: -1 if index % 2 else 1])
    return item


@DEVICES
@CACHES
@pytest.mark.parametrize("kind_of_items", [Items, Many])
def test_the_keys_of_a_dict_may_be_in_any_order(kind: str | None, cache: Any, kind_of_items: type[Items]) -> None:
    """Values belong to their keys in every epoch, and all batches have one order of keys, that of some item."""
    dataset = kind_of_items(item=reordered)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    with (
        Feeder(Items(item=reordered), **options) as plain,
        Feeder(dataset, cache=cache, device=device_of(kind), **options) as feeder,
    ):
        for _ in range(3):
            orders = set()
            for batch, expected in zip(feeder, plain, strict=True):
                orders.add((*batch, *batch["meta"]))
                assert set(batch) == set(expected)
                assert all(flat(batch[name]) == flat(expected[name]) for name in ("image", "label"))
                assert all(flat(batch["meta"][name]) == flat(expected["meta"][name]) for name in ("id", "x"))
            assert len(orders) == 1
    assert dataset.reads == Counter(range(22))


def test_a_collate_fn_gets_dicts_with_keys_in_one_order() -> None:
    """It is the order of the item cached first, also in the first epoch."""
    seen: list[Any] = []

    def collate(samples: list[Any]) -> int:
        seen.extend((sample["label"], list(sample)) for sample in samples)
        return len(samples)

    with Feeder(Items(item=reordered), batch_size=4, cache="host", collate_fn=collate) as feeder:
        for _ in range(2):
            list(feeder)
    assert {label for label, _ in seen} == set(range(22))
    assert all(keys == ["image", "label", "meta"] for _, keys in seen)


@DEVICES
@pytest.mark.parametrize("case", range(len(UNLIKE)))
def test_items_that_differ_are_not_cached_on_a_device(kind: str | None, case: int) -> None:
    """The error names the item, its difference to the others and what to change, with every policy."""
    others, odd, message = UNLIKE[case]
    dataset = Items(12, lambda index: odd if index == 9 else others)
    feeder: Feeder[Any] = Feeder(dataset, batch_size=4, cache="device", device=device_of(kind), on_error="skip")
    with feeder, pytest.raises(CacheError, match=r"'Items\[9\]' \(index 9\).*" + message + ".*leave cache= out"):
        list(feeder)


NOT_CACHED: list[tuple[Any, str]] = [
    ({"a": {"b": object()}}, r"item\['a'\]\['b'\] is a object"),
    (torch.zeros(2, requires_grad=True), r"item is tensor float32 \[2\] \(requires grad\)"),
    (torch.zeros(2).to_sparse(), r"item is tensor float32 \[2\] \(torch.sparse_coo\)"),
    (torch.nn.Parameter(torch.zeros(2)), r"item is parameter float32 \[2\]"),
    (Counter("a"), r"item is a Counter with the keys \['a'\]"),
]
NOT_ON_A_DEVICE: list[tuple[Any, str]] = [
    ("text", r"item is a str, 'text'"),
    ((1, "text"), r"item\[1\] is a str, 'text'"),
    (np.zeros(2, "U3"), r"item is array <U3 \[2\]"),
    (np.zeros(2, np.longdouble), r"item is array float128 \[2\]|item is array longdouble \[2\]"),
    (np.datetime64("2020-01-01"), "item is a datetime64"),
    ((), "no elements: it is a tuple of 0"),
    (torch.zeros(0), r"no elements: it is tensor float32 \[0\]"),
]


@DEVICES
@pytest.mark.parametrize(
    ("cache", "odd", "message"),
    [(cache, *each) for cache in ("device", "host", "disk") for each in NOT_CACHED]
    + [("device", *each) for each in NOT_ON_A_DEVICE],
)
def test_items_that_cannot_be_cached(kind: str | None, cache: Any, odd: Any, message: str) -> None:
    """An error before the first batch names the item and its part; a device caches less than others."""
    feeder: Feeder[Any] = Feeder(Items(12, lambda _: odd), batch_size=4, cache=cache_of(cache), device=device_of(kind))
    with feeder, pytest.raises(CacheError, match=r"'Items\[0\]' \(index 0\) cannot be cached: .*" + message):
        next(iter(feeder))


@pytest.mark.parametrize("latency", LATENCIES)
def test_items_that_do_not_fit_on_the_device_are_an_error_with_the_figures(latency: Any) -> None:
    """It comes before the first batch, counts all parts of an item, and no device memory stays allocated."""
    backend = SimulatedDevice(latency=latency, memory_bytes=4096)
    feeder: Feeder[Any] = Feeder(Items(1000), batch_size=8, cache="device", device=backend, on_error="skip")
    figures = r"1,000 samples of 32 bytes each \(\(tensor uint8 \[3, 4, 2\], int\)\) take 31.2 KiB, and two batches 512"
    with pytest.raises(CacheError, match=figures) as error:
        next(iter(feeder))
    assert str(error.value).endswith(
        'beside them; cache="host" caches as many as fit into host memory, and DiskCache(path) caches them in a file'
    )
    feeder.close()
    assert backend.allocated_bytes == 0


def test_items_that_do_not_fit_into_host_memory_are_an_error_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the limit is free host memory; ``cache="host"`` caches the items that fit."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.free_memory", lambda *_: 700)
    with Feeder(Items(22), batch_size=4, cache="device") as feeder, pytest.raises(CacheError, match="700 bytes free"):
        next(iter(feeder))
    dataset = Items(22)
    with Feeder(dataset, batch_size=4, cache="host") as feeder, Feeder(Items(22), batch_size=4) as plain:
        for _ in range(3):
            assert [flat(batch) for batch in feeder] == [flat(batch) for batch in plain]
    assert sum(dataset.reads.values()) == 22 + 2 * (22 - 10)


def test_unsupported_arguments_are_refused_with_an_alternative() -> None:
    """They are refused when the feeder is made."""
    options: dict[str, Any] = {"batch_size": 2}
    with pytest.raises(ValueError, match="collate_fn"):
        Feeder(Items(), cache="device", collate_fn=list, **options)
    with pytest.raises(ValueError, match="one feeder for each"):
        Feeder(Items(), cache="device", device=[SimulatedDevice(), SimulatedDevice(index=1)], **options)
    with pytest.raises(ValueError, match="static_batches"):
        Feeder(Items(), cache="device", static_batches=True, drop_last=True, **options)
    dataset = torch.utils.data.TensorDataset(torch.zeros(4))
    for cache in ("host", "device"):
        with pytest.raises(ValueError, match=r"DiskCache\(path\), which processes share"):
            Feeder(dataset, cache=cache, engine="process", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["host", "disk"])
def test_a_collate_fn_gets_the_items_unchanged(cache: str) -> None:
    """Types, dtypes and structure are the Dataset's from the first epoch on."""
    for name, item in ITEMS.items():
        if name == "mapped":
            continue  # it gets an array in place of a memmap
        kept = cache if cache == "host" else DiskCache(MAPPED / name)
        seen: list[Any] = []

        def collate(samples: list[Any], seen: list[Any] = seen) -> torch.Tensor:
            seen.extend(samples)
            return torch.zeros(len(samples))

        dataset = Items(6, name)
        with Feeder(dataset, batch_size=3, cache=kept, collate_fn=collate) as feeder:
            for _ in range(2):
                assert len(list(feeder)) == 2
        expected = [described(item(index)) for index in range(6)]
        assert [described(sample) for sample in seen[:12]] == expected * 2  # more is read ahead
        assert dataset.reads == Counter(range(6))


def described(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return ["tensor", item.shape, item.dtype, item.flatten().tolist()]
    if isinstance(item, np.ndarray):
        return ["array", str(item.dtype), item.shape, item.tobytes()]
    if isinstance(item, dict):
        return [type(item), *[(name, described(value)) for name, value in item.items()]]
    if isinstance(item, tuple | list):
        return [type(item), *[described(value) for value in item]]
    return [type(item), repr(item)]


@DEVICES
def test_resident_epochs_copy_nothing_from_the_host_but_the_indices(kind: str | None) -> None:
    if kind is None:
        pytest.skip("nothing is copied")
    backend = SimulatedDevice(latency=kind)  # type: ignore[arg-type]
    with Feeder(Items(item="dict"), batch_size=4, shuffle=True, cache="device", device=backend) as feeder:
        list(feeder)
        list(feeder)
        before = backend.copies
        list(feeder)
        assert backend.copies - before == 1


@pytest.mark.parametrize("latency", LATENCIES)
def test_an_epoch_after_one_that_was_left_is_right(latency: Any) -> None:
    """Items whose copies were in flight when the epoch was left count as cached once all parts are on the device."""
    backend = SimulatedDevice(latency=latency)
    feeder: Feeder[Any] = Feeder(Items(64, "dict"), batch_size=4, shuffle=True, cache="device", device=backend)
    plain: Feeder[Any] = Feeder(Items(64, "dict"), batch_size=4, shuffle=True)
    with feeder, plain:
        for stop in (1, 5, 0, 9, 16, 16):
            for ours, theirs in zip(range(stop), zip(feeder, plain, strict=True), strict=False):
                assert flat(theirs[0]) == flat(theirs[1]), ours


@DEVICES
def test_memory_is_freed_with_the_feeder(kind: str | None) -> None:
    """The cache survives ``close``, so no item is requested again, and its memory is freed with the feeder."""
    dataset = Items()
    backend = device_of(kind)
    feeder: Feeder[Any] = Feeder(dataset, batch_size=4, cache="device", device=backend)
    with feeder:
        first = [flat(batch) for batch in feeder]
    with feeder:
        assert [flat(batch) for batch in feeder] == first
    assert dataset.reads == Counter(range(22))
    del feeder
    if backend is not None:
        backend.synchronize()
        until(lambda: backend.allocated_bytes == 0)  # on a free-threaded build a thread that ends may drop the last


@CACHES
def test_a_pickled_feeder_starts_with_an_empty_cache(cache: Any) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    feeder: Feeder[Any] = Feeder(dataset, batch_size=3, cache=cache)
    with feeder:
        first = [flat(batch) for batch in feeder]
        list(feeder)
        other = pickle.loads(pickle.dumps(feeder))
    with other:
        for _ in range(2):
            assert [flat(batch) for batch in other] == first
            assert isinstance(other._session.pipeline, StreamingPipeline) == (cache == "host" or _ == 0)


@DEVICES
def test_an_epoch_begun_under_inference_mode(kind: str | None) -> None:
    """Items cached then can be trained on outside it, and more can be cached."""
    feeder: Feeder[Any] = Feeder(
        Items(item="scalars"), batch_size=4, cache="device", device=device_of(kind), limits=Limits(memory_bytes=64)
    )
    with feeder:
        for _ in range(2):
            with torch.inference_mode():
                iterator = iter(feeder)
                first = next(iterator)
            assert not first[0].is_inference()
            assert len([first, *iterator]) == 6
