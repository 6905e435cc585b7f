"""Which data a state, a receipt and a ``DiskCache`` belong to: sources recognize their contents wherever they are."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed import Feeder
from aiofeed.errors import StateError
from aiofeed.kernel.core.faces import adapt_source
from aiofeed.kernel.sampling.schedule import uncompared
from aiofeed.kernel.sources.file_io import SAMPLE_BYTES, SAMPLED
from aiofeed.kernel.sources.subset import fingerprint_of, names_of
from tests.support.fault_server import FaultServer
from tests.support.shard_files import tfrecord, write_tar
from tests.support.states import edited_state

pytestmark = pytest.mark.usefixtures("arrow_started", "zarr_started")

COUNT = 12
LEROBOT = Path(__file__).parent / "data/lerobot/av1"


def contents(which: int) -> list[bytes]:
    """Contents of files that are of the same sizes, and others if ``which`` differs."""
    return [bytes([at, which]) * (at + 2) for at in range(COUNT)]


def files(root: Path, which: int, folder: str = "class", suffix: str = ".jpg") -> list[Path]:
    (root / folder).mkdir(parents=True, exist_ok=True)
    paths = [root / folder / f"{at}{suffix}" for at in range(COUNT)]
    for path, data in zip(paths, contents(which), strict=True):
        path.write_bytes(data)
    return paths


def tar(root: Path, which: int) -> Any:
    write_tar(root / "a.tar", [(f"{at}.jpg", data) for at, data in enumerate(contents(which))])
    return root / "a.tar"


def packed(root: Path, which: int) -> Any:
    with zipfile.ZipFile(root / "a.zip", "w") as archive:
        for at, data in enumerate(contents(which)):
            archive.writestr(zipfile.ZipInfo(f"{at}.jpg"), data)  # without the time
    return root / "a.zip"


def records(root: Path, which: int) -> Any:
    (root / "a.tfrecord").write_bytes(tfrecord(contents(which)))
    return root / "a.tfrecord"


def mds(root: Path, which: int, *, compressed: bool = False) -> Any:
    bodies = [np.uint32(len(data)).tobytes() + data for data in contents(which)]
    offsets = np.cumsum([4 * (COUNT + 2) + 2, *map(len, bodies)]).astype("<u4").tobytes()
    data = np.uint32(COUNT).tobytes() + offsets + b"{}" + b"".join(bodies)
    entry: dict[str, Any] = {"version": 2, "format": "mds", "samples": COUNT, "zip_data": None, "compression": None}
    entry |= {"raw_data": {"basename": "s.mds", "bytes": len(data)}, "column_names": ["x"], "column_sizes": [None]}
    if compressed:
        data = pytest.importorskip("pyarrow").compress(data, "snappy").to_pybytes()
        entry |= {"zip_data": {"basename": "s.mds.snappy"}, "compression": "snappy"}
    (root / ("s.mds.snappy" if compressed else "s.mds")).write_bytes(data)
    index = {"version": 2, "shards": [entry | {"column_encodings": ["bytes"]}]}
    (root / "index.json").write_text(json.dumps(index))
    return root


def table(root: Path, which: int, kind: str = "parquet") -> Any:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    data = arrow.table({"x": np.arange(200) + 1000 * which, "tokens": [[row, which] for row in range(200)]})
    path = root / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(data, path, compression="none", use_dictionary=False, write_statistics=False)
    else:
        with arrow.ipc.new_file(path, data.schema) as writer:
            writer.write_table(data)
    return path


def manifest(root: Path, which: int, *, ranges: bool = False) -> Any:
    files(root, which)
    rows = [f"class/{at}.jpg,{at % 2},{at + 2}" for at in range(COUNT)]
    (root / "m.csv").write_text("\n".join(["path,start,end", *rows]) + "\n")
    return aiofeed.Manifest(root / "m.csv", **({"start": "start", "end": "end"} if ranges else {}))


def tokens(root: Path, which: int, name: str = "t.bin") -> Any:
    values = (np.arange(600) + 7 * which).astype(np.uint16)
    if name.endswith(".npy"):
        np.save(root / name, values)
    else:
        values.tofile(root / name)
    return aiofeed.Tokens(root / name, block=10)


def hdf5(root: Path, which: int, **options: Any) -> Any:
    with pytest.importorskip("h5py").File(root / "x.h5", "w") as file:
        file.create_dataset("x", data=np.full((40, 3), which, "f4"), **options)
    return root / "x.h5::x"


def zarr(root: Path, which: int, name: str = "x.zarr", **options: Any) -> Any:
    library = pytest.importorskip("zarr")
    given: dict[str, Any] = {"chunks": (10, 3), "compressors": None, "zarr_format": 2} | options
    library.create_array(str(root / name), data=np.full((40, 3), which + 1, "f4"), overwrite=True, **given)
    return str(root / name)


def arrays(given: Any, **options: Any) -> Any:
    return aiofeed.Arrays({"x": given}, **options)


def sparse(root: Path, which: int) -> Any:
    with pytest.importorskip("h5py").File(root / "x.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (4, 9)})
        group["data"] = np.arange(8, dtype="f4")
        group["indices"] = np.arange(8, dtype="i4")
        group["indptr"] = np.array([0, 2 + which, 4, 6, 8])
    return str(root / "x.h5ad::X")


def scaled(root: Path, which: int) -> Any:
    """A large array of the same chunks, of which another number is the factor."""
    path = zarr(root, 0)
    (root / "x.zarr/.zattrs").write_text(json.dumps({"scale_factor": 2.0 + which}))
    return path


def episodes(root: Path, which: int, *, of_videos: bool = False) -> Any:
    pytest.importorskip("av"), pytest.importorskip("pyarrow")
    shutil.copytree(LEROBOT, root, dirs_exist_ok=True)
    if which and of_videos:
        [path, *_] = sorted((root / "videos").rglob("*.mp4"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    elif which:
        import pyarrow
        from pyarrow import parquet

        [path, *_] = sorted((root / "data").rglob("*.parquet"))
        rows = parquet.read_table(path)
        numbers = rows.column("action").to_pylist()[::-1]
        rows = rows.set_column(
            rows.column_names.index("action"), "action", pyarrow.array(numbers, rows.schema.field("action").type)
        )
        parquet.write_table(rows, path)
    return aiofeed.Episodes(root)


def images(root: Path, which: int) -> Any:
    files(root, which)
    return aiofeed.ImageFolder(root)


def pairs(root: Path, which: int) -> Any:
    files(root, 0, "images")
    files(root, which, "masks", ".png")
    return aiofeed.FolderPairs(root / "images", root / "masks")


def stored(make: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
    """A source of the path that ``make`` has written, as a table."""
    return lambda root, which: aiofeed.Table(make(root, which))


SOURCES: dict[str, Callable[[Path, int], Any]] = {
    "files": lambda root, which: aiofeed.Files(files(root, which)),
    "tuples of files": lambda root, which: aiofeed.Files(
        list(zip(files(root, 0, "a"), files(root, which, "b"), strict=True))
    ),
    "image folder": images,
    "pairs of folders": pairs,
    "manifest": manifest,
    "manifest of parts": lambda root, which: manifest(root, which, ranges=True),
    "tar": lambda root, which: aiofeed.TarShards(tar(root, which)),
    "zip": lambda root, which: aiofeed.ZipShards(packed(root, which)),
    "TFRecord": lambda root, which: aiofeed.TFRecordShards(records(root, which)),
    "MDS": lambda root, which: aiofeed.MDSShards(mds(root, which)),
    "MDS, compressed": lambda root, which: aiofeed.MDSShards(mds(root, which, compressed=True)),
    "Parquet rows": lambda root, which: aiofeed.ParquetRows(table(root, which)),
    "table of Parquet": stored(table),
    "table of Arrow": stored(lambda root, which: table(root, which, "arrow")),
    "table in memory": stored(
        lambda _, which: np.array([(row, (row == 101) * which) for row in range(200)], [("x", "i8"), ("y", "i8")])
    ),
    "tokens": tokens,
    "tokens, .npy": lambda root, which: tokens(root, which, "t.npy"),
    "tokens of Parquet": lambda root, which: aiofeed.Tokens(table(root, which), block=10, column="tokens"),
    "tokens of Arrow": lambda root, which: aiofeed.Tokens(table(root, which, "arrow"), block=10, column="tokens"),
    "HDF5": lambda root, which: arrays(hdf5(root, which)),
    "HDF5 in chunks": lambda root, which: arrays(hdf5(root, which, chunks=(10, 3), compression="gzip")),
    "Zarr": lambda root, which: arrays(zarr(root, which)),
    "Zarr in shards": lambda root, which: arrays(zarr(root, which, shards=(20, 3), zarr_format=3)),
    "Zarr, other factor": lambda root, which: arrays(scaled(root, which)),
    "joined Zarr": lambda root, which: arrays([zarr(root, 0), zarr(root, which, "y.zarr")]),
    "array in memory": lambda _, which: arrays(np.full((40, 3), which)),
    "sparse rows": lambda root, which: arrays(sparse(root, which)),
    "episodes": episodes,
    "episodes, frames": lambda root, which: episodes(root, which, of_videos=True),
    "clips": lambda root, which: aiofeed.Clips(aiofeed.Files(files(root, which, suffix=".mp4")), frames=2),
    "tensors": lambda _, which: aiofeed.Tensors(np.full((40, 3), which)),
    "part": lambda root, which: aiofeed.Files(files(root, which))[::2],
    "split": lambda root, which: images(root, which).split({"a": 0.5, "b": 0.5})["a"],
    "mixture": lambda root, which: aiofeed.Mixture(
        {"a": aiofeed.Files(files(root, 0, "a")), "b": aiofeed.Files(files(root, which, "b"))}, weights=[1, 1]
    ),
    "mixture of parts": lambda root, which: aiofeed.Mixture(
        {"a": aiofeed.Files(files(root, 0, "a"))[1:], "b": aiofeed.Files(files(root, which, "b"))[1:]}, weights=[1, 1]
    ),
}
"""Sources of data that are of the same sizes, and others if the number differs."""


def feeder_of(source: Any) -> Feeder[Any]:
    return Feeder(source, decode=len if needs_decoder(source) else None, batch_size=2)  # type: ignore[arg-type]


def needs_decoder(source: Any) -> bool:
    return not isinstance(source, aiofeed.Clips) and adapt_source(source).adopted().traits.decode == "needed"


def state_of(kind: str, root: Path, which: int = 0) -> tuple[Feeder[Any], dict[str, Any]]:
    """A feeder of data in a new folder, and its state."""
    root.mkdir()
    feeder = feeder_of(SOURCES[kind](root, which))
    return feeder, feeder.state_dict()


@pytest.mark.parametrize("kind", SOURCES)
def test_contents_identify_the_data(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The state loads with the same data in another folder and at another time, and not with other data there."""
    caplog.set_level(logging.WARNING, "aiofeed")
    _, state = state_of(kind, tmp_path / "one")
    moved, copied = state_of(kind, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert copied["fingerprint"] == state["fingerprint"]
    moved.load_state_dict(state)
    assert moved.receipt() == state["receipt"]
    other, _ = state_of(kind, tmp_path / "other", 1)
    with pytest.raises(StateError, match="fingerprint of the source"):
        other.load_state_dict(state)
    assert other.receipt() != state["receipt"]
    assert not caplog.records


@pytest.mark.parametrize("kind", sorted(SOURCES.keys() - {"tensors"}))
def test_a_state_without_contents_loads(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The state of a version that knew names and sizes loads with a log line, and the next one has the contents."""
    feeder, state = state_of(kind, tmp_path / "one")
    old = names_of(feeder._source, feeder._length)
    assert state["fingerprint"].startswith(f"{old} ")
    with caplog.at_level(logging.WARNING, "aiofeed"):
        feeder.load_state_dict(edited_state(state, fingerprint=old))
    [record] = caplog.records
    assert "contents of the data could not be compared" in record.getMessage()
    assert feeder.state_dict()["fingerprint"] == state["fingerprint"]
    with pytest.raises(StateError, match="fingerprint of the source"):
        feeder.load_state_dict(edited_state(state, fingerprint="of something else"))


def test_the_fingerprint_is_that_of_the_data_that_were_read(tmp_path: Path) -> None:
    """Data that are written again after an epoch has begun do not change its receipt."""
    paths = files(tmp_path, 0)
    with feeder_of(aiofeed.Files(paths)) as feeder:
        next(iter(feeder))
        files(tmp_path, 1)
        receipt = feeder.receipt()
    with feeder_of(aiofeed.Files(paths)) as other:
        next(iter(other))
        assert other.receipt() != receipt


@pytest.mark.parametrize("place", ["head", "middle", "end"])
@pytest.mark.parametrize("number", [0, -1])
def test_places_that_are_compared(place: str, number: int, tmp_path: Path) -> None:
    """Of the first and the last of many files, bytes at the head, in the middle and at the end are compared."""
    size = 20 * SAMPLE_BYTES
    at = {"head": 0, "middle": size // 2, "end": size - 1}[place]
    paths = [tmp_path / f"{number:04}" for number in range(SAMPLED + 50)]
    for path in paths:
        path.touch()
    paths[number].write_bytes(bytes(size))
    source = aiofeed.Files(paths)
    before = fingerprint_of(source, len(source))
    paths[number].write_bytes(bytes(at) + b"x" + bytes(size - at - 1))
    assert fingerprint_of(source, len(source)) != before


def test_objects_are_recognized_by_what_was_asked_already(object_server: FaultServer, tmp_path: Path) -> None:
    """At URLs sizes and etags identify shards, without another request; those of files are not comparable."""
    prints = []
    for which in (0, 0, 1):
        object_server.objects["bucket/a.tar"] = tar(tmp_path, which).read_bytes()
        source = aiofeed.TarShards("s3://bucket/a.tar", options=object_server.options)
        requests = source.storage_statistics().requests
        prints.append(fingerprint_of(source, COUNT))
        assert source.storage_statistics().requests == requests
    assert prints[0] == prints[1] != prints[2]
    assert uncompared(prints[0], prints[2]) is None
    assert uncompared(fingerprint_of(aiofeed.TarShards(tar(tmp_path, 0)), COUNT), prints[0])


def test_a_missing_file(tmp_path: Path) -> None:
    """If a file cannot be read, names and sizes identify the data."""
    paths = files(tmp_path, 0)
    paths[3].unlink()
    source = aiofeed.Files(paths)
    assert fingerprint_of(source, COUNT) == names_of(source, COUNT)


@pytest.mark.parametrize("old", [False, True])
def test_a_cache_is_of_one_folder(old: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A ``DiskCache`` is refused for other contents, and one of an earlier version is used with a log line."""
    path, seen = tmp_path / "x.cache", []

    def epoch(which: int) -> None:
        root = tmp_path / f"run{which}{len(seen)}"
        root.mkdir()
        source = arrays(hdf5(root, which))
        with Feeder(source, decode=double, batch_size=40, cache=aiofeed.DiskCache(path)) as feeder:
            seen.extend(float(batch[0, 0]) for batch in feeder)

    with pytest.MonkeyPatch.context() as patched:
        if old:
            patched.setattr("aiofeed.cache.disk.fingerprint_of", names_of)
        epoch(1)
    epoch(1)
    assert seen == [2, 2]
    assert [("could not be compared" in each.getMessage()) for each in caplog.records] == [True] * old
    if not old:
        with pytest.raises(aiofeed.errors.CacheError, match="filled from other data"):
            epoch(2)


def double(sample: dict[str, Any]) -> Any:
    return sample["x"] * 2


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ({"dtype": "i4"}, True),
        ({"shape": (40, 3, 1), "chunks": (10, 3, 1)}, True),
        ({"chunks": (20, 3)}, True),
        ({"compressors": "auto"}, True),
        ({"attributes": {"note": "of today"}}, False),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_an_array_that_is_written_again(version: int, after: dict[str, Any], error: bool, tmp_path: Path) -> None:
    """An array with another dtype, shape or codec is an error, also between two epochs; one with a new text is read."""
    library = pytest.importorskip("zarr")
    path = str(tmp_path / "x.zarr")

    def write(dtype: str = "f4", shape: Any = (40, 3), **more: Any) -> None:
        given: dict[str, Any] = {"chunks": (10, 3), "compressors": None, "zarr_format": version} | more
        library.create_array(path, data=np.ones(shape, dtype), overwrite=True, **given)

    write()
    feeder = Feeder(arrays(path), batch_size=10)
    first = [batch["x"].sum() for batch in feeder]
    write(**after)
    if error:
        with pytest.raises(aiofeed.FeedError, match="has changed"):
            list(feeder)
    else:
        assert [batch["x"].sum() for batch in feeder] == first
    feeder.close()
