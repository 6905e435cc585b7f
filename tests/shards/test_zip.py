"""`ZipShards`: stored and deflated members, zip64, and damaged files."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from aiofeed import ZipShards
from aiofeed.kernel.core import validation
from tests.support.shard_files import members_of, numbered, write_zip


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_random_access_equals_sequential_content(tmp_path: Path, method: int, read_all: Any) -> None:
    """Samples of stored and deflated members are those that were written, in any order, with their targets."""
    for number in range(2):
        write_zip(tmp_path / f"{number}.zip", members_of(numbered(number * 20, 20)), method=method)
    source = ZipShards(tmp_path / "*.zip")
    expected = list(numbered(0, 40).values())
    assert read_all(source) == expected
    assert asyncio.run(source.read_many([39, 3, 3])) == [expected[index] for index in (39, 3, 3)]
    assert source.key(20) == f"{tmp_path}/1.zip/d/000020"
    for _ in range(2):  # the second time from the cache
        chosen = ZipShards(tmp_path / "*.zip", "jpg", "cls")
        assert read_all(chosen) == [sample["jpg"] for sample in expected]
        assert [chosen.target(index) for index in range(40)] == list(range(40))


class Unseekable(io.RawIOBase):
    """A file that is written from beginning to end, so that sizes follow the members."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Append."""
        self.data += bytes(data)
        return len(data)


def test_joined_zip_files_are_refused(tmp_path: Path) -> None:
    """Zip files joined by `cat` are an error: the directory at the end has the members of the last one only."""
    for number in range(2):
        write_zip(tmp_path / f"{number}.zip", members_of(numbered(number * 20, 20)))
    first, second = [(tmp_path / f"{number}.zip").read_bytes() for number in range(2)]
    (tmp_path / "both.zip").write_bytes(first + second)
    with pytest.raises(ValueError, match=rf"both\.zip: several zip files .* begins at byte {len(first)}: keep them"):
        ZipShards(tmp_path / "both.zip")


def test_zip64_comments_prefixes_and_streams(tmp_path: Path, read_all: Any) -> None:
    """Archives with 64-bit numbers, with a comment, behind other bytes and written to a pipe are read."""
    expected = [{"jpg": b"a" * 100}, {"jpg": b"b" * 100}]
    stream = Unseekable()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:  # type: ignore[arg-type]
        for name in "ab":
            with file.open(f"{name}.jpg", "w", force_zip64=True) as member:
                member.write(name.encode() * 100)
        file.comment = b"PK\5\6 is no end"
        file.mkdir("folder.jpg")
    (tmp_path / "x.zip").write_bytes(b"#!/bin/sh\n" * 50 + stream.data)
    assert read_all(ZipShards(tmp_path / "x.zip")) == expected


def test_names_of_both_encodings(tmp_path: Path) -> None:
    """Names are UTF-8 if their flag says so, and code page 437 otherwise."""
    write_zip(tmp_path / "x.zip", [("x.jpg", b"1"), ("é.jpg", b"2")])
    (tmp_path / "x.zip").write_bytes((tmp_path / "x.zip").read_bytes().replace(b"x.jpg", b"\x81.jpg"))
    source = ZipShards(tmp_path / "x.zip", "jpg")
    assert [source.key(index)[-2:] for index in range(len(source))] == ["/ü", "/é"]


