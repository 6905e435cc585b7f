"""All shards: URLs, indexes, feeders, and shards that fail or change."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import struct
import subprocess
import tarfile
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from _pytest.capture import CaptureIO
from hypothesis import given

import aiofeed.shards.indexing as indexing
from aiofeed import DecodeImage, EncodedCache, FailurePolicy, Feeder, Limits, TarShards, TFRecordShards, ZipShards
from aiofeed.common import progress_bar
from aiofeed.errors import ReadError, StateError
from aiofeed.objects import reader as reader_module
from aiofeed.objects.reader import read_range
from aiofeed.reports.commands.cli import main
from aiofeed.shards.index import ShardIndex
from aiofeed.shards.mds import scan_mds
from aiofeed.shards.tar import scan_tar
from aiofeed.shards.tfrecord import scan_tfrecord
from aiofeed.shards.urls import expand_braces
from aiofeed.shards.zip import scan_zip
from tests.support.examples import examples
from tests.support.fault_server import Fault
from tests.support.shard_files import members_of, numbered, tfrecord, write_tar, write_zip

EXAMPLES = examples(25)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard with 30 samples."""
    write_tar(tmp_path / "x.tar", members_of(numbered(0, 30)))
    return tmp_path / "x.tar"


# --- URLs


def test_braces() -> None:
    """Ranges keep the width of their first number, lists their order, and several braces their product."""
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{x,y}-{0..1}") == ["x-0", "x-1", "y-0", "y-1"]
    assert expand_braces("plain") == ["plain"]
    for wrong in ("{3..1}", "{a,{b,c}}", "{}", "{1..}", "a{", "b}"):
        with pytest.raises(ValueError, match=r"brace|range"):
            expand_braces(wrong)


def test_lists_and_globs(tmp_path: Path) -> None:
    """Lists keep their order, globs are sorted, and names with wildcards that exist are themselves."""
    for name in ("b.tar", "a.tar", "[1].tar"):
        write_tar(tmp_path / name, members_of(numbered(0, 1)))
    source = TarShards([f"file://{tmp_path}/b.tar", str(tmp_path / "a.tar")])
    assert [source.key(index).rpartition("/d/")[0][-5:] for index in (0, 1)] == ["b.tar", "a.tar"]
    assert len(TarShards(tmp_path / "?.tar")) == 2
    assert len(TarShards(tmp_path / "[1].tar")) == 1


def test_a_glob_lists_one_folder(shard: Path, server: Any, read_all: Any) -> None:
    """A glob in one folder lists neither the folders in it nor their odd keys; indexes that it lacks are not read."""
    data = shard.read_bytes()
    server.page = 2
    server.objects.update({f"bucket/t/x-{number}.tar": data for number in range(3)})
    server.objects.update({f"bucket/t/deep/{number}.tar": b"" for number in range(50)})
    server.objects.update({"bucket/t/deep//x-9.tar": b"", "bucket/other/x-0.tar": b"", "bucket/t/x-1.idx": b"v0"})
    source = TarShards("s3://bucket/t/x-*.tar", options=server.options)
    assert [shard.key for shard in source._shards] == [f"t/x-{number}.tar" for number in range(3)]
    listings = [request.query for request in server.requests if "list-type" in request.query]
    assert all((query["prefix"], query["delimiter"]) == (["t/"], ["/"]) for query in listings)
    assert len(listings) <= 4
    assert {request.key for request in server.requests if request.key.endswith("idx")} == {"bucket/t/x-1.idx"}
    assert len(read_all(source)) == 90
    server.objects = {key: data for key, data in server.objects.items() if "//" not in key and data}
    assert len(TarShards("s3://bucket/*/x-*.tar", options=server.options)) == 90


def test_wrong_urls(tmp_path: Path) -> None:
    """A missing shard, a glob without a match, a pipe and a number are errors that name it."""
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        TarShards(tmp_path / "none.tar")
    with pytest.raises(FileNotFoundError, match=r"no shard matches '.*none-\*\.tar'"):
        TarShards(tmp_path / "none-*.tar")
    with pytest.raises(ValueError, match="a pipe has no random access") as caught:
        TarShards("pipe:curl -H secret x")
    assert "secret" not in str(caught.value)
    for wrong in (3, [3]):
        with pytest.raises(TypeError, match="got 3"):
            TarShards(wrong)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match=rf"'{tmp_path}' is a folder; {tmp_path}/\* are"):
        TarShards(tmp_path)
    with pytest.raises(ValueError, match="a web server cannot be listed; name shards with"):
        TarShards("http://localhost/*.tar")
    with pytest.raises(ValueError, match="the list of shards is empty"):
        TarShards([])


