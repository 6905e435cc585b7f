"""``DiskCache`` with a ``Dataset``: batches equal those without a cache, and processes make each item once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from aiofeed import DiskCache, FailurePolicy, Feeder, FromDataset, Limits
from aiofeed.cache import cached_fetcher as cached
from aiofeed.cache import disk_format as cache_file
from aiofeed.cache.disk import DiskStore
from aiofeed.cache.disk_format import CacheFile
from aiofeed.cache.sample_codec import deserialized, item_layout, serialized
from aiofeed.cache.store import DECIDING
from aiofeed.common.fingerprint import dataset_identity
from aiofeed.errors import CacheError, IteratorClosedError, ReadError
from tests.cache.test_item_codec import ITEMS, Items, Many, Pair, flat
from tests.support.epochs_beside import same_after
from tests.support.examples import examples
from tests.support.logged_items import Logged, LoggedMany, Ragged
from tests.support.paths import ROOT, environment
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("forked_workers")

NAMES = [name for name in ITEMS if name != "mapped"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.cache"


def run(dataset: Any, path: Path, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of some epochs with a file."""
    cache = DiskCache(path, options.pop("max_bytes", None))
    with Feeder(dataset, **{"batch_size": 4} | options, cache=cache) as feeder:
        return [flat(batch) for _ in range(epochs) for batch in feeder]


def streamed(dataset: Any, epochs: int = 1, **options: Any) -> list[Any]:
    """The batches of some epochs without a cache."""
    with Feeder(dataset, **{"batch_size": 4} | options) as feeder:
        return [flat(batch) for _ in range(epochs) for batch in feeder]


def named(dataset: Any, **options: Any) -> FromDataset:
    """A dataset with a fingerprint, so that no item is compared."""
    return FromDataset(dataset, fingerprint="items", **options)


@pytest.mark.parametrize("device", [None, "random"])
@pytest.mark.parametrize("item", NAMES)
def test_batches_equal_those_without_a_cache(path: Path, device: Any, item: str) -> None:
    """They are equal in bytes, dtypes, structure and order of keys in two runs; the second requests no item."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    options["device"] = None if device is None else SimulatedDevice(latency=device)
    expected = streamed(Items(item=item), 2, **options)
    first, second = Items(item=item), Items(item=item)
    assert run(named(first), path, 2, **options) == expected
    assert run(named(second), path, 2, **options) == expected
    assert first.reads == Counter(range(22))
    assert second.reads == Counter()
    assert DiskCache(path).verify() == ()


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    item=st.sampled_from(NAMES),
    many=st.booleans(),
    threads=st.sampled_from([1, 3]),
    shuffle=st.sampled_from([False, True, "keyed"]),
    drop_last=st.booleans(),
    pad=st.booleans(),
    rank_of=st.sampled_from([(0, 1), (0, 2), (1, 3)]),
    most=st.sampled_from([None, 8192 + 400]),
    stops=st.lists(st.integers(0, 12), min_size=2, max_size=6),
)
@settings(max_examples=examples(20), deadline=None)
def test_epochs_that_are_left_resumed_and_set_equal_those_without_a_cache(
    tmp_path_factory: pytest.TempPathFactory,
    n: int,
    batch_size: int,
    item: str,
    many: bool,
    threads: int,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
    rank_of: tuple[int, int],
    most: int | None,
    stops: list[int],
) -> None:
    """Epochs are left, resumed from a state or chosen by number, for every shard and with any contents of the file."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "pad": pad,
        "shard": rank_of,
        "limits": Limits(memory_bytes=200),
    }
    cache = DiskCache(tmp_path_factory.mktemp("cache") / "items", most)
    kind = Many if many else Items
    plain: Feeder[Any] = Feeder(kind(n, item), **options)
    feeders: list[Feeder[Any]] = [Feeder(FromDataset(kind(n, item), threads), cache=cache, **options)]
    with plain:
        for step, stop in enumerate(stops):
            if step == len(stops) // 2:  # a later run resumes here
                feeders.append(Feeder(FromDataset(kind(n, item), threads), cache=cache, **options))
                feeders[-1].load_state_dict(feeders[-2].state_dict())
                plain.load_state_dict(plain.state_dict())
                feeders[-2].close()
            same_after(step, stop, feeders[-1], plain, flat)
    feeders[-1].close()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_repeated_items_are_made_once(path: Path, many: bool, threads: int) -> None:
    """Threads wait for an item that another thread is making."""
    dataset = (Many if many else Items)(22, lambda index: (time.sleep(0.002), index)[1])
    order = [5, 5, 3, 5, 1, 3, 3, 1, 1, 1, 2, 5, 5, 0, 0, 0]
    found = run(FromDataset(dataset, threads), path, 2, batch_size=2, sampler=order)
    assert found == streamed(Items(22, "int"), 2, batch_size=2, sampler=order)
    assert dataset.reads == Counter(set(order))


