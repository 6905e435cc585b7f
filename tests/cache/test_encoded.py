"""``EncodedCache``: encoded samples in a file that epochs, processes and runs share, evicted by next use."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from aiofeed import CacheError, DataLoader, EncodedCache, Feeder, Files, Mixture, Stream, Tensors
from aiofeed.cache.encoded import database as database_module
from aiofeed.cache.encoded import source as source_module
from aiofeed.cache.encoded.database import UNKNOWN, CacheDatabase, Entry
from aiofeed.cache.encoded.source import CachedSource
from aiofeed.core.types import BatchPlan
from aiofeed.diagnostics.cli import main
from aiofeed.sampling.schedule import Position, Schedule
from tests.support.encoded import Blocks, block, of_feeder, write_now
from tests.support.paths import ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZE = 1000


def head(data: bytes) -> torch.Tensor:
    """The first bytes of a sample, which identify it."""
    return torch.tensor(int.from_bytes(data[:7], "little"))


def as_it_is(data: Any) -> Any:
    return data


def heads(feeder: Feeder[Any]) -> list[int]:
    return [int(number) for batch in feeder for number in batch]


HEADS = [int(head(block(index, SIZE))) for index in range(200)]


def entries(path: Path) -> dict[str, int]:
    """The number of entries and their bytes, from the rows themselves."""
    with closing(sqlite3.connect(path)) as connection:
        count, nbytes = connection.execute("SELECT count(*), coalesce(sum(length(bytes)), 0) FROM data").fetchone()
        assert connection.execute("SELECT total FROM budget").fetchone() == (nbytes,)
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (count,)
    return {"count": count, "nbytes": nbytes}


def damage(path: Path, assignment: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {assignment}")


async def filled(path: Path, n: int = 40) -> None:
    """Fill a cache with samples of ``Blocks``."""
    source = CachedSource(Blocks(n), EncodedCache(path, n * SIZE))
    await source.read_many(range(n))
    await source.aclose()


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False, "samples"])
def test_samples_are_read_once(tmp_path: Path, in_order: Any) -> None:
    """After the first epoch no sample is read from the source again, also not by a later feeder."""
    source, cache = Blocks(), EncodedCache(tmp_path / "cache", 40 * SIZE)
    for _ in range(2):
        with Feeder(source, decode=head, batch_size=6, shuffle=True, cache=cache, in_order=in_order) as feeder:
            for _ in range(3):
                assert sorted(heads(feeder)) == sorted(HEADS[:40])
        assert set(source.reads.values()) == {1}
    storage = of_feeder(feeder)
    assert storage.cache_misses == 0
    assert storage.cached_bytes == 40 * SIZE
    assert "cached" in str(feeder.statistics())
    assert entries(tmp_path / "cache") == {"count": 40, "nbytes": 40 * SIZE}


async def test_async_iteration(tmp_path: Path) -> None:
    """``async for`` uses the cache, too."""
    source = Blocks()
    async with Feeder(source, decode=head, batch_size=6, cache=EncodedCache(tmp_path / "cache", 1 << 20)) as feeder:
        for _ in range(2):
            assert [int(number) async for batch in feeder for number in batch] == HEADS[:40]
    assert set(source.reads.values()) == {1}


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_batches_do_not_depend_on_the_cache(tmp_path: Path, shuffle: Any) -> None:
    """Order, targets, state and resume are those of a feeder without a cache."""

    class Labelled(Blocks):
        def target(self, index: int) -> int:
            return index

    def batches(feeder: Feeder[Any], count: int | None = None) -> list[Any]:
        return [[part.tolist() for part in batch] for _, batch in zip(range(count or 99), feeder, strict=False)]

    plain = Feeder(Labelled(), decode=head, batch_size=6, shuffle=shuffle)
    cached = Feeder(
        Labelled(), decode=head, batch_size=6, shuffle=shuffle, cache=EncodedCache(tmp_path / "cache", 20 * SIZE)
    )
    with plain, cached:
        for _ in range(2):
            assert batches(cached) == batches(plain)
        for stop in range(7):
            assert batches(cached, stop) == batches(plain, stop)
            assert cached.state_dict() == plain.state_dict()
            cached.load_state_dict(plain.state_dict())
            plain.load_state_dict(plain.state_dict())
            assert batches(cached) == batches(plain)


def test_two_feeders_share_a_file(tmp_path: Path) -> None:
    """Feeders that run at the same time use each other's entries; a source with other keys has entries of its own."""
    cache, first, second = EncodedCache(tmp_path / "cache", 1 << 20), Blocks(), Blocks()
    with Feeder(first, decode=head, batch_size=6, cache=cache) as feeder:
        heads(feeder)
    with (
        Feeder(first, decode=head, batch_size=6, cache=cache) as one,
        Feeder(second, decode=head, batch_size=6, cache=cache) as two,
        Feeder(Blocks(20, name="other"), decode=head, batch_size=6, cache=cache) as three,
    ):
        for _ in range(2):
            for batches in zip(one, two, three, strict=False):
                assert len(batches) == 3
    assert not second.reads
    assert entries(tmp_path / "cache")["count"] == 60


