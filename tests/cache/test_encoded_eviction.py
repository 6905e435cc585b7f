"""``EncodedCache`` that is full: which entries stay."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aiofeed import EncodedCache, Feeder
from aiofeed.cache.encoded import database as database_module
from aiofeed.cache.encoded import source as source_module
from aiofeed.cache.encoded.database import UNKNOWN, CacheDatabase, Entry
from aiofeed.cache.encoded.source import CachedSource
from aiofeed.core.types import BatchPlan
from aiofeed.sampling.schedule import Position, Schedule
from tests.support.encoded import (
    SIZE,
    Blocks,
    block,
    entries,
    filled,
    head,
    heads,
    of_feeder,
    plans,
    write_now,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# --- eviction ---------------------------------------------------------------------------------------------------------


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
        ("\u00b2", {"world_size": 4}),
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