def test_random_items_are_those_of_the_first_time(path: Path) -> None:
    """A thread that waited for an item gets the cached one."""

    def item(index: int) -> Any:
        drawn = torch.rand(4)
        return drawn, drawn.clone(), index

    order = [5, 5, 3, 5, 1, 3, 3, 1, 1, 1, 2, 5, 5, 0, 0, 0]
    seen: dict[int, set[Any]] = {}
    for _ in range(2):
        source = named(Items(9, item), threads=3)
        with Feeder(source, batch_size=4, sampler=order, cache=DiskCache(path)) as feeder:
            for _ in range(2):
                for drawn, other, indices in feeder:
                    assert flat(drawn) == flat(other)
                    for index, row in zip(indices.tolist(), drawn.tolist(), strict=True):
                        seen.setdefault(index, set()).add(tuple(row))
    assert all(len(rows) == 1 for rows in seen.values())


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("decode_timeout_s", [None, 30.0])
@pytest.mark.parametrize("many", [False, True])
def test_samples_that_fail(path: Path, action: Any, decode_timeout_s: float | None, many: bool) -> None:
    """They fail in every epoch and run as without a cache, and the others are requested once."""
    policy = FailurePolicy(action, max_failures=20, decode_timeout_s=decode_timeout_s)
    bad = frozenset({0, 7, 11})
    options: dict[str, Any] = {"shuffle": True, "on_error": policy}
    expected = streamed(Items(22, bad=bad), 2, **options)
    for reads in (1, 0):
        dataset = (Many if many else Items)(22, bad=bad)
        assert run(named(dataset), path, 2, **options) == expected
        good = {index: count for index, count in dataset.reads.items() if index not in bad}
        if not many:
            assert good == ({} if not reads else dict.fromkeys(set(range(22)) - bad, 1))
        assert set(dataset.reads) >= bad
    dataset = Items(22)
    assert run(named(dataset), path) == streamed(Items(22))
    assert dataset.reads == Counter(bad)


def test_the_first_that_fails_is_raised(path: Path) -> None:
    """The items before it are cached."""
    with pytest.raises(ReadError, match=r"Items\[7\]"):
        run(Items(22, bad=frozenset({7, 9})), path)
    dataset = Items(22)
    run(dataset, path)
    assert not dataset.reads[4]
    assert dataset.reads[7] == 1


