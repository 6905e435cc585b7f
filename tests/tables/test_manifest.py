"""`Manifest`: formats, columns, ranges, errors, memory, and feeders over it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed import Manifest
from aiofeed.common import expanded
from aiofeed.kernel.sources import file_io
from aiofeed.tables import columns
from tests.support.number_decoders import scalar

arrow = pytest.importorskip("pyarrow")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("arrow_started")]

SAMPLES = 60
ROWS = [{"path": f"files/{number}.txt", "label": number, "name": f"n {number}"} for number in range(SAMPLES)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files whose contents are numbers, and with one file of all numbers as three digits each."""
    (tmp_path / "files").mkdir()
    for number in range(SAMPLES):
        (tmp_path / f"files/{number}.txt").write_text(str(number))
    (tmp_path / "all.bin").write_text("".join(f"{number:03}" for number in range(SAMPLES)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a manifest in the format of its suffix."""
    if path.suffix in (".parquet", ".pq"):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
        return path
    delimiter = "\t" if ".tsv" in path.name else ","
    lines = [json.dumps(row) for row in rows]
    if "json" not in path.name:
        lines = [delimiter.join(map(str, values)) for values in (rows[0], *[row.values() for row in rows])]
    text = "\n".join([*lines, ""]).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read_all(source: Manifest) -> list[Any]:
    return asyncio.run(source.read_many(range(len(source))))


def ranges(number: int) -> dict[str, Any]:
    return {"key": "all.bin", "at": 3 * number, "size": 3, "to": 3 * number + 3}


NAMES = ["m.csv", "m.tsv", "m.jsonl", "m.ndjson", "m.json", "m.parquet", "m.pq", "m.csv.gz", "m.jsonl.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_formats(folder: Path, name: str) -> None:
    """All formats list the same samples, in the order of their rows, with entries beside the manifest."""
    source = Manifest(write(folder / name, ROWS), target=("label", "name"))
    assert len(source) == SAMPLES
    assert list(source.paths) == [str(folder / row["path"]) for row in ROWS]
    assert source.key(7) == str(folder / "files/7.txt")
    assert read_all(source) == [b"%d" % number for number in range(SAMPLES)]
    assert [source.target(number) for number in (0, 59)] == [(0, "n 0"), (59, "n 59")]
    assert source.fingerprint() == Manifest(write(folder / "other.csv", ROWS), target=("label", "name")).fingerprint()


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "m.parquet"])
def test_ranges(folder: Path, name: str) -> None:
    """`start` with `end` or `length` reads parts of files."""
    path = write(folder / name, [ranges(number) for number in range(SAMPLES)])
    expected = [b"%03d" % number for number in range(SAMPLES)]
    for bounds in ({"end": "to"}, {"length": "size"}):
        source = Manifest(path, start="at", **bounds)
        assert read_all(source) == source.read_now(range(SAMPLES)) == expected
        assert asyncio.run(source.read(9)) == b"009"
        assert source.key(9) == f"{folder}/all.bin[27:30]"
    assert source.read_now([59, 0, 59]) == [b"059", b"000", b"059"]


@pytest.mark.usefixtures("folder")
def test_text_as_people_write_it() -> None:
    """Windows newlines, quotes, newlines in quotes, a byte order mark, accents, leading zeros and texts like dates."""
    Path("007").write_text("7")
    Path('ü,"1".txt').write_text("8")
    Path("m.csv").write_bytes(
        '\ufefffile_name,day,note\r\n007,2020-01-01,"a\r\nb"\r\n"ü,""1"".txt",2020-01-02,NA\r\n'.encode()
    )
    source = Manifest("m.csv", target=("day", "note"))
    assert list(source.paths) == ["007", 'ü,"1".txt']
    assert read_all(source) == [b"7", b"8"]
    assert [source.target(0), source.target(1)] == [("2020-01-01", "a\r\nb"), ("2020-01-02", "NA")]
    Path("m.jsonl").write_bytes('\ufeff\r\n{"file_name": "007", "day": "2020-01-01"}\r\n\r\n'.encode())
    assert Manifest("m.jsonl", target="day").target(0) == "2020-01-01"
    duplicates = Manifest("m.jsonl", target="file_name")
    assert duplicates.target(0) == "007"


@pytest.mark.parametrize("name", ["path", "file_name", "url", "key", "filename"])
def test_default_column(folder: Path, name: str) -> None:
    """The column of keys is found by its usual names, or is given."""
    rows = [{"id": "files/1.txt", "filename": "files/2.txt", name: "files/3.txt"}]
    assert read_all(Manifest(write(folder / "m.csv", rows))) == [b"3"]
    assert read_all(Manifest(write(folder / "m.csv", rows), "id")) == [b"1"]


@pytest.mark.parametrize("name", ["m.jsonl", "m.parquet"])
def test_types_of_targets(folder: Path, name: str) -> None:
    """Numbers are numpy scalars, lists of numbers arrays; other values are those of Python."""
    rows = [
        {
            "path": "files/1.txt",
            "n": n,
            "x": n / 2,
            "b": n == 1,
            "box": [n, 2, 3],
            "tags": ["a"] * n,
            "o": {"k": [n]},
        }
        for n in (1, 2)
    ]
    path = write(folder / name, rows)
    source = Manifest(path, target=("n", "x", "b", "box", "tags", "o"))
    n, x, b, box, tags, other = source.target(1)
    assert (n, x, b, tags, other) == (2, 1.0, False, ["a", "a"], {"k": [2]})
    assert box.dtype == np.int64
    assert box.tolist() == [2, 2, 3]
    with aiofeed.Feeder(Manifest(path, target=("n", "box")), decode=scalar, batch_size=2) as feeder:
        [(values, (numbers, boxes))] = list(feeder)
    assert (values.tolist(), numbers.tolist(), boxes.tolist()) == ([1, 1], [1, 2], [[1, 2, 3], [2, 2, 3]])
    assert Manifest(path, target="n", to_target=lambda number: -number).target(1) == -2
    assert Manifest(path, target=["n", "b"], to_target=str).target(0) == str((np.int64(1), np.True_))
    assert Manifest(path, target="n").targets.tolist() == [1, 2]
    assert Manifest(path).target is None
    changed = write(folder / name, [{**row, "o": {"k": []}} for row in rows])
    prints = {Manifest(changed, target=each).fingerprint() for each in ("n", "box", "o", None)}
    assert len({source.fingerprint(), *prints}) == 5


def test_dictionaries(folder: Path) -> None:
    """Parquet columns of categories are texts."""
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: arrow.array([row[name] for row in ROWS]).dictionary_encode() for name in ("path", "name")}
    parquet.write_table(arrow.table(columns), "m.parquet", row_group_size=7)
    source = Manifest("m.parquet", target="name")
    assert (source.key(59), source.target(59)) == ("files/59.txt", "n 59")
    assert folder.name


# --- where entries are


def test_roots(folder: Path) -> None:
    """Entries are relative to the manifest, to `root`, or absolute; or file:// URLs."""
    (folder / "lists").mkdir()
    beside = write(folder / "lists/m.csv", [{"path": "../files/5.txt"}, {"path": str(folder / "files/6.txt")}])
    assert read_all(Manifest(beside)) == [b"5", b"6"]
    assert read_all(Manifest(beside.as_uri())) == [b"5", b"6"]
    rooted = write(folder / "lists/m.csv", [{"path": "files/7.txt"}])
    for root in (folder, str(folder), folder.as_uri()):
        source = Manifest(rooted, root=root)
        assert read_all(source) == [b"7"]
        assert source.root == str(root)
    urls = write(folder / "lists/m.csv", [{"path": (folder / f"files/{number}.txt").as_uri()} for number in (8, 9)])
    source = Manifest(urls)
    assert read_all(source) == [b"8", b"9"]
    assert source.key(0) == str(folder / "files/8.txt")


@pytest.mark.parametrize("name", ["m.csv", "m.parquet", "m.jsonl.gz"])
def test_urls(server: Any, folder: Path, name: str) -> None:
    """A manifest may be at a URL, and have URLs of several buckets, keys beside it or keys below `root`."""
    server.objects.update({f"bucket/files/{number}.txt": b"%d" % number for number in range(SAMPLES)})
    server.objects["other/0"] = b"of another bucket"
    contents = [b"%d" % number for number in range(SAMPLES)]
    local = write(folder / name, ROWS)
    server.objects[f"bucket/{name}"] = local.read_bytes()
    source = Manifest(f"s3://bucket/{name}", target="label", options=server.options)
    assert read_all(source) == contents
    assert source.key(7) == "s3://bucket/files/7.txt"
    assert source.fingerprint() == Manifest(local, target="label").fingerprint()
    rooted = Manifest(local, root="s3://bucket", options=server.options)
    assert read_all(rooted) == contents
    assert read_all(Manifest(f"s3://bucket/{name}", root=folder, options=server.options)) == contents
    of_web = Manifest(f"{server.endpoint}/bucket/{name}?token=hunter-2222")
    assert read_all(of_web) == contents
    assert "hunter" not in repr(of_web) + of_web.key(0)
    entries = [{"url": f"s3://{key}"} for key in ("bucket/files/3.txt", "other/0", "bucket/files/4.txt")]
    listed = Manifest(write(folder / name, entries), options=server.options)
    assert read_all(listed) == [b"3", b"of another bucket", b"4"]
    assert list(aiofeed.Files(listed.paths).paths) == [entry["url"] for entry in entries]


@pytest.mark.usefixtures("server")
def test_urls_that_are_signed_again(folder: Path) -> None:
    """The fingerprint of URLs depends on their queries, but not on the signatures in these."""

    def fingerprint(query: str) -> str:
        return Manifest(
            write(folder / "m.csv", [{"url": f"http://host/{at}?{query}"} for at in range(3)])
        ).fingerprint()

    assert fingerprint("w=5&sig=1") == fingerprint("w=5&sig=2") == fingerprint("w=5") != fingerprint("w=6")


@pytest.mark.usefixtures("obstore_started")
def test_stores(folder: Path) -> None:
    """With `store=`, manifest and samples are in the store, or the manifest is at a file:// URL."""
    from obstore.store import MemoryStore

    store = MemoryStore()
    local = write(folder / "m.csv", ROWS[:2])
    store.put("lists/m.csv", local.read_bytes())
    for number in range(2):
        store.put(f"lists/files/{number}.txt", b"a%d" % number)
        store.put(f"files/{number}.txt", b"b%d" % number)
    assert read_all(Manifest("lists/m.csv", store=store)) == [b"a0", b"a1"]
    assert read_all(Manifest(local.as_uri(), store=store)) == [b"b0", b"b1"]
    assert read_all(Manifest(local.as_uri(), root="lists", store=store)) == [b"a0", b"a1"]


def test_ranges_of_objects(server: Any, folder: Path) -> None:
    """Parts of one object in a read are one request; a part past its end fails alone, a missing object at once."""
    server.objects["bucket/all.bin"] = (folder / "all.bin").read_bytes()
    rows = [{"url": "s3://bucket/all.bin", "at": 3 * number, "size": 3} for number in range(SAMPLES)]
    arguments = {"start": "at", "length": "size", "options": server.options}
    source = Manifest(write(folder / "m.csv", rows), **arguments)
    assert read_all(source) == [b"%03d" % number for number in range(SAMPLES)]
    assert server.count == 1
    assert source.key(1) == "s3://bucket/all.bin[3:6]"
    assert asyncio.run(pickle.loads(pickle.dumps(source)).read(7)) == b"007"
    bad = [*rows[:3], {"url": "s3://bucket/all.bin", "at": 178, "size": 3}]
    gone = [{"url": "s3://bucket/gone", "at": at, "size": 1} for at in (0, 1)]
    found = read_all(Manifest(write(folder / "m.csv", [*bad, *gone]), **arguments))
    assert found[:3] == [b"000", b"001", b"002"]
    assert "ends before byte 181; bytes 178 to 181 were requested: s3://bucket/all.bin" in str(found[3])
    assert [type(error) for error in found[4:]] == [FileNotFoundError] * 2
    assert [request.key for request in server.requests].count("bucket/gone") == 1


def test_ranges_of_files(folder: Path) -> None:
    """A part past the end of a file fails alone, and so do those of a file that is missing; empty parts are empty."""
    rows = [ranges(0), ranges(59), {**ranges(0), "at": 178}, {**ranges(0), "key": "gone"}, {**ranges(7), "size": 0}]
    source = Manifest(write(folder / "m.jsonl", rows), start="at", length="size")
    for found in (read_all(source), source.read_now(range(5))):
        assert (found[0], found[1], found[4]) == (b"000", b"059", b"")
        assert "ends before byte 181" in str(found[2])
        assert isinstance(found[3], FileNotFoundError)


# --- errors

CSV = b"path,label,at,size\n"


@pytest.mark.parametrize(
    ("name", "data", "arguments", "message"),
    [
        ("m.csv", b"", {}, r"m.csv: Empty CSV file"),
        ("m.csv", CSV, {}, r"m.csv lists no samples"),
        ("m.jsonl", b"\n", {}, r"m.jsonl lists no samples"),
        (
            "m.csv",
            b"a.jpg,0\nb.jpg,1\n",
            {},
            r"no column 'path' or 'file_name' .* pass key= as one of \['a.jpg', '0'\]",
        ),
        ("m.csv", CSV + b"a,1,0,1\n", {"key": "x"}, r"m.csv has no column 'x'; the columns are \['path', 'label'"),
        ("m.csv", CSV + b"a,1,0,1\n", {"target": "x"}, r"has no column 'x'"),
        ("m.csv", CSV + b"a,1,0,1\n", {"start": "at", "end": "x"}, r"has no column 'x'"),
        ("m.csv", b"path,path\na,b\n", {}, r"has two columns 'path'"),
        ("m.csv", CSV + b"a,1,0,1\nb,2,0,1\n,3,0,1\n", {}, r"m.csv: row 2 \(the first is 0\) has no 'path'"),
        ("m.csv", CSV + b"a,1,0,1\nb,,0,1\n", {"target": "label"}, r"row 1 .* has no 'label'"),
        ("m.csv", CSV + b"a,x,0,1\nb,,0,1\n", {"target": "label"}, r"row 1 .* has no 'label'"),
        ("m.csv", CSV + b"a,1,,1\n", {"start": "at", "length": "size"}, r"row 0 .* has no 'at'"),
        ("m.csv", CSV + b"a,1,0,1\nb,1\n", {}, r"m.csv: CSV parse error: Expected 4 columns, got 2"),
        ("m.csv", CSV + b"\xff,1,0,1\n", {}, r"m.csv: .*invalid UTF8"),
        ("m.csv", CSV + b"a,1,x,1\n", {"start": "at", "length": "size"}, r"m.csv: .*invalid value 'x'"),
        ("m.csv", CSV + b"a,1,0,-1\n", {"start": "at", "length": "size"}, r"row 0 .*: bytes 0 to -1 are no range"),
        ("m.csv", CSV + b"a,1,0,1\na,1,9,8\n", {"start": "at", "end": "size"}, r"row 1 .*: bytes 9 to 8 are no range"),
        ("m.csv", CSV + b"a,1,-1,1\n", {"start": "at", "end": "size"}, r"bytes -1 to 1 are no range"),
        (
            "m.csv",
            CSV + b"a,1,0,20\n",
            {"start": "at", "end": "size", "max_bytes": 9},
            r"bytes 0 to 20 are more than max_bytes=9 allows",
        ),
        ("m.csv", b"path\na\n../b\n", {"root": "."}, r"m.csv, row 1: it names the file '../b'; .* relative"),
        ("m.csv", b"path\na\n/b\n", {"root": "."}, r"m.csv, row 1: it names the file '/b'"),
        ("m.csv", b"path\ns3://b/c\n", {"root": "."}, r"m.csv, row 0: it names the file 's3://b/c'"),
        ("m.csv", b"path\na\ns3://b/c\n", {}, r"row 0, 'a', is no URL, and row 1 is one"),
        ("m.csv", b"path\nhdfs://b/c\n", {}, r"m.csv: 'hdfs://b/c': the scheme must be one of"),
        ("m.csv", b"path\nfile:///a\ns3://b/c\n", {}, r"m.csv: 's3://b/c', number 1, is a URL, and number 0 is a file"),
        ("m.csv", b"path\na\n", {"options": {}}, r"options= are for the store of URLs"),
        ("m.csv", b"path\na\n", {"start": "at"}, r"start= and one of end= and length="),
        ("m.csv", b"path\na\n", {"end": "at", "length": "size"}, r"start= and one of end= and length="),
        ("m.csv", b"path\na\n", {"format": "xls"}, r"format='xls' is none of csv, tsv, jsonl and parquet"),
        ("m.txt", b"path\na\n", {}, r"the suffix of 'm.txt' is none of csv, tsv, jsonl and parquet"),
        ("m.jsonl", b'{"path": "a"}\n\n{"path": "b"\n', {}, r"m.jsonl: line 3: Expecting ',' delimiter"),
        ("m.jsonl", b'{"path": "a"}\n\xff\n', {}, r"m.jsonl: line 2: .*can't decode"),
        ("m.json", b'[{"path": "a"}]', {}, r"m.json: line 1 is no JSON object"),
        ("m.jsonl", b'{"path": "a"}\n{"path": null}\n', {}, r"row 1 .* has no 'path'"),
        ("m.jsonl", b'{"path": "a"}\n{"p": "b"}\n', {}, r"row 1 .* has no 'path'"),
        ("m.jsonl", b'{"path": "a"}\n{"path": 1}\n', {}, r"m.jsonl: row 1 .*path.* has 1"),
        ("m.jsonl", b'{"path": "a", "label": 1}\n{"path": "b"}\n', {"target": "label"}, r"row 1 .* has no 'label'"),
        ("m.parquet", b"PAR1", {}, r"m.parquet: Parquet file size is 4 bytes"),
        ("m.csv.gz", gzip.compress(CSV + b"a,1,0,1\n" * 9999)[:-20], {}, r"m.csv.gz: Truncated compressed stream"),
        ("m.csv.gz", CSV, {}, r"m.csv.gz: zlib inflate failed"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_manifests(name: str, data: bytes, arguments: dict[str, Any], message: str) -> None:
    """What is wrong with a manifest is an error of the constructor that names the file, and the row or the column."""
    Path(name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Manifest(name, **arguments)


@pytest.mark.parametrize("name", ["m.csv", "m.tsv", "m.jsonl", "m.jsonl.gz", "m.parquet"])
def test_large_whole_numbers_are_exact(folder: Path, name: str) -> None:
    """Numbers from 2**63 on, and all others of their column, are what the file says."""
    numbers = [1234567890123456789, 0, 2**64 - 1, 2**53 + 1]
    rows = [{"path": "a", "id": number, "x": 1.5e300, "y": 0.25} for number in numbers]
    if name.endswith("parquet"):
        columns = [*zip(*[row.values() for row in rows], strict=True)]
        types = [arrow.string(), arrow.uint64(), arrow.float64(), arrow.float64()]
        arrays = [arrow.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(arrays, names=[*rows[0]]), folder / name)
    else:
        write(folder / name, rows)
    source = Manifest(folder / name, target=["id", "x", "y"])
    assert [int(source.target(row)[0]) for row in range(4)] == numbers
    assert source.target(0)[0].dtype == np.uint64
    assert [source.target(row)[1:] for row in range(4)] == [(1.5e300, 0.25)] * 4


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl"])
@pytest.mark.parametrize(
    "values", [[2**63 + 1, -1], [2**64 + 1, 1], [1, 2**53 + 1, 0.5], ["[3, 18446744073709551615]"] * 2]
)
def test_whole_numbers_of_no_type_are_an_error(folder: Path, name: str, values: list[Any]) -> None:
    """If no type has all numbers of a column exactly, the error names the row of a large one."""
    if name.endswith("jsonl"):
        lines = "".join(f'{{"path": "a", "id": {value}}}\n' for value in values)
    else:
        lines = "path,id\n" + "".join(f'a,"{value}"\n' for value in values)
    (folder / name).write_text(lines)
    if isinstance(values[0], str) and name.endswith("csv"):
        assert Manifest(folder / name, target="id").target(0) == values[0]  # a text
        return
    row = 1 if values[0] == 1 else 0
    with pytest.raises(ValueError, match=rf"{name}: row {row} .* has .* in 'id', and no type"):
        Manifest(folder / name, target="id")


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl"])
@pytest.mark.parametrize("values", [[10**20, 0.5], [2**63, -1], [2**64, 1], [[2**63, 1], [0.5, 2]]])
def test_floats_that_are_written_as_whole_numbers(folder: Path, name: str, values: list[Any]) -> None:
    """Large whole numbers that floats have exactly are floats if a column has other numbers, too."""
    if name.endswith("csv") and isinstance(values[0], list):
        pytest.skip("cells of CSV are no lists")
    source = Manifest(write(folder / name, [{"path": "a", "id": value} for value in values]), target="id")
    found = [source.target(row) for row in range(2)]
    assert [np.asarray(value).tolist() for value in found] == values
    assert found[0].dtype == np.float64


@pytest.mark.usefixtures("folder")
def test_files_with_percent_signs_in_their_names() -> None:
    """Names in a manifest below a local root are those of files, and not unquoted."""
    names = ["%2Fdata%2Fa.jpg", "x%00y", "%2e%2e"]
    for name in names:
        Path(name).write_text(name)
    source = Manifest(write(Path("m.csv"), [{"path": name} for name in names]), root=Path.cwd())
    assert read_all(source) == [name.encode() for name in names]


@pytest.mark.usefixtures("folder")
def test_names_in_a_local_manifest_stay_below_a_url() -> None:
    """Below a root that is a URL, quoted names do not lead out of it."""
    with pytest.raises(ValueError, match=r"m.csv, row 0: it names the file '%2e%2e/a'"):
        Manifest(write(Path("m.csv"), [{"path": "%2e%2e/a"}]), root="http://host/data")


def test_a_column_that_is_not_used_may_have_any_values(folder: Path) -> None:
    """Values of several types are an error only in the columns that are read."""
    metas: list[Any] = [1, {"x": [1]}, "text", None, [{}]]
    rows = [{"path": "files/0.txt", "label": number, "meta": meta} for number, meta in enumerate(metas)]
    path = write(folder / "m.jsonl", [*rows, {"path": "files/1.txt", "label": 5}])
    source = Manifest(path, target="label")
    assert [source.target(row) for row in range(6)] == list(range(6))
    assert read_all(source)[4:] == [b"0", b"1"]
    assert len(Manifest(path)) == 6
    with pytest.raises(ValueError, match=r"m.jsonl: .*row 1 .*meta"):
        Manifest(path, target="meta")


@pytest.mark.parametrize("place", [0, 1])
def test_large_cells(folder: Path, place: int) -> None:
    """A cell of CSV may have some megabytes; a row of more than 16 MiB is an error."""
    rows = [{"path": "a", "text": "x"}, {"path": "a", "text": f'"{"y" * 3_000_000}"'}]
    path = write(folder / "m.csv", rows[:: 1 - 2 * place])
    source = Manifest(path, target="text")
    assert sorted(len(source.target(row)) for row in range(2)) == [1, 3_000_000]
    path.write_text("path,text\n" + place * "a,x\n" + f'a,"{"y" * (33 << 20)}"\n')
    with pytest.raises(ValueError, match=r"m.csv: "):
        Manifest(path, target="text")


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "m.csv.gz"])
def test_a_read_that_ends_before_the_manifest_is_an_error(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than the file has are an error that names it, not fewer rows."""
    path = write(folder / name, ROWS)
    assert len(Manifest(path)) == SAMPLES

    class EndingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def read(self, descriptor: int, count: int) -> bytes:
            return b""

    monkeypatch.setattr(file_io, "os", EndingOs())
    with pytest.raises(OSError, match=r"bytes, 0 were read.*m\."):
        Manifest(path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
def test_a_manifest_that_would_exhaust_memory(folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that inflates to far more than it has is an error before all of it is inflated."""
    monkeypatch.setattr(expanded, "EXPANDED_BYTES", 1 << 20)
    text = b"path\n" + b"a\n" * (1 << 21)
    name = {"gz": "gzip", "bz2": "bz2", "zst": "zstd"}[suffix]
    with arrow.CompressedOutputStream(arrow.OSFile(str(folder / f"m.csv.{suffix}"), "wb"), name) as file:
        file.write(text)
    with pytest.raises(ValueError, match=rf"m\.csv\.{suffix}: it claims .* in memory, from .* stored; at most 1.0 MiB"):
        Manifest(folder / f"m.csv.{suffix}")


@pytest.mark.parametrize(
    ("path", "arguments", "error", "message"),
    [
        ("gone.csv", {}, FileNotFoundError, r"gone.csv"),
        ("files.csv", {}, IsADirectoryError, r"files.csv"),
        (["a", "b"], {}, TypeError, r"needs the path or URL of a file, got \['a', 'b'\]; Files takes lists"),
        ("m.csv", {"key": 3}, TypeError, r"names of columns as str, got 3"),
        ("m.csv", {"target": 3}, TypeError, r"names of columns as str, got 3"),
        ("m.csv", {"target": ["a", 3]}, TypeError, r"names of columns as str, got 3"),
        ("m.csv", {"to_target": "int"}, TypeError, r"Manifest\(to_target=\) must be callable"),
        ("m.csv", {"targets": "label"}, TypeError, r"target= names a column"),
        ("m.csv", {"max_bytes": 0}, ValueError, r"max_bytes must be at least 1"),
        ("m.csv", {"max_bytes": "1 GB", "start": "label", "length": "label"}, TypeError, r"max_bytes must be an int"),
    ],
)
def test_wrong_arguments(folder: Path, path: Any, arguments: dict[str, Any], error: type, message: str) -> None:
    """Wrong arguments are errors that name them."""
    write(folder / "m.csv", ROWS)
    (folder / "files.csv").mkdir()
    with pytest.raises(error, match=message):
        Manifest(path, **arguments)


@pytest.mark.parametrize("entry", ["/etc/passwd", "../a", "%2e%2e/a", "a\0b", "file:///etc/passwd"])
def test_a_manifest_of_others_names_no_files(server: Any, entry: str) -> None:
    """Entries of a manifest at a URL do not lead to files of this machine, nor out of its folder."""
    server.objects["bucket/lists/m.csv"] = f"path\n{entry}\n".encode()
    with pytest.raises(ValueError, match=r"s3://bucket/lists/m.csv(, row 0)?: "):
        Manifest("s3://bucket/lists/m.csv", options=server.options)


def test_a_missing_manifest(server: Any) -> None:
    """A manifest that is not at its URL is an error that names it, without credentials."""
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/m.csv"):
        Manifest("s3://bucket/m.csv", options=server.options)
    with pytest.raises(FileNotFoundError) as raised:
        Manifest(f"{server.endpoint}/bucket/m.csv?token=hunter-2222")
    assert "hunter" not in str(raised.value)


def test_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow, the error says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    columns.arrow.cache_clear()
    with pytest.raises(ImportError, match=r'pip install "aiofeed\[parquet\]"'):
        Manifest(write(folder / "m.csv", ROWS))


# --- many rows


def test_a_million_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 40 bytes and a label takes less than 150 bytes; no row is a Python object."""
    monkeypatch.chdir(tmp_path)
    count = 1_000_000
    csv, compute = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.compute")
    numbers = arrow.array(np.arange(count)).cast(arrow.string())
    path = compute.binary_join_element_wise("train/class", compute.utf8_lpad(numbers, 30, "0"), "")
    csv.write_csv(arrow.table({"path": path, "label": np.arange(count)}), "m.csv")
    for number in (0, 777_777, 999_999):
        Path(f"train/class{number:030}").parent.mkdir(exist_ok=True)
        Path(f"train/class{number:030}").write_text(str(number))
    del numbers, path
    Manifest("m.csv")  # imports and pools
    used, started = arrow.total_allocated_bytes(), time.process_time()
    tracemalloc.start()
    try:
        source = Manifest("m.csv", target="label")
        python, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 30.0
    assert arrow.total_allocated_bytes() - used + python < 100 * count
    assert python < 20 * count
    assert len(source) == count
    with aiofeed.Feeder(source, decode=scalar, batch_size=3, sampler=[999_999, 0, 777_777]) as feeder:
        [(values, labels)] = list(feeder)
    assert values.tolist() == labels.tolist() == [999_999, 0, 777_777]


# --- feeders


@pytest.fixture(params=["files", "ranges"])
def source(folder: Path, request: pytest.FixtureRequest) -> Manifest:
    """Samples that are files, or parts of a file."""
    if request.param == "files":
        return Manifest(write(folder / "m.csv", ROWS), target="label")
    rows = [{**ranges(number), "label": number} for number in range(SAMPLES)]
    return Manifest(write(folder / "m.csv", rows), target="label", start="at", end="to")


def new_feeder(source: Any, **arguments: Any) -> aiofeed.Feeder[Any]:
    return aiofeed.Feeder(source, **{"decode": scalar, "batch_size": 8, "shuffle": True, "seed": 3, **arguments})


def numbers_of(batch: Any) -> list[int]:
    values, labels = batch
    assert values.tolist() == labels.tolist()
    found: list[int] = values.tolist()
    return found


def epoch(feeder: Any) -> list[int]:
    return [number for batch in feeder for number in numbers_of(batch)]


def test_resume_at_every_position(source: Manifest, folder: Path) -> None:
    """A state continues with the same samples, also on other ranks; a manifest that has changed refuses it."""
    with new_feeder(source) as feeder:
        expected, following = epoch(feeder), epoch(feeder)
    for batches in range(9):
        with new_feeder(source) as feeder:
            iterator = iter(feeder)
            for _ in range(batches):
                next(iterator)
            state = feeder.state_dict()
        with new_feeder(pickle.loads(pickle.dumps(source))) as feeder:
            feeder.load_state_dict(state)
            assert epoch(feeder) == (expected[8 * batches :] or following)
        rest: list[int] = []
        for rank in range(2):
            with new_feeder(source, shard=(rank, 2)) as feeder:
                feeder.load_state_dict(state)
                rest += epoch(feeder)
        assert set(rest) >= set(expected[8 * batches :])
    text = (folder / "m.csv").read_text()
    for old, new in ((",5\n", ",6\n"), ("files/33", "files/34"), (",99,", ",98,")):
        if old in text:
            (folder / "changed.csv").write_text(text.replace(old, new))
            arguments = {"start": "at", "end": "to"} if ",at," in text else {}
            changed = Manifest(folder / "changed.csv", target="label", **arguments)
            with new_feeder(changed) as feeder, pytest.raises(aiofeed.errors.StateError):
                feeder.load_state_dict(state)


def test_files_of_a_manifest(folder: Path) -> None:
    """`Files` takes the paths of a manifest as they are, with other targets."""
    manifest = Manifest(write(folder / "m.csv", ROWS))
    files = aiofeed.Files(manifest.paths, list(range(SAMPLES)))
    assert files.paths is manifest.paths
    with new_feeder(files) as feeder:
        assert sorted(epoch(feeder)) == list(range(SAMPLES))
