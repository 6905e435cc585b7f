"""`aiofeed ls`: folders, objects, shards, manifests, and what cannot be read."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiofeed import TarShards
from aiofeed.diagnostics.cli import main
from tests.support.shard_files import members_of, numbered, tfrecord, write_tar, write_zip

pytestmark = pytest.mark.usefixtures("arrow_started")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.fixture
def server(object_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that the environment names."""
    gc.collect()  # clients of the same bucket, whose endpoint is that of an earlier test
    for name, value in object_server.options.items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "endpoint" else f"AWS_{name.upper()}", str(value))
    return object_server


@pytest.fixture
def ls(capsys: pytest.CaptureFixture[str]) -> Any:
    """`ls(*urls)` returns the objects that `aiofeed ls --json` prints."""

    def run(*urls: str) -> list[dict[str, Any]]:
        assert main(["ls", "--json", *urls]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


FILES = {"a/1.jpg": 10, "a/2.JPG": 30, "b/3.jpg": 20, "b/notes": 5, "c.tar.gz": 2000}
LISTED = {
    "objects": 5,
    "size": 2065,
    "smallest": 5,
    "median": 20,
    "largest": 2000,
    "extensions": {".jpg": 3, "none": 1, ".gz": 1},
}


def test_folders(folder: Path, server: Any, ls: Any) -> None:
    """Number, sizes, extensions and first keys of the objects of a folder and of a prefix; an object has its size."""
    for name, size in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(size))
        server.objects[f"bucket/train/{name}"] = bytes(size)
    keys = sorted(FILES)
    assert {**ls(".")[0], "keys": keys} == {"url": ".", "kind": "folder", **LISTED, "keys": keys}
    for url in ("s3://bucket/train", "s3://bucket/train/"):
        assert ls(url) == [{"url": url, "kind": "folder", **LISTED, "keys": keys}]
    assert ls("s3://bucket")[0]["keys"] == [f"train/{key}" for key in keys]
    for url in ("a/1.jpg", "s3://bucket/train/a/1.jpg", f"{server.endpoint}/bucket/train/a/1.jpg"):
        assert ls(url) == [{"url": url, "kind": "object", "size": 10}]
    (folder / "empty").mkdir()
    assert ls("empty")[0]["objects"] == 0


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables have a line for each fact, with units, and a blank line between them."""
    for name, size in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    write_tar(folder / "x.tar", members_of(numbered(0, 1500)))
    size = (folder / "x.tar").stat().st_size / (1 << 20)
    assert main(["ls", "a", "x.tar", "c.tar.gz"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a (folder)",
        "objects     2",
        "size        40 bytes",
        "smallest    10 bytes",
        "median      20 bytes",
        "largest     30 bytes",
        "extensions  .jpg 2",
        "keys        1.jpg, 2.JPG",
        "",
        "x.tar (tar)",
        "shards   1",
        f"size     {size:.1f} MiB",
        "samples  1,500",
        "indexed  1",
        "fields   cls, jpg",
        "",
        "c.tar.gz (object)",
        "size  2.0 KiB",
    ]


def test_shards(folder: Path, ls: Any) -> None:
    """Shards of one format are one table, with samples and fields, however they are named."""
    for number in range(2):
        write_tar(folder / f"{number}.tar", members_of(numbered(10 * number, 10)))
        write_zip(folder / f"{number}.zip", members_of(numbered(10 * number, 10)))
        (folder / f"{number}.tfrecord").write_bytes(tfrecord([b"a", b"b", b"c"]))
    for kind, samples, fields in (("tar", 20, ["cls", "jpg"]), ("zip", 20, ["cls", "jpg"]), ("tfrecord", 6, [])):
        size = sum(path.stat().st_size for path in folder.glob(f"*.{kind}"))
        expected = {"kind": kind, "shards": 2, "size": size, "samples": samples, "indexed": 2, "fields": fields}
        for urls in ([f"{{0..1}}.{kind}"], [f"*.{kind}"]):
            assert ls(*urls) == [{"url": urls[0], **expected}]
        assert ls(f"0.{kind}", f"1.{kind}") == [{"url": f"0.{kind} and 1 more", **expected}]
    assert [found["kind"] for found in ls("0.tar", "0.zip", "1.zip", "1.tar")] == ["tar", "zip", "tar"]
    shards = [
        {"samples": count, "column_names": ["x", "y"], "raw_data": {"bytes": 100, "basename": f"{count}.mds"}}
        for count in (3, 4)
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    mds = {"kind": "mds", "shards": 2, "size": 200, "samples": 7, "fields": ["x", "y"]}
    assert ls("index.json") == [{"url": "index.json", **mds}]


def test_objects_are_not_read_for_an_index(folder: Path, server: Any, ls: Any, capsys: Any) -> None:
    """The samples of a tar file in a bucket are unknown until there is an index."""
    write_tar(folder / "x.tar", members_of(numbered(0, 10)))
    server.objects["bucket/x.tar"] = (folder / "x.tar").read_bytes()
    [found] = ls("s3://bucket/x.tar")
    assert (found["samples"], found["indexed"], found["size"]) == (None, 0, len(server.objects["bucket/x.tar"]))
    assert all(request.method == "HEAD" or request.key != "bucket/x.tar" for request in server.requests)
    assert main(["ls", "s3://bucket/x.tar"]) == 0
    assert "samples  unknown; `aiofeed index` reads the shards" in capsys.readouterr().out
    TarShards("s3://bucket/x.tar")
    [found] = ls("s3://bucket/x.tar")
    assert (found["samples"], found["indexed"], found["fields"]) == (10, 1, ["cls", "jpg"])


@pytest.mark.integration
def test_manifests(folder: Path, server: Any, ls: Any) -> None:
    """Rows and columns of manifests and of Parquet files, also of files that differ in their columns."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (folder / "m.csv").write_text("path,label\na,1\nb,2\n")
    (folder / "m.jsonl").write_text('{"path": "a", "box": [1]}\n{"path": "b", "box": [2]}\n')
    server.objects["bucket/m.csv"] = (folder / "m.csv").read_bytes()
    csv = {"kind": "csv", "rows": 2, "columns": ["path", "label"]}
    for url in ("m.csv", "s3://bucket/m.csv"):
        assert ls(url) == [{"url": url, **csv}]
    web = f"{server.endpoint}/bucket/m.csv?token=hunter-2222"
    assert ls(web) == [{"url": web.replace("hunter-2222", "***"), **csv}]
    assert ls("m.jsonl") == [{"url": "m.jsonl", "kind": "jsonl", "rows": 2, "columns": ["path", "box"]}]
    for number in range(2):
        parquet.write_table(
            arrow.table({"path": ["a", "b", "c"], f"n{number}": [1, 2, 3]}), folder / f"{number}.parquet"
        )
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    expected = {"kind": "parquet", "files": 2, "size": size, "rows": 6, "columns": ["path", "n0", "n1"]}
    assert ls("*.parquet") == [{"url": "*.parquet", **expected}]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gone", "gone: [Errno 2] No such file or directory"),
        ("gone.csv", "gone.csv: [Errno 2] No such file or directory"),
        ("gone-*.tar", "gone-*.tar: no shard matches"),
        ("bad.tar", "bad.tar: "),
        ("index.json", "index.json: it is no index of MDS shards"),
        ("s3://bucket/gone", "s3://bucket/gone: [Errno 2] there is no such object"),
        ("s3://user:hunter-2222@bucket/x", "s3://***@bucket/x: "),
        ("{endpoint}/bucket/gone?token=hunter-2222", "/bucket/gone?token=***: [Errno 2] there is no such object"),
        ("hdfs://x/y", "hdfs://x/y: 'hdfs://x/y': the scheme must be one of"),
        ("{0..", "{0..: "),
    ],
)
def test_what_cannot_be_read(folder: Path, server: Any, capsys: Any, url: str, message: str) -> None:
    """What cannot be read is one line without credentials; the others are shown, and the exit code is 1."""
    (folder / "bad.tar").write_bytes(b"no tar")
    (folder / "index.json").write_text('{"shards": [{"samples": 3}]}')
    assert main(["ls", url.replace("{endpoint}", server.endpoint), "bad.tar.txt", "."]) == 1
    output = capsys.readouterr()
    first, second = output.err.splitlines()
    assert message in first
    assert "hunter" not in output.err + output.out
    assert second.startswith("bad.tar.txt: [Errno 2]")
    assert ". (folder)" in output.out


def test_as_a_program(folder: Path) -> None:
    """`python -m aiofeed ls` has the exit code, and no traceback."""
    command = [sys.executable, "-m", "aiofeed", "ls", "gone"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=folder)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
