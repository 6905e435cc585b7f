"""``EncodedCache``, and its file: an SQLite database that processes share.

A killed process or a full disk leaves the database as it was before the last transaction. Each entry has a checksum.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aiofeed.core.errors import CacheError
from aiofeed.core.types import public
from aiofeed.core.validation import check_positive_int, explain_arguments

APPLICATION = 0x61466563  # "aFec"
FORMAT = 1
log: logging.Logger = logging.getLogger("aiofeed.cache")

# An entry of 100 KB is stored in 0.63 ms and read in 60 us; with SQLite's 4 KiB in 1.8 ms and 175 us.
PAGE_BYTES = 16 << 10
# How long to wait for a process that writes.
BUSY_S = 5.0
# The next use of a sample whose order is unknown, in epochs: later than all that are known.
UNKNOWN = 1e9
# How late a next use may be, in epochs, because processes do not read in step.
LATE = 0.25
# Entries of a source that nobody has read for so long are evicted first.
UNUSED_S = 3600.0
_OTHER = "is another file, or damaged: give EncodedCache another path, or delete the file"
# Names of one query.
_NAMES = 500

_SCHEMA = (
    "CREATE TABLE budget (total INTEGER NOT NULL, max_bytes INTEGER NOT NULL)",
    "CREATE TABLE data (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL)",
    "CREATE TABLE runs (run INTEGER PRIMARY KEY, clock REAL NOT NULL, seen REAL NOT NULL)",
    """CREATE TABLE entries (
    name INTEGER PRIMARY KEY, tag INTEGER NOT NULL, kind INTEGER NOT NULL, crc INTEGER NOT NULL, size INTEGER NOT NULL,
    data INTEGER NOT NULL, run INTEGER NOT NULL, next_use REAL NOT NULL)""",
    "CREATE INDEX uses ON entries (run, next_use)",
    "CREATE TRIGGER stored AFTER INSERT ON entries BEGIN UPDATE budget SET total = total + new.size; END",
    """CREATE TRIGGER evicted AFTER DELETE ON entries
    BEGIN UPDATE budget SET total = total - old.size; DELETE FROM data WHERE id = old.data; END""",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)

# The number of tables, and what the file says that it is: all 0 of an empty file.
_IDENTITY = """SELECT (SELECT count(*) FROM sqlite_master), application_id, user_version
FROM pragma_application_id, pragma_user_version"""

# For each source its first and its last next use: the first may have passed.
_LATEST = """
SELECT CASE
    WHEN seen < :unused OR next_use < clock - :late THEN :never
    WHEN next_use >= :unknown THEN :unknown
    ELSE next_use - clock
