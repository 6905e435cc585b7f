"""``Arrays`` at URLs: the batches of files on disk, one request per chunk, and an index that is read once."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed.errors import ReadError
from tests.support.arrays import samples_of
from tests.support.fault_server import Fault, FaultServer, files_of

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

ROWS, CHUNK = 60, 5
X = np.random.default_rng(0).normal(size=(ROWS, 6, 40)).astype("f4")
KINDS = {
    "Zarr 2": "v2.zarr/g/x",
    "Zarr 3": "v3.zarr/g/x",
    "shards": "shards.zarr/x",
    "HDF5": "f.h5::g/x",
    "contiguous": "f.h5::plain",
    "NetCDF": "f.nc::x",
}
WINDOW = {"x": range(-2, 1)}


def write_files(folder: Path) -> None:
    """The same values in each format."""
    known: dict[str, Any] = {"shape": X.shape, "dtype": "f4", "chunks": (CHUNK, 6, 40)}
    zarr.create_array(folder / "v2.zarr", name="g/x", zarr_format=2, **known)[...] = X
    zarr.create_array(folder / "v3.zarr", name="g/x", **known)[...] = X
    zarr.create_array(folder / "shards.zarr", name="x", shards=(4 * CHUNK, 6, 40), **known)[...] = X
    with h5py.File(folder / "f.h5", "w") as file:
        file.create_dataset("g/x", data=X, chunks=(CHUNK, 6, 40), compression="gzip", shuffle=True)
        file["plain"] = X
    with h5py.File(folder / "f.nc", "w") as file:
        file.create_dataset("x", data=X, chunks=(CHUNK, 6, 40), fletcher32=True)
        file["time"] = np.arange(ROWS)
        file["time"].make_scale()
        file["x"].dims[0].attach_scale(file["time"])
        for axis, name in ((1, "lat"), (2, "lon")):
            file["x"].dims[axis].label = name


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of files."""
    (folder := tmp_path / "files").mkdir()
    write_files(folder)
    return folder


@pytest.fixture
def server(server: FaultServer, files: Path) -> FaultServer:
    """A server of these files."""
    server.objects = files_of(files)
    return server


def remote(server: FaultServer, name: str, **options: Any) -> aiofeed.Arrays:
    arrays = {"x": f"s3://bucket/{name}", "row": np.arange(ROWS)}
    return aiofeed.Arrays(arrays, **{"window": WINDOW, "options": server.options, **options})


def local(files: Path, name: str, **options: Any) -> aiofeed.Arrays:
    return aiofeed.Arrays({"x": f"{files}/{name}", "row": np.arange(ROWS)}, **{"window": WINDOW, **options})


def rows_of(batches: Any) -> list[int]:
    """The rows of samples, whose windows are correct."""
    found = []
    for sample in samples_of(batches):
        row = int(sample["row"])
        assert np.array_equal(sample["x"], X[row - 2 : row + 1])
        found.append(row)
    return found


def reads(server: FaultServer, since: int = 0) -> list[Any]:
    """The requests for bytes of objects."""
    return [each for each in server.requests[since:] if each.method == "GET" and each.key != "bucket/"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_batches_equal_those_of_files(kind: str, shuffle: Any, server: FaultServer, files: Path) -> None:
    """In each order, in two epochs."""
    with (
        aiofeed.Feeder(remote(server, KINDS[kind]), batch_size=7, shuffle=shuffle) as feeder,
        aiofeed.Feeder(local(files, KINDS[kind]), batch_size=7, shuffle=shuffle) as expected,
    ):
        for _ in range(2):
            rows = rows_of(feeder)
            assert rows == rows_of(expected)
            assert sorted(rows) == list(range(2, ROWS))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "contiguous"])
