"""How close to the ideal are reads of objects in storage that answers after 20 ms?

Also: slow answers, processor time, and the start with many keys. A server on this machine answers in place of the
storage, so that both share its cores. "obstore" is the same client library with as many reads in flight and nothing
else, on an event loop or in threads. 128 reads are in flight where no other number is named.

LitData, where it is installed, reads batches on a loop of its own in this process, up to its own limit in flight.

Targets: at least 0.95 of the ideal rate, in-flight / latency, 0.97 of obstore on a loop, as fast as in threads, 3 times
LitData's ``StreamingRawDataset`` and 5 times ``DataLoader`` with two workers; with 2 % of the answers after 1 s at
least 3 times the rate without second requests, with at most 6 % more requests; at most 6 us of the loop's time for a
range of 2 KB that is joined with others, 80 us for one alone; 10 million keys in 10 s and 120 bytes each.
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
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, column, per, rates
from benchmarks.harness import PROJECT, Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = "Objects of 100 KB, 20 ms to the first byte"

DELAY_S = 0.020
IN_FLIGHT = 128
FEWER_AND_MORE = (64, 256)
BATCH = 64
OBJECTS = 1000
RANGE = 2000
JOINED = 16
LITDATA = "LitData, raw"


def run(settings: Settings) -> list[Figure]:
    reads = settings.size(6400, 64)
    with ExitStack() as stack:
        size = settings.size(100_000, 100)
        port = stack.enter_context(server("--size", str(size), "--delay", str(DELAY_S)))
        tail = stack.enter_context(server("--size", "2000", "--delay", str(DELAY_S), "--slow-every", "50"))
        small = stack.enter_context(server("--size", str(RANGE * JOINED)))
        options = {"port": port, "reads": reads}
        loader_reads = settings.size(512, 4)
        contenders = [
            Contender("aiofeed", aiofeed_feeder, options, ("torch", "aiofeed:Feeder")),
            Contender("obstore", bare_obstore, options, ("obstore",)),
            Contender("obstore, threads", obstore_in_threads, options, ("obstore",)),
            *[
                Contender(f"{label}, {count}", function, {**options, "in_flight": count}, imports)
                for count in FEWER_AND_MORE
                for label, function, imports in (
                    ("aiofeed", aiofeed_feeder, ("torch", "aiofeed:Feeder")),
                    ("obstore", bare_obstore, ("obstore",)),
                )
            ],
            Contender("DataLoader, 2 workers", data_loader, {"port": port, "reads": loader_reads}, ("torch",)),
            *([Contender(LITDATA, lit_data, options, ("torch",))] if find_spec("litdata") else []),
            Contender("hedged", aiofeed_feeder, {"port": tail, "reads": reads}, ("torch", "aiofeed:Feeder")),
            Contender("unhedged", aiofeed_feeder, {"port": tail, "reads": loader_reads, "hedges": 0.0}, ("torch",)),
            Contender("ranges", ranges, {"port": small, "times": settings.size(2000, 4)}, ("obstore",)),
            Contender("keys", many_keys, {"keys": settings.size(10_000_000, 1000)}, ("torch", "aiofeed:ImageFolder")),
        ]
        samples = interleave(contenders, settings)
    rate = {label: rates(rounds) for label, rounds in samples.items() if label not in ("ranges", "keys")}
    ideal, peers = IN_FLIGHT / DELAY_S, [LITDATA] if LITDATA in rate else []
    return [
        Figure("objects/s / ideal", tuple(value / ideal for value in rate["aiofeed"]), target=at_least(0.95)),
        Figure("objects/s / obstore", per(rate["aiofeed"], rate["obstore"]), target=at_least(0.97)),
        Figure("objects/s / obstore, threads", per(rate["aiofeed"], rate["obstore, threads"]), target=at_least(1)),
        *[
            Figure(
                f"{count} in flight: objects/s / obstore",
                per(rate[f"aiofeed, {count}"], rate[f"obstore, {count}"]),
                target=at_least(0.97),
            )
            for count in FEWER_AND_MORE
        ],
        Figure(
            "objects/s / DataLoader, 2 workers", per(rate["aiofeed"], rate["DataLoader, 2 workers"]), target=at_least(5)
        ),
        *[Figure(f"objects/s / {peer}", per(rate["aiofeed"], rate[peer]), target=at_least(3)) for peer in peers],
        Figure("2 % at 1 s: hedged / unhedged", per(rate["hedged"], rate["unhedged"]), target=at_least(3)),
        Figure("requests: hedged", column(samples["hedged"], "requests"), target=at_most(1.06)),
        Figure("loop per joined range", column(samples["ranges"], "joined_us"), "us", at_most(6)),
        Figure("loop per single range", column(samples["ranges"], "single_us"), "us", at_most(80)),
        Figure("start with 10 million keys", column(samples["keys"], "start_s", 1e3), "ms", at_most(10_000)),
        Figure("memory per key", column(samples["keys"], "key_bytes"), "bytes", at_most(120)),
        *[Figure(f"objects: {label}", values, "/s") for label, values in rate.items()],
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


@contextmanager
def aiofeed_feeder(port: int, reads: int, hedges: float | None = None, in_flight: int = IN_FLIGHT) -> Iterator[Measure]:
    import aiofeed
    from aiofeed.sources.objects import requests

    share, requests.HEDGE_SHARE = requests.HEDGE_SHARE, requests.HEDGE_SHARE if hedges is None else hedges
    source = aiofeed.Files([f"s3://bucket/{name(number)}" for number in range(reads)], options=options_of(port))
    limits = aiofeed.Limits(read_concurrency=in_flight)
    with aiofeed.Feeder(source, decode=len, batch_size=BATCH, shuffle=True, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            storage = feeder.statistics().storage
            before = 0 if storage is None else storage.requests
            items = sum(map(len, one_epoch()))
            storage = feeder.statistics().storage
            assert storage is not None
            return {"items": items, "requests": (storage.requests - before) / items}

        epoch()
        yield epoch
    requests.HEDGE_SHARE = share


@contextmanager
def bare_obstore(port: int, reads: int, in_flight: int = IN_FLIGHT) -> Iterator[Measure]:
    import obstore
    import uvloop
    from obstore.store import S3Store

    store = S3Store("bucket", **options_of(port), client_options={"allow_http": True})

    async def read_all() -> int:
        numbers, found = iter(range(reads)), 0

        async def read() -> None:
            nonlocal found
            for number in numbers:
                answer = await obstore.get_async(store, name(number))
                data = bytes(await answer.bytes_async())
                found += len(data) > 0

        await asyncio.gather(*[read() for _ in range(in_flight)])
        return found

    uvloop.run(read_all())
    yield lambda: {"items": uvloop.run(read_all())}


@contextmanager
def obstore_in_threads(port: int, reads: int) -> Iterator[Measure]:
    from obstore.store import S3Store

    store = S3Store("bucket", **options_of(port), client_options={"allow_http": True})
    with ThreadPoolExecutor(IN_FLIGHT) as threads:

        def read_all() -> Mapping[str, float]:
            found = threads.map(lambda number: len(bytes(store.get(name(number)).bytes())) > 0, range(reads))
            return {"items": sum(found)}

        read_all()
        yield read_all


class Objects:
    """A ``Dataset`` that reads objects one after the other."""

    def __init__(self, port: int, reads: int) -> None:
        self._options, self._reads, self._store = options_of(port), reads, None

    def __len__(self) -> int:
        return self._reads

    def __getitem__(self, index: int) -> int:
        if self._store is None:
            from obstore.store import S3Store

            self._store = S3Store("bucket", **self._options, client_options={"allow_http": True})
        return len(bytes(self._store.get(name(index)).bytes()))


@contextmanager
def data_loader(port: int, reads: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    # Spawned: in a test of this benchmark, obstore has threads in this process, and a fork would never get an answer.
    loader = DataLoader(
        Objects(port, reads),
        BATCH,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    list(loader)
    yield lambda: {"items": sum(map(len, loader))}


@contextmanager
def lit_data(port: int, reads: int) -> Iterator[Measure]:
    from litdata import StreamingRawDataset
    from obstore import store
    from torch.utils.data import DataLoader

    keys = options_of(port)
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "test"
    os.environ["AWS_REGION"], os.environ["AWS_ENDPOINT_URL"] = keys["region"], keys["endpoint"]
    original: Any = store.S3Store

    def without_tls(*arguments: Any, client_options: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return original(*arguments, client_options={**(client_options or {}), "allow_http": True}, **more)

    store.S3Store = without_tls  # type: ignore[misc, assignment]
    loader: Any = DataLoader(
        StreamingRawDataset("s3://bucket/", cache_files=False), BATCH, shuffle=True, collate_fn=len
    )

    def read_all() -> Mapping[str, float]:
        return {"items": sum(sum(loader) for _ in range(-(-reads // OBJECTS)))}

    sum(loader)
    yield read_all


@contextmanager
def ranges(port: int, times: int) -> Iterator[Measure]:
    import uvloop

    from aiofeed.sources.objects.reader import ObjectReader

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
    from aiofeed.sources.objects.keys import KeyPacker
    from aiofeed.sources.objects.listing import Listing, cache_path, listing_file, write_whole
    from aiofeed.sources.objects.reader import ObjectReader

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
