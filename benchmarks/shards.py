"""What does a full shuffle of tar shards in object storage cost, beside reading them from end to end?

Eight shards of 64 MiB with samples of 100 KB, on a server that answers after 20 ms and shares this machine's cores. The
look-ahead has 256 MiB, half of the data, or nothing. WebDataset has a shuffle buffer of 1,000 samples and two workers
that read shards through curl; ``DataLoader`` has two workers that read each sample's range through obstore.

Target: a full shuffle with the look-ahead at least 0.9 of reading in order, and ahead of ``DataLoader``. There is none
for WebDataset, which reads shards from end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.figures import Figure, at_least, column, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.objects import DELAY_S, name, options_of, server
from benchmarks.single_epochs import single_epochs

TITLE = "Shards of 64 MiB, 20 ms to the first byte, look-ahead 256 MiB"

BATCH = 64
SHARD_BYTES = 64 << 20
SHARDS = 8
BLOCK = 512


def run(settings: Settings) -> list[Figure]:
    size, shards = settings.size(100_000, 1000), settings.size(SHARDS, 2)
    members = settings.size(SHARD_BYTES // 100_000, 20)
    numbers = ("--objects", str(shards), "--size", str(size), "--members", str(members))
    with server(*numbers, "--delay", str(DELAY_S)) as port:
        options = {"port": port, "shards": shards, "members": members}
        orders = {
            "in order": {"shuffle": False},
            "full shuffle": {"shuffle": True},
            "window of 4 shards": {"shuffle": "window:4"},
            "full shuffle without look-ahead": {"shuffle": True, "nbytes": 1},
        }
        contenders = [
            Contender(label, aiofeed_feeder, {**options, **order}, ("torch", "aiofeed:Feeder"))
            for label, order in orders.items()
        ]
        contenders.append(Contender("WebDataset", web_dataset, options, ("torch", "webdataset")))
        fewer = {"samples": settings.size(1024, 8), "size": size}
        contenders.append(Contender("DataLoader", data_loader, {**options, **fewer}, ("torch", "obstore")))
        samples = interleave(contenders, settings)
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    full = rate["full shuffle"]
    return [
        Figure("full shuffle / in order", per(full, rate["in order"]), target=at_least(0.9)),
        Figure("window / in order", per(rate["window of 4 shards"], rate["in order"])),
        Figure("full shuffle / without look-ahead", per(full, rate["full shuffle without look-ahead"])),
        Figure("full shuffle / WebDataset", per(full, rate["WebDataset"])),
        Figure("full shuffle / DataLoader", per(full, rate["DataLoader"]), target=at_least(1)),
        *[Figure(f"requests per sample: {label}", column(samples[label], "requests")) for label in orders],
        *[Figure(f"samples: {label}", values, "/s") for label, values in rate.items()],
    ]


@contextmanager
def aiofeed_feeder(
    port: int, shards: int, members: int, shuffle: bool | str, nbytes: int = 256 << 20
) -> Iterator[Measure]:
    import aiofeed

    urls = [f"s3://bucket/{name(number)}" for number in range(shards)]
    source = aiofeed.TarShards(urls, "jpg", options=options_of(port))
    limits = aiofeed.Limits(lookahead_bytes=nbytes)
    with aiofeed.Feeder(source, decode=len, batch_size=BATCH, shuffle=shuffle, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def requests() -> int:
            storage = feeder.statistics().storage
            return 0 if storage is None else storage.requests

        def epoch() -> Mapping[str, float]:
            before = requests()
            items = sum(map(len, one_epoch()))
            return {"items": items, "requests": (requests() - before) / items}

        epoch()
        yield epoch


@contextmanager
def web_dataset(port: int, shards: int, members: int) -> Iterator[Measure]:
    import webdataset
    from torch.utils.data import DataLoader

    urls = [f"http://127.0.0.1:{port}/bucket/{name(number)}" for number in range(shards)]
    samples = webdataset.WebDataset(urls, shardshuffle=shards).shuffle(1000).to_tuple("jpg")
    loader = DataLoader(samples, BATCH, num_workers=2, persistent_workers=True, collate_fn=len)
    sum(loader)
    yield lambda: {"items": sum(loader)}


class Ranges:
    """A ``Dataset`` that reads the range of one sample after the other."""

    def __init__(self, port: int, shards: int, members: int, samples: int, size: int) -> None:
        self._options, self._samples, self._size = options_of(port), samples, size
        self._shards, self._members, self._store = shards, members, None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        if self._store is None:
            from obstore.store import S3Store

            self._store = S3Store("bucket", **self._options, client_options={"allow_http": True})
        start = BLOCK + index // self._shards % self._members * (BLOCK + -(-self._size // BLOCK) * BLOCK)
        return len(bytes(self._store.get_range(name(index % self._shards), start=start, length=self._size)))


@contextmanager
def data_loader(port: int, shards: int, members: int, samples: int, size: int) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    dataset: Any = Ranges(port, shards, members, samples, size)
    # Spawned: in a test of this benchmark, obstore has threads in this process, and a fork would never get an answer.
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
    )
    list(loader)
    yield lambda: {"items": sum(map(len, loader))}
