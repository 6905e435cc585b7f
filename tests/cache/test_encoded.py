"""``DiskCache(encoded=True)`` and ``EncodedCache``: encoded samples, which are decoded in every epoch.

Damage and kills of the file are in ``test_disk.py``, for both kinds of samples.
"""

from __future__ import annotations

import gzip
import os
import pickle
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aiofeed import (
    Buckets,
    DataLoader,
    DecodeImage,
    DiskCache,
    EncodedCache,
    Feeder,
    Files,
    ImageFolder,
    Limits,
    Mixture,
    Stream,
    TarShards,
    Tensors,
    attach,
    serve,
)
from aiofeed.errors import CacheError
from aiofeed.kernel.core.faces import AdaptedSource
from tests.support.encoded import HEAD_BYTES, HEADS, RECORD_BYTES, Blocks, as_it_is, block, head, heads, stored
from tests.support.paths import ROOT
from tests.support.shard_files import members_of, sample_bytes, write_tar
from tests.support.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from tests.support.fault_server import FaultServer


@pytest.fixture
def cache(tmp_path: Path) -> EncodedCache:
    return EncodedCache(tmp_path / "cache", 1 << 20)


def storage(feeder: Feeder[Any]) -> Any:
    return feeder.statistics().storage


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False, "samples"])
def test_samples_are_read_once(cache: EncodedCache, in_order: Any) -> None:
    """After the first epoch no sample is read from the source again, also not by a later feeder."""
    source = Blocks()
    for _ in range(2):
        with Feeder(source, decode=head, batch_size=6, shuffle=True, cache=cache, in_order=in_order) as feeder:
            for _ in range(3):
                assert sorted(heads(feeder)) == sorted(HEADS[:40])
        assert set(source.reads.values()) == {1}
    assert storage(feeder).cache_misses == 0
    assert storage(feeder).cached_bytes == os.path.getsize(cache.path)
    assert "cached" in str(feeder.statistics())
    assert stored(cache.path) == 40
    assert cache.verify() == ()


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_batches_do_not_depend_on_the_cache(tmp_path: Path, shuffle: Any) -> None:
    """Order, targets, state and resume are those of a feeder without a cache."""

    class Labelled(Blocks):
        def target(self, index: int) -> int:
            return index

    def batches(feeder: Feeder[Any], count: int | None = None) -> list[Any]:
        return [[part.tolist() for part in batch] for _, batch in zip(range(count or 99), feeder, strict=False)]

    half = DiskCache(tmp_path / "cache", HEAD_BYTES + 20 * RECORD_BYTES, encoded=True)
    plain = Feeder(Labelled(), decode=head, batch_size=6, shuffle=shuffle)
    cached = Feeder(Labelled(), decode=head, batch_size=6, shuffle=shuffle, cache=half)
    with plain, cached:
        for _ in range(2):
            assert batches(cached) == batches(plain)
        for stop in range(7):
            assert batches(cached, stop) == batches(plain, stop)
            assert cached.state_dict() == plain.state_dict()
            cached.load_state_dict(plain.state_dict())
            plain.load_state_dict(plain.state_dict())
            assert batches(cached) == batches(plain)
    assert stored(half.path) == 20


