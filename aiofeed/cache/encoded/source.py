"""``CachedSource``: a source whose samples are looked up in an ``EncodedCache`` before they are read."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from aiofeed.cache.encoded.database import CacheDatabase, EncodedCache, Entry, code_of
from aiofeed.core.errors import CacheError
from aiofeed.core.statistics import StorageStatistics
from aiofeed.core.types import BatchPlan, Members, Source
from aiofeed.sources.subset import fingerprint_of, kind_of

ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("aiofeed.cache")

# Changes are written together: a transaction takes as long as some hundred updates.
WRITE_EVERY_S = 0.25
WRITE_BYTES = 8 << 20
# After so long without a change only the time is written.
IN_USE_S = 60.0
# Samples that wait to be written. Beyond this they are not stored: training does not wait for the disk.
MOST_PENDING_BYTES = 32 << 20
# How long closing waits for them.
CLOSE_S = 2.0
# How long the database is not used after an error.
PAUSE_S = 60.0
# The share of the budget from which on next uses are updated: before, nothing is evicted.
NEARLY_FULL = 0.875
# Planned samples whose next use is remembered until they are read.
MOST_PLANNED = 1 << 20

RAW, PACKED = 0, 1
_TUPLE = 1
_PLAIN = (bytes, str, int, float, bool, type(None))

# Connections of a parent process. Closing them here could remove its locks.
_inherited: list[Any] = []

Name: TypeAlias = tuple[int, int]
"""Name and tag of an entry."""
Planned: TypeAlias = tuple[Any, int]
"""The order in which a sample is read, which knows next uses, and the sample's position there."""


class Pending(NamedTuple):
    """An entry to write, whose next use is not known yet."""

    entry: Entry
    at: int
    planned: Planned | None