def test_feeders_of_one_process_share_the_work(path: Path) -> None:
    """They run at the same time and start without a file."""
    one, other = (Items(40, lambda index: (time.sleep(0.002), index)[1]) for _ in range(2))
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda items=items: found.append(run(named(items), path))) for items in (one, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [streamed(Items(40, "int"))] * 2
    if cache_file._OWN_LOCK is not None:
        assert one.reads + other.reads == Counter(range(40))


def test_items_that_wait_for_the_layout_are_not_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first items are written after the file's header: another feeder that sees the header waits for them."""
    if cache_file._OWN_LOCK is None:
        pytest.skip("no claims")
    reached, found, threads = threading.Event(), list[Any](), list[threading.Thread]()
    one, other = Items(40, "int"), Items(40, lambda index: (reached.set(), index)[1])
    use, claim = DiskStore._use, cache_file.CacheFile.claim

    def start_other(*args: Any) -> None:
        use(*args)
        if not threads:
            threads.append(threading.Thread(target=lambda: found.append(run(named(other), path))))
            threads[0].start()
            assert reached.wait(60)

    def refused(file: Any, index: int | None) -> bool:
        claimed = claim(file, index)
        if not claimed:
            reached.set()
        return claimed

    monkeypatch.setattr(DiskStore, "_use", start_other)
    monkeypatch.setattr(cache_file.CacheFile, "claim", refused)
    found.append(run(named(one), path))
    threads[0].join()
    assert found == [streamed(Items(40, "int"))] * 2
    assert one.reads + other.reads == Counter(range(40))


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", NAMES)
def test_a_serialized_layout_is_restored(item: str) -> None:
    """Parts and template of the restored layout equal the original's."""
    layout = serialized(item_layout(ITEMS[item](1)))
    again = deserialized(replace(serialized(item_layout(ITEMS[item](2))), parts=(), template=None))
    assert again is not None
    assert again == layout
    assert again.parts == layout.parts
    assert str(again.template) == str(layout.template)
    assert type(again.template) is type(layout.template)


def test_equal_numpy_number_types_are_the_same_in_a_file(path: Path) -> None:
    """A ``longlong`` is an ``int64``, also for a later run, which knows the layout from the file."""
    items = [np.longlong(number) for number in range(8)]
    run(named(items), path, sampler=[0, 1])
    assert run(named(items), path) == streamed(items)


def test_items_whose_batches_differ_have_different_forms() -> None:
    """Forms in a file differ in structure, types, dtypes and shapes."""
    items: list[Any] = [(1, 2), [1, 2], Pair(1, 2), {"a": 1, "b": 2}, {"b": 1, "a": 2}, OrderedDict(a=1, b=2)]
    items += [{1: 1}, {1.0: 1}, {True: 1}, {"1": 1}, {(1, "x"): 1}, 1, 1.0, True, np.int64(1), np.array(1)]
    items += [torch.tensor(1), torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int16)]
    items += [np.zeros((2, 3)), np.zeros((3, 2)), (1, (2,)), ((1, 2),), namedtuple("Pair", "image name")(1, 2)]
    forms = [serialized(item_layout(item)).form for item in items]
    assert len(set(forms)) == len(forms)


def test_a_namedtuple_whose_class_is_not_loaded_is_learnt_from_an_item(path: Path) -> None:
    """A file does not cause imports; one item is requested, and all are used from the file."""

    def item(index: int) -> Any:
        return kind(index, index)

    kind = namedtuple("Local", "a b")  # type: ignore[misc]
    expected = streamed(Items(22, item))
    assert run(named(Items(22, item)), path) == expected
    kind = namedtuple("Local", "a b")  # type: ignore[misc]
    dataset = Items(22, item)
    assert run(named(dataset), path) == streamed(Items(22, item))
    assert dataset.reads == Counter([0])


@pytest.mark.parametrize(
    "form", ["", "[]", '["odd"]', '["array", "f9", [2]]', '["dict", [["(", ["number", "int"]]]]', "7"]
)
def test_an_invalid_form_is_not_restored(form: str) -> None:
    """A form of another size is not restored either."""
    layout = serialized(item_layout((1, 2)))
    assert deserialized(replace(layout, form=form)) is None
    assert deserialized(replace(layout, shape=(24,))) is None


# --- other Datasets ---------------------------------------------------------------------------------------------------


class Other(Items):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index + 0)


@dataclass
class Scaled:
    scale: int
    n: int = 22

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index * self.scale])