def test_one_request_for_each_chunk(kind: str, server: FaultServer) -> None:
    """Of an epoch; the index of a shard is read once for all epochs."""
    source = remote(server, KINDS[kind])
    since = len(server.requests)
    with aiofeed.Feeder(source, batch_size=7, shuffle="window") as feeder:
        rows_of(feeder)
    asked = Counter((each.key, each.headers.get("range")) for each in reads(server, since))
    assert len(asked) <= ROWS // CHUNK + (3 if kind == "shards" else 0)
    assert max(asked.values()) <= 2  # the next epoch has begun
    if kind in ("Zarr 2", "Zarr 3"):
        assert len(asked) == ROWS // CHUNK
    if kind == "shards":
        with aiofeed.Feeder(source, batch_size=7) as feeder:
            since = len(server.requests)
            rows_of(feeder)
        chunks = [each for each in reads(server, since) if ("range" in each.headers)]
        assert len(chunks) <= 2 * ROWS // CHUNK


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_chunks_of_samples_are_read(kind: str, server: FaultServer) -> None:
    """A part of a source needs one of twelve chunks."""
    source = remote(server, KINDS[kind])
    with aiofeed.Feeder(source[:2], batch_size=2) as feeder:
        assert rows_of(feeder) == [2, 3]
        if kind in ("Zarr 2", "Zarr 3"):
            keys = {each.key for each in reads(server)}
            assert not any(key.endswith((".0.0", "/0/0")) for key in keys if not key.endswith(("0.0.0", "0/0/0")))
        if kind != "contiguous":
            assert 0 < feeder.statistics().bytes_read <= X[:CHUNK].nbytes * 2


@pytest.mark.parametrize("name", ["f.h5::g/x", "f.nc::x", "f.h5::plain"])
def test_the_index_of_a_file_is_kept(name: str, server: FaultServer) -> None:
    """In the cache folder, for the next run; not for an object that has changed."""
    remote(server, name)
    assert any(path.is_file() for path in Path(os.environ["AIOFEED_CACHE"]).rglob("*"))
    since = len(server.requests)
    source = remote(server, name)
    assert reads(server, since) == []
    with aiofeed.Feeder(source, batch_size=7) as feeder:
        assert len(rows_of(feeder)) == ROWS - 2


def test_the_index_of_a_changed_file_is_read_again(server: FaultServer, files: Path) -> None:
    """Values of the new object come, of which the chunks lie elsewhere."""
    remote(server, "f.h5::g/x")
    with h5py.File(files / "f.h5", "w") as file:
        file.create_dataset("other", data=np.arange(999))
        file.create_dataset("g/x", data=X, chunks=(4, 3, 7), compression="lzf")
    server.objects = files_of(files)
    with aiofeed.Feeder(remote(server, "f.h5::g/x"), batch_size=7) as feeder:
        assert rows_of(feeder) == list(range(2, ROWS))


@pytest.mark.parametrize("kind", ["HDF5", "shards"])
def test_an_object_that_changes_is_noticed(kind: str, server: FaultServer) -> None:
    """Since its index was read."""
    source = remote(server, KINDS[kind])
    with aiofeed.Feeder(source, batch_size=7) as feeder:
        assert next(iter(feeder))["row"][0] == 2
    for key in [key for key in server.objects if key.endswith((".h5", "c/0/0/0"))]:
        server.objects[key] = bytes(len(server.objects[key]))
    with (
        aiofeed.Feeder(source, batch_size=7) as feeder,
        pytest.raises(ReadError, match=r"has changed|damaged|checksum|decompress"),
    ):
        list(feeder)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_sent_again(kind: str, server: FaultServer) -> None:
    """A server that answers 503 to every third request costs no sample."""
    server.schedule = lambda request: Fault(status=503) if request.number % 3 == 2 else None
    with aiofeed.Feeder(remote(server, KINDS[kind]), batch_size=6) as feeder:
        assert rows_of(feeder) == list(range(2, ROWS))


