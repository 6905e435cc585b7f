"""Caches of samples that differ in structure and shape: batches equal those without a cache; each is made once."""

from __future__ import annotations

import logging
import os
import random
import signal
import string
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiofeed import DiskCache, Feeder, FromDataset, HostCache, Limits
from aiofeed.cache import disk_format as cache_file
from aiofeed.cache import layout as layouts
from aiofeed.cache.disk_format import CacheFile, checksum, open_file
from aiofeed.cache.host import HostStore
from aiofeed.cache.layout import Layout, NotCacheableError, pack_record, unpack_record
from aiofeed.cache.store import PENDING
from aiofeed.errors import CacheError, CollateError
from tests.cache.test_disk import offsets
from tests.cache.test_item_codec import UNLIKE, Items
from tests.support.epochs_beside import same_after
from tests.support.examples import examples
from tests.support.number_decoders import CountedNumbers

pytestmark = pytest.mark.usefixtures("forked_workers")

Pair = namedtuple("Pair", "image label")
DTYPES = [
    *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32],
    *[torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
    *[torch.float8_e4m3fn, torch.float8_e5m2],
]
NUMPY_DTYPES = ["?", "i1", "<i4", ">i4", "u2", "f2", "f4", "f8", "c8", "S3", "U2", "M8[s]", "m8[ms]"]
STORES = pytest.mark.parametrize("kind", ["host", "disk"])


def shape_of(numbers: random.Random) -> list[int]:
    return [numbers.randrange(5) for _ in range(numbers.randrange(4))]