PROGRAM = """
import sys
from aiofeed import EncodedCache, Feeder
from tests.cache.test_encoded import HEADS, heads, head
from tests.support.encoded import Blocks

source = Blocks(200)
cache = EncodedCache(sys.argv[1], int(sys.argv[2]))
with Feeder(source, decode=head, batch_size=8, shuffle=True, seed=int(sys.argv[3]), cache=cache) as feeder:
    for _ in range(3):
        assert sorted(heads(feeder)) == sorted(HEADS)
"""


def test_processes_that_write_at_the_same_time(tmp_path: Path) -> None:
    """Processes create and fill one file together; samples are right and the budget holds."""
    path = tmp_path / "cache"
    command = [sys.executable, "-c", PROGRAM, str(path), str(100 * SIZE)]
    running = [subprocess.Popen([*command, str(seed)], cwd=ROOT, env=environment()) for seed in range(4)]
    assert [process.wait(120) for process in running] == [0] * 4
    found = entries(path)
    assert 90 <= found["count"] <= 100
    assert main(["cache", "verify", str(path)]) == 0


def test_worker_processes(tmp_path: Path) -> None:
    """The workers of ``engine="process"`` use the cache; the first samples stay when it is full."""
    cache = EncodedCache(tmp_path / "cache", 20 * SIZE)
    with Feeder(Blocks(), decode=head, batch_size=5, shuffle=True, engine="process:2", cache=cache) as feeder:
        for _ in range(3):
            assert sorted(heads(feeder)) == sorted(HEADS[:40])
    assert entries(tmp_path / "cache") == {"count": 20, "nbytes": 20 * SIZE}


def test_forked_child(tmp_path: Path) -> None:
    """A child of a fork opens the file itself."""
    source, cache = Blocks(), EncodedCache(tmp_path / "cache", 1 << 20)
    feeder = Feeder(source, decode=head, batch_size=5, cache=cache)
    assert heads(feeder) == HEADS[:40]
    child = os.fork()
    if child == 0:
        try:
            good = heads(feeder) == HEADS[:40]
            feeder.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heads(feeder) == HEADS[:40]
    feeder.close()
    assert entries(tmp_path / "cache")["count"] == 40


def test_pickled_source(tmp_path: Path) -> None:
    """A pickled source opens the file itself; settings survive."""
    source = CachedSource(Blocks(), EncodedCache(tmp_path / "cache", 1 << 20))
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy).startswith("CachedSource(")
    assert copy.key(3) == "block 3"
    assert len(copy) == 40
    assert pickle.loads(pickle.dumps(EncodedCache("a", 5))) == EncodedCache("a", 5)


