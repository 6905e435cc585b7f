"""``ObjectReader`` reads whole objects, ranges of objects and listings below one root: at a URL, or of a folder."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import io
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, TypeAlias, TypeVar

from aiofeed.kernel.core.failures import backoff_s
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.sources.file_io import MAX_BYTES, ReadRules, open_file, read_file, too_large
from aiofeed.objects.clients import StoreClient, open_requests, shared_client
from aiofeed.objects.hub import HubClient, at_commit
from aiofeed.objects.requests import (
    Answer,
    NoRangeError,
    ObjectInfo,
    RangesIgnoredError,
    RequestMonitor,
    changed,
    fault_of,
    is_of_obstore,
    other_size,
    percentile,
    too_short,
)
from aiofeed.objects.urls import QUERY, join_url, split_url

ResultT = TypeVar("ResultT")

Page: TypeAlias = list[tuple[str, ObjectInfo]]
# The version that all parts of an object must have; empty until the first answer.
Expected: TypeAlias = list[ObjectInfo]

log: logging.Logger = logging.getLogger("aiofeed.sources")

# Ranges of one object with at most so many bytes between them are one request: a request takes as long on the processor
# as the copy of some 200 KB. Shuffled samples of 100 KB come a quarter faster than with half of it.
GAP_BYTES = 256 << 10
# The size of the parts in which a long range, or an object of more than WHOLE_BYTES, is read in parallel.
PART_BYTES = 8 << 20
WHOLE_BYTES = 16 << 20
# The parts of one object that are read at the same time.
PARTS = 8
# A body of so many bytes is memory of its own: obstore's HTTP client receives into buffers of at most 408 KB, and a
# view of a smaller body would keep one of these.
OWN_BYTES = 512 << 10
# How long a request is sent again after transient faults; the second, if no server has answered yet, because a wrong
# host name and a network that is down look the same.
RETRY_S = 60.0
FIRST_RETRY_S = 3.0
# Seconds between log lines about faults.
LOG_EVERY_S = 10.0
PAGE = 1000
# Values of Content-Encoding, and the suffix of files that are such by themselves.
ENCODINGS: dict[str, str | tuple[str, ...]] = {
    "gzip": (".gz", ".tgz", ".svgz"),
    "br": ".br",
    "zstd": ".zst",
    "deflate": ".zz",
    "compress": ".z",
}


class ObjectReader:
    """Reads the objects below a root: a folder, or a bucket or host with an optional prefix.

    Transient faults (5xx, throttling, connections that end, bodies that are cut) are retried for up to 60 s, an expired
    credential once with a new client; a missing object is not. Requests that take unusually long are sent a second
    time, at most 5 % of all; those whose body comes slowly are sent anew. Cancelling a coroutine cancels its requests.

    May be used by several event loops; the client of a bucket or host is the same for all readers of this process.

    Args:
        root: A URL or the path of a folder. Keys are relative to it.
        store: An obstore store to use in place of one that is made of the URL; the root is then a prefix of its keys,
            or a URL whose bucket or host is that of the store.
        options: Arguments of ``obstore.store.from_url``: ``endpoint``, ``region``, ``client_options``, ...

    Raises:
        TypeError: ``store`` is not a store of obstore, or ``options`` is not a mapping.
        ValueError: The URL cannot be read.
        ImportError: obstore is not installed.
    """

    def __init__(self, root: str, *, store: Any = None, options: Mapping[str, Any] | None = None) -> None:
        if store is not None and not hasattr(store, "get_async"):
            raise TypeError(f"store must be an obstore store, such as its S3Store, got {type(store).__name__}")
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options must be a dict of arguments of obstore's from_url, got {type(options).__name__}")
        for name in ("config", "client_options"):
            if not isinstance(given := (options or {}).get(name, {}), Mapping):
                raise TypeError(f"options: {name!r} must be a dict, got {type(given).__name__}")
        base, prefix = split_url(root)
        kind = StoreClient
        if base.startswith("hf:"):
            kind, base = HubClient, at_commit(base)
        # The folder, if the root is one.
        self._folder = prefix if not base and store is None else None
        self._base, _, self._query = base.partition("?")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._client = shared_client(kind, self._base, options or {}, store)
        self._reset()

    def _reset(self) -> None:
        self._hub = self._client if isinstance(self._client, HubClient) else None
        self.has_folders: bool = self._folder is None and self._hub is None
        """Whether the folders of a listing may be listed at the same time."""
        self._monitors: dict[asyncio.AbstractEventLoop, RequestMonitor] = {}
        self._lock = threading.Lock()
        self._jitter = random.Random()
        self._logged_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {name: self.__dict__[name] for name in ("_folder", "_base", "_query", "_prefix", "_client")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"ObjectReader({self.url('')!r})"

    @property
    def is_local(self) -> bool:
        """Whether the root is a folder."""
        return self._folder is not None

    @property
    def identity(self) -> str | None:
        """Return the identity of the listing of this root; ``None`` if it should not be cached."""
        endpoint = None if self._folder is not None else self._client.endpoint()
        return None if endpoint is None else f"{self.url('')} {endpoint}"

    def url(self, key: str) -> str:
        """Return the URL of an object, or the path of a file, without credentials."""
        if self._folder is not None:
            return os.path.join(self._folder, key)
        query = f"{QUERY}{self._query}" if self._query and QUERY not in key else ""
        return join_url(self._base, f"{self._prefix}{key}{query}")

    async def head(self, key: str) -> ObjectInfo:
        """Size, etag and time of change of an object.

        Raises:
            FileNotFoundError: There is no such object.
            PermissionError: The credentials are not accepted.
            OSError: The object cannot be read.
        """
        if self._folder is not None:
            return _file_info(await asyncio.to_thread(os.stat, self.url(key)))
        if self._hub is not None:
            return (await self._hub.locate(self._prefix + key)).info
        return _info((await self._get(key, {"head": True}, 0))[1])

    async def read(self, key: str, *, max_bytes: int = MAX_BYTES, size: int | None = None) -> bytes:
        """Return a whole object; a large one in parallel parts.

        Args:
            key: The key of the object.
            max_bytes: The maximum size of the object.
            size: The size of the object in a listing.

        Raises:
            OSError: As in ``head``; or the object has more than ``max_bytes``, or another size than in the listing, and
                is not read; or it was replaced between two parts.
        """
        return bytes(await self.read_buffer(key, max_bytes, size))

    async def read_buffer(self, key: str, max_bytes: int, size: int | None = None) -> Any:
        """Like ``read``; the bytes may be in the client's memory."""
        if self._folder is not None:
            return await asyncio.to_thread(read_file, self.url(key), ReadRules(max_bytes))
        for most in (min(WHOLE_BYTES, max_bytes), max_bytes):
            answer, meta, body = await self._get_whole(key, size, most)
            start, end = 0, meta["size"]
            info = _info(meta) if body is None else None
            del answer  # ends its body
            if end > max_bytes:
                raise too_large(self.url(key), f"{end} bytes are", max_bytes)
            if size not in (None, end):
                raise other_size(self.url(key), end, size)
            if body is None:
                # A server that ignores ranges is asked for the whole object.
                with contextlib.suppress(RangesIgnoredError):
                    [body] = await self.read_ranges(key, [start], [end], info=info)
            if body is not None:
                break
        if len(body) != end - start:
            raise too_short(self.url(key), start, end)
        return body

    async def read_ranges(
        self, key: str, starts: Sequence[int], ends: Sequence[int], *, info: ObjectInfo | None = None
    ) -> list[bytes]:
        """Return the bytes from each start up to its end. Ranges that are close together are read by one request.

        Args:
            key: The key of the object.
            starts: The first byte of each range.
            ends: The byte after the last one of each range.
            info: What ``head`` returned for the object.

        Raises:
            ValueError: A range ends before it starts.
            OSError: As in ``head``; or the object ends before a range does, or it was replaced since ``head`` or
                between two parts.
        """
        return list(map(bytes, await self.read_views(key, starts, ends, info=info)))

    async def read_views(
        self, key: str, starts: Sequence[int], ends: Sequence[int], *, info: ObjectInfo | None = None
    ) -> list[Any]:
        """Like ``read_ranges``; large ranges may be memoryviews of what was received, also between them."""
        if self._folder is not None:
            ranges, etag = list(zip(starts, ends, strict=True)), None if info is None else info.etag
            return await asyncio.to_thread(read_ranges, self.url(key), ranges, etag)
        # A file of a commit does not change, and its etag is another one at the Hub than where it is stored.
        joined, expected = join_ranges(starts, ends), [] if info is None or self._hub is not None else [info]
        if len(joined) == 1 and joined[0].end - joined[0].start <= PART_BYTES:
            buffers: Sequence[Any] = [await self._read_part(key, joined[0].start, joined[0].end, expected)]
        else:
            buffers = await self._read_parts(key, joined, expected)
        data: list[Any] = [b""] * len(starts)
        for part, buffer in zip(joined, buffers, strict=True):
            view, first = memoryview(buffer), part.start
            for at in part.members:
                found = view[starts[at] - first : ends[at] - first]
                data[at] = bytes(found) if len(buffer) < OWN_BYTES else found
        return data

    async def list(self, prefix: str = "") -> AsyncIterator[Page]:
        """Pages of keys with their information, of all objects below a folder, in the order of the store.

        Args:
            prefix: A folder; "train" does not list "train-2/".

        Raises:
            ValueError: The root is a web server, which cannot be listed.
            OSError: As in ``head``.
        """
        if self._folder is not None:
            pages = _pages(self._folder, prefix)
            while found := await asyncio.to_thread(next, pages, None):
                yield found
            return
        if self._base.startswith("http") and self._client.given is None:
            raise ValueError(f"{self.url(prefix)!r}: a web server cannot be listed; pass URLs to aiofeed.Files")
        cut, last, stream = len(self._prefix), None, None
        if self._hub is not None:
            yield [(key[cut:], info) for key, info in await self._hub.list(self._prefix + prefix)]
            return

        async def next_page(store: Any) -> Any:
            nonlocal stream
            if stream is None:
                stream = _obstore().list(store, self._prefix + prefix, offset=last, chunk_size=PAGE)
            try:
                return await anext(stream, None)
            except BaseException:
                stream = None  # the next attempt begins after the last key
                raise

        while (page := await self._retried(prefix, next_page)) is not None:
            last = page[-1]["path"]
            yield [(meta["path"][cut:], _info(meta)) for meta in page]

    async def list_top(self, folder: str = "") -> tuple[Sequence[str], Sequence[tuple[str, ObjectInfo]]]:
        """Return the folders in a folder of a bucket, and the objects beside them; of a repository the files only."""
        prefix, cut = self._prefix + folder, len(self._prefix)
        if self._hub is not None:
            return [], [(key[cut:], info) for key, info in await self._hub.list(prefix, recursive=False)]

        found = await self._retried(folder, lambda store: _obstore().list_with_delimiter_async(store, prefix or None))
        objects = [(meta["path"][cut:], _info(meta)) for meta in found["objects"]]
        return [folder[cut:] for folder in found["common_prefixes"]], objects

    async def _get_whole(self, key: str, size: int | None, most: int) -> Answer:
        """Return the answer with a whole object; its body is ``None`` if that has more than ``most`` bytes.

        The answer to a range has the size of the object. That of a proxy to a plain request may be a part of it.
        """
        if size is None and most <= WHOLE_BYTES and not self._client.ignores_ranges:
            try:
                return await self._get(key, {"range": (0, WHOLE_BYTES)}, None, most)
            except (RangesIgnoredError, NoRangeError):
                pass  # the object is empty, or a gateway refuses ranges
            found = await self._get(key, None, None, most)
            self._client.ignores_ranges |= found[1]["size"] > 0
            return found
        return await self._get(key, None, None, most)

    async def _read_parts(self, key: str, ranges: Sequence[JoinedRange], expected: Expected) -> Sequence[bytes]:
        """Return the bytes of each range; long ones in parts, some of them at the same time."""
        turn = asyncio.Semaphore(PARTS)

        async def read_part(start: int, end: int) -> Any:
            async with turn:
                return await self._read_part(key, start, end, expected)

        bounds = [list(pairwise([*range(each.start, each.end, PART_BYTES), each.end])) for each in ranges]
        parts = iter(await run_all([read_part(start, end) for pairs in bounds for start, end in pairs]))
        return [next(parts) if len(pairs) == 1 else b"".join(islice(parts, len(pairs))) for pairs in bounds]

    async def _read_part(self, key: str, start: int, end: int, expected: Expected) -> Any:
        options: dict[str, Any] = {"range": (start, end)}
        etag = expected[0].etag if expected else None
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag  # no server accepts a weak etag as a condition (RFC 9110, 13.1.1)
        answer, meta, body = await self._get(key, options, end - start)
        info = _info(meta)
        if not expected:
            expected.append(info)
        if not expected[0].is_version_of(info):
            raise changed(self.url(key))
        if answer.range != (start, end) or len(body) != end - start:
            raise too_short(self.url(key), start, end)
        return body

    async def _get(self, key: str, options: Mapping[str, Any] | None, nbytes: int | None, most: int = 0) -> Answer:
        path, monitor, get = self._prefix + key.partition(QUERY)[0], self._monitor(), _obstore().get_async
        place = "" if self._hub is not None else path

        def attempt(store: Any) -> Coroutine[Any, Any, Answer]:
            return monitor.send(partial(get, store, place, options=options), nbytes, most)

        found: Answer = await self._retried(key, attempt)
        # Some servers send this header for files that are compressed themselves, such as x.csv.gz.
        for encoding in found[0].attributes.get("Content-Encoding", "").lower().replace(" ", "").split(","):
            if not path.lower().endswith(ENCODINGS.get(encoding.removeprefix("x-"), "")):
                raise OSError(f"the object has Content-Encoding {encoding}: store it without one: {self.url(key)}")
        return found

    async def _retried(self, key: str, attempt: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the result of ``attempt(store)``, which is called again after a transient fault."""
        failures, renewed, started = 0, False, 0.0
        query = key.partition(QUERY)[2] or self._query
        while True:
            if self._hub is not None:
                query = (await self._hub.locate(self._prefix + key)).url
            store, version = self._client.store(query)
            open_requests.add(request := object())
            try:
                return await attempt(store)
            except BaseException as error:  # raised below without credentials
                if not is_of_obstore(error):
                    raise
                fault = fault_of(error, partial(self._client.redact, query=query), self.url(key))
            finally:
                open_requests.discard(request)
            # Outside of the block above, so that the error has no context, which may contain credentials.
            monitor = self._monitor()
            monitor.failed()
            monitor.answered |= fault.answered
            if not renewed and (fault.expired or self._client.is_outdated):
                renewed = True
                self._client.renew(version, query)
            elif not fault.transient:
                raise fault.error
            else:
                now, most_s = time.monotonic(), RETRY_S if monitor.answered else FIRST_RETRY_S
                started = started or now
                if now - started > most_s:
                    raise fault.error
                if now - self._logged_at > LOG_EVERY_S:
                    self._logged_at = now
                    log.warning("sent again for up to %.0f s: %s", most_s, fault.error)
                failures += 1
                await asyncio.sleep(backoff_s(failures, self._jitter))
            monitor.retries += 1

    def _monitor(self) -> RequestMonitor:
        """Return the monitor of the running loop; that of a loop that is closed goes on with another one."""
        loop = asyncio.get_running_loop()
        monitor = self._monitors.get(loop)
        if monitor is None:
            with self._lock:
                ended = next((other for other in self._monitors if other.is_closed()), None)
                monitor = RequestMonitor() if ended is None else self._monitors.pop(ended).on_new_loop()
                self._monitors[loop] = monitor
        return monitor


async def run_all(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return the results of coroutines that run at the same time; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def statistics_of(readers: Iterable[ObjectReader]) -> StorageStatistics | None:
    """Return the requests of readers together; ``None`` if all read folders."""
    remote = [reader for reader in readers if not reader.is_local]
    if not remote:
        return None
    monitors = [monitor for reader in remote for monitor in list(reader._monitors.values())]
    latencies = [
        latency for each in monitors for window in list(each.windows.values()) for latency in list(window.latencies)
    ]
    return StorageStatistics(
        requests=sum(each.requests for each in monitors),
        bytes_read=sum(each.nbytes for each in monitors),
        retries=sum(each.retries for each in monitors),
        hedges=sum(each.hedges for each in monitors),
        latency_p50_s=percentile(latencies, 0.5),
        latency_p95_s=percentile(latencies, 0.95),
        latency_p99_s=percentile(latencies, 0.99),
    )


@dataclass(slots=True)
class JoinedRange:
    """A range that is read at once, and the positions of the requested ranges in it."""

    start: int
    end: int
    members: list[int]


def join_ranges(starts: Sequence[int], ends: Sequence[int]) -> list[JoinedRange]:
    """Join ranges with at most ``GAP_BYTES`` between them; empty ones are left out."""
    joined: list[JoinedRange] = []
    for at in sorted(range(len(starts)), key=starts.__getitem__):
        start, end = starts[at], ends[at]
        if not 0 <= start <= end:
            raise ValueError(f"a range starts at byte {start} and ends before byte {end}")
        if start == end:
            continue
        if joined and start - joined[-1].end <= GAP_BYTES:
            joined[-1].members.append(at)
            joined[-1].end = max(joined[-1].end, end)
        else:
            joined.append(JoinedRange(start, end, [at]))
    return joined


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(meta["size"], meta["e_tag"], meta["last_modified"].timestamp())


@functools.cache
def _obstore() -> Any:
    return importlib.import_module("obstore")


def _file_info(status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(status.st_size, etag_of(status), status.st_mtime)


def etag_of(status: os.stat_result) -> str:
    """Return the version of a file."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def read_ranges(path: str, ranges: Sequence[tuple[int, int]], etag: str | None = None) -> list[bytes]:
    """Parts of a file, in the calling thread."""
    with open(open_file(path), "rb", buffering=0) as file:
        if etag is not None and etag_of(os.fstat(file.fileno())) != etag:
            raise changed(path)
        found = []
        for start, end in ranges:
            data = read_range(file, start, end)
            if len(data) != end - start:
                raise too_short(path, start, end)
            found.append(data)
        return found


def _pages(root: str, prefix: str) -> Iterator[Page]:
    page: Page = []
    for parent, folders, names in os.walk(os.path.join(root, prefix), onerror=_refuse):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            page.append((os.path.relpath(path, root).replace(os.sep, "/"), _file_info(os.stat(path))))
            if len(page) == PAGE:
                yield page
                page = []
    yield page


def _refuse(error: OSError) -> None:
    raise error


def read_range(file: io.FileIO, start: int, end: int) -> bytes:
    """Return the bytes of a range of a file; fewer if the file ends before it."""
    file.seek(start)
    data = file.read(end - start)
    while len(data) < end - start and (more := file.read(end - start - len(data))):
        data += more
    return data
