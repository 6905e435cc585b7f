"""`ArrayRecordShards` and `LitDataShards`: files of the real writers, where they are installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.shards.urls import Shard
from aiofeed.testing import check_source

# LitData hides this warning of torch; pytest shows it again.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
RECORDS = [np.random.default_rng(number).bytes(number * 7 % 300) for number in range(100)]
ROWS = [
    {"n": number, "x": np.arange(number % 5), "t": torch.full((2,), number), "b": b"%d" % number, "s": ["é", None]}
    for number in range(100)
]
SOURCES = {"array-record": aiofeed.ArrayRecordShards, "litdata": aiofeed.LitDataShards}


def assert_rows(found: list[Any], expected: list[Any]) -> None:
    """Compare samples of `ROWS` with the dtypes of arrays and tensors."""
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, dict), one
        assert one | {"x": 0, "t": 0} == other | {"x": 0, "t": 0}
        np.testing.assert_array_equal(one["x"], other["x"], strict=True)
        assert torch.equal(one["t"].add_(1).sub_(1), other["t"])  # it may be written into
        assert {name: type(value) for name, value in one.items()} == {
            name: type(value) for name, value in other.items()
        }


def write_records(folder: Path, options: str = "group_size:1") -> str:
    """Two files with 40 and 60 records."""
    writers = pytest.importorskip("array_record.python.array_record_module")
    folder.mkdir(exist_ok=True)
    for name, records in (("a", RECORDS[:40]), ("b", RECORDS[40:])):
        writer = writers.ArrayRecordWriter(f"{folder}/{name}.array_record", options)
        for record in records:
            writer.write(record)
        writer.close()
    return f"{folder}/{{a,b}}.array_record"


def write_chunks(folder: Path, samples: Any = ROWS, **options: Any) -> Path:
    """Chunks of 30 samples."""
    litdata = pytest.importorskip("litdata.streaming")
    folder.mkdir()
    cache = litdata.Cache(str(folder), **({"chunk_size": 30} | options))
    for number, sample in enumerate(samples):
        cache[number] = sample
    cache.done()
    cache.merge()
    return folder


@pytest.mark.parametrize(
    "options", ["group_size:1", "group_size:7", "group_size:1,uncompressed", "group_size:1,brotli:6"]
)
def test_records(options: str, tmp_path: Path, read_all: Callable[[Any], Any]) -> None:
    """Records are the bytes that were written, with keys and shards, and a fingerprint without folders."""
    source = aiofeed.ArrayRecordShards(write_records(tmp_path / "one", options))
    assert read_all(source) == read_all(pickle.loads(pickle.dumps(source))) == RECORDS
    assert (source.key(41), source.shard_starts) == (f"{tmp_path}/one/b.array_record[1]", [0, 40, 100])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert aiofeed.ArrayRecordShards(f"{tmp_path}/two/*").fingerprint() == source.fingerprint()
    assert aiofeed.ArrayRecordShards(f"{tmp_path}/two/b*").fingerprint() != source.fingerprint()
    check_source(source, decode=len)


@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd"}, {"compression": "zstd", "compression_level": "sample"}]
)
def test_chunks(options: dict[str, Any], tmp_path: Path, read_all: Callable[[Any], Any]) -> None:
    """Samples are those that LitData reads, whichever thread asks, with the bytes of fields as bytes."""
    if options:
        pytest.importorskip("zstd")
    folder = write_chunks(tmp_path / "one", **options)
    source = aiofeed.LitDataShards(folder)
    assert_rows(read_all(source), ROWS)
    assert_rows(read_all(pickle.loads(pickle.dumps(source))), ROWS)
    assert source.key(31).endswith("one/chunk-0-1.bin[1]")
    assert list(source.shard_starts) == [0, 30, 60, 90, 100]
    assert_rows(asyncio.run(aiofeed.LitDataShards(folder / "index.json").read_many([33, 2])), [ROWS[33], ROWS[2]])
    shutil.copytree(folder, tmp_path / "two")
    assert aiofeed.LitDataShards(tmp_path / "two").fingerprint() == source.fingerprint()
    check_source(source, decode=lambda row: row["n"])


def test_chunks_of_tokens(tmp_path: Path, read_all: Callable[[Any], Any]) -> None:
    """With ``block=`` a sample is so many tokens of one chunk, as LitData's own loader gives them."""
    litdata = pytest.importorskip("litdata")
    documents = [torch.arange(number, number + 20, dtype=torch.int32) for number in range(10)]
    folder = write_chunks(tmp_path / "tokens", documents, chunk_size=90, item_loader=litdata.TokensLoader(16))
    expected = litdata.StreamingDataset(str(folder), item_loader=litdata.TokensLoader(16))
    found = read_all(aiofeed.LitDataShards(folder, block=16))
    assert torch.equal(torch.stack(found), torch.stack([expected[at] for at in range(len(expected))]))
    assert len(aiofeed.LitDataShards(folder, 5)) != len(found)
    with pytest.raises(ValueError, match=r"index.json: its chunks are read by TokensLoader, and block=None"):
        aiofeed.LitDataShards(folder)