# --- what is stored ---------------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=50),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A value with the types of all its parts, and the order of its keys."""
    if isinstance(value, dict):
        return [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    return type(value), repr(value)


@hypothesis.given(value=plain_values)
def test_round_trip(value: Any) -> None:
    """A nested sample is restored exactly, with its types."""
    assert typed(source_module._unpacked(Entry(1, 1, *source_module._packed(value)))) == typed(value)


@pytest.mark.parametrize("value", [bytearray(b"a"), {"a": np.zeros(2)}, [1 << 70], ["\ud800"], {(1, 2): 3}, (set(),)])
async def test_other_samples_are_refused(tmp_path: Path, value: Any) -> None:
    """A sample that cannot be restored exactly is an error that names it and the way out."""

    class Others(Blocks):
        def data(self, index: int) -> Any:
            return value

    source = CachedSource(Others(), EncodedCache(tmp_path / "cache", 1 << 20))
    [error] = await source.read_many([3])
    await source.aclose()
    assert isinstance(error, TypeError)
    assert "'block 3' (index 3)" in str(error)
    assert "leave cache= out" in str(error)


async def test_errors_are_not_cached(tmp_path: Path) -> None:
    """A sample that cannot be read is tried again, and fails or succeeds alone."""

    class Failing(Blocks):
        broken = True

        def data(self, index: int) -> Any:
            return OSError("unreadable") if index == 3 and self.broken else super().data(index)

    source = CachedSource(inner := Failing(), EncodedCache(tmp_path / "cache", 1 << 20))
    first = await source.read_many(range(5))
    assert [type(sample) for sample in first] == [bytes, bytes, bytes, OSError, bytes]
    with pytest.raises(OSError, match="unreadable"):
        await source.read(3)
    inner.broken = False
    assert await source.read_many(range(5)) == [block(index, SIZE) for index in range(5)]
    await source.aclose()
    assert inner.reads == {0: 1, 1: 1, 2: 1, 3: 3, 4: 1}


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_failing_samples_in_a_feeder(tmp_path: Path, on_error: Any) -> None:
    """``on_error`` treats samples that fail as without a cache."""

    class Failing(Blocks):
        async def read(self, index: int) -> bytes:
            if index == 3:
                raise OSError("unreadable")
            return block(index, self.size)

        read_many = None  # type: ignore[assignment]

    results = []
    for cache in (None, EncodedCache(tmp_path / "cache", 1 << 20)):
        with Feeder(Failing(), decode=head, batch_size=6, on_error=on_error, cache=cache) as feeder:
            results.append([heads(feeder), heads(feeder), [failure.index for failure in feeder.failures]])
    assert results[0] == results[1]


async def test_large_samples_are_not_stored(tmp_path: Path) -> None:
    """A sample beyond the budget evicts nothing."""
    sizes = {0: 600, 1: 300, 2: 2000}

    class Sized(Blocks):
        def data(self, index: int) -> bytes:
            return block(index, sizes[index])

    source = CachedSource(Sized(3), EncodedCache(tmp_path / "cache", 1000))
    for index in range(3):
        await source.read(index)
        write_now(source)
    await source.aclose()
    assert entries(tmp_path / "cache") == {"count": 2, "nbytes": 900}


async def test_pending_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that arrive faster than the disk writes are not stored."""
    monkeypatch.setattr(source_module, "MOST_PENDING_BYTES", 5 * SIZE)
    source = CachedSource(Blocks(), EncodedCache(tmp_path / "cache", 1 << 20))
    await source.read_many(range(40))
    await source.aclose()
    assert entries(tmp_path / "cache")["count"] == 5


# --- names ------------------------------------------------------------------------------------------------------------


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    """A file that is replaced is noticed, and so is one of the same name in another folder."""
    cache = EncodedCache(tmp_path / "cache", 1 << 20)

    def read(folder: str, *texts: str) -> list[bytes]:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = [tmp_path / folder / str(number) for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            if text:
                path.with_suffix(".new").write_text(text)
                path.with_suffix(".new").replace(path)
        with Feeder(Files(paths), decode=as_it_is, collate_fn=list, batch_size=4, cache=cache) as feeder:
            return [data for batch in feeder for data in batch]

    assert read("a", "one", "two") == [b"one", b"two"]
    assert read("a", "", "TWO") == [b"one", b"TWO"]
    assert read("b", "six", "ten") == [b"six", b"ten"]
    assert entries(tmp_path / "cache")["count"] == 5


async def test_version(tmp_path: Path) -> None:
    """A source's ``version`` is a part of the name; without it, its fingerprint is."""

    class Versioned(Blocks):
        number = 1

        def version(self, index: int) -> str:
            return f"{self.number}"

    inner = Versioned()
    source = CachedSource(inner, EncodedCache(tmp_path / "cache", 1 << 20))
    await source.read_many([1, 2])
    inner.number = 2
    await source.read_many([1, 2])
    await source.read_many([1, 2])
    await source.aclose()
    assert inner.reads == {1: 2, 2: 2}
    longer = CachedSource(Blocks(41), EncodedCache(tmp_path / "cache", 1 << 20))
    for _ in range(2):
        await longer.read_many([1])
    await longer.aclose()
    assert longer._source.reads == {1: 1}


def test_mixture(tmp_path: Path) -> None:
    """The samples of a mixture are cached by source, and its order stays."""
    parts = {"a": Blocks(20), "b": Blocks(30, name="other")}
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True) as plain:
        expected = [heads(plain) for _ in range(2)]
    for part in parts.values():
        part.reads.clear()
    cache = EncodedCache(tmp_path / "cache", 1 << 20)
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True, cache=cache) as feeder:
        assert [heads(feeder) for _ in range(2)] == expected
    assert all(set(part.reads.values()) == {1} for part in parts.values())


