"""`MDSShards`: columns, encodings and damaged files. Files are written by MosaicML Streaming if it is installed."""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import gzip
import importlib.util
import io
import json
import pickle
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import Feeder, MDSShards
from aiofeed.shards import base
from aiofeed.shards.arrow import arrow
from aiofeed.shards.mds import CompressedShard
from tests.support.shard_files import write_mds

# Written by MosaicML Streaming 0.13 with `make.py` beside it.
DATA = Path(__file__).parents[1] / "data" / "mds" / "bz2"
COLUMNS: dict[str, tuple[str, int | None]] = {"image": ("jpeg", None), "label": ("int", 8), "text": ("str", None)}


def sample(number: int) -> list[bytes]:
    """The encoded columns image, label and text."""
    return [bytes([number]) * number, np.int64(number - 5).tobytes(), f"t{number}é".encode()]


def value(number: int) -> dict[str, Any]:
    """The values of these columns."""
    return {"image": bytes([number]) * number, "label": number - 5, "text": f"t{number}é"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with 12 and 8 samples."""
    write_mds(tmp_path / "mds", [[sample(number) for number in range(12)], [sample(n) for n in range(12, 20)]], COLUMNS)
    return tmp_path / "mds"


def test_random_access_equals_sequential_content(folder: Path, read_all: Any) -> None:
    """Samples are dicts of the columns' values, or the bytes of one column with the target of another."""
    assert read_all(MDSShards(folder)) == [value(number) for number in range(20)]
    with contextlib.chdir(folder):
        assert len(MDSShards(".")) == len(MDSShards("index.json")) == 20
    assert MDSShards(folder / "index.json").key(13) == f"{folder}/shard.00001.mds[1]"
    for _ in range(2):  # the second time, the targets are those of the cache
        source = MDSShards(folder, "image", "label")
        assert read_all(source) == [bytes([number]) * number for number in range(20)]
        assert [source.target(index) for index in range(20)] == [number - 5 for number in range(20)]
    assert MDSShards(folder, target="text", to_target=len).target(3) == 3
    assert read_all(MDSShards([folder, folder], ["text"]))[25] == {"text": "t5é"}
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == read_all(source)
    with Feeder(source, batch_size=20, decode=lambda data: len(data)) as feeder:
        lengths, labels = next(iter(feeder))
        assert lengths.tolist() == list(range(20))
        assert labels.tolist() == list(range(-5, 15))


def test_other_encodings(tmp_path: Path, read_all: Any) -> None:
    """Columns that are left out may have any encoding; others name the columns."""
    columns = {"a": ("pkl", None), "b": ("ndarray", None), "c": ("str_float", None)}
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    encoded = bytes([17, 2 << 2, 2, 3]) + array.tobytes()
    write_mds(tmp_path, [[[b"x", encoded, b"1.5"]]], columns)
    with pytest.raises(ValueError, match="the column 'a' has the encoding 'pkl', which is not read"):
        MDSShards(tmp_path)
    [found] = read_all(MDSShards(tmp_path, ["b", "c"]))
    assert found["c"] == 1.5
    assert np.array_equal(found["b"], array)
    assert found["b"].dtype == np.int16
    with pytest.raises(ValueError, match=r"data=\): no sample has 'd'"):
        MDSShards(tmp_path, ["d"])


def test_damaged_files(folder: Path, read_all: Any) -> None:
    """Missing, truncated, compressed and foreign files are errors with their name."""
    shard = folder / "shard.00001.mds"
    data = shard.read_bytes()
    for damaged in (data[:-1], data[:6], b"", b"\xff" * 100):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"shard\.00001\.mds: it is truncated"):
            MDSShards(folder)
    changed = bytearray(data)
    changed[4 * 10 + 2] ^= 1  # the size of the image of sample 0
    shard.write_bytes(changed)
    found = read_all(MDSShards(folder))
    assert [at for at, each in enumerate(found) if isinstance(each, Exception)] == [12]
    assert "shard.00001.mds: sample 0 has" in str(found[12])
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard\.00001\.mds"):
        MDSShards(folder)