def leaf(numbers: random.Random) -> Any:
    """A value without parts: of every kind, dtype, and any shape."""
    kind = numbers.randrange(9)
    if kind < 3:
        shape = shape_of(numbers)
        count = int(np.prod(shape))
        dtype = numbers.choice(DTYPES)
        if dtype is torch.bool:
            return torch.tensor([numbers.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
        memory = torch.frombuffer(bytearray(numbers.randbytes(count * dtype.itemsize) or b"-"), dtype=torch.uint8)
        flat = memory[: count * dtype.itemsize].view(dtype) if count else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        return tensor.transpose(0, -1) if tensor.ndim > 1 and numbers.random() < 0.5 else tensor
    if kind == 3:
        shape = shape_of(numbers)
        values = np.array([numbers.randrange(2) for _ in range(int(np.prod(shape)))], np.int64)
        return values.astype(np.dtype(numbers.choice(NUMPY_DTYPES))).reshape(shape)
    if kind == 4:
        return numbers.choice([np.float32(1.5), np.int8(-3), np.bool_(1), np.str_("né"), np.datetime64("2020-01-01")])
    if kind == 5:
        return "".join(numbers.choice([*string.printable, "é", "\udc80", "🙂"]) for _ in range(numbers.randrange(6)))
    if kind == 6:
        return numbers.randbytes(numbers.randrange(70))
    if kind == 7:
        return numbers.choice([numbers.randrange(-(1 << 63) + 1, 1 << 63), numbers.random(), float("nan"), -0.0])
    return numbers.choice([None, True, False])


def structure(numbers: random.Random, depth: int = 3) -> Any:
    """A nested value, with optional keys."""
    kind = numbers.randrange(7) if depth else 0
    if kind < 2:
        return leaf(numbers)
    parts = [structure(numbers, depth - 1) for _ in range(numbers.randrange(4))]
    if kind == 2:
        return tuple(parts)
    if kind == 3:
        return parts
    if kind == 4:
        return Pair(structure(numbers, depth - 1), parts)
    keys = numbers.sample(["image", "boxes", "masks", 7, None, (1, "a"), 2.5, b"k"], len(parts))
    return (OrderedDict if kind == 5 else dict)(zip(keys, parts, strict=True))


def exact(value: Any) -> Any:
    """The contents of a value, comparable by ``==``: types, dtypes, shapes, order of keys and bytes."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return ["tensor", str(value.dtype), list(value.shape), data]
    if isinstance(value, np.ndarray | np.generic):
        return [type(value).__name__, value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, dict):
        return [type(value).__name__, *[(exact(key), exact(part)) for key, part in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *[exact(part) for part in value]]
    return [type(value).__name__, repr(value)]


class Structures(Items):
    """A Dataset of random structures; ``alike`` of a hundred items have one layout."""

    def __init__(self, n: int, seed: int = 0, alike: int = 0, bad: frozenset[int] = frozenset()) -> None:
        super().__init__(n, self.made, bad)
        self.seed, self.alike = seed, alike

    def made(self, index: int) -> Any:
        numbers = random.Random(self.seed * 1000 + index)
        if numbers.randrange(100) < self.alike:
            return {"image": torch.full((3, 2), index, dtype=torch.uint8), "id": index}
        return structure(numbers)


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def cache_of(kind: str, path: Path, most: int | None = None) -> Any:
    return HostCache(most) if kind == "host" else DiskCache(path, most)


def run(dataset: Any, cache: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of some epochs."""
    options = {"batch_size": 4, "collate_fn": as_list} | options
    with Feeder(dataset, cache=cache, **options) as feeder:
        return [exact(batch) for _ in range(epochs) for batch in feeder]


def named(dataset: Any, threads: int = 1) -> FromDataset:
    return FromDataset(dataset, threads, fingerprint="structures")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ragged.cache"


@given(st.integers(0, 1 << 40))
@settings(max_examples=300, deadline=None)
def test_a_record_is_the_sample(seed: int) -> None:
    """Types, dtypes, shapes and the order of keys are restored, in memory of its own."""
    value = structure(random.Random(seed))
    record = pack_record(value)
    assert record.nbytes % 64 == 0
    assert exact(unpack_record(record)) == exact(value)
    assert not any(np.shares_memory(record, array) for array in arrays(unpack_record(record)))


def arrays(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray | torch.Tensor):
        return [value] if isinstance(value, np.ndarray) else [value.reshape(-1).view(torch.uint8).numpy()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [array for part in parts for array in arrays(part)]


@given(
    seed=st.integers(0, 1 << 20),
    kind=st.sampled_from(["host", "disk"]),
    n=st.integers(1, 40),
    alike=st.sampled_from([0, 60, 95]),
    threads=st.sampled_from([1, 3]),
    most=st.sampled_from([None, 3000, 12_000]),
    shuffle=st.sampled_from([False, True, "keyed"]),
    rank_of=st.sampled_from([(0, 1), (1, 3)]),
    stops=st.lists(st.integers(0, 12), min_size=2, max_size=5),
)
@settings(max_examples=examples(20), deadline=None)
def test_epochs_that_are_left_and_resumed_equal_those_without_a_cache(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    kind: str,
    n: int,
    alike: int,
    threads: int,
    most: int | None,
    shuffle: Any,
    rank_of: tuple[int, int],
    stops: list[int],
) -> None:
    """For random structures, mixed with equal ones or not, also if few fit, and in a later run with the same file."""
    cache = cache_of(kind, tmp_path_factory.mktemp("cache") / "file", most and most + 4096 * 2 * (kind == "disk"))
    options: dict[str, Any] = {"batch_size": 3, "shuffle": shuffle, "shard": rank_of, "collate_fn": as_list}
    plain: Feeder[Any] = Feeder(named(Structures(n, seed, alike)), **options)
    feeders = [Feeder(named(Structures(n, seed, alike), threads), cache=cache, **options)]
    with plain:
        for step, stop in enumerate(stops):
            if step == len(stops) // 2:
                feeders.append(Feeder(named(Structures(n, seed, alike), threads), cache=cache, **options))
                feeders[-1].load_state_dict(feeders[-2].state_dict())
                plain.load_state_dict(plain.state_dict())
                feeders[-2].close()
            same_after(step, stop, feeders[-1], plain, exact)
    feeders[-1].close()


@STORES
@pytest.mark.parametrize("alike", [0, 50, 95, 100])
def test_each_item_is_made_once(kind: str, alike: int, path: Path) -> None:
    """Also if a sampler repeats items, and by a later run not at all, with one file."""
    order = [*range(50), 3, 3, 49, 7, 0, 0]
    dataset = Structures(50, 4, alike)
    expected = run(Structures(50, 4, alike), None, 2, sampler=order)
    assert run(named(dataset), cache_of(kind, path), 2, sampler=order) == expected
    assert dataset.reads == Counter(range(50))
    if kind == "disk":
        later = Structures(50, 4, alike)
        assert run(named(later), DiskCache(path), 2, sampler=order) == expected
        assert later.reads == Counter()
        assert DiskCache(path).verify() == ()


@pytest.mark.parametrize(("alike", "rows"), [(100, 50), (95, 50), (0, 0)])
def test_room_for_rows_is_taken_if_the_first_items_are_alike(path: Path, alike: int, rows: int) -> None:
    """A file of equal items has rows only; one that begins with them has both; others have records only."""
    run(named(Structures(50, 7, alike)), DiskCache(path))
    file = CacheFile(str(path))
    file.describe()
    assert file.capacity == rows
    slots = [file.slot_of(index) or 0 for index in range(50)]
    assert 45 < sum(slot < cache_file.RECORD for slot in slots) < 50 or alike != 95
    assert (path.stat().st_size == file._end) == (alike == 100)


@STORES
@pytest.mark.parametrize("case", range(len(UNLIKE)))
def test_an_item_that_differs_is_cached(kind: str, case: int, path: Path) -> None:
    """It is returned unchanged with the others, unless no cache can have it: then the error names it."""
    others, odd, _ = UNLIKE[case]

    def dataset() -> Items:
        return Items(12, lambda index: odd if index == 9 else others)

    counted = dataset()
    if "requires grad" in UNLIKE[case][2] or "too" in UNLIKE[case][2]:
        with pytest.raises(CacheError, match=r"'Items\[9\]' \(index 9\) cannot be cached: item.*leave cache= out"):
            run(named(counted), cache_of(kind, path), on_error="skip")
        return
    assert run(named(counted), cache_of(kind, path), 2) == run(dataset(), None, 2)
    assert counted.reads == Counter(range(12))


# --- batches ----------------------------------------------------------------------------------------------------------


def odd_dtype(data: bytes) -> torch.Tensor:
    """Most samples are alike; in the batch of sample 9 and that of 13 others have another dtype."""
    index = int(data)
    return torch.full((2, 3), index, dtype=torch.float64 if index in (9, 12, 13) else torch.float32)


def growing(data: bytes) -> np.ndarray:
    return np.full(int(data) // 4 + 1, int(data), np.int16)


def optional(data: bytes) -> dict[str, Any]:
    index = int(data)
    return {"name": str(index), "boxes": torch.arange(index // 4 * 2)} | ({"extra": None} if index % 3 else {})


def mismatched(data: bytes) -> torch.Tensor:
    return torch.zeros(2 if int(data) == 10 else 3)


@STORES
@pytest.mark.parametrize("target", [None, lambda index: {"id": index, "half": index / 2}])
@pytest.mark.parametrize("decode", [odd_dtype, growing, optional, mismatched])
@pytest.mark.parametrize("in_order", [True, "samples"])
def test_batches_and_errors_are_those_without_a_cache(
    kind: str, target: Any, decode: Any, in_order: Any, path: Path
) -> None:
    """By the rules of ``default_collate``: batches of any common shape, promoted dtypes, and the same error message."""

    def outcome(cache: Any) -> list[Any]:
        source = CountedNumbers()
        if target is not None:
            source.target = target  # type: ignore[attr-defined]
        limits = Limits(decode_threads=1)
        seen: list[Any] = []
        with Feeder(source, decode=decode, batch_size=4, cache=cache, limits=limits, in_order=in_order) as feeder:
            for _ in range(3):
                try:
                    seen += [exact(batch) for batch in feeder]
                except CollateError as error:
                    seen.append(str(error))
        return seen

    expected = outcome(None)
    assert outcome(cache_of(kind, path)) == expected
    assert any(isinstance(batch, str) for batch in expected) == (decode in (mismatched, optional))


class Augmented:
    """A random decoder whose cached samples differ in shape."""

    def __init__(self) -> None:
        self.writable: set[bool] = set()

    def __repr__(self) -> str:
        return "Augmented()"

    def __call__(self, data: bytes, *, rng: torch.Generator) -> Any:
        return self.augment(self.decode_cached(data), rng=rng)

    def decode_cached(self, data: bytes) -> Any:
        return growing(data)

    def augment(self, cached: np.ndarray, *, rng: torch.Generator) -> Any:
        self.writable.add(cached.flags.writeable)
        return cached + torch.rand((), generator=rng).item()


@STORES
def test_random_decoders_see_the_same_with_any_cache(kind: str, path: Path) -> None:
    """Random numbers are those of the sample; ``augment`` gets an array that it cannot write to."""
    options: dict[str, Any] = {"decode": Augmented(), "seed": 3, "shuffle": True}
    expected = run(CountedNumbers(), None, 3, **options)
    options["decode"] = Augmented()
    assert run(CountedNumbers(), cache_of(kind, path), 3, **options) == expected
    assert run(CountedNumbers(), cache_of(kind, path), 3, **options) == expected
    assert options["decode"].writable == {False}


@STORES
def test_writing_into_a_sample_does_not_change_the_cache(kind: str, path: Path) -> None:
    def collate(samples: list[Any]) -> int:
        for sample in samples:
            for array in arrays(sample):
                array[...] = 0
        return sum(array.size for sample in samples for array in arrays(sample))

    cache, dataset = cache_of(kind, path), Structures(30, 2, 50)
    with Feeder(named(dataset), batch_size=4, cache=cache, collate_fn=collate) as feeder:
        for _ in range(3):
            assert sum(feeder) > 0
    if kind == "disk":
        assert run(named(Structures(30, 2, 50)), cache) == run(Structures(30, 2, 50), None)


def test_a_device_caches_samples_of_one_shape() -> None:
    """The error says so, and which caches take others."""
    dataset = Items(12, lambda index: torch.zeros(index + 1))
    message = r'cache="device" keeps samples of one shape: let the Dataset .*use cache="host" or a DiskCache'
    with Feeder(dataset, batch_size=1, cache="device") as feeder, pytest.raises(CacheError, match=message):
        list(feeder)


# --- limits -----------------------------------------------------------------------------------------------------------


@STORES
@pytest.mark.parametrize("alike", [0, 60])
def test_limits_hold(kind: str, alike: int, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The samples decoded first are cached, no more bytes are used, and one log line says how many of them fit."""
    caplog.set_level(logging.INFO, "aiofeed.cache")
    most = 5_000 + 2 * 4096 * (kind == "disk")
    dataset = Structures(100, 3, alike)
    with Feeder(named(dataset), batch_size=4, collate_fn=as_list, cache=cache_of(kind, path, most)) as feeder:
        assert [exact(batch) for _ in range(2) for batch in feeder] == run(Structures(100, 3, alike), None, 2)
        if kind == "host":
            store = feeder._config.cache
            assert 0 < store._used_bytes <= most
    assert 5 < [dataset.reads[index] for index in range(100)].count(1) < 95
    if kind == "disk":
        assert path.stat().st_size <= most
        run(named(Structures(100, 3, alike)), DiskCache(path), 2)  # the limit is that of the file
        assert path.stat().st_size <= most
    else:
        assert sum("has room for" in record.getMessage() for record in caplog.records) == 1


def test_a_record_of_any_size_is_cached_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records lie in blocks, and one that is longer than a block has its own."""
    monkeypatch.setattr("aiofeed.cache.host.BLOCK", 8)
    dataset = Structures(60, 5)
    assert run(dataset, "host", 3) == run(Structures(60, 5), None, 3)
    assert dataset.reads == Counter(range(60))


# --- damage and foreign files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [0, 70])
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_never_seen(path: Path, alike: int, seed: int) -> None:
    """An item with a damaged entry, row or record is made and written again."""
    numbers = random.Random(seed)
    run(named(Structures(40, 6, alike)), DiskCache(path))
    table, rows = offsets(path)
    data = bytearray(path.read_bytes())
    for _ in range(8):
        data[numbers.randrange(rows, len(data))] ^= 1 << numbers.randrange(8)
        data[numbers.randrange(table, table + 40 * 16)] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)
    damaged = set(DiskCache(path).verify())
    assert damaged
    dataset = Structures(40, 6, alike)
    assert run(named(dataset), DiskCache(path), 2) == run(Structures(40, 6, alike), None, 2)
    assert damaged <= set(dataset.reads)
    assert DiskCache(path).verify() == ()


def test_a_counter_that_never_reached_the_disk_overwrites_no_record(path: Path) -> None:
    """After a power failure the header may count fewer units than there are, and the end of the file may be lost."""
    with Feeder(named(Structures(40, 1)), batch_size=4, collate_fn=as_list, cache=DiskCache(path)) as feeder:
        next(iter(feeder))
    first = DiskCache(path).verify()
    with path.open("r+b") as file:
        file.seek(cache_file._USED_UNITS_AT)
        file.write(bytes(8))
    os.truncate(path, path.stat().st_size - 64)
    [lost] = set(DiskCache(path).verify()) - set(first)
    dataset = Structures(40, 1)
    assert run(named(dataset), DiskCache(path), 2) == run(Structures(40, 1), None, 2)
    assert dataset.reads[lost] == 1
    assert DiskCache(path).verify() == ()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("part", ["record", "entry", "before"])
def test_a_writer_that_is_killed_in_a_write_damages_nothing(path: Path, part: str) -> None:
    """Another process makes the item, and those that were not begun, again."""
    pid = os.fork()
    if pid == 0:
        write, calls = CacheFile.write, 0

        def killed(self: CacheFile, index: int, slot: int, data: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 20:
                if part == "record":
                    self._write(data[: data.nbytes // 2], self._end_of(slot) - data.nbytes)
                if part == "entry":
                    self._write(cache_file._ENTRY.pack(slot + 1, 0, 0), self._table_at + index * 16)
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, index, slot, data)

        CacheFile.write = killed  # type: ignore[method-assign]
        run(named(Structures(40, 1)), DiskCache(path))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert len(DiskCache(path).verify()) == (part == "entry")
    dataset = Structures(40, 1)
    assert run(named(dataset), DiskCache(path), 2) == run(Structures(40, 1), None, 2)
    assert dataset.reads.total() == 40 - 19
    assert DiskCache(path).verify() == ()


def test_a_file_that_is_truncated_while_it_is_used_is_an_error(path: Path) -> None:
    cache = DiskCache(path)
    with Feeder(named(Structures(40, 1)), batch_size=4, collate_fn=as_list, cache=cache) as feeder:
        list(feeder)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CacheError, match="is truncated"):
            list(feeder)


@pytest.mark.parametrize(
    "content",
    [
        ["array", "O", [1], msgspec.msgpack.Ext(0, bytes(8))],
        ["namedtuple", ["os:system", ["x"]], "true"],
        ["tensor", "load", [1], msgspec.msgpack.Ext(0, bytes(8))],
        ["tensor", "float32", [9], msgspec.msgpack.Ext(0, bytes(8))],
        ["unknown", None],
        [[]],
        msgspec.Raw(b"\xc1"),
    ],
)
def test_an_invalid_record_with_a_valid_checksum_is_made_again(path: Path, content: Any) -> None:
    """Whatever another program writes, nothing is imported, unpickled or called."""
    run(named(Structures(8, 1)), DiskCache(path))
    file = open_file(str(path), create=False)
    assert file is not None
    file.describe()
    file.open_rows()
    text = msgspec.msgpack.encode(content)
    record = np.frombuffer((len(text).to_bytes(4, "little") + text).ljust(128, b"\0"), np.uint8)
    file.write(3, file.next_record(2) or 0, record)
    assert file.valid_slot(3) is not None
    dataset = Structures(8, 1)
    assert run(named(dataset), DiskCache(path)) == run(Structures(8, 1), None)
    assert dataset.reads == Counter([3])


def test_a_namedtuple_whose_class_is_not_loaded_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class inside of a function is known when its first item is made."""
    local = namedtuple("local", "a b")

    def item(index: int) -> Any:
        return local(torch.zeros(index), str(index))

    expected = run(Items(12, item), None)
    assert run(named(Items(12, item)), DiskCache(path)) == expected
    monkeypatch.setattr(layouts, "_classes", type(layouts._classes)())
    dataset = Items(12, item)
    assert run(named(dataset), DiskCache(path)) == expected
    assert dataset.reads
    assert DiskCache(path).verify() == ()


def test_what_a_record_cannot_describe_is_named() -> None:
    for value, message in (
        ({"a": [1, object()]}, r"item\['a'\]\[1\] is a object"),
        ({"a": {frozenset({1}): 1}}, r"item\['a'\] has a key that is a frozenset"),
        ((1, 2**70), r"item\[1\] is a int, 1180.* numbers of 64 bits"),
        (torch.zeros(2).to_sparse(), r"item is tensor float32 \[2\] \(torch.sparse_coo\)"),
    ):
        with pytest.raises(NotCacheableError, match=message):
            pack_record(value)


class Listed:
    """Items of different lengths, as the function makes them."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self._item = item

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self._item(index)


def listed(item: Callable[[int], Any], path: Path, batch_size: int = 4) -> list[Any]:
    with Feeder(Listed(item), batch_size=batch_size, collate_fn=list, cache=DiskCache(path)) as feeder:
        return [item for batch in feeder for item in batch]


def test_other_items_in_a_later_run_are_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first cached item is compared, records too; lengths and shapes are values."""

    def item(index: int) -> Any:
        return {"t": "a" * (index % 3), "x": np.ones(index), "n": [1] * index, "o": None, "s": np.array(["a" * index])}

    def other(index: int) -> Any:
        return {"t": "b", "x": np.ones(index + 1), "n": [2, 2], "o": 1, "s": np.array(["long"])}

    listed(item, path)
    listed(item, path)
    assert "than the Dataset returns now" not in caplog.text
    assert listed(other, path)[3]["t"] == ""
    assert "has another" in caplog.text


@pytest.mark.parametrize(
    "other",
    [("a", [1]), {"u": "a", "n": [1]}, {"t": "a", "n": (1,)}, {"t": 1, "n": [1]}, {"t": "a", "n": np.ones(1)}],
    ids=str,
)
def test_items_of_another_structure_are_refused(other: Any, path: Path) -> None:
    """Records, too, are not used for a Dataset that returns something else now."""
    listed(lambda index: {"t": "a" * (index % 3), "n": [1] * index}, path)
    with pytest.raises(CacheError, match=r"other data: structure of Listed.*Delete the file"):
        listed(lambda index: other, path)


def test_the_smallest_integer_is_cached(path: Path) -> None:
    """It has 64 bits, too."""
    items = listed(lambda index: {"n": -(2**63), "t": "a" * index}, path)
    assert items == listed(lambda index: {"n": -(2**63), "t": "a" * index}, path)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_items_whose_class_is_not_found_by_name_are_not_stored_again(path: Path, batch_size: int) -> None:
    """A later run makes one to learn the class; the file does not grow."""
    sizes, calls = [], []
    for _ in range(3):
        kind = namedtuple("Other", "x y")  # type: ignore[misc]
        layouts._classes.clear()  # as in a new process
        made: list[int] = []

        def item(index: int, made: list[int] = made, kind: Any = kind) -> Any:
            made.append(index)
            return [kind(index, "a" * (index % 3))]

        listed(item, path, batch_size)
        sizes.append(path.stat().st_size)
        calls.append(len(made))
    assert sizes == sizes[:1] * 3
    assert calls[2] <= 2  # one to compare, one to learn from


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("max_bytes", [200_000, None])
def test_a_large_first_sample_decides_nothing(path: Path, batch_size: int, max_bytes: int | None) -> None:
    """There are no rows of its size, and it is not in memory if it does not fit: the others are cached."""
    made: list[int] = []

    class Sizes(Listed):
        def __len__(self) -> int:
            return 60

    def item(index: int) -> torch.Tensor:
        made.append(index)
        return torch.full((250_000 if index == 0 else 4,), index, dtype=torch.int32)

    with Feeder(
        Sizes(item), batch_size=batch_size, collate_fn=list, cache=DiskCache(path, max_bytes=max_bytes)
    ) as feeder:
        for _ in range(2):
            assert [int(item[0]) for batch in feeder for item in batch] == list(range(60))
    assert (made[:60], set(made[60:])) == ([*range(60)], {0} if max_bytes else set())
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize("disk", [False, True])
def test_large_first_samples_are_not_held_beyond_the_limit(path: Path, disk: bool) -> None:
    """``max_bytes`` holds also before it is decided whether there are rows."""
    made: list[int] = []

    def item(index: int) -> torch.Tensor:
        made.append(index)
        return torch.full((100_000 if index < 3 else 4,), index, dtype=torch.int32)

    cache = DiskCache(path, 200_000) if disk else HostCache(200_000)
    with Feeder(Listed(item), batch_size=4, collate_fn=list, cache=cache) as feeder:
        for _ in range(2):
            assert [int(item[0]) for batch in feeder for item in batch] == list(range(12))
    assert (made[:12], set(made[12:])) == ([*range(12)], {0, 1, 2})


def test_a_sample_of_more_than_a_record_can_be_is_logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its length is counted in 25 bits; the log says that it is decoded in every epoch."""
    monkeypatch.setattr("aiofeed.cache.store._MOST_UNITS", 10)
    listed(lambda index: "a" * (1000 if index > 8 else index), path)
    assert "at most 2 GiB" in caplog.text
    assert caplog.text.count("such as 9") == 1


def test_a_held_sample_stays_readable_while_it_is_written() -> None:
    """Readers never take it for a row before its slot is set."""
    store = HostStore(4, HostCache(1000), lambda: 1000)
    store.open(None)
    seen: list[bool] = []

    class Slots(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, at: Any, value: Any) -> None:
            held = self[at] == PENDING
            super().__setitem__(at, value)
            seen.append(bool(held and self[at] < 0))

    store.slots = store.slots.view(Slots)
    known = store.set_layout(Layout((8,), "uint8"))
    rows = [np.full(8, index, np.uint8) for index in range(4)]
    for index, row in enumerate(rows):
        store.put(index, [row], known)
    assert seen
    assert not any(seen)
    assert [store.get(index)[0][0].tolist() for index in range(4)] == [row.tolist() for row in rows]


def test_an_entry_without_its_record_is_made_again(path: Path) -> None:
    """A process wrote the entry in a page that reached the disk; the record did not."""
    run(named(Structures(8, 1)), DiskCache(path))
    file = open_file(str(path), create=False)
    assert file is not None
    file.describe()
    slot = file.next_record(5)
    assert slot is not None
    entry = cache_file._ENTRY.pack(slot + 1, checksum(2, np.zeros(5 * 64, np.uint8)), 0)
    with path.open("r+b") as out:
        out.seek(file._table_at + 2 * 16)
        out.write(entry)
    dataset = Structures(8, 1)
    assert run(named(dataset), DiskCache(path), 2) == run(Structures(8, 1), None, 2)
    assert dataset.reads == Counter([2])