# --- eviction ---------------------------------------------------------------------------------------------------------


def plans(schedule: Schedule, epochs: int) -> list[BatchPlan]:
    return [plan for epoch in range(epochs) for plan in schedule.plans(Position(epoch))]


def optimal_hits(reads: Sequence[int], room: int) -> int:
    """The most hits of any replacement: Belady's, with a look at all later reads; a sample need not be stored."""
    hits, cached = 0, set[int]()
    for at, index in enumerate(reads):
        if index in cached:
            hits += 1
        cached.add(index)
        if len(cached) > room:
            later = {each: reads.index(each, at + 1) if each in reads[at + 1 :] else len(reads) for each in cached}
            cached.discard(max(later, key=later.__getitem__))
    return hits


async def read_epochs(source: CachedSource, orders: Sequence[Sequence[BatchPlan]], room: int) -> list[int]:
    """Read the plans of several ranks of a machine in the global order; returns the indices."""
    reads = []
    for batch in zip(*orders, strict=True):
        for plan in batch:
            source.announce(plan)
        for indices in zip(*[plan.indices for plan in batch], strict=True):
            for index in indices:
                reads.append(index)
                assert await source.read(index) == block(index, SIZE)
                write_now(source)
        with closing(CacheDatabase(str(source._cache.path))) as database:
            assert database.budget()[0] <= room * SIZE
    await source.aclose()
    return reads


@pytest.mark.parametrize("shuffle", [True, "keyed", False])
async def test_one_machine_keeps_the_first_samples(tmp_path: Path, shuffle: Any) -> None:
    """If one machine reads all samples in each epoch, five epochs have as many hits as any replacement."""
    n, room = 96, 48
    source = CachedSource(Blocks(n), EncodedCache(tmp_path / "cache", room * SIZE))
    reads = await read_epochs(source, [plans(Schedule(length=n, batch_size=4, shuffle=shuffle), 6)], room)
    assert source.storage_statistics().cache_hits == optimal_hits(reads, room) == 5 * room


@pytest.mark.parametrize("shuffle", [True, "keyed"])
@pytest.mark.parametrize("rank", [0, 2])
async def test_several_machines_evict_by_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: Any, rank: int
) -> None:
    """Of several machines, each keeps what its own ranks read soonest: nearly as many hits as any replacement has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    n, room, epochs = 192, 48, 16
    source = CachedSource(Blocks(n), EncodedCache(tmp_path / "cache", room * SIZE))
    orders = [
        plans(Schedule(length=n, batch_size=4, shuffle=shuffle, rank=local, world_size=8), epochs)
        for local in (rank, rank + 1)
    ]
    reads = await read_epochs(source, orders, room)
    hits = source.storage_statistics().cache_hits
    first = set(list(dict.fromkeys(reads))[:room])
    fixed = sum(index in first for index in reads) - room
    assert hits >= 0.95 * optimal_hits(reads, room)
    assert hits > 1.6 * fixed


def test_next_uses_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``next_use`` is where one of the machine's ranks reads a sample next, or later than all known positions."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    schedule = Schedule(length=60, batch_size=5, shuffle=True, rank=3, world_size=6)
    order: Any = next(schedule.plans(Position(4))).order
    found = order.next_use(np.arange(60))
    expected = np.full(60, (4 + 6 + 1) * 60)
    for epoch in range(10, 4, -1):
        indices = schedule.permutation(epoch)(np.arange(60))
        for position in range(60):
            if position % 6 in (2, 3):
                expected[indices[position]] = epoch * 60 + position
    assert found.tolist() == expected.tolist()
    assert order.epoch == 4


@pytest.mark.parametrize(
    ("local", "options"),
    [
        ("2", {"world_size": 2}),
        ("", {"world_size": 4}),
        ("text", {"world_size": 4}),
        ("0", {"world_size": 4}),
        ("3", {"world_size": 4}),
        ("2", {"world_size": 4, "shuffle": "replacement"}),
    ],
)
def test_next_uses_that_are_not_known(monkeypatch: pytest.MonkeyPatch, local: str, options: Any) -> None:
    """Without other machines, or if the ranks of this one are not known, there are no next uses."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    order: Any = next(Schedule(length=60, batch_size=5, **options).plans(Position())).order
    assert order.next_use is None