def refused(dataset: Any, path: Path, message: str) -> None:
    """Assert that the file is refused and not changed."""
    before = path.read_bytes()
    with pytest.raises(CacheError, match=message + r".*Delete the file, or give DiskCache another path"):
        run(dataset, path)
    assert path.read_bytes() == before


def test_a_file_of_another_dataset_is_refused_with_the_difference(path: Path) -> None:
    run(Items(), path)
    refused(Items(23), path, "samples: 22 in the file, 23 here")
    refused(Other(), path, r"fingerprint of the source: Items \w{12} in the file, Other \w{12} here")
    refused(named(Items()), path, r"fingerprint of the source: Items \w{12} in the file, items here")
    refused(
        Items(item="int"),
        path,
        r"layout of a sample: \(tensor uint8 \[3, 4, 2\], int\) in the file; here item is a int, 0",
    )
    path.unlink()
    run(Scaled(2), path)
    refused(
        Scaled(3), path, r"Scaled \w{12} Scaled\(scale=2, n=22\) in the file, Scaled \w{12} Scaled\(scale=3, n=22\)"
    )


def test_a_file_of_decoded_samples_is_refused(path: Path) -> None:
    """A file of items is refused by a feeder with a decoder, too."""
    from tests.cache.test_disk import Rows, block

    with Feeder(Rows(22), decode=block, batch_size=4, cache=DiskCache(path)) as feeder:
        list(feeder)
    refused(Items(), path, "decoder: .*block .* in the file, none, the items of a Dataset here")
    path.unlink()
    run(Items(), path)
    with pytest.raises(CacheError, match=r"decoder: none, the items of a Dataset in the file, .*block"):
        Feeder(Rows(22), decode=block, batch_size=4, cache=DiskCache(path)).__iter__()


def test_a_fingerprint_from_the_error_lets_another_dataset_use_the_file(path: Path) -> None:
    """The user vouches for the items by passing the fingerprint that the error names."""
    run(Items(), path)
    with pytest.raises(CacheError) as error:
        run(Other(), path)
    [fingerprint] = [part for part in str(error.value).split("'") if part.startswith("Items ")]
    assert f"FromDataset(dataset, fingerprint={fingerprint!r})" in str(error.value)
    dataset = Other()
    assert run(FromDataset(dataset, fingerprint=fingerprint), path) == streamed(Items())
    assert dataset.reads == Counter()


