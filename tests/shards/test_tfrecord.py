"""`TFRecordShards`: records, checksums and indexes."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aiofeed import Feeder, TFRecordShards
from aiofeed.reports.commands.cli import main
from aiofeed.shards.tfrecord import crc32c
from tests.support import shard_files
from tests.support.shard_files import tfrecord

RECORDS = [bytes([number]) * (number * 13 % 700) for number in range(60)]


def test_known_checksums() -> None:
    """The CRC-32C of the texts of RFC 3720, B.4."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@given(st.integers(0, 1200), st.integers())
def test_checksums_of_any_length(length: int, seed: int) -> None:
    """The CRC-32C equals the one computed bit by bit."""
    data = random.Random(seed).randbytes(length)
    assert crc32c(data) == shard_files.crc32c(data)


def test_random_access_equals_sequential_content(tmp_path: Path, read_all: Any) -> None:
    """Records are those that were written, in any order."""
    (tmp_path / "0.tfrecord").write_bytes(tfrecord(RECORDS[:40]))
    (tmp_path / "1.tfrecord").write_bytes(tfrecord(RECORDS[40:]))
    (tmp_path / "2.tfrecord").write_bytes(b"")
    source = TFRecordShards(f"{tmp_path}/{{0..2}}.tfrecord")
    assert read_all(source) == RECORDS
    assert asyncio.run(source.read_many([59, 0, 40, 39])) == [RECORDS[index] for index in (59, 0, 40, 39)]
    assert source.key(41) == f"{tmp_path}/1.tfrecord[1]"
    with Feeder(source, batch_size=60, decode=lambda data: len(data)) as feeder:
        assert next(iter(feeder)).tolist() == [len(record) for record in RECORDS]


@pytest.mark.parametrize("name", ["x.idx", "x.tfrecord.idx"])
def test_an_index_of_tfrecord2idx(tmp_path: Path, name: str, read_all: Any, scans: list[str]) -> None:
    """Its lines are the offset and the size of each record; it is ignored when the file has grown."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecord(RECORDS))
    lines, at = [], 0
    for record in RECORDS:
        lines.append(f"{at} {len(record) + 16}")
        at += len(record) + 16
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert read_all(TFRecordShards(path)) == RECORDS
    assert scans == []
    path.write_bytes(tfrecord([*RECORDS, b"more"]))
    assert read_all(TFRecordShards(path)) == [*RECORDS, b"more"]
    assert scans == [str(path)]


def test_an_index_that_does_not_fit(tmp_path: Path, read_all: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An index of another file is ignored, with a warning."""
    (tmp_path / "x.tfrecord").write_bytes(tfrecord(RECORDS))
    (tmp_path / "x.idx").write_text("0 20\n20 30\n50 99\n")
    assert read_all(TFRecordShards(tmp_path / "x.tfrecord")) == RECORDS
    assert "x.idx does not fit its shard" in caplog.text


def test_an_index_of_aiofeed(tmp_path: Path, read_all: Any, scans: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The index that `aiofeed index` writes beside a file is used until the file grows."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecord(RECORDS))
    assert main(["index", str(path)]) == 0
    scans.clear()
    assert read_all(TFRecordShards(path)) == RECORDS
    assert scans == []
    path.write_bytes(tfrecord([*RECORDS, b"more"]))
    assert read_all(TFRecordShards(path))[-1] == b"more"
    assert "x.tfrecord.aiofeed does not fit its shard" in caplog.text


def test_damaged_files(tmp_path: Path) -> None:
    """Truncated, damaged, compressed and foreign files are errors with their name."""
    data = tfrecord(RECORDS)
    second = len(tfrecord(RECORDS[:1]))
    cases = {
        "cut": (data[:-1], f"its last record ends at byte {len(data)}, the file at byte {len(data) - 1}"),
        "head": (data[: second + 5], f"there is no record at byte {second}"),
        "length": (data[:second] + b"\1" + data[second + 1 :], f"damaged or truncated: .* at byte {second}"),
        "huge": (struct.pack("<Q", 1 << 60) + data[8:], "this is not a TFRecord file"),
        "packed": (gzip.compress(data), "or it is compressed and has no random access"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            TFRecordShards(tmp_path / name)


def test_a_damaged_record_fails_alone(tmp_path: Path, read_all: Any) -> None:
    """A changed byte fails its record."""
    records = [os.urandom(500) for _ in range(5)]
    data = bytearray(tfrecord(records))
    data[516 * 2 + 100] ^= 4
    (tmp_path / "x").write_bytes(data)
    found = read_all(TFRecordShards(tmp_path / "x"))
    assert [at for at, sample in enumerate(found) if isinstance(sample, Exception)] == [2]
    assert str(found[2]) == f"{tmp_path}/x: record 2 is damaged: its data have another CRC-32C"