@pytest.mark.usefixtures("obstore_started")
def test_a_store_is_one_bucket(shard: Path, read_all: Any) -> None:
    """With `store`, URLs are keys of that store, so that URLs of two buckets are an error."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    store.put("t/0.tar", shard.read_bytes())
    assert read_all(TarShards("t/*.tar", store=store)) == list(numbered(0, 30).values())
    assert len(TarShards("s3://any/t/0.tar", store=store)) == 30
    with pytest.raises(ValueError, match=r"store= is one bucket or host, .*\['s3://a', 's3://b'\]"):
        TarShards(["s3://a/0.tar", "s3://b/0.tar"], store=store)


def test_a_list_of_wids(tmp_path: Path) -> None:
    """The JSON list of `widsindex` names shards beside it, and their numbers of samples are checked."""
    write_tar(tmp_path / "a.tar", members_of(numbered(0, 5)))
    shards = [{"url": "a.tar", "nsamples": 5}, {"url": str(tmp_path / "a.tar"), "nsamples": 5}]
    (tmp_path / "index.json").write_text(json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": shards}))
    assert len(TarShards(tmp_path / "index.json")) == 10
    shards[1]["nsamples"] = 6
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": shards}))
    with pytest.raises(ValueError, match=r"a\.tar: it has 5 samples, the list of shards has 6"):
        TarShards(tmp_path / "index.json")
    for wrong in ("[]", '{"shardlist": [{"url": 3}]}'):
        (tmp_path / "index.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"index\.json: it is no list of shards"):
            TarShards(tmp_path / "index.json")
    (tmp_path / "index.json").write_text("3")
    with pytest.raises(ValueError, match=r"index\.json: it is no list of shards"):
        TarShards(tmp_path / "index.json")


def test_a_list_of_others_names_no_files(tmp_path: Path, server: Any) -> None:
    """The names in a list at a URL, and its base path, are URLs or lie beside the list; a file may name any."""
    write_tar(tmp_path / "secret.tar", members_of(numbered(0, 5)))
    server.objects["site/lists/s/ok.tar"] = (tmp_path / "secret.tar").read_bytes()
    secret, list_url = str(tmp_path / "secret.tar"), f"{server.endpoint}/site/lists/list.json"

    def opened(url: Any, base: Any = "") -> int:
        listed = json.dumps({"base_path": base, "shardlist": [{"url": url, "nsamples": 5}]})
        server.objects["site/lists/list.json"] = listed.encode()
        return len(TarShards(list_url))

    for url, base in (
        *((secret, ""), (f"file://{secret}", ""), (f"FILE://localhost{secret}", ""), ("secret.tar", str(tmp_path))),
        *(("secret.tar", f"file://{tmp_path}"), (f"../..{secret}", ""), ("%2e%2e/a.tar", ""), ("ok.tar", "../s")),
        *(("ftp://host/a.tar", ""), ("http:///a.tar", ""), ("a\0.tar", ""), ("s3://", ""), ("ok.tar", 3)),
    ):
        with pytest.raises(ValueError, match=r"site/lists/list\.json: it (names|is no list)|list\.json: '"):
            opened(url, base)
    for url, base in (("s/ok.tar", ""), ("ok.tar", "s"), ("ok.tar", f"{server.endpoint}/site/lists/s/")):
        assert opened(url, base) == 5
    assert opened(f"{server.endpoint}/site/lists/s/ok.tar", "elsewhere") == 5
    server.objects["site/lists/list.json"] = b"[" * 100_000
    with pytest.raises(ValueError, match=r"list\.json: it is no JSON"):
        TarShards(list_url)


@pytest.mark.parametrize("kind", ["tar", "zip", "tfrecord"])
def test_a_read_that_ends_before_the_shard_is_an_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_all: Any
) -> None:
    """Fewer bytes than a file has are an error that names it, in the pass over it and in reads."""
    path = tmp_path / f"x.{kind}"
    samples = numbered(0, 30)
    write = {"tar": write_tar, "zip": write_zip}.get(kind)
    path.write_bytes(tfrecord([bytes([n]) * 500 for n in range(30)]))
    if write is not None:
        write(path, members_of(samples))
    open_source = {"tar": TarShards, "zip": ZipShards, "tfrecord": TFRecordShards}[kind]
    source = open_source(path)

    def ending(file: Any, start: int, end: int) -> bytes:
        return read_range(file, start, max(min(end, 3000), start))

    monkeypatch.setattr(reader_module, "read_range", ending)
    monkeypatch.setattr(indexing, "read_range", ending)
    found = read_all(source)
    assert all(isinstance(each, OSError) and path.name in str(each) for each in found[-5:])
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "empty"))
    with pytest.raises(OSError, match=rf"x\.{kind}"):
        open_source(path)


# --- indexes


def test_an_index_is_made_once(shard: Path, scans: list[str], cache: Path, read_all: Any) -> None:
    """The second source takes the index from the cache; a changed shard and a damaged file are indexed again."""
    expected = read_all(TarShards(shard, "jpg", "cls"))
    again = TarShards(shard, "jpg", "cls")
    assert read_all(again) == expected
    assert again.target(3) == 3
    assert len(scans) == 1
    [saved] = cache.glob("*.index")
    saved.write_bytes(saved.read_bytes()[:-1])
    assert read_all(TarShards(shard, "jpg", "cls")) == expected
    assert len(scans) == 2
    write_tar(shard, members_of(numbered(50, 30)))
    assert TarShards(shard, "jpg", "cls").target(3) == 53
    assert len(scans) == 3


def test_a_cache_that_cannot_be_written_is_a_warning(
    shard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a cache folder the source works and says that the index is not saved."""
    monkeypatch.setenv("AIOFEED_CACHE", str(shard / "file"))
    assert len(TarShards(shard)) == 30
    assert "is not saved" in caplog.text