@pytest.mark.parametrize(
    "options",
    [
        {"device": SimulatedDevice()},
        {"device": [SimulatedDevice(), SimulatedDevice()]},
        {"on_error": "skip"},
        {"collate_fn": torch.stack},
        {"transform": as_it_is},
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

    assert numbers(EncodedCache(tmp_path / "cache", 30_000)) == numbers(None)
    assert stored(tmp_path / "cache") > 0


def test_decoded_images(cache: EncodedCache, jpeg_folder: Path) -> None:
    """Random crops and their targets are bit-equal: filling, from the file, in a later run, with other decoders."""
    images = ImageFolder(jpeg_folder)
    for decode in (DecodeImage(size=32, crop="random", flip=True), DecodeImage(size=16, crop="random")):
        batches = []
        for each in (None, cache, cache):
            with Feeder(images, decode=decode, batch_size=4, shuffle=True, cache=each) as feeder:
                batches.append([(pixels, labels) for _ in feeder.epochs(2) for pixels, labels in feeder])
        for other in batches[1:]:
            for (pixels, labels), (expected, classes) in zip(other, batches[0], strict=True):
                assert torch.equal(pixels, expected)
                assert torch.equal(labels, classes)
    assert storage(feeder).cache_misses == 0


@pytest.mark.slow
def test_worker_processes(tmp_path: Path) -> None:
    """The workers of ``engine="process"`` use the cache; the first samples stay when it is full."""
    cache = EncodedCache(tmp_path / "cache", HEAD_BYTES + 20 * RECORD_BYTES)
    with Feeder(Blocks(), decode=head, batch_size=5, shuffle=True, engine="process:2", cache=cache) as feeder:
        for _ in range(3):
            assert sorted(heads(feeder)) == sorted(HEADS[:40])
    assert stored(tmp_path / "cache") == 20


def test_forked_child(cache: EncodedCache) -> None:
    """A child of a fork opens the file itself."""
    feeder = Feeder(Blocks(), decode=head, batch_size=5, cache=cache)
    assert heads(feeder) == HEADS[:40]
    child = os.fork()
    if child == 0:
        try:
            good = heads(feeder) == HEADS[:40]
            feeder.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heads(feeder) == HEADS[:40]
    feeder.close()
    assert stored(cache.path) == 40


def test_pickled_source(cache: EncodedCache) -> None:
    """A pickled source opens the file itself; settings survive."""
    source = cache.wrap(AdaptedSource(Blocks()))
    copy: Any = pickle.loads(pickle.dumps(source))
    assert repr(copy).startswith("CachedSource(")
    assert (copy.key(3), len(copy)) == ("block 3", 40)
    assert pickle.loads(pickle.dumps(EncodedCache("a", 5))) == EncodedCache("a", 5)


# --- what is stored ---------------------------------------------------------------------------------------------------


def typed(value: Any) -> Any:
    """A value with the types of all its parts, and the order of its keys."""
    if isinstance(value, dict):
        return [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    return type(value), repr(value)


class Values(Blocks):
    """A source of the values of a list."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(len(values))
        self.values = values

    def data(self, index: int) -> Any:
        return self.values[index]


async def test_round_trip(cache: EncodedCache) -> None:
    """A nested sample is restored exactly, with its types."""
    values = [
        b"",
        "",
        None,
        True,
        -(1 << 63),
        0.1,
        "\ud800é",
        (b"a", [1, ("b",)]),
        {"a": {b"b": (), 3: []}},
        np.ones(2),
    ]
    for _ in range(2):
        source: Any = cache.wrap(AdaptedSource(inner := Values(values)))
        assert typed(await source.read_many(range(len(values)))) == typed(values)
    assert not inner.reads


@pytest.mark.parametrize("value", [bytearray(b"a"), {"a": object()}, [1 << 70], (set(),)])
async def test_other_samples_are_refused(cache: EncodedCache, value: Any) -> None:
    """A sample that cannot be restored exactly is an error that names it and the way out."""
    source: Any = cache.wrap(AdaptedSource(Values([b"", value])))
    [_, error] = await source.read_many([0, 1])
    assert isinstance(error, TypeError)
    assert "'block 1' (index 1) cannot be cached: sample" in str(error)
    assert "leave cache= out" in str(error)


async def test_errors_are_not_cached(cache: EncodedCache) -> None:
    """A sample that cannot be read is tried again, and fails or succeeds alone."""
    inner = Values([block(0), OSError("unreadable"), block(2)])
    source: Any = cache.wrap(AdaptedSource(inner))
    assert [type(sample) for sample in await source.read_many(range(3))] == [bytes, OSError, bytes]
    with pytest.raises(OSError, match="unreadable"):
        await source.read(1)
    inner.values[1] = block(1)
    assert await source.read_many(range(3)) == [block(index) for index in range(3)]
    assert inner.reads == {0: 1, 1: 3, 2: 1}


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("error", [OSError("unreadable"), SystemExit(3)], ids=["error", "exit"])
def test_failing_samples_in_a_feeder(cache: EncodedCache, on_error: Any, error: BaseException) -> None:
    """``on_error`` treats samples that fail as without a cache."""

    class Failing(Blocks):
        async def read(self, index: int) -> bytes:
            if index == 3:
                raise error
            return block(index)

        read_many = None  # type: ignore[assignment]

    results = []
    for each in (None, cache):
        with Feeder(Failing(), decode=head, batch_size=6, on_error=on_error, cache=each) as feeder:
            results.append([heads(feeder), heads(feeder), [failure.index for failure in feeder.failures]])
    assert results[0] == results[1]


# --- names ------------------------------------------------------------------------------------------------------------


def test_files_that_change_are_read_again(cache: EncodedCache, tmp_path: Path) -> None:
    """A file that is replaced under its name is noticed, in a later epoch and in a later run."""
    paths = [tmp_path / "one", tmp_path / "two"]

    def write(path: Path, text: bytes) -> None:
        path.with_suffix(".new").write_bytes(text)
        path.with_suffix(".new").replace(path)

    def read(feeder: Feeder[Any]) -> list[bytes]:
        return [data for batch in feeder for data in batch]

    for path in paths:
        write(path, b"first")
    with Feeder(Files(paths), decode=as_it_is, collate_fn=list, batch_size=4, cache=cache) as feeder:
        assert read(feeder) == [b"first", b"first"]
        write(paths[1], b"other")
        assert read(feeder) == [b"first", b"other"]
    write(paths[0], b"third")
    for misses in (1, 0):
        with Feeder(Files(paths), decode=as_it_is, collate_fn=list, batch_size=4, cache=cache) as feeder:
            assert read(feeder) == [b"third", b"other"]
        assert storage(feeder).cache_misses == misses


async def test_version(cache: EncodedCache) -> None:
    """Samples of another ``version`` are read again, and stored again, also those that another process has stored."""

    class Versioned(Blocks):
        number = 1

        def version(self, index: int) -> str:
            return f"{self.number}"

    inner = Versioned()
    sources: Any = [cache.wrap(AdaptedSource(inner)), cache.wrap(AdaptedSource(inner))]
    for number in (1, 2):
        inner.number = number
        for _ in range(3):
            for source in sources:
                assert await source.read_many([1, 2]) == [block(1), block(2)]
    assert max(inner.reads.values()) <= 3  # the second source notices once that its records are old
    assert cache.verify() == ()


def test_mixture(cache: EncodedCache) -> None:
    """The samples of a mixture are cached by source, and its order stays."""
    parts = {"a": Blocks(20), "b": Blocks(30, name="other")}
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True) as plain:
        expected = [heads(plain) for _ in range(2)]
    for part in parts.values():
        part.reads.clear()
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True, cache=cache) as feeder:
        assert [heads(feeder) for _ in range(2)] == expected
    assert all(set(part.reads.values()) == {1} for part in parts.values())


def test_objects_are_requested_once(cache: EncodedCache, object_server: FaultServer) -> None:
    """After the first epoch there is no request, in a later run either; those of another server are requested."""
    object_server.objects.update({f"bucket/{number}": b"%d" % number * 99 for number in range(30)})
    urls = [f"s3://bucket/{number}" for number in range(30)]
    expected = [b"%d" % number * 99 for number in range(30)]

    def read(options: dict[str, Any]) -> Any:
        source = Files(urls, options=options)
        with Feeder(source, decode=as_it_is, collate_fn=list, batch_size=8, cache=cache) as feeder:
            for _ in range(2):
                assert [data for batch in feeder for data in batch] == expected
            return storage(feeder)

    assert read(object_server.options).requests == 30
    later = read(object_server.options)
    assert (later.requests, later.cache_misses) == (0, 0)
    assert later.cache_hits >= 60
    other = {**object_server.options, "endpoint": object_server.endpoint.replace("127.0.0.1", "localhost")}
    assert read(other).requests == 30


def test_shards(tmp_path: Path) -> None:
    """Samples of shards are cached by what is read of them; those of a shard that changes are read again."""
    path = tmp_path / "x.tar"

    def read(first: int, name: str, **arguments: Any) -> tuple[list[Any], int]:
        write_tar(tmp_path / "new", members_of({f"d/{n}": sample_bytes(first + n) for n in range(9)}))
        if not path.exists() or path.read_bytes() != (tmp_path / "new").read_bytes():
            (tmp_path / "new").replace(path)
        cache = EncodedCache(tmp_path / name, 1 << 20)
        with Feeder(
            TarShards(path, **arguments), decode=as_it_is, collate_fn=list, batch_size=4, cache=cache
        ) as feeder:
            return [sample for batch in feeder for sample in batch], storage(feeder).cache_hits

    whole = [sample_bytes(number) for number in range(9)]
    texts = [sample["cls"] for sample in whole]
    for hits in (0, 9):
        assert read(0, "whole") == (whole, hits)
        assert read(0, "one", data="cls") == (texts, hits)
        assert read(0, "some", data=["cls"]) == ([{"cls": text} for text in texts], hits)
    with pytest.raises(CacheError, match="fingerprint of the source"):
        read(0, "whole", data="cls")
    assert read(1, "whole") == ([sample_bytes(number) for number in range(1, 10)], 0)


def test_consumers_of_a_server(cache: EncodedCache, tmp_path: Path) -> None:
    """A served feeder uses the cache for all its consumers."""
    source = Blocks()
    with Feeder(source, decode=head, batch_size=8, cache=cache) as feeder:
        heads(feeder)
    for _ in range(2):
        feeder = Feeder(source, decode=head, batch_size=8, cache=cache)

        def consume() -> list[int]:
            with attach(tmp_path / "feed") as feed:
                return heads(feed)

        with feeder, serve(feeder, tmp_path / "feed", min_consumers=2), ThreadPoolExecutor() as pool:
            consumers = [pool.submit(consume) for _ in range(2)]
            assert [consumer.result(30) for consumer in consumers] == [HEADS[:40]] * 2
    assert set(source.reads.values()) == {1}


def test_break_and_errors_in_the_loop(cache: EncodedCache) -> None:
    """Loops that end early lose and damage nothing."""
    source = Blocks()
    for stop in range(8):
        with pytest.raises(KeyError), Feeder(source, decode=head, batch_size=6, cache=cache) as feeder:
            for number, batch in enumerate(feeder):
                assert batch.tolist() == HEADS[:40][number * 6 : number * 6 + 6]
                if number == stop:
                    break
            raise KeyError
    assert stored(cache.path) == 40


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_truncated_while_it_is_used(cache: EncodedCache, caplog: pytest.LogCaptureFixture) -> None:
    """Samples then come from the source, with one warning; the next feeder refuses the file."""
    source = Blocks()
    with Feeder(source, decode=head, batch_size=6, cache=cache) as feeder:
        assert heads(feeder) == HEADS[:40]
        os.truncate(cache.path, 5000)
        for _ in range(2):
            assert heads(feeder) == HEADS[:40]
    assert caplog.text.count("samples are read from their source") == 1
    assert set(source.reads.values()) == {3}
    with pytest.raises(CacheError, match="truncated"):
        Feeder(source, decode=head, batch_size=6, cache=cache)


async def test_a_record_that_is_overwritten_while_it_is_used(cache: EncodedCache) -> None:
    """A sample whose checksum was verified before is read again if it is none any more."""
    source: Any = cache.wrap(AdaptedSource(inner := Blocks()))
    await source.read_many(range(40))
    with Path(cache.path).open("r+b") as file:
        file.seek(HEAD_BYTES)
        file.write(b"\xff" * 64)
    assert await source.read_many(range(40)) == [block(index) for index in range(40)]
    assert inner.reads.total() == 41


class Six(Blocks):
    """The source of the files in ``tests/data``, which an older aiofeed has written; it cannot be read any more."""

    def __init__(self) -> None:
        super().__init__(6, name="sample")

    def fingerprint(self) -> str:
        return "six samples"

    def data(self, index: int) -> Any:
        raise AssertionError("it is in the cache")


class Sized:
    """The decoder of these files."""

    def fingerprint(self) -> str:
        return "sized"

    def __call__(self, data: bytes) -> Any:
        raise AssertionError("it is decoded")


def older(name: str, path: Path) -> Path:
    """Unpack a file of ``tests/data``."""
    path.write_bytes(gzip.decompress((ROOT / "tests/data" / name).read_bytes()))
    return path


@pytest.mark.parametrize("name", ["rows", "records"])
def test_files_of_older_versions_are_read(tmp_path: Path, name: str) -> None:
    """Decoded samples that an older aiofeed has stored, as rows or records, are neither read nor decoded again."""
    path = older(f"cache_{name}.gz", tmp_path / "cache")
    with Feeder(Six(), decode=Sized(), batch_size=2, collate_fn=list, cache=DiskCache(path)) as feeder:
        found = [sample.tolist() for batch in feeder for sample in batch]
    assert found == [[index + at for at in range(4 if name == "rows" else index)] for index in range(6)]


def test_a_database_of_an_older_version_is_refused(tmp_path: Path) -> None:
    """The file of an ``EncodedCache`` that was an SQLite database is named as such; it is not changed."""
    path = older("cache_database.gz", tmp_path / "cache")
    before = path.read_bytes()
    for each in (EncodedCache(path, 1 << 20), DiskCache(path)):
        feeder = None
        with pytest.raises(CacheError, match=r"EncodedCache of an older aiofeed.*delete the file, or choose another"):
            feeder = Feeder(Six(), decode=Sized(), batch_size=2, cache=each)
            next(iter(feeder))
        if feeder is not None:
            feeder.close()
    assert path.read_bytes() == before


def test_another_database_is_refused(cache: EncodedCache) -> None:
    """A user's own database is no cache, and nothing says that it may be deleted."""
    with closing(sqlite3.connect(cache.path)) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(CacheError, match=r"is not a cache of samples; choose another path\n"):
        Feeder(Blocks(), decode=head, batch_size=4, cache=cache)


def test_a_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    """A file of decoded samples is none of encoded ones, and the other way round."""
    for first in (True, False):
        path = tmp_path / f"{first}"
        for encoded in (first, not first):
            feeder = None
            try:
                feeder = Feeder(Blocks(), decode=head, batch_size=4, cache=DiskCache(path, encoded=encoded))
                heads(feeder)
                assert encoded is first
            except CacheError as error:
                assert encoded is not first
                assert "none, encoded samples" in str(error)  # noqa: PT017
            finally:
                if feeder is not None:
                    feeder.close()


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    """Bad arguments name themselves."""
    with pytest.raises(TypeError, match="EncodedCache takes the path of a file"):
        EncodedCache(3, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"EncodedCache\(max_bytes"):
        EncodedCache("a", 0)
    with pytest.raises(TypeError, match="max_byte"):
        EncodedCache("a", max_byte=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"DiskCache\(encoded"):
        DiskCache("a", encoded="yes")  # type: ignore[arg-type]


def test_sources_without_bytes_are_refused(cache: EncodedCache) -> None:
    """A Dataset, Tensors and a Stream are refused before the first batch, with what to do instead."""
    numbers = torch.arange(8)
    for source in (numbers.tolist(), torch.utils.data.TensorDataset(numbers), Mixture({"a": numbers.tolist()})):
        with pytest.raises(TypeError, match="DiskCache"):
            Feeder(source, batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="leave it out"):
        Feeder(Tensors(numbers), batch_size=4, cache=cache)
    with pytest.raises(ValueError, match="leave it out"):
        Feeder(Stream(lambda: [1, 2]), batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="DiskCache"):
        DataLoader(numbers.tolist(), batch_size=4, cache=cache)  # type: ignore[arg-type]
    assert not os.path.exists(cache.path)


# --- a cache of the user ----------------------------------------------------------------------------------------------


class Remembering(Blocks):
    """A source that keeps what it has read of another one."""

    def __init__(self, source: Any) -> None:
        super().__init__(len(source))
        self.source = source
        self.samples: dict[int, Any] = {}

    def data(self, index: int) -> Any:
        if index not in self.samples:
            self.samples[index] = self.source.data(index)
            self.source.reads[index] += 1
        return self.samples[index]


class OwnCache:
    """A cache with nothing but ``wrap``."""

    def wrap(self, source: Any) -> Any:
        return Remembering(source)


class OwnStore:
    """A cache, and its store, with nothing but what a feeder calls: it counts fetchers and caches nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open_store(self, config: Any) -> Any:
        self.calls.append(f"open {config.length}")
        return self

    def attach(self, backend: Any) -> None:
        self.calls.append("attach")

    def free_with(self, owner: object) -> None:
        self.calls.append("free")

    def new_fetcher(self, inner: Any, decode: Any) -> Any:
        self.calls.append("fetcher")
        return inner


def test_a_cache_of_the_user() -> None:
    """Any object with ``wrap`` or ``open_store`` is a cache; another object is refused with what to pass."""
    source = Blocks()
    with Feeder(source, decode=head, batch_size=6, cache=OwnCache()) as feeder:  # type: ignore[call-overload]
        assert [heads(feeder) for _ in range(2)] == [HEADS[:40]] * 2
    assert set(source.reads.values()) == {1}
    store = OwnStore()
    with Feeder(source, decode=head, batch_size=6, cache=store) as feeder:  # type: ignore[call-overload]
        assert heads(feeder) == HEADS[:40]
    assert store.calls[0] == "open 40"
    assert {"attach", "free", "fetcher"} <= {*store.calls}
    for bad in (3, "x.cache", object(), DiskCache, EncodedCache):
        with pytest.raises(TypeError, match="cache must be"):
            Feeder(source, decode=head, batch_size=6, cache=bad)  # type: ignore[call-overload]


def test_an_encoded_cache_is_shown_and_replaced_as_it_is_made(tmp_path: Path) -> None:
    """``EncodedCache`` shows only the arguments that it takes; without room for a sample, the error says so."""
    cache = EncodedCache(tmp_path / "x", 9000)
    assert repr(cache) == f"EncodedCache(path={str(tmp_path / 'x')!r}, max_bytes=9000)"
    assert replace(cache, max_bytes=7) == EncodedCache(tmp_path / "x", 7)
    assert pickle.loads(pickle.dumps(cache)) == cache
    assert cache.encoded
    with pytest.raises(CacheError, match=r"one takes [^,]*$"):
        Feeder(Blocks(), decode=head, batch_size=6, cache=EncodedCache(tmp_path / "x", 7))