def test_eviction_in_a_feeder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feeder that reads ahead has more hits than one that keeps the first samples, and keeps the budget."""
    monkeypatch.setattr(source_module, "WRITE_EVERY_S", 0.0)
    n, room, hits = 400, 50, []
    for local in ("1", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        cache = EncodedCache(tmp_path / local, room * SIZE)
        with Feeder(Blocks(n), decode=head, batch_size=5, shuffle=True, shard=(1, 4), cache=cache) as feeder:
            for _ in feeder.epochs(20):
                heads(feeder)
            assert entries(tmp_path / local)["nbytes"] <= room * SIZE
            hits.append(of_feeder(feeder).cache_hits)
    assert hits[0] > 1.5 * hits[1]


async def test_an_entry_in_use_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source whose samples are all cached says from time to time that it is used, and takes over other entries."""
    await filled(tmp_path / "cache")
    monkeypatch.setattr(source_module, "IN_USE_S", -1.0)
    monkeypatch.setattr(source_module, "WRITE_EVERY_S", -1.0)
    with closing(sqlite3.connect(tmp_path / "cache")) as connection, connection:
        connection.execute("UPDATE runs SET seen = 0")
        connection.execute("UPDATE entries SET run = 5 WHERE data = 3")
        source = CachedSource(inner := Blocks(), EncodedCache(tmp_path / "cache", 40 * SIZE))
        connection.commit()
        await source.read_many(range(40))
        await source.aclose()
        assert not inner.reads
        assert connection.execute("SELECT seen > 0 FROM runs").fetchall() == [(1,)]
        assert connection.execute("SELECT count(DISTINCT run) FROM entries").fetchone() == (1,)


@pytest.mark.parametrize("options", [{"sampler": torch.randperm(40).tolist()}, {"shuffle": "replacement"}])
def test_unknown_order_keeps_the_first_samples(tmp_path: Path, options: Any) -> None:
    """If next uses are unknown, the samples stored first stay."""
    source = Blocks()
    with Feeder(
        source, decode=head, batch_size=5, cache=EncodedCache(tmp_path / "cache", 10 * SIZE), **options
    ) as feeder:
        heads(feeder)
        feeder.close()
        with closing(sqlite3.connect(tmp_path / "cache")) as connection:
            before = connection.execute("SELECT name FROM entries ORDER BY name").fetchall()
        for _ in range(3):
            heads(feeder)
    with closing(sqlite3.connect(tmp_path / "cache")) as connection:
        assert connection.execute("SELECT name FROM entries ORDER BY name").fetchall() == before
    assert len(before) == 10


def store(database: CacheDatabase, run: int, clock: float | None, uses: dict[int, float]) -> None:
    database.write(run, clock, (), [Entry(name, 0, 0, b"x" * 10, use) for name, use in uses.items()])


def names_in(database: CacheDatabase) -> list[int]:
    return sorted(row[0] for row in database._rows(""))


