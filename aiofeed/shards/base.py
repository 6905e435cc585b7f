"""Sources of samples in shards: what all formats have in common."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from aiofeed.common.blocking import run_blocking
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.common.parts import Parts, in_order
from aiofeed.common.progress_bar import LoadProgress
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.validation import check_callable, counted
from aiofeed.kernel.engine.fetch.user_errors import pointer_hint
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.files import AT_ONCE_S
from aiofeed.objects.reader import run_all, statistics_of
from aiofeed.shards import indexing
from aiofeed.shards.index import ShardIndex, with_labels
from aiofeed.shards.urls import Shard, ShardFinder, Urls

log: logging.Logger = logging.getLogger("aiofeed.sources")

# Shards that are opened at the same time, and shards that are read from end to end at the same time.
OPEN = 64
SCAN = 8
# Targets that are in no index are read from parts of a shard of this size.
LABEL_BYTES = 32 << 20
# Large parts of shards that are read at the same time, and the memory for those that were read, the last one in any
# case.
PARTS = 4
CACHE_BYTES = 256 << 20


class Shards(GroupedSource, ABC):
    """Samples in shards. Index i counts through the shards in their order."""

    rules: ClassVar[indexing.IndexRules]
    # Whether the format can be read without a loop.
    _blocking: ClassVar[bool] = True
    # Whether making samples of bytes takes so long that a thread does it.
    _in_thread: ClassVar[bool] = False

    def __init__(self, urls: Urls, *, store: Any = None, options: Mapping[str, Any] | None = None) -> None:
        finder = ShardFinder(store, options)
        self._shards: list[Shard] = run_blocking(lambda: self._open_all(finder, urls))
        self._local = self._blocking and all(shard.local for shard in self._shards)
        # The average time of reading a sample.
        self._seconds = 0.0
        self._parts = Parts(map(self._samples, self._shards))
        if not len(self):
            raise ValueError(f"{type(self).__name__}: {self._shards[0].url} and all other shards are without samples")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self), 'sample')} in {counted(len(self._shards), 'shard')})"

    def key(self, index: int, /) -> str:
        """Return the URL of the shard with the key of the sample, or with its number in the shard."""
        shard, sample = self._find(index)
        keys = shard.index.keys
        return f"{shard.url}[{sample}]" if keys is None else f"{shard.url}/{keys[sample].decode(errors='replace')}"

    @property
    def shard_starts(self) -> Sequence[int]:
        """The index of the first sample of each shard, and the number of samples."""
        return self._parts.starts

    def nbytes(self, index: int, /) -> int:
        """Return the encoded bytes of a sample."""
        shard, sample = self._find(index)
        return sum([end - start for start, end in _ranges(shard.index, [sample])])

    @property
    def looks_ahead(self) -> bool:
        """Whether samples should be read before their batches begin, those of a shard together; not for files."""
        return not self._local

    def version(self, index: int, /) -> str:
        """Return the version of the shard, the sample's number in it, and which part of it is read."""
        shard, sample = self._find(index)
        return f"{shard.version} {shard.size} {sample} {self._selection()!r}"

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Samples, or the error of each that cannot be read. All ranges of a shard are read together."""
        if self.answers_at_once:
            return await asyncio.to_thread(self.read_now, indices)
        started = time.perf_counter()
        groups = self._parts.group(indices)
        reads = [self._read_group(self._shards[number], samples) for number, (_, samples) in groups.items()]
        found = [await reads[0]] if len(reads) == 1 else await asyncio.gather(*reads)
        self._observe(len(indices), time.perf_counter() - started)
        return in_order(len(indices), zip([places for places, _ in groups.values()], found, strict=True))

    @property
    def answers_at_once(self) -> bool:
        """Whether samples are read as fast as from the page cache, so that decode threads may read them."""
        return self._local and 0.0 < self._seconds < AT_ONCE_S

    def read_now(self, indices: Sequence[int], /) -> list[Any]:
        """``read_many`` of files in the calling thread."""
        started = time.perf_counter()
        groups = self._parts.group(indices).items()
        found = [(places, self._read_group_now(self._shards[number], samples)) for number, (places, samples) in groups]
        self._observe(len(indices), time.perf_counter() - started)
        return in_order(len(indices), found)

    def fingerprint(self) -> str:
        """Names, sizes, lengths and keys of the shards, and which part of the samples is read."""
        digest = hashlib.sha256(f"{type(self).__name__} {self._selection()!r}".encode())
        for shard in self._shards:
            keys = 0 if shard.index.keys is None else zlib.crc32(shard.index.keys.data.tobytes())
            name = os.path.basename(shard.key)
            digest.update(f"\n{name} {shard.size} {self._samples(shard)} {keys}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:32]

    def content_parts(self) -> list[Content]:
        """Return what identifies the contents of the shards."""
        return [shard.content for shard in self._shards if shard.content is not None]

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests for shards at URLs in this process; ``None`` for files."""
        return statistics_of({id(shard.reader): shard.reader for shard in self._shards}.values())

    # --- for the formats

    @abstractmethod
    async def _index(self, shard: Shard) -> None:
        """Set the index of an open shard.

        Raises:
            ValueError: The shard is damaged or of another format.
        """

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> Any:
        """Return the contents of a sample, of the bytes of its members; for formats that read samples one by one.

        Raises:
            ValueError: The bytes are not those that the index names.
        """
        return index.read(sample)

    def _parse(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> Any:
        """Return the sample that a feeder gets."""
        return self._unpack(index, sample, parts)

    async def _list(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        return await finder.find(urls)

    def _samples(self, shard: Shard) -> int:
        return len(shard.index)

    def _selection(self) -> Any:
        return None

    # --- opening

    async def _open_all(self, finder: ShardFinder, urls: Urls) -> list[Shard]:
        shards = await self._list(finder, urls)
        turn, self._scanning = asyncio.Semaphore(OPEN), asyncio.Semaphore(SCAN)
        total = len(shards)
        progress = LoadProgress("opening shards", "shards", total, lambda done: f"opened {done} of {total} shards")

        async def open_one(shard: Shard) -> None:
            async with turn:
                try:
                    with naming_file(shard.url):
                        await shard.open()
                        await self._index(shard)
                except indexing.DAMAGED as error:
                    raise ValueError(f"{shard.url}: {reason_of(error)}{pointer_hint(shard.url)}") from error
            if shard.samples not in (None, self._samples(shard)):
                found = counted(self._samples(shard), "sample")
                raise ValueError(f"{shard.url}: it has {found}, the list of shards has {shard.samples}")
            progress.add()

        try:
            with progress:
                await run_all([open_one(shard) for shard in shards])
        finally:
            del self._scanning
        return shards

    async def _obtain(self, shard: Shard, target: Sequence[str] = (), rules: Any = None) -> ShardIndex:
        """Return the index of an open shard, with the targets of a field: cached, beside the shard, or made now."""
        rules = rules or self.rules
        if (index := await asyncio.to_thread(indexing.load, shard, rules, target)) is not None:
            return index
        if rules.streams:
            index = await indexing.beside(shard, rules, target, partial(self._check_fit, shard))
        if index is None or (target and index.fields is None):
            block_bytes = indexing.BLOCK_BYTES if rules.streams else 0
            async with self._scanning:
                index = await indexing.run_scan(shard, rules.scan(shard.size, target), block_bytes)
            log.info("%s: indexed %d samples", shard.url, len(index))
            await indexing.save(shard, index, rules, target)
        return index

    async def _check_fit(self, shard: Shard, index: ShardIndex) -> None:
        """Raise ``ValueError`` unless the first, a middle and the last sample are where an index says."""
        count = len(index)
        if samples := sorted({0, count // 2, count - 1}) if count else []:
            parts = iter(await shard.read(_ranges(index, samples)))
            for sample in samples:
                found = self._unpack(index, sample, [next(parts) for _ in index.members(sample)])
                if index.labels is not None and index.labels[sample] not in (b"", *found.values()):
                    raise ValueError(f"the target of sample {sample} is another one")

    # --- reading

    def _find(self, index: int) -> tuple[Shard, int]:
        number, sample = self._parts.find(index)
        return self._shards[number], sample

    def _observe(self, samples: int, seconds: float) -> None:
        # A moving average adapts to faster or slower storage within a few reads.
        if samples:
            self._seconds += (seconds / samples - self._seconds) * (0.2 if self._seconds else 1.0)

    async def _read_group(self, shard: Shard, samples: Sequence[int]) -> list[Any]:
        """Samples of one shard."""
        if shard.local:
            return await asyncio.to_thread(self._read_group_now, shard, samples)
        ranges = _ranges(shard.index, samples)
        try:
            parts = await shard.read(ranges) if ranges else []
        except Exception as error:  # noqa: BLE001 - the error of each of these samples
            return [error.with_traceback(None)] * len(samples)
        if self._in_thread:
            return await asyncio.to_thread(self._parse_all, shard, samples, parts)
        return self._parse_all(shard, samples, parts)

    def _read_group_now(self, shard: Shard, samples: Sequence[int]) -> list[Any]:
        """Samples of one file."""
        try:
            parts = shard.read_now(_ranges(shard.index, samples))
        except Exception as error:  # noqa: BLE001 - the error of each of these samples
            return [error.with_traceback(None)] * len(samples)
        return self._parse_all(shard, samples, parts)

    def _parse_all(self, shard: Shard, samples: Sequence[int], parts: list[bytes]) -> list[Any]:
        index, at = shard.index, 0
        found: list[Any] = []
        for sample in samples:
            count = len(index.members(sample))
            try:
                found.append(self._parse(index, sample, parts[at : at + count]))
            except Exception as error:  # noqa: BLE001 - damaged bytes may raise anything
                found.append(ValueError(f"{shard.url}: {reason_of(error)}"))
            at += count
        return found


class RecentParts:
    """Keeps the large parts of shards that were read last. Several reads that need a part read it once."""

    def __init__(self) -> None:
        # All parts together, once they were read into memory, and whether that was tried.
        self.columns: Any = None
        self.complete = False
        self._parts: OrderedDict[Hashable, Any] = OrderedDict()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Any]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle no parts."""
        return type(self), ()

    def kept(self, key: Hashable) -> Any:
        """Return a part that is kept, or ``None``."""
        return self._parts.get(key)

    async def get(self, key: Hashable, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return a part, which has ``nbytes``; ``read`` reads it if it is not kept."""
        locks = self._locks.setdefault(asyncio.get_running_loop(), {})
        async with locks.setdefault(key, asyncio.Lock()), locks.setdefault(None, asyncio.Semaphore(PARTS)):
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = await read()
                while len(self._parts) > 1 and sum([each.nbytes for each in self._parts.values()]) > CACHE_BYTES:
                    self._parts.popitem(last=False)
        locks.pop(key, None)
        return part


def reason_of(error: Exception) -> str:
    """Return what is wrong with a file, by an error of its reader."""
    return str(error) if isinstance(error, ValueError) else f"it is damaged: {error!r}"


def _ranges(index: ShardIndex, samples: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges of all members of samples."""
    starts, ends = index.starts, index.ends
    return [(int(starts[member]), int(ends[member])) for sample in samples for member in index.members(sample)]


class FieldShards(Shards):
    """Shards whose samples have named fields: dicts, or one of the fields and another one as the target."""

    target: Callable[[int], Any]
    default_to_target: ClassVar[Any] = None

    def __init__(
        self,
        urls: Urls,
        data: str | Sequence[str] | None = None,
        target: str | None = None,
        *,
        to_target: Callable[[Any], Any] | None = None,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        self._data = data.split(";") if isinstance(data, str) else None
        self._fields = None if data is None or self._data is not None else list(data)
        if self._fields is not None and not (self._fields and all(isinstance(each, str) for each in self._fields)):
            raise TypeError(f"{name}(data=) must be the name of a field or a list of names, got {data!r}")
        if target is not None and not isinstance(target, str):
            raise TypeError(f"{name}(target=) must be the name of a field, got {target!r}")
        self._target_fields = tuple(target.split(";")) if target is not None else ()
        self._to_target = check_callable(f"{name}(to_target=)", to_target) or self.default_to_target
        super().__init__(urls, store=store, options=options)
        self._check_names()
        if target is not None:
            self.target = self._target

    def _value(self, field: str, data: bytes) -> Any:
        """Return the value of a field."""
        return data

    def _selection(self) -> Any:
        return self._data, self._fields, self._target_fields

    def _parse(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> Any:
        fields = self._unpack(index, sample, parts)
        if self._data is not None:
            for field in self._data:
                if field in fields:
                    return self._value(field, fields[field])
            raise ValueError(self._missing(index, sample, self._data, fields))
        for field in self._fields or ():
            if field not in fields:
                raise ValueError(self._missing(index, sample, [field], fields))
        return {field: self._value(field, data) for field, data in fields.items()}

    def _missing(self, index: ShardIndex, sample: int, wanted: Sequence[str], fields: Mapping[str, bytes]) -> str:
        name = sample if index.keys is None else repr(index.keys[sample].decode(errors="replace"))
        there = f", but {sorted(fields)}" if fields else ""
        return f"the sample {name} has no {' or '.join(map(repr, wanted))}{there}"

    async def _index(self, shard: Shard) -> None:
        await self._finish(shard, await self._obtain(shard, self._target_fields))

    async def _finish(self, shard: Shard, index: ShardIndex) -> None:
        """Set the index of a shard, with the targets, and without the members that are not read."""
        if self._target_fields and index.labels is None:
            async with self._scanning:
                index = await self._with_labels(shard, index)
            await indexing.save(shard, index, self.rules, self._target_fields)
        self._known = getattr(self, "_known", set()) | set(index.names)
        wanted = self._data or self._fields
        shard.index = index if wanted is None else index.select(wanted)

    async def _with_labels(self, shard: Shard, index: ShardIndex) -> ShardIndex:
        """Read the targets of a shard."""
        selected = index.select(self._target_fields)
        labels: list[bytes | None] = []
        step = max(len(index) * LABEL_BYTES // shard.size, 1) if shard.size else 1
        for begin in range(0, len(index), step):
            samples = range(begin, min(begin + step, len(index)))
            ranges = _ranges(selected, samples)
            parts = iter(await shard.read(ranges) if ranges else [])
            for sample in samples:
                fields = self._unpack(selected, sample, [next(parts) for _ in selected.members(sample)])
                labels.append(next((fields[field] for field in self._target_fields if field in fields), None))
        return with_labels(index, labels)

    def _check_names(self) -> None:
        """Raise ``ValueError`` for a field that no sample has."""
        known: set[str] = self.__dict__.pop("_known")
        chosen = [("data", self._data), ("target", self._target_fields)]
        for argument, wanted in [*chosen, *[("data", [field]) for field in self._fields or ()]]:
            if known and wanted and not known & set(wanted):
                missing, name = " or ".join(map(repr, wanted)), type(self).__name__
                raise ValueError(f"{name}({argument}=): no sample has {missing}; there are {sorted(known)}")

    def _target(self, index: int) -> Any:
        shard, sample = self._find(index)
        labels = shard.index.labels
        if labels is None or sample in shard.index.unlabelled:
            raise ValueError(f"{shard.url}: {self._missing(shard.index, sample, self._target_fields, {})}")
        value = self._value(self._target_fields[0], labels[sample])
        return value if self._to_target is None else self._to_target(value)