@pytest.mark.parametrize("kind", ["Zarr 2", "Zarr 3", "shards"])
@pytest.mark.parametrize("status", [404, 403])
def test_chunks_that_are_not_there(kind: str, status: int, server: FaultServer) -> None:
    """They have the fill value, also if a store denies access to what does not exist."""
    gone = {key for key in server.objects if key.endswith(("x/1.0.0", "c/1/0/0"))}
    assert gone
    if status == 404:
        for key in gone:
            del server.objects[key]
    else:
        server.schedule = lambda request: Fault(status=403, code="AccessDenied") if request.key in gone else None
    with aiofeed.Feeder(remote(server, KINDS[kind], window=None), batch_size=ROWS) as feeder:
        if status == 403:
            with pytest.raises(aiofeed.FeedError, match="1"):
                list(feeder)
            return
        [batch] = list(feeder)
    rows = slice(20, 40) if kind == "shards" else slice(CHUNK, 2 * CHUNK)
    expected = X.copy()
    expected[rows] = 0
    assert np.array_equal(batch["x"].numpy(), expected)


@pytest.mark.parametrize("kind", ["shards", "HDF5"])
def test_a_pickled_copy_and_a_state(kind: str, server: FaultServer) -> None:
    """A copy sends no requests when it is made; a state resumes exactly with it."""
    source = remote(server, KINDS[kind])
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True}
    with aiofeed.Feeder(source, **options) as feeder:
        whole = rows_of(feeder)
    with aiofeed.Feeder(source, **options) as feeder:
        done = rows_of(islice(feeder, 3))
        state = json.loads(json.dumps(feeder.state_dict()))
    before = server.count
    copied = pickle.loads(pickle.dumps(source))
    assert server.count == before
    with aiofeed.Feeder(copied, **options) as feeder:
        feeder.load_state_dict(state)
        assert done + rows_of(feeder) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Zarr 3", "HDF5"])
def test_processes_read_at_urls(kind: str, server: FaultServer) -> None:
    """Two of them."""
    with aiofeed.Feeder(remote(server, KINDS[kind]), batch_size=6, engine="process:2") as feeder:
        assert rows_of(feeder) == list(range(2, ROWS))


def test_braces_and_lists(server: FaultServer, files: Path, tmp_path: Path) -> None:
    """Arrays at URLs and in files are joined."""
    for part in range(2):
        with h5py.File(files / f"part-{part}.h5", "w") as file:
            file.create_dataset("x", data=X[30 * part : 30 * part + 30], chunks=(CHUNK, 6, 40))
    server.objects = files_of(files)
    for given in (
        "s3://bucket/part-{0..1}.h5::x",
        ["s3://bucket/part-0.h5::x", "s3://bucket/part-1.h5::x"],
        [str(files / "part-0.h5::x"), "s3://bucket/part-1.h5::x"],
    ):
        source = aiofeed.Arrays({"x": given, "row": np.arange(ROWS)}, window=WINDOW, options=server.options)
        with aiofeed.Feeder(source, batch_size=6) as feeder:
            assert rows_of(feeder) == list(range(2, ROWS))
    with pytest.raises(ValueError, match=r"part-\*.*a glob is for paths"):
        aiofeed.Arrays({"x": "s3://bucket/part-*.h5::x"}, options=server.options)


def test_what_files_mean_at_urls(server: FaultServer, files: Path) -> None:
    """As on disk: files of other formats, a variable that is shorter than its dimension, and the names of columns."""
    (files / "old.nc").write_bytes(b"CDF\x01" + bytes(99))
    with h5py.File(files / "short.nc", "w") as file:
        file.create_dataset("time", (6,), "f8", maxshape=(None,), chunks=(4,)).make_scale("time")
        file.create_dataset("x", data=[1, 2], maxshape=(None,), chunks=(4,), fillvalue=-1).dims[0].attach_scale(
            file["time"]
        )
    for name, genes in (("a", ["A", "B"]), ("b", ["B", "A"])):
        with h5py.File(files / f"{name}.h5ad", "w") as file:
            file["X"], file["var/gene"] = np.ones((1, 2)), genes
            file["var"].attrs["_index"] = np.bytes_("gene")
    server.objects = files_of(files)
    with pytest.raises(ValueError, match=r"old\.nc is NetCDF 3: .*nccopy"):
        aiofeed.Arrays({"x": "s3://bucket/old.nc::x"}, options=server.options)
    source = aiofeed.Arrays({"x": "s3://bucket/short.nc::x"}, sample="time", options=server.options)
    with aiofeed.Feeder(source, batch_size=6, shuffle=False) as feeder:
        assert next(iter(feeder))["x"].tolist() == [1, 2, -1, -1, -1, -1]
    with pytest.raises(ValueError, match="in another order"):
        aiofeed.Arrays({"x": "s3://bucket/{a,b}.h5ad::X"}, options=server.options)


