"""``EncodedCache`` with every kind of batches, and with objects and shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiofeed import Buckets, EncodedCache, Feeder, Files, ImageFolder, Limits, TarShards, attach, serve
from aiofeed.decoders.image import DecodeImage
from tests.support.encoded import HEADS, Blocks, entries, head, heads, of_feeder
from tests.support.shard_files import members_of, sample_bytes, write_tar
from tests.support.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fault_server import FaultServer


def same(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    "options",
    [
        {"device": SimulatedDevice()},
        {"device": [SimulatedDevice(), SimulatedDevice()]},
        {"on_error": "skip"},
        {"collate_fn": torch.stack},
        {"transform": same},
        {"static_batches": True},
        {"in_order": False},
        {"batch_size": Buckets(list(range(1, 41)), [20], [8, 4])},
        {"batch_sampler": [[1, 2, 3], [4, 5]]},
        {"weights": [1.0] * 40},
        {"limits": Limits(read_concurrency=1, decode_threads=1, prefetch_batches=1)},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_same_batches_with_any_option(tmp_path: Path, options: dict[str, Any]) -> None:
    """Three epochs with the cache equal those without."""

    def numbers(cache: EncodedCache | None) -> list[list[int]]:
        arguments: dict[str, Any] = {"cache": cache, "seed": 3, **options}
        if "batch_sampler" not in options:
            arguments.setdefault("batch_size", 8)
        with Feeder(Blocks(), decode=head, **arguments) as feeder:
            epochs = [
                sum([torch.as_tensor(part).tolist() for part in (batch if isinstance(batch, tuple) else [batch])], [])
                for _ in feeder.epochs(3)
                for batch in feeder
            ]
        return sorted(epochs) if options.get("in_order") is False else epochs

    assert numbers(EncodedCache(tmp_path / "cache", 20_000)) == numbers(None)
    assert entries(tmp_path / "cache")["count"] > 0


def test_decoded_images(tmp_path: Path, jpeg_folder: Path) -> None:
    """Rows that are decoded in place, and their targets, are the same from the cache."""
    images, cache = ImageFolder(jpeg_folder), EncodedCache(tmp_path / "cache", 1 << 24)
    decode = DecodeImage(size=32, crop="random", flip=True)
    batches = []
    for each in (None, cache, cache):
        with Feeder(images, decode=decode, batch_size=4, shuffle=True, cache=each) as feeder:
            batches.append([(pixels, labels) for _ in feeder.epochs(2) for pixels, labels in feeder])
    assert of_feeder(feeder).cache_misses == 0
    for other in batches[1:]:
        for (pixels, labels), (expected, classes) in zip(other, batches[0], strict=True):
            assert torch.equal(pixels, expected)
            assert torch.equal(labels, classes)


def test_consumers_of_a_server(tmp_path: Path) -> None:
    """A served feeder uses the cache for all its consumers."""
    source = Blocks()
    with Feeder(source, decode=head, batch_size=8, cache=EncodedCache(tmp_path / "cache", 1 << 20)) as feeder:
        heads(feeder)
    for _ in range(2):
        feeder = Feeder(source, decode=head, batch_size=8, cache=EncodedCache(tmp_path / "cache", 1 << 20))

        def consume() -> list[int]:
            with attach(tmp_path / "feed") as feed:
                return heads(feed)

        with feeder, serve(feeder, tmp_path / "feed", min_consumers=2), ThreadPoolExecutor() as pool:
            consumers = [pool.submit(consume) for _ in range(2)]
            assert [consumer.result(30) for consumer in consumers] == [HEADS[:40]] * 2
    assert set(source.reads.values()) == {1}


def test_break_and_errors_in_the_loop(tmp_path: Path) -> None:
    """Loops that end early lose and damage nothing."""
    source, cache = Blocks(), EncodedCache(tmp_path / "cache", 1 << 20)
    for stop in range(8):
        with pytest.raises(KeyError), Feeder(source, decode=head, batch_size=6, cache=cache) as feeder:
            for number, batch in enumerate(feeder):
                assert batch.tolist() == HEADS[:40][number * 6 : number * 6 + 6]
                if number == stop:
                    break
            raise KeyError
    assert entries(tmp_path / "cache")["count"] == 40
    assert set(source.reads.values()) == {1}


def test_another_world_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on with the state and the cache of one with another number of ranks and machines."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cache = EncodedCache(tmp_path / "cache", 15_000)
    before = []
    for rank in range(2):
        with Feeder(Blocks(), decode=head, batch_size=4, shuffle=True, shard=(rank, 2), cache=cache) as feeder:
            before += [int(number) for _, batch in zip(range(3), feeder, strict=False) for number in batch]
            state = feeder.state_dict()
    for _ in range(2):
        after = []
        for rank in range(4):
            with Feeder(Blocks(), decode=head, batch_size=2, shuffle=True, shard=(rank, 4), cache=cache) as feeder:
                feeder.load_state_dict(state)
                after += heads(feeder)
        assert sorted(before + after) == sorted(HEADS[:40])


def test_objects_are_requested_once(tmp_path: Path, object_server: FaultServer) -> None:
    """After the first epoch there is no request, in a later run either; another server has entries of its own."""
    object_server.objects.update({f"bucket/{number}": b"%d" % number * 99 for number in range(30)})
    urls = [f"s3://bucket/{number}" for number in range(30)]
    cache, expected = EncodedCache(tmp_path / "cache", 1 << 20), [b"%d" % number * 99 for number in range(30)]

    def read(options: dict[str, Any]) -> Any:
        source = Files(urls, options=options)
        with Feeder(source, decode=same, collate_fn=list, batch_size=8, cache=cache) as feeder:
            for _ in range(2):
                assert [data for batch in feeder for data in batch] == expected
            return of_feeder(feeder)

    assert read(object_server.options).requests == 30
    later = read(object_server.options)
    assert (later.requests, later.cache_misses) == (0, 0)
    assert later.cache_hits >= 60
    other = {**object_server.options, "endpoint": object_server.endpoint.replace("127.0.0.1", "localhost")}
    assert read(other).requests == 30
    assert entries(tmp_path / "cache")["count"] == 60


def test_shards(tmp_path: Path) -> None:
    """Samples of shards are cached by what is read of them, and read again when the shard changes."""
    path, cache = tmp_path / "x.tar", EncodedCache(tmp_path / "cache", 1 << 20)

    def read(first: int, **arguments: Any) -> tuple[list[Any], int]:
        write_tar(tmp_path / "new", members_of({f"d/{n}": sample_bytes(first + n) for n in range(9)}))
        if not path.exists() or path.read_bytes() != (tmp_path / "new").read_bytes():
            (tmp_path / "new").replace(path)
        with Feeder(TarShards(path, **arguments), decode=same, collate_fn=list, batch_size=4, cache=cache) as feeder:
            samples = [sample for batch in feeder for sample in batch]
            return samples, of_feeder(feeder).cache_hits

    whole = [sample_bytes(number) for number in range(9)]
    texts = [sample["cls"] for sample in whole]
    assert read(0) == (whole, 0)
    assert read(0, data="cls") == (texts, 0)
    assert read(0, data=["cls"]) == ([{"cls": text} for text in texts], 0)
    assert read(0) == (whole, 9)
    assert read(0, data="cls") == (texts, 9)
    assert read(1) == ([sample_bytes(number) for number in range(1, 10)], 0)


@pytest.mark.parametrize("cache", [None, "host", "encoded"])
def test_plans_are_announced(tmp_path: Path, cache: Any) -> None:
    """A source with ``announce`` gets each plan before a sample of it is read, with any cache."""

    class Announced(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.announced: list[int] = []

        def announce(self, plan: Any) -> None:
            self.announced += plan.indices

        def data(self, index: int) -> bytes:
            assert index in self.announced
            return super().data(index)

    source = Announced()
    if cache == "encoded":
        cache = EncodedCache(tmp_path / "cache", 1 << 20)
    with Feeder(source, decode=head, batch_size=6, shuffle=True, cache=cache) as feeder:
        assert sorted(heads(feeder)) == sorted(HEADS[:40])
    assert set(range(40)) <= set(source.announced)


def test_a_read_that_exits(tmp_path: Path) -> None:
    """A source without ``read_many`` that raises ``SystemExit`` fails one sample, as without a cache."""

    class Exiting(Blocks):
        async def read(self, index: int) -> bytes:
            if index == 3:
                raise SystemExit(3)
            return self.data(index)

        read_many = None  # type: ignore[assignment]

    cache = EncodedCache(tmp_path / "cache", 1 << 20)
    with Feeder(Exiting(), decode=head, batch_size=6, on_error="skip", cache=cache) as feeder:
        assert sorted(heads(feeder)) == sorted(HEADS[:3] + HEADS[4:40])
