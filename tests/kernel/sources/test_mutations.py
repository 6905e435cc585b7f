"""Damaged and foreign files: every reader of an index, a header or a list gives errors that name the file."""

from __future__ import annotations

import asyncio
import gzip
import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aiofeed import FeedError, ImageFolder, Manifest, MDSShards, ParquetRows, TarShards, TFRecordShards, ZipShards
from aiofeed.objects import reader as reader_module
from aiofeed.reports.commands.cli import main
from aiofeed.shards.index import MAGIC
from tests.shards.test_mds import COLUMNS, compress, sample
from tests.support import fault_server
from tests.support.fault_server import FaultServer
from tests.support.mutations import mutated
from tests.support.shard_files import members_of, numbered, tfrecord, write_mds, write_tar, write_zip

pytestmark = pytest.mark.usefixtures("arrow_started", "obstore_started")

SAMPLES = numbered(3, 6)
RECORDS = [bytes([number]) * 40 * number for number in range(6)]


@pytest.fixture
def server(object_server: FaultServer) -> FaultServer:
    """A server without objects."""
    return object_server


class Case(NamedTuple):
    """A reader of a file.

    Args:
        make: Writes files to a folder; returns the one to change.
        open: Makes a source of the folder.
        text: Whether the file is a text.
        seal: Makes the checksum of a changed file right.
        is_right: Whether a sample with this key and target is one of those that were written.
    """

    make: Callable[[Path], Path]
    open: Callable[[Path], Any]
    text: bool = False
    seal: Callable[[bytes], bytes] = bytes
    is_right: Callable[[str, Any, Any], bool] = lambda key, sample, target: True


def of_tar(folder: Path) -> Path:
    write_tar(folder / "x.tar", members_of(SAMPLES))
    return folder / "x.tar"


def open_tar(folder: Path) -> Any:
    return TarShards(folder / "x.tar", data="jpg", target="cls")


def of_zip(folder: Path) -> Path:
    write_zip(folder / "x.zip", members_of(SAMPLES), method=8)
    return folder / "x.zip"


def of_tfrecord(folder: Path) -> Path:
    (folder / "x.tfrecord").write_bytes(tfrecord(RECORDS))
    return folder / "x.tfrecord"


def of_mds(name: str, compression: str = "") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_mds(folder, [[sample(number) for number in range(first, first + 4)] for first in (0, 4)], COLUMNS)
        if compression:
            compress(folder, compression)
        return folder / name

    return make