def test_an_opened_array_of_a_store(files: Path) -> None:
    """zarr's own ``ObjectStore`` and ``LocalStore``, and arrays of h5py."""
    from obstore.store import MemoryStore

    store = MemoryStore()
    for key, data in files_of(files).items():
        store.put(key.removeprefix("bucket/"), data)
    opened = zarr.open_array(zarr.storage.ObjectStore(store, read_only=True), path="v3.zarr/g/x", mode="r")
    on_disk = zarr.open_array(files / "shards.zarr", path="x", mode="r")
    with h5py.File(files / "f.h5") as file:
        given = [opened, on_disk, file["g/x"], zarr.array(X, chunks=(CHUNK, 6, 40)), X]
        sources = [aiofeed.Arrays({"x": each, "row": np.arange(ROWS)}, window=WINDOW) for each in given]
    for source in sources:
        with aiofeed.Feeder(source, batch_size=6, shuffle="window") as feeder:
            assert sorted(rows_of(feeder)) == list(range(2, ROWS))


MISSING = ["absent.zarr/x", "absent.h5::x", "v3.zarr/g/absent", "f.h5::absent"]


@pytest.mark.parametrize("name", MISSING)
def test_missing_objects(name: str, server: FaultServer) -> None:
    """They are named."""
    with pytest.raises((FileNotFoundError, ValueError), match=r"s3://bucket/.*absent|f\.h5.*absent"):
        remote(server, name)


def test_a_server_that_fails_is_no_missing_array(server: FaultServer) -> None:
    """Its error is raised, and names the object."""
    server.schedule = lambda request: Fault(status=400, code="InvalidRequest")
    for name in ("v3.zarr/g/x", "f.h5::g/x"):
        with pytest.raises(OSError, match=r"v3\.zarr|f\.h5"):
            remote(server, name)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs:UserWarning")
def test_codecs_that_are_not_read_at_urls(server: FaultServer, files: Path) -> None:
    """They are named; on disk zarr reads them."""
    codec = zarr.codecs.numcodecs.LZMA()
    zarr.create_array(files / "lzma.zarr", name="x", shape=X.shape, dtype="f4", compressors=[codec])[...] = X
    server.objects = files_of(files)
    with pytest.raises(ValueError, match=r"lzma\.zarr/x: the codec 'numcodecs\.lzma' is not read at URLs"):
        remote(server, "lzma.zarr/x")


def test_requests_are_counted(server: FaultServer) -> None:
    """In the statistics of the feeder."""
    with aiofeed.Feeder(remote(server, "v3.zarr/g/x"), batch_size=6) as feeder:
        rows_of(feeder)
        assert feeder.statistics().storage.requests >= ROWS // CHUNK  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "a folder"])
def test_a_damaged_cache_folder(damage: str, server: FaultServer) -> None:
    """The index is read again, and kept again."""
    remote(server, "f.h5::g/x")
    kept = [path for path in Path(os.environ["AIOFEED_CACHE"]).rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        data = path.read_bytes()
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        else:
            path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "garbage": bytes(len(data))}[damage])
    with aiofeed.Feeder(remote(server, "f.h5::g/x"), batch_size=7) as feeder:
        assert rows_of(feeder) == list(range(2, ROWS))
    if damage != "a folder":
        since = len(server.requests)
        remote(server, "f.h5::g/x")
        assert reads(server, since) == []


def test_a_cache_folder_that_cannot_be_written(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept, and all is well."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "file"))
    with aiofeed.Feeder(remote(server, "f.h5::g/x"), batch_size=7) as feeder:
        assert rows_of(feeder) == list(range(2, ROWS))