@pytest.mark.parametrize("where", ["item 0", "item 9"])
def test_items_of_other_data_are_logged(path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """A later run requests one item again and compares it, unless the Dataset has a fingerprint."""
    run(Items(), path)
    dataset = Items(22, lambda index: ITEMS["pair"](index + (index == int(where[5:]))))
    order = [int(where[5:]), *range(8)]
    with caplog.at_level(logging.WARNING, "aiofeed"):
        assert run(dataset, path, 2, sampler=order) == streamed(Items(), 2, sampler=order)
    assert dataset.reads == Counter([int(where[5:])])
    assert caplog.text.count(f"another Items[{where[5:]}] than the Dataset returns now") == 1
    caplog.clear()
    dataset = Items(bad=frozenset(range(22)))  # its data may have been deleted
    assert run(dataset, path) == streamed(Items())
    same = Items()
    assert run(same, path) == streamed(Items())
    assert same.reads == Counter([0])
    assert caplog.text == ""


def test_other_datasets_have_other_identities() -> None:
    """Subsets of the same length differ, too; addresses in a ``repr`` do not count."""
    even, odd = range(0, 22, 2), range(1, 22, 2)
    found = [Items(), Other(), Scaled(2), Scaled(3), Subset(Items(), even), Subset(Items(), odd), Subset(Other(), odd)]
    assert len({dataset_identity(dataset) for dataset in found}) == len(found)
    assert dataset_identity(Items()) == dataset_identity(Items(9))
    assert dataset_identity(Subset(Items(), even)) == dataset_identity(Subset(Items(), list(even)))

    class WithRepr(Items):
        def __repr__(self) -> str:
            return f"WithRepr of\n    {object()} {'x' * 500}"

    assert dataset_identity(WithRepr()) == dataset_identity(WithRepr())
    assert len(dataset_identity(WithRepr())) < 300


@pytest.mark.parametrize("bad", [3, "", b"x"])
def test_a_fingerprint_must_be_a_str(bad: Any) -> None:
    with pytest.raises(TypeError, match="must be a non-empty str"):
        FromDataset(Items(), fingerprint=bad)


def test_a_state_is_refused_by_a_dataset_with_another_fingerprint() -> None:
    from aiofeed.errors import StateError

    one, other = (Feeder(FromDataset(Items(), fingerprint=name), batch_size=4) for name in ("one", "other"))
    with pytest.raises(StateError, match=r"fingerprint of the source: .*one.*other"):
        other.load_state_dict(one.state_dict())


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_full_disk_is_an_error_with_the_figures(path: Path, monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """It is raised at the first item with any policy, and once there is room the run continues."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(CacheError, match=r"needs .*bytes\) for 22 samples, and .* are free in .*max_bytes"):
        run(Items(), path, on_error=action)
    monkeypatch.undo()
    assert run(Items(), path) == streamed(Items())


def test_an_impossible_path_is_an_error_before_the_first_item(path: Path) -> None:
    dataset = Items()
    with pytest.raises(CacheError, match="cannot be created"):
        run(dataset, path / "none")
    assert dataset.reads == Counter()


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_never_seen(path: Path, seed: int) -> None:
    """An item that does not match its checksum is requested and written again."""
    run(Items(), path)
    data, numbers = bytearray(path.read_bytes()), random.Random(seed)
    rows = len(data) - 32 * 22
    for _ in range(5):
        data[numbers.randrange(rows, len(data))] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)
    damaged = DiskCache(path).verify()
    dataset = Items()
    assert run(dataset, path) == streamed(Items())
    assert set(damaged) <= set(dataset.reads)
    assert DiskCache(path).verify() == ()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_file_is_used(path: Path) -> None:
    run(Items(bad=frozenset({3})), path, on_error=FailurePolicy("skip", max_failures=9))
    path.chmod(0o400)
    dataset = Items()
    assert run(FromDataset(dataset), path) == streamed(Items())
    assert dataset.reads[3] == 1


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Logged, LoggedMany, Ragged])
@pytest.mark.parametrize("engines", ["process", "process:3"])
def test_engine_processes_make_each_item_once(tmp_path: Path, path: Path, engines: str, kind: Any) -> None:
    """This includes items repeated in neighbouring batches. A thread engine then requests none."""
    dataset = kind(tmp_path)
    order = [3, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] * 2
    options: dict[str, Any] = {"batch_size": 2, "sampler": order, "collate_fn": str if kind is Ragged else None}
    found = run(dataset, path, 2, engine=engines, **options)
    assert dataset.asked == Counter(set(order))
    (tmp_path / "asked").unlink()
    assert run(named_like(dataset), path, **options) == found[:16]
    assert dataset.asked == Counter()
    assert found == streamed(dataset, 2, **options)


def named_like(dataset: Any) -> FromDataset:
    """The same dataset, with its identity as its fingerprint."""
    return FromDataset(dataset, fingerprint=dataset_identity(dataset))


CHILD = """
import sys
from pathlib import Path
from aiofeed import DiskCache, Feeder, FromDataset
from tests.support.logged_items import Logged, Ragged, image_of
folder, kind, rank, world, epochs = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
shard = (rank, world) if world > 1 else None
dataset = FromDataset((Ragged if kind == "ragged" else Logged)(folder), fingerprint="logged")
cache = DiskCache(folder / "items.cache")
with Feeder(dataset, batch_size=4, shuffle=True, shard=shard, cache=cache, collate_fn=list) as feeder:
    print("started", flush=True)
    for epoch in range(epochs):
        for batch in feeder:
            for item in batch:
                expected = image_of(item["label"])[: len(item["image"])]
                assert item["image"].tobytes() == expected.tobytes(), item
                assert kind != "ragged" or item.get("name") == Ragged.name_of(item["label"])
"""


def child(folder: Path, kind: str, rank: int = 0, world: int = 1, epochs: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), kind, str(rank), str(world), str(epochs)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "ragged"])
@pytest.mark.parametrize("world", [1, 3])
def test_processes_share_the_work(tmp_path: Path, path: Path, world: int, kind: str) -> None:
    """Without a file at first, with the same items in the same order or each with a rank's, each item is made once."""
    processes = [child(tmp_path, kind, rank, world) for rank in range(3)]
    for process in processes:
        process.communicate(timeout=50)
        assert process.returncode == 0
    assert set(Logged(tmp_path).asked.values()) == {1}
    assert DiskCache(path).verify() == ()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_a_kill_at_any_moment_leaves_a_file_that_others_use(tmp_path: Path, path: Path, kind: str) -> None:
    """The file is valid, written items are not made again, and the claims of a killed process end."""
    numbers = random.Random(5)
    for _ in range(4):
        processes = [child(tmp_path, kind) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        target = Logged(tmp_path).asked.total() + numbers.randrange(9)
        while Logged(tmp_path).asked.total() < target and processes[0].poll() is None:
            time.sleep(0.001)
        processes[0].send_signal(signal.SIGKILL)
        processes[0].communicate()
        if numbers.random() < 0.8:
            processes[1].send_signal(signal.SIGKILL)
        processes[1].communicate()
        if path.exists() and path.stat().st_size > 4096:
            assert DiskCache(path).verify() == ()
    last = child(tmp_path, kind)
    last.communicate(timeout=50)
    assert last.returncode == 0
    # A killed process loses the item that it was making, and before there is a file the first few.
    assert sum(Logged(tmp_path).asked.values()) <= 60 + 2 * 4 + DECIDING
    assert DiskCache(path).verify() == ()


@pytest.mark.skipif(cache_file._OWN_LOCK is None, reason="needs locks of open files")
def test_a_process_that_hangs_at_an_item_blocks_others_for_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for it for a limited time, and then make the item themselves."""
    run(Items(22, bad=frozenset({5, 6})), path, on_error=FailurePolicy("skip", max_failures=9))
    hanging = CacheFile(str(path))
    hanging.describe()
    assert hanging.claim(5)
    monkeypatch.setattr(cached, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cached, "PATIENCE_ITEMS", 0)
    dataset = Items()
    assert run(named_like(dataset), path) == streamed(Items())
    assert dataset.reads == Counter([5, 6])


@pytest.mark.skipif(cache_file._OWN_LOCK is None, reason="needs locks of open files")
@pytest.mark.parametrize("claim", [None, 5])
def test_a_feed_that_waits_for_another_process_can_be_left(path: Path, claim: int | None) -> None:
    """``close`` ends the wait at once."""
    if claim is not None:
        run(Items(22, bad=frozenset({5})), path, on_error=FailurePolicy("skip", max_failures=9))
    else:
        path.touch()
    hanging = CacheFile(str(path))
    hanging.describe()
    assert hanging.claim(claim)
    feeder: Feeder[Any] = Feeder(named_like(Items()), batch_size=4, cache=DiskCache(path))
    got: list[Any] = []

    def consume() -> None:
        with contextlib.suppress(IteratorClosedError):
            got.extend(feeder)

    thread = threading.Thread(target=consume, daemon=True)
    before = set(threading.enumerate())
    thread.start()
    while not any(pool.name.startswith("aiofeed-decode") for pool in set(threading.enumerate()) - before):
        time.sleep(0.01)
    feeder.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(got) <= 1