def dali_index(shard: Path) -> str:
    """What DALI's `wds2idx` writes."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(shard) as tar:
        for each in tar:
            key, _, field = each.name.partition(".")
            samples.setdefault(key, []).append(f"{field} {each.offset_data} {each.size} {each.name}")
    return f"v1.2 {len(samples)}\n" + "".join(" ".join(parts) + "\n" for parts in samples.values())


def energon_index(shard: Path) -> bytes:
    """What energon writes: the offset of each sample, and the end of the last one."""
    starts: dict[str, int] = {}
    with tarfile.open(shard) as tar:
        for each in tar:
            starts.setdefault(each.name.partition(".")[0], each.offset)
        return struct.pack(f"<{len(starts) + 1}Q", *starts.values(), tar.offset)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_indexes_of_other_programs(tmp_path: Path, scans: list[str], form: int, read_all: Any) -> None:
    """Indexes of DALI and energon beside a shard save the pass over it."""
    samples = {f"{'long' * 40}/{number}": {"jpg": b"%d" % number * number, "cls": b"1"} for number in range(1, 20)}
    write_tar(tmp_path / "x.tar", members_of(samples), form=form)
    (tmp_path / "x.idx").write_text(dali_index(tmp_path / "x.tar"))
    dali = TarShards(tmp_path / "x.tar")
    assert read_all(dali) == list(samples.values())
    assert dali.key(0).endswith("long/1")
    assert TarShards(tmp_path / "x.tar", "jpg", "cls").target(5) == 1
    (tmp_path / "x.idx").unlink()
    (tmp_path / "x.tar.idx").write_bytes(energon_index(tmp_path / "x.tar"))
    assert read_all(TarShards(tmp_path / "x.tar")) == list(samples.values())
    assert read_all(TarShards(tmp_path / "x.tar", "jpg")) == [sample["jpg"] for sample in samples.values()]
    assert TarShards(tmp_path / "x.tar").key(3) == f"{tmp_path}/x.tar[3]"
    assert scans == []
    assert TarShards(tmp_path / "x.tar", "jpg", "cls").target(5) == 1
    assert len(scans) == 0  # taken from the cache, into which DALI's index with the targets went


def test_an_index_fits_although_a_sample_lacks_the_field(tmp_path: Path, scans: list[str], read_all: Any) -> None:
    """Whether an index fits does not depend on the fields that are read."""
    write_tar(tmp_path / "x.tar", [("a.txt", b"1"), ("b.jpg", b"2")])
    (tmp_path / "x.idx").write_text(dali_index(tmp_path / "x.tar"))
    assert read_all(TarShards(tmp_path / "x.tar", "jpg"))[1] == b"2"
    assert scans == []


def test_targets_of_an_index_without_them_need_a_pass(shard: Path, scans: list[str]) -> None:
    """Energon's index has no members, so that targets are found by a pass."""
    shard.with_suffix(".tar.idx").write_bytes(energon_index(shard))
    assert TarShards(shard, "jpg", "cls").target(7) == 7
    assert len(scans) == 1