def test_damaged_indexes(folder: Path) -> None:
    """An index of another format or version, with other columns or numbers, is an error."""
    index = json.loads((folder / "index.json").read_text())
    zipped = {"compression": "bz2", "zip_data": {"basename": "shard.00001.mds.bz2"}}
    cases = [
        ("{", "it is no JSON"),
        (json.dumps({"version": 1}), "it is no index of MDS shards of version 2"),
        (json.dumps({"version": 2, "shards": []}), "the list of shards is empty"),
        (_changed(index, format="csv"), "an entry of a shard: it has the format 'csv'"),
        (_changed(index, raw_data=None), "an entry of a shard: it is damaged"),
        (json.dumps({"version": 2, "shards": [3]}), "an entry of a shard: it is damaged"),
        (_changed(index, raw_data={"basename": "../private/s.mds"}), r"it names the file '\.\./private/s.mds'"),
        (_changed(index, raw_data={"basename": str(folder / "shard.00001.mds")}), "it names the file '/"),
        (_changed(index, **(zipped | {"zip_data": {"basename": "../s.mds.bz2"}})), r"it names the file '\.\./s"),
        (_changed(index, samples=9), "it has 8 samples, the list of shards has 9"),
        (_changed(index, column_encodings=["str"] * 3), "shards have different columns"),
    ]
    for text, message in cases:
        (folder / "index.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            MDSShards(folder)
    (folder / "index.json").write_text(_changed(index, **(zipped | {"zip_data": {"basename": "%2e%2e/s.mds"}})))
    with pytest.raises(ValueError, match="it names the file '%2e"):
        MDSShards(folder.as_uri())
    (folder / "index.json").write_text(_changed(index, **zipped))
    assert len(MDSShards(folder)) == 20  # the shard lies there decompressed, too
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard\.00001\.mds\.bz2"):
        MDSShards(folder)


def compress(folder: Path, compression: str) -> None:
    """Replace the shards of a folder by compressed ones."""
    arrow, (codec, _, _) = pytest.importorskip("pyarrow"), compression.partition(":")
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"]:
        path = folder / entry["raw_data"]["basename"]
        name = "brotli" if codec == "br" else codec
        own = {"gz": gzip.compress, "bz2": bz2.compress}.get(codec)
        data = own(path.read_bytes()) if own else arrow.compress(path.read_bytes(), name).to_pybytes()
        path.with_name(f"{path.name}.{codec}").write_bytes(data)
        path.unlink()
        entry |= {"compression": compression, "zip_data": {"basename": f"{path.name}.{codec}", "bytes": len(data)}}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz", "br:11", "snappy", "bz2:9"])
def test_compressed_shards(compression: str, folder: Path, read_all: Any) -> None:
    """Compressed shards have the samples, targets and fingerprint of the shards themselves."""
    expected = MDSShards(folder, "image", "label")
    samples = read_all(expected)
    compress(folder, compression)
    source = MDSShards(folder, "image", "label")
    assert read_all(source) == samples
    assert [source.target(index) for index in range(20)] == [number - 5 for number in range(20)]
    assert (source.fingerprint(), source.key(13)) == (expected.fingerprint(), expected.key(13))
    assert read_all(pickle.loads(pickle.dumps(source))) == samples
    with Feeder(MDSShards(folder, "label"), batch_size=5, shuffle=True, decode=lambda data: data) as feeder:
        assert sorted(torch.cat(list(feeder)).tolist()) == list(range(-5, 15))


def test_compressed_shards_at_urls(server: Any, folder: Path, read_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed shard is read once as a whole; only some decompressed shards are kept."""
    compress(folder, "zstd")
    for path in folder.iterdir():
        server.objects[f"bucket/mds/{path.name}"] = path.read_bytes()
    read: list[str] = []
    original = CompressedShard._decompressed

    async def counted(shard: CompressedShard) -> memoryview:
        read.append(shard.key)
        return await original(shard)

    monkeypatch.setattr(CompressedShard, "_decompressed", counted)
    source = MDSShards("s3://bucket/mds/", options=server.options)
    assert read_all(source) == [value(number) for number in range(20)]
    assert sorted(read) == ["mds/shard.00000.mds", "mds/shard.00001.mds"]
    again = MDSShards("s3://bucket/mds/", options=server.options)
    assert len(read) == 2  # the offsets are cached
    monkeypatch.setattr(base, "CACHE_BYTES", 1)
    for index in (0, 11, 19, 1):
        asyncio.run(again.read(index))
    assert [key[-5] for key in read[2:]] == ["0", "1", "0"]
    server.objects["bucket/mds/shard.00001.mds.zstd"] += b"x"
    [error] = asyncio.run(again.read_many([15]))
    assert "s3://bucket/mds/shard.00001.mds.zstd" in str(error)
    assert "has changed" in str(error)


def test_damaged_compressed_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated shard, one of another size, an unknown compression and a missing pyarrow are errors that say so."""
    compress(folder, "zstd")
    index, shard = json.loads((folder / "index.json").read_text()), folder / "shard.00001.mds.zstd"
    data, raw = shard.read_bytes(), index["shards"][1]["raw_data"]
    shard.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=r"shard\.00001\.mds\.zstd: its zstd data are truncated or damaged"):
        MDSShards(folder)
    shard.write_bytes(data)
    for change, message in [
        ({"raw_data": raw | {"bytes": raw["bytes"] - 1}}, "its zstd data are truncated or damaged"),
        ({"raw_data": raw | {"bytes": 1 << 40}}, "reads less than 4 GiB"),
        ({"compression": "bz2:9"}, "its bz2 data are truncated or damaged"),
        ({"compression": "lz4"}, "compressed with lz4; .* with zstd, gz, br, snappy, bz2"),
        ({"compression": None}, "an entry of a shard: it is damaged"),
    ]:
        (folder / "index.json").write_text(_changed(index, **change))
        with pytest.raises(ValueError, match=message):
            MDSShards(folder)
    (folder / "index.json").write_text(json.dumps(index))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arrow.cache_clear()
    with pytest.raises(ImportError, match=r"aiofeed\[parquet\]"):
        MDSShards(folder)


def _changed(index: dict[str, Any], **values: Any) -> str:
    return json.dumps(index | {"shards": [index["shards"][0], index["shards"][1] | values]})


def test_few_requests_open_a_folder(server: Any, folder: Path, read_all: Any) -> None:
    """A folder in a bucket is opened with the index, and the size and the offsets of each shard."""
    for path in folder.iterdir():
        server.objects[f"bucket/mds/{path.name}"] = path.read_bytes()
    source = MDSShards("s3://bucket/mds/", options=server.options)
    assert server.count == 1 + 2 * 3
    assert read_all(source) == [value(number) for number in range(20)]


def test_images_lists_and_decimals(tmp_path: Path, read_all: Any) -> None:
    """Images of raw pixels, lists of images and decimals have the values that were written; other sizes are errors."""
    image, jpegs = Image.effect_noise((5, 3), 40), [b"one", b"", b"three"]
    raw = np.array([5, 3, 1], "<u4").tobytes() + b"L" + image.tobytes()
    sizes = np.array([3, 0, 5], "<u4").tobytes() + b"".join(jpegs)
    many = bytes(4) + (2).to_bytes(4, "little") + np.array([len(raw)] * 2, "<u4").tobytes() + raw + raw
    columns = {"a": "pil", "b": "list[pil]", "c": "list[jpeg]", "d": "list[png]", "e": "jpeg_array", "f": "str_decimal"}
    number = (3).to_bytes(4, "little")
    row = [raw, many, bytes(4) + number + sizes, bytes(8), number + sizes, b"-0.10"]
    huge = np.array([1 << 31, 1 << 31, 1], "<u4").tobytes() + b"L"
    damaged = [
        [each if at != wrong else bad for at, each in enumerate(row)]
        for wrong, bad in ((0, raw[:-1]), (0, huge), (1, many[:-1]), (2, b"\1" * 9), (4, number + sizes + b"x"))
    ]
    write_mds(tmp_path, [[row, *damaged]], {name: (kind, None) for name, kind in columns.items()})
    found, *errors = read_all(MDSShards(tmp_path))
    assert [each.tobytes() for each in (found["a"], *found["b"])] == [image.tobytes()] * 3
    assert (found["a"].size, found["a"].mode) == ((5, 3), "L")
    assert (found["c"], found["d"], found["e"], str(found["f"])) == (jpegs, [], jpegs, "-0.10")
    assert all(isinstance(error, ValueError) and "shard.00000.mds" in str(error) for error in errors)


def test_a_folder_that_mosaic_wrote(read_all: Any) -> None:
    """A folder that MosaicML Streaming wrote, compressed with bz2, has the images, lists and decimals that it got."""
    found = read_all(MDSShards(DATA))
    for number, each in enumerate(found):
        pixels = np.arange(6 * (number + 1), dtype=np.uint8).reshape(2, -1, 3)
        assert np.array_equal(np.asarray(each["p"]), pixels)
        assert [np.asarray(image).tolist() for image in each["lp"]] == [pixels[..., 0].tolist()] * number
        assert [Image.open(io.BytesIO(data)).size for data in each["lj"]] == [(number + 1, 2)] * number
        assert each["ja"] == [b"\xff\xd8\xff", b"2"]
        assert each["sd"] == Decimal(number).scaleb(-2)
    assert len(found) == 5


@pytest.mark.integration
@pytest.mark.parametrize("compression", [None, "bz2", "zstd:3"])
def test_shards_of_mosaic(compression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_all: Any) -> None:
    """Shards that MosaicML Streaming writes have the values that it reads."""
    writer, reader = _mosaic(monkeypatch)
    arrays = {"fixed": "ndarray:float32:2,2", "typed": "ndarray:int64", "any": "ndarray"}
    columns = {"n": "int", "s": "str", "b": "bytes", "f": "float32", "u": "uint16", "si": "str_int", "j": "json"}
    columns |= {"sd": "str_decimal", "p": "pil", "lp": "list[pil]"} | arrays
    random, plain = np.random.default_rng(0), str(tmp_path / "plain")
    with (
        writer(out=plain, columns=columns, size_limit=2000) as out,
        writer(out=str(tmp_path / "out"), columns=columns, size_limit=2000, compression=compression) as packed,
    ):
        for number in range(50):
            array, picture = random.random((2, 2), np.float32), Image.effect_noise((number + 1, 2), 9)
            values = {"n": -number, "s": "ö" * number, "b": bytes(number), "f": number / 4, "u": number, "si": 1 << 70}
            values |= {"sd": Decimal(number).scaleb(-1), "p": picture, "lp": [picture.convert("RGB")] * (number % 3)}
            values |= {"fixed": array, "typed": np.arange(number + 1), "any": np.ones((1, number + 1), np.uint8)}
            for each in (out, packed):
                each.write(values | {"j": {"a": [number]}})
    found = read_all(MDSShards(tmp_path / "out"))
    entries = json.loads((tmp_path / "plain" / "index.json").read_text())["shards"]
    assert len(entries) > 3
    shards = [reader.from_json(plain, None, entry) for entry in entries]
    expected = [shard.decode_sample(shard.get_sample_data(at)) for shard in shards for at in range(shard.samples)]
    np.testing.assert_equal(found, expected)


def _mosaic(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The writer and the reader of its format, without its other modules and what they need."""
    spec = importlib.util.find_spec("streaming")
    if spec is None or spec.origin is None:
        pytest.skip("mosaicml-streaming is not installed")
    for name in ("streaming", "streaming.base", "streaming.base.format", "streaming.base.format.mds"):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, module)
    try:
        from streaming.base.format.mds.reader import MDSReader
        from streaming.base.format.mds.writer import MDSWriter
    except ImportError as error:
        pytest.skip(f"mosaicml-streaming is not complete: {error}")
    return MDSWriter, MDSReader


def test_a_compressed_shard_that_would_exhaust_memory(folder: Path) -> None:
    """A compressed shard whose index claims far more bytes than it has is an error before it is decompressed."""
    compress(folder, "zstd")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["bytes"] = 1 << 30
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shard\.00001\.mds.*claims 1\.0 GiB in memory"):
        MDSShards(folder)