def of_wids(folder: Path) -> Path:
    of_tar(folder)
    listed = {"__kind__": "wids", "wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 6}]}
    (folder / "list.json").write_text(json.dumps(listed))
    return folder / "list.json"


def of_index(folder: Path) -> Path:
    path = of_tar(folder)
    main(["index", "--target", "cls", str(path)])
    return folder / "x.tar.aiofeed"


def of_cache(folder: Path) -> Path:
    of_tar(folder)
    open_tar(folder)
    [path] = (folder / "cache").glob("*.index")
    return path


def of_dali(folder: Path) -> Path:
    of_tar(folder)
    lines = [f"v1.2 {len(SAMPLES)}"]
    at = 512
    for key, fields in SAMPLES.items():
        words = []
        for field, data in fields.items():
            words += [field, str(at), str(len(data)), f"{key}.{field}"]
            at += 512 + -(-len(data) // 512) * 512
        lines.append(" ".join(words))
    (folder / "x.idx").write_text("\n".join(lines) + "\n")
    return folder / "x.idx"


def of_tfrecord_index(folder: Path) -> Path:
    of_tfrecord(folder)
    at, lines = 0, []
    for record in RECORDS:
        lines.append(f"{at} {len(record) + 16}\n")
        at += len(record) + 16
    (folder / "x.idx").write_text("".join(lines))
    return folder / "x.idx"


def of_parquet(folder: Path) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": number, "text": f"t{number}", "data": bytes([number]) * 30} for number in range(12)]
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "x.parquet", row_group_size=5)
    return folder / "x.parquet"


def of_manifest(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pytest.importorskip("pyarrow")
        (folder / "a.bin").write_bytes(bytes(100))
        rows = [{"path": "a.bin", "label": number, "at": number, "size": 10, "x": f"t{number}"} for number in range(8)]
        lines = [json.dumps(row) for row in rows]
        if "csv" in name:
            lines = [",".join(rows[0]), *[",".join(map(str, row.values())) for row in rows]]
        text = ("\n".join(lines) + "\n").encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return folder / name

    return make


def open_manifest(name: str) -> Callable[[Path], Any]:
    return lambda folder: Manifest(folder / name, target=["label", "x"], start="at", length="size")


def sealed(data: bytes) -> bytes:
    """An index file with the checksum of its contents."""
    body = data[len(MAGIC) + 4 :]
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def is_pair(key: str, sample: Any, target: Any) -> bool:
    return {"jpg": sample, "cls": b"%d" % target} == SAMPLES.get(key.partition("x.tar/")[2])


def is_picture(key: str, sample: Any, target: Any) -> bool:
    """Whether a sample has its picture; names and targets in an index with the right checksum are not read again."""
    named = SAMPLES.get(key.partition("x.tar/")[2])
    return sample in ([named["jpg"]] if named else [each["jpg"] for each in SAMPLES.values()])


CASES = {
    "tar": Case(of_tar, open_tar),
    "zip": Case(of_zip, lambda folder: ZipShards(folder / "x.zip", data="jpg", target="cls")),
    "tfrecord": Case(of_tfrecord, lambda folder: TFRecordShards(folder / "x.tfrecord")),
    "mds": Case(of_mds("shard.00000.mds"), lambda folder: MDSShards(folder, target="label")),
    "mds index": Case(of_mds("index.json"), lambda folder: MDSShards(folder, target="label"), text=True),
    "mds zstd": Case(of_mds("index.json", "zstd"), MDSShards, text=True),
    "mds zstd shard": Case(of_mds("shard.00001.mds.zstd", "zstd"), MDSShards),
    "wids": Case(of_wids, lambda folder: TarShards(folder / "list.json", data="jpg"), text=True),
    "index": Case(of_index, open_tar, True, is_right=is_pair),
    "sealed index": Case(of_index, open_tar, True, sealed, is_picture),
    "cached index": Case(of_cache, open_tar, True, is_right=is_pair),
    "sealed cached index": Case(of_cache, open_tar, True, sealed, is_picture),
    "dali": Case(of_dali, open_tar, True, is_right=is_pair),
    "tfrecord index": Case(
        of_tfrecord_index,
        lambda folder: TFRecordShards(folder / "x.tfrecord"),
        True,
        is_right=lambda key, sample, target: sample in RECORDS,
    ),
    "parquet": Case(of_parquet, lambda folder: ParquetRows(folder / "x.parquet", target="id")),
    "csv": Case(of_manifest("m.csv"), open_manifest("m.csv"), text=True),
    "jsonl": Case(of_manifest("m.jsonl"), open_manifest("m.jsonl"), text=True),
    "csv.gz": Case(of_manifest("m.csv.gz"), open_manifest("m.csv.gz")),
    "parquet manifest": Case(of_parquet, lambda folder: Manifest(folder / "x.parquet", key="text", target="id")),
}


def wrong(case: Case, folder: Path) -> str | None:
    """What is wrong with the reaction of a reader to the files in a folder."""

    def problem(error: BaseException) -> str | None:
        # The path of a file in the folder, or that of a file which a list names, or the names of fields of all shards.
        named = any(name in str(error) for name in (str(folder), "/dev/null", "no sample has"))
        if isinstance(error, (FeedError, ValueError, OSError)) and named and str(error):
            return None
        return f"{type(error).__name__}: {error}"

    try:
        source = case.open(folder)
        found = asyncio.run(source.read_many(range(len(source))))
    except Exception as error:
        return problem(error)
    for number, value in enumerate(found):
        if isinstance(value, Exception):
            if (found_problem := problem(value)) is not None:
                return found_problem
            continue
        try:
            target = source.target(number) if source.target is not None else None
        except ValueError:
            continue  # a feeder adds the key of the sample
        if not case.is_right(source.key(number), value, target):
            return f"sample {number} is {value!r:.100} with the target {target!r}"
    return None


SEEDS = [range(24), pytest.param(range(1000, 2000), marks=pytest.mark.slow)]


def check(name: str, seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOFEED_CACHE", str(folder / "cache"))
    case = CASES[name]
    path = case.make(folder)
    data = path.read_bytes()
    in_cache = path.parent != folder
    failures = {}
    for seed in seeds:
        if not in_cache:
            monkeypatch.setenv("AIOFEED_CACHE", str(folder / f"cache-{seed}"))
        path.write_bytes(case.seal(mutated(data, seed, text=case.text)))
        with warnings.catch_warnings(action="ignore"):
            if (found := wrong(case, folder)) is not None:
                failures[seed] = found
    assert not failures


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_damaged_files_are_errors_that_name_them(
    name: str, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed file is read without another sample, or is an error of ours that names a file."""
    check(name, seeds, tmp_path, monkeypatch)


# --- listings


def listing_errors(seeds: range, server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What is wrong with sources of a store whose listings are changed."""
    monkeypatch.setattr(reader_module, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(reader_module, "RETRY_S", 0.0)
    server.objects.update({f"bucket/c{number % 2}/{number}.jpg": b"x" * number for number in range(1, 9)})
    page, failures = fault_server._Connection._page, dict[int, str]()
    for seed in seeds:

        def changed(connection: Any, *arguments: Any, seed: int = seed) -> str:
            return mutated(page(connection, *arguments).encode(), seed, text=True).decode(errors="replace")

        monkeypatch.setattr(fault_server._Connection, "_page", changed)
        for open_source in (
            lambda: ImageFolder("s3://bucket", options=server.options, refresh=True),
            lambda: TarShards("s3://bucket/c0/*.jpg", options=server.options),
        ):
            try:
                open_source()
            except (ValueError, OSError) as error:
                if "s3://bucket" not in str(error):
                    failures[seed] = repr(error)
            except Exception as error:  # the subject of the test
                failures[seed] = repr(error)
    return failures


@pytest.mark.parametrize("seeds", SEEDS)
def test_damaged_listings(seeds: range, server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed answer to the request for a listing is an error of ours that has the URL, or lists some objects."""
    assert not listing_errors(seeds, server, monkeypatch)


def cached_listing_errors(seeds: range, server: FaultServer, folder: Path) -> dict[int, str]:
    """What is wrong with sources whose cached listing is changed."""
    server.objects.update({f"bucket/c{number % 2}/{number}.jpg": b"x" * number for number in range(1, 9)})
    expected = list(ImageFolder("s3://bucket", options=server.options).paths)
    [path] = folder.glob("*.listing")
    data, failures = path.read_bytes(), dict[int, str]()
    for seed in seeds:
        path.write_bytes(mutated(data, seed, text=True))
        try:
            source = ImageFolder("s3://bucket", options=server.options)
            if list(source.paths) != expected:
                failures[seed] = str(list(source.paths))
        except Exception as error:  # the subject of the test
            failures[seed] = repr(error)
    return failures


@pytest.mark.parametrize("seeds", SEEDS)
def test_damaged_cached_listings(
    seeds: range, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached listing that was changed is made again."""
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path))
    assert not cached_listing_errors(seeds, server, tmp_path)