@pytest.mark.slow
def test_more_members_than_16_bits_count(tmp_path: Path, read_all: Any) -> None:
    """An archive with a zip64 end record is read."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        for number in range(66_000):
            file.writestr(zipfile.ZipInfo(f"{number}.a"), b"")
    source = ZipShards(tmp_path / "x.zip")
    assert len(source) == 66_000
    assert source.key(65_999).endswith("/65999")


def test_numbers_of_64_bits_in_the_directory(tmp_path: Path, read_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and offsets in the extra field of an entry are read."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    write_zip(tmp_path / "x.zip", [("a.jpg", b"1" * 10), ("b.jpg", b"2" * 100), ("c.jpg", b"3")])
    assert read_all(ZipShards(tmp_path / "x.zip")) == [{"jpg": b"1" * 10}, {"jpg": b"2" * 100}, {"jpg": b"3"}]


def test_damaged_files(tmp_path: Path, read_all: Any) -> None:
    """Truncated, encrypted, foreign and otherwise compressed archives are errors with their name."""
    write_zip(tmp_path / "x.zip", members_of(numbered(0, 5)))
    data = (tmp_path / "x.zip").read_bytes()
    cases = {
        "cut": (data[: len(data) // 2], "or it is truncated"),
        "head": (data[-200:], "damaged|truncated"),
        "empty": (b"", "not a zip file"),
        "text": (b"text" * 100, "not a zip file"),
    }
    directory = data.index(b"PK\1\2")
    cases["entry"] = data[:directory] + b"xx" + data[directory + 2 :], "the directory of the zip file is damaged"
    encrypted = bytearray(data)
    encrypted[directory + 8] |= 1
    cases["secret"] = bytes(encrypted), "the member 'd/000000.jpg' is encrypted"
    for name, (content, message) in cases.items():
        (tmp_path / f"{name}.zip").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.zip: .*({message})"):
            ZipShards(tmp_path / f"{name}.zip")
    write_zip(tmp_path / "bz.zip", [("a.jpg", b"1")], method=zipfile.ZIP_BZIP2)
    with pytest.raises(ValueError, match="compressed with method 12; stored and deflated"):
        ZipShards(tmp_path / "bz.zip")


def test_members_that_inflate_too_far(tmp_path: Path, read_all: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that inflates to other bytes than its directory says, or claims far more than it has, is an error."""
    path = tmp_path / "x.zip"
    write_zip(path, [("a.jpg", bytes(5_000_000)), ("b.jpg", b"1")], method=zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2") + 24
    for size in (100, 4_999_999, 5_000_001):
        data[at : at + 4] = size.to_bytes(4, "little")
        path.write_bytes(data)
        tracemalloc.start()
        first, second = read_all(ZipShards(path, "jpg"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert f"x.zip: a member is cut, or has another size than the {size} bytes" in str(first)
        assert second == b"1"
        assert size > 100 or peak < 4_000_000
    monkeypatch.setattr(validation, "EXPANDED_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"y\.zip: the member 'a.jpg' claims 4\.8 MiB in memory"):
        ZipShards(path.rename(tmp_path / "y.zip"))


def test_members_are_inflated_in_threads(server: Any, tmp_path: Path) -> None:
    """The loop's thread does not wait until members are inflated."""
    threads = set()

    class Recorded(ZipShards):
        def _unpack(self, *arguments: Any) -> dict[str, bytes]:
            threads.add(threading.current_thread())
            return super()._unpack(*arguments)

    write_zip(tmp_path / "x.zip", [("a.jpg", b"1")])
    server.objects["bucket/x.zip"] = (tmp_path / "x.zip").read_bytes()
    assert asyncio.run(Recorded("s3://bucket/x.zip", "jpg", options=server.options).read(0)) == b"1"
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_fails_alone(tmp_path: Path, method: int, read_all: Any) -> None:
    """A changed byte of a member fails its sample, with the name of the shard."""
    members = [(f"{number}.jpg", os.urandom(1000)) for number in range(5)]
    write_zip(tmp_path / "x.zip", members, method=method)
    data = bytearray((tmp_path / "x.zip").read_bytes())
    data[data.index(b"2.jpg") + 500] ^= 1
    (tmp_path / "x.zip").write_bytes(data)
    found = read_all(ZipShards(tmp_path / "x.zip", "jpg"))
    assert [at for at, sample in enumerate(found) if isinstance(sample, Exception)] == [2]
    assert f"{tmp_path}/x.zip: a member" in str(found[2])


def test_two_requests_open_an_object(server: Any, tmp_path: Path, read_all: Any) -> None:
    """The directory is read by one request, whatever the size of the shard."""
    write_zip(tmp_path / "x.zip", [(f"{number}.bin", bytes(1 << 20)) for number in range(8)])
    server.objects["bucket/x.zip"] = (tmp_path / "x.zip").read_bytes()
    source = ZipShards("s3://bucket/x.zip", "bin", options=server.options)
    assert server.count == 2
    assert read_all(source) == [bytes(1 << 20)] * 8