def other_samples(shard: Path, tmp_path: Path) -> bytes:
    write_tar(tmp_path / "other.tar", members_of({f"e{key}": sample for key, sample in numbered(0, 30).items()}))
    return dali_index(tmp_path / "other.tar").encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda shard, _: dali_index(shard).replace(" 512 ", " 1024 ", 1).replace(" 0 d", " 1 d").encode(),
        lambda shard, _: dali_index(shard)[:-40].encode(),
        lambda shard, _: dali_index(shard).replace("v1.2 30", "v1.2 31").encode(),
        lambda shard, _: dali_index(shard).replace("d/0000", "d/ 0000").encode(),
        lambda shard, _: energon_index(shard)[8:16] * 3,
        lambda shard, _: energon_index(shard) + struct.pack("<Q", 1 << 40),
        lambda shard, _: b"v1.2 \xff",
        other_samples,
    ],
)
def test_an_index_that_does_not_fit_its_shard(
    shard: Path, tmp_path: Path, damage: Any, scans: list[str], caplog: pytest.LogCaptureFixture, read_all: Any
) -> None:
    """An index that is damaged, or that of another shard, is ignored with a warning that names it."""
    shard.with_suffix(".idx").write_bytes(damage(shard, tmp_path))
    assert read_all(TarShards(shard)) == list(numbered(0, 30).values())
    assert scans == [str(shard)]
    assert f"{shard.with_suffix('.idx')} does not fit its shard" in caplog.text


def test_an_index_of_a_shard_that_was_extended(
    shard: Path, scans: list[str], caplog: pytest.LogCaptureFixture, read_all: Any
) -> None:
    """An index written before samples were appended is ignored, although those that it has are where it says."""
    assert main(["index", str(shard)]) == 0
    with tarfile.open(shard, "a") as tar:
        tar.addfile(tarfile.TarInfo("e/1.jpg"))
    assert read_all(TarShards(shard)) == [*numbered(0, 30).values(), {"jpg": b""}]
    assert "x.tar.aiofeed does not fit its shard" in caplog.text


def test_an_index_with_other_targets(tmp_path: Path, scans: list[str]) -> None:
    """The targets of another field in an index are not used; those of the right one are read."""
    write_tar(tmp_path / "x.tar", [("a.cls", b"1"), ("a.n", b"2"), ("b.cls", b"3"), ("b.n", b"4")])
    assert main(["index", str(tmp_path / "x.tar"), "--target", "cls"]) == 0
    scans.clear()
    source = TarShards(tmp_path / "x.tar", target="n")
    assert [source.target(0), source.target(1)] == [2, 4]
    assert scans == []


@pytest.mark.parametrize(("skipped", "added"), [(512, ""), (0, "x"), (0, ".x")])
def test_an_index_that_is_wrong_in_few_places(shard: Path, read_all: Any, skipped: int, added: str) -> None:
    """A sample that is elsewhere than its index says, or has another name, fails with shard and key; others do not."""
    lines = dali_index(shard).splitlines()
    words = lines[6].split(" ")
    lines[6] = " ".join([words[0], str(int(words[1]) + skipped), words[2], words[3] + added, *words[4:]])
    shard.with_suffix(".idx").write_text("\n".join(lines) + "\n")
    found = read_all(TarShards(shard))
    assert [number for number, sample in enumerate(found) if isinstance(sample, Exception)] == [5]
    assert str(found[5]).startswith(f"{shard}: the header of a member is not where the index says")