def test_stale_entries_are_evicted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries whose next use has passed, and those of a source that nobody reads, make room first."""
    now = 1e9
    monkeypatch.setattr(database_module.time, "time", lambda: now)
    with closing(CacheDatabase(str(tmp_path / "cache"), 40)) as database:
        store(database, 1, 0.0, {1: 1.1, 2: 1.9})
        store(database, 2, 0.0, {3: 0.5, 4: UNKNOWN})
        store(database, 1, 0.1, {5: 1.5})  # sooner than an unknown use
        assert names_in(database) == [1, 2, 3, 5]
        store(database, 1, 0.1, {6: 1.95})  # later than all
        assert names_in(database) == [1, 2, 3, 5]
        store(database, 1, 1.5, {7: 3.4})  # 1 should have been used, and a slow rank may still need 5
        assert names_in(database) == [2, 3, 5, 7]
        now += 1.1 * database_module.UNUSED_S
        store(database, 1, 1.6, {8: UNKNOWN})  # nobody has read the source of 3
        assert names_in(database) == [2, 5, 7, 8]


def test_smaller_budget(tmp_path: Path) -> None:
    """A smaller ``max_bytes`` evicts at once, the latest next uses first."""
    with closing(CacheDatabase(str(tmp_path / "cache"), 40)) as database:
        store(database, 1, 0.0, {1: 1.1, 2: 1.9, 3: 1.5, 4: 1.2})
    with closing(CacheDatabase(str(tmp_path / "cache"), 25)) as database:
        assert names_in(database) == [1, 4]
        assert database.budget() == (20, 25)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "assignment",
    [
        "data SET bytes = zeroblob(length(bytes)) WHERE id % 4 = 1",
        "data SET bytes = substr(bytes, 2) WHERE id % 4 = 1",
        "data SET bytes = 'text' WHERE id % 4 = 1",
        "entries SET data = data % 40 + 1 WHERE data % 4 = 1",
        "entries SET data = 999 WHERE data % 4 = 1",
        "entries SET tag = tag + 1 WHERE data % 4 = 1",
        "entries SET kind = 1 WHERE data % 4 = 1",
    ],
)
async def test_damaged_entries_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], assignment: str
) -> None:
    """Damaged entries are detected, logged, read from the source and stored again."""
    path = tmp_path / "cache"
    await filled(path)
    damage(path, assignment)
    assert main(["cache", "verify", str(path)]) == 1
    assert ", 10 damaged" in capsys.readouterr().out
    for _ in range(2):  # an entry that referred to the bytes of another one has taken them along
        source = CachedSource(inner := Blocks(), EncodedCache(path, 40 * SIZE))
        assert await source.read_many(range(40)) == [block(index, SIZE) for index in range(40)]
        await source.aclose()
        assert sum(inner.reads.values()) <= 10
    assert "10 damaged entries" in caplog.text
    assert main(["cache", "verify", str(path)]) == 0


KILLED = """
import asyncio, sys
from aiofeed import EncodedCache
from tests.support.encoded import fill_forever
asyncio.run(fill_forever(EncodedCache(sys.argv[1], 10_000_000), int(sys.argv[2])))
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    """SIGKILL between any two instructions leaves a cache that works, without a damaged entry."""
    path, rng = tmp_path / "cache", random.Random(7)
    for seed in range(6):
        command = [sys.executable, "-c", KILLED, str(path), str(seed)]
        with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(1 + rng.randrange(12)):
                assert process.stdout.readline() == b"x\n"
            process.send_signal(signal.SIGKILL)
        assert main(["cache", "verify", str(path)]) == 0
        with Feeder(
            Blocks(2000, 20_000), decode=as_it_is, collate_fn=list, batch_size=50, cache=EncodedCache(path, 10_000_000)
        ) as feeder:
            samples = [data for batch in feeder for data in batch]
        assert samples == [block(index, 20_000) for index in range(2000)]
        assert of_feeder(feeder).cache_hits > 0
        assert entries(path)["nbytes"] <= 10_000_000


FULL = """
import logging, resource, sys
from aiofeed import EncodedCache, Feeder
from tests.cache.test_encoded import HEADS, heads, head
from tests.support.encoded import Blocks

logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
with Feeder(Blocks(200), decode=head, batch_size=8, shuffle=True, cache=EncodedCache(sys.argv[1], 1 << 30)) as feeder:
    for _ in range(3):
        assert sorted(heads(feeder)) == sorted(HEADS)
"""


