"""``CachedSource``: a source whose encoded samples are looked up in a cache before they are read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aiofeed.cache.layout import RECORDS, NotCacheableError, pack_record, unpack_record
from aiofeed.cache.store import SampleStore
from aiofeed.kernel.core.errors import CacheError
from aiofeed.kernel.core.faces import BaseSource, passes_on
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import Uncopied

log: logging.Logger = logging.getLogger("aiofeed.cache")

_MISSING: Any = object()
# The ways of reading that do not ask the cache, and what belongs to them.
_WITHOUT = {"read_now", "answers_at_once", "in_memory", "read_planned", "new_gathered", "gather_ahead", "version"}


@passes_on
class CachedSource(BaseSource):
    """The samples of a source, which are kept in a store as records of (name, encoded sample).

    A name is the sample's key and ``version``. A record of another name is of a sample that has changed since.

    Args:
        source: A source of bytes.
        store: The store of its encoded samples.
        path: Path of the store's file.
    """

    def __init__(self, source: BaseSource, store: SampleStore, path: str) -> None:
        self.whole: BaseSource = source
        self._store = store
        self._path = path
        self._failed = False
        self._hits = self._misses = 0
        self._open()

    def _open(self) -> None:
        self._store.open(None)  # a file that exists, without its lock
        self._store.open(RECORDS)

    def _passed(self, name: str, value: Any) -> Any:
        return None if name in _WITHOUT else value

    def uncopied_reader(self) -> None:
        """Return ``None``: the cache keeps bytes."""

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.whole)

    def __repr__(self) -> str:
        return f"CachedSource({self.whole!r}, {self._path!r})"

    def key(self, index: int, /) -> str:
        """Return the source's name of a sample."""
        return self.whole.key(index)

    def storage_statistics(self) -> StorageStatistics:
        """Return the source's requests, the hits and misses of this process, and the size of the file."""
        nbytes = 0
        with contextlib.suppress(OSError):
            nbytes = os.path.getsize(self._path)
        found = self.whole.storage_statistics() or StorageStatistics()
        return replace(found, cache_hits=self._hits, cache_misses=self._misses, cached_bytes=nbytes)

    async def read(self, index: int, /) -> Any:
        """Return a sample of the cache, or of the source's ``read``."""
        [sample] = await self._cached([index], self._read_each)
        if isinstance(sample, BaseException):
            raise sample
        return sample

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples of the cache, and the others of the source in one call."""
        return await self._cached(indices, self.whole.read_many or self._read_each)

    async def _read_each(self, indices: Sequence[int]) -> list[Any]:
        async def read(index: int) -> Any:
            try:
                return await self.whole.read(index)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - the user's coroutine; SystemExit would end the loop
                return error

        return await asyncio.gather(*map(read, indices))

    async def _cached(self, indices: Sequence[int], read: Callable[[Sequence[int]], Any]) -> list[Any]:
        names, samples = await asyncio.to_thread(self._look_up, indices)
        missing = [at for at, sample in enumerate(samples) if sample is _MISSING]
        self._hits += len(indices) - len(missing)
        self._misses += len(missing)
        if missing:
            found = list(await read([indices[at] for at in missing]))
            if len(found) != len(missing):
                raise ValueError(f"read_many returned {len(found)} samples for {len(missing)} indices")
            # A name is made before its sample is read: of a file that is replaced between, it is the old one.
            named = [(indices[at], names[at]) for at in missing]
            keeping = asyncio.get_running_loop().run_in_executor(None, self._keep, named, found)
            await asyncio.wait([keeping])  # which does not cancel it if this coroutine is cancelled
            for at, sample in zip(missing, keeping.result(), strict=True):
                samples[at] = sample
        return samples

    def _look_up(self, indices: Sequence[int]) -> tuple[list[str | None], list[Any]]:
        """Return the names of samples, and the samples that are cached. Runs in a thread."""
        names, samples = [self._name(index) for index in indices], [_MISSING] * len(indices)
        if self._failed:
            return names, samples
        with self._failing():
            self._open()
            cached = self._store.find(np.asarray(indices, np.int64)).tolist()
            for at, index in enumerate(indices):
                if cached[at] and names[at] is not None:
                    samples[at] = self._stored(index, names[at])
        return names, samples

    def _stored(self, index: int, name: str | None) -> Any:
        try:
            found, sample = unpack_record(self._store.get(index)[0][0])
            if found == name:
                return sample
        except CacheError:
            raise
        except Exception:  # noqa: BLE001 - another program may have written anything into the file
            pass
        self._store.forget(index)
        return _MISSING

    def _name(self, index: int) -> str | None:
        """Return the name of a sample; ``None`` if its source raises, whose read then does, too."""
        try:
            version = self.whole.version
            return f"{self.key(index)}\0{'' if version is None else version(index)}"
        except Exception:  # noqa: BLE001 - the user's methods; reading the sample shows what is wrong with it
            return None

    def _keep(self, names: Sequence[tuple[int, str | None]], samples: Sequence[Any]) -> list[Any]:
        """Return samples that were read, after writing them to the cache, or their errors. Runs in a thread."""
        kept = []
        for (index, name), sample in zip(names, samples, strict=True):
            kept.append(sample := bytes(sample.data) if type(sample) is Uncopied else sample)
            if name is None or self._failed or isinstance(sample, BaseException):
                continue
            try:
                record = pack_record((name, sample))
            except NotCacheableError as error:
                reason = str(error).replace("item[1]", "sample", 1)
                kept[-1] = TypeError(
                    f"sample {self.key(index)!r} (index {index}) cannot be cached: {reason}; leave cache= out"
                )
                continue
            with self._failing():
                self._store.put(index, [record], RECORDS)
        return kept

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Skip the rest of the block if the cache cannot be used; from then on samples come from their source."""
        try:
            yield
        except CacheError as error:
            if not self._failed:
                log.warning("samples are read from their source, and not cached any more: %s", str(error))
            self._failed = True