@pytest.mark.parametrize("name", SOURCES)
def test_threads_read_at_the_same_time(name: str, tmp_path: Path) -> None:
    """Eight threads that read samples in random order have the right ones."""
    if name == "litdata":
        source, key = aiofeed.LitDataShards(write_chunks(tmp_path / "chunks")), "n"
        expected: list[Any] = list(range(100))
    else:
        source, key = aiofeed.ArrayRecordShards(write_records(tmp_path)), None  # type: ignore[assignment]
        expected = RECORDS
    wrong: list[Any] = []

    def read(seed: int) -> None:
        for indices in np.random.default_rng(seed).integers(0, 100, (20, 8)).tolist():
            found = [each[key] if key else each for each in source.read_now(indices)]
            wrong.extend([indices] * (found != [expected[index] for index in indices]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork with several threads
@pytest.mark.parametrize("known", [False, True], ids=["a new source", "a source that was read"])
@pytest.mark.parametrize("name", SOURCES)
def test_forks(name: str, known: bool, tmp_path: Path) -> None:
    """A fork reads the same samples of chunks; of records it gets an error that says what to do."""
    folder, options = tmp_path / "files", {"batch_size": 10, "collate_fn": list}

    def make() -> aiofeed.Feeder[Any]:
        return aiofeed.Feeder(SOURCES[name](folder), **options)

    def same(feeder: aiofeed.Feeder[Any]) -> bool:
        return [str(each) for batch in feeder for each in batch] == expected

    if name == "litdata":
        write_chunks(folder)
    else:
        write_records(folder)
        folder /= "*.array_record"
        options |= {"decode": bytes}
    expected = [str(each) for each in (RECORDS if name == "array-record" else ROWS)]
    feeder = make()
    assert same(feeder)
    if (child := os.fork()) == 0:  # pragma: no cover - in the child
        found = 3
        with contextlib.suppress(BaseException):
            signal.alarm(30)
            try:
                found = not same(feeder if known else make())
            except aiofeed.FeedError as error:
                found = 2 if "opened ArrayRecord files" in str(error) and "'spawn'" in str(error) else 4
        os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (2 if name == "array-record" else 0)
    assert same(feeder)


def test_damaged_records(tmp_path: Path, read_all: Callable[[Any], Any]) -> None:
    """Truncated and foreign files are errors with their name; a damaged record fails alone."""
    urls = write_records(tmp_path, "group_size:1,uncompressed")
    path = tmp_path / "b.array_record"
    data = path.read_bytes()
    for damaged in (data[:-100], b"", b"text" * 20_000):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"b\.array_record: it is truncated, damaged or no ArrayRecord file"):
            aiofeed.ArrayRecordShards(urls)
    at = data.index(RECORDS[62])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = read_all(aiofeed.ArrayRecordShards(urls))
    assert [index for index, each in enumerate(found) if each != RECORDS[index]] == [62]
    assert "b.array_record: it is damaged" in str(found[62])
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.array_record"):
        aiofeed.ArrayRecordShards(urls)


def test_damaged_chunks(tmp_path: Path) -> None:
    """Missing and truncated chunks, pickles, and chunks without random access are errors with their name."""
    with pytest.raises(ValueError, match="compressed as a whole, encrypted or pickled"):
        aiofeed.LitDataShards(write_chunks(tmp_path / "pickles", [{"x": {1, 2}}]))
    folder = write_chunks(tmp_path / "one")
    chunk, index = folder / "chunk-0-1.bin", json.loads((folder / "index.json").read_text())
    data, config = chunk.read_bytes(), index["config"]
    chunk.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"chunk-0-1\.bin: it is truncated"):
        aiofeed.LitDataShards(folder)
    chunk.unlink()
    with pytest.raises(FileNotFoundError, match=r"chunk-0-1\.bin"):
        aiofeed.LitDataShards(folder)
    for change, message in [
        (
            {"config": config | {"compression": "zstd"}},
            "index.json: compressed as a whole, encrypted or pickled",
        ),
        (
            {"config": config | {"encryption": {"level": "sample"}}},
            "index.json: compressed as a whole, encrypted or pickled",
        ),
        ({"config": config | {"data_format": ["graph:pickle"]}}, "compressed as a whole, encrypted or pickled"),
        ({"config": config | {"item_loader": "ParquetLoader"}}, "index.json: its chunks are read by ParquetLoader"),
        ({"config": None}, "index.json: it is damaged"),
        ({"chunks": [index["chunks"][0] | {"filename": "../private"}]}, r"it names the file '\.\./private'"),
        ({"chunks": [index["chunks"][0] | {"chunk_size": 1 << 50}]}, "cannot have 1125899906842624 samples"),
        ({"chunks": []}, "index.json: it is damaged"),
    ]:
        (folder / "index.json").write_text(json.dumps(index | change))
        with pytest.raises(ValueError, match=message):
            aiofeed.LitDataShards(folder)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="its chunks are read by PyTreeLoader, and block=4"):
        aiofeed.LitDataShards(folder, block=4)
    (folder / "index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"one/index\.json"):
        aiofeed.LitDataShards(folder)


@pytest.mark.parametrize("package", SOURCES)
def test_urls(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects at URLs are refused."""
    pytest.importorskip(package.replace("-", "_"))

    async def found(shard: Shard) -> None:
        shard.size = 1

    monkeypatch.setattr(Shard, "open", found)
    with pytest.raises(ValueError, match="only files are read in this format, not s3://bucket/a"):
        SOURCES[package]("s3://bucket/a")


@pytest.mark.parametrize("package", SOURCES)
def test_a_missing_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package the constructor says what to install."""
    for name in ("litdata", "array_record.python.array_record_data_source"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "index.json").write_text(
        '{"config": {"encryption": null, "compression": null, "data_format": []}, "chunks": []}'
    )
    source, path = SOURCES[package], tmp_path / "index.json" if package == "litdata" else __file__
    with pytest.raises(ImportError, match=rf'{source.__name__} needs {package}: pip install "aiofeed\[{package}\]"'):
        source(path)
