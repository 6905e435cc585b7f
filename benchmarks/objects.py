"""How close to the ideal are reads of objects, and of shards, in storage that answers after 20 ms?

A server on this machine answers in place of the storage. Objects of 100 KB: "obstore" is the same client library with
as many reads in flight, on an event loop, in threads, or in batches of 64 of which each waits for its last read. Also
slow answers, processor time, and the start with many keys. Eight tar shards of 64 MiB: a full shuffle, whose look-ahead
has half of the data, beside reading the shards from end to end.

Targets with 128 reads in flight: 0.95 of the ideal rate, in-flight / latency, 0.97 of obstore on a loop, as fast as in
threads, and 5 times ``DataLoader``; with 64 in flight 0.97 of obstore, with 256 0.95. With 2 % of the answers after 1 s
3 times the rate without second requests, with at most 6 % more requests; at most 6 us of the loop's time for a range of
2 KB that is joined with others, 80 us for one alone; a million keys in 1 s, with 120 bytes each. Shards: a full shuffle
0.95 of reading in order, and ahead of ``DataLoader``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.contenders import Counted, loaded, single_epochs
from benchmarks.figures import Figure, at_least, at_most, per
from benchmarks.harness import PROJECT, Contender, Measure, Settings, interleave

TITLE = "Objects of 100 KB and shards of 64 MiB, 20 ms to the first byte"

DELAY_S = 0.020
IN_FLIGHT = 128
FEWER_AND_MORE = (64, 256)
BATCH = 64
OBJECTS = 1000
RANGE = 2000
JOINED = 16
SHARD_BYTES, SHARDS, BLOCK, LOOKAHEAD = 64 << 20, 8, 512, 256 << 20
LOADER = "DataLoader, 2 workers"


def run(settings: Settings) -> list[Figure]:
    size = settings.size(100_000, 100)
    with server("--size", str(size), "--delay", str(DELAY_S)) as port:
        figures = objects(settings, port)
    with server("--size", "2000", "--delay", str(DELAY_S), "--slow-every", "50") as port:
        options = {"port": port, "reads": settings.size(6400, 64)}
        unhedged = {"port": port, "reads": settings.size(512, 4), "hedges": 0.0}
        contenders = [Contender("hedged", aiofeed_feeder, options), Contender("unhedged", aiofeed_feeder, unhedged)]
        race = interleave(contenders, settings)
        name = "2 % at 1 s: {}".format
        ratio = per(race.rate("hedged"), race.rate("unhedged"))
        figures.append(Figure(name("hedged / unhedged"), ratio, target=at_least(3)))
        requests = race.column("hedged", "requests")
        figures.append(Figure(name("requests per read"), requests, target=at_most(1.06)))
    with server("--size", str(RANGE * JOINED)) as port:
        keys = settings.size(2_000_000, 1000)
        contenders = [
            Contender("ranges", ranges, {"port": port, "times": settings.size(2000, 4)}),
            Contender("keys", many_keys, {"keys": keys}, ("torch", "aiofeed:ImageFolder")),
        ]
        race = interleave(contenders, settings)
        figures += [
            Figure("loop per joined range", race.column("ranges", "joined_us"), "us", at_most(6)),
            Figure("loop per single range", race.column("ranges", "single_us"), "us", at_most(80)),
            Figure("start with a million keys", race.column("keys", "start_s", 1e9 / keys), "ms", at_most(1000)),
            Figure("memory per key", race.column("keys", "key_bytes"), "bytes", at_most(120)),
        ]
    return figures + shards(settings, size)


def objects(settings: Settings, port: int) -> list[Figure]:
    figures = []
    for count in (IN_FLIGHT, *FEWER_AND_MORE):
        reads = settings.size(6400 if count == IN_FLIGHT else 3200, 64)
        options = {"port": port, "reads": reads, "in_flight": count}
        contenders = [
            Contender("aiofeed", aiofeed_feeder, options),
            Contender("obstore", bare_obstore, options, bound=True),
            Contender("obstore, threads", obstore_in_threads, options, bound=True),
            Contender("obstore, batches", bare_obstore, {**options, "batch": BATCH}),
        ]
        name = f"{count} in flight"
        if count == IN_FLIGHT:
            contenders.append(Contender(LOADER, data_loader, {"port": port, "samples": settings.size(128, 4)}))
        race = interleave(contenders, settings)
        figures.append(race.speed("aiofeed", "obstore", 0.97 if count <= IN_FLIGHT else 0.95, name))
        if count == IN_FLIGHT:
            ideal = tuple(value / (IN_FLIGHT / DELAY_S) for value in race.rate("aiofeed"))
            figures.append(race.speed("aiofeed", "obstore, threads", 1, name))
            figures.append(race.speed("aiofeed", LOADER, 5, name))
            figures.append(Figure(f"{name}: objects/s / ideal", ideal, target=at_least(0.95)))
        figures += race.rates("objects", name)
    return figures


def shards(settings: Settings, size: int) -> list[Figure]:
    shards, members = settings.size(SHARDS, 2), settings.size(SHARD_BYTES // 100_000, 20)
    numbers = ("--objects", str(shards), "--size", str(size), "--members", str(members))
    with server(*numbers, "--delay", str(DELAY_S)) as port:
        options = {"port": port, "shards": shards}
        fewer = {**options, "members": members, "samples": settings.size(128, 8), "size": size}
        contenders = [
            Contender("in order", shard_feeder, {**options, "shuffle": False}),
            Contender("full shuffle", shard_feeder, {**options, "shuffle": True}),
            Contender(LOADER, data_loader, fewer),
        ]
        race = interleave(contenders, settings)
    return [
        race.speed("full shuffle", "in order", 0.95, "shards"),
        race.speed("full shuffle", LOADER, 1, "shards"),
        Figure("shards: requests per sample", race.column("full shuffle", "requests")),
        *race.rates("samples", "shards"),
    ]


@contextmanager
def server(*arguments: str) -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-m", "tests.support.fault_server", "--objects", str(OBJECTS), *arguments]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def options_of(port: int) -> dict[str, Any]:
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    return {"endpoint": f"http://127.0.0.1:{port}", **keys}


def name(number: int) -> str:
    return f"{number % OBJECTS:08}.bin"


def aiofeed_feeder(
    port: int, reads: int, hedges: float | None = None, in_flight: int = IN_FLIGHT
) -> AbstractContextManager[Measure]:
    import aiofeed
    from aiofeed.objects import requests

    source = aiofeed.Files([f"s3://bucket/{name(number)}" for number in range(reads)], options=options_of(port))
    limits = aiofeed.Limits(read_concurrency=in_flight)
    feeder = aiofeed.Feeder(source, decode=len, batch_size=BATCH, shuffle=True, limits=limits)
    return counting_requests(feeder, requests.HEDGE_SHARE if hedges is None else hedges)


@contextmanager
def counting_requests(feeder: Any, hedges: float) -> Iterator[Measure]:
    """Measures epochs of a feeder, and the requests per sample."""
    from aiofeed.objects import requests

    share, requests.HEDGE_SHARE = requests.HEDGE_SHARE, hedges
    with feeder:
        one_epoch = single_epochs(feeder)

        def sent() -> int:
            storage = feeder.statistics().storage
            return 0 if storage is None else storage.requests

        def epoch() -> Mapping[str, float]:
            before = sent()
            items = sum(map(len, one_epoch()))
            return {"items": items, "requests": (sent() - before) / items}

        epoch()
        yield epoch
    requests.HEDGE_SHARE = share


@contextmanager
def bare_obstore(port: int, reads: int, in_flight: int, batch: int = 1) -> Iterator[Measure]:
    import obstore
    import uvloop

    store = new_store(options_of(port))

    async def read(number: int) -> int:
        answer = await obstore.get_async(store, name(number))
        return len(bytes(await answer.bytes_async())) > 0

    async def read_all() -> int:
        starts, found = iter(range(0, reads, batch)), 0

        async def read_some() -> None:
            nonlocal found
            for start in starts:
                # A single read needs no task of its own.
                parts = (
                    [await read(start)] if batch == 1 else await asyncio.gather(*map(read, range(start, start + batch)))
                )
                found += sum(parts)

        await asyncio.gather(*[read_some() for _ in range(in_flight // batch)])
        return found

    uvloop.run(read_all())
    yield lambda: {"items": uvloop.run(read_all())}


@contextmanager
def obstore_in_threads(port: int, reads: int, in_flight: int) -> Iterator[Measure]:
    store = new_store(options_of(port))
    with ThreadPoolExecutor(in_flight) as threads:

        def read_all() -> Mapping[str, float]:
            found = threads.map(lambda number: len(bytes(store.get(name(number)).bytes())) > 0, range(reads))
            return {"items": sum(found)}

        read_all()
        yield read_all


class Objects(Counted):
    """A ``Dataset`` that reads objects, or the ranges of samples of shards, one after the other."""

    def __init__(self, port: int, samples: int, shards: int = 0, members: int = 0, size: int = 0) -> None:
        super().__init__(samples)
        self._options = options_of(port)
        self._shards, self._members, self._size = shards, members, size
        self._store: Any = None

    def __getitem__(self, index: int) -> int:
        self._store = self._store or new_store(self._options)
        if not self._shards:
            return len(bytes(self._store.get(name(index)).bytes()))
        start = BLOCK + index // self._shards % self._members * (BLOCK + -(-self._size // BLOCK) * BLOCK)
        return len(bytes(self._store.get_range(name(index % self._shards), start=start, length=self._size)))


def new_store(options: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    return S3Store("bucket", **options, client_options={"allow_http": True})


def data_loader(**options: Any) -> AbstractContextManager[Measure]:
    # Spawned: in a test of this benchmark, obstore has threads in this process, and a fork would never get an answer.
    return loaded(Objects(**options), BATCH, 2, shuffle=True, multiprocessing_context="spawn")


def shard_feeder(port: int, shards: int, shuffle: bool) -> AbstractContextManager[Measure]:
    import aiofeed
    from aiofeed.objects import requests

    urls = [f"s3://bucket/{name(number)}" for number in range(shards)]
    source = aiofeed.TarShards(urls, "jpg", options=options_of(port))
    limits = aiofeed.Limits(lookahead_bytes=LOOKAHEAD)
    feeder = aiofeed.Feeder(source, decode=len, batch_size=BATCH, shuffle=shuffle, limits=limits)
    return counting_requests(feeder, requests.HEDGE_SHARE)


@contextmanager
def ranges(port: int, times: int) -> Iterator[Measure]:
    import uvloop

    from aiofeed.objects.reader import ObjectReader

    reader = ObjectReader("s3://bucket", options=options_of(port))

    async def loop_us(count: int) -> float:
        """The processor time of this thread for each range, if ``count`` ranges are joined."""
        starts = list(range(0, RANGE * count, RANGE))
        ends = [start + RANGE for start in starts]
        numbers = iter(range(times))

        async def read() -> None:
            for number in numbers:
                await reader.read_ranges(name(number), starts, ends)

        started = time.thread_time()
        await asyncio.gather(*[read() for _ in range(64)])
        return (time.thread_time() - started) / (times * count) * 1e6

    async def both() -> dict[str, float]:
        return {"joined_us": await loop_us(JOINED), "single_us": await loop_us(1)}

    def measure() -> Mapping[str, float]:
        return {"items": times, **uvloop.run(both())}

    measure()
    yield measure


@contextmanager
def many_keys(keys: int) -> Iterator[Measure]:
    import numpy as np
    import psutil

    import aiofeed
    from aiofeed.common.cache_folder import cache_path, write_whole
    from aiofeed.objects.keys import KeyPacker
    from aiofeed.objects.listing import Listing, listing_file
    from aiofeed.objects.reader import ObjectReader

    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("AIOFEED_CACHE", "")
        os.environ["AIOFEED_CACHE"] = folder
        url = "s3://bucket/train/"
        path = cache_path(ObjectReader(url).identity, "listing")
        assert path is not None
        packer = KeyPacker()
        packer.add(f"class-{number * 1000 // keys:04}/ILSVRC-train-{number:08}.JPEG" for number in range(keys))
        write_whole(path, listing_file(Listing(packer.packed(), np.zeros(keys, np.int64), "", time.time()), url))
        del packer

        def start() -> Mapping[str, float]:
            before, started = psutil.Process().memory_info().rss, time.perf_counter()
            source = aiofeed.ImageFolder(url)
            seconds = time.perf_counter() - started
            assert len(source) == keys
            memory = psutil.Process().memory_info().rss - before
            return {"items": keys, "start_s": seconds, "key_bytes": memory / keys}

        yield start
        os.environ["AIOFEED_CACHE"] = cache