class CachedSource:
    """The samples of a source, which are kept in a cache.

    Args:
        source: A source of bytes.
        cache: Its settings.
    """

    answers_at_once = False

    def __init__(self, source: Source[Any], cache: EncodedCache) -> None:
        self._source = source
        self._members = Members.of(source)
        self._cache = cache
        self._kind = kind_of(source).replace("__mp_main__", "__main__")  # as worker processes import the script
        self._fingerprint = fingerprint_of(source, len(source))
        digest = hashlib.blake2b(f"{self._kind}\0{self._fingerprint}".encode(), digest_size=8).digest()
        self._run = int.from_bytes(digest, "little", signed=True)
        if self._members.target is not None:
            self.target: Callable[[int], Any] = self._members.target
        self.looks_ahead: bool = bool(getattr(source, "looks_ahead", False))
        if self.looks_ahead:
            given: Any = source
            self.shard_starts: Sequence[int] = given.shard_starts
            self.nbytes: Callable[[int], int] = given.nbytes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._reader = _Connection(self._cache)
        self._writer = _Connection(self._cache)
        self._planned: dict[int, Planned] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._written_at = time.monotonic()
        self._damaged: set[int] = set()
        # By name: those that wait, and those that a thread is writing. Samples are found here, too.
        self._pending: dict[int, Pending] = {}
        self._in_write: dict[int, Pending] = {}
        self._pending_bytes = 0
        # Whether to write the time, so that the entries are not evicted as unused.
        self._in_use = False
        self._damage_logged = False
        self._hits = self._misses = self._total = 0
        self._nearly_full = False

    def __getstate__(self) -> tuple[Source[Any], EncodedCache]:
        """Leave out what belongs to this process."""
        return self._source, self._cache

    def __setstate__(self, state: tuple[Source[Any], EncodedCache]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._source)

    def __repr__(self) -> str:
        return f"CachedSource({self._source!r}, {self._cache!r})"

    def key(self, index: int, /) -> str:
        """The source's name of a sample."""
        return self._source.key(index)

    def storage_statistics(self) -> StorageStatistics:
        """The source's requests, and the hits and misses of this process."""
        inner = self._members.storage_statistics
        found = (None if inner is None else inner()) or StorageStatistics()
        return replace(found, cache_hits=self._hits, cache_misses=self._misses, cached_bytes=self._total)

    def announce(self, plan: BatchPlan) -> None:
        """Remember the order of samples that are read next, from which their next use follows."""
        if self._members.announce is not None:
            self._members.announce(plan)
        order = plan.order
        if getattr(order, "next_use", None) is None:
            return
        if len(self._planned) > MOST_PLANNED:  # of plans that were never read
            self._planned.clear()
        positions = zip(plan.indices, plan.positions, strict=True)
        self._planned.update({index: (order, position) for index, position in positions})

    async def open(self) -> None:
        """Open the source."""
        if self._members.open is not None:
            await self._members.open()

    async def aclose(self) -> None:
        """Write what is pending, for 2 s at most, and close the source."""
        if self._pid == os.getpid():
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(self._close))], timeout=CLOSE_S)
            with self._lock:
                self._pending, self._damaged, self._pending_bytes = {}, set(), 0
        if self._members.aclose is not None:
            await self._members.aclose()

    def _close(self) -> None:
        self._write_pending(wait=True)
        self._reader.close()
        self._writer.close()

    async def read(self, index: int, /) -> Any:
        """A sample of the cache, or of the source's ``read``."""
        [sample] = await self._cached([index], self._read_each)
        if isinstance(sample, BaseException):
            raise sample
        return sample

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Samples of the cache, and the others of the source in one call."""
        return await self._cached(indices, self._members.read_many or self._read_each)

    async def _read_each(self, indices: Sequence[int]) -> list[Any]:
        async def read(index: int) -> Any:
            try:
                return await self._source.read(index)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - the user's coroutine; SystemExit would end the loop
                return error

        return await asyncio.gather(*map(read, indices))

    async def _cached(self, indices: Sequence[int], read: Callable[[Sequence[int]], Any]) -> list[Any]:
        if self._pid != os.getpid():
            _inherited.append((self._reader, self._writer))
            self._reset()
        planned = [self._planned.pop(index, None) for index in indices]
        names, samples = await asyncio.to_thread(self._look_up, indices, planned)
        missing = [at for at, sample in enumerate(samples) if sample is _MISSING]
        self._hits += len(indices) - len(missing)
        self._misses += len(missing)
        if missing:
            found = list(await read([indices[at] for at in missing]))
            if len(found) != len(missing):
                raise ValueError(f"read_many returned {len(found)} samples for {len(missing)} indices")
            for at, sample in zip(missing, found, strict=True):
                samples[at] = self._keep(indices[at], planned[at], names[at], sample)
        since = time.monotonic() - self._written_at
        self._in_use |= since > IN_USE_S
        if (since > WRITE_EVERY_S or self._pending_bytes > WRITE_BYTES) and self._has_changes:
            self._written_at = time.monotonic()
            asyncio.get_running_loop().run_in_executor(None, self._write_pending)
        return samples

    @property
    def _has_changes(self) -> bool:
        return bool(self._pending or self._damaged or self._in_use)

    def _look_up(self, indices: Sequence[int], planned: Sequence[Planned | None]) -> tuple[list[Name], list[Any]]:
        """The names of samples, and the samples that are cached. Runs in a thread."""
        names = [self._name(index) for index in indices]
        # New ones are looked up first: those that are written meanwhile are found in the database.
        new = dict[int, Entry]()
        for name, tag in names:
            waiting = self._pending.get(name) or self._in_write.get(name)
            if waiting is not None and waiting.entry.data is not None and waiting.entry.tag == tag:
                new[name] = waiting.entry
        wanted = {name: tag for name, tag in names if name not in new and name != 0}

        def look_up(database: CacheDatabase) -> dict[int, Entry]:
            self._total, max_bytes = database.budget()
            self._nearly_full = self._total >= NEARLY_FULL * max_bytes
            return database.look_up(wanted)

        found: dict[int, Entry] = self._reader.call(look_up, {}) if wanted else {}
        damaged = {name for name, entry in found.items() if entry.data is None}
        if damaged and not self._damage_logged:
            self._damage_logged = True
            log.warning("the cache %s has damaged entries; their samples are read again", self._cache.path)
        found |= new
        with self._lock:
            self._damaged |= damaged
            for index, (name, _), use in zip(indices, names, planned, strict=True):
                entry, waiting = found.get(name), self._pending.get(name)
                if waiting is not None:
                    self._pending[name] = waiting._replace(planned=use or waiting.planned)
                elif entry is None or entry.data is None:
                    continue
                elif entry.run not in (0, self._run) or (self._nearly_full and use is not None):
                    self._pending[name] = Pending(entry._replace(data=None), index, use)
        return names, [_unpacked(found.get(name)) for name, _ in names]

    def _name(self, index: int) -> Name:
        """The name of a sample; (0, 0) if its source raises, whose read then does, too."""
        try:
            version = self._members.version
            described = f"{self._kind}\0{self.key(index)}\0{version(index) if version else self._fingerprint}"
        except Exception:  # noqa: BLE001 - the user's methods; reading the sample shows what is wrong with it
            return 0, 0
        digest = hashlib.blake2b(described.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little")

    def _keep(self, index: int, planned: Planned | None, name: Name, sample: Any) -> Any:
        """A sample that was read, after queueing it for the database, or its error."""
        if name == (0, 0) or isinstance(sample, BaseException):
            return sample
        try:
            entry = Entry(*name, *_packed(sample))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return TypeError(
                f"sample {self.key(index)!r} (index {index}) cannot be cached: {error}. EncodedCache keeps bytes, str, "
                f"int, float, bool and None, and tuples, lists and dicts of these: leave cache= out"
            )
        with self._lock:
            if self._pending_bytes < MOST_PENDING_BYTES:
                self._pending_bytes += len(entry.data or b"")
                self._pending[entry.name] = Pending(entry, index, planned)
        return sample

    def _write_pending(self, *, wait: bool = False) -> None:
        """Write all pending changes, unless another thread does; or after it. Runs in a thread."""
        if not self._writing.acquire(blocking=wait):
            return
        try:
            while self._has_changes:
                with self._lock:
                    damaged, pending, self._in_use = self._damaged, self._pending, False
                    self._in_write, self._pending, self._damaged, self._pending_bytes = pending, {}, set(), 0
                clock, entries = _with_next_uses(list(pending.values()))
                self._writer.call(lambda database: database.write(self._run, clock, damaged, entries), None)  # noqa: B023
                self._in_write = {}
        finally:
            self._writing.release()


def _with_next_uses(pending: Sequence[Pending]) -> tuple[float | None, list[Entry]]:
    """The latest position that was read, in epochs, and the entries with their next use."""
    entries, clock = [each.entry for each in pending], None
    by_order: dict[Any, list[int]] = {}
    for at, each in enumerate(pending):
        if each.planned is not None:
            by_order.setdefault(each.planned[0], []).append(at)
    for order, places in by_order.items():
        uses = order.next_use(np.array([pending[at].at for at in places], np.int64))
        latest = max([each.planned[1] for at in places if (each := pending[at]).planned is not None])
        clock = max(clock or 0.0, order.epoch + latest / order.length)
        for at, use in zip(places, uses.tolist(), strict=True):
            entries[at] = entries[at]._replace(next_use=use / order.length)
    return clock, entries


class _Connection:
    """A connection that is opened when it is first used. Its calls do not raise errors of the database."""

    def __init__(self, cache: EncodedCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._database: CacheDatabase | None = None
        self._paused_until = 0.0
        self._warned = False

    def call(self, function: Callable[[CacheDatabase], ResultT], default: ResultT) -> ResultT:
        """The result of a function of the database, or ``default`` after an error and some time after."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                return default
            try:
                if self._database is None:
                    self._database = CacheDatabase(str(self._cache.path), self._cache.max_bytes)
                return function(self._database)
            except (sqlite3.Error, CacheError) as error:
                if isinstance(error, sqlite3.Error) and code_of(error) == sqlite3.SQLITE_BUSY:
                    log.debug("the cache %s is in use: %s", self._cache.path, error)
                    return default
                self._paused_until = time.monotonic() + PAUSE_S
                self._close()
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "the cache %s failed and is not used for %.0f s, samples are read from their source: %s",
                        self._cache.path,
                        PAUSE_S,
                        error,
                    )
                return default

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


_MISSING: Any = object()


def _packed(sample: Any) -> tuple[int, bytes]:
    """A sample as bytes that ``_unpacked`` restores exactly.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: It cannot be restored.
    """
    if type(sample) is bytes:
        return RAW, sample
    return PACKED, msgspec.msgpack.encode(_plain(sample))


def _plain(value: Any) -> Any:
    """A value as msgpack has it, which lacks tuples."""
    kind = type(value)
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_plain(each) for each in value]))
    if kind is list:
        return [_plain(each) for each in value]
    if kind is dict:
        for key in value:
            if type(key) not in _PLAIN:
                raise TypeError(f"it has a key of the type {type(key).__name__}")
        return {key: _plain(each) for key, each in value.items()}
    if kind not in _PLAIN:
        raise TypeError(f"it has a value of the type {kind.__name__}")
    return value


def _unpacked(entry: Entry | None) -> Any:
    """The sample of an entry; ``_MISSING`` if there is none, or if it is damaged."""
    if entry is None or entry.data is None:
        return _MISSING
    return entry.data if entry.kind == RAW else _decoder.decode(entry.data)


def _extension(code: int, data: memoryview) -> Any:
    return tuple(_decoder.decode(data))


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