def test_index_files_are_compact(tmp_path: Path) -> None:
    """A sample of two members and a target takes less than 50 bytes in a file, and 34 in memory without one of them."""
    write_tar(tmp_path / "x.tar", ((name, data) for name, data in members_of(numbered(0, 3000))))
    source = TarShards(tmp_path / "x.tar", target="cls")
    [loaded] = source._shards
    data = loaded.index.to_bytes(size=1)
    del loaded, source
    tracemalloc.start()
    try:
        index = ShardIndex.from_bytes(data)[0].select(["jpg"])
        assert tracemalloc.get_traced_memory()[0] / 3000 < 34
    finally:
        tracemalloc.stop()
    index, described = ShardIndex.from_bytes(data)
    assert described == {"size": 1}
    assert index.starts[0] == 0
    assert index.keys is not None
    assert index.keys[2999] == b"d/002999"
    assert len(data) / 3000 < 50
    for at in (0, len(data) // 2):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="index file"):
            ShardIndex.from_bytes(bytes(damaged))


# --- shards that change or fail


def scanned(scan: indexing.Scan, data: bytes) -> ShardIndex:
    """The index that a pass over these bytes makes."""
    try:
        start, end = next(scan)
        for _ in range(10_000):
            start, end = scan.send(data[start:end])
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("the pass does not end")


def whole_shards() -> dict[str, tuple[Any, bytes]]:
    """A pass and the bytes of a shard of each format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        write_tar(path, [*members_of(numbered(0, 6)), ("x" * 150 + ".jpg", b"1")])
        found = {"tar": (scan_tar, path.read_bytes())}
        write_zip(path, members_of(numbered(0, 6)))
        found["zip"] = scan_zip, path.read_bytes()
    found["tfrecord"] = scan_tfrecord, tfrecord([b"abc" * number for number in range(10)])
    found["mds"] = scan_mds, struct.pack("<4L", 2, 18, 20, 25) + b"{}" + b"ababcde"
    return found


SHARDS = whole_shards()


@given(
    kind=st.sampled_from(sorted(SHARDS)),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), max_size=4),
    cut=st.integers(0, 1 << 16),
)
def test_no_damage_gives_an_index_beyond_the_shard(kind: str, changes: list[tuple[int, bytes]], cut: int) -> None:
    """A pass over damaged bytes ends with a `ValueError`, or with an index of ranges within the shard."""
    scan, whole = SHARDS[kind]
    data = bytearray(whole)
    for at, new in changes:
        data[at % len(data) : at % len(data) + len(new)] = new
    del data[len(data) - cut % 1000 if cut % 3 == 0 else len(data) :]
    if kind == "tar":  # with right checksums, so that more than these is tested
        for at in range(0, len(data) - 511, 512):
            if data[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    try:
        index = scanned(scan(len(data), ("cls",)), bytes(data))
    except ValueError:
        return
    assert all(int(start) <= int(end) <= len(data) for start, end in zip(index.starts, index.ends, strict=True))


def test_a_shard_replaced_in_mid_epoch_is_an_error(shard: Path) -> None:
    """Samples of a shard that is replaced by one of equal size fail with its name; a new source reads the new ones."""
    write_tar(shard, members_of(numbered(100_000, 800)))
    write_tar(shard.with_name("new.tar"), members_of(numbered(200_000, 800)))
    limits = Limits(prefetch_batches=1)
    with Feeder(TarShards(shard, "cls"), batch_size=2, decode=number, shuffle=False, limits=limits) as feeder:
        batches = iter(feeder)
        next(batches)
        os.replace(shard.with_name("new.tar"), shard)
        with pytest.raises(ReadError, match=r"x\.tar/d/100\d\d\d.*the object has changed since its index"):
            list(batches)
    assert asyncio.run(TarShards(shard, "cls").read(0)) == b"200000"


def test_samples_of_a_lost_shard_are_skipped(tmp_path: Path) -> None:
    """With on_error="skip" the samples of a shard that is lost are skipped and counted, and the order is unchanged."""
    for at in range(3):
        write_tar(tmp_path / f"{at}.tar", members_of(numbered(at * 10, 10)))
    source = TarShards(tmp_path / "*.tar", "cls")
    options: Any = {"batch_size": 5, "decode": number, "shuffle": True, "seed": 3}
    with Feeder(source, **options) as feeder:
        whole = [batch.tolist() for batch in feeder]
    (tmp_path / "1.tar").unlink()
    with Feeder(source, **options, on_error=FailurePolicy("skip", max_failures=10)) as feeder:
        rest = [batch.tolist() for batch in feeder]
        assert len(feeder.failures) == 10
        assert all(f"{tmp_path}/1.tar/d/" in failure.key for failure in feeder.failures)
    assert rest == [[each for each in batch if not 10 <= each < 20] for batch in whole]


def test_a_file_that_ends_within_a_range(shard: Path) -> None:
    """A range that a file does not have is an error, and not a shorter sample."""
    [opened] = TarShards(shard)._shards
    with pytest.raises(OSError, match=r"ends before byte \d+.*x\.tar"):
        opened.read_now([(0, 10), (opened.size - 10, opened.size + 1)])


# --- feeders


def test_fast_files_are_read_in_decode_threads(shard: Path, read_all: Any) -> None:
    """While reads take little time, `read_now` gives the samples and the errors of `read_many`."""
    write_tar(shard.with_name("y.tar"), [("a.jpg", b"1"), ("b.cls", b"2")])
    source = TarShards([shard, shard.with_name("y.tar")], "jpg")
    expected = read_all(source)
    source._seconds = 1e-6
    assert source.answers_at_once
    assert read_all(source)[:-1] == source.read_now(range(32))[:-1] == expected[:-1]
    assert repr(source.read_now([31, 0])[0]) == repr(expected[-1])
    source._seconds = 1.0
    assert not source.answers_at_once


def number(data: bytes) -> int:
    """A decoder."""
    return int(data)


def test_images_and_targets(tmp_path: Path, jpeg_folder: Path) -> None:
    """`data` and `target` give what `ImageFolder` gives for the same files."""
    from aiofeed import ImageFolder

    folder = ImageFolder(jpeg_folder)
    pairs = [(f"{at:04}", Path(path).read_bytes(), folder.targets[at]) for at, path in enumerate(folder.paths)]
    write_tar(
        tmp_path / "x.tar",
        [pair for key, data, target in pairs for pair in ((f"{key}.jpg", data), (f"{key}.cls", b"%d" % target))],
    )
    options: Any = {"batch_size": 8, "decode": DecodeImage(32), "seed": 1, "shuffle": True}
    with Feeder(folder, **options) as first, Feeder(TarShards(tmp_path / "x.tar", "jpg", "cls"), **options) as second:
        for (images, labels), (others, targets) in zip(first, second, strict=True):
            assert images.equal(others)
            assert labels.equal(targets)


def test_resume(shard: Path) -> None:
    """A saved state goes on exactly with another source of the same shards, and is refused for other fields."""

    def new_feeder(data: str = "cls") -> Feeder[Any]:
        return Feeder(TarShards(shard, data, "cls"), batch_size=4, decode=number, seed=1, shuffle=True)

    with new_feeder() as feeder:
        whole = [labels.tolist() for _, labels in feeder]
    for position in range(8):
        with new_feeder() as feeder, new_feeder() as second:
            batches = iter(feeder)
            for _ in range(position):
                next(batches)
            second.load_state_dict(feeder.state_dict())
            assert [labels.tolist() for _, labels in second] == whole[position:]
    with new_feeder("jpg") as other, pytest.raises(StateError):
        other.load_state_dict(feeder.state_dict())


@pytest.mark.slow
def test_worker_processes(shard: Path) -> None:
    """Worker processes read the same batches."""
    batches = []
    for engine in ("thread", "process:2"):
        source = TarShards(shard, "cls", "cls")
        with Feeder(source, batch_size=4, decode=number, seed=1, shuffle=True, engine=engine) as feeder:
            batches.append([[part.tolist() for part in batch] for batch in feeder])
    assert batches[0] == batches[1]


# --- URLs of objects


def test_objects(server: Any, tmp_path: Path, scans: list[str], read_all: Any) -> None:
    """Shards of a bucket are found by a glob, indexed by few requests, and read by one request each."""
    for number in range(3):
        write_tar(tmp_path / "x.tar", members_of(numbered(number * 200, 200)))
        server.objects[f"bucket/t/{number}.tar"] = (tmp_path / "x.tar").read_bytes()
    server.objects["bucket/t/9.tar/x"] = server.objects["bucket/t/deep/0.tar"] = server.objects[
        "bucket/t/other.txt"
    ] = b"x"
    source = TarShards("s3://bucket/t/?.tar", options=server.options)
    assert len(source) == 600
    assert server.count <= 1 + 3 * (1 + 3 + 1)  # the list; for each shard its size, its indexes and one pass
    assert read_all(source) == list(numbered(0, 600).values())
    before = server.count
    found = asyncio.run(source.read_many([0, 599, 5, 9, 598]))
    assert server.count - before == 2
    assert found[1] == numbered(599, 1)["d/000599"]
    assert source.key(599) == "s3://bucket/t/2.tar/d/000599"
    assert source.storage_statistics().requests > 0  # type: ignore[union-attr]
    before = server.count
    TarShards("s3://bucket/t/{0..2}.tar", options=server.options)
    assert server.count - before == 3
    assert len(scans) == 3


@pytest.fixture
def labels(server: Any, tmp_path: Path) -> TarShards:
    """The labels 0 to 399 in four shards of a bucket."""
    for at in range(4):
        write_tar(tmp_path / "x.tar", members_of(numbered(at * 100, 100)))
        server.objects[f"bucket/{at}.tar"] = (tmp_path / "x.tar").read_bytes()
    return TarShards("s3://bucket/{0..3}.tar", "cls", options=server.options)


@pytest.mark.parametrize("shuffle", [True, "window:2"])
def test_a_shuffled_epoch_needs_few_requests(server: Any, labels: TarShards, shuffle: Any) -> None:
    """The ranges of a shard that fall into the look-ahead are one request."""
    before = server.count
    with Feeder(labels, batch_size=8, decode=number, shuffle=shuffle, seed=1) as feeder:
        found = [label for batch in feeder for label in batch.tolist()]
    assert sorted(found) == list(range(400))
    assert found != sorted(found)
    assert server.count - before < 60


def test_samples_of_a_cache_are_not_requested_again(server: Any, labels: TarShards, tmp_path: Path) -> None:
    """Look-ahead reads through the cache: the second epoch makes no requests, and samples have next uses."""
    cache = EncodedCache(tmp_path / "encoded.sqlite", 1 << 20)
    with Feeder(labels, batch_size=8, decode=number, shuffle=True, seed=1) as feeder:
        expected = [[label for batch in feeder for label in batch.tolist()] for _ in range(2)]
    with Feeder(labels, batch_size=8, decode=number, shuffle=True, seed=1, cache=cache) as feeder:
        assert [label for batch in feeder for label in batch.tolist()] == expected[0]
        before = server.count
        assert [label for batch in feeder for label in batch.tolist()] == expected[1]
        assert server.count == before
        storage = feeder.statistics().storage
        assert storage is not None
        assert storage.cache_misses == 400
        assert storage.cache_hits >= 400  # of the third epoch, too, which is read ahead


def test_look_ahead_under_random_faults(server: Any, labels: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever faults come, with whatever look-ahead, an epoch is exactly that without faults."""
    monkeypatch.setattr(reader_module, "backoff_s", lambda attempt, jitter: 0.001)
    faults = st.sampled_from([None, Fault(status=503), Fault(close=True), Fault(delay_s=0.01), Fault(cut=9)])
    options: dict[str, Any] = {"batch_size": 8, "decode": number, "shuffle": True, "seed": 1}
    with Feeder(labels, **options) as feeder:
        expected = [label for batch in feeder for label in batch.tolist()]

    @hypothesis.settings(max_examples=examples(7), suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
    @given(st.lists(faults, max_size=60), st.integers(1, 4000), st.booleans())
    def check(schedule: list[Fault | None], nbytes: int, stops: bool) -> None:
        server.count = 0
        server.schedule = lambda request: schedule[request.number] if request.number < len(schedule) else None
        with Feeder(labels, limits=Limits(lookahead_bytes=nbytes), **options) as feeder:
            if stops:
                for _ in feeder:
                    break
                feeder.set_epoch(0)
            assert [label for batch in feeder for label in batch.tolist()] == expected

    check()


def test_files_and_objects_together(server: Any, tmp_path: Path) -> None:
    """A list may name files and objects; a feeder reads all of them in any order, epoch after epoch."""
    for at in range(3):
        write_tar(tmp_path / f"{at}.tar", members_of(numbered(at * 50, 50)))
    server.objects["bucket/1.tar"] = (tmp_path / "1.tar").read_bytes()
    urls = [tmp_path / "0.tar", "s3://bucket/1.tar", tmp_path / "2.tar"]
    source = TarShards(urls, "cls", "cls", options=server.options)
    with Feeder(source, batch_size=8, decode=number, shuffle=True, seed=1) as feeder:
        for _ in range(5):
            assert sorted(label for _, labels in feeder for label in labels.tolist()) == list(range(150))
        assert feeder.statistics().storage is not None


def test_an_object_replaced_in_mid_epoch(server: Any, tmp_path: Path) -> None:
    """An object with another etag fails its samples with its name, and is indexed again by the next source."""
    for number in (0, 50):
        write_tar(tmp_path / f"{number}.tar", members_of(numbered(number, 30)))
    server.objects["bucket/x.tar"] = (tmp_path / "0.tar").read_bytes()
    source = TarShards("s3://bucket/x.tar", "cls", options=server.options)
    server.objects["bucket/x.tar"] = (tmp_path / "50.tar").read_bytes()
    [found] = asyncio.run(source.read_many([3]))
    assert "s3://bucket/x.tar" in str(found)
    assert "has changed" in str(found)
    assert asyncio.run(TarShards("s3://bucket/x.tar", "cls", options=server.options).read(3)) == b"53"


def test_an_uploaded_index(server: Any, shard: Path, scans: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """An index that was written for a file serves its copy in a bucket."""
    assert main(["index", str(shard), "--target", "cls"]) == 0
    scans.clear()
    server.objects["bucket/x.tar"] = shard.read_bytes()
    server.objects["bucket/x.tar.aiofeed"] = Path(f"{shard}.aiofeed").read_bytes()
    source = TarShards("s3://bucket/x.tar", "jpg", "cls", options=server.options)
    assert source.target(9) == 9
    assert scans == []
    assert caplog.text == ""


# --- the command


def test_the_index_command(tmp_path: Path, scans: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`aiofeed index` writes an index beside each shard, or to a folder, and names shards that fail."""
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", members_of(numbered(0, 5)))
    assert main(["index", f"{tmp_path}/{{a,b}}.tar"]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/a.tar.aiofeed: 5 samples" in output
    assert "10 samples" in output
    scans.clear()
    assert len(TarShards(tmp_path / "*.tar")) == 10
    assert scans == []
    (tmp_path / "b.tar").write_bytes(b"no tar")
    assert main(["index", str(tmp_path / "b.tar"), "--output", str(tmp_path / "out")]) == 1
    assert f"{tmp_path}/b.tar: " in capsys.readouterr().err
    assert main(["index", str(tmp_path / "a.tar"), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "a.tar.aiofeed").exists()


def test_no_request_leaves_credentials_in_errors(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither errors nor logs contain the credentials of options."""
    options = {**server.options, "secret_access_key": "verysecret"}
    server.objects["bucket/x.tar"] = b"no tar"
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError, match=r"s3://bucket/x\.tar") as caught:
        TarShards("s3://bucket/x.tar", options=options)
    assert "verysecret" not in f"{caught.value!r} {caplog.text}"


@pytest.mark.integration
def test_indexes_of_gnu_tar(shard: Path, read_all: Any) -> None:
    """GNU tar writes a shard that reads the same."""
    folder = shard.with_name("files")
    folder.mkdir()
    for name, data in members_of(numbered(0, 5)):
        (folder / name.rpartition("/")[2]).write_bytes(data)
    names = sorted(path.name for path in folder.iterdir())
    subprocess.run(["tar", "-cf", str(shard), "-C", str(folder), *names], check=True, timeout=30)
    assert read_all(TarShards(shard)) == [dict(sorted(sample.items())) for sample in numbered(0, 5).values()]


def test_indexing_shows_progress(tmp_path, monkeypatch, caplog, capsys):
    """Opening shards that takes long logs how many are open, or shows a bar on a terminal."""
    pytest.importorskip("tqdm")
    monkeypatch.delenv("RANK", raising=False)
    for name in ("LOG_EVERY_S", "BAR_AFTER_S", "BAR_EVERY_S"):
        monkeypatch.setattr(progress_bar, name, -1.0)
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", members_of(numbered(10 * number, 2)))
    assert len(TarShards(str(tmp_path / "{0..2}.tar"))) == 6
    assert re.findall(r"opened (\d) of 3 shards", caplog.text) == ["1", "2", "3"]
    caplog.clear()
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True)
    TarShards(str(tmp_path / "{0..2}.tar"))
    assert "opening shards:  67%" in capsys.readouterr().err
    assert caplog.text == ""