@pytest.mark.parametrize("limit", [1000, 50_000, 130_000])
def test_full_disk(tmp_path: Path, limit: int) -> None:
    """If the disk is full, when the file is created or later, training goes on, and a warning says so."""
    path = tmp_path / "cache"
    command = [sys.executable, "-c", FULL, str(path), str(limit)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stdout.count("WARNING:aiofeed.cache") <= 3, done.stdout
    assert (tmp_path / "cache").exists()


def test_full_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After SQLITE_FULL entries that exist are still read, one warning is logged, and storing starts again later."""
    path, full = tmp_path / "cache", True
    prepare = CacheDatabase._prepare

    def limited(self: CacheDatabase, *arguments: Any) -> None:
        prepare(self, *arguments)
        self._execute(f"PRAGMA max_page_count = {12 if full else 1000}")

    monkeypatch.setattr(CacheDatabase, "_prepare", limited)
    monkeypatch.setattr(source_module, "WRITE_BYTES", 20 * SIZE)
    source = Blocks(200)
    with Feeder(source, decode=head, batch_size=10, cache=EncodedCache(path, 1 << 30)) as feeder:
        for _ in range(3):
            assert heads(feeder) == HEADS
    assert caplog.text.count("database or disk is full") == 1
    full = False
    monkeypatch.setattr(source_module, "PAUSE_S", 0.0)
    with Feeder(source, decode=head, batch_size=10, cache=EncodedCache(path, 1 << 30)) as feeder:
        assert heads(feeder) == HEADS
    assert entries(path)["count"] == 200


async def test_busy_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process writes for long, samples are served and not stored, without a pause afterwards."""
    monkeypatch.setattr(database_module, "BUSY_S", 0.01)
    source = CachedSource(Blocks(), EncodedCache(tmp_path / "cache", 1 << 20))
    await source.read_many(range(10))
    write_now(source)
    with closing(sqlite3.connect(tmp_path / "cache", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await source.read_many(range(20)) == [block(index, SIZE) for index in range(20)]
        write_now(source)
        other.execute("ROLLBACK")
    await source.read_many(range(30))
    await source.aclose()
    assert source._source.reads == {index: 2 if 10 <= index < 20 else 1 for index in range(30)}
    assert entries(tmp_path / "cache")["count"] == 30


async def test_damaged_while_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the database fails in the middle of a run, samples come from the source, with one warning."""
    path = tmp_path / "cache"
    source = CachedSource(inner := Blocks(), EncodedCache(path, 1 << 20))
    await source.read_many(range(20))
    write_now(source)
    damage_table = sqlite3.connect(path)
    damage_table.execute("DROP TABLE data")
    damage_table.close()
    for _ in range(3):
        assert await source.read_many(range(40)) == [block(index, SIZE) for index in range(40)]
        write_now(source)
    await source.aclose()
    assert sum(inner.reads.values()) > 60
    assert caplog.text.count("is not used for") == 2  # reading and writing


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")


def newer(path: Path) -> None:
    CacheDatabase(str(path), 1000).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def torn(path: Path) -> None:
    CacheDatabase(str(path), 1000).close()
    path.write_bytes(path.read_bytes()[:30_000])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("precious\n" * 300), "another path, or delete"),
        (lambda path: path.write_bytes(b"x"), "another path, or delete"),
        (foreign, "not a cache of aiofeed"),
        (newer, "format 99"),
        (torn, "delete the file"),
        (lambda path: path.mkdir(), "cannot be opened"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    """Another or a damaged file is a ``CacheError`` of ``Feeder`` that names it, and is not changed."""
    path = tmp_path / "cache"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CacheError, match=message) as caught:
        Feeder(Blocks(), decode=head, batch_size=4, cache=EncodedCache(path, 1 << 20))
    assert str(path) in str(caught.value)
    assert before is None or path.read_bytes() == before


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    """A missing folder is a ``CacheError`` before the first batch."""
    with pytest.raises(CacheError, match="its folder must exist"):
        Feeder(Blocks(), decode=head, batch_size=4, cache=EncodedCache(tmp_path / "none" / "cache", 1 << 20))


def test_empty_file_becomes_a_cache(tmp_path: Path) -> None:
    """An empty file, such as a process leaves that is killed while it creates the cache, is used."""
    (tmp_path / "cache").touch()
    with Feeder(Blocks(), decode=head, batch_size=4, cache=EncodedCache(tmp_path / "cache", 1 << 20)) as feeder:
        assert heads(feeder) == HEADS[:40]
    assert entries(tmp_path / "cache")["count"] == 40


def test_read_only_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be written to is a ``CacheError`` that says so."""
    CacheDatabase(str(tmp_path / "cache"), 1000).close()
    connect = sqlite3.connect

    def read_only(name: str, **options: Any) -> sqlite3.Connection:
        options["uri"] = True  # root may write to any file
        return connect(name.replace("mode=rwc", "mode=ro"), **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(CacheError, match="must be writable"):
        Feeder(Blocks(), decode=head, batch_size=4, cache=EncodedCache(tmp_path / "cache", 2000))


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_samples_are_never_wrong(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Under any sequence of reads, writes, damage, closes and budgets, samples are right and the budget holds."""
    import asyncio

    path = tmp_path_factory.mktemp("cache") / "cache"
    logging.getLogger("aiofeed.cache").disabled = True

    async def run() -> None:
        rooms = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
        for room in rooms:
            source = CachedSource(Blocks(30, 100), EncodedCache(path, room * 100))
            for plan in plans(Schedule(length=30, batch_size=5, shuffle=True, seed=data.draw(st.integers(0, 2))), 2):
                if data.draw(st.booleans()):
                    source.announce(plan)
                assert await source.read_many(plan.indices) == [block(index, 100) for index in plan.indices]
                if data.draw(st.booleans()):
                    write_now(source)
                    assert entries(path)["nbytes"] <= room * 100
                if data.draw(st.integers(0, 5)) == 0:
                    CacheDatabase(str(path), room * 100).close()
                    damage(path, "data SET bytes = zeroblob(100) WHERE id % 3 = 0")
            await source.aclose()

    try:
        asyncio.run(run())
    finally:
        logging.getLogger("aiofeed.cache").disabled = False


# --- arguments and the command line -----------------------------------------------------------------------------------


def test_arguments() -> None:
    """Bad arguments name themselves."""
    with pytest.raises(TypeError, match="path of a file"):
        EncodedCache(3, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes"):
        EncodedCache("a", 0)
    with pytest.raises(TypeError, match="max_byte"):
        EncodedCache("a", max_byte=3)  # type: ignore[call-arg]


def test_sources_without_bytes_are_refused(tmp_path: Path) -> None:
    """A Dataset, Tensors and a Stream are refused before the first batch, with what to do instead."""
    cache, numbers = EncodedCache(tmp_path / "cache", 1 << 20), torch.arange(8)
    for source in (numbers.tolist(), torch.utils.data.TensorDataset(numbers), Mixture({"a": numbers.tolist()})):
        with pytest.raises(TypeError, match="DiskCache"):
            Feeder(source, batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="leave it out"):
        Feeder(Tensors(numbers), batch_size=4, cache=cache)
    with pytest.raises(ValueError, match="leave it out"):
        Feeder(Stream(lambda: [1, 2]), batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="DiskCache"):
        DataLoader(numbers.tolist(), batch_size=4, cache=cache)  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()


async def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``aiofeed cache info`` describes a file, ``verify`` finds damage and ``--repair`` deletes it."""
    path = str(tmp_path / "cache")
    await filled(tmp_path / "cache")
    assert main(["cache", "info", path]) == 0
    assert capsys.readouterr().out == f"{path}: 40 entries, 39.1 KiB of 39.1 KiB\n"
    assert main(["cache", "verify", path]) == 0
    assert "40 entries, 39.1 KiB, 0 damaged" in capsys.readouterr().out
    damage(tmp_path / "cache", "data SET bytes = zeroblob(5) WHERE id = 3")
    for _ in range(2):
        assert main(["cache", "verify", path]) == 1
        assert "1 damaged\n" in capsys.readouterr().out
    assert main(["cache", "verify", path, "--repair"]) == 1
    assert "39 entries, 38.1 KiB, 1 damaged, deleted" in capsys.readouterr().out
    assert main(["cache", "verify", path]) == 0


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is not created, and another file is named."""
    assert main(["cache", "verify", str(tmp_path / "none")]) == 1
    assert "there is no cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "text").write_text("text" * 1000)
    assert main(["cache", "info", str(tmp_path / "text")]) == 1
    assert "another file" in capsys.readouterr().err
