"""``EncodedCache`` with damaged files, killed processes and full disks."""

from __future__ import annotations

import logging
import random
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import pytest

from aiofeed import EncodedCache, Feeder
from aiofeed.cache.encoded import database as database_module
from aiofeed.cache.encoded import source as source_module
from aiofeed.cache.encoded.database import CacheDatabase, check_file
from aiofeed.cache.encoded.source import CachedSource
from aiofeed.errors import CacheError
from aiofeed.reports.commands.cli import main
from aiofeed.sampling.schedule import Schedule
from tests.support.encoded import (
    HEADS,
    SIZE,
    Blocks,
    as_it_is,
    block,
    damage,
    entries,
    filled,
    head,
    heads,
    of_feeder,
    plans,
    write_now,
)
from tests.support.mutations import mutated
from tests.support.paths import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.slow)], ids=str)
async def test_a_mutated_file_gives_the_data_or_an_error_that_names_it(tmp_path: Path, seeds: range) -> None:
    """Whatever is damaged: pages of SQLite, its header, entries or their bytes."""
    path = tmp_path / "cache"
    await filled(path)
    data = path.read_bytes()
    for seed in seeds:
        for file in tmp_path.iterdir():
            file.unlink()
        path.write_bytes(mutated(data, seed, 20_000))
        cache = EncodedCache(path, 40 * SIZE)
        try:
            check_file(cache)
        except CacheError as error:
            assert str(path) in str(error)  # noqa: PT017 - either is right
        for _ in range(2):
            source = CachedSource(Blocks(), cache)
            assert await source.read_many(range(40)) == [block(index, SIZE) for index in range(40)], seed
            await source.aclose()


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
    assert "has damaged entries" in caplog.text
    assert main(["cache", "verify", str(path)]) == 0


COLUMNS = {
    "budget": ("total", "max_bytes"),
    "data": ("bytes",),
    "runs": ("clock", "seen"),
    "entries": ("tag", "kind", "crc", "size", "data", "run", "next_use"),
}


@pytest.mark.parametrize("value", ["NULL", "'text'", "-1"])
@pytest.mark.parametrize("column", [f"{table} {each}" for table, columns in COLUMNS.items() for each in columns])
async def test_a_damaged_column(tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: str) -> None:
    """With any value in any column, samples are right, or a ``CacheError`` names the file; with an open cache, too."""
    path = tmp_path / "cache"
    table, name = column.split()
    await filled(path)
    source = CachedSource(Blocks(80), EncodedCache(path, 40 * SIZE))
    assert await source.read_many(range(4)) == [block(index, SIZE) for index in range(4)]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = 1")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
    damage(path, f"{table} SET {name} = {value}")
    assert await source.read_many(range(80)) == [block(index, SIZE) for index in range(80)]
    await source.aclose()
    damage(path, f"{table} SET {name} = {value}")
    assert main(["cache", "verify", str(path)]) in (0, 1)
    assert str(path) in "".join(capsys.readouterr())
    for room in (40, 5):  # the smaller budget evicts
        try:
            check_file(EncodedCache(path, room * SIZE))
            message = f"{path}: delete"
        except CacheError as error:
            message = str(error)
        assert re.search(f"{path}.* delete", message)
        source = CachedSource(Blocks(), EncodedCache(path, room * SIZE))
        assert await source.read_many(range(40)) == [block(index, SIZE) for index in range(40)]
        await source.aclose()


@pytest.mark.parametrize("statement", ["UPDATE budget SET total = 'text'", "DELETE FROM budget"])
def test_a_damaged_budget(tmp_path: Path, statement: str) -> None:
    """Without a usable budget the file is refused, and may be deleted."""
    path = tmp_path / "cache"
    CacheDatabase(str(path), 1000).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)
    with pytest.raises(CacheError, match=r"is damaged .*delete the file"):
        Feeder(Blocks(), decode=head, batch_size=4, cache=EncodedCache(path, 1000))


KILLED = """
import asyncio, sys
from aiofeed import EncodedCache
from tests.support.encoded import fill_forever
asyncio.run(fill_forever(EncodedCache(sys.argv[1], 10_000_000), int(sys.argv[2])))
"""


@pytest.mark.slow
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
from tests.support.encoded import HEADS, Blocks, head, heads

logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
with Feeder(Blocks(200), decode=head, batch_size=8, shuffle=True, cache=EncodedCache(sys.argv[1], 1 << 30)) as feeder:
    for _ in range(3):
        assert sorted(heads(feeder)) == sorted(HEADS)
"""


@pytest.mark.slow
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


def test_a_cache_that_another_process_creates_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process makes a cache between any two statements of the one that opens it is opened."""
    execute = CacheDatabase._execute
    statements: list[str] = []

    def opened(path: str, created_before: int) -> tuple[int, int]:
        """Open a new file; another connection makes it a cache before the statement of this number."""
        statements.clear()
        other: list[CacheDatabase] = []

        def observed(database: CacheDatabase, statement: str, values: Any = ()) -> sqlite3.Cursor:
            if database not in other:
                if len(statements) == created_before:
                    with monkeypatch.context() as patch:
                        patch.setattr(CacheDatabase, "_execute", execute)
                        other.append(CacheDatabase(path, 1000))
                statements.append(statement)
            return execute(database, statement, values)

        with monkeypatch.context() as patch:
            patch.setattr(CacheDatabase, "_execute", observed)
            database = CacheDatabase(path, 1000)
        for each in (*other, database):
            budget = each.budget()
            each.close()
        return budget

    opened(str(tmp_path / "cache"), created_before=-1)
    transaction = statements.index("BEGIN IMMEDIATE")  # from here on the other process waits
    for number in range(transaction + 1):
        assert opened(str(tmp_path / f"cache {number}"), created_before=number) == (0, 1000)
        assert not any(statement.startswith("CREATE") for statement in statements)