END AS wait, name, size FROM runs JOIN entries ON name IN (
    (SELECT name FROM entries AS each WHERE each.run = runs.run ORDER BY next_use LIMIT 1),
    (SELECT name FROM entries AS each WHERE each.run = runs.run ORDER BY next_use DESC LIMIT 1)
) ORDER BY wait DESC LIMIT 1
"""


@public
@explain_arguments()
@dataclass(frozen=True)
class EncodedCache:
    """Cache encoded samples, as a source reads them, on a local disk: ``cache=EncodedCache("train.cache", 100 << 30)``.

    For sources of bytes whose reads are slow: objects and shards at URLs. A sample in the cache is not requested again,
    in later epochs, by other processes and in later runs. It is decoded and augmented in every epoch. The file is an
    SQLite database, which survives killed processes. Each read verifies the entry's checksum; a damaged entry is read
    from the source again. If the disk is full, or the database fails, samples come from the source, and a log line says
    so.

    When the cache is full, the samples that were stored first stay: an epoch reads each sample once, so no replacement
    has more hits. On several machines, each of which reads a part of every epoch, as ``LOCAL_WORLD_SIZE`` says, a
    sample replaces the entry that the machine reads latest, if it is read sooner (Belady, 1966). This follows from seed
    and epoch, for up to 8 epochs. Where the order is not known in advance (samplers, weights, plans, ``Mixture``,
    ``engine="process"``), the first samples stay. Entries of sources not read for an hour are evicted first.

    Entries are named by the type of the source, the sample's key and ``source.version(index)``; without this method, by
    the source's fingerprint. So shards and files that change are noticed. Objects that are replaced under the same key
    are *not*: delete the file then.

    Args:
        path: Path of the file, on a local disk; its folder must exist and be writable.
        max_bytes: Largest sum of the entries' bytes. The file is some percent larger, and beside it there is a log of
            some tens of MB. The processes that share a file use the latest value.
    """

    path: str | os.PathLike[str]
    max_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"EncodedCache takes the path of a file, got {self.path!r}")
        object.__setattr__(self, "path", os.fspath(self.path))
        object.__setattr__(self, "max_bytes", check_positive_int("EncodedCache(max_bytes=...)", self.max_bytes))


def check_file(cache: EncodedCache) -> None:
    """Open the file of a cache once, and create it if it does not exist.

    Raises:
        CacheError: The file is not a cache, is damaged or cannot be opened.
    """
    try:
        CacheDatabase(str(cache.path), cache.max_bytes).close()
    except sqlite3.Error as error:  # a full disk, for example: samples are then read from the source
        log.warning("the cache %s cannot be opened now: %s", cache.path, error)


class Entry(NamedTuple):
    """An entry of a sample.

    Args:
        name: 64 bits of the hash of the sample's name.
        tag: 32 other bits of it, which are compared.
        kind: How the sample is encoded.
        data: Its bytes; ``None`` if only the next use is to be written, or if they are damaged.
        next_use: When it is read next, in epochs.
        run: The source that read it last; 0 for a new one.
    """

    name: int
    tag: int
    kind: int
    data: bytes | None
    next_use: float = UNKNOWN
    run: int = 0


class CacheDatabase:
    """A connection to the file of a cache, for one thread at a time.

    Args:
        path: Path of the file.
        max_bytes: The budget. ``None`` leaves it as it is; the file must then exist.

    Raises:
        CacheError: The file is not a cache, is damaged or cannot be opened.
        sqlite3.Error: The disk is full, or other processes use the file for too long.
    """

    def __init__(self, path: str, max_bytes: int | None = None) -> None:
        self._connection: sqlite3.Connection | None = None
        if max_bytes is None and not os.path.exists(path):
            raise CacheError(f"there is no cache at {path!r}")
        if os.path.isfile(path) and 0 < os.path.getsize(path) < 512:  # SQLite would write over it
            raise CacheError(f"the cache {path!r} {_OTHER}")
        uri = f"{Path(path).absolute().as_uri()}?mode={'rw' if max_bytes is None else 'rwc'}"
        try:
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.text_factory = bytes  # a damaged entry may be a text
            self._prepare(path, max_bytes)
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.Error) and (reason := _refusal(error)) is not None:
                raise CacheError(f"the cache {path!r} {reason}") from error
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def __del__(self) -> None:
        self.close()

    def _execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        assert self._connection is not None
        try:
            return self._connection.execute(statement, values)
        except UnicodeDecodeError as error:  # sqlite3's message names a damaged column or table
            raise _corrupt(f"a name is no text: {error}") from None

    def _prepare(self, path: str, max_bytes: int | None) -> None:
        if not self._is_cache(path):
            if max_bytes is None:
                raise CacheError(f"{path!r} is empty, not a cache")
            self._create(path, max_bytes)
        # The log is written to the disk before its pages are: a power failure loses entries and damages nothing.
        self._execute("PRAGMA synchronous = NORMAL")
        self._execute("PRAGMA journal_size_limit = 67108864")
        if max_bytes is not None and self.budget()[1] != max_bytes:
            with self._transaction():
                self._execute("UPDATE budget SET max_bytes = ?", [max_bytes])
                self._make_room(0, -math.inf)

    def _is_cache(self, path: str) -> bool:
        """Whether the file is a cache; False if it is empty. Raises ``CacheError`` for another file."""
        # In one statement, because another process may be creating the cache: it sets all of these at once.
        tables, application, version = _numbers(self._execute(_IDENTITY).fetchone())
        if application == APPLICATION:
            if version != FORMAT:
                raise CacheError(
                    f"the cache {path!r} has format {version}, and this version of aiofeed reads format {FORMAT}: "
                    f"delete the file, or give EncodedCache another path"
                )
            return True
        if application or version or tables:
            raise CacheError(f"{path!r} is a database, but not a cache of aiofeed: give EncodedCache another path")
        return False

    def _create(self, path: str, max_bytes: int) -> None:
        self._execute(f"PRAGMA page_size = {PAGE_BYTES}")
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                if self._execute("PRAGMA journal_mode = WAL").fetchone()[0] != b"wal":
                    raise CacheError(f"the cache {path!r} needs a local disk: its file system has no shared memory")
                break
            except sqlite3.OperationalError as error:
                # Another process does the same; SQLite does not wait for it here.
                if code_of(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        with self._transaction():
            if not self._is_cache(path):
                for statement in _SCHEMA:
                    self._execute(statement)
                self._execute("INSERT INTO budget VALUES (0, ?)", [max_bytes])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        assert self._connection is not None
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        finally:
            if self._connection.in_transaction:  # after an error; SQLite ends the transaction itself after some
                self._execute("ROLLBACK")

    def budget(self) -> tuple[int, int]:
        """The sum of the entries' bytes, and its limit."""
        total, max_bytes = _numbers(self._execute("SELECT total, max_bytes FROM budget").fetchone() or [None])
        return total, max_bytes

    def count(self) -> int:
        """The number of entries."""
        return int(self._execute("SELECT count(*) FROM entries").fetchone()[0])

    def look_up(self, names: Mapping[int, int]) -> dict[int, Entry]:
        """The entries of ``names``, a dict of names and tags."""
        wanted, found = list(names), dict[int, Entry]()
        for start in range(0, len(wanted), _NAMES):
            block = wanted[start : start + _NAMES]
            for row in self._rows(f"WHERE name IN ({','.join('?' * len(block))})", block):
                name, tag, kind, _, data, run = row
                data = data if tag == names[name] and _is_valid(row) else None
                found[name] = Entry(name, tag, kind, data, run=run)
        return found

    def _rows(self, where: str, values: Sequence[int] = ()) -> sqlite3.Cursor:
        columns = "name, tag, kind, crc, bytes, run"
        return self._execute(f"SELECT {columns} FROM entries LEFT JOIN data ON id = data {where}", values)

    def write(self, run: int, clock: float | None, damaged: Iterable[int], entries: Iterable[Entry]) -> None:
        """Write new entries and next uses in one transaction; evict entries whose next use is later.

        Args:
            run: Identifies the source; next uses are compared with its clock.
            clock: The latest position that was read, in epochs; ``None`` if the order is unknown.
            damaged: Names of entries to delete.
            entries: Entries that were read, without data, and new ones.
        """
        now = time.time()
        with self._transaction():
            self._execute(
                "INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (run) DO UPDATE SET seen = excluded.seen"
                + ("" if clock is None else ", clock = excluded.clock"),
                [run, clock or 0.0, now],
            )
            unused = "seen < ? AND NOT EXISTS (SELECT 1 FROM entries WHERE entries.run = runs.run)"
            self._execute(f"DELETE FROM runs WHERE {unused}", [now - UNUSED_S])
            self._delete(damaged)
            for name, tag, kind, data, next_use, _ in entries:
                known = self._execute("SELECT run, next_use FROM entries WHERE name = ?", [name]).fetchone()
                if known is not None or data is None:
                    if known not in (None, (run, next_use)):
                        self._execute("UPDATE entries SET run = ?, next_use = ? WHERE name = ?", [run, next_use, name])
                    continue
                if not self._make_room(len(data), next_use - (clock or 0.0) if next_use < UNKNOWN else UNKNOWN):
                    continue
                at = self._execute("INSERT INTO data (bytes) VALUES (?)", [data]).lastrowid
                row = [name, tag, kind, _checksum(name, tag, kind, data), len(data), at, run, next_use]
                self._execute(f"INSERT INTO entries VALUES ({','.join('?' * len(row))})", row)

    def _make_room(self, size: int, wait: float) -> bool:
        """Evict entries that are needed later than in ``wait`` epochs until ``size`` bytes are free."""
        total, max_bytes = self.budget()
        if size > max_bytes:
            return False
        while total + size > max_bytes:
            latest = self._latest()
            if latest is None or latest[0] <= wait:
                return False
            self._delete(latest[1:2])
            total -= latest[2]
        return True

    def _latest(self) -> tuple[float, int, int] | None:
        """The entry whose next use is latest: epochs until then, name and size."""
        values = {"unused": time.time() - UNUSED_S, "late": LATE, "unknown": UNKNOWN, "never": math.inf}
        found = self._execute(_LATEST, values).fetchone()
        if found is None:
            return None
        wait, name, size = _numbers(found)
        return wait, name, size

    def verify(self, *, repair: bool) -> int:
        """Verify all checksums; returns the number of damaged entries, which ``repair`` deletes."""
        damaged = [row[0] for row in self._rows("") if not _is_valid(row)]
        if repair:
            with self._transaction():
                self._delete(damaged)
        return len(damaged)

    def _delete(self, names: Iterable[int]) -> None:
        for name in names:
            self._execute("DELETE FROM entries WHERE name = ?", [name])


def _is_valid(row: tuple[Any, ...]) -> bool:
    name, tag, kind, crc, data, _ = row
    return type(data) is bytes and crc == _checksum(name, tag, kind, data)


def _checksum(name: int, tag: int, kind: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(f"{name} {tag} {kind}".encode()))


def _numbers(row: Sequence[Any]) -> Sequence[Any]:
    """A row of numbers. A damaged row, which may have any types, is an error as of SQLite."""
    if not all(isinstance(value, int | float) for value in row):
        raise _corrupt(f"a row has the values {row!r}, not numbers")
    return row


def _corrupt(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def code_of(error: sqlite3.Error) -> int:
    """SQLite's code of an error; 0 for an error of the module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _refusal(error: sqlite3.Error) -> str | None:
    """Why a file cannot be a cache; ``None`` for errors that may end by themselves, such as a full disk."""
    code = code_of(error)
    if code == sqlite3.SQLITE_NOTADB:
        return _OTHER
    if code == sqlite3.SQLITE_CORRUPT or "no such" in str(error):
        return f"is damaged ({error}): delete the file, with the -wal and -shm beside it; it will be filled again"
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return f"cannot be opened ({error}): its folder must exist, and both must be writable"
    return None
